"""docs/architecture.md names every file of the house, and none that is gone; its pictures are those of this tree."""

import re
import subprocess
import sys
from pathlib import PurePosixPath

import pytest
from conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
HOUSE = ("torch-ext", "paged_decode_cpu", "paged_decode_cuda", "paged_decode_metal", "tests", "tools", "engines",
         "benchmarks", "examples")  # fmt: skip


def named():
    """(folder, pattern) for each name in the first column of the tables below the headings that are folders."""
    folder, names = None, []
    for line in PAGE.read_text().splitlines():
        heading = re.match(r"#+ ", line) and re.fullmatch(r"### `(.+)/`", line)
        folder = heading[1] if heading else None if line.startswith("#") else folder
        if folder and line.startswith("|"):
            names += [(folder, name) for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    return names


def files():
    """Those that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *HOUSE]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: only that tells sources from what was built")
    return [PurePosixPath(name) for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


def is_named(file, folder, pattern):
    """`x.*` is every file of that stem in the folder; `x/*` is everything below x."""
    if not file.is_relative_to(folder):
        return False
    inside = file.relative_to(folder)
    if pattern.endswith("/*"):
        return str(inside).startswith(pattern[:-1])
    return len(inside.parts) == len(PurePosixPath(pattern).parts) and inside.match(pattern)


def test_every_name_is_a_file():
    there = files()
    gone = [f"{folder}/{name}" for folder, name in named() if not any(is_named(f, folder, name) for f in there)]
    assert not gone, f"docs/architecture.md names what does not exist: {gone}"


def test_every_file_is_named():
    names = named()
    missing = [str(f) for f in files() if not any(is_named(f, folder, name) for folder, name in names)]
    assert not missing, f"docs/architecture.md does not say what these hold: {missing}"


def test_paths_in_the_text_exist():
    """Of the other tables and the prose: whatever looks like a path of the house."""
    names = set(re.findall(rf"`((?:{'|'.join(HOUSE)})/[\w./]+)`", PAGE.read_text()))
    gone = [name for name in sorted(names) if not (REPOSITORY / name).exists()]
    assert names and not gone, f"docs/architecture.md names what does not exist: {gone}"


def test_routes_in_the_picture_are_those_of_explain(monkeypatch):
    """The routes that docs/slow.md and the picture show are the ones that the sources list."""
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "docs" / "pictures"), *sys.path])
    import house

    assert house.routes("cuda")[-1] == "fallback" and house.routes("metal")[-1] == "wide"
    assert {"packed_f32", "in_place_f32"} <= set(house.routes("cpu"))
    slow = (REPOSITORY / "docs" / "slow.md").read_text()
    assert not [route for route in house.routes("cuda") if f"`{route}`" not in slow]
