// Stages in shared memory that are filled and emptied in turns.
#pragma once

#include <stdint.h>

#include "../lanes.h"

namespace paged_attn {

// Place in a ring of stages.
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
