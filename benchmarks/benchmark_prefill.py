"""Prefill, whole and in chunks over a paged cache, for `kernels benchmark`; verified against SDPA."""

from functools import partialmethod

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class PrefillBenchmark(Benchmark):
    """Prompts of different lengths, packed one after another."""

    seed = 0

    def prepare(self, lens, dtype, q_heads=32, kv_heads=8, head_dim=128):
        self.lens, self.max_len = lens, max(lens)
        self.cu_seqlens = torch.tensor([0, *lens], device=self.device).cumsum(0, dtype=torch.int32)
        self.q = torch.randn(sum(lens), q_heads, head_dim, dtype=dtype, device=self.device)
        # The runner's tolerance is absolute: values are small, so that bf16's rounding stays below it.
        self.k, self.v = 0.2 * torch.randn(2, sum(lens), kv_heads, head_dim, dtype=dtype, device=self.device)

    def attend(self):
        cu, n = self.cu_seqlens, self.max_len
        self.out = self.kernel.flash_attn_varlen_func(self.q, self.k, self.v, cu, cu, n, n, causal=True)

    def attend_one_by_one(self):
        parts = zip(*(t.transpose(0, 1).split(self.lens, 1) for t in (self.q, self.k, self.v)), strict=True)
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    setup_prompt_1k_bf16 = partialmethod(prepare, [1024], torch.bfloat16)
    benchmark_prompt_1k_bf16, verify_prompt_1k_bf16 = attend, attend_one_by_one

    setup_prompt_1k_fp16 = partialmethod(prepare, [1024], torch.float16)
    benchmark_prompt_1k_fp16, verify_prompt_1k_fp16 = attend, attend_one_by_one

    setup_prompts_mixed_bf16 = partialmethod(prepare, [300, 17, 640, 128], torch.bfloat16)
    benchmark_prompts_mixed_bf16, verify_prompts_mixed_bf16 = attend, attend_one_by_one


class ChunkedPrefillBenchmark(Benchmark):
    """The next 512 tokens of a prompt whose first 1536 are in the paged cache already."""

    seed = 0
    q_len, kv_len, page_size = 512, 2048, 16

    def prepare(self, dtype, q_heads=32, kv_heads=8, head_dim=128):
        num_pages = self.kv_len // self.page_size
        self.k_cache, self.v_cache = self.kernel.empty_paged_cache(
            num_pages, self.page_size, kv_heads, head_dim, dtype=dtype, device=self.device
        )
        for cache in (self.k_cache, self.v_cache):
            cache.normal_()
        self.block_table = torch.randperm(num_pages, device=self.device).int()[None]
        self.cache_seqlens = torch.tensor([self.kv_len], dtype=torch.int32, device=self.device)
        self.q = torch.randn(1, self.q_len, q_heads, head_dim, dtype=dtype, device=self.device)

    def attend(self):
        self.out = self.kernel.flash_attn_with_kvcache(
            self.q,
            self.k_cache,
            self.v_cache,
            cache_seqlens=self.cache_seqlens,
            block_table=self.block_table,
            causal=True,
        )

    def gather_and_attend(self):
        k, v = (cache[self.block_table.long()].flatten(1, 2).transpose(1, 2) for cache in (self.k_cache, self.v_cache))
        visible = torch.ones(self.q_len, self.kv_len, dtype=torch.bool, device=self.device)
        visible = visible.tril(self.kv_len - self.q_len)
        out = F.scaled_dot_product_attention(self.q.transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True)
        return out.transpose(1, 2)

    setup_512_on_2k_bf16 = partialmethod(prepare, torch.bfloat16)
    benchmark_512_on_2k_bf16, verify_512_on_2k_bf16 = attend, gather_and_attend

    setup_512_on_2k_fp16 = partialmethod(prepare, torch.float16)
    benchmark_512_on_2k_fp16, verify_512_on_2k_fp16 = attend, gather_and_attend
