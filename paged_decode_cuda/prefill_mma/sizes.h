// Sizes of the prefill_mma kernel, for the kernel and for the planner.
#pragma once

#include <stdint.h>

#include "../limits.h"

namespace paged_attn {

// kDim_, kDimV_: head_dim and head_dim_v rounded up to what is compiled. kKeys_: keys of a tile. A warp has kRowTiles_
// tiles of 16 rows. kStages_: places of tiles, see prefill_mma/loader.cuh. kGroup_: the weights of so many keys are
// computed between the products of the next ones; 0: after all. kHoldsQueries_: in registers. kWidens_: the cache has 8
// bits, and its tiles are widened to the 16-bit type of q in shared memory. kAllScores_: with softcap and ALiBi, for
// which the largest tiles leave no registers.
template <int kDim_, int kDimV_, int kKeys_, int kWarps_, int kRowTiles_, int kStages_, int kGroup_,
          bool kHoldsQueries_ = false, bool kWidens_ = false, bool kAllScores_ = true>
struct PrefillMmaSizes {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kKeys = kKeys_, kWarps = kWarps_, kRowTiles = kRowTiles_;
  static constexpr int kStages = kStages_, kGroup = kGroup_;
  static constexpr bool kGuesses = kGroup > 0, kHoldsQueries = kHoldsQueries_;
  static constexpr bool kWidens = kWidens_, kAllScores = kAllScores_;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kWarps > 4 ? 1 : 2;  // on a multiprocessor, as far as registers say

  // Rows in shared memory are pieces of 16 bytes; so many of them trade places, see prefill_mma/shape.cuh.
  static constexpr int kPieces = kDim / 8, kPiecesV = kDimV / 8;
  static constexpr int kTurned = kPieces % 8 == 0 && kPiecesV % 8 == 0 ? 8 : 4;
  static constexpr int kRowBytes = kPieces * 16, kRowBytesV = kPiecesV * 16;
  static constexpr int kKeysAt = kRows * kRowBytes, kValuesAt = kKeysAt + kKeys * kRowBytes;
  static constexpr int kTileBytes = kKeys * (kRowBytes + kRowBytesV);
  static constexpr int kRawKeysAt = kKeysAt + kStages / 2 * kTileBytes;  // of 8 bits, where tiles are widened
  static constexpr int kRawValuesAt = kRawKeysAt + (kWidens ? kKeys * kDim : 0);
  static constexpr int kControlAt = kRawValuesAt + (kWidens ? kKeys * kDimV : 0);
  static constexpr int kControlBytes = 992;
  static constexpr int kSharedBytes = kControlAt + kControlBytes;

  static constexpr int kCopyRows = 32 / kTurned;    // that a warp copies at a time
  static constexpr int kWarpKeys = kKeys / kWarps;  // of a tile, that a warp copies
  static_assert(kPieces % kTurned == 0 && kPiecesV % kTurned == 0, "pieces trade places within a row");
  static_assert(kKeys % 16 == 0 && kDim % 16 == 0 && kDimV % 32 == 0, "whole products and stores");
  static_assert(kStages == 2 || (kStages == 4 && !kWidens), "as the loaders have them");
  static_assert(kWarpKeys % kCopyRows == 0 && kWarpKeys <= 32, "a lane looks up one key of a tile");
};

// The same as numbers.
struct PrefillMmaInstance {
  int head_dim, keys;  // which it is
  bool widens, all_scores;
  int rows, threads, blocks, shared_bytes;
};

template <typename Sizes>
constexpr PrefillMmaInstance prefill_mma_instance() {
  return {Sizes::kDim,  Sizes::kKeys,    Sizes::kWidens, Sizes::kAllScores,
          Sizes::kRows, Sizes::kThreads, Sizes::kBlocks, Sizes::kSharedBytes};
}

using PrefillMmaSizes64 = PrefillMmaSizes<64, 64, 64, 4, 2, 4, 32, true>;
using PrefillMmaSizes96 = PrefillMmaSizes<96, 96, 64, 4, 2, 2, 32>;
using PrefillMmaSizes128 = PrefillMmaSizes<128, 128, 64, 4, 2, 2, 32, false, false, false>;
using PrefillMmaSmall128 = PrefillMmaSizes<128, 128, 32, 4, 2, 2, 32>;  // two in 100 KB, or softcap and ALiBi
using PrefillMmaSizes192 = PrefillMmaSizes<192, 128, 48, 4, 2, 2, 48>;
using PrefillMmaSizes256 = PrefillMmaSizes<256, 256, 48, 4, 1, 2, 0>;
using PrefillMmaSmall256 = PrefillMmaSizes<256, 256, 32, 8, 1, 2, 0>;  // where two of them have no place

using PrefillMmaWidens64 = PrefillMmaSizes<64, 64, 64, 4, 2, 2, 32, false, true>;
using PrefillMmaWidens128 = PrefillMmaSizes<128, 128, 32, 4, 2, 2, 32, false, true, false>;
using PrefillMmaWidens256 = PrefillMmaSizes<256, 256, 32, 8, 1, 2, 0, false, true>;

// Whether two blocks fit a multiprocessor.
template <typename Sizes>
bool two_blocks_fit(const DeviceLimits& limits) {
  return limits.shared_per_processor >= 2 * (Sizes::kSharedBytes + kSharedCostOfBlock);
}

// For dimensions up to 256 and a cache of `bytes` per element. all_scores: with softcap or ALiBi.
inline PrefillMmaInstance find_prefill_mma_instance(int64_t bytes, int64_t head_dim, int64_t head_dim_v,
                                                    bool all_scores, const DeviceLimits& limits) {
  const int64_t larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (bytes == 1) {
    if (larger <= 64) return prefill_mma_instance<PrefillMmaWidens64>();
    if (larger <= 128) return prefill_mma_instance<PrefillMmaWidens128>();
    return prefill_mma_instance<PrefillMmaWidens256>();
  }
  if (larger <= 64) return prefill_mma_instance<PrefillMmaSizes64>();
  if (larger <= 96) return prefill_mma_instance<PrefillMmaSizes96>();
  if (larger <= 128) {
    const bool large = two_blocks_fit<PrefillMmaSizes128>(limits) && !all_scores;
    return large ? prefill_mma_instance<PrefillMmaSizes128>() : prefill_mma_instance<PrefillMmaSmall128>();
  }
  if (head_dim <= 192 && head_dim_v <= 128) return prefill_mma_instance<PrefillMmaSizes192>();
  return two_blocks_fit<PrefillMmaSizes256>(limits) ? prefill_mma_instance<PrefillMmaSizes256>()
                                                    : prefill_mma_instance<PrefillMmaSmall256>();
}

}  // namespace paged_attn
