"""The pictures of the documents are what their scripts draw, nothing in them is cut off, and a page shows each."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "pictures"))
from draw import FOLDER, PICTURES  # noqa: E402

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
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.(?:svg|png))\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"
            shown.add((page.parent / target).resolve())
    assert {FOLDER / f"{name}.svg" for name in PICTURES} - shown == set(), "no page shows it"


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
