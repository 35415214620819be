// The end of a segment in a block of warpgroups.
#pragma once

#include <type_traits>

#include "segment_end.cuh"
#include "wgmma_wide_end.cuh"

namespace paged_attn {

// What the consumers of a block published. The warps of one have the same m, and l of different keys.
template <typename Shape>
struct WgmmaSums {
  char* sums;
  const float2* ml;

  PD_MEMBER RowSum of(int row, int quad) const {
    constexpr int kWarps = Shape::kWarps;
    float2 both[Shape::kConsumers];
    float4 values[Shape::kConsumers];
#pragma unroll
    for (int j = 0; j < Shape::kConsumers; ++j) {
      both[j] = ml[j * kWarps * Shape::kRows + row];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) both[j].y += ml[(j * kWarps + w) * Shape::kRows + row].y;
      values[j] = *WgmmaRows<Shape>::quad_of(sums + j * Shape::kSumBytes, row, quad);
    }
    RowSum sum;
    sum.add(both, values);
    return sum;
  }
};

// For items of 8 and 16 rows: as in blocks of warps.
template <typename Shape>
struct NarrowWgmmaEnd {
  char* const shared;

  // What is computed when a segment begins.
  using Merge = Sharing;
  static PD_MEMBER Merge begin(const Item& item, const Segment& segment, const Dealing& dealing) {
    return share_merge<Shape>(item, segment, dealing);
  }

  PD_MEMBER void finish(const Problem& p, const Plan& plan, const Item& item, const Segment& segment, const Dealing&,
                        const Merge& merge, WgmmaRows<Shape>& rows) const {
    char* const sums = shared + Shape::kSumsAt;
    float2* const ml = reinterpret_cast<float2*>(shared + Shape::kMlAt);
    RowSum* const group_sums = reinterpret_cast<RowSum*>(shared + Shape::kGroupSumsAt);
    rows.sync();  // the weights are used up
    rows.publish(sums + Shape::consumer() * Shape::kSumBytes, ml + threadIdx.x / kWarp * Shape::kRows);
    Shape::end_sync();
    finish_segment<Shape>(p, plan, item, segment, merge, WgmmaSums<Shape>{sums, ml}, group_sums);
    Shape::end_sync();
  }
};

template <typename Shape>
using WgmmaEnd = std::conditional_t<Shape::kWide, WideWgmmaEnd<Shape>, NarrowWgmmaEnd<Shape>>;

}  // namespace paged_attn
