"""What a call does and the least it could cost: route, plan, bytes, flops, its time beside the limits of the machine.

    python tools/explain.py --batch 8 --kv-len 1024 4096 16384
    python tools/explain.py --q-len 512 --kv-len 2048 --dtype fp16 --plot roofline.svg
    python tools/explain.py --keyword softcap=30.0 --keyword "window_size=(256, 0)"
    python tools/explain.py --mla --kv-len 4096

The floor is the longer of two times: for reading the keys and values once at the rate at which this machine reads
memory, and for the multiplications at the rate of torch's matrix product, in float32 where a CPU has no arithmetic for
the dtype. Both are measured first. Only keys that some query sees are counted. LOCAL_KERNELS names the build (make sets
it).
"""

import argparse
import ast
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import kernels
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs" / "pictures")]
from cpu_cases import ROTATED_BYTES, product_dtype, tiled  # noqa: E402

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={ROOT}")
BACKENDS = {"cuda": "cuda", "mps": "metal", "cpu": "cpu"}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
LATENT = {"q_heads": 128, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512}  # of --mla
ROUNDS = 7
LONG = 1.0  # seconds, after which there are no more of them


@dataclass
class Shape:
    """A call, and the work in it."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    dtype: str
    cache_dtype: str
    shared: bool = False  # values are the first dimensions of the keys
    keywords: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return (
            f"{self.batch} x {self.q_len} of {self.kv_len} tokens, {self.q_heads}/{self.kv_heads} heads of {dims}, "
            f"{self.dtype}{f', {self.cache_dtype} cache' if self.cache_dtype else ''}"
        )

    @property
    def stored(self) -> torch.dtype:
        return DTYPES[self.cache_dtype or self.dtype]

    def visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first key that each query sees, and the end of those."""
        position = torch.arange(self.kv_len - self.q_len, self.kv_len)
        left, right = self.keywords.get("window_size") or (-1, -1)
        chunk = self.keywords.get("attention_chunk") or 0
        begin, end = torch.zeros_like(position), torch.full_like(position, self.kv_len)
        if self.keywords.get("causal", True):
            right = 0
        if left >= 0:
            begin = (position - left).clamp(min=0)
        if right >= 0:
            end = (position + right + 1).clamp(max=self.kv_len)
        if chunk > 0:
            first = position // chunk * chunk
            begin, end = begin.maximum(first), end.minimum(first + chunk)
        return begin, end.maximum(begin)

    @property
    def bytes(self) -> int:
        """Keys and values that some query sees, queries and output, each once."""
        begin, end = self.visible()
        keys = int(end.max() - begin.min()) if self.q_len else 0
        row = self.head_dim + (0 if self.shared else self.head_dim_v)
        q_and_out = self.q_len * self.q_heads * (self.head_dim + self.head_dim_v) * DTYPES[self.dtype].itemsize
        return self.batch * (keys * self.kv_heads * row * self.stored.itemsize + q_and_out)

    @property
    def flops(self) -> int:
        """Two multiply-adds per element of every visible (query, key) pair."""
        begin, end = self.visible()
        return 2 * self.batch * self.q_heads * (self.head_dim + self.head_dim_v) * int((end - begin).sum())


