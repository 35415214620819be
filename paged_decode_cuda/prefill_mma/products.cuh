// The products of a warp: scores of its rows and a tile of keys, and sums of weights times values.
//
//     S = Q K^T      16 rows x 8 keys          O = P V      16 rows x 8 dimensions          (mma m16n8k16)
//
// A lane (g = lane / 4, t = lane % 4) has of each such tile columns 2t and 2t + 1 of rows g and g + 8. Scores lie as
// the left operand of the second product wants its weights, so they stay in their lane.
#pragma once

#include "../matrices.cuh"
#include "../prefill/weights.cuh"
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

// Queries of a warp's rows: in registers, where there are enough of them, or in shared memory.
template <typename Shape>
struct Queries {
  static constexpr int kSteps = Shape::kDim / 16, kTiles = Shape::kRowTiles;
  static constexpr int kHeld = Shape::kHoldsQueries ? kSteps : 1;
  uint32_t held[kHeld][kTiles][4];

  static PD_MEMBER uint32_t address(uint32_t shared) {
    return own_rows<Shape>(shared + this_thread() / kWarp * Shape::kWarpRows * Shape::kRowBytes, Shape::kRowBytes);
  }

  // 16 columns of them.
  static PD_MEMBER void load(uint32_t (&words)[kTiles][4], uint32_t address, int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_matrices(words[i], Shape::step_pieces(address, step) + i * 16 * Shape::kRowBytes);
    }
  }

  PD_MEMBER void start(uint32_t shared) {
    if constexpr (Shape::kHoldsQueries) {
      const uint32_t own = address(shared);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(held[step], own, step);
    }
  }
};

// 16 columns of sums += a b, of 16 rows; a: 16 columns, b: as load_matrices() or load_transposed() has it.
template <typename Shape>
PD_DEVICE void multiply(float* sums, const uint32_t* a, const uint32_t (&b)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float (&d)[4] = *reinterpret_cast<float (*)[4]>(sums + 4 * h);
    const uint32_t half[2] = {b[2 * h], b[2 * h + 1]};
    mma_16x8x16<IsBf16<typename Shape::Type>::value>(d, a[0], a[1], a[2], a[3], half);
  }
}

// q k^T of kGroup keys after the other; `beside(group, slot, after)` is called before and after the products of each 16
// columns and 16 keys, which are a slot of the group.
template <typename Shape, int kGroup, typename Sums, typename Beside>
PD_DEVICE void multiply_groups(uint32_t shared, uint32_t stage, const Queries<Shape>& queries, Sums sums,
                               Beside beside) {
  constexpr int kGroups = Shape::kKeys / kGroup, kPairs = kGroup / 16, kSteps = Shape::kDim / 16;
  constexpr int kSlots = kSteps * kPairs, kTiles = Shape::kRowTiles;
  const uint32_t own_queries = Queries<Shape>::address(shared), keys = own_columns<Shape>(stage, Shape::kRowBytes);
  uint32_t q[2][kTiles][4], k[2][4];
  auto load_q = [&](int n) {
    if (!Shape::kHoldsQueries && n < kGroups * kSteps) Queries<Shape>::load(q[n % 2], own_queries, n % kSteps);
  };
  auto load_k = [&](int n) {
    const int step = n % kSlots / kPairs, pair = n / kSlots * kPairs + n % kPairs;
    if (n < kGroups * kSlots) {
      load_matrices(k[n % 2], Shape::step_pieces(keys, step) + pair * 16 * Shape::kRowBytes);
    }
  };
  load_q(0);
  load_k(0);
#pragma unroll
  for (int n = 0; n < kGroups * kSlots; ++n) {
    const int group = n / kSlots, slot = n % kSlots, step = slot / kPairs, pair = slot % kPairs;
    load_k(n + 1);
    if (pair == 0) load_q(n / kPairs + 1);
    beside(group, slot, false);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint32_t* const a =
          Shape::kHoldsQueries ? queries.held[Shape::kHoldsQueries ? step : 0][i] : q[n / kPairs % 2][i];
      multiply<Shape>(sums(group, i) + 8 * pair, a, k[n % 2]);
    }
    beside(group, slot, true);
  }
}

template <int kTiles, int kCount>
PD_DEVICE void clear(float (&sums)[kTiles][kCount]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[i][j] = 0.f;
}

// s = q k^T.
template <typename Shape>
PD_DEVICE void multiply_keys(uint32_t shared, uint32_t stage, const Queries<Shape>& queries,
                             float (&s)[Shape::kRowTiles][Shape::kKeys / 2]) {
  clear(s);
  multiply_groups<Shape, Shape::kKeys>(shared, stage, queries, [&](int, int i) { return s[i]; }, [](int, int, bool) {});
}

