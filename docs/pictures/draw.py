"""Draws the pictures of the documents: `python docs/pictures/draw.py [NAME ...]` writes docs/pictures/*.svg.

Nothing is placed by a number that the package would know better: masks come from the tests' reference, plans from the
planners themselves, sizes from the headers of the kernels, times from docs/data/.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path += [str(FOLDER), str(ROOT / "tests")]

import house  # noqa: E402
import of_usage  # noqa: E402

PICTURES = {
    "pages": of_usage.pages,
    "append": of_usage.append,
    "masks": of_usage.masks,
    **house.PICTURES,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().svg())
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
