// Maps of a cache for the bulk copies of hopper.cuh beside this file.
#pragma once

#include "../hopper.cuh"

namespace paged_attn {

struct CacheStrides {
  int64_t page, slot, head;
};

inline bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                           int row_values, CUtensorMap& map) {
  const Cache& c = p.cache;
  const int64_t each = dtype_bytes(c.dtype);
  map = {static_cast<const uint8_t*>(base),
         {dims, c.page_size, p.kv_heads, c.num_pages},
         {each, strides.slot * each, strides.head * each, strides.page * each},
         box_rows,
         row_values};
  return true;
}

inline bool describe_queries(const Problem& p, int rows, CUtensorMap& map) {
  if (rows % p.group != 0) return false;
  const int64_t each = dtype_bytes(p.q_dtype), head = p.q_stride_head * each;
  map = {static_cast<const uint8_t*>(p.q),
         {p.head_dim, p.group, p.kv_heads, p.cu_seqlens_q ? p.total_q : p.max_q_len, p.batch},
         {each, head, head * p.group, p.q_stride_token * each, p.q_stride_batch * each},
         rows,
         static_cast<int>(kRowBytes / each)};
  return true;
}

}  // namespace paged_attn
