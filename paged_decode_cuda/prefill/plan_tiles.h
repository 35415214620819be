// The tiles of rows of a call: of which kernel, how many, and how their keys are cut.
#pragma once

#include "plan_cuts.h"

namespace paged_attn {

// Tiles are counted as there may be at most.
struct TileChoice {
  PrefillInstance instance;
  int64_t tiles;
  Cuts cuts;
};

// Tall tiles of rows or others, of the instances for the dtypes of the call.
TileChoice choose_tiles(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
