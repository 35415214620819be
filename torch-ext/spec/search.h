// Which request a token or a tile belongs to. Plain integers only: this file is compiled for every device.
#pragma once

#include "ranges.h"

namespace paged_attn {

// Largest b below batch with begin_of(b) <= index, 0 if there is none. begin_of is non-decreasing; requests without
// tokens begin where the next one does, and are skipped.
template <class Begin>
PD_FN int find_request(int batch, position_t index, Begin begin_of) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (begin_of(middle) <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace paged_attn
