// Products of a few keys with a few rows, by the lanes of a lane group: where elements lie, and how lanes sum them.
#pragma once

#include "item.h"

namespace paged_attn {

// A reduce-scatter: sums each of `count` values over the lanes that differ in the bits from `top` down to `bottom`. A
// lane keeps count / (2 * top / bottom) sums, its share in the order of the lanes. Returns where the share began.
template <int count, int top, int bottom>
PD_FN int scatter_sum(thread float* values, uint lane) {
  int begin = 0;
  int share = count / 2;
#pragma clang loop unroll(full)
  for (int mask = top; mask >= bottom; mask /= 2, share /= 2) {
    const bool upper = lane & mask;
#pragma clang loop unroll(full)
    for (int i = 0; i < share; ++i) {
      const float sent = upper ? values[i] : values[i + share];
      const float kept = upper ? values[i + share] : values[i];
      values[i] = kept + simd_shuffle_xor(sent, ushort(mask));
    }
    begin += upper ? share : 0;
  }
  return begin;
}

// What a kernel of attend is made for, see paged_decode.metal.
template <int dims, int dims_v, int lanes, int rows, bool qv>
struct Shape {
  static constant constexpr int kDims = dims, kDimsV = dims_v, kLanes = lanes, kRows = rows;
  static constant constexpr bool kQv = qv;
  static constant constexpr int kGroups = kSimdWidth / kLanes;
  static constant constexpr int kPieces = kDims / (kLanes * kVector), kPiecesV = kDimsV / (kLanes * kVector);
  static constant constexpr int kKeys = kLanes / kRows;  // of a lane group in a step; kRows steps make a tile
  static constant constexpr int kQueryVectors = kRows * (kDims + (kQv ? kDimsV : 0)) / 4;
  // Rows merged at a time, and the vectors that they need for all simdgroups: 8 KiB, as more would keep threadgroups
  // out.
  static constant constexpr int kMergeRows = kRows < 256 / kDimsV ? kRows : kDimsV < 256 ? 256 / kDimsV : 1;
  static constant constexpr int kMergeVectors = kMaxSimdgroups * kMergeRows * kDimsV / 4;
  static constant constexpr int kScratchVectors = kQueryVectors > kMergeVectors ? kQueryVectors : kMergeVectors;
};

// Puts a row of q, widened and multiplied by `factor`, where lanes that sit side by side read side by side: the vectors
// of a piece's low halves, then of its high ones.
template <int kDims, int kLanes>
PD_FN void stage_row(const device void* base, int type, long row, int dims, float factor, threadgroup float4* staged,
                     Worker worker) {
  for (int i = worker.index; i < kDims / 4; i += worker.threads) {
    const int piece = i / (2 * kLanes), part = i / kLanes % 2, lane = i % kLanes;
    const int dim = (piece * kLanes + lane) * kVector + part * 4;
    float4 x = float4(0.f);
    for (int e = 0; e < 4; ++e) {
      if (dim + e < dims) x[e] = load_float(base, type, row + dim + e) * factor;
    }
    staged[i] = x;
  }
}

// sum + x . (low, high), one multiply-add per element
PD_FN float add_product(float sum, Vector x, float4 low, float4 high) {
#pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) sum += x.low[i] * low[i];
#pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) sum += x.high[i] * high[i];
  return sum;
}

// Adds to scores[i * kRows + row] the products of kKeys keys with all rows. Keys at a negative offset give 0.
template <int kPieces, int kLanes, int kKeys, int kRows>
PD_FN void add_products(const device void* cache, threadgroup const long* offsets, int dims,
                        threadgroup const float4* rows, int lane, thread float* scores) {
  // Keys that share what is read of a row, as many as registers allow beside the accumulators.
  constexpr int kShared = kKeys < 2 ? 1 : kRows == 1 ? 4 : 2;
#pragma clang loop unroll(full)
  for (int first = 0; first < kKeys; first += kShared) {
#pragma clang loop unroll(full)
    for (int piece = 0; piece < kPieces; ++piece) {
      const int dim = (piece * kLanes + lane) * kVector;
      Vector keys[kShared];
#pragma clang loop unroll(full)
      for (int i = 0; i < kShared; ++i) {
        const long offset = offsets[first + i];
        keys[i] = {float4(0.f), float4(0.f)};
        if (offset >= 0) keys[i] = load_vector(cache, offset, dim, dims);
      }
#pragma clang loop unroll(full)
      for (int row = 0; row < kRows; ++row) {
        threadgroup const float4* q = rows + (row * kPieces + piece) * 2 * kLanes + lane;
        const float4 low = q[0], high = q[kLanes];
#pragma clang loop unroll(full)
        for (int i = 0; i < kShared; ++i) {
          const int score = (first + i) * kRows + row;
          scores[score] = add_product(scores[score], keys[i], low, high);
        }
      }
    }
  }
}

}  // namespace paged_attn
