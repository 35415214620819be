"""Which route a call takes, as questions. The names of routes are those of the sources."""

from house import DEVICES, routes
from svg import MARGIN, Picture

SMALL = 11
QUESTIONS, SECOND, ROUTES = (MARGIN, 330), (400, 196), (652, 164)  # left edge and width of a column


class Tree:
    """Questions on the left, more of them in the middle, routes on the right."""

    def __init__(self, picture: Picture, backend: str):
        self.p, self.colour, self.left = picture, DEVICES[backend][1], set(routes(backend))

    def ask(self, column, y, height, text):
        self.p.box(column[0], y, column[1], height, "empty", text, size=SMALL)

    def route(self, y, height, *names, note=""):
        assert self.left.issuperset(names) or not names, names
        self.p.box(ROUTES[0], y, ROUTES[1], height, self.colour)
        lines = [*names, note] if note else list(names)
        for i, line in enumerate(lines):
            middle = y + height / 2 + 4 + 15 * (i - (len(lines) - 1) / 2)
            self.p.text(ROUTES[0] + ROUTES[1] / 2, middle, line, "middle", bold=line != note, size=SMALL)

    def yes(self, column, y, to, at=None):
        """at: where the word stands, if not in the middle."""
        begin = column[0] + column[1]
        self.p.arrow((begin + 2, y), (to[0] - 3, y))
        self.p.text((begin + to[0]) / 2 if at is None else at, y - 5, "yes", "middle", "faint", size=SMALL)

    def no(self, x, y, end):
        self.p.arrow((x, y + 2), (x, end - 3))
        self.p.text(x + 7, (y + end) / 2 + 4, "no", role="faint", size=SMALL)

    def no_and_right(self, x, y, level):
        """Down to a level, and there to the routes."""
        self.p.arrow((x, y + 2), (x, level), (ROUTES[0] - 3, level))
        self.p.text(x + 7, y + 15, "no", role="faint", size=SMALL)


def which_route() -> Picture:
    p = Picture("Which route a call takes")
    cuda(p, 24)
    cpu(p, p.bottom + 34)
    metal(p, p.bottom + 34)
    p.paragraph(p.bottom + 24, "Rare conditions are left out: explain() names every one that a call does not meet.",
                role="faint")  # fmt: skip
    return p


def cuda(p: Picture, y: float) -> None:
    t, down, middle = Tree(p, "cuda"), QUESTIONS[0] + 40, SECOND[0] + 40
    p.heading(y, "CUDA")
    y += 12
    t.ask(QUESTIONS, y, 44, "Multi-head latent attention: (576, 512) with values\n"
          "in the keys, or (64, 512) with qv? A head_dim of 512?")  # fmt: skip
    t.yes(QUESTIONS, y + 22, SECOND)
    t.ask(SECOND, y, 44, "Hopper, q in 16 bits?")
    t.yes(SECOND, y + 22, ROUTES)
    t.route(y, 44, "mla", "wide_heads")
    t.no(down, y + 44, y + 68)
    t.no_and_right(middle, y + 44, y + 80)

    y += 68
    t.ask(QUESTIONS, y, 58, "Other qv, other heads above 256, float32 q over an\n8-bit cache, "
          "or rows that are no whole pieces\nof 16 bytes?")  # fmt: skip
    t.yes(QUESTIONS, y + 44, ROUTES, at=372)
    t.route(y, 58, "fallback")
    t.no(down, y + 58, y + 82)

    y += 82
    t.ask(QUESTIONS, y, 30, "More than 16 rows of a kv_head in a request?")
    t.yes(QUESTIONS, y + 15, SECOND)
    t.ask(SECOND, y, 30, "float32?")
    t.yes(SECOND, y + 15, ROUTES)
    t.route(y, 30, "float32")
    t.no(middle, y + 30, y + 54)

    t.ask(SECOND, y + 54, 44, "enough tiles of rows\nto fill the GPU?")
    t.yes(SECOND, y + 76, ROUTES)
    t.route(y + 42, 36, "prefill", note="on Hopper")
    t.route(y + 82, 36, "prefill_mma", note="on other GPUs")
    t.no_and_right(middle, y + 98, y + 135)
    t.route(y + 122, 26, "decode")
    t.no(down, y + 30, y + 164)

    y += 164
    t.ask(QUESTIONS, y, 44, "What engines ask for: pages, lengths, a head_dim of\n64, 128 or 256, sinks at most?")
    t.yes(QUESTIONS, y + 22, ROUTES)
    t.route(y, 44, "decode_basic")
    t.no_and_right(down, y + 44, y + 67)
    t.route(y + 54, 26, "decode")


def cpu(p: Picture, y: float) -> None:
    t, down, middle = Tree(p, "cpu"), QUESTIONS[0] + 40, SECOND[0] + 40
    p.heading(y, "CPU: the rows of a kv_head in an item decide")
    y += 12
    t.ask(QUESTIONS, y, 44, "An Intel processor with AMX,\nand q is not in float32?")
    t.yes(QUESTIONS, y + 22, SECOND)
    t.ask(SECOND, y, 44, "q and cache in a type of the unit,\nup to 16 rows, 32 keys or more?")
    t.yes(SECOND, y + 22, ROUTES)
    t.route(y, 44, "tiles_in_place_bf16", "tiles_in_place_fp16")
    t.no(middle, y + 44, y + 68)
    t.ask(SECOND, y + 68, 44, "8 rows or more (float16\nwithout AMX-FP16: 24)?")
    t.yes(SECOND, y + 90, ROUTES)
    t.route(y + 68, 44, "tiles_bf16", "tiles_fp16")
    t.no_and_right(middle, y + 112, y + 210)
    t.no(down, y + 44, y + 136)
    y += 136
    t.ask(QUESTIONS, y, 44, "Many rows: from 12 to 24 on, by the dtypes\nand the instruction set?")
    t.yes(QUESTIONS, y + 22, ROUTES, at=372)
    t.route(y - 4, 52, "packed_bf16", "packed_fp16", "packed_f32")
    t.no_and_right(down, y + 44, y + 90)
    t.route(y + 56, 52, "in_place_bf16", "in_place_fp16", "in_place_f32")


def metal(p: Picture, y: float) -> None:
    t, down = Tree(p, "metal"), QUESTIONS[0] + 40
    p.heading(y, "Metal")
    y += 12
    t.ask(QUESTIONS, y, 44, "More than 8 rows of a kv_head in a request, q in 16 or\n"
          "8 bits, head_dim up to 128, no qv?")  # fmt: skip
    t.yes(QUESTIONS, y + 22, ROUTES)
    t.route(y, 44, "prefill")
    t.no(down, y + 44, y + 68)
    t.ask(QUESTIONS, y + 68, 30, "head_dim up to 256, no qv?")
    t.yes(QUESTIONS, y + 83, ROUTES)
    t.route(y + 68, 30, "decode")
    t.no_and_right(down, y + 98, y + 123)
    t.route(y + 110, 26, "wide")
