// Maps of a cache for the bulk copies of products.cuh beside this file.
#pragma once

#include "products.cuh"

namespace paged_attn {

struct CacheStrides {
  int64_t page, slot, head;
};

inline bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                           bool swizzled, CUtensorMap& map) {
  const Cache& c = p.cache;
  const int64_t each = dtype_bytes(c.dtype);
  map = {static_cast<const uint8_t*>(base),
         {dims, c.page_size, p.kv_heads, c.num_pages},
         {each, strides.slot * each, strides.head * each, strides.page * each},
         box_rows,
         static_cast<int>(swizzled ? kRowBytes / each : kColumn),
         swizzled};
  return true;
}

}  // namespace paged_attn
