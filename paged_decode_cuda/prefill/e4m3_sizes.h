// Sizes of the prefill kernel for 8-bit q and an 8-bit cache, beside those of sizes.h.
#pragma once

#include "sizes.h"

namespace paged_attn {

// The matrix unit takes 8-bit values only with their keys side by side, so a producer warp transposes the tiles of
// values that the others have copied.
template <int kDim_, int kDimV_, int kConsumers_, int kStepKeys_, bool kOverlaps_ = true>
struct PrefillE4m3Sizes {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kKeys = 128;
  static constexpr int kStepKeys = kStepKeys_;  // that a consumer takes at a time
  static constexpr int kPartDims = 64;          // of the sums, that are made at a time
  static constexpr int kElementBytes = 1, kColumnDims = kRowBytes / kElementBytes;
  static constexpr int kColumns = (kDim + kColumnDims - 1) / kColumnDims;
  static constexpr int kColumnsV = (kDimV + kColumnDims - 1) / kColumnDims;
  static constexpr int kConsumers = kConsumers_;  // warpgroups, 64 rows each
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr bool kOwnDirector = false;  // no warpgroup is left for it
  static constexpr int kGatherers = 2;         // warps that copy where pages hold no box
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr bool kNarrow = false;  // the cache has 8 bits, but is multiplied as it is
  static constexpr int kKeyStages = 3, kValueStages = 2, kTransposedStages = 3;
  static constexpr int kQueryStages = 2;
  // A consumer issues the scores of the next step beside the product of this one's weights. Without that it needs fewer
  // registers, and more consumers fill each other's waits.
  static constexpr bool kOverlaps = kOverlaps_;

  // Registers of a thread; three warpgroups together have 504, four of them 512, five 480.
  static constexpr int kProducerRegisters = kConsumers == 4 ? 64 : kConsumers == 2 ? 72 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 104 : kConsumers == 2 ? 216 : 152;

  static constexpr int kQueryBytes = kRows * kColumns * kRowBytes;
  static constexpr int kKeyBytes = kKeys * kColumns * kRowBytes, kValueBytes = kKeys * kColumnsV * kRowBytes;
  static constexpr int kTransposedBytes = kDimV * kRowBytes;
  static constexpr int kKeysAt = kQueryStages * kQueryBytes, kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kTransposedAt = kValuesAt + kValueStages * kValueBytes;
  static constexpr int kEnd = kTransposedAt + kTransposedStages * kTransposedBytes;
  static constexpr int kSharedBytes = kEnd + kBlockBytes;  // its start is aligned by hand
  static_assert(kDim % 32 == 0 && kDimV % kPartDims == 0, "whole products");
  static_assert(kColumns == 1 && kColumnsV == 1 && kKeys == kRowBytes, "a row is one of shared memory");
};

using PrefillE4m3Sizes64 = PrefillE4m3Sizes<64, 64, 3, 64>;
using PrefillE4m3Sizes128 = PrefillE4m3Sizes<128, 128, 2, 128>;
// Where there are rows enough, see plan.cpp:
using TallPrefillE4m3Sizes64 = PrefillE4m3Sizes<64, 64, 4, 64, false>;
using TallPrefillE4m3Sizes128 = PrefillE4m3Sizes<128, 128, 3, 64, false>;

// For dimensions up to 128. all_scores: with softcap or ALiBi, which tall tiles do without, as in 16 bits.
inline PrefillInstance find_prefill_e4m3_instance(int64_t head_dim, int64_t head_dim_v, bool all_scores, bool tall) {
  const int64_t larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  tall = tall && !all_scores;
  if (larger <= 64) return tall ? prefill_instance<TallPrefillE4m3Sizes64>() : prefill_instance<PrefillE4m3Sizes64>();
  return tall ? prefill_instance<TallPrefillE4m3Sizes128>() : prefill_instance<PrefillE4m3Sizes128>();
}

}  // namespace paged_attn
