"""Pictures of what was measured. Times come from docs/data/, bytes and operations from the shapes of the benchmarks."""

import cpu_cases
import cuda_cases
from chart import Bar, Limit, Point, Roofline, bars
from data import Run, load, name_in, number
from svg import MARGIN, Picture, text_width


def heading(p: Picture, title: str, run: Run, entries: list[tuple[str, str]]) -> float:
    """Returns where the picture itself may begin."""
    p.text(MARGIN, 24, title, bold=True, size=13)
    p.text(MARGIN, 42, run.source, role="faint")
    p.legend(64, entries)
    return 82


def decode() -> Picture:
    run = load("decode_h200")
    p = Picture("Decode over a paged cache on an H200, beside FlashAttention 3 in the same run")
    rate = run.content["read_gb_per_s"] * 1e9
    cases = {case.name: case for case in cuda_cases.decode_cases() if case.kind == "decode"}
    groups = []
    for row in run.rows:
        if row["case"] not in cases:
            continue
        size = cases[row["case"]].bytes

        def share(us, size=size):
            return size / (us * 1e-6) / rate

        ours, peer = share(number(row["ours us"])), share(number(row["best peer here us"]))
        own = [Bar("ours", ours, f"{100 * ours:.0f} %"),
               Bar("peer", peer, f"{100 * peer:.0f} % {name_in(row['best peer here us'])}")]  # fmt: skip
        groups.append((row["case"], own, min(1, share(number(row["floor us"])))))
    y = heading(p, "Decode: how much of the memory's speed a call reaches", run,
                [("ours", "paged-attn"), ("peer", "FlashAttention 3 in this run"),
                 ("ink", "reading the same pages only")])  # fmt: skip
    bars(p, y, groups, f"share of the {rate * 1e-9:.0f} GB/s at which this GPU reads; bf16, 32/8 heads of 128, pages "
         "of 16 unless named")  # fmt: skip
    return p


PREFILL_PEERS = [("FlashAttention 3", "peer"), ("cuDNN", "other")]


def floor_seconds(case, run: Run) -> float:
    return max(case.flops / run.content["tflop_per_s"] * 1e-12, case.bytes / run.content["read_gb_per_s"] * 1e-9)


def prefill_rows(run: Run) -> list[tuple]:
    """(case of the benchmark, row of the table), all in 16 bits: the matrix unit has another rate in 8."""
    cases = {case.name: case for case in cuda_cases.prefill_cases() if case.dtype == "bfloat16" and not case.kv_dtype}
    names = {row["case"].split(", 60 to")[0].split(" (the decode")[0]: row for row in run.rows}
    assert names.keys() == cases.keys()
    return [(cases[name], row) for name, row in names.items()]


def prefill() -> Picture:
    run = load("prefill_h200")
    p = Picture("Long queries on an H200, beside FlashAttention 3 and cuDNN in the same run")
    groups = []
    for case, row in prefill_rows(run):
        own = []
        for column, fill in [("ours", "ours"), *PREFILL_PEERS]:
            us = number(row[column])
            if us:
                share = floor_seconds(case, run) / (us * 1e-6)
                own.append(Bar(fill, share, f"{us:g} us: {name_in(row[column])} TFLOP/s"))
        groups.append((case.name, own, None))
    y = heading(p, "Prefill, chunks, drafts: how much of what the GPU can do a call reaches", run,
                [("ours", "paged-attn"), *((fill, name) for name, fill in PREFILL_PEERS)])  # fmt: skip
    bars(p, y, groups, f"the floor over the time of a call; the floor is {run.content['tflop_per_s']} TFLOP/s or "
         f"{run.content['read_gb_per_s']} GB/s, whichever takes longer")  # fmt: skip
    return p


def decode_cpu() -> Picture:
    run = load("decode_zen4")
    p = Picture("Decode over a paged cache on two cores of a Zen 4, beside the best other paged kernel of the same run")
    groups = []
    for row in run.rows:
        if "resident" in row["case"]:
            continue
        read, ours, peer = (number(row[name]) for name in ("read ms", "ours ms", "best paged peer ms"))
        own = [Bar("ours", read / ours, f"{100 * read / ours:.0f} %"),
               Bar("peer", read / peer, f"{100 * read / peer:.0f} % {name_in(row['best paged peer ms']).split()[0]}"),
               ]  # fmt: skip
        groups.append((f"{row['case']} {row['dtype']}".replace("32/8 D128 ", ""), own, None))
    y = heading(p, "Decode on a CPU: how much of the memory's speed a call reaches", run,
                [("ours", "paged-attn"), ("peer", "best other paged kernel of this run")])  # fmt: skip
    bars(p, y, groups, "share of the rate of a plain read of the same bytes, measured beside it; 32/8 heads of 128 "
         "unless named")  # fmt: skip
    return p


