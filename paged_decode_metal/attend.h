// Attention of one item over one split of its keys, for decode and for everything else.
//
// A simdgroup is cut into lane groups; a lane group handles a key at a time, its lanes 8 dimensions each (and the same
// ones of the next pieces), so that a row of K or V is read once, in whole cache lines, for all rows of the item. Each
// step of a lane group makes as many scores (keys times rows) as it has lanes: the sums over the lanes are then taken
// while the scores are dealt to the lanes, one score to each, at less than one shuffle per score, and every score has
// its exponential computed once. Scores return to all lanes through threadgroup memory.
//
// kDims  dimensions that the pieces of a lane group cover; kLanes: of a lane group; kRows: of an item
#pragma once

#include "item.h"

namespace paged_attn {

// Sums each of `count` values over the lanes that differ in the bits of `top` and below, down to `bottom`; a lane keeps
// count / (2 * top / bottom) of them: its share, in the order of the lanes. Returns where it began.
template <int count, int top, int bottom>
PD_FN int scatter_sum(thread float* values, uint lane) {
  int begin = 0;
  int half = count / 2;
#pragma clang loop unroll(full)
  for (int mask = top; mask >= bottom; mask /= 2, half /= 2) {
    const bool upper = lane & mask;
#pragma clang loop unroll(full)
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = kept + simd_shuffle_xor(sent, ushort(mask));
    }
    begin += upper ? half : 0;
  }
  return begin;
}

