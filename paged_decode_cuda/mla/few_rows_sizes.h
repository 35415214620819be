// Sizes of the kernel of latent attention for few rows over 16-bit caches, for the kernel and for the planner.
#pragma once

#include "sizes.h"

namespace paged_attn {

// kRowTiles: tiles of 8 rows.
template <int kRowTiles>
struct FewRowsSizes {
  static constexpr int kRows = 8 * kRowTiles, kRowShift = kRowTiles == 2 ? 4 : 5;
  static_assert(kRows == 1 << kRowShift);
  // The line counts units of 16 keys. A tile has four, one for each warp that copies.
  static constexpr int kTileShift = 4, kUnitKeys = 1 << kTileShift;
  static constexpr int kKeys = 64, kUnits = kKeys / kUnitKeys;
  static constexpr int kColumns = MlaSizes::kLatentColumns;  // of the sums
  // A tile is three parts in the ring: columns 0 to 2, 3 to 5, and 6 to 8, the last of which is no value.
  static constexpr int kParts = 3, kPartColumns = MlaSizes::kColumns / kParts;
  static_assert(kParts * kPartColumns == MlaSizes::kColumns);

  // A warpgroup multiplies, another one copies.
  static constexpr int kConsumerThreads = kWarpgroup, kThreads = 2 * kWarpgroup;

  // Shared memory: the ring, the queries, and two buffers of weights in turns, as a warp may be a tile ahead of another
  // one that still multiplies.
  static constexpr int kPartBytes = kPartColumns * kKeys * kRowBytes;
  static constexpr int kQueryBytes = kRows * MlaSizes::kColumns * kRowBytes, kWeightBytes = kRows * kKeys * 2;
  static constexpr int kStaticBytes = 2 * 1024;  // what the kernel declares besides
  static constexpr int kStages =
      (227 * 1024 - kStaticBytes - kBlockBytes - kQueryBytes - 2 * kWeightBytes) / kPartBytes;
  static constexpr int kQueriesAt = kStages * kPartBytes, kWeightsAt = kQueriesAt + kQueryBytes;
  static constexpr int kSharedBytes = kWeightsAt + 2 * kWeightBytes + kBlockBytes;  // its start is aligned by hand

  // What a pair costs besides its units, and units that are worth a block.
  static constexpr int kPairCost = kRowTiles == 2 ? 16 : 20, kMinUnits = kRowTiles == 2 ? 4 : 8;
};

}  // namespace paged_attn
