// When the float32 kernel serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"

namespace paged_attn {

struct Float32Plan {
  Plan work;  // what the kernel reads
  Float32Instance instance;
  int64_t blocks;
  int blocks_per_processor;
  int64_t workspace_bytes;  // 0: nothing is ever cut
};

// "" or why the float32 kernel does not serve this.
const char* float32_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
Float32Plan plan_float32(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
