// When the prefill_mma kernel serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

struct PrefillMmaPlan {
  PrefillMmaInstance instance;
  int64_t items;  // tiles of rows, at most, of every kv_head
  int64_t blocks, blocks_per_processor;
  int64_t l2_keys;  // keys and values of so many places of one head may stay in L2
};

// "" or why the prefill_mma kernel does not serve this.
const char* prefill_mma_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
PrefillMmaPlan plan_prefill_mma(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
