"""Counts what a call of the Metal backend does, on the emulated GPU of tools/metal_emulator: no Mac, no time taken.

    METAL_VARIANT=count OMP_NUM_THREADS=1 python benchmarks/count_metal.py [--ours] [PART ...]

The cases are the decode cases of the GPU and CPU comparisons; arguments pick those whose names contain one of them.
For each, and without --ours for MLX's sdpa_vector too (from its wheel on PyPI; its keys are contiguous, not of 8 bits):

    K, V        bytes of K and V that lanes load, relative to all of them once
    other       the same of everything else that is loaded (queries, tables, lengths, partials; not the arguments)
    stored      the same of what is stored (partials, output)
    exchanges   operations that move values between the lanes of a simdgroup, per score (key, q_head, token)
    matrices    multiplications of 8 x 8 matrices, per score
    shared      bytes of threadgroup memory that lanes load and store, per score
    groups      threadgroups of the largest dispatch, of how many simdgroups
    dispatches  of the call

A call of the full shape, whose requests are empty, gives the plan: splits, threadgroups, dispatches. What is counted
then is one request and one kv_head, which are like all others, with as many keys and simdgroups for a split (of splits
at most 4, of keys in one at most 4096: longer ones do more of the same).
"""

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "metal_emulator"))

import fake_mps  # noqa: E402
import metal_build  # noqa: E402
import mlx  # noqa: E402

MAX_SPLITS, MAX_SPLIT_KEYS = 4, 4096
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len: int
    note: str = ""
    page_size: int = 16
    q_len: int = 1
    dtype: torch.dtype = torch.float16
    cache: torch.dtype | None = None

    @property
    def name(self):
        heads = f"{self.q_heads}/{self.kv_heads} D{self.head_dim}"
        return f"B{self.batch} {heads}, {self.kv_len} keys{', ' if self.note else ''}{self.note}"

    @property
    def group(self):
        return self.q_heads // self.kv_heads


CASES = [
    Case(4, 16, 16, 128, 50),
    Case(1, 32, 8, 128, 512),
    Case(1, 32, 8, 128, 1024),
    Case(1, 32, 8, 128, 4096),
    Case(1, 32, 8, 128, 8192),
    Case(1, 32, 8, 128, 32768),
    Case(1, 32, 8, 128, 131072),
    Case(8, 32, 8, 128, 8192),
    Case(64, 32, 8, 128, 4096),
    Case(256, 32, 8, 128, 1024),
    Case(64, 32, 8, 128, 4096, "pages of 256", page_size=256),
    Case(64, 32, 8, 128, 4096, "pages of 1", page_size=1),
    Case(64, 64, 8, 128, 4096),
    Case(32, 32, 32, 128, 4096),
    Case(64, 16, 2, 64, 4096),
    Case(32, 16, 8, 256, 4096),
    Case(4, 16, 8, 256, 4096),
    Case(16, 8, 1, 128, 16384),
    Case(64, 32, 8, 128, 256, "in a batch with 65536"),
    Case(64, 32, 8, 128, 65536, "in a batch with 256"),
    Case(64, 32, 8, 128, 128, "in a batch with 32768"),
    Case(64, 32, 8, 128, 32768, "in a batch with 128"),
    Case(32, 32, 8, 128, 4096, "4 tokens", q_len=4),
    Case(64, 32, 8, 128, 4096, "fp8 cache", cache=FP8),
    Case(1, 32, 8, 128, 32768, "fp8 cache", cache=FP8),
    Case(8, 32, 8, 128, 8192, "fp8 cache", cache=FP8),
    Case(8, 32, 8, 128, 4096, "float32", dtype=torch.float32),
]
LONGEST_OF_BATCH = {"in a batch with 65536": 65536, "in a batch with 32768": 32768}  # what the cache has room for


def buffer_indices():
    """The list of arguments.h, which host and shader share."""
    text = (ROOT / "paged_decode_metal" / "arguments.h").read_text()
    names = re.findall(r"k(\w+)Buffer\b,", re.search(r"enum BufferIndex \{(.*?)\}", text, re.DOTALL)[1])
    return {name: i for i, name in enumerate(names)}


