// Scores that a warp computes once more, by itself (mma), where a guess gave too large weights: see weights.cuh.
#pragma once

#include "../hopper.cuh"
#include "../matrices.cuh"

namespace paged_attn {

// d += a b of 32 bytes of rows of a and b, which load_matrices() has brought. 8-bit values go as float16: a thread has
// the same four of a and b, whichever places of the product they take.
template <typename Type>
PD_DEVICE void multiply_again(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (__is_same(Type, E4m3)) {
    const uint32_t wide[2][2] = {{fp8_pair_to_fp16<Type, false>(b[0]), fp8_pair_to_fp16<Type, true>(b[0])},
                                 {fp8_pair_to_fp16<Type, false>(b[1]), fp8_pair_to_fp16<Type, true>(b[1])}};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      mma_16x8x16<false>(d, fp8_pair_to_fp16<Type, false>(a[2 * i]), fp8_pair_to_fp16<Type, false>(a[2 * i + 1]),
                         fp8_pair_to_fp16<Type, true>(a[2 * i]), fp8_pair_to_fp16<Type, true>(a[2 * i + 1]), wide[i]);
  } else {
    mma_16x8x16<IsBf16<Type>::value>(d, a[0], a[1], a[2], a[3], b);
  }
}

// Scores of the 16 rows of a warp, as issue_scores() leaves them. The other warps of its warpgroup go on meanwhile.
// queries, keys: addresses of these rows, and of twice as many keys as there are scores.
template <typename Shape, int kCount>
PD_DEVICE void score_again(float (&s)[kCount], uint32_t queries, uint32_t keys) {
  constexpr int kStepBytes = 32, kSteps = kRowBytes / kStepBytes;  // in a column
  int lane = threadIdx.x % kWarp;
  asm volatile("" : "+r"(lane));  // what follows from it is found here, not kept in registers from the start
  const int row = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < Shape::kDim * Shape::kElementBytes / kStepBytes; ++k) {
    const int column = k / kSteps, piece = k % kSteps * 2;
    uint32_t a[4];
    load_matrices(a, queries + (column * Shape::kRows + lane % 16) * kRowBytes + ((piece + lane / 16) ^ row) * 16);
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
      uint32_t words[4];
      load_matrices(words, keys + (column * Shape::kKeys + (j + matrix / 2) * 8 + row) * kRowBytes +
                               ((piece + matrix % 2) ^ row) * 16);
      const uint32_t b[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float d[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = s[4 * (j + i) + e];
        multiply_again<typename Shape::Type>(d, a, b[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * (j + i) + e] = d[e];
      }
    }
  }
}

}  // namespace paged_attn
