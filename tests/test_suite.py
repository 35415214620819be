"""That the suite itself can fail: a test that hangs ends the run with its name, and a module that cannot be compiled
says what it is short of.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
HANGS = {
    "waits": "import time; time.sleep(600)",
    "keeps the lock": "import re; re.match('(a*)*b', 'a' * 40)",  # no other thread of Python runs meanwhile
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_ends_the_run(tmp_path, how):
    (tmp_path / "test_hang.py").write_text(f"def test_that_never_ends():\n    {HANGS[how]}\n")
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PAGED_ATTN_TEST_LIMIT": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", tmp_path]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "test_that_never_ends" in run.stderr, run.stdout + run.stderr


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("native_build", TESTS / "native" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LACKS = {
    "pybind11": ("importlib.util.find_spec", lambda name: None, "pybind11 in the environment of "),
    "headers": (
        "sysconfig.get_path",
        lambda name: "/nowhere",
        r"the headers of Python .* \(expected /nowhere/Python.h",
    ),
    "compiler": ("os.environ", {"CXX": "/nowhere/c++ -m64"}, "the C\\+\\+ compiler /nowhere/c\\+\\+ -m64"),
}


@pytest.mark.parametrize("what", LACKS)
def test_the_native_module_says_what_it_lacks(build, monkeypatch, what):
    place, value, words = LACKS[what]
    monkeypatch.setattr(place, value)
    with pytest.raises(build.NotBuilt, match=f"^tests/native: not compiled for want of {words}"):
        build.load()


def test_the_native_module_shows_the_error(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "generated", dict)
    monkeypatch.setattr(build, "ROOT", tmp_path)  # where no source is
    with pytest.raises(build.NotBuilt, match=r"does not compile it\n.*error.*check_tables\.cpp.* missing"):
        build.load()


EMULATORS = {  # how each is run; what is said of one that is missing
    "Arm": (["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_arm.py", "-k", "missing_path"], "no qemu"),
    "Metal": (["../tools/metal_emulator/run.py", "-k", "no such test"], "clang++-19 is not installed"),
}


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("emulator", EMULATORS)
def test_a_missing_emulator_is_skipped_unless_required(tmp_path, emulator, required):
    """.ci/run requires both; make test on a machine of a user says what it skips."""
    if emulator == "Metal" and torch.backends.mps.is_built():
        pytest.skip("the device is a real one here")
    command, words = EMULATORS[emulator]
    settings = {"PATH": str(tmp_path), "PAGED_ATTN_TEST_DEVICE": "cpu"}
    settings["PAGED_ATTN_TEST_EMULATORS"] = "required" if required else ""
    run = subprocess.run(
        [sys.executable, *command], env=os.environ | settings, cwd=TESTS, capture_output=True, text=True
    )
    assert (run.returncode != 0) == required, run.stdout + run.stderr
    assert words in run.stdout + run.stderr
    assert ("skipped" in (run.stdout + run.stderr).lower()) != required


SUMMARY = "========= ERROR SUMMARY: 0 errors"  # what compute-sanitizer ends with
REPORT = "========= Invalid __global__ read of size 4 bytes\n=========     at attend(int)+0x10"
SANITIZED = {  # what a run printed; whether it is a failure
    "passed": (f"3 passed in 0.10s\n{SUMMARY}", False),
    "failed": (f"1 failed, 2 passed in 0.10s\n{SUMMARY}", True),
    "error": (f"2 passed, 1 error in 0.10s\n{SUMMARY}", True),
    "no test": (SUMMARY, True),
    "report": (f"{REPORT}\n3 passed in 0.10s\n========= ERROR SUMMARY: 1 error", True),
}


@pytest.mark.parametrize("name", SANITIZED)
def test_sanitize_cuda_tells_what_passed(tmp_path, name):
    """With a stand-in for compute-sanitizer, which needs a GPU."""
    printed, fails = SANITIZED[name]
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\ncat <<END\n{printed}\nEND\n")
    sanitizer.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, TESTS.parent / "tools" / "sanitize_cuda.py", "--tool", "memcheck"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (run.returncode != 0) == fails, run.stdout + run.stderr
    assert SUMMARY not in run.stdout


def test_copies_of_a_case_exceed_the_largest_cache(tmp_path, monkeypatch):
    """benchmarks/cpu_cases.py, on a processor with 480 MB of L3."""
    for index, size in enumerate(("48K", "2048K", "491520K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    monkeypatch.syspath_prepend(TESTS.parent / "benchmarks")
    import cpu_cases

    assert cpu_cases.largest_cache(tmp_path) == 480 << 20 and cpu_cases.largest_cache(tmp_path / "none") == 0
    assert max(256 << 20, 2 * cpu_cases.largest_cache()) <= cpu_cases.ROTATED_BYTES


@pytest.fixture(scope="module")
def plant_faults():
    tool = TESTS.parent / "tools" / "plant_faults.py"
    spec = importlib.util.spec_from_file_location("plant_faults", tool)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_planted_fault_applies(plant_faults):
    """Each is a text that stands once in its file; none goes stale unseen."""
    reasons = [plant_faults.does_not_apply(fault) for fault in plant_faults.FAULTS]
    assert not any(reasons), [reason for reason in reasons if reason]
    assert len({fault.name for fault in plant_faults.FAULTS}) == len(reasons) >= 30


def test_the_page_counts_the_planted_faults(plant_faults):
    """docs/testing.md: how many there are, and how many of each group."""
    page = (TESTS.parent / "docs" / "testing.md").read_text()
    assert int(re.search(r"plants (\d+) faults", page)[1]) == len(plant_faults.FAULTS)
    table = page[page.index("| group | faults |") :].partition("\n\n")[0]
    counted = {group: int(faults) for group, faults in re.findall(r"^\| (\w+)[^|]* \| (\d+) \|", table, re.M)}
    assert counted == Counter(fault.group for fault in plant_faults.FAULTS)
