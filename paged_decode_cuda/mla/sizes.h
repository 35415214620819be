// Sizes of the kernel for multi-head latent attention, for the kernel and for the planner.
#pragma once

#include "../prefill/sizes.h"

namespace paged_attn {

// A key is 512 latents, which are its value too, and 64 dimensions with a rotary embedding. Both lie in one tile in
// shared memory: columns 0 to 7 are latents, column 8 is the rest.
struct MlaSizes {
  static constexpr int kLatents = 512, kRope = 64;
  static constexpr int kDim = kLatents + kRope;
  static constexpr int kDimV = kLatents / 2;  // that one consumer accumulates
  static constexpr int kRows = 64;            // of a block
  static constexpr int kKeys = 64;            // of a tile
  static constexpr int kLeastBox = 16;        // slots of a page from which on copies are boxes; of 8 bits 8
  static constexpr int kColumns = kDim / kColumn, kLatentColumns = kLatents / kColumn;
  static constexpr int kStages = 2, kHalves = 2;  // of a tile: latents 0 to 255, and the other columns
  static constexpr int kMostCluster = 2;          // blocks that share their copies

  static constexpr int kLoaders = 3;  // warps
  static constexpr int kConsumers = 2, kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr int kWeighers = 0;  // warpgroups that make weights for both consumers
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

  // Registers of a thread; the three warpgroups together have 504.
  static constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

  static constexpr int kQueryBytes = kRows * kColumns * kRowBytes, kKeyBytes = kKeys * kColumns * kRowBytes;
  static constexpr int kWeightBytes = kRows * kKeys * 2;
  static constexpr int kKeysAt = kQueryBytes, kWeightsAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kSharedBytes = kWeightsAt + kWeightBytes + kBlockBytes;  // its start is aligned by hand

  // The kernel that adds partials: blocks on a multiprocessor, partials whose loads are on their way at once, 8 columns
  // that a warp has of 16 rows, log2 of the warps that have all columns of 16 rows.
  static constexpr int kCombineBlocks = 4, kCombineBatch = 4, kCombineSteps = 4, kShareShift = 4;
  static_assert(1 << kShareShift == kLatents / 8 / kCombineSteps);
  static constexpr int kCombineManyBlocks = 2;  // those of the kernel for many rows, on a multiprocessor
  // There the warps of a block together add a row with more other partials than this: a warp alone would wait for four
  // batches or more.
  static constexpr int kCombineAlone = 3 * kCombineBatch;
  static constexpr int kMostClusters = 160;  // of a grid that balances
  static constexpr int kRowShift = 6, kTileShift = 6;
  // Tiles that a block reads while it ends one item and begins another, and how many are worth a block.
  static constexpr int kPairCost = 3, kMinUnits = 2;
  static constexpr int kLeastRowShift = 4;  // of items; a share of the adding kernel has as many rows
  static_assert(kRows == 1 << kRowShift && kKeys == 1 << kTileShift, "as the plan counts them");
};

// The same with 8-bit keys, which are widened in registers by the warps that multiply them, and with fewer rows too:
// what is multiplied with each operand is less then, and there is room for more tiles.
template <int kRows_, int kStages_>
struct NarrowSizes : MlaSizes {
  static constexpr int kRows = kRows_, kRowShift = kRows == 32 ? 5 : 6, kStages = kStages_;
  static_assert(kRows == 1 << kRowShift);
  static constexpr int kNarrowRow = kColumn;  // bytes of a key in one column
  static constexpr int kNarrowColumn = kKeys * kNarrowRow;
  static constexpr int kNarrowPieces = kDim / 16;  // of a key

  static constexpr int kWeighers = 1;
  static constexpr int kThreads = (1 + kConsumers + kWeighers) * kWarpgroup;
  static constexpr int kMeeting = kThreads - kWarpgroup;  // threads of consumers and weigher
  static constexpr int kGroups = kRows / 32;              // of 8 rows, of a warp of the weigher

  // The four warpgroups together have 512.
  static constexpr int kProducerRegisters = 48, kWeigherRegisters = 48, kConsumerRegisters = 208;

  static constexpr int kWeightBuffers = 2;
  static constexpr int kScoreRow = kRows * 4 + 32, kScoreGroup = 8 * kScoreRow + 32 * kGroups;  // of a key, of 8 keys
  static constexpr int kQueryBytes = kRows * kColumns * kRowBytes, kWeightBytes = kRows * kKeys * 2;
  static constexpr int kKeyBytes = kColumns * kNarrowColumn, kScoreBytes = kKeys / 8 * kScoreGroup;
  static constexpr int kKeysAt = kQueryBytes, kWeightsAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kScoresAt = kWeightsAt + kWeightBuffers * kWeightBytes;
  static constexpr int kSharedBytes = kScoresAt + kScoreBytes + kBlockBytes;
};

using NarrowMlaSizes = NarrowSizes<64, 3>;
using NarrowFewRowsSizes = NarrowSizes<32, 4>;  // of requests that have no more rows

}  // namespace paged_attn
