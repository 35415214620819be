"""What a call does and the least it could cost: route, plan, bytes, flops, its time beside the limits of the machine.

    python tools/explain.py --batch 8 --kv-len 1024 4096 16384
    python tools/explain.py --q-len 512 --kv-len 2048 --dtype fp16 --plot roofline.png
    python tools/explain.py --keyword softcap=30.0 --keyword "window_size=(256, 0)"

The floor is the longer of two times: for reading the keys and values once at the rate at which this machine reads
memory, and for the multiplications at the rate of torch's matrix product. Both are measured first. It counts every key
at or before a query, so a window can be faster than the floor. LOCAL_KERNELS names the build (make sets it).
"""

import argparse
import ast
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import kernels
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from cpu_cases import DTYPES, Case, Inputs  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={ROOT}")
BACKENDS = {"cuda": "cuda", "mps": "metal", "cpu": "cpu"}
ROUNDS = 7


def seconds(calls, device: str) -> float:
    """Of one call: the best of some rounds of all of them, on CUDA issued as one graph."""
    if device == "cuda":
        return graph_seconds(calls)
    wait = torch.mps.synchronize if device == "mps" else lambda: None
    rounds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for call in calls:
            call()
        wait()
        rounds.append((time.perf_counter() - start) / len(calls))
    return min(rounds[1:])


def graph_seconds(calls) -> float:
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds = []
    for _ in range(ROUNDS + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return min(rounds[1:])


@dataclass
class Machine:
    name: str
    read_rate: float  # bytes/s
    multiply_rate: float  # flops/s, in the dtype of the call


def measure_machine(device: str, dtype: torch.dtype, isa: str) -> Machine:
    large = device == "cuda"
    memory = torch.ones(1 << (30 if large else 26), device=device)
    n = 8192 if large else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    read = memory.nbytes / seconds([memory.amax], device)
    multiply = 2 * n**3 / seconds([lambda: a @ b] * 3, device)
    name = torch.cuda.get_device_name() if large else device
    return Machine(f"{name}, {isa}, {torch.get_num_threads()} threads" if isa else name, read, multiply)


@dataclass
class Report:
    case: Case
    explanation: tuple
    reading: float
    multiplying: float
    measured: float

    @property
    def floor(self) -> float:
        return max(self.reading, self.multiplying)

    def __str__(self) -> str:
        case, (route, why_not, plan) = self.case, self.explanation
        lines = [f"{case.name}, {case.dtype}" + (f", {case.cache_dtype} cache" if case.cache_dtype else "")]
        lines.append(f"  route     {route}")
        lines += [f"            not {name}: {reason}" for name, reason in why_not.items()]
        lines.append(f"  plan      {', '.join(f'{name} {value}' for name, value in plan.items())}")
        lines.append(f"  work      {case.bytes / 1e6:.3g} MB of keys and values, {case.flops / 1e9:.3g} GFLOP")
        lines.append(
            f"  floor     {self.floor * 1e6:.1f} us (reading {self.reading * 1e6:.1f}, "
            f"multiplying {self.multiplying * 1e6:.1f})"
        )
        lines.append(f"  measured  {self.measured * 1e6:.1f} us: {100 * self.floor / self.measured:.0f} % of the limit")
        return "\n".join(lines)


def report(paged_attn, case: Case, machine: Machine, device: str, keywords: dict) -> Report:
    x = Inputs(case, device=device)

    def arguments(r):
        tensors = {"cache_seqlens": x.kv_lens, "block_table": x.tables[r], "causal": True}
        return (x.q[r], x.k_cache, x.v_cache), tensors | keywords

    def call(r):
        positional, named = arguments(r)
        return lambda: paged_attn.flash_attn_with_kvcache(*positional, **named)

    positional, named = arguments(0)
    explanation = paged_attn.explain(*positional, **named)
    measured = seconds([call(r) for r in range(x.copies)], device)
    return Report(case, explanation, case.bytes / machine.read_rate, case.flops / machine.multiply_rate, measured)


def plot(reports: list[Report], machine: Machine, path: Path) -> None:
    """A roofline: flops per second over flops per byte, with the two limits of the machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    xs = [r.case.flops / r.case.bytes for r in reports]
    ridge = machine.multiply_rate / machine.read_rate
    limits = [min(*xs, ridge) / 3, ridge, max(*xs, ridge) * 3]
    axis.loglog(limits, [min(x * machine.read_rate, machine.multiply_rate) / 1e9 for x in limits], color="gray")
    for x, r in zip(xs, reports):
        (point,) = axis.loglog(x, r.case.flops / r.measured / 1e9, "o")
        label = f"{r.case.name}\n{r.explanation.route}, {100 * r.floor / r.measured:.0f} %"
        offset = {"xytext": (6, -14), "textcoords": "offset points"}
        axis.annotate(label, (x, r.case.flops / r.measured / 1e9), fontsize=7, color=point.get_color(), **offset)
    axis.set_xlabel("flops per byte of keys and values")
    axis.set_ylabel("GFLOP/s")
    axis.set_title(f"{machine.name}: {machine.read_rate / 1e9:.0f} GB/s, {machine.multiply_rate / 1e12:.2f} TFLOP/s")
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--q-len", type=int, default=1)
    parser.add_argument("--kv-len", type=int, nargs="+", default=[4096], help="one report for each")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--cache-dtype", choices=["e4m3"], default="")
    parser.add_argument("--keyword", action="append", default=[], metavar="NAME=VALUE", help="more of the call")
    parser.add_argument("--device", choices=BACKENDS, help="default: a GPU where there is one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline")
    args = parser.parse_args()
    for length in args.kv_len:
        if length < args.q_len:
            parser.error(f"--kv-len: expected at least q_len = {args.q_len}, got {length}")
    args.keywords = {name: ast.literal_eval(value) for name, _, value in (k.partition("=") for k in args.keyword)}
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    args.device = args.device or gpu
    return args


def main() -> None:
    args = parse_arguments()
    backend = BACKENDS[args.device]
    paged_attn = kernels.get_kernel("org/paged-attn", version=1, backend=backend, trust_remote_code=True)
    isa = paged_attn.cpu_isa() if args.device == "cpu" else ""
    machine = measure_machine(args.device, DTYPES[args.dtype], isa)
    print(
        f"{machine.name}: reads {machine.read_rate / 1e9:.1f} GB/s, "
        f"multiplies {machine.multiply_rate / 1e12:.2f} TFLOP/s in {args.dtype}\n"
    )
    sizes = {name: getattr(args, name) for name in ("q_len", "q_heads", "kv_heads", "head_dim", "page_size")}
    reports = []
    for length in args.kv_len:
        name = (
            f"{args.batch} x {args.q_len} of {length} tokens, {args.q_heads}/{args.kv_heads} heads of {args.head_dim}"
        )
        kind = "prefill" if args.q_len > 16 else "decode"
        case = Case(name, args.dtype, [length] * args.batch, cache_dtype=args.cache_dtype, kind=kind, **sizes)
        reports.append(report(paged_attn, case, machine, args.device, args.keywords))
        print(reports[-1], "\n", flush=True)
    if args.plot:
        plot(reports, machine, args.plot)


if __name__ == "__main__":
    main()
