"""float32 on a GPU: decode beside the time of reading its keys and values, prompts beside torch's attention.

    python benchmarks/compare_float32.py [--cases REGEX] [--rounds N] [--save JSON]

Every time is that of a call inside a CUDA graph over inputs larger than L2 together; the replays of all providers take
turns. torch computes in float32 (allow_tf32 is off), its `efficient` attention on the matrix unit as ours does, `math`
with plain matrix products; its keys and values are repeated for every head beforehand, and that is not counted. TFLOP/s
count two multiply-adds per element of every visible (query, key) pair. Errors are ||out - ref|| / ||ref|| against
float64, of a few heads.
"""

import argparse
import json
import math
import os
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cuda_providers import KERNEL, Missing, Replay, load_ours, sample
from tqdm import tqdm

COPY_BYTES = 200e6  # of keys and values of all copies
SCORE_BYTES = 10e9  # more than this torch's `math` is not asked for


@dataclass(frozen=True)
class Float32Case:
    batch: int
    q_len: int
    kv_len: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16  # 0: contiguous
    causal: bool = True

    @property
    def name(self):
        place = f", page {self.page_size}" if self.page_size else ""
        keys = f"{self.q_len} on {self.kv_len}" if self.page_size else f"{self.kv_len}"
        what = f"B{self.batch} {keys} {self.q_heads}/{self.kv_heads} D{self.head_dim}"
        return what + place + ("" if self.causal else ", encoder")

    @property
    def flops(self):
        hidden = self.q_len * (self.q_len - 1) // 2 if self.causal else 0
        return 4 * self.batch * self.q_heads * self.head_dim * (self.q_len * self.kv_len - hidden)

    @property
    def kv_bytes(self):
        return 8 * self.batch * self.kv_len * self.kv_heads * self.head_dim


CASES = [
    Float32Case(16, 1, 4096),
    Float32Case(64, 1, 1024),
    Float32Case(1, 1, 32768),
    Float32Case(8, 1, 4096, q_heads=64),
    Float32Case(16, 1, 4096, q_heads=16, head_dim=256),
    Float32Case(32, 1, 4096, q_heads=16, head_dim=64),
    Float32Case(16, 2, 4096),
    Float32Case(16, 4, 4096),
    Float32Case(16, 8, 4096),
    Float32Case(16, 16, 4096),
    Float32Case(4, 2048, 2048, page_size=0),
    Float32Case(1, 8192, 8192, page_size=0),
    Float32Case(16, 512, 512, 16, 16, 64, page_size=0, causal=False),
    Float32Case(2, 2048, 2048, 16, 8, 256, page_size=0),
    Float32Case(1, 2048, 2048, 8, 8, page_size=0, causal=False),
    Float32Case(4, 1024, 4096),
    Float32Case(4, 1024, 4096, page_size=1),
    Float32Case(4, 1024, 4096, page_size=256),
]


class Inputs:
    """q[r], k[r], v[r] of copy r: [batch, length, heads, head_dim], or caches whose pages lie in random order."""

    def __init__(self, case):
        generator = torch.Generator("cuda").manual_seed(1)
        self.case, self.copies = case, max(1, math.ceil(COPY_BYTES / case.kv_bytes))
        pages = case.batch * case.kv_len // (case.page_size or case.kv_len)
        place = (pages, case.page_size or case.kv_len)

        def random(*shape):
            return [torch.randn(*shape, generator=generator, device="cuda") for _ in range(self.copies)]

        self.q = random(case.batch, case.q_len, case.q_heads, case.head_dim)
        self.k, self.v = (random(*place, case.kv_heads, case.head_dim) for _ in range(2))
        self.table = torch.randperm(pages, generator=generator, device="cuda").int().view(case.batch, -1)
        self.kv_lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device="cuda")

    def reference(self, heads):
        """float64, of those q_heads of the first request of copy 0."""
        case = self.case
        kv_heads = [h * case.kv_heads // case.q_heads for h in heads]
        k, v = self.k[0], self.v[0]
        if case.page_size:
            k, v = (x[self.table[0].long()].flatten(0, 1) for x in (k, v))
        else:
            k, v = k[0], v[0]
        q, k, v = self.q[0][0, :, heads].double(), k[:, kv_heads].double(), v[:, kv_heads].double()
        scores = torch.einsum("thd,khd->htk", q, k) * case.head_dim**-0.5
        if case.causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").triu(1 + case.kv_len - case.q_len)
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.einsum("htk,khd->thd", scores.softmax(-1), v)


def ours(x):
    kernel, case = load_ours(), x.case
    if case.page_size:
        return [
            lambda r=r: kernel.flash_attn_with_kvcache(
                x.q[r], x.k[r], x.v[r], cache_seqlens=x.kv_lens, block_table=x.table, causal=case.causal
            )
            for r in range(x.copies)
        ]
    return [lambda r=r: kernel.flash_attn_func(x.q[r], x.k[r], x.v[r], causal=case.causal) for r in range(x.copies)]


def sdpa(backend):
    def provider(x):
        case = x.case
        if case.page_size:
            raise Missing("no pages")
        if backend.name == "MATH" and 4 * case.batch * case.q_heads * case.q_len * case.kv_len > SCORE_BYTES:
            raise Missing("the scores are too large")
        group = case.q_heads // case.kv_heads

        def call(r):
            q = x.q[r].transpose(1, 2).contiguous()
            k, v = (t[r].transpose(1, 2).repeat_interleave(group, 1).contiguous() for t in (x.k, x.v))

            def run():
                with torch.nn.attention.sdpa_kernel(backend):
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
                return out.transpose(1, 2)

            return run

        return [call(r) for r in range(x.copies)]

    return provider


BACKENDS = torch.nn.attention.SDPBackend
PROVIDERS = {
    "ours": ours,
    "sdpa efficient": sdpa(BACKENDS.EFFICIENT_ATTENTION),
    "sdpa math": sdpa(BACKENDS.MATH),
}


def measure(case, rounds):
    x, row = Inputs(case), {"case": asdict(case), "us": {}, "error": {}}
    heads = sorted({0, case.q_heads // 2, case.q_heads - 1})
    expected = x.reference(heads)

    def look(name, out):
        error = out[0, :, heads].double() - expected
        row["error"][name] = (error.norm() / expected.norm()).item()

    samples = sample(x, PROVIDERS, rounds, {}, look, own=PROVIDERS)
    row["us"] = {name: statistics.median(times) for name, times in samples.items()}
    return row


def read_rate():
    """Bytes per us that a copy reads and writes."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * len(a) / Replay([lambda: b.copy_(a)]).median(5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", help="JSON file of the results")
    arguments = parser.parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={Path(__file__).resolve().parent.parent}")
    torch.backends.cuda.matmul.allow_tf32 = False
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {rate * 1e-3:.0f} GB/s\n")
    print("| case | GFLOP | GB | us (TFLOP/s; error) | | |\n| --- | --- | --- | " + " | ".join(["---"] * 3) + " |")
    rows = []
    for case in tqdm([case for case in CASES if re.search(arguments.cases, case.name)], "cases"):
        rows.append(row := measure(case, arguments.rounds))
        cells = [
            f"{name} {us:.1f} ({case.flops / us * 1e-6:.1f}; {row['error'][name]:.1e})"
            for name, us in row["us"].items()
        ]
        cells += [""] * (3 - len(cells))
        tqdm.write(f"| {case.name} | {case.flops * 1e-9:.1f} | {case.kv_bytes * 1e-9:.2f} | {' | '.join(cells)} |")
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(rows, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
