// The instructions of the route float32 on the host that no other file here has, as the PTX manual describes them:
// votes of a block. Its copies are those of products.cuh, within bounds.
#pragma once

#include "partials.cuh"
#include "prefill/products.cuh"

namespace paged_attn {

// From where the kernel may copy. float32.cpp sets it.
inline std::vector<Bounds> copied_from;

// ---- Shared memory ----

PD_DEVICE uint64_t __cvta_generic_to_shared(const void* pointer) { return shared_address(pointer); }

PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid) {
  if (shared % 16 != 0) fail("a copy to a place that is not aligned");
  const auto held = [&](const Bounds& bounds) { return bounds.hold(global, 16); };
  if (valid && std::none_of(copied_from.begin(), copied_from.end(), held)) fail("a copy from outside of the tensors");
  copy_piece(shared, global, valid);
}
PD_DEVICE void copy_commit() { commit_pieces(); }
template <int kPending>
PD_DEVICE void copy_wait() {
  await_batches<kPending>();
}

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
