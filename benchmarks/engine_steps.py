"""Where the time of a step of examples/engine.py goes, with the shape of Llama 3.1 8B and random weights, on a GPU.

    python benchmarks/engine_steps.py                           the two workloads of docs/results.md
    python benchmarks/engine_steps.py --layers 4 --out FILE     a smaller model; what was measured, as JSON

Each workload runs as in examples/engine.py. Then torch.profiler looks at some of its steps, with new tokens only and
with pieces of prompts, and the kernels are counted by what they are for. What is left of a step is time in which the
GPU does nothing: the engine's own Python, launches, and the copy of the tokens to the host.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
from engine import PAGE_SIZE, Engine, PagePool, Request, load_model

# requests, prompt, new tokens
WORKLOADS = ((128, 512, 256), (32, 4096, 96))
# By what a kernel's name has in it; the first that fits.
KINDS = (
    ("attention", ("paged_attn",)),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitK")),
    ("norms", ("norm",)),
    ("sampling", ("exponential", "distribution", "reduce_kernel", "argmax", "log_kernel")),
)


def kind_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((kind for kind, names in KINDS if any(name.lower() in lower for name in names)), "small kernels")


def make_requests(count: int, prompt: int, new_tokens: int, vocabulary: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(vocabulary, (prompt,), generator=generator).tolist()  # noqa: E731
    return [Request(draw(), new_tokens) for _ in range(count)]


def run(engine: Engine, requests: list[Request]) -> float:
    """Seconds for all requests, on a pool without any text."""
    engine.pool, engine.arrived = PagePool(len(engine.pool.owners)), 0
    engine.trace.clear()
    start = time.perf_counter()
    for _ in engine.run(requests):
        pass
    return time.perf_counter() - start


def fastest(engine: Engine, make_round, rounds: int) -> tuple[float, list[dict]]:
    """Seconds and steps of the fastest of several runs."""
    return min(((run(engine, make_round()), list(engine.trace)) for _ in range(rounds)), key=lambda one: one[0])


def median(values) -> float:
    return sorted(values)[len(values) // 2]


def steps_by_kind(trace: list[dict]) -> dict[str, list[dict]]:
    """Steps of new tokens only with the most common number of requests, and steps full of pieces of prompts."""
    decode = [s for s in trace if max(s["tokens"].values()) == 1]
    sizes = [len(s["tokens"]) for s in decode]
    common = max(set(sizes), key=sizes.count)
    mixed = [s for s in trace if max(s["tokens"].values()) > 1]
    return {"decode": [s for s in decode if len(s["tokens"]) == common], "prompts": mixed}


def profile(engine: Engine, requests: list[Request], first: int, count: int) -> dict[str, float]:
    """Microseconds of a step, by kind of kernel, over `count` steps of one kind after `first` steps."""
    engine.pool, engine.arrived = PagePool(len(engine.pool.owners)), 0
    engine.trace.clear()
    engine.waiting.extend(requests)
    for _ in range(first):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    kinds, names = defaultdict(float), defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            what = "copies" if event.name.startswith(("Memcpy", "Memset")) else kind_of(event.name)
            kinds[what] += event.device_time_total / count
            names[f"{what}: {event.name[:100]}"] += event.device_time_total / count
    engine.waiting.clear()
    engine.running.clear()
    longest = dict(sorted(names.items(), key=lambda item: -item[1])[:16])
    return {"kernels_us": dict(kinds), "longest_us": longest}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=2, help="runs of a workload; the fastest counts")
    parser.add_argument("--out", type=Path, help="write what was measured to this file as JSON")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend="cuda", trust_remote_code=True)
    start = time.perf_counter()
    model = load_model(argparse.Namespace(model="8b", dtype="bfloat16", device="cuda", layers=args.layers)).eval()
    vocabulary = model.config.vocab_size
    longest = max(prompt + new for _, prompt, new in WORKLOADS)
    pages = max(count * -(-(prompt + new) // PAGE_SIZE) for count, prompt, new in WORKLOADS)
    engine = Engine(kernel, model, pages, longest)
    print(f"model of {args.layers} layers, {time.perf_counter() - start:.1f} s", flush=True)
    runs = []
    for count, prompt, new in WORKLOADS:
        for step_tokens in args.step_tokens:
            engine.step_tokens = step_tokens
            run(engine, make_requests(count, prompt, 3, vocabulary, 0))  # graphs, the libraries' own choices
            requests = partial(make_requests, count, prompt, new, vocabulary, 1)
            seconds, trace = fastest(engine, requests, args.rounds)
            one = {"requests": count, "prompt": prompt, "new": new, "new_tokens_per_s": round(count * new / seconds),
                   "step_tokens": step_tokens, "seconds": seconds, "steps": len(trace)}  # fmt: skip
            for kind, steps in steps_by_kind(trace).items():
                one[kind] = {"steps": len(steps), "tokens": median([sum(s["tokens"].values()) for s in steps]),
                             "step_us": 1e6 * median([s["seconds"] for s in steps])}  # fmt: skip
            print(json.dumps(one), flush=True)
            runs.append(one)
        pieces = one["prompts"]["steps"]
        for kind, first, steps in (("decode", pieces + new // 2, 8), ("prompts", 1, min(4, pieces - 1))):
            if steps > 0:
                one[kind] |= profile(engine, make_requests(count, prompt, new, vocabulary, 2), first, steps)
                print(kind, json.dumps(one[kind], indent=1), flush=True)
    result = {
        "machine": f"One {torch.cuda.get_device_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/engine_steps.py {' '.join(sys.argv[1:])}".strip(),
        "versions": f"torch {torch.__version__}",
        "runs": runs,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
