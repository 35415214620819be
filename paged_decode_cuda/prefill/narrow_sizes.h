// Sizes of the prefill kernel for 16-bit q over an 8-bit cache, beside those of sizes.h.
#pragma once

#include "sizes.h"

namespace paged_attn {

// The warps that would copy widen instead. One more warpgroup shares their work up to head_dim 128: it widens keys, and
// they widen values. Above that consumers need its registers.
template <typename Sizes>
struct PrefillNarrowSizes : Sizes {
  static constexpr bool kNarrow = true;
  static constexpr bool kApart = Sizes::kDim <= 128;  // other warps for keys than for values
  static constexpr int kKeyWideners = kApart ? 4 : 3, kValueWideners = kApart ? 3 : 0;
  static constexpr bool kOwnDirector = false;
  static constexpr int kThreads = (1 + Sizes::kConsumers + kApart) * kWarpgroup;

  // Registers of a thread; four warpgroups together have 512, three have 504.
  static constexpr int kProducerRegisters = kApart ? 64 : 72, kConsumerRegisters = kApart ? 192 : 216;
};

// For dimensions up to 256.
inline PrefillInstance find_prefill_narrow_instance(int64_t head_dim, int64_t head_dim_v) {
  PrefillInstance instance = find_prefill_instance(head_dim, head_dim_v, false);
  const bool apart = instance.head_dim <= PrefillSizes128::kDim;
  instance.threads =
      apart ? PrefillNarrowSizes<PrefillSizes128>::kThreads : PrefillNarrowSizes<PrefillSizes256>::kThreads;
  return instance;
}

}  // namespace paged_attn
