// Maps of a cache for the bulk copies of products.cuh beside this file.
#pragma once

#include "products.cuh"

namespace paged_attn {

struct CacheStrides {
  int64_t page, slot, head;
};

inline bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                           CUtensorMap& map) {
  const Cache& c = p.cache;
  map = {static_cast<const uint8_t*>(base),
         {dims, c.page_size, p.kv_heads, c.num_pages},
         {2, strides.slot * 2, strides.head * 2, strides.page * 2},
         box_rows};
  return true;
}

}  // namespace paged_attn
