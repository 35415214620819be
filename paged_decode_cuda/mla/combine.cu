// The combine kernel: adds the partials of rows whose keys were in several clusters, and writes them.
//
// A share is 32 columns of 16 rows: what a warp loads of a partial is 512 bytes at a time, as the partials lie in
// memory. A warp takes share after share. Where the whole call has few, the warps of a block have one together, each
// with some of its partials. So they do too for the few requests of a batch that are much longer than the others, as
// one warp would still be adding their partials when all others are through. Both ways are the same code, as every
// instruction is fetched for the first time. Which rows have partials stands in the records of the clusters: every warp
// finds that out by itself. Where every pair has the same number of clusters, it knows which record it needs.
#include "../rows.cuh"
#include "instances.h"
#include "shape.cuh"

namespace paged_attn {
namespace {

// What was published is as if it had not been, for a replay of this launch.
PD_DEVICE void clear_published(const MlaCall& call) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < call.partial_count * 2;
       i += gridDim.x * blockDim.x) {
    store_relaxed(call.published + i, 0);
  }
}

// Some of the clusters, as a warp has them: lane i has a bit for each of 32 * i to 32 * i + 31.
struct ClusterSet {
  static constexpr int kWords = MlaSizes::kMostClusters / kWarp;
  unsigned has = 0;

  PD_MEMBER uint32_t count() const { return __reduce_add_sync(~0u, __popc(has)); }

  // Number `n` of them; -1: there are not so many.
  PD_MEMBER int find(int n) const {
    const int lane = threadIdx.x % kWarp;
    int found = -1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned word = __shfl_sync(~0u, has, i);
      const bool own = word >> lane & 1 && __popc(word & ((1u << lane) - 1)) == n;
      const unsigned bit = __ballot_sync(~0u, own);
      if (bit != 0) found = i * kWarp + __popc(bit - 1);
      n -= __popc(word);
    }
    return found;
  }
};

// Which clusters have left a record of partials to be added, as every warp finds out by itself.
struct RecordList {
  ClusterSet all, many;  // many: those with so many partials that a warp alone would be late

  PD_MEMBER void read(const MlaCall& call) {
    const int lane = threadIdx.x % kWarp, clusters = static_cast<int>(call.blocks.divisor);
    int behind[ClusterSet::kWords];
#pragma unroll
    for (int i = 0; i < ClusterSet::kWords; ++i) {
      const int cluster = i * kWarp + lane;
      behind[i] = cluster < clusters ? call.records[cluster].behind : 0;
    }
#pragma unroll
    for (int i = 0; i < ClusterSet::kWords; ++i) {
      const unsigned any = __ballot_sync(~0u, behind[i] > 0);
      const unsigned long_ones = __ballot_sync(~0u, behind[i] > MlaSizes::kCombineAlone);
      if (lane == i) all.has = any;
      if (lane == i) many.has = long_ones;
    }
  }
};

// Where every pair has the same number of clusters, if the lengths hardly differ; then the record says so.
PD_DEVICE int even_record(const MlaCall& call, int pair) {
  return (pair + 1) * static_cast<int>(call.blocks_each.divisor) - 1;
}

// Where the record of an item stands, of those that `set` has. -1: it has no partials to be added.
PD_DEVICE int record_of(const Problem& p, const MlaCall& call, const ClusterSet& set, int item) {
  return call.balanced ? set.find(item) : first_keys_block(p, call, item);
}

// A share of kSteps * 8 columns, or the sum of some of its partials, whose loads are on their way kBatch at a time. A
// lane has the rows lane / 4 and 8 below, and two columns of every step of 8.
struct CombineShare {
  static constexpr int kSteps = MlaSizes::kCombineSteps, kBatch = MlaSizes::kCombineBatch;
  static constexpr int kHalfSteps = MlaSizes::kDimV / 8;
  static constexpr int kShares = 2 * kHalfSteps / kSteps;                  // of 16 rows
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, acc[2][kSteps][2] = {};  // by row
  int rank, row, half, step;  // of a partial: row of this lane, first step of its half

  PD_MEMBER explicit CombineShare(int index) {
    const int rows16 = index / kShares, first = index % kShares * kSteps;
    rank = rows16 / (MlaSizes::kRows / 16);
    row = rows16 % (MlaSizes::kRows / 16) * 16 + threadIdx.x % kWarp / 4;
    half = first / kHalfSteps;
    step = first % kHalfSteps;
  }

