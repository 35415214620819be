"""The pages of this repository, cut into what can be checked: links, code spans, code blocks, sections."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    [^\n]*\n|\n(?=    ))+)")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#+) (.+)$", re.M)


@dataclass(frozen=True)
class Page:
    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text outside of fenced blocks, where headings and code spans are."""
        return FENCED.sub("", self.text)

    @property
    def links(self) -> list[str]:
        return LINK.findall(self.prose)

    @property
    def spans(self) -> list[str]:
        return SPAN.findall(self.prose)

    def fenced(self, language: str) -> list[str]:
        return [body for found, body in FENCED.findall(self.text) if found == language]

    @property
    def shell(self) -> list[str]:
        """Lines of indented and bash blocks, without what is said about them; and code spans."""
        blocks = INDENTED.findall(self.prose) + self.fenced("bash")
        lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
        return [re.split(r"\s{2,}|\s#", line.strip())[0] for line in lines] + self.spans

    @property
    def anchors(self) -> set[str]:
        """Of the headings, as GitHub makes them."""
        titles = [re.sub(r"[^\w\- ]", "", title.lower()) for _, title in HEADING.findall(self.prose)]
        return {title.replace(" ", "-") for title in titles}

    def section(self, title: str) -> str:
        """The text below a heading, up to the next heading."""
        parts = re.split(r"^#+ (.+)$", self.prose, flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in found if (ROOT / name).exists()]


def pages() -> list[Page]:
    return [Page(name) for name in tracked_files() if name.endswith(".md") and name not in ("CARD.md", "CHANGELOG.md")]
