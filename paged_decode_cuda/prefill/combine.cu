// The combine kernel: adds the partials of rows whose keys were cut, and writes them: one warp or several per row, four
// dimensions of it for each lane. The code is short: where a call ends with it, much of its time goes into fetching
// instructions.
#include "../exchange.cuh"
#include "instances.h"
#include "partials.cuh"

namespace paged_attn {
namespace {

constexpr int kWarps = kCombineThreads / kWarp;

// What the warps of a block have added up.
struct SharedSums {
  float2 ml[kWarps][kWarp];
  float4 acc[kWarps][kWarp];
};
static_assert(sizeof(SharedSums) == kCombineSharedBytes, "as the host counts");

// The partials of splits first, first + step, ... of a row.
PD_DEVICE RowSum sum_partials(const Problem& p, const PrefillCall& call, int splits, int token, int q_head, int quad,
                              int first, int step) {
  constexpr int kBatch = 4;  // partials whose loads are on their way together
  RowSum sum;
#pragma unroll 1
  for (; first < splits; first += kBatch * step) {
    float2 ml[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      ml[i] = make_float2(-INFINITY, 0.f);
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + i * step >= splits) continue;
      const int64_t row = partial_index(p, first + i * step, token, q_head);
      ml[i] = call.ml[row];
      values[i] = reinterpret_cast<const float4*>(call.sums + row * p.head_dim_v)[quad];
    }
    sum.add(ml, values);
  }
  return sum;
}

__global__ void __launch_bounds__(kCombineThreads)
    prefill_combine(const __grid_constant__ Problem p, const __grid_constant__ PrefillCall call) {
  __shared__ SharedSums shared_sums;
  touch(p);
  touch(call);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, together = call.combine_warps;
  const int member = warp & (together - 1);
  const int q_heads = static_cast<int>(p.q_heads), group = static_cast<int>(p.group);
  const int quads = static_cast<int>(p.head_dim_v / 4);
  // Blocks start one by one while those of the prefill kernel end. Where no keys were cut they make room at once for
  // those of the next kernel; the first one waits, so that this kernel does not end before the prefill kernel.
  let_successor_start();
  if (call.looks_early && blockIdx.x > 0 && load_relaxed(call.cut) == 0) return;
  wait_for_predecessor();
  const bool cut = load_relaxed(call.cut) != 0;
  // 32 bits suffice: there are no more rows than those of a few tiles for every multiprocessor.
  const int warps = static_cast<int>(p.total_q) * q_heads * together;
#pragma unroll 1
  for (int begin = blockIdx.x * kWarps; begin < warps; begin += gridDim.x * kWarps) {
    const int row = (begin + warp) / together;
    const int token = min(row / q_heads, static_cast<int>(p.total_q) - 1), q_head = row - row / q_heads * q_heads;
    const int head = call.group.divide(q_head);
    // Nobody has written what row_splits says of a row that belongs to no request.
    const int2 word = call.row_splits[token * q_heads + q_head];
    const int splits = word.x > 1 ? min(word.x, call.most_splits) : 0;  // 1: the row is written
    if (!cut) return;  // only here, so that the loads of both are on their way together
    Item item = {};
    item.b = min(max(word.y, 0), static_cast<int>(p.batch) - 1);
    item.q_begin = query_begin(p, item.b);
    const int first = first_token(p, item);
    const bool exists =
        splits > 0 && row / q_heads == token && token >= first && token - first < query_length(p, item.b);
    item.first_row = (token - first) * group;
#pragma unroll 1
    for (int first_quad = 0; first_quad < quads; first_quad += kWarp) {
      const int quad = first_quad + lane;
      RowSum sum = sum_partials(p, call, splits, token, q_head, min(quad, quads - 1), member, together);
      if (together > 1) {
        __syncthreads();  // the sums of the quads before have been read
        shared_sums.ml[warp][lane] = make_float2(sum.m, sum.l);
        shared_sums.acc[warp][lane] = make_float4(sum.acc[0], sum.acc[1], sum.acc[2], sum.acc[3]);
        __syncthreads();
        if (member > 0) continue;
        float2 ml[kMostTogether];
        float4 values[kMostTogether];
#pragma unroll
        for (int i = 0; i < kMostTogether; ++i) {
          ml[i] = i < together ? shared_sums.ml[warp + i][lane] : make_float2(-INFINITY, 0.f);
          values[i] = i < together ? shared_sums.acc[warp + i][lane] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        sum = {};
        sum.add(ml, values);
      }
      if (!exists || quad >= quads) continue;
      write_output<2>(p, call, item, head, q_head - head * group, quad, sum);
    }
  }
}

}  // namespace

const void* prefill_combine_kernel() { return reinterpret_cast<const void*>(&prefill_combine); }

}  // namespace paged_attn
