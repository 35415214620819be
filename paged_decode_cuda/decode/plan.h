// Plans of the two routes on the matrix unit. Arithmetic only: it compiles for the host without CUDA, and plans can be
// made for a GPU that is not here.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"

namespace paged_attn {

constexpr int64_t kItemRows = 8;  // of the smaller items: no tile of rows of any route has fewer

struct DecodePlan {
  Plan work;                // what the kernel reads
  DecodeInstance instance;  // which kernel
  bool basic;               // the one for basic calls
  int64_t blocks;
  int warps, blocks_per_processor;  // of a block; blocks beside each other
  int shared_bytes;                 // of a block, as a launch asks for them
  int64_t workspace_bytes;          // 0: nothing is ever cut

  // Each half of a group is a KV head of its own: see in_halves().
  bool halves() const { return work.key_head_shift > 0; }
};

// The dtype of the queries, the output and the sinks of basic calls.
PD_METHOD DType basic_dtype(DType cache) { return dtype_bytes(cache) == 1 ? DType::kBFloat16 : cache; }

// The same call with twice as many KV heads, of half a group each: items of 8 rows instead of 16. The keys of both
// halves are those of one KV head.
inline Problem in_halves(const Problem& p) {
  Problem halves = p;
  halves.kv_heads *= 2;
  halves.group /= 2;
  return halves;
}

// "" or why the kernel on the matrix unit cannot run this.
const char* decode_why_not(const Problem& p, const DeviceLimits& limits);

// "" or why the kernel for basic calls cannot.
const char* decode_basic_why_not(const Problem& p, const DeviceLimits& limits);

// Whether requests have more rows than those of two row tiles, and items hold them all the same.
bool takes_wide_items(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
DecodePlan plan_decode(const Problem& p, const DeviceLimits& limits);
DecodePlan plan_decode_basic(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