template <int kDims, int kDimsV, int kLanes, int kRows, bool kQv>
struct Shape {
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
PD_FN void stage_row(const device void* base, long row, int dims, float factor, threadgroup float4* staged,
                     int thread_index, int threads) {
  for (int i = thread_index; i < kDims / 4; i += threads) {
    const int piece = i / (2 * kLanes), part = i / kLanes % 2, lane = i % kLanes;
    const int dim = (piece * kLanes + lane) * kVector + part * 4;
    float4 x = float4(0.f);
    for (int e = 0; e < 4; ++e) {
      if (dim + e < dims) x[e] = load_float(base, query_type, row + dim + e) * factor;
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

template <int kDims, int kDimsV, int kLanes, int kRows, bool kQv>
[[kernel]] void attend(
    constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS, const device void* q [[buffer(kQueryBuffer)]],
    const device void* qv [[buffer(kQvBuffer), function_constant(has_qv)]], device void* out [[buffer(kOutBuffer)]],
    device uint* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
    const device void* k_cache [[buffer(kKeyCacheBuffer)]], const device void* v_cache [[buffer(kValueCacheBuffer)]],
    const device float* q_descale [[buffer(kQDescaleBuffer), function_constant(has_q_descale)]],
    const device float* k_descale [[buffer(kKDescaleBuffer), function_constant(has_k_descale)]],
    const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],
    const device float* slopes [[buffer(kSlopesBuffer), function_constant(has_slopes)]],
    const device void* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],
    device float* partial_acc [[buffer(kPartialAccBuffer), function_constant(has_splits)]],
    device float2* partial_sums [[buffer(kPartialSumsBuffer), function_constant(has_splits)]],
    uint3 position [[threadgroup_position_in_grid]], uint3 grid [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint3 group_size [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simd_lane [[thread_index_in_simdgroup]]) {
  typedef Shape<kDims, kDimsV, kLanes, kRows, kQv> S;
  threadgroup float4 scratch[S::kScratchVectors];  // the queries, later the accumulators of all simdgroups
  threadgroup float probabilities[kMaxSimdgroups][kRows * kSimdWidth];
  threadgroup long k_offsets[kMaxSimdgroups][kSimdWidth];
  threadgroup long v_offsets[kMaxSimdgroups][kSimdWidth];
  threadgroup float2 sums[kMaxSimdgroups][kRows];

  const Tables tables = PD_TABLES;
  const Output output = {out, lse, sinks, v_descale};
  const int threads = group_size.x, simdgroups = threads / kSimdWidth;
  clear_unclaimed(a, tables, output, position.x + grid.x * (position.y + grid.y * position.z), grid.x * grid.y * grid.z,
                  thread_index, threads);
  if (int(position.z) >= a.batch) return;

  // max_q_len, by which the grid is made, is only what the caller believes: go on with later rows.
  const int max_splits = has_splits ? a.max_splits : 1, split = position.x % max_splits;
  for (int row_tile = position.x / max_splits;; row_tile += grid.x / max_splits) {
    // Which rows, which keys
    const Item item = load_item(a, tables, row_tile, position.y, position.z, kRows);
    if (item.rows == 0 || (has_prefill && item.request.q_len * a.group > kVectorRows)) return;
    if (split >= item.splits) continue;
    const KvRange keys = has_splits ? split_keys(item.keys, split, item.splits, kSimdWidth) : item.keys;

    // The query, and the factors of its products
    const int b = item.b, kv_head = item.kv_head;
    float scale = a.scale, qv_factor = 1.f;
    if (has_q_descale) scale *= descale_at(q_descale, a.q_descale_stride_batch, a.q_descale_stride_head, b, kv_head);
    if (has_k_descale) scale *= descale_at(k_descale, a.k_descale_stride_batch, a.k_descale_stride_head, b, kv_head);
    if (kQv && has_v_descale) {
      // The scale has k_descale in it, which the products with V do not have.
      qv_factor = descale_at(v_descale, a.v_descale_stride_batch, a.v_descale_stride_head, b, kv_head);
      if (has_k_descale)
        qv_factor /= descale_at(k_descale, a.k_descale_stride_batch, a.k_descale_stride_head, b, kv_head);
    }
    threadgroup float4* staged_qv = scratch + kRows * kDims / 4;
    for (int row = 0; row < kRows; ++row) {
      // Rows that do not exist repeat the last one; nothing of them is written.
      const Row r = load_row(a, item, min(row, item.rows - 1));
      stage_row<kDims, kLanes>(q, element_of(a.q, item, r), head_dim, 1.f, scratch + row * kDims / 4, thread_index,
                               threads);
      if (kQv && has_qv)
        stage_row<kDimsV, kLanes>(qv, element_of(a.qv, item, r), head_dim_v, qv_factor, staged_qv + row * kDimsV / 4,
                                  thread_index, threads);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // What this lane's scores belong to: a lane keeps its row, and in every step another key.
    const int group = simd_lane / kLanes, lane = simd_lane % kLanes, my_row = simd_lane % kRows;
    const Row row = load_row(a, item, my_row);
    const int q_pos = item.request.kv_len - item.request.q_len + row.token;
    const float slope = has_slopes ? slopes[b * a.slopes_stride_batch + row.q_head] : 0.f;

    // Each simdgroup walks over its own stretch of whole tiles. A split may be empty.
    const int first_tile = keys.begin / kSimdWidth;
    const int end_tile = keys.begin < keys.end ? (keys.end + kSimdWidth - 1) / kSimdWidth : first_tile;
    const int stretch = (end_tile - first_tile + simdgroups - 1) / simdgroups;
    const int begin_tile = first_tile + stretch * simdgroup;
    threadgroup float* shared = probabilities[simdgroup];  // of a tile, first its scores
    threadgroup float* mine = shared + simd_lane;
    threadgroup long* k_places = k_offsets[simdgroup];
    threadgroup long* v_places = v_offsets[simdgroup];

    float m = PD_EMPTY, l = 0.f;  // of this lane's scores; m is common to all lanes of a row
    Vector acc[kRows][S::kPiecesV];
    for (int r = 0; r < kRows; ++r)
      for (int piece = 0; piece < S::kPiecesV; ++piece) acc[r][piece] = {float4(0.f), float4(0.f)};

    for (int tile = begin_tile; tile < min(begin_tile + stretch, end_tile); ++tile) {
      // Where the keys of the tile lie: one per lane
      const int tile_key = tile * kSimdWidth;
      const int my_key = tile_key + simd_lane;
      Place place = {-1, 0};
      if (my_key >= keys.begin && my_key < keys.end) place = find_place(a, tables, b, my_key);
      k_places[simd_lane] = place.page < 0 ? -1 : cache_offset(a.k_cache, place) + kv_head * a.k_cache.head;
      v_places[simd_lane] = place.page < 0 ? -1 : cache_offset(a.v_cache, place) + kv_head * a.v_cache.head;
      simdgroup_barrier(mem_flags::mem_threadgroup);

      // Scores. A lane keeps its own in threadgroup memory, so that the steps need no code of their own.
      float top = m;
      for (int step = 0; step < kRows; ++step) {
        const int first = (step * S::kGroups + group) * S::kKeys;
        float products[kLanes];
        for (int i = 0; i < kLanes; ++i) products[i] = 0.f;
        add_products<S::kPieces, kLanes, S::kKeys, kRows>(k_cache, k_places + first, head_dim, scratch, lane, products);
        if (kQv && has_qv)
          add_products<S::kPiecesV, kLanes, S::kKeys, kRows>(v_cache, v_places + first, head_dim_v, staged_qv, lane,
                                                             products);
        scatter_sum<kLanes, kLanes / 2, 1>(products, simd_lane);
        const int key = tile_key + first + lane / kRows;
        const float score = pd_score(products[0], scale, has_softcap ? a.softcap : 0.f, slope,
                                     has_slopes ? fabs(float(q_pos - key)) : 0.f) *
                            PD_LOG2E;
        const bool seen = key >= row.keys.begin && key < row.keys.end;
        mine[step * kSimdWidth] = seen ? score : PD_EMPTY;
        top = seen ? max(top, score) : top;
      }

      // Probabilities
#pragma clang loop unroll(full)
      for (int mask = kRows; mask < kSimdWidth; mask *= 2) top = max(top, simd_shuffle_xor(top, ushort(mask)));
      const float factor = pd_rescale(m, top);
      l *= factor;
      for (int step = 0; step < kRows; ++step) {
        const float score = mine[step * kSimdWidth];
        // Not by its difference to the top, which is nothing where no key was seen yet.
        const float probability = score == PD_EMPTY ? 0.f : metal::exp2(score - top);
        l += probability;
        mine[step * kSimdWidth] = probability;
      }
      if (tile != begin_tile && simd_any(top != m)) {
#pragma clang loop unroll(full)
        for (int r = 0; r < kRows; ++r) {
          const float row_factor = simd_shuffle(factor, ushort(r));
          for (int piece = 0; piece < S::kPiecesV; ++piece) {
            acc[r][piece].low *= row_factor;
            acc[r][piece].high *= row_factor;
          }
        }
      }
      m = top;
      simdgroup_barrier(mem_flags::mem_threadgroup);

      // Values
      for (int step = 0; step < kRows; ++step) {
        const int first = (step * S::kGroups + group) * S::kKeys;
#pragma clang loop unroll(full)
        for (int i = 0; i < S::kKeys; ++i) {
          const long offset = v_places[first + i];
          if (offset < 0) continue;
          threadgroup const float* probability = shared + step * kSimdWidth + group * kLanes + i * kRows;
#pragma clang loop unroll(full)
          for (int piece = 0; piece < S::kPiecesV; ++piece) {
            const Vector v = load_vector(v_cache, offset, (piece * kLanes + lane) * kVector, head_dim_v);
#pragma clang loop unroll(full)
            for (int r = 0; r < kRows; ++r) {
              acc[r][piece].low += probability[r] * v.low;
              acc[r][piece].high += probability[r] * v.high;
            }
          }
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Merge the lanes of a row, then the lane groups, then the simdgroups
#pragma clang loop unroll(full)
    for (int mask = kRows; mask < kSimdWidth; mask *= 2) l += simd_shuffle_xor(l, ushort(mask));
    if (simd_lane < kRows) sums[simdgroup][my_row] = float2(m, l);
    const bool cut = has_splits && item.splits > 1;
    threadgroup float* merged = (threadgroup float*)scratch;
    constexpr int kOwn = S::kPiecesV * kVector / S::kGroups;  // elements of a row that a lane keeps
#pragma clang loop unroll(full)
    for (int first = 0; first < kRows; first += S::kMergeRows) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
      for (int r = 0; r < S::kMergeRows; ++r) {
        float elements[S::kPiecesV * kVector];
#pragma clang loop unroll(full)
        for (int i = 0; i < S::kPiecesV * kVector; ++i) {
          const Vector v = acc[first + r][i / kVector];
          elements[i] = i % kVector < 4 ? v.low[i % 4] : v.high[i % 4];
        }
        const int begin = scatter_sum<S::kPiecesV * kVector, kSimdWidth / 2, kLanes>(elements, simd_lane);
        threadgroup float* staged = merged + (r * kMaxSimdgroups + simdgroup) * kDimsV;
        for (int i = 0; i < kOwn; ++i) {
          const int piece = (begin + i) / kVector, e = (begin + i) % kVector;
          staged[(piece * kLanes + lane) * kVector + e] = elements[i];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = thread_index; i < S::kMergeRows * kDimsV; i += threads) {
        const int r = i / kDimsV, dim = i % kDimsV;
        if (first + r >= item.rows || dim >= head_dim_v) continue;
        float row_m = PD_EMPTY, row_l = 0.f, x = 0.f;
        for (int s = 0; s < simdgroups; ++s) row_m = max(row_m, sums[s][first + r].x);
        for (int s = 0; s < simdgroups; ++s) {
          const float weight = pd_rescale(sums[s][first + r].x, row_m);
          row_l += sums[s][first + r].y * weight;
          x += merged[(r * kMaxSimdgroups + s) * kDimsV + dim] * weight;
        }
        if (cut) {
          const long partial = partial_of(a, item, first + r) + split;
          if (dim == 0) partial_sums[partial] = float2(row_m, row_l);
          partial_acc[partial * head_dim_v + dim] = x;
        } else {
          const Row done = load_row(a, item, first + r);
          const float normalizer = finish_row(a, output, item, done, row_m, row_l, dim == 0);
          store_float(out, query_type, element_of(a.out, item, done) + dim, x * normalizer);
        }
      }
    }
    if (!has_cu_seqlens_q) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace paged_attn
