// A call as the tests of blocks on the host give it.
#pragma once

#include "spec/problem.h"

namespace paged_attn {

// Fields are given by name from Python. An address of 0 leaves a tensor out; strides are in elements.
struct Call {
  int64_t q, qv, k, v, out, lse, cu_seqlens_q, cache_seqlens, block_table, leftpad, alibi, sinks, v_descale;
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v, total_q, max_q_len, q_dtype, kv_dtype;
  int64_t k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head;
  int64_t num_pages, page_size, max_pages;
  int64_t window_left, window_right, chunk, num_splits, deterministic, processors, seed, little_shared, blackwell;
  int64_t q_descale, k_descale, cache_batch_idx, sinks_of_q, fill;
  double scale, softcap;
};

inline Problem problem_of(const Call& call) {
  Problem p = {};
  p.batch = call.batch;
  p.q_heads = call.q_heads;
  p.kv_heads = call.kv_heads;
  p.group = call.q_heads / call.kv_heads;
  p.head_dim = call.head_dim;
  p.head_dim_v = call.head_dim_v;
  p.total_q = call.total_q;
  p.max_q_len = call.max_q_len;
  constexpr DType kQDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2,
                                DType::kFloat32};
  p.q_dtype = kQDTypes[call.q_dtype];
  const bool packed = call.cu_seqlens_q != 0;
  p.q = reinterpret_cast<const void*>(call.q);
  p.q_stride_head = call.head_dim;
  p.q_stride_token = call.q_heads * call.head_dim;
  p.q_stride_batch = packed ? 0 : call.max_q_len * p.q_stride_token;
  p.qv = {reinterpret_cast<const void*>(call.qv), call.qv != 0};
  p.qv_stride_head = call.head_dim_v;
  p.qv_stride_token = call.q_heads * call.head_dim_v;
  p.qv_stride_batch = packed ? 0 : call.max_q_len * p.qv_stride_token;
  p.out = reinterpret_cast<void*>(call.out);
  p.out_stride_head = call.head_dim_v;
  p.out_stride_token = call.q_heads * call.head_dim_v;
  p.out_stride_batch = packed ? 0 : call.max_q_len * p.out_stride_token;
  p.lse = {reinterpret_cast<float*>(call.lse), true};
  p.lse_stride_head = packed ? call.total_q : call.max_q_len;
  p.lse_stride_batch = packed ? 0 : call.q_heads * call.max_q_len;
  p.cu_seqlens_q = {reinterpret_cast<const int32_t*>(call.cu_seqlens_q), packed};
  p.cache_seqlens = {reinterpret_cast<const int32_t*>(call.cache_seqlens), true};
  p.cache_leftpad = {reinterpret_cast<const int32_t*>(call.leftpad), call.leftpad != 0};
  p.alibi_slopes = {reinterpret_cast<const float*>(call.alibi), call.alibi != 0};
  p.sinks = {reinterpret_cast<const void*>(call.sinks), call.sinks != 0};
  p.sinks_dtype = call.sinks_of_q ? p.q_dtype : DType::kFloat32;
  Cache& c = p.cache;
  c.k = reinterpret_cast<void*>(call.k);
  c.v = reinterpret_cast<void*>(call.v);
  c.k_stride_page = call.k_stride_page;
  c.k_stride_slot = call.k_stride_slot;
  c.k_stride_head = call.k_stride_head;
  c.v_stride_page = call.v_stride_page;
  c.v_stride_slot = call.v_stride_slot;
  c.v_stride_head = call.v_stride_head;
  c.num_pages = call.num_pages;
  c.page_size = call.page_size;
  c.dtype = call.kv_dtype == 0 ? p.q_dtype : call.kv_dtype == 1 ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
  c.block_table = {reinterpret_cast<const int32_t*>(call.block_table), call.block_table != 0};
  c.block_table_stride = c.max_pages = call.max_pages;
  c.table_rows = call.batch;
  c.v_descale = {reinterpret_cast<const float*>(call.v_descale), call.v_descale != 0};  // one for all heads
  c.v_descale_stride_batch = 1;
  c.k_descale = {reinterpret_cast<const float*>(call.k_descale), call.k_descale != 0};
  p.q_descale = {reinterpret_cast<const float*>(call.q_descale), call.q_descale != 0};
  c.k_descale_stride_batch = p.q_descale_stride_batch = 1;
  c.cache_batch_idx = {reinterpret_cast<const int32_t*>(call.cache_batch_idx), call.cache_batch_idx != 0};
  p.scale = static_cast<float>(call.scale);
  p.softcap = static_cast<float>(call.softcap);
  p.window_left = call.window_left;
  p.window_right = call.window_right;
  p.attention_chunk = call.chunk;
  p.num_splits = call.num_splits;
  p.deterministic = call.deterministic != 0;
  p.max_kv_len = max_kv_len_of(p, -1);
  return p;
}

}  // namespace paged_attn
