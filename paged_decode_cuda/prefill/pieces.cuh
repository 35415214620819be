// Copies of 16 bytes into shared memory.
#pragma once

#include "products.cuh"

namespace paged_attn {

// The copies of this warp are there, also for the matrix unit. All lanes arrive, or one for all.
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

constexpr int kCopyLanes = 8;  // of 128 bytes of a row
constexpr int kCopyRows = kWarp / kCopyLanes;

}  // namespace paged_attn
