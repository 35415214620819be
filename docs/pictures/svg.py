"""The few shapes that the pictures are drawn with: SVG that is readable on a light and on a dark page.

A picture is as wide as GitHub shows it and as high as what is drawn. It knows where its texts are, so that a test can
find one that is cut off or lies on another.
"""

from functools import cache
from html import escape

WIDTH = 830
MARGIN = 14
SIZE = 12  # of text

# Colours by role. A page in dark mode gets the second of each pair.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#656d76", "#8b949e"),
    "line": ("#afb8c1", "#484f58"),
    "empty": ("#f6f8fa", "#1c2128"),
    "band": ("#eaeef2", "#262c36"),
    "a": ("#9cc8f5", "#1f5f9e"),
    "b": ("#a9dfb5", "#2b7a43"),
    "c": ("#f7cf94", "#91631a"),
    "d": ("#d9bcf2", "#69429b"),
    "e": ("#9fdfe0", "#1c6e70"),
    "new": ("#f2a29b", "#a83c36"),
    "ours": ("#1f6feb", "#2f7df0"),
    "peer": ("#b35900", "#b8651b"),
    "other": ("#6e7781", "#6a737d"),
    "good": ("#1a7f37", "#3fb950"),
    "inverse": ("#ffffff", "#ffffff"),  # on a bar
}
REQUESTS = ("a", "b", "c", "d", "e")


