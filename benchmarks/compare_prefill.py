"""Long queries on a GPU, beside other attention kernels.

    python benchmarks/compare_prefill.py [--cases REGEX] [--rounds N] [--save JSON]

Every time is that of a call inside a CUDA graph over copies of the inputs, four at most: those of short prompts and few
keys stay in L2, all others are larger together. The replays of all providers take turns. TFLOP/s count two
multiply-adds per element of every visible (query, key) pair. Peers are left out where missing:

    FlashAttention 3    PEERS_DIR/fa3.so: `_vllm_fa3_C.abi3.so` of the vllm wheel (0.26.0, for torch 2.11 and CUDA 13)
    cuDNN               torch's scaled_dot_product_attention, for equal prompts
"""

import argparse
import itertools
import json
import math
import os
import re
from pathlib import Path

import torch
from cuda_cases import few_tiles_cases, last_round_cases, prefill_cases, wide_table_cases
from cuda_providers import KERNEL, Missing, fa3_library, fa3_plan, load_ours, measure
from tqdm import tqdm

COPY_BYTES = 200e6  # of keys and values of all copies


class Inputs:
    """q[r], k[r], v[r] of copy r: packed, or caches whose pages lie in random order."""

    def __init__(self, case, most_copies=4):
        generator = torch.Generator("cuda").manual_seed(1)
        head_dim_v = case.head_dim_v or case.head_dim
        self.case, keys = case, sum(case.kv_lens)
        dtype, kv_dtype = (getattr(torch, name) for name in (case.dtype, case.kv_dtype or case.dtype))
        row = kv_dtype.itemsize * case.kv_heads * (case.head_dim + head_dim_v)
        self.copies = max(2, min(most_copies, math.ceil(COPY_BYTES / (keys * row))))

        def random(dtype, *shape):
            return [torch.randn(*shape, generator=generator, device="cuda").to(dtype) for _ in range(self.copies)]

        self.q = random(dtype, sum(case.q_lens), case.q_heads, case.head_dim)
        pages = [-(-n // case.page_size) for n in case.kv_lens] if case.page_size else []
        place = (sum(pages), case.page_size) if case.page_size else (keys,)
        self.k = random(kv_dtype, *place, case.kv_heads, case.head_dim)
        self.v = random(kv_dtype, *place, case.kv_heads, head_dim_v)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda")
            for n in (case.q_lens, case.kv_lens)
        )
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda")
        self.sinks = torch.randn(case.q_heads, generator=generator, device="cuda").to(dtype) if case.sinks else None
        self.tables = []
        for _ in range(self.copies if case.page_size else 0):
            order = torch.randperm(sum(pages), generator=generator, device="cuda").int()
            width = max(*pages, case.table_keys // case.page_size)
            table = torch.zeros(len(pages), width, dtype=torch.int32, device="cuda")
            for b, own in enumerate(order.split(pages)):
                table[b, : len(own)] = own
            self.tables.append(table)


def ours(x):
    kernel, case = load_ours(), x.case
    common = {"causal": case.causal, "window_size": (case.window_left, -1), "max_seqlen_q": max(case.q_lens)}
    common |= {"softcap": case.softcap, "s_aux": x.sinks}
    if case.page_size:
        return [
            lambda r=r: kernel.flash_attn_with_kvcache(
                x.q[r], x.k[r], x.v[r], cache_seqlens=x.kv_lens, block_table=x.tables[r], cu_seqlens_q=x.cu_q, **common
            )
            for r in range(x.copies)
        ]
    return [
        lambda r=r: kernel.flash_attn_varlen_func(
            x.q[r], x.k[r], x.v[r], x.cu_q, x.cu_k, max_seqlen_k=max(case.kv_lens), **common
        )
        for r in range(x.copies)
    ]


def fa3(x, planned=False):
    case, (library, off) = x.case, fa3_library()
    if case.kv_dtype:
        raise Missing("q and the cache in one dtype only")
    common = {
        "is_causal": case.causal, "num_splits": 0, "sm_margin": 0, "window_size_left": case.window_left,
        "window_size_right": 0 if case.causal and case.window_left >= 0 else -1, "cu_seqlens_q": x.cu_q,
        "max_seqlen_q": max(case.q_lens),
    }  # fmt: skip
    options = off | common | {
        "softmax_scale": case.head_dim**-0.5, "softcap": case.softcap, "s_aux": x.sinks, "is_rotary_interleaved": True,
        "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    if planned:
        options["scheduler_metadata"] = fa3_plan(library, x, x.q[0].dtype, has_softcap=case.softcap > 0, **common)
    if not case.page_size:
        options |= {"cu_seqlens_k": x.cu_k, "max_seqlen_k": max(case.kv_lens)}
    calls = []
    for r in range(x.copies):
        own = {"q": x.q[r], "k": x.k[r], "v": x.v[r]}
        if case.page_size:
            own |= {"page_table": x.tables[r], "seqused_k": x.kv_lens}
        calls.append(lambda own=own: library.fwd(**options | own)[0])
    return calls


def cudnn(x):
    case = x.case
    equal = len(set(case.q_lens)) == 1 and case.q_lens == case.kv_lens
    features = case.window_left >= 0 or case.softcap or case.sinks
    if case.page_size or not equal or features or case.dtype != "bfloat16" or case.kv_dtype:
        raise Missing("equal prompts in 16 bits only")
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

    def call(r):
        q, k, v = (
            t.view(len(case.q_lens), case.q_lens[0], *t.shape[1:]).transpose(1, 2) for t in (x.q[r], x.k[r], x.v[r])
        )
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.q_heads != case.kv_heads
            )
        return out.transpose(1, 2).flatten(0, 1)

    return [lambda r=r: call(r) for r in range(x.copies)]


PROVIDERS = {"ours": ours, "FA3": fa3, "cuDNN": cudnn}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", help="JSON file of the results")
    arguments = parser.parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={Path(__file__).resolve().parent.parent}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| case | GFLOP | us (TFLOP/s) | | |")
    print("| --- | --- | " + " | ".join("---" for _ in PROVIDERS) + " |")
    rows = []
    cases = [*prefill_cases(), *last_round_cases(), *few_tiles_cases(), *wide_table_cases()]
    cases = [case for case in cases if re.search(arguments.cases, case.name)]
    for case in tqdm(cases, "cases"):
        rows.append(row := measure(Inputs(case), PROVIDERS, arguments.rounds))
        cells = [f"{name} {us:.1f} ({case.flops / us * 1e-6:.0f})" for name, us in row["us"].items()]
        tqdm.write(f"| {case.name} | {case.flops * 1e-9:.1f} | {' | '.join(cells)} |")
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(rows, indent=1))
    worst = max((d for row in rows for name, d in row["difference"].items()), default=0.0)
    print(f"\nLargest relative difference between a provider's result and ours: {worst:.1e}")


if __name__ == "__main__":
    main()
