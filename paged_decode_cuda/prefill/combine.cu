// Adds the parts of rows whose keys were cut, and writes them: a warp per row, four dimensions of it for each lane.
#include "../exchange.cuh"
#include "instances.h"
#include "parts.cuh"

namespace paged_attn {
namespace {

// The request of a token of packed q; p.batch: of none.
PD_DEVICE int request_of(const Problem& p, int token) {
  int before = 0;
  for (int first = 0; first < p.batch; first += kWarp) {
    const int b = first + threadIdx.x % kWarp;
    before += __popc(__ballot_sync(~0u, b < p.batch && query_begin(p, b + 1) <= token));
  }
  return before;
}

PD_DEVICE RowSum add_parts(const Problem& p, const PrefillCall& call, int token, int q_head, int quad) {
  constexpr int kBatch = 8;  // parts whose loads are on their way together
  RowSum sum;
#pragma unroll 1
  for (int first = 0; first < call.parts; first += kBatch) {
    float2 ml[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      ml[i] = make_float2(-INFINITY, 0.f);
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + i >= call.parts) continue;
      const int64_t row = part_row(p, call, first + i, token, q_head);
      ml[i] = call.ml[row];
      values[i] = reinterpret_cast<const float4*>(call.sums + row * p.head_dim_v)[quad];
    }
    sum.add(ml, values);
  }
  return sum;
}

__global__ void __launch_bounds__(kCombineRows* kWarp)
    prefill_combine(const __grid_constant__ Problem p, const __grid_constant__ PrefillCall call) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t row = int64_t{blockIdx.x} * kCombineRows + threadIdx.x / kWarp;
  const int token = static_cast<int>(row / p.q_heads), q_head = static_cast<int>(row - token * p.q_heads);
  if (token >= p.total_q) return;
  Item item = {};
  item.b = p.cu_seqlens_q ? request_of(p, token) : static_cast<int>(token / p.max_q_len);
  if (item.b >= p.batch) return;
  item.q_begin = query_begin(p, item.b);
  const int first = p.cu_seqlens_q ? item.q_begin : item.b * static_cast<int>(p.max_q_len);
  const int group = static_cast<int>(p.group), head = call.group.divide(q_head);
  item.first_row = (token - first) * group;
  for (int quad = threadIdx.x % kWarp; quad * 4 < p.head_dim_v; quad += kWarp) {
    const RowSum sum = add_parts(p, call, token, q_head, quad);
    write_output<2>(p, call, item, head, q_head - head * group, quad, sum);
  }
}

}  // namespace

const void* prefill_combine_kernel() { return reinterpret_cast<const void*>(&prefill_combine); }

}  // namespace paged_attn
