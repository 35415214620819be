"""Pictures of the CUDA backend. Plans come from the planners themselves and sizes from the kernels' headers, both
compiled for the host (tests/cuda/planner.py).
"""

import itertools
import math
import random
import re
import sys
from functools import cache
from pathlib import Path

from cuda_cases import decode_cases
from reference import visible_keys
from svg import MARGIN, REQUESTS, Picture, text_width

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests" / "cuda"))
import planner
import prefill_planner

SMALL = 11
CUDA = Path(__file__).resolve().parent.parent.parent / "paged_decode_cuda"


def constant(path: str, name: str) -> int:
    """Of a header, where it is written as a number the first time."""
    return int(re.search(rf"\b{name} = (\d+)\b", (CUDA / path).read_text())[1])


@cache
def library():
    return planner.load()


# ---- Splitting and dealing ----


def splitting() -> Picture:
    """The softmax of one row over keys that several blocks read, and how the parts become one."""
    kv_len, num_splits = 120, 4
    _, shares = planner.plan(library(), shares=64, lens=[kv_len], kv_heads=1, num_splits=num_splits)
    numbers, _ = planner.plan(library(), lens=[kv_len], kv_heads=1, num_splits=num_splits)
    ranges = sorted((s.tile * numbers.tile_keys, min(s.tile_end * numbers.tile_keys, kv_len)) for s in shares)
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]] and ranges[-1][1] == kv_len
    draw = random.Random(3)
    scores = [draw.gauss(0, 1.2) for _ in range(kv_len)]
    lses = [math.log(sum(math.exp(s) for s in scores[begin:end])) for begin, end in ranges]
    lse = math.log(sum(math.exp(s) for s in scores))

    p = Picture("One request whose keys are split over several blocks, and the merge of their (out, lse)")
    p.heading(24, f"One row over {kv_len} keys, num_splits={num_splits}: each block reads a run of keys")
    left, right, top, height = MARGIN, p.width - MARGIN, 44, 90
    pitch, gap = (right - left - 12 * (len(ranges) - 1)) / kv_len, 12
    largest = max(scores)
    middles = []
    for i, (begin, end) in enumerate(ranges):
        x = left + pitch * begin + gap * i
        p.box(x - 3, top - 4, pitch * (end - begin) + 6, height + 8, "empty")
        for key in range(begin, end):
            bar = height * math.exp(scores[key] - largest)
            p.box(x + pitch * (key - begin), top + height - bar, pitch - 1, bar, REQUESTS[i], line=None, radius=0)
        middles.append(x + pitch * (end - begin) / 2)
        p.text(middles[-1], top + height + 20, f"keys {begin} to {end - 1}", "middle", "faint", size=SMALL)
    p.text(left + 2, top + 8, "exp(score)", role="faint", size=SMALL)

    top += height + 34
    for i, (middle, own) in enumerate(zip(middles, lses)):
        p.arrow((middle, top - 8), (middle, top + 6))
        p.box(middle - 72, top + 8, 144, 42, REQUESTS[i], f"block {i}: out{i}\nlse{i} = {own:.2f}", size=SMALL)
    p.text(left, top + 74, "A block's out is normalised over its own keys, and lse = log(sum of exp(score)) says how "
           "much its keys weigh.")  # fmt: skip

    top += 104
    p.text(left, top, "The merge weighs each part by exp(lse of the part - lse of all)", bold=True)
    x = left
    for i, own in enumerate(lses):
        width = (right - left) * math.exp(own - lse)
        label = f"{math.exp(own - lse):.2f} x out{i}"
        p.box(x, top + 12, width, 30, REQUESTS[i], label if text_width(label) < width else "")
        x += width
    p.text(left, top + 64, f"lse = log(exp(lse0) + ... + exp(lse{num_splits - 1})) = {lse:.2f}", role="faint")
    p.text(right, top + 64, "out = the sum of the weighted parts", "end", "faint")
    return p


