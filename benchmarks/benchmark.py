"""Decode over a paged cache, for `kernels benchmark`; verified against SDPA over the gathered keys and values."""

from functools import partialmethod

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class PagedDecodeBenchmark(Benchmark):
    seed = 0

    def prepare(self, kv_lens, dtype, q_len=1, q_heads=32, kv_heads=8, head_dim=128, page_size=16):
        batch, max_pages = len(kv_lens), -(-max(kv_lens) // page_size)
        num_pages = batch * max_pages
        self.k_cache, self.v_cache = self.kernel.empty_paged_cache(
            num_pages, page_size, kv_heads, head_dim, dtype=dtype, device=self.device
        )
        for cache in (self.k_cache, self.v_cache):
            cache.normal_()
        self.block_table = torch.randperm(num_pages, device=self.device).int().view(batch, max_pages)
        self.cache_seqlens = torch.tensor(kv_lens, dtype=torch.int32, device=self.device)
        self.q = torch.randn(batch, q_len, q_heads, head_dim, dtype=dtype, device=self.device)

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
        kv_len, q_len = self.cache_seqlens.long()[:, None, None], self.q.shape[1]
        key = torch.arange(k.shape[2], device=self.device)
        token = torch.arange(q_len, device=self.device)[:, None]
        visible = key <= kv_len - q_len + token
        out = F.scaled_dot_product_attention(self.q.transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=True)
        return out.transpose(1, 2)

    setup_batch1_4k_bf16 = partialmethod(prepare, [4096], torch.bfloat16)
    benchmark_batch1_4k_bf16, verify_batch1_4k_bf16 = attend, gather_and_attend

    setup_batch1_32k_bf16 = partialmethod(prepare, [32768], torch.bfloat16)
    benchmark_batch1_32k_bf16, verify_batch1_32k_bf16 = attend, gather_and_attend

    setup_batch8_4k_bf16 = partialmethod(prepare, [4096] * 8, torch.bfloat16)
    benchmark_batch8_4k_bf16, verify_batch8_4k_bf16 = attend, gather_and_attend

    setup_batch8_4k_fp16 = partialmethod(prepare, [4096] * 8, torch.float16)
    benchmark_batch8_4k_fp16, verify_batch8_4k_fp16 = attend, gather_and_attend

    setup_batch8_mixed_bf16 = partialmethod(prepare, [128, 8192, 512, 3000, 1024, 77, 6001, 2048], torch.bfloat16)
    benchmark_batch8_mixed_bf16, verify_batch8_mixed_bf16 = attend, gather_and_attend

    setup_batch8_2k_verify4_bf16 = partialmethod(prepare, [2048] * 8, torch.bfloat16, q_len=4)
    benchmark_batch8_2k_verify4_bf16, verify_batch8_2k_verify4_bf16 = attend, gather_and_attend
