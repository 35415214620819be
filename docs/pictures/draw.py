"""Draws the pictures of the documents: `python docs/pictures/draw.py` writes docs/pictures/*.svg.

Nothing is placed by a number that the package would know better: masks come from the tests' reference, slots from the
same division by page_size as in the kernels.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path += [str(FOLDER), str(FOLDER.parent.parent / "tests")]

import house  # noqa: E402
from reference import visible_keys  # noqa: E402
from svg import Picture  # noqa: E402

REQUESTS = {"a": (9, [5, 2, 7]), "b": (6, [0, 3]), "c": (3, [6])}  # name: length before the append, its pages
PAGE_SIZE, NUM_PAGES = 4, 8


def pages():
    """Requests, block table, pages, the appended token, and what attention reads."""
    p = Picture(900, 330, "Three requests, their block table, and the pages that hold their keys and values")
    cell = 22
    p.text(20, 26, "requests: keys so far, and one new token", bold=True)
    p.text(400, 26, "block_table", bold=True)
    owner = {}
    for i, (name, (length, own)) in enumerate(REQUESTS.items()):
        y = 42 + 34 * i
        p.text(20, y + 16, f"request {i}")
        for key in range(length + 1):
            p.box(90 + cell * key, y, cell, cell, "new" if key == length else name, str(key))
        for entry in range(max(len(pages) for _, pages in REQUESTS.values())):
            used = entry < len(own)
            p.box(400 + 44 * entry, y, 44, cell, name if used else "empty", str(own[entry]) if used else "any")
        for key in range(length + 1):
            page, slot = own[key // PAGE_SIZE], key % PAGE_SIZE
            owner[page, slot] = (name, key, key == length)
        p.text(545, y + 16, f"cache_seqlens[{i}] = {length}")
    width = PAGE_SIZE * cell + 16
    p.text(20, 190, f"k_cache, v_cache: {NUM_PAGES} pages of {PAGE_SIZE} slots; each slot is one token, all heads",
           bold=True)  # fmt: skip
    for page in range(NUM_PAGES):
        x = 20 + page * (width + 4)
        p.text(x, 216, f"page {page}", role="faint")
        for slot in range(PAGE_SIZE):
            name, key, new = owner.get((page, slot), ("empty", "", False))
            p.box(x + cell * slot, 224, cell, cell, "new" if new else name, str(key))
    p.text(
        20,
        278,
        "One call writes each new token (red) into its slot, then attends: its query sees all keys of its request.",
    )
    p.text(20, 298, "Slots without a number, and table entries marked “any”, are never read: they may hold anything.")
    p.text(20, 318, "Key j lies in page block_table[request][j // page_size], slot j % page_size.", role="faint")
    return p


MASKS = [
    ("causal=True", {"window_right": 0}),
    ("causal=True, cache_leftpad=3", {"window_right": 0, "leftpad": 3}),
    ("causal=True, window_size=(2, 0)", {"window_left": 2, "window_right": 0}),
    ("window_size=(2, 1)", {"window_left": 2, "window_right": 1}),
    ("causal=True, attention_chunk=4", {"window_right": 0, "attention_chunk": 4}),
    ("causal=True, attention_chunk=4,\ncache_leftpad=3", {"window_right": 0, "attention_chunk": 4, "leftpad": 3}),
]


def masks():
    """Which keys the 5 queries of a request with 9 keys see."""
    kv_len, q_len, cell = 9, 5, 24
    p = Picture(900, 520, "The position rule and the masks: which keys each query sees")
    p.text(20, 26, f"kv_len = {kv_len} keys, q_len = {q_len} queries: token t is at q_pos = kv_len - q_len + t",
           bold=True)  # fmt: skip
    for i, (label, mask) in enumerate(MASKS):
        x, y = 60 + i % 3 * 285, 100 + i // 3 * 215
        for j, row in enumerate(label.split("\n")):
            p.text(x, y - 34 + 15 * j, row, bold=True)
        for key in range(kv_len):
            p.text(x + cell * key + cell / 2, y - 5, str(key), "middle", "faint", size=10)
        for t in range(q_len):
            q_pos = kv_len - q_len + t
            seen = visible_keys(q_pos, kv_len, **mask)
            p.text(x - 8, y + cell * t + 16, f"t={t}", "end", "faint", size=10)
            for key in range(kv_len):
                fill = "a" if key in seen else "empty"
                p.box(x + cell * key, y + cell * t, cell, cell, fill, line="ink" if key == q_pos else "line", radius=1)
    p.text(20, 500, "Columns are keys, rows are queries; filled = seen; a dark frame marks the query's own position. "
           "Chunks count from the first key that exists.", role="faint")  # fmt: skip
    return p


PICTURES = {"pages": pages, "masks": masks, **house.PICTURES}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().write(FOLDER / f"{name}.svg")
        print(FOLDER / f"{name}.svg")
