// What routes.mm, tables.h and item.h take from Metal, on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "paged_decode_metal/arguments.h"
#include "spec/problem.h"
#include "spec/ranges.h"
#include "spec/search.h"

#define device
#define constant const

namespace paged_attn {

struct MTLSize {
  uint64_t width, height, depth;
};
inline MTLSize MTLSizeMake(uint64_t width, uint64_t height, uint64_t depth) { return {width, height, depth}; }

struct Dispatch {
  std::string kernel;
  MTLSize threadgroups;
  int64_t threads, least_threads;
};

struct uint3 {
  uint32_t x, y, z;
};

using std::clamp;
using std::max;
using std::min;

// Function constants.
inline bool has_block_table, has_batch_idx, has_seqlens, has_leftpad, has_cu_seqlens_q, has_cu_seqlens_k, has_new,
    has_cu_seqlens_new, has_splits, wide;
inline int page_size;

typedef unsigned int uint;

}  // namespace paged_attn
