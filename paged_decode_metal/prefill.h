// Attention of requests with many rows (more than kVectorRows of a kv_head), by 8 x 8 matrices.
//
// A threadgroup handles 16 or 32 rows, 8 in each simdgroup; all of them read the tile of keys, later of values, that
// the threadgroup has laid out in its memory, so K and V come from memory once for all rows. Scores pass through
// threadgroup memory for the softmax; the probabilities stay float32. When a row's maximum grows, its sums are rescaled
// by the product with a diagonal matrix of factors: Metal does not say which lane holds which element of a matrix.
#pragma once

#include "item.h"

namespace paged_attn {

// The side of a matrix, and rows of a simdgroup; in the softmax so many lanes share a row.
constant constexpr int kSide = 8, kRowLanes = kSimdWidth / kSide;

typedef simdgroup_matrix<float, 8, 8> Matrix;

// Threadgroup memory, of the whole threadgroup and of this simdgroup. At the end the sums of all rows, in float32, take
// the room of queries and tile.
template <typename T>
struct PrefillMemory {
  threadgroup T* queries;  // [row][dim]
  threadgroup T* tile;     // of keys, then of values: [key][dim]
  threadgroup long* k_offsets;
  threadgroup long* v_offsets;
  threadgroup float* scores;    // of this simdgroup, then its probabilities: [row][key]
  threadgroup float* diagonal;  // factors of its rows
};

// What a lane knows of its row in the softmax: it has 8 of the tile's 32 keys. m is common to the lanes of a row.
struct LaneRow {
  Row row;
  int q_pos, first_key;
  float scale, slope;
  float m, l;
};

template <typename T, int kDims, int kRows>
PD_FN void stage_rows(constant Arguments& a, Operands operands, Item item, Worker worker, threadgroup T* queries) {
  for (int i = worker.index; i < kRows * kDims; i += worker.threads) {
    const int row = i / kDims, dim = i % kDims;
    float x = 0.f;
    if (row < item.rows && dim < head_dim)
      x = load_float(operands.q, query_type, element_of(a.q, item, load_row(a, item, row)) + dim);
    queries[i] = T(x);
  }
}

// Copies a tile of keys or values from the cache to threadgroup memory, 0 for keys that no row sees.
template <typename T, int kDims>
PD_FN void stage_tile(const device void* cache, threadgroup const long* offsets, int dims, threadgroup T* tile,
                      Worker worker) {
  constexpr int kVectors = kDims / kVector;
  for (int i = worker.index; i < kSimdWidth * kVectors; i += worker.threads) {
    const int key = i / kVectors, dim = i % kVectors * kVector;
    const long offset = offsets[key];
    Vector x = {float4(0.f), float4(0.f)};
    if (offset >= 0) x = load_vector(cache, offset, dim, dims);
    threadgroup vec<T, 4>* target = (threadgroup vec<T, 4>*)(tile + key * kDims + dim);
    target[0] = vec<T, 4>(x.low);
    target[1] = vec<T, 4>(x.high);
  }
}

PD_FN LaneRow row_of_lane(constant Arguments& a, Operands operands, Item item, Worker worker) {
  LaneRow s;
  s.row = load_row(a, item, worker.simdgroup * kSide + worker.lane / kRowLanes);
  s.q_pos = item.request.kv_len - item.request.q_len + s.row.token;
  s.first_key = worker.lane % kRowLanes * kSide;
  s.scale = a.scale * q_descale_of(a, operands, item) * k_descale_of(a, operands, item);
  s.slope = slope_of(a, operands, item, s.row);
  s.m = PD_EMPTY;
  s.l = 0.f;
  return s;
}

// The products of the simdgroup's rows with the tile, to memory.scores.
template <typename T, int kDims>
PD_FN void multiply_keys(PrefillMemory<T> memory, Worker worker) {
  threadgroup const T* own_queries = memory.queries + worker.simdgroup * kSide * kDims;
  for (int first = 0; first < kSimdWidth; first += kSide) {
    Matrix products = make_filled_simdgroup_matrix<float, 8, 8>(0.f);
#pragma clang loop unroll(full)
    for (int i = 0; i < kDims / kSide; ++i) {
      if (i * kSide >= head_dim) continue;
      simdgroup_matrix<T, 8, 8> rows, keys;
      simdgroup_load(rows, own_queries + i * kSide, kDims);
      simdgroup_load(keys, (threadgroup const T*)memory.tile + first * kDims + i * kSide, kDims, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(products, rows, keys, products);
    }
    simdgroup_store(products, memory.scores + first, kSimdWidth);
  }
}

// Online softmax: products to probabilities relative to the row's new maximum. Returns whether a maximum has grown:
// then the diagonal holds the factors that rescale the sums so far.
template <typename T>
PD_FN bool weigh_tile(constant Arguments& a, PrefillMemory<T> memory, thread LaneRow& s, int tile_key, Worker worker) {
  const int row = worker.lane / kRowLanes;
  threadgroup float* scores = memory.scores + row * kSimdWidth + s.first_key;
  float top = s.m;
#pragma clang loop unroll(full)
  for (int i = 0; i < kSide; ++i) {
    const int key = tile_key + s.first_key + i;
    const float score = log2_score(a, scores[i], s.scale, s.slope, s.q_pos, key);
    const bool seen = key >= s.row.keys.begin && key < s.row.keys.end;
    scores[i] = seen ? score : PD_EMPTY;
    top = seen ? max(top, score) : top;
  }
#pragma clang loop unroll(full)
  for (int mask = 1; mask < kRowLanes; mask *= 2) top = max(top, simd_shuffle_xor(top, ushort(mask)));
  const float factor = pd_rescale(s.m, top);
  s.l *= factor;
#pragma clang loop unroll(full)
  for (int i = 0; i < kSide; ++i) {
    const float probability = probability_of(scores[i], top);
    s.l += probability;
    // In the product with the diagonal matrix the NaN of one row would reach the others (0 * NaN). So only l gets it.
    scores[i] = is_finite(probability) ? probability : 0.f;
  }
  if (s.first_key == 0) memory.diagonal[row * (kSide + 1)] = factor;
  const bool grown = simd_any(top != s.m);
  s.m = top;
  return grown;
}

template <typename T, int kDims>
PD_FN void multiply_values(PrefillMemory<T> memory, thread Matrix* acc, bool grown) {
  if (grown) {
    Matrix factors;
    simdgroup_load(factors, (threadgroup const float*)memory.diagonal);
#pragma clang loop unroll(full)
    for (int i = 0; i < kDims / kSide; ++i) {
      Matrix scaled;
      simdgroup_multiply(scaled, factors, acc[i]);
      acc[i] = scaled;
    }
  }
  for (int first = 0; first < kSimdWidth; first += kSide) {
    Matrix probabilities;
    simdgroup_load(probabilities, (threadgroup const float*)memory.scores + first, kSimdWidth);
#pragma clang loop unroll(full)
    for (int i = 0; i < kDims / kSide; ++i) {
      if (i * kSide >= head_dim_v) continue;
      simdgroup_matrix<T, 8, 8> values;
      simdgroup_load(values, (threadgroup const T*)memory.tile + first * kDims + i * kSide, kDims);
      simdgroup_multiply_accumulate(acc[i], probabilities, values, acc[i]);
    }
  }
}

// The rows of this simdgroup, by all of its lanes.
template <int kDims>
PD_FN void finish_rows(constant Arguments& a, Operands operands, Item item, int split, int own_rows,
                       threadgroup const float* sums, LaneRow s, Worker worker) {
#pragma clang loop unroll(full)
  for (int mask = 1; mask < kRowLanes; mask *= 2) s.l += simd_shuffle_xor(s.l, ushort(mask));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < own_rows; ++r) {
    const int row = worker.simdgroup * kSide + r;
    const float m = simd_shuffle(s.m, ushort(r * kRowLanes)), l = simd_shuffle(s.l, ushort(r * kRowLanes));
    if (has_splits && item.splits > 1) {
      for (int dim = worker.lane; dim < head_dim_v; dim += kSimdWidth)
        store_partial(a, operands, item, split, row, dim, m, l, sums[r * kDims + dim]);
      continue;
    }
    const Row done = load_row(a, item, row);
    const float normalizer = finish_row(a, operands.output, item, done, m, l, worker.lane == 0);
    const long target = element_of(a.out, item, done);
    for (int dim = worker.lane; dim < head_dim_v; dim += kSimdWidth)
      store_float(operands.output.out, out_type, target + dim, sums[r * kDims + dim] * normalizer);
  }
}

}  // namespace paged_attn

