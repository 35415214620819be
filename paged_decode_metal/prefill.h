// Attention of requests with many rows (more than kVectorRows of a kv_head), by 8 x 8 matrices.
//
// A threadgroup handles 16 or 32 rows, 8 in each simdgroup; all of them read the tile of keys, later of values, that
// the threadgroup has laid out in its memory, so K and V come from memory once for all rows. Scores pass through
// threadgroup memory for the softmax; the probabilities stay float32. The factors of the rows when a maximum grows are
// a diagonal matrix, as which lane holds which element of a matrix is not for us to know.
#pragma once

#include "item.h"

namespace paged_attn {

// Lays out a tile of rows of the cache, 0 for keys that nobody sees.
template <typename T, int kDims, int kThreads>
PD_FN void stage_tile(const device void* cache, threadgroup const long* offsets, int dims, threadgroup T* tile,
                      int thread_index) {
  constexpr int kVectors = kDims / kVector;
  for (int i = thread_index; i < kSimdWidth * kVectors; i += kThreads) {
    const int key = i / kVectors, dim = i % kVectors * kVector;
    const long offset = offsets[key];
    Vector x = {float4(0.f), float4(0.f)};
    if (offset >= 0) x = load_vector(cache, offset, dim, dims);
    threadgroup vec<T, 4>* target = (threadgroup vec<T, 4>*)(tile + key * kDims + dim);
    target[0] = vec<T, 4>(x.low);
    target[1] = vec<T, 4>(x.high);
  }
}

template <typename T, int kDims, int kRows>
[[kernel]] void prefill(constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS,
                        const device T* q [[buffer(kQueryBuffer)]], device void* out [[buffer(kOutBuffer)]],
                        device uint* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
                        const device void* k_cache [[buffer(kKeyCacheBuffer)]],
                        const device void* v_cache [[buffer(kValueCacheBuffer)]],
                        const device float* q_descale [[buffer(kQDescaleBuffer), function_constant(has_q_descale)]],
                        const device float* k_descale [[buffer(kKDescaleBuffer), function_constant(has_k_descale)]],
                        const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],
                        const device float* slopes [[buffer(kSlopesBuffer), function_constant(has_slopes)]],
                        const device void* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],
                        device float* partial_acc [[buffer(kPartialAccBuffer), function_constant(has_splits)]],
                        device float2* partial_sums [[buffer(kPartialSumsBuffer), function_constant(has_splits)]],
                        uint3 position [[threadgroup_position_in_grid]], uint3 grid [[threadgroups_per_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kBlock = 8, kBlocks = kDims / kBlock, kKeyBlocks = kSimdWidth / kBlock;
  constexpr int kSimdgroups = kRows / kBlock, kThreads = kSimdgroups * kSimdWidth;
  // Queries and a tile; at last the sums, in float32. Declared as vectors for their alignment.
  threadgroup float4 scratch[(kRows + kSimdWidth) * kDims * sizeof(T) / sizeof(float4)];
  static_assert(sizeof(T) == 2, "the sums of the rows take the room of queries and tile");
  threadgroup float scores[kSimdgroups][kBlock * kSimdWidth];
  threadgroup float diagonals[kSimdgroups][kBlock * kBlock];
  threadgroup long k_offsets[kSimdWidth];
  threadgroup long v_offsets[kSimdWidth];

  const Tables tables = PD_TABLES;
  const int request_rows = load_request(a, tables, position.z).q_len * a.group;
  if (request_rows <= kVectorRows) return;
  const bool may_be_cut = has_splits && request_rows <= a.split_rows;
  const int split = may_be_cut ? position.x % a.max_splits : 0;
  // max_q_len, by which the grid is made, is only what the caller believes: go on with later rows.
  for (int row_tile = may_be_cut ? position.x / a.max_splits : position.x;; row_tile += grid.x) {
    const Item item = load_item(a, tables, row_tile, position.y, position.z, kRows);
    if (item.rows == 0 || split >= item.splits) return;
    const KvRange keys = has_splits ? split_keys(item.keys, split, item.splits, kSimdWidth) : item.keys;
    // All simdgroups lay out the tiles, those without rows do nothing else.
    const int own_rows = clamp(item.rows - int(simdgroup) * kBlock, 0, int(kBlock));
    const int b = item.b, kv_head = item.kv_head;
    float scale = a.scale;
    if (has_q_descale) scale *= descale_at(q_descale, a.q_descale_stride_batch, a.q_descale_stride_head, b, kv_head);
    if (has_k_descale) scale *= descale_at(k_descale, a.k_descale_stride_batch, a.k_descale_stride_head, b, kv_head);

    // The queries
    threadgroup T* queries = (threadgroup T*)scratch;
    threadgroup T* tile = queries + kRows * kDims;
    for (int i = thread_index; i < kRows * kDims; i += kThreads) {
      const int row = i / kDims, dim = i % kDims;
      T x = T(0.f);
      if (row < item.rows && dim < head_dim) x = q[element_of(a.q, item, load_row(a, item, row)) + dim];
      queries[i] = x;
    }
    threadgroup float* diagonal = diagonals[simdgroup];
    for (int i = lane; i < kBlock * kBlock; i += kSimdWidth) diagonal[i] = 0.f;

    // Four lanes of a simdgroup share a row in the softmax.
    constexpr int kLanes = kSimdWidth / kBlock;
    const int my_row = lane / kLanes, first_key = lane % kLanes * kBlock;
    const Row row = load_row(a, item, simdgroup * kBlock + my_row);
    const int q_pos = item.request.kv_len - item.request.q_len + row.token;
    const float slope = has_slopes ? slopes[b * a.slopes_stride_batch + row.q_head] : 0.f;
    threadgroup float* my_scores = scores[simdgroup] + my_row * kSimdWidth + first_key;
    threadgroup const T* my_queries = queries + simdgroup * kBlock * kDims;

    float m = PD_EMPTY, l = 0.f;  // m is common to the lanes of a row
    simdgroup_matrix<float, 8, 8> acc[kBlocks];
#pragma clang loop unroll(full)
    for (int i = 0; i < kBlocks; ++i) acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.f);

    const int first_tile = keys.begin / kSimdWidth;
    const int end_tile = keys.begin < keys.end ? (keys.end + kSimdWidth - 1) / kSimdWidth : first_tile;
    for (int index = first_tile; index < end_tile; ++index) {
      const int tile_key = index * kSimdWidth;
      if (simdgroup == 0) {
        const int key = tile_key + lane;
        Place place = {-1, 0};
        if (key >= keys.begin && key < keys.end) place = find_place(a, tables, b, key);
        k_offsets[lane] = place.page < 0 ? -1 : cache_offset(a.k_cache, place) + kv_head * a.k_cache.head;
        v_offsets[lane] = place.page < 0 ? -1 : cache_offset(a.v_cache, place) + kv_head * a.v_cache.head;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_tile<T, kDims, kThreads>(k_cache, k_offsets, head_dim, tile, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      bool grown = false;
      if (own_rows > 0) {
        // Scores
        for (int block = 0; block < kKeyBlocks; ++block) {
          simdgroup_matrix<float, 8, 8> products = make_filled_simdgroup_matrix<float, 8, 8>(0.f);
#pragma clang loop unroll(full)
          for (int i = 0; i < kBlocks; ++i) {
            if (i * kBlock >= head_dim) continue;
            simdgroup_matrix<T, 8, 8> rows, keys;
            simdgroup_load(rows, my_queries + i * kBlock, kDims);
            simdgroup_load(keys, (threadgroup const T*)tile + block * kBlock * kDims + i * kBlock, kDims, ulong2(0, 0),
                           true);
            simdgroup_multiply_accumulate(products, rows, keys, products);
          }
          simdgroup_store(products, scores[simdgroup] + block * kBlock, kSimdWidth);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        // Probabilities
        float top = m;
#pragma clang loop unroll(full)
        for (int i = 0; i < kBlock; ++i) {
          const int key = tile_key + first_key + i;
          const bool seen = key >= row.keys.begin && key < row.keys.end;
          const float score = pd_score(my_scores[i], scale, has_softcap ? a.softcap : 0.f, slope,
                                       has_slopes ? fabs(float(q_pos - key)) : 0.f) *
                              PD_LOG2E;
          my_scores[i] = seen ? score : PD_EMPTY;
          top = seen ? max(top, score) : top;
        }
#pragma clang loop unroll(full)
        for (int mask = 1; mask < kLanes; mask *= 2) top = max(top, simd_shuffle_xor(top, ushort(mask)));
        const float factor = pd_rescale(m, top);
        l *= factor;
#pragma clang loop unroll(full)
        for (int i = 0; i < kBlock; ++i) {
          const float probability = my_scores[i] == PD_EMPTY ? 0.f : metal::exp2(my_scores[i] - top);
          l += probability;
          my_scores[i] = probability;
        }
        if (first_key == 0) diagonal[my_row * (kBlock + 1)] = factor;
        grown = simd_any(top != m);
        m = top;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      // Values
      stage_tile<T, kDims, kThreads>(v_cache, v_offsets, head_dim_v, tile, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (grown) {
        simdgroup_matrix<float, 8, 8> factors;
        simdgroup_load(factors, (threadgroup const float*)diagonal);
#pragma clang loop unroll(full)
        for (int i = 0; i < kBlocks; ++i) {
          simdgroup_matrix<float, 8, 8> scaled;
          simdgroup_multiply(scaled, factors, acc[i]);
          acc[i] = scaled;
        }
      }
      for (int block = 0; block < (own_rows > 0 ? kKeyBlocks : 0); ++block) {
        simdgroup_matrix<float, 8, 8> probabilities;
        simdgroup_load(probabilities, (threadgroup const float*)scores[simdgroup] + block * kBlock, kSimdWidth);
#pragma clang loop unroll(full)
        for (int i = 0; i < kBlocks; ++i) {
          if (i * kBlock >= head_dim_v) continue;
          simdgroup_matrix<T, 8, 8> values;
          simdgroup_load(values, (threadgroup const T*)tile + block * kBlock * kDims + i * kBlock, kDims);
          simdgroup_multiply_accumulate(acc[i], probabilities, values, acc[i]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // The rows, by all lanes of their simdgroup
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* sums = (threadgroup float*)scratch + simdgroup * kBlock * kDims;
#pragma clang loop unroll(full)
    for (int i = 0; i < kBlocks; ++i) simdgroup_store(acc[i], sums + i * kBlock, kDims);
#pragma clang loop unroll(full)
    for (int mask = 1; mask < kLanes; mask *= 2) l += simd_shuffle_xor(l, ushort(mask));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const Output output = {out, lse, sinks, v_descale};
    for (int r = 0; r < own_rows; ++r) {
      const float row_m = simd_shuffle(m, ushort(r * kLanes)), row_l = simd_shuffle(l, ushort(r * kLanes));
      if (has_splits && item.splits > 1) {
        const long partial = partial_of(a, item, simdgroup * kBlock + r) + split;
        if (lane == 0) partial_sums[partial] = float2(row_m, row_l);
        for (int dim = lane; dim < head_dim_v; dim += kSimdWidth)
          partial_acc[partial * head_dim_v + dim] = sums[r * kDims + dim];
        continue;
      }
      const Row done = load_row(a, item, simdgroup * kBlock + r);
      const float normalizer = finish_row(a, output, item, done, row_m, row_l, lane == 0);
      const long target = element_of(a.out, item, done);
      for (int dim = lane; dim < head_dim_v; dim += kSimdWidth)
        store_float(out, query_type, target + dim, sums[r * kDims + dim] * normalizer);
    }
    if (!has_cu_seqlens_q) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace paged_attn