  PD_MEMBER int row_of_item(int r) const { return rank * MlaSizes::kRows + row + 8 * r; }
  PD_MEMBER int first_row() const { return rank * MlaSizes::kRows + row / 16 * 16; }

  // Adds partials first, first + stride, ...
  PD_MEMBER void add(const MlaCall& call, int cluster, int behind, int first, int stride) {
#pragma unroll 1
    for (; first <= behind; first += stride * kBatch) {
      float2 ml[kBatch][2];
      float4 values[kBatch][kSteps];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // The last one stands in for those past the end, which are not added.
        const int own = min(first + i * stride, behind);
        const int64_t partial = mla_partial(call, cluster - own, rank, own == 0);
        const float4* const sums =
            mla_sums(call, partial, half) + step * kWarpgroup + row / 16 * kWarp + threadIdx.x % kWarp;
#pragma unroll
        for (int r = 0; r < 2; ++r) ml[i][r] = call.ml[partial * MlaSizes::kRows + row + 8 * r];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) values[i][j] = sums[j * kWarpgroup];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = m[r];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) top = fmaxf(top, ml[i][r].x);
        const float base = top == -INFINITY ? 0.f : top, factor = fast_exp2(m[r] - base);
        m[r] = top;
        l[r] *= factor;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          acc[r][j][0] *= factor;
          acc[r][j][1] *= factor;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * stride > behind) continue;
          const float weight = fast_exp2(ml[i][r].x - base);
          l[r] += ml[i][r].y * weight;
#pragma unroll
          for (int j = 0; j < kSteps; ++j) {
            acc[r][j][0] += (r == 0 ? values[i][j].x : values[i][j].z) * weight;
            acc[r][j][1] += (r == 0 ? values[i][j].y : values[i][j].w) * weight;
          }
        }
      }
    }
  }

  // Writes kCount steps of row r, from `first` on.
  template <int kCount>
  PD_MEMBER void write(const Problem& p, const MlaCall& call, const MlaRecord& record, int r, int first, float top,
                       float sum, const float (&values)[kCount][2]) const {
    if (row_of_item(r) >= record.rows) return;
    Item item = {};
    item.b = record.b;
    item.first_row = record.first_row;
    item.q_begin = record.q_begin;
    const int lane = threadIdx.x % 4, at = step + first;
    const RowTarget target = row_target(p, call, item, record.head, row_of_item(r));
    const bool says = half == 0 && at == 0 && lane == 0;
    const float factor = finish_row(p, target, item.b, record.head, top, sum, says);
    uint16_t* const out = static_cast<uint16_t*>(p.out) + target.out + half * MlaSizes::kDimV + at * 8 + lane * 2;
    const bool bf16 = p.q_dtype == DType::kBFloat16;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float x = values[j][0] * factor, y = values[j][1] * factor;
      *reinterpret_cast<uint32_t*>(out + j * 8) = bf16 ? pack_pair<true>(x, y) : pack_pair<false>(x, y);
    }
  }
};

// Of a share, what each warp of a block has added.
template <int kWarps>
struct WarpSums {
  float2 ml[kWarps][16], values[kWarps][2 * CombineShare::kSteps][kWarp];
};

// The warps of the block meet, each with the sum of some of its partials, and write the whole.
template <int kWarps>
PD_DEVICE void write_together(const Problem& p, const MlaCall& call, const MlaRecord& record, const CombineShare& share,
                              WarpSums<kWarps>& sums) {
  constexpr int kSteps = CombineShare::kSteps;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane % 4 == 0) sums.ml[warp][lane / 4 + 8 * r] = make_float2(share.m[r], share.l[r]);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      sums.values[warp][r * kSteps + j][lane] = make_float2(share.acc[r][j][0], share.acc[r][j][1]);
    }
  }
  __syncthreads();
  // One step of one row of each lane.
#pragma unroll 1
  for (int unit = warp; unit < 2 * kSteps; unit += kWarps) {
    const int r = unit / kSteps, row = lane / 4 + 8 * r;
    float top = -INFINITY, sum = 0.f, values[1][2] = {};
#pragma unroll
    for (int other = 0; other < kWarps; ++other) top = fmaxf(top, sums.ml[other][row].x);
    const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      const float2 ml = sums.ml[other][row], more = sums.values[other][unit][lane];
      const float weight = fast_exp2(ml.x - base);
      sum += ml.y * weight;
      values[0][0] += more.x * weight;
      values[0][1] += more.y * weight;
    }
    share.write(p, call, record, r, unit % kSteps, top, sum, values);
  }
}

