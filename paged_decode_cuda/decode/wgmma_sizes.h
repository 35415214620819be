// The sizes of the decode kernel of warpgroups, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include "../hopper.h"
#include "sizes.h"

namespace paged_attn {

// What is said of the rows of a wide item at the end of a segment, see wgmma_wide_end.cuh.
template <int kRows>
struct WgmmaTables {
  static constexpr int kConsumers = 2, kWarps = kWarpgroup / kWarp;
  static constexpr int kMostPartials = 16;                             // at a time
  int64_t place[kRows];                                                // in the output
  float base[kConsumers][kRows], l[kConsumers][kWarps][kRows];         // of the sums of a consumer, and of its warps
  float others[kMostPartials][kRows], others_l[kMostPartials][kRows];  // (m, l) of partials, then their factors
  float own[kConsumers][kRows], normalizer[kRows];                     // factors of the consumers' sums, and of all
};

// For caches of 16 bits. kHeadDim_: the class of head_dim, 64, 128 or 256. kRowTiles: tiles of 8 rows.
template <int kHeadDim_, int kRowTiles>
struct WgmmaSizes {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kQuads = kHeadDim / 4;   // of dimensions of a row
  static constexpr int kPieces = kHeadDim / 8;  // of 16 bytes of a row
  static constexpr int kRows = 8 * kRowTiles, kRowShift = kRowTiles == 4 ? 5 : 2 + kRowTiles;
  static constexpr bool kWide = kRowTiles > 2;  // segments end in another way, see wgmma_wide_end.cuh
  // The line counts units of 16 keys. A stage holds K and V of 64 keys, 16 of each warp.
  static constexpr int kTileShift = 4, kUnitKeys = 1 << kTileShift;
  static constexpr int kKeys = 64, kUnits = kKeys / kUnitKeys;
  static constexpr int kStageBytesK = kKeys * kHeadDim * 2, kStageBytes = 2 * kStageBytesK;
  static constexpr int kConsumers = 2;  // warpgroups; one more copies
  static constexpr int kEndThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kEndThreads + kWarpgroup;

  // Shared memory. The weights of a consumer, until its sums take their place, or those that the other one gives it,
  // are in two buffers in turns: a warp may be a tile ahead of another one that still multiplies.
  static constexpr int kQueryBytes = kRows * kHeadDim * 2, kQueryBuffers = 2;
  static constexpr int kWeightBytes = kRows * kKeys * 2;
  static constexpr int kAllSumBytes = kRows * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr int kWideSumBytes = kAllSumBytes / 2 > 2 * kWeightBytes ? kAllSumBytes / 2 : 2 * kWeightBytes;
  static constexpr int kSumBytes = kWide ? kWideSumBytes : kAllSumBytes;
  // Besides: (m, l) of each warp, and what groups of threads have summed; or rows of the output, and what is said of
  // rows.
  static constexpr int kMlBytes = kEndThreads / kWarp * kRows * 2 * static_cast<int>(sizeof(float));
  static constexpr int kStagedBytes = kRows * kHeadDim * 2;
  static constexpr int kEndBytes =
      kWide ? kStagedBytes + static_cast<int>(sizeof(WgmmaTables<kRows>)) : kMlBytes + kEndThreads * kRowSumBytes;
  // What the kernel declares besides, and to begin at a multiple of kBlockBytes.
  static constexpr int kStaticBytes = kWide ? 2048 : 1024;
  static constexpr int kMostStages = 6 * 128 / kHeadDim;
  static constexpr int kStagesThatFit =
      (227 * 1024 - kQueryBuffers * kQueryBytes - kConsumers * kSumBytes - kEndBytes - kStaticBytes) / kStageBytes;
  static constexpr int kStages = kStagesThatFit < kMostStages ? kStagesThatFit : kMostStages;
  static constexpr int kQueriesAt = kStages * kStageBytes;
  static constexpr int kSumsAt = kQueriesAt + kQueryBuffers * kQueryBytes;
  static constexpr int kEndAt = kSumsAt + kConsumers * kSumBytes;
  static constexpr int kMlAt = kEndAt, kGroupSumsAt = kMlAt + kMlBytes;           // of few rows
  static constexpr int kStagedAt = kEndAt, kTablesAt = kStagedAt + kStagedBytes;  // of wide items
  static constexpr int kBytes = kEndAt + kEndBytes;
  static_assert(2 * kWeightBytes <= kSumBytes, "the weights fit");
};

// The same as numbers, for the planner. All of the shared memory is of the block.
template <int kHeadDim, int kRowTiles>
constexpr DecodeInstance wgmma_instance() {
  using Sizes = WgmmaSizes<kHeadDim, kRowTiles>;
  constexpr int kWarps = Sizes::kThreads / kWarp;
  return {2, Sizes::kHeadDim,     kRowTiles,     Sizes::kRows, Sizes::kRowShift, Sizes::kTileShift, kWarps, 1, kWarps,
          0, Sizes::kStaticBytes, Sizes::kBytes, true};
}

template <int kHeadDim>
DecodeInstance find_wgmma_instance(int row_tiles) {
  switch (row_tiles) {
    case 1: return wgmma_instance<kHeadDim, 1>();
    case 2: return wgmma_instance<kHeadDim, 2>();
    default: return wgmma_instance<kHeadDim, 4>();
  }
}

// The instance for head_dim up to 256, the larger of head_dim and head_dim_v. Two row tiles of 256 would not fit.
inline DecodeInstance find_wgmma_instance(int64_t head_dim, int row_tiles) {
  if (head_dim > 128) return wgmma_instance<256, 1>();
  return head_dim <= 64 ? find_wgmma_instance<64>(row_tiles) : find_wgmma_instance<128>(row_tiles);
}

}  // namespace paged_attn
