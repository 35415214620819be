"""The cases of compare_cpu.py, and seeded inputs for them and for compare_cuda.py."""

import dataclasses
import math
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}


def largest_cache(caches=Path("/sys/devices/system/cpu/cpu0/cache")):
    """Bytes of the largest cache of this processor; 0 where Linux does not tell."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


# K and V of all copies of a case together: far beyond the last-level cache, which has up to 480 MB.
ROTATED_BYTES = max(256 << 20, 2 * largest_cache())
SPARE_PAGES = 8  # pages that no table names


def product_dtype(dtype):
    """In which torch.mm says what the processor can do: with 16 bits that it has no arithmetic for, torch takes a
    hundred times as long as in float32.
    """
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported, torch.float16: mkldnn._is_mkldnn_fp16_supported}
    return dtype if dtype in has and has[dtype]() else torch.float32


@dataclasses.dataclass
class Case:
    name: str
    dtype: str
    kv_lens: list
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    page_size: int = 16
    cache_dtype: str = ""  # "" is dtype
    resident: bool = False  # one copy only, which stays in the core's caches
    kind: str = "decode"  # decode and prefill attend with the last q_len tokens; write stores them

    @property
    def key(self):
        return f"{self.kind} {self.label} {self.dtype}"

    @property
    def label(self):
        return self.name + (f", {self.cache_dtype} cache" if self.cache_dtype else "")

    @property
    def batch(self):
        return len(self.kv_lens)

    @property
    def group(self):
        return self.q_heads // self.kv_heads

    @property
    def scale(self):
        return self.head_dim**-0.5

    @property
    def bytes(self):
        """K and V read; for a write, K and V read once and written once."""
        cached = DTYPES[self.cache_dtype or self.dtype].itemsize
        row = 2 * self.kv_heads * self.head_dim
        if self.kind == "write":
            return self.batch * self.q_len * row * (DTYPES[self.dtype].itemsize + cached)
        return sum(self.kv_lens) * row * cached

    @property
    def flops(self):
        """Two multiply-adds per element of every visible (query, key) pair."""
        pairs = sum(self.q_len * n - self.q_len * (self.q_len - 1) // 2 for n in self.kv_lens)
        return 4 * self.q_heads * self.head_dim * pairs

    @property
    def copies(self):
        if self.resident:
            return 1
        limit = 4 if self.kind == "prefill" else 64
        return min(limit, math.ceil(ROTATED_BYTES / self.bytes))


def all_cases():
    # Log-uniform lengths from 128 to 16384, in no order.
    steps = [0.07, 0.93, 0.31, 0.62, 0.18, 0.81, 0.45, 0.55, 0.26, 0.99, 0.02, 0.70, 0.38, 0.12, 0.87, 0.50]
    mixed = [round(128 * 128**u) for u in steps]
    half = ("bf16", "fp16")
    every = (*half, "fp32")
    long_write = {"kind": "write", "q_len": 2048}
    table = [
        ("B1 32/8 D128 4k", [4096], every, {}),
        ("B1 32/8 D128 32k", [32768], every, {}),
        ("B8 32/8 D128 4k", [4096] * 8, every, {}),
        ("B32 32/8 D128 1k", [1024] * 32, every, {}),
        ("B8 32/32 D128 2k", [2048] * 8, every, {"kv_heads": 32}),
        ("B16 16/2 D64 4k", [4096] * 16, every, {"q_heads": 16, "kv_heads": 2, "head_dim": 64}),
        ("B4 16/8 D256 4k", [4096] * 4, every, {"q_heads": 16, "head_dim": 256}),
        ("B1 32/8 D128 64 resident", [64], ("bf16",), {"resident": True}),
        ("B1 32/8 D128 512 resident", [512], every, {"resident": True}),
        ("B16 32/8 D128 128..16k", mixed, ("bf16", "fp32"), {}),
        ("B8 32/8 D128 4k page 1", [4096] * 8, ("bf16",), {"page_size": 1}),
        ("B8 32/8 D128 4k page 128", [4096] * 8, ("bf16",), {"page_size": 128}),
        ("B8 32/8 D128 2k q_len 4", [2048] * 8, ("bf16", "fp32"), {"q_len": 4}),
        ("B8 32/8 D128 4k", [4096] * 8, ("bf16",), {"cache_dtype": "e4m3"}),
        ("B1 32/8 D128 512 on 2k", [2048], every, {"q_len": 512, "kind": "prefill"}),
        ("B1 32/8 D128 1k", [1024], every, {"q_len": 1024, "kind": "prefill"}),
        ("B1 32/8 D128 2k", [2048], ("bf16",), {"q_len": 2048, "kind": "prefill"}),
        ("B1 32/8 D128 100", [100], ("bf16",), {"q_len": 100, "kind": "prefill"}),
        ("B64 x 1 token, 8 heads D128", [16] * 64, half, {"kind": "write"}),
        ("B4 x 2048 tokens, 8 heads D128", [2048] * 4, half, long_write),
        ("B4 x 2048 tokens, 8 heads D128", [2048] * 4, ("bf16",), long_write | {"cache_dtype": "e4m3"}),
    ]
    return [Case(name, dtype, lens, **more) for name, lens, dtypes, more in table for dtype in dtypes]


class Inputs:
    """What every provider gets: q[r], k_new[r], v_new[r] and tables[r] per copy r over one paged cache.

    The pages of all copies lie in random order in one pool. Only shapes and bytes matter for speed, so values
    repeat with a prime period that no page or row shares.
    """

    def __init__(self, case, copies=None, device="cpu"):
        self.case, self.copies, self.device = case, copies or case.copies, device
        generator = torch.Generator(device).manual_seed(1234)
        random = {"generator": generator, "device": device}
        pool = torch.randn(4194301, **random)
        if case.cache_dtype:  # whatever dtype a provider is given them in, all hold the same values
            pool = pool.to(DTYPES[case.cache_dtype]).float()
        pages = [-(-n // case.page_size) for n in case.kv_lens]
        num_pages = sum(pages) * self.copies + SPARE_PAGES
        shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
        dtype = DTYPES[case.dtype]
        self.k_cache = tiled(pool, shape, DTYPES[case.cache_dtype or case.dtype])
        self.v_cache = tiled(pool.flip(0), shape, self.k_cache.dtype)
        order = torch.randperm(num_pages, dtype=torch.int32, **random)
        self.tables = []
        for r in range(self.copies):
            table = torch.zeros(case.batch, max(pages), dtype=torch.int32, device=device)
            for b, n in enumerate(pages):
                first = r * sum(pages) + sum(pages[:b])
                table[b, :n] = order[first : first + n]
            self.tables.append(table)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        rows = (self.copies, case.batch, case.q_len)
        self.q = (2 * torch.randn(*rows, case.q_heads, case.head_dim, **random)).to(dtype)
        self.k_new = self.v_new = None
        if case.kind == "write":
            self.k_new = tiled(pool[7:], (*rows, case.kv_heads, case.head_dim), dtype)
            self.v_new = tiled(pool[11:], (*rows, case.kv_heads, case.head_dim), dtype)

    def slots(self, r, b, page_size=None, table=None):
        """The slot (page * page_size + offset) of each token of request b, in this or in another page table."""
        page_size = page_size or self.case.page_size
        table = self.tables[r][b] if table is None else table
        position = torch.arange(self.case.kv_lens[b], device=self.device)
        return table[position // page_size].long() * page_size + position % page_size

    def tokens(self, cache, r, b):
        """(kv_len, kv_heads, head_dim): K or V of one request, contiguous, in the case's dtype."""
        return cache.flatten(0, 1)[self.slots(r, b)].to(DTYPES[self.case.dtype])

    def dense(self, cache, r):
        """(batch, kv_heads, max kv_len, head_dim), contiguous: a cache that needs no paging."""
        case = self.case
        out = torch.zeros(case.batch, case.kv_heads, max(case.kv_lens), case.head_dim, dtype=DTYPES[case.dtype])
        for b, n in enumerate(case.kv_lens):
            out[b, :, :n] = self.tokens(cache, r, b).transpose(0, 1)
        return out

    def last_tokens(self, cache, r):
        """(batch * q_len, kv_heads, head_dim): the newest tokens, for peers that write them in the same call."""
        return torch.cat([self.tokens(cache, r, b)[-self.case.q_len :] for b in range(self.case.batch)])

    def written(self):
        """What the cache holds of the newest tokens of copy 0, K then V."""
        return torch.stack([self.last_tokens(cache, 0) for cache in (self.k_cache, self.v_cache)]).float()

    def reference(self):
        """Of copy 0: float32 attention, (batch, q_len, q_heads, head_dim); for a write, the values it should leave."""
        case = self.case
        if case.kind == "write":
            return torch.stack([self.k_new[0], self.v_new[0]]).float().flatten(1, 2)
        out = torch.empty(case.batch, case.q_len, case.q_heads, case.head_dim, device=self.device)
        for b, n in enumerate(case.kv_lens):
            k, v = (self.tokens(cache, 0, b).float().permute(1, 0, 2) for cache in (self.k_cache, self.v_cache))
            k, v = (t.repeat_interleave(case.group, 0) for t in (k, v))
            scores = self.q[0, b].float().transpose(0, 1) @ k.transpose(1, 2) * case.scale
            hidden = torch.ones(case.q_len, n, dtype=torch.bool, device=self.device).triu(n - case.q_len + 1)
            out[b] = (scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)
        return out


def tiled(pool, shape, dtype):
    n = math.prod(shape)
    out = torch.empty(n, dtype=dtype, device=pool.device)
    for first in range(0, n, pool.numel()):
        out[first : first + pool.numel()] = pool[: n - first].to(dtype)
    return out.view(shape)
