// Adds the parts of rows whose keys were in several clusters, and writes them.
//
// Four teams of 128 threads, four dimensions of a row for each thread. A team has a row of its own, or, where rows are
// few and parts many, all four share one.
#include "../exchange.cuh"
#include "instances.h"
#include "shape.cuh"

namespace paged_attn {
namespace {

constexpr int kTeams = kCombineThreads / kCombineTeam;
constexpr int kBatch = 4;  // parts whose loads are on their way together

// Parts first, first + step, ... of a row.
PD_DEVICE RowSum add_parts(const MlaCall& call, const MlaRecord& record, int row, int quad, int first, int step) {
  RowSum sum;
  const int rank = row / MlaSizes::kRows, own = row % MlaSizes::kRows;
#pragma unroll 1
  for (; first <= record.behind; first += step * kBatch) {
    float2 ml[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int behind = first + i * step;
      ml[i] = make_float2(-INFINITY, 0.f);
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (behind > record.behind) continue;
      const int64_t place = int64_t{mla_part(call, record.first - behind, rank, behind == 0)} * MlaSizes::kRows + own;
      ml[i] = call.ml[place];
      values[i] = reinterpret_cast<const float4*>(call.sums + place * MlaSizes::kLatents)[quad];
    }
    sum.add(ml, values);
  }
  return sum;
}

__global__ void __launch_bounds__(kCombineThreads)
    mla_combine(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  __shared__ RowSum shared_sums[kTeams][kCombineTeam];
  wait_for_predecessor();
  let_successor_start();
  const int team = threadIdx.x / kCombineTeam, quad = threadIdx.x % kCombineTeam;
  const int rows = call.combine_rows, sharing = kTeams / rows;  // teams of a row
  const int place = static_cast<int>(blockIdx.x) * rows + team % rows;
  const int pair = place >> call.row_shift, row = place - (pair << call.row_shift), share = team / rows;
  const int index = call.kv_heads.divide(pair), head = pair - index * static_cast<int>(p.kv_heads);
  const Item item = load_item(p, call, index);
  MlaRecord record = {};
  if (row < item.rows) record = call.records[pair];  // of an item without rows nobody has written one
  const bool cut = record.behind > 0;
  RowSum sum;
  if (cut) sum = add_parts(call, record, row, quad, share, sharing);
  if (sharing > 1) {
    if (share > 0) shared_sums[team][quad] = sum;
    __syncthreads();
#pragma unroll 1
    for (int other = team + rows; share == 0 && other < kTeams; other += rows) {
      const RowSum& more = shared_sums[other][quad];
      const float2 ml[1] = {make_float2(more.m, more.l)};
      const float4 values[1] = {make_float4(more.acc[0], more.acc[1], more.acc[2], more.acc[3])};
      sum.add(ml, values);
    }
  }
  if (cut && share == 0) write_output<true>(p, call, item, head, row, quad, sum);
}

}  // namespace

const void* mla_combine_kernel() { return reinterpret_cast<const void*>(&mla_combine); }

}  // namespace paged_attn
