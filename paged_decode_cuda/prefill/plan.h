// When the prefill kernel serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

struct PrefillPlan {
  PrefillInstance instance;
  bool all_scores;   // with softcap and ALiBi, which half of the instances do without
  int32_t box_rows;  // slots of a page that one bulk copy takes; 0: pages are too small for that
  int64_t items;     // tiles of rows, at most, of every kv_head
  int64_t parts;     // that the keys of every item are cut into
  int64_t blocks;
  int64_t l2_keys;  // keys and values of so many places of one head may stay in L2
};

// "" or why the prefill kernel does not serve this.
const char* prefill_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
PrefillPlan plan_prefill(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
