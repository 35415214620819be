// The instructions of the routes float32 and fallback on the host that no other file here has, as the PTX manual
// describes them: votes of a block.
#pragma once

#include "partials.cuh"

namespace paged_attn {

// How many threads of the block say yes. The first one that votes clears what was counted two votes ago.
inline int votes[2];
PD_DEVICE int count_votes(bool yes) {
  const Meeting& all = own_block().all;
  int& count = votes[all.generation % 2];
  count = (all.arrived == 0 ? 0 : count) + yes;
  __syncthreads();
  return count;
}
PD_DEVICE bool __syncthreads_and(bool yes) { return count_votes(yes) == blockDim.x; }
PD_DEVICE bool __syncthreads_or(bool yes) { return count_votes(yes) > 0; }

// For tf32.cuh to compile.
PD_DEVICE uint32_t transpose_8x8(uint32_t) { fail("a matrix is transposed in no kernel of this route"); }

}  // namespace paged_attn