def roofline() -> Picture:
    decode, prefill = load("decode_h200"), load("prefill_h200")
    p = Picture("Roofline of every measured case on an H200")
    times = {row["case"]: number(row["ours us"]) * 1e-6 for row in decode.rows}
    points = []
    for case in cuda_cases.decode_cases():
        if case.kind == "decode":
            fill = "good" if case.cache_dtype else "ours"
            points.append(Point(case.flops / case.bytes, case.flops / times[case.name], case.name, fill))
    for case, row in prefill_rows(prefill):
        rate = case.flops / (number(row["ours"]) * 1e-6)
        points.append(Point(case.flops / case.bytes, rate, case.name, "peer"))
    content = prefill.content
    limit = Limit((content["read_gb_per_s"] * 1e9,), content["tflop_per_s"] * 1e12,
                  f"{content['tflop_per_s']} TFLOP/s, {content['read_gb_per_s']} GB/s")  # fmt: skip
    y = heading(p, "Roofline: every measured case on an H200", prefill,
                [("ours", "decode"), ("good", "decode, 8-bit cache"), ("peer", "prefill, chunks, drafts")])  # fmt: skip
    Roofline(p, y + 12, 420, points, [limit]).draw()
    p.paragraph(p.bottom + 22, "Operations and bytes are those of the shapes; where points crowd, some have no name.",
                role="faint")  # fmt: skip
    return p


def roofline_cpu() -> Picture:
    runs = [(load("decode_zen4"), "decode"), (load("prefill_zen4"), "prefill")]
    p = Picture("Roofline of every measured case on two cores of a Zen 4")
    fills = {"bf16": "ours", "fp16": "good", "fp32": "peer"}
    cases = {(case.label, case.dtype): case for case in cpu_cases.all_cases() if case.kind != "write"}
    points = []
    for run, _ in runs:
        for row in run.rows:
            case = cases[row["case"], row["dtype"]]
            seconds = number(row["ours ms"]) * 1e-3
            label = case.label.replace("32/8 D128 ", "")
            points.append(Point(case.flops / case.bytes, case.flops / seconds, label, fills[case.dtype]))
    content = runs[0][0].content
    reads = tuple(rate * 1e9 for rate in content["read_gb_per_s"])
    limits = [Limit(reads, content["tflop_per_s"][dtype] * 1e12,
                    f"{name}: {1000 * content['tflop_per_s'][dtype]:.0f} GFLOP/s", "faint")
              for name, dtype in (("bf16", "bf16"), ("fp32, fp16", "fp32"))]  # fmt: skip
    y = heading(p, "Roofline: every measured case on two cores of a Zen 4", runs[0][0],
                [(fill, dtype) for dtype, fill in fills.items()])  # fmt: skip
    Roofline(p, y + 12, 420, points, limits).draw()
    slow, fast = content["read_gb_per_s"]
    p.paragraph(p.bottom + 22, f"Two slopes: neighbours on the host move the read rate between {slow} and {fast} GB/s. "
                "The case of 512 resident keys reads from the processor's caches.", role="faint")  # fmt: skip
    return p


# ---- Where time goes ----


def least_times(model: dict, run: dict, read_rate: float, multiply_rate: float) -> list[tuple[str, str, float]]:
    """(what, colour, seconds) that a run of the engine must take at least, counted from its shape."""
    width = model["head_dim"] * (model["q_heads"] + 2 * model["kv_heads"])
    of_layer = model["hidden"] * (width + model["head_dim"] * model["q_heads"] + 3 * model["inner"])
    layers, head = model["layers"] * of_layer, model["hidden"] * model["vocabulary"]
    tokens, steps = run["requests"] * run["prompt"], run["new"] - 1  # the prompt's step gives the first new token
    attention = 4 * model["layers"] * model["q_heads"] * model["head_dim"] * tokens * (run["prompt"] + 1) / 2
    key = 2 * 2 * model["layers"] * model["kv_heads"] * model["head_dim"]  # bytes of a token's keys and values
    keys = run["requests"] * (run["prompt"] * steps + steps * (steps + 1) / 2)
    return [
        ("multiply the prompts", "c", (2 * layers * tokens + attention) / multiply_rate),
        ("read the weights, once a step", "b", 2 * (layers + head) * steps / read_rate),
        ("read the keys and values", "a", key * keys / read_rate),
    ]