def dealing() -> Picture:
    lens, kv_heads = [300, 2000, 90, 1200, 700], 2
    gpu = (4, *planner.GPUS["sm_90"][1:])
    numbers, shares = planner.plan(library(), gpu=gpu, shares=1000, lens=lens, kv_heads=kv_heads)
    p = Picture("Dealing requests of uneven lengths to thread blocks, as the planner does it")
    p.text(MARGIN, 24, f"{len(lens)} requests of {', '.join(map(str, lens))} keys, {kv_heads} kv_heads, on a GPU with "
           f"{gpu[0]} multiprocessors: {numbers.blocks} blocks", bold=True)  # fmt: skip
    ordered = sorted(shares, key=lambda s: (s.head, s.b, s.tile))  # both kv_heads have lines of their own
    tiles = sum(s.tile_end - s.tile for s in ordered)
    left, gap = MARGIN, 16  # between the lines
    pitch = (p.width - 2 * MARGIN - gap) / tiles

    y = 48
    p.text(left, y, f"Requests as tiles of {numbers.tile_keys} keys, on a line for each kv_head", role="faint")
    places, x = [], left
    for s in ordered:
        x += gap if places and places[-1][0].head != s.head else 0
        places.append((s, x, pitch * (s.tile_end - s.tile)))
        x += places[-1][2]
    for b in range(len(lens)):
        for head in range(kv_heads):
            own = [(x, width) for s, x, width in places if (s.b, s.head) == (b, head)]
            width = sum(width for _, width in own)
            names = [f"request {b}, head {head}", f"{b}, {head}", ""]
            label = next(name for name in names if not name or text_width(name, SMALL) < width)
            p.box(own[0][0], y + 10, width, 24, REQUESTS[b], label, size=SMALL)

    y += 64
    p.text(
        left,
        y,
        "Cut into stretches, one for each block; lines are dealt from their ends, to one block after the other",
        role="faint",
    )
    for block in range(numbers.blocks):
        own = [(x, width) for s, x, width in places if s.block == block]
        start, end = min(x for x, _ in own), max(x + width for x, width in own)
        p.box(start, y + 10, end - start, 24, "band" if block % 2 else "empty", str(block))

    y += 64
    p.text(left, y, "Where a cut goes through a (request, kv_head), the block with its first keys merges the "
           "partials behind it (arrows)", role="faint")  # fmt: skip
    first = {}
    for s, x, width in places:
        p.box(x, y + 10, width, 24, REQUESTS[s.b], radius=0)
        if s.first:
            first = {"x": x + width / 2, "parts": 0}
        else:
            first["parts"] += 1
            depth = y + 42 + 6 * first["parts"]
            p.arrow((x + width / 2, y + 34), (x + width / 2, depth), (first["x"], depth), (first["x"], y + 36))

    y = p.bottom + 34
    case = next(case for case in decode_cases() if case.name == "B64 128..32k")
    numbers, shares = planner.plan(library(), shares=10**6, lens=case.kv_lens, kv_heads=case.kv_heads, group=case.group)
    work = [[] for _ in range(numbers.blocks)]
    for s in shares:
        work[s.block].append(s)
    longest = -(-max(case.kv_lens) // numbers.tile_keys)
    counts = [sum(s.tile_end - s.tile for s in own) for own in work]
    mean = sum(counts) / numbers.blocks
    p.text(left, y, f"64 requests of {min(case.kv_lens)} to {max(case.kv_lens)} keys, {case.kv_heads} kv_heads, on an "
           f"H200: tiles of each of the {numbers.blocks} blocks", bold=True)  # fmt: skip
    height, width = 76, (p.width - 2 * MARGIN) / numbers.blocks
    stacks = [[(s.b, s.tile_end - s.tile) for s in own] for own in work]
    block = 0
    while block < len(stacks):  # blocks of equal shares are drawn as one
        end = next((i for i in range(block, len(stacks)) if stacks[i] != stacks[block]), len(stacks))
        low = y + 18 + height
        for b, count in stacks[block]:
            high = height * count / max(counts)
            fill = REQUESTS[b % len(REQUESTS)]
            p.box(left + width * block, low - high, width * (end - block), high, fill, line=None, radius=0)
            low -= high
        block = end
    p.paragraph(y + height + 40, f"A block has {min(counts)} to {max(counts)} tiles ({mean:.0f} on average); those "
                "with more cuts have fewer, because ending one request and beginning another takes time too. A block "
                f"for every (request, kv_head) would leave one of them with {longest} tiles.",
                role="faint")  # fmt: skip
    return p


# ---- Warps and tiles ----


def table(p: Picture, y: float, columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(text_width(cell, SMALL, True) for cell in column) + 14 for column in zip(columns, *rows)]
    for i, row in enumerate([columns, *rows]):
        x = MARGIN
        for cell, width in zip(row, widths):
            p.text(x, y + 17 * i, cell, bold=i == 0, size=SMALL)
            x += width


def decode_kernel() -> Picture:
    head_dim = 128
    s = planner.decode_sizes(library(), 2, head_dim, 1)
    p = Picture("Warps and tiles of the CUDA decode kernel")
    p.heading(24, f"A warp's step at head_dim {head_dim}, 16-bit cache: {s.tile_keys} keys, {s.rows} rows")
    y, dims, key, row = 58, head_dim, 4.5 * s.tile_keys, 4.5 * s.rows  # of the matrices, in pixels

    def matrix(x, width, height, fill, name, columns, rows):
        top = y + (dims - height) / 2
        p.box(x, top, width, height, fill, name)
        p.text(x + width / 2, top - 5, columns, "middle", "faint", size=SMALL)
        p.text(x + width / 2, top + height + 14, rows, "middle", "faint", size=SMALL)
        return x + width

    def then(x, width, label=""):
        if label:
            p.text(x + width / 2, y + dims / 2 - 8, label, "middle", "faint", size=SMALL)
        p.arrow((x + 12, y + dims / 2), (x + width - 12, y + dims / 2))
        return x + width

    def times(x):
        p.text(x + 15, y + dims / 2 + 4, "x", "middle")
        return x + 30

    names = f"{head_dim} dims", f"{s.tile_keys} keys", f"{s.rows} rows"
    x = matrix(MARGIN, dims, key, "a", "K tile", names[0], names[1])
    x = matrix(times(x), row, dims, "c", "q", names[2], names[0])
    x = matrix(then(x, 60), row, key, "d", "S", names[2], names[1])
    x = matrix(then(x, 92, "softmax"), row, key, "d", "P", names[2], names[1])
    x = then(x, 70, "then")
    x = matrix(x, key, dims, "b", "V tile", names[1], names[0])
    x = matrix(times(x), row, key, "d", "P", names[2], names[1])
    matrix(then(x, 60), row, dims, "e", "out", names[2], names[0])
    y = p.paragraph(y + dims + 40, "Keys are the tall side of the matrix instruction (m16n8k16) and rows the narrow "
                    "one: one token of a group of 4 or 8 query heads wastes little.", role="faint")  # fmt: skip

    y += 12
    p.heading(y, f"A block: {s.warps} warps take the tiles of a segment in turns; each has a queue of {s.stages} tiles "
           "in shared memory")  # fmt: skip
    turns, cell, left = 7, 84, MARGIN + 64
    for turn in range(turns):
        p.text(left + cell * (turn + 0.5), y + 20, f"turn {turn}", "middle", "faint", size=SMALL)
    for warp in range(s.warps):
        top = y + 27 + 38 * warp
        p.text(MARGIN, top + 22, f"warp {warp}")
        for turn in range(turns):
            ahead = s.stages - 1
            copy, multiply = warp + s.warps * turn, warp + s.warps * (turn - ahead)
            x = left + cell * turn
            p.box(x, top, cell - 4, 16, "empty", f"copy {copy}", size=SMALL)
            if turn >= ahead:
                p.box(x, top + 17, cell - 4, 16, "b", f"multiply {multiply}", size=SMALL)
    p.paragraph(y + 44, "No barrier of the block in this loop. At the end of a segment the warps of a block add up "
                "their (m, l, acc), then the blocks do.", x=left + cell * turns + 12,
                role="faint", size=SMALL)  # fmt: skip

    y += 27 + 38 * s.warps + 26
    p.heading(y, "Sizes of the instances")
    rows = []
    instances = [(dim, row_tiles) for dim in (64, 128, 256) for row_tiles in (1, 2) if (dim, row_tiles) != (256, 2)]
    for kv_bytes, (dim, row_tiles) in itertools.product((2, 1), instances):
        of = planner.decode_sizes(library(), kv_bytes, dim, row_tiles)
        shared = (of.warps * of.warp_bytes + of.block_bytes) / 1024
        rows.append([f"{8 * kv_bytes} bits", str(dim), str(of.rows), str(of.tile_keys), str(of.stages),
                     f"{of.stage_bytes / 1024:g} KB", f"{of.blocks} x {of.warps} or 1 x {of.most_warps}",
                     f"{shared:.0f} KB"])  # fmt: skip
    columns = ["cache", "head_dim up to", "rows", "keys of a tile", "stages", "a stage", "blocks x warps together",
               "shared memory of a block"]  # fmt: skip
    table(p, y + 20, columns, rows)
    return p


def prefill_kernel() -> Picture:
    head_dim, group = 128, 4
    s = planner.prefill_sizes(library(), head_dim, head_dim)
    tokens = s.rows // group
    p = Picture("Warps and tiles of the CUDA prefill kernel on Hopper")

    # Which tiles are read, from the reference's masks.
    q_len, kv_len = 5 * tokens, 6 * s.keys
    row_tiles, key_tiles = range(q_len // tokens), range(kv_len // s.keys)
    p.heading(24, f"Tiles of {s.rows} rows ({tokens} tokens of {group} query heads) and {s.keys} keys: {q_len} new "
           f"tokens, {kv_len} keys")  # fmt: skip
    p.legend(46, [("b", "every row sees every key: no mask"), ("c", "masked"), ("empty", "not read")])
    panels = [("causal=True", {"window_right": 0}),
              ("causal=True, window_size=(256, 0)", {"window_left": 256, "window_right": 0})]  # fmt: skip
    cell = 54
    for i, (name, mask) in enumerate(panels):
        left = MARGIN + 66 + i * (cell * len(key_tiles) + 76)
        p.text(left, 74, name)
        for row in row_tiles:
            y = 82 + 22 * row
            p.text(left - 6, y + 15, f"rows {s.rows * row}", "end", "faint", size=SMALL)
            seen = [set(visible_keys(kv_len - q_len + t, kv_len, **mask))
                    for t in range(row * tokens, (row + 1) * tokens)]  # fmt: skip
            for tile in key_tiles:
                own = set(range(tile * s.keys, (tile + 1) * s.keys))
                whole, some = all(own <= keys for keys in seen), any(own & keys for keys in seen)
                p.box(left + cell * tile, y, cell, 22, "b" if whole else "c" if some else "empty", radius=0)
        for tile in key_tiles:
            x = left + cell * tile
            p.text(x, 82 + 22 * len(row_tiles) + 14, f"key {s.keys * tile}" if tile == 0 else str(s.keys * tile),
                   role="faint", size=SMALL)  # fmt: skip

    y = p.bottom + 30
    p.heading(y, f"A block: {s.threads} threads in {1 + s.consumers} warpgroups, one block on a multiprocessor")
    rings = [("Q", s.query_stages, s.rows, "c"), ("K", s.key_stages, s.keys, "a"), ("V", s.value_stages, s.keys, "b")]
    top = y + 16
    p.box(MARGIN, top, 196, 92, "empty")
    p.text(MARGIN + 10, top + 19, "producer warpgroup", bold=True)
    p.text(MARGIN + 10, top + 37, "a warp copies keys, a warp", size=SMALL)
    p.text(MARGIN + 10, top + 53, "values; one finds work and", size=SMALL)
    p.text(MARGIN + 10, top + 69, "copies queries", size=SMALL)
    p.text(MARGIN + 10, top + 85, f"{s.producer_registers} registers per thread", role="faint", size=SMALL)
    x = MARGIN + 240
    for i, (name, stages, count, fill) in enumerate(rings):
        size = count * head_dim * 2 / 1024
        for stage in range(stages):
            p.box(x + 62 * stage, top + 32 * i, 58, 26, fill, f"{name}: {size:g} KB", size=SMALL)
    ring_end = x + 62 * max(stages for _, stages, _, _ in rings)
    p.text(x, top + 32 * len(rings) + 10, f"shared memory: {s.shared_bytes / 1024:.0f} KB", role="faint", size=SMALL)
    p.arrow((MARGIN + 200, top + 46), (x - 6, top + 46))
    p.arrow((ring_end + 2, top + 46), (ring_end + 34, top + 46))
    for i in range(s.consumers):
        rows = s.rows // s.consumers
        left = ring_end + 40
        p.box(left, top + 48 * i, p.width - MARGIN - left, 44, "d")
        registers = f"{s.consumer_registers} registers per thread: sums, scores, weights"
        p.text(left + 10, top + 48 * i + 18, f"consumer {i + 1}: rows {rows * i} to {rows * (i + 1) - 1}", bold=True)
        p.text(left + 10, top + 48 * i + 35, registers, size=SMALL)

    y = top + 130
    p.heading(y, "While one consumer computes weights, the other has the matrix unit")
    draw_turns(p, y + 12)

    y = p.bottom + 28
    p.heading(y, "Sizes of the instances")
    rows = []
    for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        of = planner.prefill_sizes(library(), dim, dim_v)
        rows.append([f"{dim} / {dim_v}" if dim == 192 else str(dim), str(of.rows), str(of.keys), str(of.query_stages),
                     str(of.key_stages), str(of.value_stages), f"{of.shared_bytes / 1024:.0f} KB"])  # fmt: skip
    table(p, y + 20, ["head_dim up to", "rows", "keys of a tile", "stages of Q", "of K", "of V", "shared memory"], rows)
    return p


def draw_turns(p: Picture, y: float) -> None:
    """The order of the products of two consumers, in slots of one length."""
    slots = [(kind, tile, consumer) for tile in range(4) for consumer in (0, 1)
             for kind in "KV"[: 2 if tile else 1]]  # fmt: skip
    left, high = MARGIN + 96, 20
    unit = (p.width - MARGIN - left) / len(slots)
    for row, name in enumerate(["matrix unit", "consumer 1", "consumer 2"]):
        p.text(MARGIN, y + 15 + (high + 6) * row, name)
    for i, (kind, tile, consumer) in enumerate(slots):
        fill = "ac"[consumer]
        p.box(left + unit * i, y, unit - 2, high, fill, f"{kind}{tile - (kind == 'V')} ({consumer + 1})", size=SMALL)
        if kind == "K":
            end = slots.index(("K", tile + 1, consumer)) if ("K", tile + 1, consumer) in slots else len(slots)
            if end > i + 1:
                row = y + (high + 6) * (1 + consumer)
                p.box(left + unit * (i + 1), row, unit * (end - i - 1) - 2, high, fill,
                      f"weights {tile}" if end > i + 2 else f"w. {tile}", size=SMALL)  # fmt: skip
    p.paragraph(y + 3 * (high + 6) + 14, "K1 (2): scores of tile 1 for consumer 2; V0: product of the weights of tile "
                "0 with its values. Slots are of one length here, not in the kernel.", role="faint",
                size=SMALL)  # fmt: skip


# ---- Boxes and pieces ----


def prefill_numbers(page_size: int):
    return prefill_planner.numbers_of(prefill_planner.load(), [4096] * 4, max_q_len=1024, page_size=page_size)


def boxes_and_pieces() -> Picture:
    """How the rows of a tile of keys come from pages into shared memory."""
    row_values, row_bytes = constant("hopper.h", "kColumn"), constant("hopper.h", "kRowBytes")
    columns, gatherers = 128 // row_values, 4
    lanes = constant("prefill/pieces.cuh", "kCopyLanes")
    run = 32 // lanes
    boxed, gathered = prefill_numbers(16), prefill_numbers(12)
    assert (boxed.box_rows, gathered.box_rows) == (16, 0)
    assert "kGatherers = 3 + kOwnDirector" in (CUDA / "prefill/sizes.h").read_text()

    p = Picture("How keys come from pages into shared memory: in boxes, or in pieces")
    rows, high = 32, 5
    halves = [(MARGIN, "In bulk: pages of 16 slots", 16), (428, "In pieces: pages of 12 slots", 12)]
    for left, title, page_size in halves:
        p.heading(24, title, left)
        p.text(left, 46, "pages in memory", role="faint", size=SMALL)
        p.text(left + 214, 46, f"the first {rows} of {boxed.keys} rows of a tile", role="faint", size=SMALL)
        counts = [min(page_size, rows - first) for first in range(0, rows, page_size)]
        top = 56
        for page, (first, count) in enumerate(zip(range(0, rows, page_size), counts)):
            y = top + first * high + 10 * page
            p.box(left, y, 128, page_size * high if page_size == 16 else count * high, "empty", radius=0)
            number = (31, 4, 17)[page]
            inside = f"page {number}" + ("" if count == page_size else f", {count} slots")
            for column in range(columns):
                fill = REQUESTS[page * columns + column] if page_size == 16 else "band"
                p.box(left + 64 * column, y, 64, count * high, fill, line="page", radius=0)
            p.text(left + 64, y + count * high / 2 + 4, inside, "middle", size=SMALL)
            target = 56 + 10 + first * high + count * high / 2
            p.arrow((left + 134, y + count * high / 2), (left + 208, target))
        x = left + 214
        for column in range(columns):
            p.text(x + 70 * column + 33, 62 + rows * high + 20, f"column {column}", "middle", "faint", size=SMALL)
        if page_size == 16:
            for box in range(rows // 16 * columns):
                first, column = box // columns * 16, box % columns
                p.box(x + 70 * column, 66 + first * high, 66, 16 * high, REQUESTS[box], f"box {box}", radius=0)
        else:
            for first in range(0, rows, run):
                warp = first // run % gatherers
                for column in range(columns):
                    p.box(x + 70 * column, 66 + first * high, 66, run * high, REQUESTS[warp], f"warp {warp}",
                          line="page", radius=0, size=SMALL)  # fmt: skip

    y = p.bottom + 22
    p.paragraph(y, f"One lane asks for a box: {boxed.box_rows} rows, {row_bytes} bytes of each. Boxes of the same rows "
                "follow one another.", right=402, role="faint", size=SMALL)  # fmt: skip
    p.paragraph(y, f"Four warps take turns at runs of {run} rows. Each lane copies 16 bytes of one row, of column 0, "
                "then of column 1.", x=428, role="faint", size=SMALL)  # fmt: skip

    y = p.bottom + 30
    p.heading(y, f"One run of {run} rows in pieces: where each lane puts its piece of column 0 (lane: piece)")
    cell, left = 80, MARGIN + 58
    for row in range(run):
        top = y + 12 + 21 * row
        p.text(left - 8, top + 14, f"row {row}", "end", "faint", size=SMALL)
        for place in range(lanes):
            piece = place ^ row % 8
            p.box(left + cell * place, top, cell - 3, 18, "abcdea"[row] if row % 2 == 0 else "band",
                  f"lane {row * lanes + piece}: {piece}", size=SMALL, radius=0)  # fmt: skip
    p.paragraph(p.bottom + 17, "Piece i of row r lies at place i ^ (r % 8), as the matrix unit reads it and as a box "
                "arrives by itself.", role="faint", size=SMALL)  # fmt: skip

    y = p.bottom + 26
    kv_len, keys = 300, boxed.keys
    tiles = -(-kv_len // keys)
    p.heading(y, f"The end of a request of {kv_len} keys, pages of 16 slots")
    p.legend(y + 22, [("b", "in bulk"), ("c", "in pieces"), ("new", "zeros"), ("d", "in bulk, scores masked later")])
    left, width = MARGIN + 58, (p.width - MARGIN - 58 - MARGIN) / (tiles * keys)
    for line, name in enumerate(("keys", "values")):
        top = y + 34 + 28 * line
        p.text(left - 8, top + 16, name, "end", "faint", size=SMALL)
        for tile in range(tiles):
            begin, end = tile * keys, (tile + 1) * keys
            whole = end <= kv_len
            shares = [(begin, min(end, kv_len), "b" if whole or name == "keys" else "c")]
            if not whole:
                shares.append((kv_len, end, "d" if name == "keys" else "new"))
            for first, last, fill in shares:
                label = f"{first} to {last - 1}"
                p.box(left + width * first, top, width * (last - first) - 2, 24, fill, label, size=SMALL, radius=0)
    p.paragraph(p.bottom + 17, "A score that is masked hides its key. A weight of 0 does not hide a value, as 0 * NaN "
                "is NaN: so values that nobody sees become zeros.", role="faint", size=SMALL)  # fmt: skip
    return p


# ---- Multi-head latent attention ----


def mla_block() -> Picture:
    """What a block of the kernel over 16-bit latents holds, and what its warpgroups do side by side."""
    names = "kLatents", "kRope", "kRows", "kKeys", "kStages", "kLoaders"
    latents, rope, rows, keys, stages, loaders = (constant("mla/sizes.h", name) for name in names)
    dim, half = latents + rope, latents // 2
    query_kb, key_kb, weight_kb = (n // 1024 for n in (rows * dim * 2, keys * dim * 2, rows * keys * 2))
    producer = constant("mla/sizes.h", "kProducerRegisters")
    consumer = constant("mla/sizes.h", "kConsumerRegisters")

    p = Picture("A block of the MLA kernel: one copy of a key for both products")
    p.heading(24, f"A key of {dim} numbers: the first {latents} are its value too")
    unit, y = (p.width - 2 * MARGIN - 8) / dim, 36
    p.box(MARGIN, y, unit * half - 2, 26, "a", f"latents 0 to {half - 1}")
    p.box(MARGIN + unit * half, y, unit * half - 2, 26, "b", f"latents {half} to {latents - 1}")
    p.box(MARGIN + unit * latents, y, unit * rope + 8, 26, "c", f"{rope} rotated")
    p.text(MARGIN, y + 42, f"scores: q times all {dim}", role="faint", size=SMALL)
    p.text(p.width - MARGIN, y + 42, f"sums: weights times the first {latents}, half of them for each consumer", "end",
           "faint", size=SMALL)  # fmt: skip

    y += 76
    p.heading(y, f"A block: {rows} rows of one request, three warpgroups, one block on a multiprocessor")
    top = y + 14
    p.box(MARGIN, top, 190, 118, "empty")
    p.text(MARGIN + 10, top + 19, "producer warpgroup", bold=True)
    for i, line in enumerate([f"{loaders} warps copy tiles of keys,", "one finds work; where pages",
                              "hold no boxes all four copy"]):  # fmt: skip
        p.text(MARGIN + 10, top + 38 + 16 * i, line, size=SMALL)
    p.text(MARGIN + 10, top + 92, f"{producer} registers per thread", role="faint", size=SMALL)

    x, wide = MARGIN + 232, 270
    p.box(x, top, wide, 26, "c", f"Q: {rows} rows, {query_kb} KB", size=SMALL)
    for stage in range(stages):
        left = wide * half / dim
        at = top + 30 + 30 * stage
        p.box(x, at, left, 26, "a", f"tile {stage}: left half", size=SMALL)
        p.box(x + left, at, wide - left, 26, "b", f"right half, {key_kb} KB in all", size=SMALL)
    p.box(x, top + 90, wide, 20, "d", f"weights of one tile, {weight_kb} KB", size=SMALL)
    p.text(x, top + 126, f"shared memory: {query_kb + key_kb * stages + weight_kb} KB and a little", role="faint",
           size=SMALL)  # fmt: skip
    p.arrow((MARGIN + 194, top + 60), (x - 6, top + 60))
    p.arrow((x + wide + 4, top + 30), (x + wide + 38, top + 30))
    p.arrow((x + wide + 4, top + 88), (x + wide + 38, top + 88))
    x += wide + 44
    for i, (fill, which) in enumerate((("a", f"0 to {half - 1}"), ("b", f"{half} to {latents - 1}"))):
        at = top + 60 * i
        p.box(x, at, p.width - MARGIN - x, 56, fill)
        p.text(x + 10, at + 18, f"consumer {i}", bold=True)
        p.text(x + 10, at + 34, f"sums of latents {which},", size=SMALL)
        p.text(x + 10, at + 49, f"{rows} rows; {consumer} registers", size=SMALL)

    y = top + 156
    p.heading(y, f"Tiles of {keys} keys in turns: each softmax lies under products of the other consumer")
    left = MARGIN + 84
    wide = (p.width - MARGIN - left) / 8.75
    high = 38
    lines = [
        [(0, 1, "a", "scores 0"), (1, 1, "d", "weights 0"), (2, 1, "a", "values 0,\nleft"),
         (3, 1.75, "a", "scores 2,\nvalues 1, left"), (4.75, 1, "d", "weights 2"), (5.75, 1, "a", "values 2,\nleft"),
         (6.75, 1.75, "a", "scores 4,\nvalues 3, left")],
        [(1.1, 1.75, "b", "scores 1,\nvalues 0, right"), (2.85, 1, "d", "weights 1"),
         (3.85, 1, "b", "values 1,\nright"), (4.85, 1.75, "b", "scores 3,\nvalues 2, right"),
         (6.6, 1, "d", "weights 3"), (7.6, 1, "b", "values 3,\nright")],
    ]  # fmt: skip
    for i, cells in enumerate(lines):
        at = y + 14 + (high + 6) * i
        p.text(left - 8, at + high / 2 + 4, f"consumer {i}", "end")
        for begin, length, fill, label in cells:
            p.box(left + wide * begin, at, wide * length - 3, high, fill, label, size=SMALL)
    p.paragraph(p.bottom + 18, "Whose turn it is computes the scores of all rows and their weights, and leaves the "
                "weights in shared memory for the other one. Lengths are not to scale.", role="faint",
                size=SMALL)  # fmt: skip

    y = p.bottom + 26
    p.heading(y, "A cluster: two blocks, 128 rows of one request, one copy of every key")
    top = y + 14
    p.box(MARGIN, top, 190, 62, "empty", "tile in memory:\nhalf of its boxes are asked\nfor by each block", size=SMALL)
    for i in range(2):
        at = top + 34 * i
        p.box(MARGIN + 300, at, 330, 28, "ab"[i], f"block {i}: rows {rows * i} to {rows * (i + 1) - 1}, the whole tile",
              size=SMALL)  # fmt: skip
        for other in range(2):
            p.arrow((MARGIN + 194, top + 20 + 22 * other), (MARGIN + 294, at + 9 + 10 * other))
    p.text(MARGIN + 200, top + 84, "what one block asks for arrives in both", role="faint", size=SMALL)
    return p
