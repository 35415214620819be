// Sizes of the prefill kernel for 16-bit q over an 8-bit cache, beside those of sizes.h.
#pragma once

#include "sizes.h"

namespace paged_attn {

// The warps that would copy widen instead. One more warpgroup shares their work up to head_dim 128. Above that
// consumers need its registers.
template <typename Sizes>
struct PrefillNarrowSizes : Sizes {
  static constexpr bool kNarrow = true;  // the cache has 8 bits, which are widened to 16
  static constexpr bool kFourWarpgroups = Sizes::kDim <= 128;
  static constexpr int kFirstWideners = 3;  // in the first warpgroup, beside the director
  static constexpr int kWideners = kFirstWideners + (kFourWarpgroups ? 4 : 0);
  static constexpr bool kOwnDirector = false;
  static constexpr int kThreads = (1 + Sizes::kConsumers + kFourWarpgroups) * kWarpgroup;

  // Registers of a thread; four warpgroups together have 512, three have 504.
  static constexpr int kProducerRegisters = kFourWarpgroups ? 64 : 72;
  static constexpr int kConsumerRegisters = kFourWarpgroups ? 192 : 216;

  // Three stages of values, so that wideners need not wait for consumers. One of queries and two of keys make room.
  static constexpr bool kMoreValues = Sizes::kDim > 64 && Sizes::kDim <= 128;
  static constexpr int kQueryStages = kMoreValues ? 1 : Sizes::kQueryStages;
  static constexpr int kKeyStages = Sizes::kDim > 64 ? 2 : 3;
  static constexpr int kValueStages = kMoreValues ? 3 : Sizes::kValueStages;
  static constexpr int kKeysAt = kQueryStages * Sizes::kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kKeyStages * Sizes::kKeyBytes;

  // Behind the stages every widener has slots for what comes: so many runs of 8 rows of 8-bit values.
  static constexpr int kMostColumns = Sizes::kColumns > Sizes::kColumnsV ? Sizes::kColumns : Sizes::kColumnsV;
  static constexpr int kStagedRuns = kMostColumns == 3 ? 2 : 4;
  static constexpr int kWidenerBytes = kStagedRuns * kSwizzledRows * kMostColumns * kColumn;
  static constexpr int kSlotsAt = kValuesAt + kValueStages * Sizes::kValueBytes;
  static constexpr int kSharedBytes = kSlotsAt + kWideners * kWidenerBytes + kBlockBytes;
};

// For dimensions up to 256: of the sizes that have all kernels.
inline PrefillInstance find_prefill_narrow_instance(int64_t head_dim, int64_t head_dim_v) {
  switch (find_prefill_instance(head_dim, head_dim_v, true, false).head_dim) {
    case 64: return prefill_instance<PrefillNarrowSizes<PrefillSizes64>>();
    case 128: return prefill_instance<PrefillNarrowSizes<PrefillSizes128>>();
    case 192: return prefill_instance<PrefillNarrowSizes<PrefillSizes192x128>>();
    default: return prefill_instance<PrefillNarrowSizes<PrefillSizes256>>();
  }
}

}  // namespace paged_attn
