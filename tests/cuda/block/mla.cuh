// What the route mla has besides, on the host.
#pragma once

#include "prefill/../hopper.cuh"  // not the file beside this one, of which it is a copy

namespace paged_attn {

PD_DEVICE uint64_t read_once_policy() { return 0; }
PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid, uint64_t = 0) {
  if (shared % 16 != 0) fail("a copy to a place that is not aligned");
  copy_piece(shared, global, valid);
}

}  // namespace paged_attn