def engine_time() -> Picture:
    run = load("engine_h200")
    content = run.content
    p = Picture("Where the time of the example engine goes on an H200")
    rates = content["read_gb_per_s"] * 1e9, content["tflop_per_s"] * 1e12
    parts = least_times(content["model"], content["runs"][0], *rates)
    y = heading(p, "An engine's run: what it must take at least, and what it took", run,
                [*((fill, name) for name, fill, _ in parts), ("band", "all the rest")]) + 8  # fmt: skip
    totals = [one["requests"] * one["new"] / one["new_tokens_per_s"] for one in content["runs"]]
    scale = (p.width - 2 * MARGIN) / max(totals)
    for one, total in zip(content["runs"], totals):
        p.heading(y, f"{one['requests']} requests of {one['prompt']} + {one['new']} tokens: "
               f"{one['new_tokens_per_s']} new tokens/s, {total:.2f} s")  # fmt: skip
        parts, x = least_times(content["model"], one, *rates), MARGIN
        parts.append(("all the rest", "band", total - sum(seconds for _, _, seconds in parts)))
        for _, fill, seconds in parts:
            label = f"{seconds:.2f} s, {100 * seconds / total:.0f} %"
            short = label if text_width(label) < seconds * scale else f"{seconds:.2f} s"
            p.box(x, y + 10, seconds * scale, 30, fill, short if text_width(short) < seconds * scale else "")
            x += seconds * scale
        y += 68
    step = content["step"]
    kernels = step["kernels_us"]
    p.heading(y, f"One of its steps, {step['requests']} requests with one new token each, as torch's profiler sees it: "
           f"{step['step_us'] / 1e3:.2f} ms")  # fmt: skip
    phases = [*kernels.items(), ("GPU waits", step["step_us"] - sum(kernels.values()))]
    fills, x = ("b", "a", "d", "c", "e", "new", "band"), MARGIN
    scale = (p.width - 2 * MARGIN) / step["step_us"]
    for (_, microseconds), fill in zip(phases, fills, strict=True):
        label = f"{microseconds / 1e3:.2f}"
        p.box(x, y + 10, microseconds * scale, 30, fill, label if text_width(label) < microseconds * scale else "")
        x += microseconds * scale
    p.legend(y + 60, [(fill, f"{what} {us / 1e3:.2f}") for (what, us), fill in zip(phases, fills, strict=True)])
    y += 90
    p.paragraph(y - 4, f"In the runs: counted from the shape of Llama 3.1 8B at {content['tflop_per_s']} TFLOP/s and "
                f"{content['read_gb_per_s']} GB/s, what this GPU multiplies and reads at best. The rest is measured "
                "time beyond that: products and reads below these rates, small kernels, launches, and the engine's own "
                "Python.", role="faint")  # fmt: skip
    return p


def call_time() -> Picture:
    run = load("call_h200")
    content, phases = run.content, run.content["phases"]
    p = Picture("Where the time of one short decode call goes on an H200")
    p.text(MARGIN, 24, f"One call: {content['call']}", bold=True, size=13)
    p.text(MARGIN, 42, run.source, role="faint")
    left = MARGIN + max(text_width(phase["what"]) for phase in phases) + 10
    y, end = 60, phases[-1]["to"]
    scale = (p.width - MARGIN - 50 - left) / end
    low = y + 24 * len(phases)
    for tick in range(0, int(end) + 1, 2):
        p.line((left + scale * tick, y - 4), (left + scale * tick, low), role="band")
        p.text(left + scale * tick, low + 14, f"{tick} us" if tick == 0 else str(tick), "middle", "faint", size=11)
    for i, phase in enumerate(phases):
        top = y + 24 * i
        start, length = left + scale * phase["from"], scale * (phase["to"] - phase["from"])
        reading = phase["what"].startswith("read")
        p.text(left - 8, top + 13, phase["what"], "end")
        p.box(start, top, length, 18, "b" if reading else "c")
        if reading:
            p.box(
                start, top, scale * content["read_alone_us"], 18, "a", f"reading alone: {content['read_alone_us']} us"
            )
        p.text(start + length + 5, top + 13, f"{phase['to'] - phase['from']:.1f}", role="faint", size=11)
    p.paragraph(low + 34, "Each phase begins where the latest block ended the one before. Orange: nothing is read or "
                "multiplied.", role="faint")  # fmt: skip
    return p
