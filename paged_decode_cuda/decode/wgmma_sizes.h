// The sizes of the decode kernel of warpgroups, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include "../prefill/sizes.h"
#include "sizes.h"

namespace paged_attn {

// For caches of 16 bits. kHeadDim_: the class of head_dim, 64, 128 or 256. kRowTiles: tiles of 8 rows.
template <int kHeadDim_, int kRowTiles>
struct WgmmaSizes {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kQuads = kHeadDim / 4;   // of dimensions of a row
  static constexpr int kPieces = kHeadDim / 8;  // of 16 bytes of a row
  static constexpr int kRowShift = 2 + kRowTiles, kRows = 1 << kRowShift;
  // The line counts units of 16 keys. A stage holds K and V of 64 keys, 16 of each warp.
  static constexpr int kTileShift = 4, kUnitKeys = 1 << kTileShift;
  static constexpr int kKeys = 64, kUnits = kKeys / kUnitKeys;
  static constexpr int kStageBytesK = kKeys * kHeadDim * 2, kStageBytes = 2 * kStageBytesK;
  static constexpr int kStages = 6 * 128 / kHeadDim;
  static constexpr int kConsumers = 2;  // warpgroups; one more copies
  static constexpr int kEndThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kEndThreads + kWarpgroup;

  // Shared memory. The weights of a consumer, until its sums take their place, are in two buffers in turns: a warp may
  // be a tile ahead of another one that still multiplies.
  static constexpr int kQueryBytes = kRows * kHeadDim * 2, kQueryBuffers = 2;
  static constexpr int kWeightBytes = kRows * kKeys * 2;
  static constexpr int kSumBytes = kRows * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr int kQueriesAt = kStages * kStageBytes;
  static constexpr int kSumsAt = kQueriesAt + kQueryBuffers * kQueryBytes;
  static constexpr int kMlAt = kSumsAt + kConsumers * kSumBytes;
  static constexpr int kMlBytes = kEndThreads / kWarp * kRows * 2 * static_cast<int>(sizeof(float));
  static constexpr int kGroupSumsAt = kMlAt + kMlBytes;
  static constexpr int kBytes = kGroupSumsAt + kEndThreads * DecodeSizes<2, kHeadDim, kRowTiles>::kSumBytes;
  // What the kernel declares besides, and to begin at a multiple of kBlockBytes.
  static constexpr int kStaticBytes = 1024;
  static_assert(2 * kWeightBytes <= kSumBytes, "the weights fit");
  static_assert(kBytes + kStaticBytes <= 227 * 1024, "a block of a Hopper GPU has no more");
};

// The same as numbers, for the planner. All of the shared memory is of the block.
template <int kHeadDim, int kRowTiles>
constexpr DecodeInstance wgmma_instance() {
  using Sizes = WgmmaSizes<kHeadDim, kRowTiles>;
  constexpr int kWarps = Sizes::kThreads / kWarp;
  return {2, Sizes::kHeadDim,     kRowTiles,     Sizes::kRows, Sizes::kRowShift, Sizes::kTileShift, kWarps, 1, kWarps,
          0, Sizes::kStaticBytes, Sizes::kBytes, true};
}

// The instance for head_dim up to 256, the larger of head_dim and head_dim_v. Two row tiles of 256 would not fit.
inline DecodeInstance find_wgmma_instance(int64_t head_dim, int row_tiles) {
  if (head_dim <= 64) return row_tiles == 1 ? wgmma_instance<64, 1>() : wgmma_instance<64, 2>();
  if (head_dim <= 128) return row_tiles == 1 ? wgmma_instance<128, 1>() : wgmma_instance<128, 2>();
  return wgmma_instance<256, 1>();
}

}  // namespace paged_attn
