// The end of a segment: the sums of the warps become those of the block, other blocks' partials are added, and the rows
// or a partial of them are written.
//
//     warps      0  1  2  3    their sums lie in the stage that each has free
//                 \  \/  /
//     block         sum  <---  partials of the blocks before this one, if it has the first keys
//                    |
//            output and lse,   or, if another block has the first keys, a partial for that
#pragma once

#include "../exchange.cuh"
#include "sizes.h"

namespace paged_attn {

static_assert(sizeof(RowSum) == kRowSumBytes, "what a thread leaves");

// What the warps of a block published. free_stages: which stage of each warp's queue holds its accumulators.
template <typename Shape, typename Rows>
struct WarpSums {
  char* queues;
  const int* free_stages;
  const float2* shared_ml;

  // Four dimensions of a row, kBatch warps at a time.
  template <int kBatch>
  PD_MEMBER RowSum in_batches(int row, int quad) const {
    const int warps = blockDim.x / kWarp;
    RowSum sum;
#pragma unroll 1
    for (int first = 0; first < warps; first += kBatch) {
      float2 ml[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int w = first + j;
        ml[j] = shared_ml[w * Shape::kRows + row];
        values[j] = *Rows::quad_of(
            queues + w * Shape::kQueueBytes + free_stages[w] * Shape::kStageBytes + Shape::kSumsAt, row, quad);
      }
      sum.add(ml, values);
    }
    return sum;
  }

  // All warps of the biggest block at once, since a batch takes 0.14 us. Smaller blocks have a multiple of kWarps, or
  // any number of warps where shared memory is scarce.
  PD_MEMBER RowSum of(int row, int quad) const {
    if (blockDim.x == Shape::kMostWarps * kWarp) return in_batches<Shape::kMostWarps>(row, quad);
    return blockDim.x % (Shape::kWarps * kWarp) == 0 ? in_batches<Shape::kWarps>(row, quad) : in_batches<1>(row, quad);
  }
};

// How the threads of a block share the merge of a segment. Each takes four dimensions of a row at a time; where threads
// are left over, groups of them share the partials. It is computed when the segment begins, as the end is in a hurry.
struct Sharing {
  Partials partials;  // of other blocks, to be added
  int groups;
};

template <typename Shape>
PD_DEVICE Sharing share_merge(const Item& item, const Segment& segment, const Dealing& dealing) {
  // Where there are many more partials than a block can look at in one go, they are merged in two levels: some blocks
  // add their own partial and those of the blocks before them. Rows that take several rounds look several times.
  constexpr int kManyBatches = 3;
  const int lines = dealing.lines, threads = Shape::end_threads(), pieces = item.rows * Shape::kQuads;
  Sharing sharing = {{0, lines, lines}, 1};
  const int many = (pieces <= threads ? kManyBatches : 1) * kPartialsAtOnce * dealing.length;
  if (!segment.first && item.tiles <= many) return sharing;
  const int behind = partials_behind(item, segment, dealing);
  if (behind == 0) return sharing;
  while ((sharing.groups + 1) * pieces <= threads) ++sharing.groups;
  const int fan = kPartialsAtOnce * sharing.groups + 1;
  const bool two_levels = item.tiles > many * sharing.groups;
  if (segment.first) {
    sharing.partials = {two_levels ? (behind - 1) / fan + 1 : behind, (two_levels ? fan : 1) * lines, lines};
  } else if (two_levels && (segment.tile - item.first_tile - 1) / dealing.length % fan == 0) {
    sharing.partials.count = min(behind, fan - 1);
  }
  sharing.groups = max(min(sharing.groups, sharing.partials.count), 1);
  return sharing;
}

// Merges what was published in this block with the partials that it adds; writes the rows or their partial.
template <typename Shape, typename Published>
PD_DEVICE void finish_segment(const Problem& p, const Plan& plan, const Item& item, const Segment& segment,
                              const Sharing& sharing, const Published& published, RowSum* shared_sums) {
  constexpr int kQuads = Shape::kQuads;
  const int threads = Shape::end_threads(), thread = threadIdx.x, pieces = item.rows * kQuads, groups = sharing.groups;
#pragma unroll 1
  for (int first = 0; first < pieces * groups; first += threads) {
    int row = (first + thread) / kQuads, group = 0;
    const int quad = (first + thread) % kQuads;
    while (row >= item.rows && group < groups) {
      row -= item.rows;
      ++group;
    }
    const bool exists = group < groups && quad * 4 < p.head_dim_v;  // others are only in the team of such a thread
    RowSum sum;
    if (exists && group == 0) sum = published.of(row, quad);
    if (group < groups) {
      add_partials<Shape::kCallsNothing>(plan, group, groups, sharing.partials, row, quad, sum);
    }
    if (groups > 1) {
      // One round, in which all threads are.
      if (group > 0) shared_sums[thread] = sum;
      Shape::end_sync();
#pragma unroll 1
      for (int g = 1; g < groups && group == 0; ++g) {
        const RowSum& other = shared_sums[thread + g * pieces];
        const float2 ml[1] = {make_float2(other.m, other.l)};
        const float4 values[1] = {make_float4(other.acc[0], other.acc[1], other.acc[2], other.acc[3])};
        sum.add(ml, values);
      }
    }
    if (!exists || group > 0) continue;
    if (segment.first) {
      write_output<Shape::kOutputBytes>(p, plan, item, segment.head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

}  // namespace paged_attn
