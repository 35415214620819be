// Attention of one item, for decode and for everything else that prefill does not take.
//
// A simdgroup is cut into lane groups; a lane group handles a key at a time, its lanes 8 dimensions each (and the same
// ones of the next pieces), so that a row of K or V is read once, in whole cache lines, for all rows of the item. Each
// step of a lane group makes as many scores (keys times rows) as it has lanes. A reduce-scatter over the lanes
// (scatter_sum) then leaves one whole score in each lane, at less than one shuffle per score, and every score has its
// exponential computed once. Scores return to all lanes through threadgroup memory.
//
//   lanes of a simdgroup, kLanes = 8:   | lane group 0 | lane group 1 | lane group 2 | lane group 3 |
//   a step, kRows = 4 (kKeys = 2):      | keys 0, 1    | keys 2, 3    | keys 4, 5    | keys 6, 7    |  x 4 rows
//   its 32 scores, one to a lane:       | k0r0 k0r1 k0r2 k0r3 k1r0 ...| ...
//   a tile:                             kRows such steps, 32 keys
//
// kDims  dimensions that the pieces of a lane group cover; kLanes: of a lane group; kRows: of an item
#pragma once

#include "products.h"

namespace paged_attn {

// Threadgroup memory, of the whole threadgroup and of this simdgroup.
struct AttendMemory {
  threadgroup float4* vectors;  // the queries, later the accumulators of all simdgroups
  threadgroup float2* sums;     // (m, l) of [simdgroup][row]; at the end m gives way to the factor of the acc
  threadgroup float2* merged;   // (m, l) of [row], of all simdgroups
  threadgroup float* scores;    // of the tile of this simdgroup, then its probabilities: [step][lane]
  threadgroup long* k_offsets;  // of the keys of the tile, -1: seen by nobody
  threadgroup long* v_offsets;
};

// What this lane's scores belong to: in every step the same row and another key. l sums these scores alone; m is the
// running maximum of the row, the same in all its lanes.
struct LaneScores {
  Row row;
  int q_pos;
  float scale, slope;
  float m, l;
};

template <typename S>
struct Accumulators {
  Vector of[S::kRows][S::kPiecesV];
};

// q and qv of all rows, widened. Without qv the descales are part of the scale, else they differ for both.
template <typename S>
PD_FN void stage_queries(constant Arguments& a, Operands operands, Item item, Worker worker,
                         threadgroup float4* staged) {
  threadgroup float4* staged_qv = staged + S::kRows * S::kDims / 4;
  const bool with_qv = S::kQv && has_qv;
  const float factor = with_qv ? k_descale_of(a, operands, item) : 1.f;
  const float factor_qv = with_qv ? v_descale_of(a, operands.output, item) : 1.f;
  for (int row = 0; row < S::kRows; ++row) {
    // Rows that do not exist repeat the last one; nothing of them is written.
    const Row r = load_row(a, item, min(row, item.rows - 1));
    stage_row<S::kDims, S::kLanes>(operands.q, query_type, element_of(a.q, item, r), head_dim, factor,
                                   staged + row * S::kDims / 4, worker);
    if (with_qv)
      stage_row<S::kDimsV, S::kLanes>(operands.qv, qv_type, element_of(a.qv, item, r), head_dim_v, factor_qv,
                                      staged_qv + row * S::kDimsV / 4, worker);
  }
}

template <typename S>
PD_FN LaneScores scores_of_lane(constant Arguments& a, Operands operands, Item item, Worker worker) {
  LaneScores s;
  s.row = load_row(a, item, worker.lane % S::kRows);
  s.q_pos = item.request.kv_len - item.request.q_len + s.row.token;
  s.scale = a.scale * q_descale_of(a, operands, item);
  if (!(S::kQv && has_qv)) s.scale *= k_descale_of(a, operands, item);
  s.slope = slope_of(a, operands, item, s.row);
  s.m = PD_EMPTY;
  s.l = 0.f;
  return s;
}

// Scores of a tile, each kept by its lane in threadgroup memory, so that the loop over steps is not unrolled. Returns
// the maximum of m and the lane's scores.
template <typename S>
PD_FN float score_tile(constant Arguments& a, Operands operands, AttendMemory memory, LaneScores s, int tile_key,
                       int lane) {
  threadgroup const float4* staged_qv = memory.vectors + S::kRows * S::kDims / 4;
  const int group = lane / S::kLanes, lane_of_group = lane % S::kLanes;
  float top = s.m;
  for (int step = 0; step < S::kRows; ++step) {
    const int first = (step * S::kGroups + group) * S::kKeys;
    float products[S::kLanes];
    for (int i = 0; i < S::kLanes; ++i) products[i] = 0.f;
    add_products<S::kPieces, S::kLanes, S::kKeys, S::kRows>(operands.k_cache, memory.k_offsets + first, head_dim,
                                                            memory.vectors, lane_of_group, products);
    if (S::kQv && has_qv)
      add_products<S::kPiecesV, S::kLanes, S::kKeys, S::kRows>(operands.v_cache, memory.v_offsets + first, head_dim_v,
                                                               staged_qv, lane_of_group, products);
    scatter_sum<S::kLanes, S::kLanes / 2, 1>(products, lane);
    const int key = tile_key + first + lane_of_group / S::kRows;
    const float score = log2_score(a, products[0], s.scale, s.slope, s.q_pos, key);
    const bool seen = key >= s.row.keys.begin && key < s.row.keys.end;
    memory.scores[step * kSimdWidth + lane] = seen ? score : PD_EMPTY;
    top = seen ? max(top, score) : top;
  }
  return top;
}

// Online softmax: scores to probabilities relative to the row's new maximum, to which the sums so far are rescaled.
template <typename S>
PD_FN void weigh_tile(AttendMemory memory, thread LaneScores& s, thread Accumulators<S>& acc, float top, bool is_first,
                      int lane) {
#pragma clang loop unroll(full)
  for (int mask = S::kRows; mask < kSimdWidth; mask *= 2) top = max(top, simd_shuffle_xor(top, ushort(mask)));
  const float factor = pd_rescale(s.m, top);
  s.l *= factor;
  for (int step = 0; step < S::kRows; ++step) {
    const float probability = probability_of(memory.scores[step * kSimdWidth + lane], top);
    s.l += probability;
    memory.scores[step * kSimdWidth + lane] = probability;
  }
  if (!is_first && simd_any(top != s.m)) {
#pragma clang loop unroll(full)
    for (int r = 0; r < S::kRows; ++r) {
      const float row_factor = simd_shuffle(factor, ushort(r));
      for (int piece = 0; piece < S::kPiecesV; ++piece) {
        acc.of[r][piece].low *= row_factor;
        acc.of[r][piece].high *= row_factor;
      }
    }
  }
  s.m = top;
}

template <typename S>
PD_FN void add_values(Operands operands, AttendMemory memory, thread Accumulators<S>& acc, int lane) {
  const int group = lane / S::kLanes, lane_of_group = lane % S::kLanes;
  for (int step = 0; step < S::kRows; ++step) {
    const int first = (step * S::kGroups + group) * S::kKeys;
#pragma clang loop unroll(full)
    for (int i = 0; i < S::kKeys; ++i) {
      const long offset = memory.v_offsets[first + i];
      if (offset < 0) continue;
      threadgroup const float* probability = memory.scores + step * kSimdWidth + group * S::kLanes + i * S::kRows;
#pragma clang loop unroll(full)
      for (int piece = 0; piece < S::kPiecesV; ++piece) {
        const Vector v =
            load_vector(operands.v_cache, offset, (piece * S::kLanes + lane_of_group) * kVector, head_dim_v);
#pragma clang loop unroll(full)
        for (int r = 0; r < S::kRows; ++r) {
          acc.of[r][piece].low += probability[r] * v.low;
          acc.of[r][piece].high += probability[r] * v.high;
        }
      }
    }
  }
}

// Each simdgroup walks over its own stretch of whole tiles. A split may be empty.
template <typename S>
PD_FN void walk_keys(constant Arguments& a, Tables tables, Operands operands, Item item, KvRange keys, Worker worker,
                     AttendMemory memory, thread LaneScores& s, thread Accumulators<S>& acc) {
  const int first_tile = keys.begin / kSimdWidth;
  const int end_tile = keys.begin < keys.end ? (keys.end + kSimdWidth - 1) / kSimdWidth : first_tile;
  const int stretch = (end_tile - first_tile + worker.simdgroups - 1) / worker.simdgroups;
  const int begin_tile = first_tile + stretch * worker.simdgroup;
  for (int tile = begin_tile; tile < min(begin_tile + stretch, end_tile); ++tile) {
    const int tile_key = tile * kSimdWidth;
    locate_key(a, tables, item, keys, tile_key + worker.lane, memory.k_offsets + worker.lane,
               memory.v_offsets + worker.lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float top = score_tile<S>(a, operands, memory, s, tile_key, worker.lane);
    weigh_tile<S>(memory, s, acc, top, tile == begin_tile, worker.lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    add_values<S>(operands, memory, acc, worker.lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Sums a row over the lane groups of this simdgroup, to [row][simdgroup][dim]; a lane keeps a share of the elements.
template <typename S>
PD_FN void share_row(thread const Vector* acc, threadgroup float* target, int lane) {
  constexpr int kElements = S::kPiecesV * kVector, kOwn = kElements / S::kGroups;
  float elements[kElements];
#pragma clang loop unroll(full)
  for (int i = 0; i < kElements; ++i) {
    const Vector v = acc[i / kVector];
    elements[i] = i % kVector < 4 ? v.low[i % 4] : v.high[i % 4];
  }
  const int begin = scatter_sum<kElements, kSimdWidth / 2, S::kLanes>(elements, lane);
  for (int i = 0; i < kOwn; ++i) {
    const int piece = (begin + i) / kVector, e = (begin + i) % kVector;
    target[(piece * S::kLanes + lane % S::kLanes) * kVector + e] = elements[i];
  }
}

// What the simdgroups have seen of one row.
struct SimdgroupStates {
  threadgroup const float2* sums;
  int stride;

  State operator()(long simdgroup) const { return {sums[simdgroup * stride].x, sums[simdgroup * stride].y}; }
};

// The sum of a row over all simdgroups, and the factors that bring the acc of each to it.
template <typename S>
PD_FN void merge_row(AttendMemory memory, int row, int simdgroups) {
  threadgroup float2* sums = memory.sums + row;
  const State all = pd_merge(simdgroups, SimdgroupStates{sums, S::kRows});
  for (int s = 0; s < simdgroups; ++s) sums[s * S::kRows].x = pd_rescale(sums[s * S::kRows].x, all.m);
  memory.merged[row] = float2(all.m, all.l);
}

// One element of a row, of all simdgroups: the output, or a partial of this split.
template <typename S>
PD_FN void finish_element(constant Arguments& a, Operands operands, Item item, int split, int row, int dim,
                          threadgroup const float* staged, AttendMemory memory, int simdgroups) {
  float x = 0.f;
  for (int s = 0; s < simdgroups; ++s) x += staged[s * S::kDimsV + dim] * memory.sums[s * S::kRows + row].x;
  const float m = memory.merged[row].x, l = memory.merged[row].y;
  if (has_splits && item.splits > 1) {
    store_partial(a, operands, item, split, row, dim, m, l, x);
  } else {
    const Row done = load_row(a, item, row);
    const float normalizer = finish_row(a, operands.output, item, done, m, l, dim == 0);
    store_float(operands.output.out, out_type, element_of(a.out, item, done) + dim, x * normalizer);
  }
}

// Sums over the lanes of a row, then over the lane groups, then over the simdgroups.
template <typename S>
PD_FN void finish_item(constant Arguments& a, Operands operands, Item item, int split, Worker worker,
                       AttendMemory memory, LaneScores s, thread const Accumulators<S>& acc) {
#pragma clang loop unroll(full)
  for (int mask = S::kRows; mask < kSimdWidth; mask *= 2) s.l += simd_shuffle_xor(s.l, ushort(mask));
  if (worker.lane < S::kRows) memory.sums[worker.simdgroup * S::kRows + worker.lane] = float2(s.m, s.l);
  threadgroup float* staged = (threadgroup float*)memory.vectors;  // [row][simdgroup][dim]
  constexpr int kRowElements = kMaxSimdgroups * S::kDimsV;
#pragma clang loop unroll(full)
  for (int first = 0; first < S::kRows; first += S::kMergeRows) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (int r = 0; r < S::kMergeRows; ++r)
      share_row<S>(acc.of[first + r], staged + r * kRowElements + worker.simdgroup * S::kDimsV, worker.lane);
    if (first == 0 && worker.index < S::kRows) merge_row<S>(memory, worker.index, worker.simdgroups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = worker.index; i < S::kMergeRows * S::kDimsV; i += worker.threads) {
      const int r = i / S::kDimsV, dim = i % S::kDimsV;
      if (first + r >= item.rows || dim >= head_dim_v) continue;
      finish_element<S>(a, operands, item, split, first + r, dim, staged + r * kRowElements, memory, worker.simdgroups);
    }
  }
}

}  // namespace paged_attn

template <int kDims, int kDimsV, int kLanes, int kRows, bool kQv>
[[kernel]] void attend(constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS, PD_OPERAND_BUFFERS,
                       uint3 position [[threadgroup_position_in_grid]], uint3 grid [[threadgroups_per_grid]],
                       uint thread_index [[thread_index_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef Shape<kDims, kDimsV, kLanes, kRows, kQv> S;
  threadgroup float4 vectors[S::kScratchVectors];
  threadgroup float scores[kMaxSimdgroups][kRows * kSimdWidth];
  threadgroup long k_offsets[kMaxSimdgroups][kSimdWidth];
  threadgroup long v_offsets[kMaxSimdgroups][kSimdWidth];
  threadgroup float2 sums[kMaxSimdgroups][kRows];
  threadgroup float2 merged[kRows];

  const Tables tables = PD_TABLES;
  const Operands operands = PD_OPERANDS;
  const Worker worker = {int(thread_index), int(size.x), int(simdgroup), int(size.x) / kSimdWidth, int(lane)};
  const AttendMemory memory = {vectors, sums[0], merged, scores[simdgroup], k_offsets[simdgroup], v_offsets[simdgroup]};
  clear_unclaimed(a, tables, operands.output, position.x + grid.x * (position.y + grid.y * position.z),
                  grid.x * grid.y * grid.z, worker);

  ItemIndex index = find_item(a, tables, position, kRows, a.packed_row_tiles);
  if (index.b >= a.batch) return;
  for (;; ++index.row_tile) {
    const Item item = load_item(a, tables, index, position.y, kRows);
    if (item.rows == 0 || index.split >= item.splits) return;
    if (has_prefill && item.request.q_len * a.group > kVectorRows) return;
    const KvRange keys = has_splits ? split_keys(item.keys, index.split, item.splits, kSimdWidth) : item.keys;
    stage_queries<S>(a, operands, item, worker, vectors);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    LaneScores s = scores_of_lane<S>(a, operands, item, worker);
    Accumulators<S> acc;
    for (int r = 0; r < kRows; ++r)
      for (int piece = 0; piece < S::kPiecesV; ++piece) acc.of[r][piece] = {float4(0.f), float4(0.f)};
    walk_keys<S>(a, tables, operands, item, keys, worker, memory, s, acc);
    finish_item<S>(a, operands, item, index.split, worker, memory, s, acc);
    // Where each request has one place in the grid, it may have more rows than max_seqlen_q promised: go on with them.
    if (!has_cu_seqlens_q || a.packed_row_tiles > 0) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next queries overwrite what is merged
  }
}