class Inputs:
    """q[r] and tables[r] of copy r over one paged cache, whose pages lie in random order."""

    def __init__(self, shape: Shape, device: str):
        generator = torch.Generator().manual_seed(1234)
        pages = shape.batch * -(-shape.kv_len // shape.page_size)
        page_bytes = shape.page_size * shape.kv_heads * (shape.head_dim + shape.head_dim_v) * shape.stored.itemsize
        self.copies = min(4 if shape.q_len > 16 else 64, math.ceil(ROTATED_BYTES / (pages * page_bytes)))
        pool = torch.randn(4194301, generator=generator).to(device)
        slots = (pages * self.copies, shape.page_size, shape.kv_heads)
        self.k_cache = tiled(pool, (*slots, shape.head_dim), shape.stored)
        self.v_cache = self.k_cache[..., : shape.head_dim_v]
        if not shape.shared:
            self.v_cache = tiled(pool.flip(0), (*slots, shape.head_dim_v), shape.stored)
        order = torch.randperm(pages * self.copies, generator=generator).int().to(device)
        self.tables = order.view(self.copies, shape.batch, -1)
        self.kv_lens = torch.full((shape.batch,), shape.kv_len, dtype=torch.int32, device=device)
        q = (self.copies, shape.batch, shape.q_len, shape.q_heads, shape.head_dim)
        self.q = torch.randn(q, generator=generator).to(device, DTYPES[shape.dtype])


def seconds(calls, device: str) -> float:
    """Of one call: the best of some rounds of all of them, the first left out; on CUDA issued as one graph."""
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
        if sum(rounds[1:]) * len(calls) > LONG:
            break
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
    multiply_rate: float  # flops/s
    multiplied: str  # in this dtype


def measure_machine(device: str, dtype: torch.dtype, isa: str) -> Machine:
    large = device == "cuda"
    memory = torch.ones(1 << (30 if large else 26), device=device)
    n = 8192 if large else 1024
    if device == "cpu":
        dtype = product_dtype(dtype)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    read = memory.nbytes / seconds([memory.amax], device)
    multiply = 2 * n**3 / seconds([lambda: a @ b], device)
    name = torch.cuda.get_device_name() if large else device
    name = f"{name}, {isa}, {torch.get_num_threads()} threads" if isa else name
    return Machine(name, read, multiply, str(dtype).removeprefix("torch."))


@dataclass
class Report:
    shape: Shape
    explanation: tuple
    reading: float
    multiplying: float
    measured: float

    @property
    def floor(self) -> float:
        return max(self.reading, self.multiplying)

    def __str__(self) -> str:
        shape, (route, why_not, plan) = self.shape, self.explanation
        lines = [shape.name, f"  route     {route}"]
        lines += [f"            not {name}: {reason}" for name, reason in why_not.items()]
        lines.append(f"  plan      {', '.join(f'{name} {value}' for name, value in plan.items())}")
        lines.append(f"  work      {shape.bytes / 1e6:.3g} MB, {shape.flops / 1e9:.3g} GFLOP")
        lines.append(
            f"  floor     {self.floor * 1e6:.1f} us (reading {self.reading * 1e6:.1f}, "
            f"multiplying {self.multiplying * 1e6:.1f})"
        )
        lines.append(f"  measured  {self.measured * 1e6:.1f} us: {100 * self.floor / self.measured:.0f} % of the limit")
        return "\n".join(lines)


def report(paged_attn, shape: Shape, machine: Machine, device: str) -> Report:
    x = Inputs(shape, device)

    def arguments(r):
        tensors = {"cache_seqlens": x.kv_lens, "block_table": x.tables[r], "causal": True}
        return (x.q[r], x.k_cache, x.v_cache), tensors | shape.keywords

    def call(r):
        positional, named = arguments(r)
        return lambda: paged_attn.flash_attn_with_kvcache(*positional, **named)

    positional, named = arguments(0)
    explanation = paged_attn.explain(*positional, **named)
    measured = seconds([call(r) for r in range(x.copies)], device)
    return Report(shape, explanation, shape.bytes / machine.read_rate, shape.flops / machine.multiply_rate, measured)


def plot(reports: list[Report], machine: Machine, path: Path) -> None:
    """A roofline: flops per second over flops per byte, with the two limits of the machine."""
    from chart import Limit, Point, Roofline
    from svg import MARGIN, Picture

    p = Picture("Roofline of the calls that were asked for")
    p.heading(24, f"{machine.name}: {machine.read_rate / 1e9:.0f} GB/s, {machine.multiply_rate / 1e12:.2f} TFLOP/s")
    points = []
    for i, r in enumerate(reports):
        p.text(MARGIN, 46 + 17 * i, f"{i + 1}: {r.shape.name}; {r.explanation.route}, "
               f"{100 * r.floor / r.measured:.0f} % of the limit", size=11)  # fmt: skip
        points.append(Point(r.shape.flops / r.shape.bytes, r.shape.flops / r.measured, str(i + 1)))
    limit = Limit((machine.read_rate,), machine.multiply_rate, f"{machine.multiply_rate / 1e12:.2f} TFLOP/s")
    Roofline(p, 46 + 17 * len(reports) + 20, 380, points, [limit]).draw()
    path.write_text(p.svg())


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--q-len", type=int, default=1)
    parser.add_argument("--kv-len", type=int, nargs="+", default=[4096], help="one report for each")
    parser.add_argument("--mla", action="store_true", help="latent attention: 128 heads of 576/512 over one shared row")
    parser.add_argument("--q-heads", type=int, help="default: 32, with --mla 128")
    parser.add_argument("--kv-heads", type=int, help="default: 8, with --mla 1")
    parser.add_argument("--head-dim", type=int, help="default: 128, with --mla 576")
    parser.add_argument("--head-dim-v", type=int, help="default: head_dim, with --mla 512")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--cache-dtype", choices=["e4m3", "e5m2"], default="")
    parser.add_argument("--keyword", action="append", default=[], metavar="NAME=VALUE", help="more of the call")
    parser.add_argument("--device", choices=BACKENDS, help="default: a GPU where there is one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline, as SVG")
    args = parser.parse_args(given)
    sizes = LATENT if args.mla else {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    for name, size in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.head_dim_v = args.head_dim_v or args.head_dim
    for length in args.kv_len:
        if length < args.q_len:
            parser.error(f"--kv-len: expected at least q_len = {args.q_len}, got {length}")
    if args.mla and args.head_dim_v > args.head_dim:
        parser.error(f"--head-dim-v: expected at most head_dim = {args.head_dim} with --mla, got {args.head_dim_v}")
    args.keywords = {name: ast.literal_eval(value) for name, _, value in (k.partition("=") for k in args.keyword)}
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    args.device = args.device or gpu
    return args


def main(given: list[str] | None = None) -> None:
    args = parse_arguments(given)
    backend = BACKENDS[args.device]
    paged_attn = kernels.get_kernel("org/paged-attn", version=1, backend=backend, trust_remote_code=True)
    isa = paged_attn.cpu_isa() if args.device == "cpu" else ""
    machine = measure_machine(args.device, DTYPES[args.dtype], isa)
    print(
        f"{machine.name}: reads {machine.read_rate / 1e9:.1f} GB/s, "
        f"multiplies {machine.multiply_rate / 1e12:.2f} TFLOP/s in {machine.multiplied}\n"
    )
    names = ("batch", "q_len", "q_heads", "kv_heads", "head_dim", "head_dim_v", "page_size", "dtype", "cache_dtype")
    sizes = {name: getattr(args, name) for name in (*names, "keywords")}
    reports = []
    with tqdm(args.kv_len, "lengths", leave=False) as bar:
        for length in bar:
            reports.append(report(paged_attn, Shape(kv_len=length, shared=args.mla, **sizes), machine, args.device))
            bar.write(f"{reports[-1]}\n")
    if args.plot:
        plot(reports, machine, args.plot)


if __name__ == "__main__":
    main()
