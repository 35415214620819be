"""Multi-head latent attention on a GPU, beside FlashAttention 3.

    python benchmarks/compare_cuda_mla.py [--cases REGEX] [--rounds N] [--save JSON]

128 query heads, 512 latents and 64 dimensions with a rotary embedding, bf16. Every time is that of a call inside a CUDA
graph over inputs larger than L2 together; the replays of all providers take turns. The floor is the larger of two:
576 numbers of every key at 4500 GB/s, 2176 operations per row and key at 790 TFLOP/s. The peer is left out where
PEERS_DIR/fa3.so, `_vllm_fa3_C.abi3.so` of the vllm wheel (0.26.0, for torch 2.11 and CUDA 13), is missing.
"""

import argparse
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from cuda_providers import KERNEL, fa3_library, load_ours, measure
from tqdm import tqdm

COPY_BYTES = 300e6  # of the caches of all copies
SCALE = 192**-0.5


@dataclass
class Latents:
    name: str
    kv_lens: list
    q_len: int = 1
    q_heads: int = 128
    page_size: int = 64
    qv: bool = False  # q, keys and values in parts, as FlashAttention 3 wants them
    packed: bool = False  # with cu_seqlens_q, as engines call it

    @property
    def flops(self):
        keys = sum(n - (self.q_len - 1) / 2 for n in self.kv_lens)
        return 2 * (576 + 512) * self.q_heads * self.q_len * keys

    @property
    def floor(self):
        return max(self.flops / 790e6, sum(self.kv_lens) * 576 * 2 / 4500e3)


def all_cases():
    uneven = [128 * 2 ** (i % 9) for i in range(32)]
    return [
        Latents("B32 4k", [4096] * 32),
        *(Latents(f"B32 4k, {n} tokens", [4096] * 32, n) for n in (2, 4, 8)),
        Latents("B1 32k", [32768]),
        Latents("B1 4k", [4096]),
        Latents("B8 8k", [8192] * 8),
        Latents("B128 1k", [1024] * 128),
        Latents("B32 128..32k", uneven),
        Latents("B32 4000", [4000] * 32),
        Latents("B32 4k, 16 heads", [4096] * 32, q_heads=16),
        Latents("B32 4k, 64 heads", [4096] * 32, q_heads=64),
        Latents("B32 4k, page 16", [4096] * 32, page_size=16),
        Latents("B32 4k, page 1", [4096] * 32, page_size=1),
        Latents("B32 4k, qv", [4096] * 32, qv=True),
        Latents("B32 4k, cu_seqlens_q", [4096] * 32, packed=True),
        Latents("B32 4k, 16 heads, cu_seqlens_q", [4096] * 32, q_heads=16, packed=True),
        Latents("B1 4k, cu_seqlens_q", [4096], packed=True),
        Latents("B32 1k..4k, 16 heads", [1000 + 97 * i for i in range(32)], q_heads=16),
        Latents("B32 128..32k, 16 heads", uneven, q_heads=16),
        Latents("B32 128..32k, 32 heads", uneven, q_heads=32),
        Latents("B32 128..32k, 64 heads", uneven, q_heads=64),
        Latents("1 of 64k, 31 of 256, 16 heads", [65536] + [256] * 31, q_heads=16),
    ]


class Inputs:
    """cache: pages in random order; tables[r], q[r] of copy r."""

    def __init__(self, case):
        generator = torch.Generator("cuda").manual_seed(1)
        self.case = case
        self.copies = max(2, min(24, math.ceil(COPY_BYTES / (sum(case.kv_lens) * 1152))))
        pages = [-(-n // case.page_size) for n in case.kv_lens]
        shape = (sum(pages) * self.copies, case.page_size, 1, 576)
        self.cache = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(shape[0], generator=generator, device="cuda").int()
        self.tables = []
        for part in order.split(sum(pages)):
            table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
            for b, own in enumerate(part.split(pages)):
                table[b, : len(own)] = own
            self.tables.append(table)
        self.q = [
            torch.randn(len(pages), case.q_len, case.q_heads, 576, generator=generator, device="cuda").bfloat16()
            for _ in range(self.copies)
        ]
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda")
        self.rows = {}
        if case.packed:
            self.q = [q.flatten(0, 1) for q in self.q]
            cu_seqlens_q = torch.arange(len(pages) + 1, dtype=torch.int32, device="cuda") * case.q_len
            self.rows = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": case.q_len}


def ours(x):
    kernel, latents = load_ours(), x.cache[..., :512]
    if x.case.qv:
        parts = [(q[..., 512:].contiguous(), q[..., :512].contiguous()) for q in x.q]
        return [
            lambda q=q, qv=qv, table=table: kernel.flash_attn_with_kvcache(
                q,
                x.cache[..., 512:],
                latents,
                qv=qv,
                cache_seqlens=x.kv_lens,
                block_table=table,
                causal=True,
                softmax_scale=SCALE,
            )
            for (q, qv), table in zip(parts, x.tables)
        ]
    return [
        lambda r=r: kernel.flash_attn_with_kvcache(
            x.q[r],
            x.cache,
            latents,
            cache_seqlens=x.kv_lens,
            block_table=x.tables[r],
            causal=True,
            softmax_scale=SCALE,
            **x.rows,
        )
        for r in range(x.copies)
    ]


def fa3(x):
    case, (library, off) = x.case, fa3_library()
    options = off | {
        "is_causal": case.q_len > 1, "num_splits": 0, "sm_margin": 0, "window_size_left": -1, "window_size_right": -1,
        "softmax_scale": SCALE, "softcap": 0.0, "is_rotary_interleaved": True, "cp_world_size": 1, "cp_rank": 0,
        "seqused_k": x.kv_lens, "k": x.cache[..., 512:], "v": x.cache[..., :512], **x.rows,
    }  # fmt: skip
    calls = []
    for q, table in zip(x.q, x.tables):
        own = {"q": q[..., 512:].contiguous(), "q_v": q[..., :512].contiguous(), "page_table": table}
        calls.append(lambda own=own: library.fwd(**options | own)[0])
    return calls


PROVIDERS = {"ours": ours, "FA3": fa3}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", help="JSON file of the results")
    arguments = parser.parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={Path(__file__).resolve().parent.parent}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| case | floor us | us (TFLOP/s) | |")
    print("| --- | --- | " + " | ".join("---" for _ in PROVIDERS) + " |")
    rows = []
    for case in tqdm([case for case in all_cases() if re.search(arguments.cases, case.name)], "cases"):
        rows.append(row := measure(Inputs(case), PROVIDERS, arguments.rounds) | {"floor": case.floor})
        cells = [f"{name} {us:.1f} ({case.flops / us * 1e-6:.0f})" for name, us in row["us"].items()]
        tqdm.write(f"| {case.name} | {case.floor:.1f} | {' | '.join(cells)} | {row['failed'] or ''}")
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(rows, indent=1))
    worst = max((d for row in rows for name, d in row["difference"].items()), default=0.0)
    print(f"\nLargest relative difference between a provider's result and ours: {worst:.1e}")


if __name__ == "__main__":
    main()
