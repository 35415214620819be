// Attention for everything the matrix-unit kernel does not take: float32, head dims that are no multiple of 8 or above
// 256, MLA (qv), caches whose rows are not aligned to 16 bytes. A warp handles one row, its lanes the dimensions;
// float32 arithmetic throughout.
//
// Grid: one block per (item, kv_head, split); the warps of a block are the rows of an item and share its keys in L1.
#pragma once

#include "exchange.cuh"
#include "fallback_plan.h"

namespace paged_attn {

PD_DEVICE float widen(float x) { return x; }
PD_DEVICE float widen(__half x) { return __half2float(x); }
PD_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
PD_DEVICE float widen(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
PD_DEVICE float widen(__nv_fp8_e5m2 x) { return static_cast<float>(x); }

PD_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// kDims and kDimsV: dimensions per lane. kQv: the score has a second part, qv.v.
template <typename T, int kDims, int kDimsV, bool kQv>
__global__ void __launch_bounds__(kFallbackWarps* kWarp, 1)
    fallback_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  constexpr int kBatch = 4;  // keys in flight
  __shared__ float4 row_acc[kFallbackWarps][kDimsV * kWarp / 4];
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;

  wait_for_predecessor();
  let_successor_start();
  clear_unclaimed(p);

  // Which row, which keys
  Walker walker = {};
  Dealing dealing = {};
  find_split(p, plan, walker, dealing);
  Segment segment;
  Item item;
  if (!walker.next(p, plan, dealing, segment, item)) return;
  // Warps without a row go through the motions with no keys, as the block meets again at its end.
  const bool exists = row < item.rows;
  const int head = segment.head;
  const int token = plan.group.divide(item.first_row + (exists ? row : 0));
  const RowTarget target = row_target(p, plan, item, head, exists ? row : 0);
  const KvRange seen = row_keys(p, plan, item, token);
  const int begin = max(static_cast<int>(seen.begin), segment.tile << kFallbackTileShift);
  const int end = exists ? min(static_cast<int>(seen.end), segment.tile_end << kFallbackTileShift) : begin;
  const int q_pos = item.kv_len - item.q_len + token;
  const float slope = row_slope(p, item.b, target.q_head);
  const float scale_all = kQv ? query_scale(p, item.b, head) : score_scale(p, item.b, head);
  const Cache& cache = p.cache;
  // With qv the two parts of the score have descales of their own, so those go into q and qv.
  const float q_factor = kQv ? k_descale_of(cache, item.b, head) : 1.f;
  const float qv_factor = kQv ? v_descale_of(cache, item.b, head) : 1.f;

  // Load the query
  float q[kDims], qv[kQv ? kDimsV : 1];
  const int64_t query = item.q_begin + token;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    int dim = i * kWarp + lane;
    q[i] = 0.f;
    if (dim < p.head_dim) {
      const int64_t offset =
          item.b * p.q_stride_batch + query * p.q_stride_token + target.q_head * p.q_stride_head + dim;
      q[i] = load_float(p.q, p.q_dtype, offset) * q_factor;
    }
  }
  if constexpr (kQv) {
#pragma unroll
    for (int i = 0; i < kDimsV; ++i) {
      int dim = i * kWarp + lane;
      qv[i] = 0.f;
      if (dim < p.head_dim_v) {
        int64_t offset =
            item.b * p.qv_stride_batch + query * p.qv_stride_token + target.q_head * p.qv_stride_head + dim;
        qv[i] = load_float(p.qv, p.q_dtype, offset) * qv_factor;
      }
    }
  }

  // For each key: load, score, update
  const bool paged = static_cast<bool>(cache.block_table);
  const int32_t* pages = cache.block_table.data + (paged ? table_row(p, item.b) * cache.block_table_stride : 0);
  const T* k_head = static_cast<const T*>(cache.k) + head * cache.k_stride_head;
  const T* v_head = static_cast<const T*>(cache.v) + head * cache.v_stride_head;
  float m = -INFINITY, l = 0.f, acc[kDimsV] = {};
  for (int first = begin; first < end; first += kBatch) {
    int64_t v_offset[kBatch];
    bool found[kBatch];
    float s[kBatch];
    float v[kBatch][kDimsV];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int key = first + i;
      int64_t page = -1, slot = key;
      if (key < end) {
        if (paged) {
          int index = plan.page_size.divide(key);
          slot = key - index * static_cast<int>(plan.page_size.divisor);
          if (index < cache.max_pages) page = pages[index];
        } else {
          page = cache.cu_seqlens_k ? 0 : table_row(p, item.b);
          if (cache.cu_seqlens_k) slot += cache.cu_seqlens_k[item.b];
          if (slot < 0 || slot >= cache.page_size) page = -1;
        }
      }
      found[i] = page >= 0 && page < cache.num_pages;
      v_offset[i] = page * cache.v_stride_page + slot * cache.v_stride_slot;
      const T* k = k_head + page * cache.k_stride_page + slot * cache.k_stride_slot;
      s[i] = 0.f;
#pragma unroll
      for (int d = 0; d < kDims; ++d) {
        int dim = d * kWarp + lane;
        if (found[i] && dim < p.head_dim) s[i] += q[d] * widen(k[dim]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int d = 0; d < kDimsV; ++d) {
        int dim = d * kWarp + lane;
        v[i][d] = found[i] && dim < p.head_dim_v ? widen(v_head[v_offset[i] + dim]) : 0.f;
        if constexpr (kQv) s[i] += qv[d] * v[i][d];
      }
    float top = m;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      s[i] = pd_score(warp_sum(s[i]), scale_all, p.softcap, slope, fabsf(static_cast<float>(q_pos - first - i))) *
             PD_LOG2E;
      if (first + i >= end) s[i] = -INFINITY;
      top = fmaxf(top, s[i]);
    }
    float factor = pd_rescale(m, top);
    float base = top == -INFINITY ? 0.f : top;
    m = top;
    l *= factor;
#pragma unroll
    for (int d = 0; d < kDimsV; ++d) acc[d] *= factor;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float probability = exp2f(s[i] - base);
      l += probability;
#pragma unroll
      for (int d = 0; d < kDimsV; ++d) acc[d] += probability * v[i][d];
    }
  }

  // Write the row or its partial, four dimensions at a time
  if (!exists) return;
#pragma unroll
  for (int d = 0; d < kDimsV; ++d) reinterpret_cast<float*>(row_acc[row])[d * kWarp + lane] = acc[d];
  __syncwarp();
  const Parts parts = {segment.first ? parts_behind(item, segment, dealing) : 0, 1};
#pragma unroll 1
  for (int first = 0; first * 4 < p.head_dim_v; first += kWarp) {
    const int quad = first + lane;
    const float4 values = row_acc[row][min(quad, kDimsV * kWarp / 4 - 1)];
    RowSum sum = {m, l, {values.x, values.y, values.z, values.w}};
    add_parts(plan, 0, 1, parts, row, quad, sum);
    if (quad * 4 >= p.head_dim_v) break;
    if (segment.first) {
      write_output<false>(p, plan, item, head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

}  // namespace paged_attn
