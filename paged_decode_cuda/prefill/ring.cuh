// Stages in shared memory that are filled and emptied in turns.
#pragma once

#include <stdint.h>

#include "../lanes.h"

namespace paged_attn {

// Place in a ring of stages. Each has two mbarriers, full and empty. Who empties waits for the phase `phase` of full,
// who fills for `phase ^ 1` of empty: a wait for the phase before the first one ends at once, as all stages begin
// empty.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  PD_MEMBER void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace paged_attn
