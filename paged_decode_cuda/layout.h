// Questions about the tensors of a call that planners ask.
#pragma once

#include <stdint.h>

#include "spec/problem.h"
#include "spec/ranges.h"

namespace paged_attn {

constexpr int64_t kMaxKeys = int64_t{1} << 30;  // of one request: sums of two positions still fit into 32 bits

inline bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }
inline bool aligned(int64_t stride, int64_t bytes) { return stride * bytes % 16 == 0; }

// Dimensions of an output row in groups of four, as partials are stored.
inline int64_t output_quads(const Problem& p) { return pd_ceil_div(p.head_dim_v, 4); }

}  // namespace paged_attn
