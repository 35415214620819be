// Merges the partials of rows whose keys were shared by several thread blocks, adds the sink, writes output and lse.
//
// Grid: (merge records, rows_per_tile); most records are empty. The warps of a block share the partials of one row, the
// lanes its dimensions, four each time. The order of the sums depends on the number of partials alone.
#pragma once

#include "work.cuh"

namespace paged_attn {

constexpr int kMergeWarps = 4;

PD_DEVICE void scale(float4& x, float factor) {
  x.x *= factor;
  x.y *= factor;
  x.z *= factor;
  x.w *= factor;
}

PD_DEVICE void add(float4& x, const float4& y, float weight) {
  x.x += y.x * weight;
  x.y += y.y * weight;
  x.z += y.z * weight;
  x.w += y.w * weight;
}

template <int kVectors>  // float4 per lane: head_dim_v <= 128 * kVectors
__global__ void __launch_bounds__(kMergeWarps * kWarp)
    merge_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  constexpr int kBatch = 4;  // partials in flight
  __shared__ float4 shared_acc[kMergeWarps][kVectors][kWarp];
  __shared__ float2 shared_ml[kMergeWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  wait_for_predecessor();
  let_successor_start();
  const Merge merge = plan.merges[blockIdx.x];
  const int row = blockIdx.y;
  if (merge.count == 0 || row >= merge.rows) return;

  // This warp's partials
  float m = -INFINITY, l = 0.f;
  float4 acc[kVectors] = {};
  for (int first = warp; first < merge.count; first += kBatch * kMergeWarps) {
    float2 ml[kBatch];
    float4 other[kBatch][kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int index = first + i * kMergeWarps;
      ml[i] = make_float2(-INFINITY, 0.f);
      bool exists = index < merge.count;
      int64_t slot = index == 0 ? merge.first_slot : merge.next_slot + index - 1;
      int64_t place = slot * plan.rows_per_tile + row;
      if (exists) ml[i] = plan.partial_ml[place];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        int dim = (v * kWarp + lane) * 4;
        other[i][v] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (exists && dim < plan.partial_stride) {
          other[i][v] = *reinterpret_cast<const float4*>(plan.partial_acc + place * plan.partial_stride + dim);
        }
      }
    }
    float top = m;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) top = fmaxf(top, ml[i].x);
    float factor = fast_rescale(m, top);
    m = top;
    l *= factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) scale(acc[v], factor);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float weight = fast_rescale(ml[i].x, top);
      l += ml[i].y * weight;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add(acc[v], other[i][v], weight);
    }
  }

  // Merge the warps
  if (lane == 0) shared_ml[warp] = make_float2(m, l);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) shared_acc[warp][v][lane] = acc[v];
  __syncthreads();
  if (warp > 0) return;
  float top = -INFINITY, sum = 0.f;
  for (int w = 0; w < kMergeWarps; ++w) top = fmaxf(top, shared_ml[w].x);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) acc[v] = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int w = 0; w < kMergeWarps; ++w) {
    float weight = fast_rescale(shared_ml[w].x, top);
    sum += shared_ml[w].y * weight;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) add(acc[v], shared_acc[w][v][lane], weight);
  }

  // Write the row
  const Item item = load_item(p, plan, merge.item);
  const RowTarget target = row_target(p, plan, item, merge.head, row);
  const float factor = finish_row(p, target, item.b, merge.head, top, sum, lane == 0);
  const DType out_dtype = output_dtype(p);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const float values[4] = {acc[v].x, acc[v].y, acc[v].z, acc[v].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int dim = (v * kWarp + lane) * 4 + e;
      if (dim < p.head_dim_v) store_float(p.out, out_dtype, target.out + dim, values[e] * factor);
    }
  }
}

}  // namespace paged_attn
