// Describes keys, values and queries to the bulk copies. The maps are made on the host from the strides alone.
#pragma once

#include <cuda.h>

#include "spec/problem.h"

namespace paged_attn {

// Of a tensor [num_pages, page_size, kv_heads, dims] in elements.
struct CacheStrides {
  int64_t page, slot, head;
};

// A map of [page, kv_head, slot, dim] from the slowest to the fastest, whose boxes have `box_rows` slots and
// `row_values` values of each: 64 or 128 bytes, swizzled. False where the tensor cannot be described.
bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                    int row_values, CUtensorMap& map);

// A map of q, [batch, token, kv_head, head of its group, dim], whose boxes are `rows` rows and 128 bytes of each,
// swizzled. False where whole tokens do not make up so many rows, or q cannot be described.
bool describe_queries(const Problem& p, int rows, CUtensorMap& map);

}  // namespace paged_attn
