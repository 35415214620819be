// Questions about the tensors of a call that planners ask.
#pragma once

#include <stdint.h>

#include <array>

#include "spec/problem.h"
#include "spec/ranges.h"

namespace paged_attn {

// To 16 bytes where nothing else is said.
inline bool aligned(const void* address, int64_t to = 16) { return reinterpret_cast<uintptr_t>(address) % to == 0; }

// A dimension of a tensor: its entries, and the elements from one to the next. Of a single entry these say nothing:
// views of torch leave there what they like.
struct Dimension {
  int64_t size, stride;
};
inline bool aligned(const Dimension& d, int64_t bytes, int64_t to = 16) {
  return d.size <= 1 || d.stride * bytes % to == 0;
}
inline bool same(const Dimension& d, int64_t stride) { return d.size <= 1 || d.stride == stride; }

inline std::array<Dimension, 6> cache_dimensions(const Problem& p) {
  const Cache& c = p.cache;
  return {{{c.num_pages, c.k_stride_page},
           {c.page_size, c.k_stride_slot},
           {p.kv_heads, c.k_stride_head},
           {c.num_pages, c.v_stride_page},
           {c.page_size, c.v_stride_slot},
           {p.kv_heads, c.v_stride_head}}};
}

// Of q, out and qv, whose strides are given.
struct QueryDimensions {
  Dimension batch, token, head;
  QueryDimensions(const Problem& p, int64_t batch_stride, int64_t token_stride, int64_t head_stride)
      : batch{p.cu_seqlens_q ? 1 : p.batch, batch_stride},
        token{p.cu_seqlens_q ? p.total_q : p.max_q_len, token_stride},
        head{p.q_heads, head_stride} {}
  bool aligned_by(int64_t bytes) const {
    return aligned(batch, bytes) && aligned(token, bytes) && aligned(head, bytes);
  }
};

// Dimensions of an output row in groups of four, as partials are stored.
inline int64_t output_quads(const Problem& p) { return pd_ceil_div(p.head_dim_v, 4); }

}  // namespace paged_attn