@cache
def advance(character: str, bold: bool) -> float:
    """Of a character, in sizes. DejaVu Sans is about the widest font that a browser may take."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    font = FT2Font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    font.set_size(100, 72)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 100


def text_width(text: str, size: float = SIZE, bold: bool = False) -> float:
    return size * sum(advance(character, bold) for character in text)


def number(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


class Picture:
    def __init__(self, title: str, width: int = WIDTH):
        self.title, self.width, self.bottom = title, width, 0.0
        self.parts: list[str] = []
        self.texts: list[tuple] = []  # (left, top, right, bottom, text)
        self.used: set[str] = set()

    def part(self, kind: str, classes: list[str], inner: str | None = None, **attributes) -> None:
        self.used.update(classes)
        names = [f'class="{" ".join(classes)}"'] if classes else []
        for name, value in attributes.items():
            names.append(f'{name.replace("_", "-")}="{number(value) if isinstance(value, (int, float)) else value}"')
        end = "/>" if inner is None else f">{inner}</{kind}>"
        self.parts.append(f"<{kind} {' '.join(names)}{end}")

    def reach(self, bottom: float) -> None:
        self.bottom = max(self.bottom, bottom)

    def box(
        self, x, y, width, height, fill="empty", label="", line="line", role="ink", bold=False, radius=2, size=SIZE
    ):
        """A label of several rows stands in the middle."""
        classes = [f"f-{fill}"] + ([f"l-{line}"] if line else [])
        self.part("rect", classes, x=x, y=y, width=width, height=height, **({"rx": radius} if radius else {}))
        self.reach(y + height)
        rows = label.split("\n") if label else []
        for i, row in enumerate(rows):
            assert text_width(row, size, bold) <= width, f"{self.title}: {row!r} is wider than its box"
            middle = y + height / 2 + 0.36 * size + 1.25 * size * (i - (len(rows) - 1) / 2)
            self.text(x + width / 2, middle, row, "middle", role, bold, size)

    def text(self, x, y, text, anchor="start", role="ink", bold=False, size=SIZE):
        width = text_width(text, size, bold)
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * width
        self.texts.append((left, y - 0.74 * size, left + width, y + 0.2 * size, text))
        self.reach(y + 0.25 * size)
        more = {} if anchor == "start" else {"text_anchor": anchor}
        more |= {} if size == SIZE else {"font_size": size}
        more |= {"font_weight": 600} if bold else {}
        self.part("text", [f"t-{role}"], escape(text, quote=False), x=x, y=y, **more)

    def heading(self, y, text, x=MARGIN):
        self.text(x, y, text, bold=True)

    def paragraph(self, y, text, x=MARGIN, right=None, role="ink", size=SIZE) -> float:
        """Text in as many rows as it needs, the first of them at y. Returns where the next row would be."""
        right = self.width - MARGIN if right is None else right
        row = ""
        for word in text.split():
            if row and text_width(f"{row} {word}", size) > right - x:
                self.text(x, y, row, role=role, size=size)
                y, row = y + 1.4 * size, word
            else:
                row = f"{row} {word}".strip()
        self.text(x, y, row, role=role, size=size)
        return y + 1.4 * size

    def path(self, path: str, role: str, width=1.3, dash="", head=False) -> None:
        more = {"stroke_dasharray": dash} if dash else {}
        more |= {"marker_end": f"url(#{role})"} if head else {}
        if head:
            self.used.add(f"head-{role}")
        self.part("path", [f"s-{role}"], d=path, stroke_width=width, **more)

    def line(self, *points, role="line", width=1.0, dash="", head=False):
        self.path("M" + "L".join(f"{number(x)} {number(y)}" for x, y in points), role, width, dash, head)
        self.reach(max(y for _, y in points))

    def arrow(self, *points, role="faint"):
        self.line(*points, role=role, width=1.3, head=True)

    def curve(self, start, end, role="faint"):
        """An arrow that leaves downwards and arrives from above."""
        (x0, y0), (x1, y1) = start, end
        middle = (y0 + y1) / 2
        points = [(x0, y0), (x0, middle), (x1, middle), (x1, y1)]
        first, *rest = (f"{number(x)} {number(y)}" for x, y in points)
        self.path(f"M{first}C{' '.join(rest)}", role, head=True)

    def dot(self, x, y, radius=3.5, fill="ours", line="page"):
        self.part("circle", [f"f-{fill}"] + ([f"l-{line}"] if line else []), cx=x, cy=y, r=radius)

    def legend(self, y, entries, x=MARGIN) -> None:
        """Entries of (fill, text) in a row."""
        for fill, text in entries:
            self.box(x, y - 9, 10, 10, fill, line=None)
            self.text(x + 15, y, text)
            x += 15 + text_width(text) + 18

    @property
    def height(self) -> int:
        return round(self.bottom + MARGIN)

    def faults(self) -> list[str]:
        """Texts that are cut off, or lie on one another."""
        found = []
        for i, (left, top, right, bottom, text) in enumerate(self.texts):
            if left < 0 or right > self.width or top < 0 or bottom > self.height:
                found.append(f"{text!r} is cut off")
            for other in self.texts[:i]:
                if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom:
                    found.append(f"{text!r} lies on {other[4]!r}")
        return found

    def styles(self, dark: bool) -> str:
        kinds = {"f": "fill:{}", "l": "stroke:{}", "t": "fill:{}", "s": "stroke:{};fill:none", "head": "fill:{}"}
        rules = []
        for name in sorted(self.used):
            kind, role = name.split("-")
            rules.append(f".{name}{{{kinds[kind].format(COLOURS[role][dark])}}}")
        return "".join(rules)

    def svg(self) -> str:
        markers = "".join(
            f'<marker id="{role}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="head-{role}" d="M0 0L8 4L0 8z"/></marker>'
            for role in sorted(name.removeprefix("head-") for name in self.used if name.startswith("head-"))
        )
        self.used.add("f-page")
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="{SIZE}"><title>{escape(self.title)}</title>',
            f"<style>{self.styles(False)}@media (prefers-color-scheme:dark){{{self.styles(True)}}}</style>",
            *([f"<defs>{markers}</defs>"] if markers else []),
            f'<rect class="f-page" width="{self.width}" height="{self.height}" rx="6"/>',
            *self.parts,
            "</svg>\n",
        ]
        return "\n".join(lines)
