// Scores that a warp computes once more, by itself.
#pragma once

#include "e4m3_products.cuh"
#include "products.cuh"

namespace paged_attn {

// Scores of the 16 rows of a warp, as issue_scores() leaves them. The other warps of its warpgroup go on meanwhile.
// queries, keys: addresses of these rows, and of the tile of keys.
template <typename Shape>
PD_DEVICE void score_again(float (&s)[Shape::kKeys / 2], uint32_t queries, uint32_t keys) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  constexpr int kSteps = kColumn / 16;  // of 16 dimensions, in a column
  const int lane = threadIdx.x % kWarp, row = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < Shape::kKeys / 2; ++i) s[i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < Shape::kDim / 16; ++k) {
    const int column = k / kSteps, piece = k % kSteps * 2;
    uint32_t a[4];
    load_matrices(queries + (column * Shape::kRows + lane % 16) * kRowBytes + ((piece + lane / 16) ^ row) * 16, a[0],
                  a[1], a[2], a[3]);
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 8; j += 2) {
      uint32_t b[2][2];
      load_matrices(
          keys + (column * Shape::kKeys + (j + matrix / 2) * 8 + row) * kRowBytes + ((piece + matrix % 2) ^ row) * 16,
          b[0][0], b[0][1], b[1][0], b[1][1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float d[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = s[4 * (j + i) + e];
        mma_16x8x16<kBf16>(d, a[0], a[1], a[2], a[3], b[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * (j + i) + e] = d[e];
      }
    }
  }
}

}  // namespace paged_attn
