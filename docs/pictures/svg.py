"""The few shapes that the pictures are drawn with: SVG that is readable on a light and on a dark page."""

from html import escape
from pathlib import Path

# Colours by role. A page in dark mode gets the second of each pair.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#8c959f", "#768390"),
    "line": ("#afb8c1", "#545d68"),
    "empty": ("#f6f8fa", "#22272e"),
    "a": ("#9cc8f5", "#1f5f9e"),
    "b": ("#a9dfb5", "#2b7a43"),
    "c": ("#f7cf94", "#91631a"),
    "d": ("#d9bcf2", "#69429b"),
    "new": ("#f2a29b", "#a83c36"),
}


class Picture:
    def __init__(self, width, height, title):
        self.width, self.height, self.title = width, height, title
        self.parts = []

    def box(self, x, y, width, height, fill="empty", label="", line="line", bold=False, radius=3):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'class="fill-{fill} line-{line}"/>'
        )
        if label:
            rows = label.split("\n")
            for i, row in enumerate(rows):
                self.text(x + width / 2, y + height / 2 + 4 + 15 * (i - (len(rows) - 1) / 2), row, "middle", bold=bold)

    def text(self, x, y, text, anchor="start", role="ink", bold=False, size=12):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} class="text-{role}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points, role="faint"):
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" class="arrow-{role}" marker-end="url(#head)"/>')

    def curve(self, start, end, role="faint"):
        """An arrow that leaves downwards and arrives from above."""
        (x0, y0), (x1, y1) = start, end
        middle = (y0 + y1) / 2
        path = f"M{x0:g} {y0:g} C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}"
        self.parts.append(f'<path d="{path}" class="arrow-{role}" marker-end="url(#head)"/>')

    def write(self, path: Path):
        def styles(dark):
            rules = []
            for role, pair in COLOURS.items():
                colour = pair[dark]
                rules.append(
                    f".fill-{role}{{fill:{colour}}}.line-{role}{{stroke:{colour}}}.text-{role}{{fill:{colour}}}"
                )
                rules.append(f".arrow-{role}{{stroke:{colour};fill:none;stroke-width:1.3}}")
            rules.append(f"#head path{{fill:{COLOURS['faint'][dark]}}}")
            return "".join(rules)

        text = "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
                f'font-family="system-ui, sans-serif"><title>{escape(self.title)}</title>',
                f"<style>{styles(False)}@media (prefers-color-scheme: dark){{{styles(True)}}}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
                *self.parts,
                "</svg>\n",
            ]
        )
        path.write_text(text)