// Before the work of a kernel here.
PD_DEVICE void start_combine(const Problem& p, const MlaCall& call) {
  touch(p);
  touch(call);
  wait_for_predecessor();
  let_successor_start();
  if (call.adds_two) clear_published(call);
}

// The number of a share is that of its item, then its own of the item's.
PD_DEVICE int item_of_share(const MlaCall& call, uint32_t number) {
  return static_cast<int>(number >> call.combine_shift);
}
PD_DEVICE int share_of_item(const MlaCall& call, uint32_t number) {
  return static_cast<int>(number & ((1u << call.combine_shift) - 1));
}

// A share for each warp. But shares of records with many partials are first, each for a block, the last block first:
// the first ones have most of the other shares. Where they would be more than two rounds of all blocks, they keep all
// warps busy anyway, and are as others.
__global__ void __launch_bounds__(kCombineManyThreads, MlaSizes::kCombineManyBlocks)
    mla_combine_many(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  constexpr int kWarps = kCombineManyThreads / kWarp;
  __shared__ WarpSums<kWarps> sums;
  const int warp = threadIdx.x / kWarp;
  RecordList list;
  start_combine(p, call);
  const bool even = call.blocks_each.divisor > 0 && call.records[even_record(call, 0)].even;
  uint32_t of_blocks = 0;
  if (call.balanced && !even) {
    list.read(call);
    of_blocks = list.many.count() << call.combine_shift;
    if (of_blocks > 2 * gridDim.x) of_blocks = 0;
    if (of_blocks > 0) list.all.has &= ~list.many.has;
  }
  uint32_t next_of_block = gridDim.x - 1 - blockIdx.x, next_of_warp = blockIdx.x * kWarps + warp;
#pragma unroll 1
  while (true) {
    const bool together = next_of_block < of_blocks;
    const uint32_t number = together ? next_of_block : next_of_warp;
    if (!together && number >= call.combine_shares) return;
    if (together) {
      next_of_block += gridDim.x;
    } else {
      next_of_warp += gridDim.x * kWarps;
    }
    const int item = item_of_share(call, number);
    const int cluster = even ? even_record(call, item) : record_of(p, call, together ? list.many : list.all, item);
    if (cluster < 0) continue;
    const MlaRecord record = call.records[cluster];
    CombineShare share(share_of_item(call, number));
    if (record.behind == 0 || share.first_row() >= record.rows) continue;
    share.add(call, cluster, record.behind, together ? warp : 0, together ? kWarps : 1);
    if (together) {
      write_together(p, call, record, share, sums);
      __syncthreads();  // the sums of the next share take their place
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) share.write(p, call, record, r, 0, share.m[r], share.l[r], share.acc[r]);
    }
  }
}

// A share for each block. kBlocks of them fit on a multiprocessor that has no work of the kernel before: those of fewer
// threads are there when the partials are, one of many has more loads on their way. Requests with very many partials
// have no way of their own here: every instruction is fetched for the first time, and code for them would cost all
// other requests more than it saves these.
template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mla_combine_few(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ WarpSums<kWarps> sums;
  CombineShare share(share_of_item(call, blockIdx.x));
  const int item = item_of_share(call, blockIdx.x);
  int cluster = even_record(call, item);
  start_combine(p, call);
  MlaRecord record = {};
  if (call.blocks_each.divisor > 0) record = call.records[cluster];
  if (!record.even) {
    RecordList list;
    if (call.balanced) list.read(call);
    cluster = record_of(p, call, list.all, item);
    if (cluster < 0) return;
    record = call.records[cluster];
  }
  if (record.behind == 0 || share.first_row() >= record.rows) return;
  share.add(call, cluster, record.behind, threadIdx.x / kWarp, kWarps);
  write_together(p, call, record, share, sums);
}

}  // namespace

const void* mla_combine_kernel(int threads, bool together) {
  if (!together) return reinterpret_cast<const void*>(&mla_combine_many);
  switch (threads) {
    case kCombineFewThreads: return reinterpret_cast<const void*>(&mla_combine_few<kCombineFewThreads, 2>);
    case kCombineMostThreads: return reinterpret_cast<const void*>(&mla_combine_few<kCombineMostThreads, 1>);
    default: return reinterpret_cast<const void*>(&mla_combine_few<kCombineThreads, MlaSizes::kCombineBlocks>);
  }
}

}  // namespace paged_attn
