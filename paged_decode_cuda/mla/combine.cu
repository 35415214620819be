// Adds the parts of rows whose keys were in several clusters, and writes them, but for those that mla_kernel has added.
//
// A place is half of the columns of two rows, which a team of 128 threads adds, 16 bytes of every part each. A block
// has four teams. Each has a place of its own, or, where rows are few and parts many, all four share one.
#include "../rows.cuh"
#include "instances.h"
#include "shape.cuh"

namespace paged_attn {
namespace {

// Of two rows: reference score, sum of weights, and two columns.
struct PairSum {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, acc[4] = {};

  template <int kCount>
  PD_MEMBER void add(const float2 (&ml)[kCount][2], const float4 (&values)[kCount]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = m[r];
#pragma unroll
      for (int j = 0; j < kCount; ++j) top = fmaxf(top, ml[j][r].x);
      const float base = top == -INFINITY ? 0.f : top, factor = fast_exp2(m[r] - base);
      m[r] = top;
      l[r] *= factor;
      acc[2 * r] *= factor;
      acc[2 * r + 1] *= factor;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float weight = fast_exp2(ml[j][r].x - base);
        l[r] += ml[j][r].y * weight;
        acc[2 * r] += (r == 0 ? values[j].x : values[j].z) * weight;
        acc[2 * r + 1] += (r == 0 ? values[j].y : values[j].w) * weight;
      }
    }
  }
};

// Half of two rows of an item, 8 rows apart.
struct CombinePlace {
  int rank, row, half;  // row: of the block of that rank
  bool exists[2];

  PD_MEMBER CombinePlace(int index, const Item& item) {
    half = index % 2;
    const int rows = index / 2;  // 8 of them share 16 rows
    rank = rows / (MlaSizes::kRows / 2);
    row = rows % (MlaSizes::kRows / 2) / 8 * 16 + rows % 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) exists[r] = of_item(r) < item.rows;
  }

  PD_MEMBER int of_item(int r) const { return rank * MlaSizes::kRows + row + 8 * r; }
};

// Parts first, first + step, ...; kBatch: those whose loads are on their way together.
template <int kBatch>
PD_DEVICE PairSum add_parts(const MlaCall& call, const MlaRecord& record, const CombinePlace& place, int thread,
                            int first, int step) {
  PairSum sum;
  const int from = thread / 4 * kWarpgroup + place.row / 16 * kWarp + place.row % 8 * 4 + thread % 4;
#pragma unroll 1
  for (; first <= record.behind; first += step * kBatch) {
    float2 ml[kBatch][2];
    float4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int behind = first + i * step;
      ml[i][0] = ml[i][1] = make_float2(-INFINITY, 0.f);
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (behind > record.behind) continue;
      const int64_t part = mla_part(call, record.first - behind, place.rank, behind == 0);
      values[i] = mla_sums(call, part, place.half)[from];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (place.exists[r]) ml[i][r] = call.ml[part * MlaSizes::kRows + place.row + 8 * r];
      }
    }
    sum.add(ml, values);
  }
  return sum;
}

PD_DEVICE void write_pair(const Problem& p, const MlaCall& call, const Item& item, int head, const CombinePlace& place,
                          int thread, const PairSum& sum) {
  const bool bf16 = p.q_dtype == DType::kBFloat16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!place.exists[r]) continue;
    const RowTarget target = row_target(p, call, item, head, place.of_item(r));
    const bool says = place.half == 0 && thread == 0;
    const float factor = finish_row(p, target, item.b, head, sum.m[r], sum.l[r], says);
    const float x = sum.acc[2 * r] * factor, y = sum.acc[2 * r + 1] * factor;
    const int64_t out = target.out + place.half * MlaSizes::kDimV + thread / 4 * 8 + thread % 4 * 2;
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + out) =
        bf16 ? pack_pair<true>(x, y) : pack_pair<false>(x, y);
  }
}

// What was published is as if it had not been, for a replay of this launch.
PD_DEVICE void clear_published(const MlaCall& call) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineTeam + threadIdx.x; i < call.parts * 2;
       i += gridDim.x * kCombineTeam) {
    store_relaxed(call.published + i, 0);
  }
}

// kByCluster: the record is that of a cluster, and has parts.
template <int kTeams, int kBatch, bool kByCluster>
PD_DEVICE void combine_rows(const Problem& p, const MlaCall& call, int number, PairSum* shared_sums) {
  const int team = threadIdx.x / kCombineTeam, thread = threadIdx.x % kCombineTeam;
  const int entry = number >> call.row_shift;
  MlaRecord record = {entry, 0, 0};
  if (kByCluster) record = call.records[entry];
  const int index = call.kv_heads.divide(record.pair);
  const int head = record.pair - index * static_cast<int>(p.kv_heads);
  const Item item = load_item(p, call, index);
  const CombinePlace place(number - (entry << call.row_shift), item);
  if (!place.exists[0]) return;  // of an item without rows nobody has written a record
  if (!kByCluster) record = call.records[entry];
  if (record.behind == 0) return;
  PairSum sum = add_parts<kBatch>(call, record, place, thread, team, kTeams);
  if constexpr (kTeams > 1) {
    if (team > 0) shared_sums[team * kCombineTeam + thread] = sum;
    __syncthreads();
#pragma unroll 1
    for (int other = 1; team == 0 && other < kTeams; ++other) {
      const PairSum& more = shared_sums[other * kCombineTeam + thread];
      const float2 ml[1][2] = {{make_float2(more.m[0], more.l[0]), make_float2(more.m[1], more.l[1])}};
      const float4 values[1] = {make_float4(more.acc[0], more.acc[1], more.acc[2], more.acc[3])};
      sum.add(ml, values);
    }
  }
  if (team == 0) write_pair(p, call, item, head, place, thread, sum);
}

__global__ void __launch_bounds__(kCombineTeams* kCombineTeam)
    mla_combine_few(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  __shared__ PairSum shared_sums[kCombineTeams * kCombineTeam];
  wait_for_predecessor();
  let_successor_start();
  combine_rows<kCombineTeams, 8, false>(p, call, blockIdx.x, shared_sums);
}

__global__ void __launch_bounds__(kCombineTeam, 10)
    mla_combine_many(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  wait_for_predecessor();
  let_successor_start();
  combine_rows<1, 2, false>(p, call, blockIdx.x, nullptr);
}

// Most clusters have nothing to add: which of this block's places do is asked for all at once.
__global__ void __launch_bounds__(kCombineTeam, 10)
    mla_combine_rest(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  wait_for_predecessor();
  let_successor_start();
  clear_published(call);
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < MlaSizes::kCombinePlaces; ++i) {
    const int place = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
    if (place < call.combine_places && call.records[place >> call.row_shift].behind > 0) found |= 1u << i;
  }
#pragma unroll 1
  for (int place = blockIdx.x; found != 0; found >>= 1, place += gridDim.x) {
    if (found & 1) combine_rows<1, 2, true>(p, call, place, nullptr);
  }
}

}  // namespace

const void* mla_combine_kernel(MlaCombine which) {
  switch (which) {
    case MlaCombine::kFew: return reinterpret_cast<const void*>(&mla_combine_few);
    case MlaCombine::kMany: return reinterpret_cast<const void*>(&mla_combine_many);
    default: return reinterpret_cast<const void*>(&mla_combine_rest);
  }
}

}  // namespace paged_attn
