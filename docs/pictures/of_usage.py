"""Pictures of what a call means: pages and block table, the append step by step, the masks.

Which keys a query sees comes from the tests' reference.
"""

from reference import visible_keys
from svg import MARGIN, REQUESTS, Picture

PAGE_SIZE = 4


class Request:
    """One request of a picture: its keys before the call, its new tokens, and the pages it owns."""

    def __init__(self, cache_seqlen: int, new: int, pages: list[int]):
        self.cache_seqlen, self.new, self.pages = cache_seqlen, new, pages
        self.kv_len = cache_seqlen + new
        assert len(pages) == -(-self.kv_len // PAGE_SIZE)

    def slot(self, key: int) -> tuple[int, int]:
        return self.pages[key // PAGE_SIZE], key % PAGE_SIZE

    def fill(self, key: int, colour: str) -> str:
        return "new" if key >= self.cache_seqlen else colour


def draw_page(p: Picture, x, y, cell, request: Request | None, page: int, colour: str, radius=2) -> None:
    """The slots of a page, with the numbers of the keys in them."""
    own = {request.slot(key): key for key in range(request.kv_len)} if request else {}
    for slot in range(PAGE_SIZE):
        key = own.get((page, slot))
        fill = "empty" if key is None else request.fill(key, colour)
        p.box(x + cell * slot, y, cell, cell, fill, "" if key is None else str(key), radius=radius)


def pages() -> Picture:
    requests = [Request(9, 1, [5, 7, 2]), Request(6, 1, [0, 3]), Request(3, 1, [6])]
    num_pages, columns = 8, max(len(r.pages) for r in requests)
    p = Picture("One call: new tokens are appended to the pages of their requests, and their queries attend over them")
    cell, card = 22, (p.width - 2 * MARGIN) / len(requests)

    p.heading(24, "1. The call: one new token (q, k, v) of each request")
    sources = []
    for i, (request, colour) in enumerate(zip(requests, REQUESTS)):
        x, y = MARGIN + card * i, 36
        p.box(x, y, card - 10, 70, "page", line="line", radius=5)
        p.box(x, y, 5, 70, colour, line=None, radius=0)
        p.text(x + 14, y + 19, f"request {i}", bold=True)
        p.text(x + card - 20, y + 19, f"cache_seqlens[{i}] = {request.cache_seqlen}", "end", "faint")
        for j, name in enumerate("qkv"):
            p.box(x + 14 + 26 * j, y + 32, 22, 22, "new", name)
        sources.append((x + 14 + 26 * 1.5 + 9, y + 54))
        left = x + card - 18 - 28 * columns
        p.text(left - 5, y + 47, "block_table", "end", "faint")
        for entry in range(columns):
            used = entry < len(request.pages)
            label = str(request.pages[entry]) if used else "any"
            fill, role, size = (colour, "ink", 12) if used else ("empty", "faint", 11)
            p.box(left + 28 * entry, y + 32, 28, 22, fill, label, role=role, size=size)

    top = 196
    p.heading(top - 44, "2. The cache")
    p.text(MARGIN, top - 27, f"{num_pages} pages of {PAGE_SIZE} slots", role="faint")
    gap = (p.width - 2 * MARGIN - num_pages * PAGE_SIZE * cell) / (num_pages - 1)
    left_of = [MARGIN + page * (PAGE_SIZE * cell + gap) for page in range(num_pages)]
    owner = {page: (r, colour) for r, colour in zip(requests, REQUESTS) for page in r.pages}
    for page, x in enumerate(left_of):
        draw_page(p, x, top, cell, *(owner[page][0] if page in owner else None, page), owner.get(page, (0, ""))[1])
        p.text(x + PAGE_SIZE * cell / 2, top + cell + 15, f"page {page}", "middle", "faint")
    for request, source in zip(requests, sources):
        page, slot = request.slot(request.kv_len - 1)
        p.curve(source, (left_of[page] + cell * (slot + 0.5), top - 2), role="new")

    top += cell + 48
    p.heading(top, "3. Attention: each query sees all keys of its request, in the order of its table")
    cell = 17
    for i, (request, colour) in enumerate(zip(requests, REQUESTS)):
        x, y = MARGIN + card * i, top + 14
        p.box(x, y, 20, cell + 3, "new", "q")
        x += 27
        for n, page in enumerate(request.pages):
            count = min(PAGE_SIZE, request.kv_len - n * PAGE_SIZE)
            for key in range(n * PAGE_SIZE, n * PAGE_SIZE + count):
                slot = x + cell * (key % PAGE_SIZE)
                p.box(slot, y + 1.5, cell, cell, request.fill(key, colour), str(key), size=11, radius=1)
            p.text(x, y + cell + 17, f"page {page}" if count > 2 else f"p. {page}", role="faint", size=11)
            x += cell * count + 5
        p.arrow((x - 1, y + 10), (x + 11, y + 10))
        p.box(x + 14, y, 28, cell + 3, colour, "out")
    p.paragraph(
        top + 74,
        "Red: what is new. Key j of a request lies in page block_table[request][j // page_size], slot j % page_size. "
        "Slots without a number and table entries “any” are never read: they may hold anything.",
        role="faint",
    )
    return p


def append() -> Picture:
    request, colour = Request(6, 4, [3, 1, 6]), "a"
    p = Picture("The append inside a call, step by step: position, rotation, place, write, attention")
    label, note = MARGIN, 538
    left, column = 142, 96
    tokens = range(request.new)
    key_of = [request.cache_seqlen + t for t in tokens]

    p.text(
        left, 24, f"cache_seqlens = {request.cache_seqlen},   block_table = {request.pages},   page_size = {PAGE_SIZE}"
    )
    p.text(label, 24, "Given", bold=True)

    def step(y, name, cells, fill, about):
        p.text(label, y + 16, name, bold=True)
        for t, text in enumerate(cells):
            p.box(left + column * t, y, column - 8, 24, fill, text)
        p.paragraph(y + 10, about, x=note, role="faint", size=11)

    y = 38
    step(y, "new tokens", [f"k{t}, v{t}, q{t}" for t in tokens], "new", "k, v: (batch, seqlen_new, kv_heads, head_dim)")
    y += 42
    step(y, "1. position", [str(key) for key in key_of], "empty",
         "cache_seqlens + t: right after the keys that are there already")  # fmt: skip
    y += 42
    step(y, "2. rotate k and q", [f"cos, sin [{key}]" for key in key_of], "empty",
         "only if rotary_cos and rotary_sin are given; v is not rotated")  # fmt: skip
    y += 42
    places = [request.slot(key) for key in key_of]
    step(y, "3. place", [f"page {page}, slot {slot}" for page, slot in places], "empty",
         "page = block_table[position // page_size], slot = position % page_size")  # fmt: skip
    starts = [(left + column * t + (column - 8) / 2, y + 24) for t in tokens]

    y += 78
    cell, gap = 26, 14
    p.text(label, y + 17, "4. write k and v", bold=True)
    for n, page in enumerate(request.pages):
        x = left + n * (PAGE_SIZE * cell + gap)
        draw_page(p, x, y, cell, request, page, colour)
        p.text(x, y + cell + 15, f"page {page}", role="faint")
    for key, start in zip(key_of, starts):
        n, slot = divmod(key, PAGE_SIZE)
        p.curve(start, (left + n * (PAGE_SIZE * cell + gap) + cell * (slot + 0.5), y - 2), role="new")
    p.paragraph(y + 4, "in the cache's dtype; 8-bit caches hold value / descale. No other slot changes.", x=note + 6,
                role="faint", size=11)  # fmt: skip

    y += cell + 32
    p.text(label, y + 12, "5. attend", bold=True)
    p.text(label, y + 28, "(causal=True)", role="faint")
    for t, q_pos in enumerate(key_of):
        seen = visible_keys(q_pos, request.kv_len, window_right=0)
        p.text(left - 8, y + 13 + 20 * t, f"q{t}", "end", "faint")
        for key in range(request.kv_len):
            n, slot = divmod(key, PAGE_SIZE)
            x = left + n * (PAGE_SIZE * cell + gap) + cell * slot
            fill = request.fill(key, colour) if key in seen else "empty"
            p.box(x, y + 20 * t, cell, 17, fill, str(key) if key in seen else "", size=11, radius=1)
    p.paragraph(y + 10, "each query sees the old keys and the new ones up to its own: the same call has just written "
                "them", x=note + 6, role="faint", size=11)  # fmt: skip
    return p


MASKS = [  # title, number of keys, arguments of the reference
    ("no mask", 9, {}),
    ("causal=True", 9, {"window_right": 0}),
    ("causal=True\nwindow_size=(2, 0)", 9, {"window_left": 2, "window_right": 0}),
    ("window_size=(2, 1)", 9, {"window_left": 2, "window_right": 1}),
    ("causal=True\ncache_leftpad=3", 9, {"window_right": 0, "leftpad": 3}),
    ("causal=True\nattention_chunk=4", 9, {"window_right": 0, "attention_chunk": 4}),
    ("causal=True\nattention_chunk=4\ncache_leftpad=3", 9, {"window_right": 0, "attention_chunk": 4, "leftpad": 3}),
    ("causal=True\n3 keys, 5 queries", 3, {"window_right": 0}),
]


def masks() -> Picture:
    """Which keys the 5 queries of a request see."""
    q_len, cell, columns = 5, 17, 4
    p = Picture("The position rule and the masks: which keys each query sees")
    p.heading(24, "Token t stands at q_pos = kv_len - q_len + t: the last query at the last key.")
    panel = (p.width - 2 * MARGIN) / columns
    for i, (title, kv_len, mask) in enumerate(MASKS):
        x, y = MARGIN + 26 + i % columns * panel, 100 + i // columns * 180
        for j, row in enumerate(reversed(title.split("\n"))):
            p.text(x - 26, y - 22 - 15 * j, row, bold=True)
        for key in range(kv_len):
            p.text(x + cell * (key + 0.5), y - 4, str(key), "middle", "faint", size=11)
        for t in range(q_len):
            q_pos = kv_len - q_len + t
            seen = visible_keys(q_pos, kv_len, **mask)
            p.text(x - 5, y + cell * t + 13, f"t={t}", "end", "faint", size=11)
            for key in range(kv_len):
                fill = "a" if key in seen else "empty"
                p.box(x + cell * key, y + cell * t, cell, cell, fill, radius=0)
            if 0 <= q_pos < kv_len:
                p.dot(x + cell * (q_pos + 0.5), y + cell * (t + 0.5), 2.5, "ink", line=None)
            if not seen:
                p.text(x + cell * kv_len + 6, y + cell * t + 13, "sees no key: out = 0", role="faint", size=11)
    p.paragraph(p.bottom + 26, "Columns are keys, rows are queries. Filled: the query sees the key. Dot: the query's "
                "own position. Chunks are counted from the first key that exists.", role="faint")  # fmt: skip
    return p
