"""Host time of a call: the functions of `paged_attn` and, by position, those of `paged_attn.fa3`, in turns.

    make build && .venv/bin/python benchmarks/host_fa3.py

The tensors are tiny, so that a call is little but its way to the operator. The median over many short series counts.
"""

import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
from tqdm import tqdm

SERIES, CALLS = 400, 50


def calls(kernel):
    """By name: the same call in both orders."""
    k_cache, v_cache = kernel.empty_paged_cache(4, 16, 1, 16, dtype=torch.float32, device="cpu")
    k_cache.zero_(), v_cache.zero_()
    q, new = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    cu, sinks = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1)
    plain, theirs = kernel.flash_attn_with_kvcache, kernel.fa3.flash_attn_with_kvcache
    # All 27 positions, as SGLang gives them.
    after_qv = lambda cu: (  # noqa: E731
        None, None, lens, None, None, table, cu, None, 1, None, None, None, None, 0.25, True, (-1, -1), 0, 0.0, True,
        None, 0,
    )  # fmt: skip
    positions, packed = after_qv(None), after_qv(cu)
    names = {"cache_seqlens": lens, "block_table": table, "softmax_scale": 0.25, "causal": True}
    heads = q[:, 0]
    return {
        "decode": (
            lambda: plain(q, k_cache, v_cache, **names),
            lambda: theirs(q, k_cache, v_cache, None, None, None, *positions),
        ),
        "append": (
            lambda: plain(q, k_cache, v_cache, new, new, **names),
            lambda: theirs(q, k_cache, v_cache, new, new, None, *positions),
        ),
        "packed with sinks": (
            lambda: plain(heads, k_cache, v_cache, cu_seqlens_q=cu, max_seqlen_q=1, sinks=sinks, **names),
            lambda: theirs(heads, k_cache, v_cache, None, None, None, *packed, sinks=sinks),
        ),
        "varlen": (
            lambda: kernel.flash_attn_varlen_func(heads, heads, heads, cu, cu, 1, 1, 0.0, 0.25, True),
            lambda: kernel.fa3.flash_attn_varlen_func(heads, heads, heads, cu, cu, 1, 1, None, None, 0.25, True),
        ),
        "whole": (
            lambda: kernel.flash_attn_func(q, q, q, 0.0, 0.25, True),
            lambda: kernel.fa3.flash_attn_func(q, q, q, 0.25, True),
        ),
    }


def microseconds(call):
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


@torch.inference_mode()
def main():
    torch.set_num_threads(1)
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend="cpu", trust_remote_code=True)
    print("| call | plain, us | fa3, us | more |\n| --- | --- | --- | --- |")
    for name, pair in tqdm(calls(kernel).items(), "calls"):
        times = [[microseconds(call) for call in pair] for _ in range(SERIES)]
        plain, theirs = (statistics.median(column) for column in zip(*times))
        more = statistics.median(b - a for a, b in times)
        tqdm.write(f"| {name} | {plain:.2f} | {theirs:.2f} | {more:+.2f} |")


if __name__ == "__main__":
    main()
