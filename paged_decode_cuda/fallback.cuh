// Attention for everything that the kernels of the matrix unit do not take: float32 queries over an 8-bit cache, head
// dims above 256, qv outside of MLA's sizes, tensors whose rows are no whole pieces of 16 bytes. A warp handles one
// row, its lanes the dimensions; float32 arithmetic throughout.
//
// Grid: one block per (item, kv_head, split); the warps of a block are the rows of an item and share its keys in L1.
#pragma once

#include "exchange.cuh"
#include "fallback_plan.h"
#include "key_places.cuh"

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

// What a lane holds of a row: dimensions lane, lane + kWarp, ...
template <int kDims>
PD_DEVICE void load_row(const void* base, DType dtype, int64_t offset, int64_t dims, float factor, float (&x)[kDims]) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int dim = i * kWarp + threadIdx.x % kWarp;
    x[i] = dim < dims ? load_float(base, dtype, offset + dim) * factor : 0.f;
  }
}

// The same of a key or a value as it is, by loads that do not wait for each other.
template <typename T, int kDims>
PD_DEVICE void load_dims(const T* row, int64_t dims, T (&x)[kDims]) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int dim = i * kWarp + threadIdx.x % kWarp;
    x[i] = dim < dims ? row[dim] : T{};
  }
}

// The sums of one row over some of its keys, spread over a warp; (m, l) are the same in every lane.
template <int kDims, int kDimsV, bool kQv>
struct FallbackRow {
  static constexpr int kBatch = kDims > 8 ? 2 : 4;  // keys whose loads are on their way

  float q[kDims], qv[kQv ? kDimsV : 1];
  float m, l, acc[kDimsV];
  int q_pos;
  float scale, slope;

  PD_MEMBER void start(const Problem& p, const Item& item, int head, const QueryRow& query) {
    // With qv the two parts of the score have descales of their own, so those go into q and qv.
    const float k_factor = kQv ? k_descale_of(p.cache, item.b, head) : 1.f;
    load_row(p.q, p.q_dtype, q_offset(p, item, query), p.head_dim, k_factor, q);
    if constexpr (kQv) {
      const float v_factor = v_descale_of(p.cache, item.b, head);
      load_row(p.qv.data, p.q_dtype, qv_offset(p, item, query), p.head_dim_v, v_factor, qv);
    }
    q_pos = item.kv_len - item.q_len + query.token;
    scale = kQv ? query_scale(p, item.b, head) : score_scale(p, item.b, head);
    slope = row_slope(p, item.b, query.q_head);
    m = -INFINITY;
    l = 0.f;
#pragma unroll
    for (int d = 0; d < kDimsV; ++d) acc[d] = 0.f;
  }

  // Adds keys [first, end), kBatch at most. k_head, v_head: where the head begins in the first slot of the first page.
  template <typename T>
  PD_MEMBER void add_keys(const Problem& p, const Plan& plan, const KeyPlaces& places, const T* k_head, const T* v_head,
                          int first, int end) {
    const Cache& cache = p.cache;
    bool found[kBatch];
    T k[kBatch][kDims], v[kBatch][kDimsV];
    // All loads before the first use of one, and no branch between them: else each waits for the one before.
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int2 place = places.look_up(p, plan, first + i);
      found[i] = first + i < end && page_exists(p, place.x);
      const int64_t page = found[i] ? place.x : 0, slot = found[i] ? place.y : 0;
      load_dims(k_head + page * cache.k_stride_page + slot * cache.k_stride_slot, found[i] ? p.head_dim : 0, k[i]);
      load_dims(v_head + page * cache.v_stride_page + slot * cache.v_stride_slot, found[i] ? p.head_dim_v : 0, v[i]);
    }
    float s[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      s[i] = 0.f;
#pragma unroll
      for (int d = 0; d < kDims; ++d) s[i] += q[d] * widen(k[i][d]);
      if constexpr (kQv) {
#pragma unroll
        for (int d = 0; d < kDimsV; ++d) s[i] += qv[d] * widen(v[i][d]);
      }
    }
    float top = m;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float distance = fabsf(static_cast<float>(q_pos - first - i));
      s[i] = pd_score(warp_sum(s[i]), scale, p.softcap, slope, distance) * PD_LOG2E;
      if (first + i >= end) s[i] = -INFINITY;
      top = fmaxf(top, s[i]);
    }
    const float factor = pd_rescale(m, top), base = top == -INFINITY ? 0.f : top;
    m = top;
    l *= factor;
#pragma unroll
    for (int d = 0; d < kDimsV; ++d) acc[d] *= factor;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float probability = exp2f(s[i] - base);
      l += probability;
#pragma unroll
      for (int d = 0; d < kDimsV; ++d) acc[d] += probability * widen(v[i][d]);
    }
  }
};

// kDims and kDimsV: dimensions per lane. kQv: the score has a second part, qv.v.
template <typename T, int kDims, int kDimsV, bool kQv>
__global__ void __launch_bounds__(kFallbackWarps* kWarp, 1)
    fallback_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  __shared__ float4 row_acc[kFallbackWarps][kDimsV * kWarp / 4];
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  wait_for_predecessor();
  let_successor_start();
  clear_unclaimed(p);

  Walker walker = {};
  Dealing dealing = {};
  find_split(p, plan, walker, dealing);
  Segment segment;
  Item item;
  if (!walker.next(p, plan, dealing, segment, item) || row >= item.rows) return;
  const int head = segment.head;
  const QueryRow query = query_row(p, plan, item, head, row);
  const KvRange seen = row_keys(p, plan, item, query.token);
  const int begin = max(static_cast<int>(seen.begin), segment.tile << kFallbackTileShift);
  const int end = min(static_cast<int>(seen.end), segment.tile_end << kFallbackTileShift);

  using Row = FallbackRow<kDims, kDimsV, kQv>;
  Row sums;
  sums.start(p, item, head, query);
  KeyPlaces places;
  places.start(p, item);
  const T* k_head = static_cast<const T*>(p.cache.k) + head * p.cache.k_stride_head;
  const T* v_head = static_cast<const T*>(p.cache.v) + head * p.cache.v_stride_head;
  for (int first = begin; first < end; first += Row::kBatch) {
    sums.add_keys(p, plan, places, k_head, v_head, first, end);
  }

  // From one dimension of each lane to four neighbouring ones, then the row or its partial
#pragma unroll
  for (int d = 0; d < kDimsV; ++d) reinterpret_cast<float*>(row_acc[row])[d * kWarp + lane] = sums.acc[d];
  __syncwarp();
  const Partials partials = {segment.first ? partials_behind(item, segment, dealing) : 0, 1, 1};
#pragma unroll 1
  for (int first = 0; first * 4 < p.head_dim_v; first += kWarp) {
    const int quad = first + lane;
    const float4 values = row_acc[row][min(quad, kDimsV * kWarp / 4 - 1)];
    RowSum sum = {sums.m, sums.l, {values.x, values.y, values.z, values.w}};
    add_partials(plan, 0, 1, partials, row, quad, sum);
    if (quad * 4 >= p.head_dim_v) break;
    if (segment.first) {
      write_output<0>(p, plan, item, head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

}  // namespace paged_attn
