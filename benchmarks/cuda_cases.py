"""The cases of compare_cuda.py and compare_prefill.py: shapes, bytes and operations, without a GPU."""

import itertools
import math
import random
from dataclasses import dataclass

import torch
from cpu_cases import Case


def decode_cases():
    lengths = random.Random(7)
    mixed = [round(math.exp(lengths.uniform(math.log(128), math.log(32768)))) for _ in range(64)]
    write, fp8 = {"kind": "write"}, {"cache_dtype": "e4m3"}
    table = [
        ("B1 1k", [1024], {}),
        ("B1 8k", [8192], {}),
        ("B1 32k", [32768], {}),
        ("B1 128k", [131072], {}),
        ("B8 8k", [8192] * 8, {}),
        ("B64 4k", [4096] * 64, {}),
        ("B256 1k", [1024] * 256, {}),
        ("B64 4k, page 256", [4096] * 64, {"page_size": 256}),
        ("B64 4k, page 1", [4096] * 64, {"page_size": 1}),
        ("B64 64/8 4k", [4096] * 64, {"q_heads": 64}),
        ("B32 32/32 4k", [4096] * 32, {"kv_heads": 32}),
        ("B64 16/2 D64 4k", [4096] * 64, {"q_heads": 16, "kv_heads": 2, "head_dim": 64}),
        ("B32 16/8 D256 4k", [4096] * 32, {"q_heads": 16, "head_dim": 256}),
        ("B16 8/1 16k", [16384] * 16, {"q_heads": 8, "kv_heads": 1}),
        ("B64 128..32k", mixed, {}),
        ("63 x 256, 1 x 64k", [256] * 63 + [65536], {}),
        ("B32 4k, 4 tokens", [4096] * 32, {"q_len": 4}),
        ("B64 4k, fp8", [4096] * 64, fp8),
        ("B1 32k, fp8", [32768], fp8),
        ("B8 8k, fp8", [8192] * 8, fp8),
        ("write 64 tokens", [4096] * 64, write),
        ("write 8192 tokens", [4096] * 4, write | {"q_len": 2048}),
        ("write 8192 tokens, fp8", [4096] * 4, write | fp8 | {"q_len": 2048}),
    ]
    return [Case(name, "bf16", lens, **more) for name, lens, more in table]


