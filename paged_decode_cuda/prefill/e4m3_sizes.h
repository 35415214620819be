// Sizes of the prefill kernel for 8-bit q and an 8-bit cache, beside those of sizes.h.
#pragma once

#include "sizes.h"

namespace paged_attn {

// The matrix unit takes 8-bit values only with their keys side by side, so a producer warp transposes the tiles of
// values that the others have copied. At head_dim 128 a consumer takes a tile of keys in two steps: with the scores of
// half a tile there are registers for three consumers.
template <int kDim_, int kDimV_, int kConsumers_>
struct PrefillE4m3Sizes {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kKeys = 128;
  static constexpr int kStepKeys = kDimV <= 64 ? kKeys : kKeys / 2;  // that a consumer takes at a time
  static constexpr int kElementBytes = 1, kColumnDims = kRowBytes / kElementBytes;
  static constexpr int kColumns = (kDim + kColumnDims - 1) / kColumnDims;
  static constexpr int kColumnsV = (kDimV + kColumnDims - 1) / kColumnDims;
  static constexpr int kConsumers = kConsumers_;  // warpgroups, 64 rows each
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr bool kOwnDirector = false;  // no warpgroup is left for it
  static constexpr int kGatherers = 2;         // warps that copy where pages hold no box
  static constexpr int kLeastBoxRows = kSwizzledRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  static constexpr int kKeyStages = 2, kValueStages = 2, kTransposedStages = 2;
  static constexpr int kQueryStages = 1;  // they go on into registers

  // The matrix unit adds 8-bit products with fewer bits than float32 has. So its sums are of so many tiles of keys, and
  // are then added to those of the tiles before.
  static constexpr int kTilesOfSum = 2;

  // Registers of a thread; three warpgroups together have 504, four of them 512.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 72 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 216 : 152;

  static constexpr int kQueryBytes = kRows * kColumns * kRowBytes;
  static constexpr int kKeyBytes = kKeys * kColumns * kRowBytes, kValueBytes = kKeys * kColumnsV * kRowBytes;
  static constexpr int kTransposedBytes = kDimV * kRowBytes;
  static constexpr int kKeysAt = kQueryStages * kQueryBytes, kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kTransposedAt = kValuesAt + kValueStages * kValueBytes;
  static constexpr int kSumsAt = kTransposedAt + kTransposedStages * kTransposedBytes;
  static constexpr int kEnd = kSumsAt + kRows * kDimV * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kEnd + kBlockBytes;  // its start is aligned by hand
  static_assert(kDim % 32 == 0 && kDimV % 32 == 0, "whole products and stores");
  static_assert(kColumns == 1 && kColumnsV == 1 && kKeys == kRowBytes, "a row is one of shared memory");
};

// With softcap or ALiBi a thread has no registers for a third consumer.
template <bool kAllScores>
using PrefillE4m3Sizes64 = PrefillE4m3Sizes<64, 64, 3>;
template <bool kAllScores>
using PrefillE4m3Sizes128 = PrefillE4m3Sizes<128, 128, kAllScores ? 2 : 3>;

template <bool kAllScores>
PrefillInstance find_prefill_e4m3_instance(int64_t largest_dim) {
  return largest_dim <= 64 ? prefill_instance<PrefillE4m3Sizes64<kAllScores>>()
                           : prefill_instance<PrefillE4m3Sizes128<kAllScores>>();
}

// For dimensions up to 128.
inline PrefillInstance find_prefill_e4m3_instance(int64_t largest_dim, bool all_scores) {
  return all_scores ? find_prefill_e4m3_instance<true>(largest_dim) : find_prefill_e4m3_instance<false>(largest_dim);
}

}  // namespace paged_attn
