"""How the CPU backend cuts a call. Plans come from its planner, compiled for Python (tests/native/)."""

import heapq
import sys
from functools import cache
from pathlib import Path

from svg import MARGIN, REQUESTS, Picture, text_width

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests" / "native"))
import build

SMALL = 11


@cache
def native():
    return build.load()


def plan_of(threads: int, **call) -> dict:
    shape = {"kv_heads": 8, "group": 4, "head_dim": 128, "window_right": 0, "page_size": 1 << 20}
    return native().cpu.plan({**shape, "batch": len(call["cache_seqlens"]), **call}, threads)


def dealt(plan: dict, threads: int) -> list[list[tuple[int, int, int]]]:
    """(task, when it begins, when it ends) of each thread, where all are equally fast: its own task first, then the
    next one that nobody has."""
    tasks = plan["tasks"]
    lines, taken = [[] for _ in range(threads)], set()
    free = [(0, thread) for thread in range(threads)]
    while free:
        now, thread = heapq.heappop(free)
        own = next((i for i in [thread, *range(len(tasks))] if i < len(tasks) and i not in taken), None)
        if own is not None:
            taken.add(own)
            lines[thread].append((own, now, now + tasks[own][2]))
            heapq.heappush(free, (lines[thread][-1][2], thread))
    return lines


def numbered(p: Picture, x, y, width, height, fill, label) -> None:
    """A box with its number, where there is room for it."""
    p.box(x, y, width, height, fill, label if text_width(label, SMALL) + 2 < width else "", size=SMALL, radius=0)


def cutting() -> Picture:
    p = Picture("How a call is cut on the CPU: items, splits, tasks, threads")
    decode(p, 24)
    small(p, p.bottom + 34)
    prompt(p, p.bottom + 34)
    return p


def decode(p: Picture, y: float) -> None:
    lens, threads = [16000, 7000, 4000, 1500], 4
    plan = plan_of(threads, cache_seqlens=lens, max_q_len=1)
    works, tasks = plan["works"], plan["tasks"]
    assert len(works) == len(lens) and all(tuple(work["heads"]) == (0, 8) for work in works)
    number = {tuple(task[:2]): i for i, task in enumerate(tasks)}
    p.heading(y, f"Decode from memory: {len(lens)} requests, 8 kv_heads, {threads} threads. An item is a request with "
              "all its kv_heads")  # fmt: skip
    p.text(MARGIN, y + 20, f"Its keys are cut into splits, shorter and shorter ones: {len(tasks)} tasks, numbered "
           "longest first", role="faint", size=SMALL)  # fmt: skip
    left = MARGIN + 130
    unit = (p.width - MARGIN - left) / max(lens)
    for w, work in enumerate(works):
        top = y + 30 + 24 * w
        p.text(left - 8, top + 14, f"item {w}: {lens[work['batch']]} keys", "end", size=SMALL)
        for s, (begin, end) in enumerate(work["splits"]):
            numbered(p, left + unit * begin, top, unit * (end - begin), 20, REQUESTS[w], str(number[w, s]))
    top = y + 30 + 24 * len(works) + 20
    p.text(MARGIN, top, "Every thread takes the task of its own number, then the next one from a counter", role="faint",
           size=SMALL)  # fmt: skip
    lines = dealt(plan, threads)
    unit = (p.width - MARGIN - left) / max(line[-1][2] for line in lines)
    for thread, line in enumerate(lines):
        at = top + 10 + 24 * thread
        p.text(left - 8, at + 14, f"thread {thread}", "end", size=SMALL)
        for task, begin, end in line:
            numbered(p, left + unit * begin, at, unit * (end - begin), 20, REQUESTS[tasks[task][0]], str(task))
    p.paragraph(p.bottom + 16, "Time to the right, all threads equally fast. Short tasks come last, so all threads end "
                "together. Whoever brings the last split of a group of 8 merges their partials.", role="faint",
                size=SMALL)  # fmt: skip


def small(p: Picture, y: float) -> None:
    """Calls that may lie in the caches: one task for each thread."""
    threads = 4
    p.heading(y, f"A short call, whose keys may lie in the caches: one task for each of {threads} threads")
    width, high, left = 300, 96, MARGIN
    for i, (kv_heads, kv_len) in enumerate(((8, 1024), (2, 1024))):
        plan = plan_of(threads, cache_seqlens=[kv_len], max_q_len=1, kv_heads=kv_heads)
        assert len(plan["tasks"]) <= threads
        x = left + i * 420 + 84
        p.text(x, y + 22, f"{kv_len} keys, {kv_heads} kv_heads", role="faint", size=SMALL)
        row = high / kv_heads
        for head in range(0, kv_heads, kv_heads // 2 if kv_heads == 2 else 2):
            name = f"head {head}" if kv_heads == 2 else f"heads {head}, {head + 1}"
            p.text(x - 8, y + 34 + row * head + high / (2 * min(4, kv_heads)), name, "end", "faint", size=SMALL)
        number = {tuple(task[:2]): n for n, task in enumerate(plan["tasks"])}
        for w, work in enumerate(plan["works"]):
            first, last = work["heads"]
            for s, (begin, end) in enumerate(work["splits"]):
                p.box(x + width * begin / kv_len, y + 30 + row * first, width * (end - begin) / kv_len - 1,
                      row * (last - first) - 1, REQUESTS[number[w, s]], f"task {number[w, s]}", size=SMALL,
                      radius=0)  # fmt: skip
    p.paragraph(p.bottom + 16, "Of all ways to take some kv_heads and some splits, the one whose longest task is the "
                "shortest: kv_heads need no merge, splits read whole slots. On Intel's processors whole slots are "
                "preferred.", role="faint", size=SMALL)  # fmt: skip


def prompt(p: Picture, y: float) -> None:
    threads, tokens, before = 2, 240, 256
    kv_len = tokens + before
    plan = plan_of(threads, cache_seqlens=[kv_len], max_q_len=tokens, kv_heads=2)
    works, rows = plan["works"], tokens * 4
    assert all(len(work["splits"]) == 1 for work in works)
    most = max(work["rows"][1] - work["rows"][0] for work in works)
    p.heading(y, f"A prompt: {tokens} new tokens on {before} keys, 2 kv_heads, causal. An item is up to {most} rows of "
              "one kv_head")  # fmt: skip
    height, width = 120, 270
    number = {task[0]: n for n, task in enumerate(plan["tasks"])}
    for work_number, work in enumerate(works):
        (head, _), (first, last) = work["heads"], work["rows"]
        x = MARGIN + 84 + 420 * head
        ((begin, end),) = work["splits"]
        p.box(x + width * begin / kv_len, y + 34 + height * first / rows, width * (end - begin) / kv_len,
              height * (last - first) / rows - 1, REQUESTS[number[work_number] % len(REQUESTS)],
              f"task {number[work_number]}", size=SMALL, radius=0)  # fmt: skip
        p.text(x - 8, y + 34 + height * (first + last) / 2 / rows + 4, f"rows {first} on", "end", "faint", size=SMALL)
    for head in range(2):
        p.text(MARGIN + 84 + 420 * head, y + 24, f"kv_head {head}: keys to the right", role="faint", size=SMALL)
    p.paragraph(p.bottom + 18, "The last rows see the most keys, so they come first. Items are not cut: there are "
                "enough of them for every thread.", role="faint", size=SMALL)  # fmt: skip