// Of a tile, as left operands of the second product.
template <typename Shape>
using Weights = uint32_t[Shape::kKeys / 16][Shape::kRowTiles][4];

// Weights of scores whose reference is known.
template <typename Shape>
PD_DEVICE void weigh(const float (&s)[Shape::kRowTiles][Shape::kKeys / 2], LaneRows<Shape>& rows,
                     Weights<Shape>& weights) {
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = rows[i].base[r] == -INFINITY ? 0.f : -rows[i].base[r];
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 4; ++j) {
      const int r = j % 2;
      const float low = fast_exp2(fmaf(s[i][2 * j], rows[i].multiplier, shift[r]));
      const float high = fast_exp2(fmaf(s[i][2 * j + 1], rows[i].multiplier, shift[r]));
      rows[i].l[r] += low + high;
      weights[j / 4][i][j % 4] = pack_pair<IsBf16<typename Shape::Type>::value>(low, high);
    }
  }
}

// Weights of a tile that all rows see whole, by the references that they have. Those of one group of keys are computed
// between the products of the next group. False where a weight is too large: then no sum has changed.
template <typename Shape>
PD_DEVICE bool guess_weights(uint32_t shared, uint32_t stage, const Queries<Shape>& queries, LaneRows<Shape>& rows,
                             Weights<Shape>& weights) {
  constexpr int kGroup = Shape::kGroup, kGroups = Shape::kKeys / kGroup, kTiles = Shape::kRowTiles;
  constexpr int kSlots = Shape::kDim / 16 * (kGroup / 16);
  constexpr int kWeightPairs = kGroup / 4 * kTiles;  // pairs of weights of a group
  constexpr int kMost = kWeightPairs / kSlots + 1;
  float s[2][kTiles][kGroup / 2], sum[kTiles][2], pairs[kMost][2];
  clear(s[0]);
  clear(sum);
  auto exponentiate = [&](int group, int index, float (&pair)[2]) {
    const int i = index % kTiles, j = index / kTiles;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      pair[e] = fast_exp2(fmaf(s[group % 2][i][2 * j + e], rows[i].multiplier, -rows[i].base[j % 2]));
  };
  auto add = [&](int group, int index, const float (&pair)[2]) {
    const int i = index % kTiles, j = index / kTiles;
    sum[i][j % 2] += pair[0] + pair[1];
    weights[group * (kGroup / 16) + j / 4][i][j % 4] = pack_pair<IsBf16<typename Shape::Type>::value>(pair[0], pair[1]);
  };
  multiply_groups<Shape, kGroup>(
      shared, stage, queries, [&](int group, int i) { return s[group % 2][i]; },
      [&](int group, int slot, bool after) {
        if (slot == 0 && !after && group > 0) clear(s[group % 2]);
        if (group == 0) return;
        const int begin = slot * kWeightPairs / kSlots, end = (slot + 1) * kWeightPairs / kSlots;
#pragma unroll
        for (int index = begin; index < end; ++index) {
          if (after) {
            add(group - 1, index, pairs[index - begin]);
          } else {
            exponentiate(group - 1, index, pairs[index - begin]);
          }
        }
      });
#pragma unroll
  for (int index = 0; index < kWeightPairs; ++index) {
    exponentiate(kGroups - 1, index, pairs[0]);
    add(kGroups - 1, index, pairs[0]);
  }
  bool large = false;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) large = large || rows[i].too_large(sum[i]);
  if (large) return false;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) rows[i].add(sum[i]);
  return true;
}

// acc += weights v.
template <typename Shape>
PD_DEVICE void multiply_values(uint32_t stage, const Weights<Shape>& weights,
                               float (&acc)[Shape::kRowTiles][Shape::kDimV / 2]) {
  constexpr int kPairs = Shape::kDimV / 16, kSlots = Shape::kKeys / 16 * kPairs;
  const uint32_t values = own_rows<Shape>(stage, Shape::kRowBytesV);
  uint32_t v[2][4];
  auto load_v = [&](int n) {
    if (n < kSlots) {
      load_transposed(v[n % 2], Shape::step_pieces(values, n % kPairs) + n / kPairs * 16 * Shape::kRowBytesV);
    }
  };
  load_v(0);
#pragma unroll
  for (int n = 0; n < kSlots; ++n) {
    load_v(n + 1);
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
      multiply<Shape>(&acc[i][n % kPairs * 8], weights[n / kPairs][i], v[n % 2]);
    }
  }
}

}  // namespace paged_attn
