"""Counts what a call of the Metal backend does, on the emulated GPU of tests/metal: no Mac is needed, no time is taken.

    METAL_VARIANT=count OMP_NUM_THREADS=1 python benchmarks/count_metal.py

For each decode case: how often the bytes of K and V are loaded (1.00: each once), operations across the lanes of a
simdgroup and bytes of threadgroup memory per (key, q_head), threadgroups and dispatches. Beside it MLX's sdpa_vector
(its wheel is fetched from PyPI). Batches are cut to 1 and contexts to 2048 keys: every count but the number of
threadgroups grows in proportion with them. An argument picks the cases whose names contain it.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "metal"))

import fake_mps  # noqa: E402
import metal_build  # noqa: E402
import mlx  # noqa: E402


@dataclass
class Case:
    name: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len: int
    page_size: int = 16
    q_len: int = 1
    cache: torch.dtype = torch.float16

    @property
    def kv_bytes(self):
        return 2 * self.batch * self.kv_len * self.kv_heads * self.head_dim * self.cache.itemsize

    @property
    def scores(self):
        return self.batch * self.q_len * self.kv_len * self.q_heads


# The shapes of the GPU comparison, cut as said above.
CASES = [
    Case("B1 32/8 D128, 1k", 1, 32, 8, 128, 1024),
    Case("32/8 D128", 1, 32, 8, 128, 2048),
    Case("32/8 D128, page 256", 1, 32, 8, 128, 2048, 256),
    Case("32/8 D128, page 1", 1, 32, 8, 128, 2048, 1),
    Case("64/8 D128", 1, 64, 8, 128, 2048),
    Case("32/32 D128", 1, 32, 32, 128, 2048),
    Case("16/2 D64", 1, 16, 2, 64, 2048),
    Case("16/8 D256", 1, 16, 8, 256, 2048),
    Case("8/1 D128", 1, 8, 1, 128, 2048),
    Case("32/8 D128, 4 tokens", 1, 32, 8, 128, 2048, q_len=4),
    Case("32/8 D128, fp8 cache", 1, 32, 8, 128, 2048, cache=torch.float8_e4m3fn),
]
# Short contexts: one dispatch.
SHORT = Case("B4 16/16 D128, 50", 4, 16, 16, 128, 50)


def buffer_indices():
    """The list of arguments.h, which host and shader share."""
    text = (ROOT / "paged_decode_metal" / "arguments.h").read_text()
    names = re.findall(r"k(\w+)Buffer\b,", re.search(r"enum BufferIndex \{(.*?)\}", text, re.DOTALL)[1])
    return {name: i for i, name in enumerate(names)}


def ours(paged_attn, libraries, case):
    generator = torch.Generator().manual_seed(0)
    pages = -(-case.kv_len // case.page_size)
    shape = (case.batch * pages, case.page_size, case.kv_heads, case.head_dim)
    k, v = (torch.randn(shape, generator=generator).half().to(case.cache).to("mps") for _ in range(2))
    q = torch.randn(case.batch, case.q_len, case.q_heads, case.head_dim, generator=generator).half().to("mps")
    table = torch.randperm(case.batch * pages, generator=generator).int().view(case.batch, pages).to("mps")
    seqlens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device="mps")
    torch.mps.synchronize()
    fake_mps.dispatched()
    for library in libraries:
        library.reset_counts()
    paged_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, block_table=table, causal=True)
    dispatches = fake_mps.dispatched()
    index = buffer_indices()
    counts = [library.counts() for library in libraries]
    caches = [index["KeyCache"], index["ValueCache"]]
    return {
        "kv": sum(c.loaded[i] for c in counts for i in caches) / case.kv_bytes,
        "simd": sum(map(exchanges, libraries)) / case.scores,
        "shared": sum(c.threadgroup_loaded + c.threadgroup_stored for c in counts) / case.scores,
        "groups": max(groups(line) for line in dispatches),
        "dispatches": len(dispatches),
    }


def groups(line):
    """Threadgroups of one line of fake_mps.dispatched()."""
    x, y, z = (int(n) for n in re.search(r"threadgroups (\d+) (\d+) (\d+)", line).groups())
    return x * y * z


def exchanges(library):
    """Operations that move values between lanes; a barrier of a simdgroup moves none."""
    return sum(n for name, n in library.simd_counts().items() if name != "simdgroup_barrier")


def of_mlx(library, case):
    q = torch.randn(case.batch, case.q_heads, case.q_len, case.head_dim).half()
    k, v = (torch.randn(case.batch, case.kv_heads, case.kv_len, case.head_dim).half() for _ in range(2))
    library.reset_counts()
    mlx.sdpa_vector(library, q, k, v, causal=True)
    c = library.counts()
    return {
        "kv": (c.loaded[1] + c.loaded[2]) / case.kv_bytes,
        "simd": exchanges(library) / case.scores,
        "shared": (c.threadgroup_loaded + c.threadgroup_stored) / case.scores,
        "groups": c.threadgroups,
        "dispatches": 1,
    }


def row(name, who, n):
    print(
        f"| {name} | {who} | {n['kv']:.2f} | {n['simd']:.2f} | {n['shared']:.1f} | {n['groups']} | {n['dispatches']} |",
        flush=True,
    )


def main():
    if os.environ.get("METAL_VARIANT") != "count":
        sys.exit("METAL_VARIANT=count is needed")
    os.environ["LOCAL_KERNELS"] = f"org/paged-attn={metal_build.extension(['count'])}"
    fake_mps.load()
    import kernels

    paged_attn = kernels.get_kernel("org/paged-attn", version=1, backend="metal", trust_remote_code=True)
    libraries = fake_mps.kernel_libraries()
    mlx.fetch()
    peer = mlx.from_source("count")
    print("| case | kernel | K and V loaded / minimum | simd operations / (key, head) |", end="")
    print(" threadgroup bytes / (key, head) | threadgroups | dispatches |")
    print("|---|---|---|---|---|---|---|")
    for case in [SHORT, *CASES]:
        if sys.argv[1:] and sys.argv[1] not in case.name:
            continue
        row(case.name, "ours", ours(paged_attn, libraries, case))
        if case.cache == torch.float16 and case.page_size == 16:
            row(case.name, "MLX sdpa_vector", of_mlx(peer, case))


if __name__ == "__main__":
    main()
