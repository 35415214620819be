"""Bars and rooflines, drawn with the shapes of svg.py."""

import math
from dataclasses import dataclass

from svg import MARGIN, Picture, text_width

BAR = 13  # height
SMALL = 11  # size of text in charts


@dataclass
class Bar:
    fill: str
    share: float  # of the axis, 0 to 1
    text: str


def bars(p: Picture, y: float, groups: list[tuple[str, list[Bar], float | None]], axis: str) -> None:
    """Groups of (name, bars, mark) below each other over an axis from 0 to 100 %; the mark is a line across a group."""
    left = MARGIN + max(text_width(name) for name, _, _ in groups) + 8
    width = p.width - MARGIN - 30 - left
    ends = y + sum(BAR * len(own) + 7 for _, own, _ in groups)
    for tick in range(0, 101, 20):
        x = left + width * tick / 100
        p.line((x, y - 4), (x, ends), role="band")
        p.text(x, ends + 14, f"{tick} %", "middle", "faint", size=SMALL)
    p.text(left, ends + 32, axis, role="faint")
    for name, own, mark in groups:
        p.text(left - 8, y + BAR * len(own) / 2 + 4, name, "end")
        for i, bar in enumerate(own):
            end, top = left + width * bar.share, y + BAR * i
            p.box(left, top, end - left, BAR - 1, bar.fill, line=None, radius=0)
            inside = text_width(bar.text, SMALL) + 10 < end - left
            x, anchor, role = (end - 5, "end", "inverse") if inside else (end + 5, "start", "ink")
            p.text(x, top + BAR - 3, bar.text, anchor, role, size=SMALL)
        if mark is not None:
            x = left + width * mark
            p.line((x, y - 2), (x, y + BAR * len(own) + 1), role="ink", width=2)
        y += BAR * len(own) + 7
    p.line((left, ends), (left, ends - sum(BAR * len(own) + 7 for _, own, _ in groups) - 4), role="faint")


@dataclass
class Point:
    intensity: float  # flops per byte
    rate: float  # flops/s
    label: str
    fill: str = "ours"


@dataclass
class Limit:
    """A roof: what the memory and the arithmetic allow. With two read rates it is a band."""

    read_rates: tuple[float, ...]  # bytes/s, slowest first
    multiply_rate: float  # flops/s
    label: str
    role: str = "ink"


class Roofline:
    """Operations per second over operations per byte, both logarithmic."""

    def __init__(self, p: Picture, top: float, height: float, points: list[Point], limits: list[Limit]):
        self.p, self.points, self.limits = p, points, limits
        self.left, self.right, self.top, self.low = MARGIN + 46, p.width - MARGIN, top, top + height
        ridges = [limit.multiply_rate / limit.read_rates[0] for limit in limits]
        xs = [point.intensity for point in points] + ridges
        ys = [point.rate for point in points] + [limit.multiply_rate for limit in limits]
        self.x_range = math.log10(min(xs) / 1.7), math.log10(max(*xs, 2 * max(ridges)) * 1.7)
        self.y_range = math.log10(min(ys) / 2), math.log10(max(ys) * 1.8)

    def x(self, intensity: float) -> float:
        low, high = self.x_range
        return self.left + (math.log10(intensity) - low) / (high - low) * (self.right - self.left)

    def intensity(self, x: float) -> float:
        low, high = self.x_range
        return 10 ** (low + (x - self.left) / (self.right - self.left) * (high - low))

    def y(self, rate: float) -> float:
        low, high = self.y_range
        return self.low - (math.log10(rate) - low) / (high - low) * (self.low - self.top)

    def draw(self) -> None:
        self.draw_axes()
        for limit in self.limits:
            self.draw_limit(limit)
        for point in self.points:
            self.p.dot(self.x(point.intensity), self.y(point.rate), fill=point.fill)
        for point in sorted(self.points, key=lambda point: -point.intensity):
            self.draw_label(point)

    def draw_axes(self) -> None:
        for range_, place in ((self.x_range, self.x), (self.y_range, self.y)):
            for exponent in range(math.floor(range_[0]), math.ceil(range_[1]) + 1):
                for digit in (1, 2, 5):
                    value = digit * 10.0**exponent
                    if not range_[0] <= math.log10(value) <= range_[1]:
                        continue
                    if place == self.x:
                        self.p.line((place(value), self.top), (place(value), self.low), role="band")
                        self.p.text(place(value), self.low + 14, f"{value:g}", "middle", "faint", size=SMALL)
                    else:
                        self.p.line((self.left, place(value)), (self.right, place(value)), role="band")
                        self.p.text(self.left - 5, place(value) + 4, flops(value), "end", "faint", size=SMALL)
        self.p.text(self.left, self.low + 31, "operations per byte of memory, counted from the shape", role="faint")
        self.p.text(MARGIN, self.top - 8, "operations per second", role="faint")

    def draw_limit(self, limit: Limit) -> None:
        start, end = 10 ** self.x_range[0], 10 ** self.x_range[1]
        for read_rate in limit.read_rates:
            begin = max(start, 10 ** self.y_range[0] / read_rate)
            ridge = limit.multiply_rate / read_rate
            corners = [(begin, begin * read_rate), (ridge, limit.multiply_rate), (end, limit.multiply_rate)]
            self.p.line(*((self.x(a), self.y(b)) for a, b in corners), role=limit.role, width=1.5)
        self.p.text(self.right - 4, self.y(limit.multiply_rate) - 6, limit.label, "end", limit.role, size=SMALL)

    def draw_label(self, point: Point) -> None:
        """Where it covers nothing; a point in a crowd has none."""
        x, y, width = self.x(point.intensity), self.y(point.rate), text_width(point.label, SMALL)
        sides = [(x + 7, y + 4), (x - 7 - width, y + 4), (x - width / 2, y - 8), (x - width / 2, y + 16)]
        corners = [(left, base) for left in (x + 6, x - 6 - width) for base in (y + 13, y - 6)]
        for left, base in sides + corners:
            if self.is_free(left, base - SMALL, left + width, base + 3):
                self.p.text(left, base, point.label, size=SMALL)
                return

    def is_free(self, left: float, top: float, right: float, bottom: float) -> bool:
        if left < self.left + 2 or right > self.right or top < self.top or bottom > self.low:
            return False
        if any(left < b[2] and b[0] < right and top < b[3] and b[1] < bottom for b in self.p.texts):
            return False
        dots = ((self.x(point.intensity), self.y(point.rate)) for point in self.points)
        if any(left - 4 < x < right + 4 and top - 4 < y < bottom + 4 for x, y in dots):
            return False
        return all(self.is_beside(limit, left, top, right, bottom) for limit in self.limits)

    def is_beside(self, limit: Limit, left: float, top: float, right: float, bottom: float) -> bool:
        """No roof runs through the rectangle."""
        for read_rate in limit.read_rates:
            ends = [min(self.intensity(x) * read_rate, limit.multiply_rate) for x in (left, right)]
            if self.y(ends[0]) > top - 1 and self.y(ends[1]) < bottom + 1:
                return False
        return True


def flops(value: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g}"
