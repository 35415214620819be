"""How a threadgroup of the Metal backend's attention shares its keys. Sizes and the exchange are those of attend.h and
products.h.
"""

from svg import MARGIN, REQUESTS, Picture

SMALL = 11
SIMD, LANES, ROWS = 32, 8, 4  # of a simdgroup, of a lane group, of an item
GROUPS, KEYS = SIMD // LANES, LANES // ROWS


def held(values: int, lane: int, rounds: int) -> list[int]:
    """The sums that a lane still has after some rounds of scatter_sum()."""
    begin, count, mask = 0, values, LANES // 2
    for _ in range(rounds):
        count //= 2
        begin += count if lane & mask else 0
        mask //= 2
    return list(range(begin, begin + count))


def threadgroup() -> Picture:
    p = Picture("A threadgroup of attention on Metal: simdgroups, lane groups, the exchange of sums")
    stretches(p, 24)
    tile(p, p.bottom + 32)
    exchange(p, p.bottom + 32)
    return p


def stretches(p: Picture, y: float) -> None:
    keys, simdgroups = 512, 4
    tiles = keys // SIMD
    each = -(-tiles // simdgroups)
    p.heading(y, f"A split of {keys} keys: each of {simdgroups} simdgroups takes a stretch of tiles of {SIMD} keys")
    unit = (p.width - 2 * MARGIN - 8 * (simdgroups - 1)) / tiles
    for number in range(tiles):
        group = number // each
        p.box(MARGIN + unit * number + 8 * group, y + 14, unit - 2, 22, REQUESTS[group], str(SIMD * number),
              size=SMALL, radius=0)  # fmt: skip
    for group in range(simdgroups):
        middle = MARGIN + unit * each * (group + 0.5) + 8 * group
        p.text(middle, y + 52, f"simdgroup {group}", "middle", size=SMALL)
    p.paragraph(y + 72, "No barrier between simdgroups on the way. At the end their (m, l, acc) meet in threadgroup "
                "memory.", role="faint", size=SMALL)  # fmt: skip


def tile(p: Picture, y: float) -> None:
    p.heading(y, f"A tile in a simdgroup, for {ROWS} rows: {GROUPS} lane groups of {LANES} lanes, {ROWS} steps")
    left, cell = MARGIN + 70, 176
    for group in range(GROUPS):
        p.text(left + cell * (group + 0.5), y + 20, f"lanes {LANES * group} to {LANES * (group + 1) - 1}", "middle",
               "faint", size=SMALL)  # fmt: skip
    for step in range(ROWS):
        top = y + 28 + 24 * step
        p.text(left - 8, top + 14, f"step {step}", "end", size=SMALL)
        for group in range(GROUPS):
            first = (step * GROUPS + group) * KEYS
            p.box(left + cell * group, top, cell - 4, 20, "band",
                  f"keys {first}, {first + KEYS - 1}: {KEYS} x {ROWS} scores", size=SMALL, radius=0)  # fmt: skip
    p.paragraph(p.bottom + 17, f"A lane reads 8 neighbouring numbers of a key, its lane group {8 * LANES} together: "
                "each byte of a key is loaded once for all rows.", role="faint", size=SMALL)  # fmt: skip


def exchange(p: Picture, y: float) -> None:
    p.heading(y, f"The sums of a step in one lane group: {LANES - 1} shuffles leave each lane with one score")
    size, pitch, left = 15, 204, MARGIN + 36
    names = ["each lane: 8 sums of its share"]
    names += [f"{n} shuffle{'s' * (n > 1)} with lane ^ {n}" for n in (4, 2, 1)]
    for rounds, name in enumerate(names):
        x = left + pitch * rounds
        p.text(x - 8 if rounds else MARGIN, y + 20, name, role="faint", size=SMALL)
        for lane in range(LANES):
            for value in range(LANES):
                own = value in held(LANES, lane, rounds)
                p.box(x + size * lane, y + 46 + size * value, size - 1, size - 1,
                      REQUESTS[value // ROWS] if own else "empty", radius=0)  # fmt: skip
            p.text(x + size * (lane + 0.45), y + 41, str(lane), "middle", "faint", size=10)
        if rounds:
            p.arrow((x - pitch + size * LANES + 8, y + 46 + size * 4), (x - 12, y + 46 + size * 4))
    for key in range(KEYS):
        p.text(left - 6, y + 46 + size * ROWS * (key + 0.5) + 4, f"key {key}", "end", size=SMALL)
    p.paragraph(p.bottom + 17, f"A column is a lane, a row one of the {KEYS} x {ROWS} scores. In each round a lane "
                "sends half of its sums and adds what it gets to the other half. Then softcap, ALiBi, mask and "
                "exponential are computed once for each score.", role="faint", size=SMALL)  # fmt: skip
