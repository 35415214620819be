// Plans of the fallback kernel, which runs every problem. Arithmetic only, as decode/plan.h.
#pragma once

#include <stdint.h>

#include "limits.h"
#include "plan.h"

namespace paged_attn {

constexpr int kFallbackRowShift = 2;
constexpr int kFallbackWarps = 1 << kFallbackRowShift;  // of a block, and rows of an item: a warp has a row
constexpr int kFallbackTileShift = 4;

struct FallbackPlan {
  Plan work;  // what the kernel reads
  int64_t blocks;
  int64_t workspace_bytes;  // 0: nothing is ever cut
};

const char* fallback_why_not(const Problem& p, const DeviceLimits& limits);  // always ""
FallbackPlan plan_fallback(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
