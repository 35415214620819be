// The products of a warp: scores of its rows and a tile of keys, and sums of weights times values.
//
//     S = Q K^T      16 rows x 8 keys          O = P V      16 rows x 8 dimensions          (mma m16n8k16)
//
// A lane (g = lane / 4, t = lane % 4) has of each such tile columns 2t and 2t + 1 of rows g and g + 8. Scores lie as
// the left operand of the second product wants its weights, so they stay in their lane.
#pragma once

#include "../prefill/weights.cuh"
#include "matrices.cuh"
#include "shape.cuh"

namespace paged_attn {

// The rows of a lane: two in each tile of 16 of its warp.
template <typename Shape>
using LaneRows = PrefillRows<Shape, false>[Shape::kRowTiles];

// What a lane of a warp reads in shared memory. Found anew for every product: the compiler would keep it, and registers
// are scarce.

// Rows 0..15, first the left half of 16 columns, then the right one.
template <typename Shape>
PD_DEVICE uint32_t own_rows(uint32_t first_row, int row_bytes) {
  const int lane = this_thread() % kWarp, row = lane % 16, half = lane / 16;
  return first_row + row * row_bytes + (half ^ Shape::turn(row)) * 16;
}

// Rows 0..7, both halves, then rows 8..15.
template <typename Shape>
PD_DEVICE uint32_t own_columns(uint32_t first_row, int row_bytes) {
  const int lane = this_thread() % kWarp, row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
  return first_row + row * row_bytes + (half ^ Shape::turn(row)) * 16;
}

// s = q k^T.
template <typename Shape>
PD_DEVICE void multiply_keys(uint32_t shared, float (&s)[Shape::kRowTiles][Shape::kKeys / 2]) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  constexpr int kSteps = Shape::kDim / 16, kPairs = Shape::kKeys / 16, kTiles = Shape::kRowTiles;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 2; ++j) s[i][j] = 0.f;
  const uint32_t first_query = shared + this_thread() / kWarp * Shape::kWarpRows * Shape::kRowBytes;
  const uint32_t queries = own_rows<Shape>(first_query, Shape::kRowBytes);
  const uint32_t keys = own_columns<Shape>(shared + Shape::kKeysAt, Shape::kRowBytes);
  uint32_t q[2][kTiles][4], k[2][4];
  auto load_q = [&](int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_matrices(q[step % 2][i], Shape::step_pieces(queries, step) + i * 16 * Shape::kRowBytes);
    }
  };
  auto load_k = [&](int n) {
    const int step = n / kPairs, pair = n % kPairs;
    load_matrices(k[n % 2], Shape::step_pieces(keys, step) + pair * 16 * Shape::kRowBytes);
  };
  load_q(0);
  load_k(0);
#pragma unroll
  for (int n = 0; n < kSteps * kPairs; ++n) {
    const int step = n / kPairs, pair = n % kPairs;
    if (n + 1 < kSteps * kPairs) load_k(n + 1);
    if (pair == 0 && step + 1 < kSteps) load_q(step + 1);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(&s[i][(2 * pair + h) * 4]);
        const uint32_t b[2] = {k[n % 2][2 * h], k[n % 2][2 * h + 1]};
        const auto& a = q[step % 2][i];
        mma_16x8x16<kBf16>(d, a[0], a[1], a[2], a[3], b);
      }
  }
}

// acc += weights v, with the weights of scores whose reference is known. Those of the next 16 keys are computed between
// the products of 16 keys.
template <typename Shape>
PD_DEVICE void multiply_values(uint32_t shared, const float (&s)[Shape::kRowTiles][Shape::kKeys / 2],
                               LaneRows<Shape>& rows, float (&acc)[Shape::kRowTiles][Shape::kDimV / 2]) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  constexpr int kTiles = Shape::kRowTiles, kSteps = Shape::kKeys / 16, kPairs = Shape::kDimV / 16;
  constexpr int kParts = 4 * kTiles;  // pairs of weights of a lane in 16 keys
  float shift[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[i][r] = rows[i].base[r] == -INFINITY ? 0.f : -rows[i].base[r];
  uint32_t weights[2][kTiles][4], v[2][4];
  auto weigh = [&](int step, int part) {
    const int i = part / 4, word = part % 4, r = word % 2;
    const float* const pair = &s[i][8 * step + 2 * word];
    const float low = fast_exp2(fmaf(pair[0], rows[i].scale, shift[i][r]));
    const float high = fast_exp2(fmaf(pair[1], rows[i].scale, shift[i][r]));
    rows[i].l[r] += low + high;
    weights[step % 2][i][word] = pack_pair<kBf16>(low, high);
  };
  const uint32_t values = own_rows<Shape>(shared + Shape::kValuesAt, Shape::kRowBytesV);
  auto load_v = [&](int n) {
    const int step = n / kPairs, pair = n % kPairs;
    load_transposed(v[n % 2], Shape::step_pieces(values, pair) + step * 16 * Shape::kRowBytesV);
  };
#pragma unroll
  for (int part = 0; part < kParts; ++part) weigh(0, part);
  load_v(0);
#pragma unroll
  for (int n = 0; n < kSteps * kPairs; ++n) {
    const int step = n / kPairs, pair = n % kPairs;
    if (n + 1 < kSteps * kPairs) load_v(n + 1);
    if (step + 1 < kSteps) {
#pragma unroll
      for (int part = pair * kParts / kPairs; part < (pair + 1) * kParts / kPairs; ++part) weigh(step + 1, part);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[i][(2 * pair + h) * 4]);
        const uint32_t b[2] = {v[n % 2][2 * h], v[n % 2][2 * h + 1]};
        const auto& a = weights[step % 2][i];
        mma_16x8x16<kBf16>(d, a[0], a[1], a[2], a[3], b);
      }
  }
}

}  // namespace paged_attn
