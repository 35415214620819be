"""The pictures of the documents are what their scripts draw, nothing in them is cut off, and a page shows each."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "pictures"))
from draw import FOLDER, PICTURES, data, of_results  # noqa: E402

LARGEST = 100_000  # bytes


@pytest.mark.parametrize("name", PICTURES)
def test_is_up_to_date(name):
    picture = PICTURES[name]()
    assert picture.faults() == []
    svg = picture.svg()
    assert len(svg) < LARGEST
    assert (FOLDER / f"{name}.svg").read_text() == svg, "draw it again: python docs/pictures/draw.py"


def test_pages_show_what_there_is():
    shown = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.(?:svg|png))\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"
            shown.add((page.parent / target).resolve())
    assert {FOLDER / f"{name}.svg" for name in PICTURES} - shown == set(), "no page shows it"


def test_tables_are_those_of_the_data():
    """A page has the table of every file, as the file has it; the floors in one are those of the shapes."""
    texts = {path: path.read_text() for path in data.pages()}
    for path, text in texts.items():
        assert data.with_tables(text) == text, f"{path.name}: run python docs/pictures/draw.py"
    for path in data.FOLDER.glob("*.json"):
        assert all(data.load(path.stem).content[name] for name in ("machine", "date", "command"))
        if data.load(path.stem).content.get("rows"):
            assert sum(f"<!-- docs/data/{path.name} -->" in text for text in texts.values()) == 1, path.name
    run = data.load("prefill_h200")
    for case, row in of_results.prefill_rows(run):
        floor = of_results.floor_seconds(case, run) * 1e6
        assert abs(data.number(row["floor"]) - floor) <= max(0.51, 0.001 * floor), row


def test_faults_are_found():
    """A text that is cut off, and one that lies on another."""
    from svg import Picture

    p = Picture("a picture")
    p.text(10, 20, "here")
    p.text(20, 22, "there")
    p.text(820, 60, "too far to the right")
    assert p.faults() == ["'there' lies on 'here'", "'too far to the right' is cut off"]
    with pytest.raises(AssertionError, match="wider than its box"):
        p.box(0, 80, 20, 20, label="a long label")
