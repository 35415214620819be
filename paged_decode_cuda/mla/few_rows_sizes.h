// Sizes of the kernel for few rows of latents and for heads of 512, for the kernel and for the planner.
#pragma once

#include "sizes.h"

namespace paged_attn {

// kRowTiles: tiles of 8 rows. kLatents: a key is 576 numbers, the first 512 of which are its value; else keys and
// values are 512 numbers each, in tensors of their own.
template <int kRowTiles, bool kLatents_>
struct FewRowsSizes {
  static constexpr bool kLatents = kLatents_;
  static constexpr int kRows = 8 * kRowTiles, kRowShift = kRowTiles == 2 ? 4 : 5;
  static_assert(kRows == 1 << kRowShift);
  // The line counts units of 16 keys. A tile has four, one for each warp that copies.
  static constexpr int kTileShift = 4, kUnitKeys = 1 << kTileShift;
  static constexpr int kKeys = 64, kUnits = kKeys / kUnitKeys;
  // Columns of keys; of values, and so of the sums.
  static constexpr int kKeyColumns = kLatents ? MlaSizes::kColumns : 8, kColumns = MlaSizes::kLatentColumns;
  // A tile goes through the ring in parts. Of latents they are columns 0 to 2, 3 to 5, and 6 to 8, the last of which is
  // no value. Else they are two columns each, of the keys and then of the values.
  static constexpr int kPartColumns = kLatents ? 3 : 2, kKeyParts = kKeyColumns / kPartColumns;
  static constexpr int kParts = kLatents ? kKeyParts : kKeyParts + kColumns / kPartColumns;
  static_assert(kKeyParts * kPartColumns == kKeyColumns);

  // A warpgroup multiplies, another one copies.
  static constexpr int kConsumerThreads = kWarpgroup, kThreads = 2 * kWarpgroup;

  // Shared memory: the ring, the queries, and two buffers of weights in turns, as a warp may be a tile ahead of another
  // one that still multiplies.
  static constexpr int kPartBytes = kPartColumns * kKeys * kRowBytes;
  static constexpr int kQueryBytes = kRows * kKeyColumns * kRowBytes, kWeightBytes = kRows * kKeys * 2;
  static constexpr int kStaticBytes = 2 * 1024;  // what the kernel declares besides
  static constexpr int kStages =
      (227 * 1024 - kStaticBytes - kBlockBytes - kQueryBytes - 2 * kWeightBytes) / kPartBytes;
  static constexpr int kQueriesAt = kStages * kPartBytes, kWeightsAt = kQueriesAt + kQueryBytes;
  static constexpr int kSharedBytes = kWeightsAt + 2 * kWeightBytes + kBlockBytes;  // its start is aligned by hand

  // What a pair costs besides its units, and units that are worth a block.
  static constexpr int kPairCost = kRowTiles == 2 ? 16 : 20, kMinUnits = kRowTiles == 2 ? 4 : 8;
};

}  // namespace paged_attn
