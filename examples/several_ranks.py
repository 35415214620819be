"""Attention of one decode step on several ranks of torch.distributed, in the two ways that there are.

    make build && .venv/bin/torchrun --nproc-per-node 2 examples/several_ranks.py

tensor parallel   each rank has some kv_heads, with all of their keys. Nothing is exchanged; the next product, whose
                  weights are split alike, ends in a sum over the ranks. It ends at as many ranks as there are kv_heads.
context parallel  each rank has some of the pages, with all kv_heads. (out, lse) are exchanged and merged. It goes on
                  where the first ends, for one long context.

Both are compared with one device that holds everything. The ranks are processes on the CPU and exchange through gloo.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
import torch.distributed as dist

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16


def cache_of(kernel, k, v):
    """Pages that hold the keys and values (tokens, kv_heads, head_dim) of one request, and its block table."""
    num_pages = -(-len(k) // PAGE_SIZE)
    pages = kernel.empty_paged_cache(num_pages, PAGE_SIZE, *k.shape[1:], dtype=k.dtype, device="cpu")
    table = torch.arange(num_pages, dtype=torch.int32)[None]
    kernel.kv_paged_write(k[None], v[None], *pages, table, 0)
    return *pages, table


def my_pages(tokens, rank, ranks):
    """The tokens in the pages rank, rank + ranks, rank + 2 ranks, ... of a context."""
    begins = range(rank * PAGE_SIZE, len(tokens), ranks * PAGE_SIZE)
    return torch.cat([tokens[:0], *(tokens[i : i + PAGE_SIZE] for i in begins)])  # none is fine


def milliseconds(function, rounds):
    """The result, and the median time of a round in which all ranks start together."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return result, sorted(times)[rounds // 2] * 1e3


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if KV_HEADS % ranks:
        parser.error(f"--nproc-per-node: expected a number that divides {KV_HEADS} kv_heads, got {ranks}")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend="cpu", trust_remote_code=True)

    torch.manual_seed(0)  # the same tensors on every rank
    q = torch.randn(1, 1, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, args.keys, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    *caches, table = cache_of(kernel, k, v)
    lengths = torch.tensor([args.keys], dtype=torch.int32)
    whole, alone = milliseconds(
        lambda: kernel.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table), args.rounds
    )

    mine = lambda heads: slice(rank * heads // ranks, (rank + 1) * heads // ranks)  # noqa: E731
    *caches, table = cache_of(kernel, k[:, mine(KV_HEADS)], v[:, mine(KV_HEADS)])
    by_heads, tensor_parallel = milliseconds(
        lambda: kernel.flash_attn_with_kvcache(
            q[:, :, mine(Q_HEADS)], *caches, cache_seqlens=lengths, block_table=table
        ),
        args.rounds,
    )

    *caches, table = cache_of(kernel, my_pages(k, rank, ranks), my_pages(v, rank, ranks))
    held = torch.tensor([len(my_pages(k, rank, ranks))], dtype=torch.int32)
    last = (args.keys - 1) // PAGE_SIZE % ranks
    by_pages, context_parallel = milliseconds(
        lambda: kernel.integrations.context_parallel.attention(
            q, *caches, owner=last, cache_seqlens=held, block_table=table
        ),
        args.rounds,
    )

    torch.testing.assert_close(by_heads, whole[:, :, mine(Q_HEADS)], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(by_pages, whole, rtol=2e-2, atol=2e-3)
    if rank == 0:
        print(
            f"{args.keys} keys, {ranks} ranks of {torch.get_num_threads()} threads: each alone with all keys "
            f"{alone:.2f} ms, tensor parallel {tensor_parallel:.2f} ms, context parallel {context_parallel:.2f} ms"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
