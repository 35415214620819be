"""Attention of a decode step on several GPUs: all keys on one, by pages (context parallel), by heads (tensor parallel).

    torchrun --nproc-per-node 2 benchmarks/compare_context_parallel.py
    torchrun --nproc-per-node 2 benchmarks/compare_context_parallel.py --keys 1048576 --out FILE

One request with Llama 3.1 8B's heads in bfloat16, one new token, pages of 16 in random order. A CUDA graph holds
several layers, each with a cache of its own, so that no layer finds its keys in L2; a replay's time over its layers
counts, the median of several, the largest of all ranks. The exchange is NCCL's, in the graph.

    alone             every rank attends to all keys
    pages             context_parallel.attention, every rank gets all heads
    pages, own heads  the same with heads="own", an all-to-all
    ..., peers        the same through each other's memory, without NCCL
    halves            as pages, in two halves of the heads: the second attends while the first is exchanged
    heads             every rank attends to its kv_heads; nothing is exchanged, the next product ends in a sum

Every way is checked against `alone`, and `alone` against float64 where it has at most 32k keys.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
import torch.distributed as dist
from tqdm import tqdm

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
CACHE_BYTES = 12 << 30  # of all layers of a graph; more than any L2 at least


class Pages:
    """Random keys and values of one request on this rank, and its block table."""

    def __init__(self, kernel, keys, kv_heads=KV_HEADS):
        pages = -(-keys // PAGE_SIZE) + 1
        self.caches = kernel.empty_paged_cache(
            pages, PAGE_SIZE, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )  # fmt: skip
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None]
        self.lengths = torch.tensor([keys], dtype=torch.int32, device="cuda")

    def where(self):
        return {"cache_seqlens": self.lengths, "block_table": self.table}


def layers_of(kernel, keys, ranks):
    """(all keys, this rank's share by pages, its share by heads) of each layer; the shares are parts of the whole."""
    rank = dist.get_rank()
    layer_bytes = 2 * 2 * keys * KV_HEADS * HEAD_DIM
    for layer in range(max(1, min(16, CACHE_BYTES // layer_bytes))):
        torch.manual_seed(layer)
        whole, by_pages = Pages(kernel, keys), Pages(kernel, keys // ranks)
        by_heads = Pages(kernel, keys, KV_HEADS // ranks)
        for full, pages, heads in zip(whole.caches, by_pages.caches, by_heads.caches, strict=True):
            full.normal_()
            # A rank has every ranks-th page; the last keys are on the last rank.
            mine = whole.table[0, rank : keys // PAGE_SIZE : ranks].long()
            pages[by_pages.table[0, : len(mine)].long()] = full[mine]
            heads[by_heads.table[0].long()] = full[whole.table[0].long()].chunk(ranks, dim=2)[rank]
        yield whole, by_pages, by_heads


def ways(kernel, layers, q, ranks):
    """The functions to time: each attends in every layer and returns the outputs."""
    cp, call = kernel.integrations.context_parallel, kernel.flash_attn_with_kvcache
    peers = cp.Peers(q_heads=Q_HEADS, head_dim_v=HEAD_DIM, dtype=q.dtype)
    q_mine = q.chunk(ranks, dim=2)[dist.get_rank()]
    own = ranks - 1

    def by_pages(**how):
        return lambda: [cp.attention(q, *pages.caches, owner=own, **how, **pages.where()) for _, pages, _ in layers]

    def halves(pages):
        parts = []
        for half in range(2):
            caches = [cache.chunk(2, dim=2)[half] for cache in pages.caches]
            parts.append(cp.start(q.chunk(2, dim=2)[half], *caches, owner=own, **pages.where()))
        return torch.cat([cp.finish(part) for part in parts], dim=2)

    return {
        "alone": lambda: [call(q, *whole.caches, causal=True, **whole.where()) for whole, _, _ in layers],
        "pages": by_pages(),
        "pages, own heads": by_pages(heads="own"),
        "pages, peers": by_pages(peers=peers),
        "pages, own heads, peers": by_pages(heads="own", peers=peers),
        "halves": lambda: [halves(p) for _, p, _ in layers],
        "heads": lambda: [call(q_mine, *h.caches, causal=True, **h.where()) for _, _, h in layers],
    }


def captured(function):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def microseconds(graph, rounds):
    """The median time of a replay, on the slowest rank; all start together."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    median = torch.tensor([sorted(times)[rounds // 2]], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def expected_of(whole, q, keys):
    """Dense attention in float64."""
    table = whole.table[0, : keys // PAGE_SIZE].long()
    k, v = (cache[table].flatten(0, 1).double().repeat_interleave(Q_HEADS // KV_HEADS, 1) for cache in whole.caches)
    scores = torch.einsum("hd,khd->hk", q[0, 0].double(), k) * HEAD_DIM**-0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v)


def error_of(result, expected):
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


@torch.inference_mode()
def measure(kernel, keys, rounds):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = list(layers_of(kernel, keys, ranks))
    torch.manual_seed(100)
    q = torch.randn(1, 1, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    row = {"keys": keys, "layers": len(layers)}
    for name, function in ways(kernel, layers, q, ranks).items():
        graph, results = captured(function)
        row[name] = round(microseconds(graph, rounds) / len(layers), 2)
        if name == "alone":
            alone = [result.clone() for result in results]
            if keys <= 1 << 15:
                row["error of alone"] = error_of(alone[0][0, 0], expected_of(layers[0][0], q, keys))
                assert row["error of alone"] < 1e-2, row
            continue
        mine = (
            slice(None)
            if name in ("pages", "pages, peers", "halves")
            else slice(rank * Q_HEADS // ranks, (rank + 1) * Q_HEADS // ranks)
        )
        row[f"error of {name}"] = max(error_of(a, b[:, :, mine].double()) for a, b in zip(results, alone, strict=True))
        assert row[f"error of {name}"] < 1e-2, row
        del graph, results
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1 << 15, 1 << 17, 1 << 20])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, help="write what was measured to this file as JSON")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend="cuda", trust_remote_code=True)
    rows = []
    for keys in tqdm(args.keys, "lengths", disable=dist.get_rank() > 0):
        rows.append(measure(kernel, keys, args.rounds))
        if dist.get_rank() == 0:
            tqdm.write(json.dumps(rows[-1]))
    if dist.get_rank() == 0 and args.out:
        result = {
            "machine": f"{dist.get_world_size()} {torch.cuda.get_device_name()}",
            "date": time.strftime("%Y-%m-%d"),
            "command": f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/compare_context_parallel.py "
            + " ".join(sys.argv[1:]),
            "versions": f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
