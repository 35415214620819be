"""Writing new keys and values into a paged cache, for `kernels benchmark`; verified against an indexed copy."""

from functools import partialmethod

import torch
from kernels.benchmark import Benchmark


class KvWriteBenchmark(Benchmark):
    seed = 0

    def prepare(self, batch, new_tokens, dtype, kv_heads=8, head_dim=128, page_size=16, before=5):
        max_pages = -(-(before + new_tokens) // page_size)
        num_pages = batch * max_pages
        # The runner compares `out` with what verify returns: here, the halves of one tensor with their copies.
        self.out, _ = self.kernel.empty_paged_cache(
            2 * num_pages, page_size, kv_heads, head_dim, dtype=dtype, device=self.device
        )
        self.copy = self.out.zero_().clone()
        self.k_cache, self.v_cache = self.out.chunk(2)
        self.k_copy, self.v_copy = self.copy.chunk(2)
        self.k, self.v = torch.randn(2, batch, new_tokens, kv_heads, head_dim, dtype=dtype, device=self.device)
        self.block_table = torch.randperm(num_pages, device=self.device).int().view(batch, max_pages)
        self.cache_seqlens = torch.full((batch,), before, dtype=torch.int32, device=self.device)
        position = torch.arange(before, before + new_tokens, device=self.device)
        self.slots = self.block_table.long()[:, position // page_size] * page_size + position % page_size

    def write(self):
        self.kernel.kv_paged_write(self.k, self.v, self.k_cache, self.v_cache, self.block_table, self.cache_seqlens)

    def write_indexed(self):
        for copy, new in ((self.k_copy, self.k), (self.v_copy, self.v)):
            copy.flatten(0, 1)[self.slots] = new
        return self.copy

    setup_batch64_1_token_bf16 = partialmethod(prepare, 64, 1, torch.bfloat16)
    benchmark_batch64_1_token_bf16, verify_batch64_1_token_bf16 = write, write_indexed

    setup_batch4_2k_tokens_bf16 = partialmethod(prepare, 4, 2048, torch.bfloat16)
    benchmark_batch4_2k_tokens_bf16, verify_batch4_2k_tokens_bf16 = write, write_indexed

    setup_batch4_2k_tokens_fp16 = partialmethod(prepare, 4, 2048, torch.float16)
    benchmark_batch4_2k_tokens_fp16, verify_batch4_2k_tokens_fp16 = write, write_indexed