def call(paged_attn, library, case, batch, kv_heads, capacity, kv_len, num_pages, num_splits=0):
    """One call; its dispatches."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_pages, case.page_size, kv_heads, case.head_dim)
    cache_type = case.cache or case.dtype
    k, v = (torch.randn(shape, generator=generator).to(case.dtype).to(cache_type).to("mps") for _ in range(2))
    q = torch.randn(batch, case.q_len, kv_heads * case.group, case.head_dim, generator=generator).to(case.dtype)
    columns = -(-capacity // case.page_size)
    table = torch.stack([torch.randperm(max(num_pages, columns), generator=generator)[:columns] for _ in range(batch)])
    seqlens = torch.full((batch,), kv_len, dtype=torch.int32).to("mps")
    q, table = q.to("mps"), table.int().to("mps")
    fake_mps.dispatched()
    library.reset_counts()
    options = {"cache_seqlens": seqlens, "block_table": table, "causal": True, "num_splits": num_splits}
    paged_attn.flash_attn_with_kvcache(q, k, v, **options)
    return [re.match(r"(\w+) threadgroups (\d+) (\d+) (\d+) threads (\d+)", x).groups() for x in fake_mps.dispatched()]


def plan(paged_attn, library, case):
    """Splits of the longest request, threadgroups, simdgroups of one, dispatches of the call as it is."""
    capacity = LONGEST_OF_BATCH.get(case.note, case.kv_len)
    dispatches = call(paged_attn, library, case, case.batch, case.kv_heads, capacity, 0, 1)
    name, x, y, z, threads = dispatches[0]
    rows = 32 if name.startswith("prefill") else 8
    splits = int(x) // -(-case.q_len * case.group // rows)
    return splits, int(x) * int(y) * int(z), int(threads) // 32, len(dispatches)


def ours(paged_attn, library, case):
    splits, groups, simdgroups, dispatches = plan(paged_attn, library, case)
    if case.note in LONGEST_OF_BATCH:
        splits = 1  # of this request
    split_keys = min(-(-case.kv_len // splits), MAX_SPLIT_KEYS)
    splits = min(splits, MAX_SPLITS)
    kv_len = splits * split_keys
    fake_mps.limit_threads("attend", 32 * simdgroups)  # fewer threadgroups would have more
    call(paged_attn, library, case, 1, 1, kv_len, kv_len, -(-kv_len // case.page_size), splits)
    fake_mps.limit_threads("attend", 0)
    index = buffer_indices()
    return {
        **counts(library, case, kv_len, [index["KeyCache"], index["ValueCache"]], [index["Arguments"]]),
        "groups": f"{groups} x {simdgroups}",
        "dispatches": dispatches,
    }


def of_mlx(library, case):
    kv_len = min(case.kv_len, MAX_SPLIT_KEYS)
    q = torch.randn(1, case.group, case.q_len, case.head_dim).to(case.dtype)
    k, v = (torch.randn(1, 1, kv_len, case.head_dim).to(case.dtype) for _ in range(2))
    library.reset_counts()
    mlx.sdpa_vector(library, q, k, v, causal=True)
    return {
        **counts(library, case, kv_len, [1, 2], range(4, 16)),
        "groups": f"{case.batch * case.q_heads * case.q_len} x 32",
        "dispatches": 1,
    }


def counts(library, case, kv_len, caches, uncounted):
    """What one request with one kv_head took."""
    c, operations = library.counts(), library.simd_counts()
    itemsize = (case.cache or case.dtype).itemsize
    kv_bytes, scores = 2 * kv_len * case.head_dim * itemsize, kv_len * case.q_len * case.group
    loaded = sum(c.loaded[i] for i in caches)
    other = sum(n for i, n in enumerate(c.loaded) if i not in caches and i not in uncounted)
    matrices = sum(operations.pop(name, 0) for name in ("simdgroup_multiply_accumulate", "simdgroup_multiply"))
    # Barriers move nothing between lanes, and matrices come from threadgroup memory.
    for name in ("simdgroup_barrier", "simdgroup_load", "simdgroup_store"):
        operations.pop(name, None)
    return {
        "kv": loaded / kv_bytes,
        "other": other / kv_bytes,
        "stored": sum(c.stored) / kv_bytes,
        "exchanges": sum(operations.values()) / scores,
        "matrices": matrices / scores,
        "shared": (c.threadgroup_loaded + c.threadgroup_stored) / scores,
    }


def print_row(name, who, n):
    cells = [name, who, *(f"{n[key]:.2f}" for key in ("kv", "other", "stored", "exchanges", "matrices"))]
    print(f"| {' | '.join(cells)} | {n['shared']:.0f} | {n['groups']} | {n['dispatches']} |", flush=True)


def print_head():
    titles = "case | kernel | K, V | other | stored | exchanges | matrices | shared | groups | dispatches"
    print(f"| {titles} |\n{'|---' * len(titles.split('|'))}|")


def load():
    """The package, and the emulator of its kernels."""
    if os.environ.get("METAL_VARIANT") != "count":
        sys.exit("METAL_VARIANT=count is needed")
    os.environ["LOCAL_KERNELS"] = f"org/paged-attn={metal_build.extension(['count'])}"
    fake_mps.load()
    import kernels

    package = kernels.get_kernel("org/paged-attn", version=1, backend="metal", trust_remote_code=True)
    (library,) = fake_mps.kernel_libraries()
    return package, library


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[""], metavar="PART", help="of the names of cases")
    parser.add_argument("--ours", action="store_true", help="without MLX")
    args = parser.parse_args()
    paged_attn, library = load()
    peer = None
    if not args.ours:
        mlx.fetch()
        peer = mlx.from_source("count")
    print_head()
    for case in CASES:
        if not any(part in case.name for part in args.parts):
            continue
        print_row(case.name, "ours", ours(paged_attn, library, case))
        if peer and not case.cache and case.page_size == 16:
            print_row(case.name, "MLX", of_mlx(peer, case))


if __name__ == "__main__":
    main()
