"""Measurements of docs/data/: one file per run, with machine, date and command. Tables and pictures come from it.

    python docs/pictures/data.py NAME < TABLE   puts the rows of a printed table into docs/data/NAME.json

In a page the comment `<!-- docs/data/NAME.json -->` stands before the table; draw.py writes it.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
FOLDER = DOCS / "data"


class Run:
    """What one file holds. Cells are as the command printed them."""

    def __init__(self, path: Path):
        self.path, self.content = path, json.loads(path.read_text())

    @property
    def rows(self) -> list[dict[str, str]]:
        return [dict(zip(self.content["columns"], row, strict=True)) for row in self.content["rows"]]

    @property
    def table(self) -> str:
        columns = self.content["columns"]
        return "".join(f"| {' | '.join(row)} |\n" for row in [columns, ["---"] * len(columns), *self.content["rows"]])

    @property
    def source(self) -> str:
        return f"{self.content['machine']}, {self.content['date']}"

    def take(self, printed: str) -> None:
        """The rows of a table in markdown; other lines are passed over."""
        lines = [line.strip().strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line] for line in lines]
        self.content |= {"columns": cells[0], "rows": cells[2:]}

    def save(self) -> None:
        """A row of cells on a line, so that a new run is easy to compare with the old one."""
        head = {name: value for name, value in self.content.items() if name != "rows"}
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in self.content["rows"])
        self.path.write_text(f'{text},\n "rows": [\n{rows}\n ]\n}}\n')


def load(name: str) -> Run:
    return Run(FOLDER / f"{name}.json")


def number(cell: str) -> float | None:
    """The number that a cell begins with."""
    found = re.match(r"[\d.]+", cell)
    return float(found[0]) if found else None


def name_in(cell: str) -> str:
    """What a cell has in brackets after its number."""
    found = re.search(r"\(([^)]*)\)", cell)
    return found[1] if found else ""


def with_tables(page: str) -> str:
    """The text of a page, with the tables as the files have them."""

    def replaced(match: re.Match) -> str:
        return f"{match[1]}{load(match[2]).table}"

    return re.sub(r"(<!-- docs/data/(\w+)\.json -->\n+)(?:\|.*\n)*", replaced, page)


def pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


if __name__ == "__main__":
    run = load(sys.argv[1])
    run.take(sys.stdin.read())
    run.save()
