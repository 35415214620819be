// Plans of the fallback kernel, which runs every problem. Arithmetic only, as decode/plan.h.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"

namespace paged_attn {

// What the kernel reads. Grains: bytes that every row of keys, values or queries has a whole number of, and begins at a
// multiple of: 16 or 8, or those of a number.
struct FallbackWork : Plan {
  int32_t key_grain, value_grain, query_grain;
};

struct FallbackPlan {
  FallbackWork work;
  FallbackInstance instance;
  int64_t blocks;
  int blocks_per_processor;
  int64_t workspace_bytes;  // 0: nothing is ever cut
};

const char* fallback_why_not(const Problem& p, const DeviceLimits& limits);  // always ""
FallbackPlan plan_fallback(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
