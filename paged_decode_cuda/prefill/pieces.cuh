// Copies of 16 bytes into shared memory (cp.async), and 8-bit values on their way to 16 bits.
#pragma once

#include "../hopper.cuh"

namespace paged_attn {

// Waits for the copies of this warp, makes them visible to wgmma and arrives: all lanes, or one for all.
template <bool kAll>
PD_DEVICE void arrive_after_copies(uint32_t barrier) {
  await_pieces();
  fence_async_proxy();
  if (!kAll) __syncwarp();
  if (kAll || threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// Two 8-bit values in the low or high half of a word, as a pair of bf16 or fp16, which hold every one exactly.
template <bool kBf16, typename Kv, bool kHigh>
PD_DEVICE uint32_t widen_pair(uint32_t word) {
  const uint32_t pair = fp8_pair_to_fp16<Kv, kHigh>(word);
  return kBf16 ? fp16_pair_to_bf16(pair) : pair;
}

constexpr int kCopyLanes = 8;                  // copy 128 bytes of a row together
constexpr int kCopyRows = kWarp / kCopyLanes;  // that a warp copies at a time: a run

}  // namespace paged_attn
