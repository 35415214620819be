"""Continuous batching, from a trace of examples/engine.py (docs/data/engine_trace.json)."""

from data import load
from svg import MARGIN, Picture


def batching() -> Picture:
    trace = load("engine_trace").content
    steps, requests = trace["steps"], trace["requests"]
    tokens = [{int(number): count for number, count in step["tokens"].items()} for step in steps]
    kinds = [{} for _ in range(requests)]  # of every request: step -> colour
    for number, own in enumerate(kinds):
        at = [i for i, of_step in enumerate(tokens) if number in of_step]
        pieces = len(at) - (trace["new_tokens"] - 1)  # the last piece of a prompt gives the first new token
        own.update({step: "c" if i < pieces else "a" for i, step in enumerate(at)})
    p = Picture("Continuous batching: which request computes what in each step of the engine")
    left, row = MARGIN + 78, 14
    width = (p.width - MARGIN - left) / len(steps)

    p.heading(24, f"{requests} requests arrive at once and share {trace['num_pages']} pages; a step computes at most "
           f"{trace['step_tokens']} tokens")  # fmt: skip
    p.legend(46, [("band", "waits for pages or its turn"), ("c", "a piece of its prompt"), ("a", "a new token")])
    y = 62
    for number in range(requests):
        top = y + row * number
        p.text(left - 8, top + 11, f"request {number}", "end", "faint", size=11)
        if min(kinds[number]):
            p.box(left, top + 1, width * min(kinds[number]), row - 2, "band", line=None, radius=0)
        for begin, end, fill in runs(kinds[number]):
            p.box(left + width * begin, top + 1, width * (end - begin), row - 2, fill, line="page", radius=0)

    y += row * requests + 26
    p.text(left - 8, y + 34, "tokens of", "end", "faint", size=11)
    p.text(left - 8, y + 48, "the step", "end", "faint", size=11)
    height = 60
    for i, own in enumerate(tokens):
        new = sum(kinds[number][i] == "a" for number in own)
        for fill, low, high in (("a", 0, new), ("c", new, sum(own.values()))):
            if high > low:
                unit, x = height / trace["step_tokens"], left + width * i
                p.box(x, y + height - unit * high, width - 0.5, unit * (high - low), fill, line=None, radius=0)
    p.text(left, y - 5, str(trace["step_tokens"]), role="faint", size=11)
    p.line((left, y), (left + width * len(steps), y), role="band")

    y += height + 24
    p.text(left - 8, y + 20, "pages", "end", "faint", size=11)
    p.text(left - 8, y + 34, "in use", "end", "faint", size=11)
    height = 40
    for i, step in enumerate(steps):
        high = height * step["pages"] / trace["num_pages"]
        p.box(left + width * i, y + height - high, width, high, "b", line=None, radius=0)
    p.text(left, y - 5, str(trace["num_pages"]), role="faint", size=11)
    p.line((left, y), (left + width * len(steps), y), role="band")
    for i in range(0, len(steps) + 1, 20):
        p.text(left + width * i, y + height + 15, f"step {i}" if i == 0 else str(i), "middle", "faint", size=11)
    return p


def runs(kinds: dict[int, str]) -> list[tuple[int, int, str]]:
    """(first step, end, colour): a piece of a prompt each, steps with one new token joined."""
    found = []
    for step, fill in kinds.items():
        if fill == "a" and found and found[-1][1:] == (step, "a"):
            found[-1] = (found[-1][0], step + 1, fill)
        else:
            found.append((step, step + 1, fill))
    return found
