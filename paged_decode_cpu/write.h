// Writes one new token into the cache, for every instruction set: rotation, conversion, placement.
#pragma once

#include "kernel.h"
#include "rotary.h"
#include "rows.h"
#include "spec/request.h"

namespace paged_attn {
namespace {

// All kv_heads of a token, of its keys or of its values.
inline void write_heads(const Problem& p, const TokenWrite& w, bool keys) {
  const Cache& c = p.cache;
  const Append& a = p.append;
  const int64_t n = keys ? p.head_dim : p.head_dim_v;
  const int64_t source_offset = keys ? w.source_k : w.source_v;
  const int64_t target_offset =
      keys ? w.page * c.k_stride_page + w.slot * c.k_stride_slot : w.page * c.v_stride_page + w.slot * c.v_stride_slot;
  const int64_t source_stride = (keys ? a.k_stride_head : a.v_stride_head) * dtype_bytes(a.dtype);
  const int64_t target_stride = (keys ? c.k_stride_head : c.v_stride_head) * dtype_bytes(c.dtype);
  const char* source = static_cast<const char*>(keys ? a.k.data : a.v.data) + source_offset * dtype_bytes(a.dtype);
  char* target = static_cast<char*>(keys ? c.k : c.v) + target_offset * dtype_bytes(c.dtype);
  const bool rotated = keys && p.rotary.cos;
  float row[kMaxHeadDim + kLanes];
  for (int64_t h = 0; h < p.kv_heads; ++h, source += source_stride, target += target_stride) {
    if (!rotated && a.dtype == c.dtype) {
      memcpy(target, source, n * dtype_bytes(a.dtype));
      continue;
    }
    read_row(a.dtype, source, n, row);
    if (rotated) rotate(p.rotary, p.q_dtype, w.rotary_position, row);
    if (dtype_bytes(c.dtype) == 1) {
      const float descale =
          keys ? descale_at(c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head, w.batch, h)
               : descale_at(c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head, w.batch, h);
      for (int64_t i = 0; i < n; ++i) row[i] /= descale;
    }
    write_row(c.dtype, row, n, target);
  }
}

inline void write_token(const Problem& p, const TokenWrite& w) {
  write_heads(p, w, /*keys=*/true);
  write_heads(p, w, /*keys=*/false);
}

}  // namespace
}  // namespace paged_attn
