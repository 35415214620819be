// The operators that torch_binding.cpp registers. Shapes and meaning: paged_attn/__init__.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace paged_attn {

using torch::stable::Tensor;

// Attention of q to a paged, contiguous (no block_table) or ragged (cu_seqlens_k) cache into `out`
// and `lse`. With k and v these are written into the cache first.
void flash_attn_with_kvcache(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Tensor& out, std::optional<Tensor> lse,
    std::optional<Tensor> cache_seqlens, std::optional<Tensor> block_table, double softmax_scale, int64_t window_right,
    std::optional<Tensor> k, std::optional<Tensor> v, int64_t window_left, int64_t max_seqlen_q,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> cu_seqlens_k_new,
    double softcap, int64_t num_splits, bool deterministic, std::optional<Tensor> cache_batch_idx,
    std::optional<Tensor> cache_leftpad, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
    int64_t attention_chunk, std::optional<Tensor> qv, std::optional<Tensor> q_descale, std::optional<Tensor> k_descale,
    std::optional<Tensor> v_descale, std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin,
    bool rotary_interleaved, std::optional<Tensor> rotary_seqlens);

// The same with every other argument at its default.
void flash_attn_with_kvcache_plain(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Tensor& out,
                                   std::optional<Tensor> lse, std::optional<Tensor> cache_seqlens,
                                   std::optional<Tensor> block_table, double softmax_scale, int64_t window_right);

void kv_paged_write(const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                    std::optional<Tensor> block_table, std::optional<Tensor> cache_seqlens,
                    std::optional<Tensor> cu_seqlens_k_new, std::optional<Tensor> slot_mapping,
                    std::optional<Tensor> k_descale, std::optional<Tensor> v_descale);

}  // namespace paged_attn