@dataclass
class Prompts:
    name: str
    q_lens: list
    kv_lens: list
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    page_size: int = 0  # 0: packed keys
    table_keys: int = 0  # for which a row of the block table has room, if the longest request needs less
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "bfloat16"  # of q, k and v
    kv_dtype: str = ""  # of k and v, where it is another one

    @property
    def bytes(self):
        """Keys, values, queries and output, each once."""
        head_dim_v = self.head_dim_v or self.head_dim
        each, each_key = (getattr(torch, name).itemsize for name in (self.dtype, self.kv_dtype or self.dtype))
        keys = each_key * (self.head_dim + head_dim_v) * self.kv_heads * sum(self.kv_lens)
        return keys + (each * self.head_dim + 2 * head_dim_v) * self.q_heads * sum(self.q_lens)

    @property
    def flops(self):
        """Two multiply-adds per element of every visible (query, key) pair."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            rows = torch.arange(q_len) + kv_len - q_len
            begin = (rows - self.window_left).clamp(min=0) if self.window_left >= 0 else torch.zeros_like(rows)
            pairs += int(((rows + 1 if self.causal else torch.full_like(rows, kv_len)) - begin).sum())
        return 2 * self.q_heads * (self.head_dim + (self.head_dim_v or self.head_dim)) * pairs


def prefill_cases():
    mixed, e4m3 = {"page_size": 16}, "float8_e4m3fn"
    uneven = [100, 3000, 500, 1800, 60, 2500, 1000, 700]
    chunk = ([1024] * 4, [4096] * 4)
    drafts = [Prompts(f"B32 4k, {n} tokens", [n] * 32, [4096] * 32, page_size=16) for n in (2, 4, 8, 16)]
    return [
        Prompts("B4 1024 on 4096", *chunk, page_size=16),
        Prompts("B4 1024 on 4096, page 1", *chunk, page_size=1),
        Prompts("B4 1024 on 4096, page 256", *chunk, page_size=256),
        Prompts("B4 x 2048", [2048] * 4, [2048] * 4),
        Prompts("B1 x 8192", [8192], [8192]),
        Prompts("B1 x 32768", [32768], [32768]),
        Prompts("B4 x 2048, not causal", [2048] * 4, [2048] * 4, causal=False),
        Prompts("encoder B16 x 512, 16/16 D64", [512] * 16, [512] * 16, 16, 16, 64, causal=False),
        Prompts("B4 x 2048, 16/8 D256", [2048] * 4, [2048] * 4, 16, 8, 256),
        Prompts("B4 x 2048, 16/16 D192/128", [2048] * 4, [2048] * 4, 16, 16, 192, 128),
        Prompts("B4 x 2048, 32/8 D96", [2048] * 4, [2048] * 4, head_dim=96),
        Prompts("8 uneven prompts", uneven, uneven, page_size=16),
        Prompts("B1 x 8192, window 1024", [8192], [8192], page_size=16, window_left=1023),
        *drafts,
        Prompts("B1 32k, 16 tokens", [16], [32768], page_size=16),
        Prompts("B1 128 on 128k", [128], [131072], page_size=16),
        Prompts("B4 1024 on 4096, e4m3", *chunk, page_size=16, dtype=e4m3),
        Prompts("B4 x 2048, e4m3", [2048] * 4, [2048] * 4, dtype=e4m3),
        Prompts("B1 x 8192, e4m3", [8192], [8192], dtype=e4m3),
        Prompts("B1 x 32768, e4m3", [32768], [32768], dtype=e4m3),
        Prompts("B4 x 2048, D64, e4m3", [2048] * 4, [2048] * 4, head_dim=64, dtype=e4m3),
        Prompts("B4 1024 on 4096, e4m3 cache", *chunk, page_size=16, kv_dtype=e4m3),
        Prompts("B4 1024 on 4096, e5m2 cache, page 1", *chunk, page_size=1, kv_dtype="float8_e5m2"),
        Prompts("B4 x 2048, D64, e4m3 cache", [2048] * 4, [2048] * 4, head_dim=64, kv_dtype=e4m3),
        Prompts("60 x 1 and 2 x 1024 on 4096", [1] * 60 + [1024] * 2, [4096] * 62, **mixed),
    ]


def last_round_cases():
    """A few tiles of rows more than multiprocessors, or a little more than half as many."""
    return [
        Prompts("B1 300 on 8192", [300], [8192], page_size=16),
        Prompts("B1 600 on 8192", [600], [8192], page_size=16),
        Prompts("B17 4k, 8 tokens", [8] * 17, [4096] * 17, page_size=16),
    ]


def few_tiles_cases():
    """Short prompts and chunks of one request: few tiles of rows, which leave most multiprocessors idle."""
    heads = {"8/1": (8, 1, 128), "32/8": (32, 8, 128), "8/4 D256": (8, 4, 256), "9/3 D64": (9, 3, 64)}
    lengths = [(64, 256), (64, 2048), (128, 128), (256, 256), (256, 512), (256, 1024), (256, 4096), (512, 1024)]
    return [
        Prompts(f"B1 {q_len} on {kv_len}, {name}", [q_len], [kv_len], *sizes, page_size=16)
        for name, sizes in heads.items()
        for q_len, kv_len in lengths
    ]


def between(least, most, n):
    """n lengths that grow by equal factors."""
    return [round(least * (most / least) ** (i / (n - 1))) for i in range(n)]


def wide_table_cases():
    """Drafts in a block table of 32k keys, as a captured graph has it: the host does not know how long requests are."""
    heads = {"8/1": (8, 1, 4), "32/8": (32, 8, 8), "16/2": (16, 2, 8)}  # q_heads, kv_heads, tokens
    lengths = [(n, 512, 4096) for n in (2, 4, 8, 16, 32)] + [(8, 128, 8192), (60, 128, 8192), (100, 128, 4096)]
    lengths += [(4, 4096, 4096), (8, 16384, 16384), (16, 16384, 16384), (32, 4096, 4096), (64, 1024, 1024)]
    cases = []
    for (n, least, most), (name, (q_heads, kv_heads, tokens)) in itertools.product(lengths, heads.items()):
        kv_lens = between(least, most, n)
        title = f"{n} of {least}..{most}, {tokens} tokens, {name}, wide table"
        cases.append(Prompts(title, [tokens] * n, kv_lens, q_heads, kv_heads, page_size=16, table_keys=32768))
    return cases


# Attention of models, from their configurations: q_heads, kv_heads, head_dim, and what a layer has besides.
MODELS = {
    "Llama 3.1 8B": (32, 8, 128, {}),
    "Llama 3.3 70B, of 8 GPUs": (8, 1, 128, {}),
    "Llama 3.2 1B": (32, 8, 64, {}),
    "Llama 4": (40, 8, 128, {}),
    "Qwen2.5 7B": (28, 4, 128, {}),
    "Qwen3 0.6B": (16, 8, 128, {}),
    "Qwen3 30B": (32, 4, 128, {}),
    "Qwen3 235B": (64, 4, 128, {}),
    "Qwen3 Next": (16, 2, 256, {}),
    "GLM 4.5": (96, 8, 128, {}),
    "GPT-OSS 120B": (64, 8, 64, {"sinks": True}),
    "GPT-OSS 120B, window 128": (64, 8, 64, {"sinks": True, "window_left": 127}),
    "Gemma 2 9B": (16, 8, 256, {"softcap": 50.0}),
    "Gemma 2 9B, window 4096": (16, 8, 256, {"softcap": 50.0, "window_left": 4095}),
    "Gemma 3 27B": (32, 16, 128, {}),
    "Gemma 3 27B, window 1024": (32, 16, 128, {"window_left": 1023}),
    "Gemma 3 4B": (8, 4, 256, {}),
    "Gemma 3 4B, window 1024": (8, 4, 256, {"window_left": 1023}),
    "Phi-3 mini": (32, 32, 96, {}),
    "Phi-4": (40, 10, 128, {}),
    "StarCoder2 7B": (36, 4, 128, {}),
    "SmolLM 135M": (9, 3, 64, {}),
    "Falcon 7B": (71, 1, 64, {}),
}

# What an engine asks for in one step: new tokens and all keys of every request.
STEPS = {
    "1 of 4k": ([1], [4096]),
    "32 of 2k": ([1] * 32, [2048] * 32),
    "32 of 128..8k": ([1] * 32, between(128, 8192, 32)),
    "16 of 4k, 4 tokens": ([4] * 16, [4096] * 16),
    "512 on 4k": ([512], [4096]),
    "8 x 512": ([512] * 8, [512] * 8),
    "30 x 1 and 2 x 512 on 2k": ([1] * 30 + [512] * 2, [2048] * 32),
}


def model_cases(model):
    q_heads, kv_heads, head_dim, more = MODELS[model]
    return [
        Prompts(step, q_lens, kv_lens, q_heads, kv_heads, head_dim, page_size=16, **more)
        for step, (q_lens, kv_lens) in STEPS.items()
    ]