template <typename T, int kDims, int kRows>
[[kernel]] void prefill(constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS, PD_OPERAND_BUFFERS,
                        uint3 position [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kSimdgroups = kRows / kSide;
  static_assert(sizeof(T) == 2, "the sums of the rows take the room of queries and tile");
  threadgroup float4 scratch[(kRows + kSimdWidth) * kDims * sizeof(T) / sizeof(float4)];  // vectors for alignment
  threadgroup float scores[kSimdgroups][kSide * kSimdWidth];
  threadgroup float diagonals[kSimdgroups][kSide * kSide];
  threadgroup long k_offsets[kSimdWidth];
  threadgroup long v_offsets[kSimdWidth];

  const Tables tables = PD_TABLES;
  const Operands operands = PD_OPERANDS;
  const Worker worker = {int(thread_index), kSimdgroups * kSimdWidth, int(simdgroup), kSimdgroups, int(lane)};
  threadgroup T* queries = (threadgroup T*)scratch;
  const PrefillMemory<T> memory = {queries,   queries + kRows * kDims, k_offsets,
                                   v_offsets, scores[simdgroup],       diagonals[simdgroup]};

  const ItemIndex index = find_item(a, tables, position, kRows, a.total_q * a.group / kRows + a.batch);
  if (index.b >= a.batch) return;
  const Item item = load_item(a, tables, index, position.y, kRows);
  if (item.rows == 0 || item.request.q_len * a.group <= kVectorRows || index.split >= item.splits) return;
  const KvRange keys = has_splits ? split_keys(item.keys, index.split, item.splits, kSimdWidth) : item.keys;
  // All simdgroups lay out the tiles, those without rows do nothing else.
  const int own_rows = clamp(item.rows - worker.simdgroup * kSide, 0, int(kSide));

  stage_rows<T, kDims, kRows>(a, operands, item, worker, queries);
  for (int i = lane; i < kSide * kSide; i += kSimdWidth) memory.diagonal[i] = 0.f;
  LaneRow s = row_of_lane(a, operands, item, worker);
  Matrix acc[kDims / kSide];
#pragma clang loop unroll(full)
  for (int i = 0; i < kDims / kSide; ++i) acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.f);

  const int first_tile = keys.begin / kSimdWidth;
  const int end_tile = keys.begin < keys.end ? (keys.end + kSimdWidth - 1) / kSimdWidth : first_tile;
  for (int tile_key = first_tile * kSimdWidth; tile_key < end_tile * kSimdWidth; tile_key += kSimdWidth) {
    if (simdgroup == 0) locate_key(a, tables, item, keys, tile_key + lane, k_offsets + lane, v_offsets + lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_tile<T, kDims>(operands.k_cache, k_offsets, head_dim, memory.tile, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool grown = false;
    if (own_rows > 0) {
      multiply_keys<T, kDims>(memory, worker);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      grown = weigh_tile(a, memory, s, tile_key, worker);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_tile<T, kDims>(operands.v_cache, v_offsets, head_dim_v, memory.tile, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (own_rows > 0) multiply_values<T, kDims>(memory, acc, grown);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* sums = (threadgroup float*)scratch + worker.simdgroup * kSide * kDims;
#pragma clang loop unroll(full)
  for (int i = 0; i < kDims / kSide; ++i) simdgroup_store(acc[i], sums + i * kSide, kDims);
  finish_rows<kDims>(a, operands, item, index.split, own_rows, sums, s, worker);
}
