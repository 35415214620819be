// Sizes of the prefill kernel, for the kernel and for the planner.
#pragma once

#include <stdint.h>

#include "../hopper.h"
#include "spec/qualifiers.h"

namespace paged_attn {

constexpr int kLargeBoxRows = 16;  // one warp asks for all boxes of a tile of keys in time, and one for values

// kDim_, kDimV_: head_dim and head_dim_v rounded up to what is compiled. kKeys_: keys of a tile.
template <int kDim_, int kDimV_, int kKeys_, int kConsumers_ = 2>
struct PrefillSizes {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kKeys = kKeys_;
  static constexpr int kElementBytes = 2, kColumnDims = kColumn;
  static constexpr int kColumns = (kDim + kColumn - 1) / kColumn, kColumnsV = (kDimV + kColumn - 1) / kColumn;
  static constexpr int kConsumers = kConsumers_;  // warpgroups, 64 rows each
  static constexpr int kRows = 64 * kConsumers;
  // The director has a warpgroup of its own, so that all four schedulers of a multiprocessor have a warp that gathers.
  // But a product with 256 columns does not compile for so many threads, and four consumers leave no warpgroup.
  static constexpr bool kOwnDirector = kDimV <= 128 && kConsumers == 2;
  static constexpr int kThreads = (1 + kConsumers + kOwnDirector) * kWarpgroup;
  static constexpr int kGatherers = 3 + kOwnDirector;  // warps that copy where pages hold no box
  static constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
  // A consumer issues the scores of the next tile beside the product of this one's weights. Four have no registers for
  // that: they fill each other's waits.
  static constexpr bool kOverlaps = kConsumers < 4;
  static constexpr bool kShortTiles = kConsumers == 3 && kKeys == 64;  // of keys, so there is room for more of them
  static constexpr int kKeyStages = !kOverlaps ? 6 : kShortTiles ? 4 : kDim > 128 ? 2 : 3;
  static constexpr int kValueStages = !kOverlaps ? 6 : kShortTiles ? 4 : kDim > 64 ? 2 : 3;
  static constexpr int kQueryStages = kDim > 128 ? 1 : 2;  // the next rows are there before the last ones are done

  static constexpr int kTransposedStages = 0;  // values are used as they are copied
  static constexpr bool kNarrow = false;       // the cache has q's 16 bits
  // Consumers issue products in turns, not as they come.
  static constexpr bool kTurns = kDim > 128 || kConsumers == 3 || (kDim == 64 && kConsumers == 2);
  // Whether it pays not to look for the largest score, where weights may be large: see shape.cuh.
  static constexpr bool kSkipsSearch = kConsumers == 3 || (kDim > 96 && kDimV <= 192);
  static constexpr bool kLateWait = kDimV > 192;  // new weights are computed before those before have been used

  // Registers of a thread; three warpgroups together have 504, four of them 512, five 480. The director has those of a
  // producer.
  static constexpr int kProducerRegisters = !kOverlaps ? 64 : kOwnDirector ? 48 : kShortTiles ? 80 : 56;
  static constexpr int kConsumerRegisters = !kOverlaps        ? 104
                                            : kShortTiles     ? 144
                                            : kConsumers == 3 ? 152
                                            : kOwnDirector    ? 208
                                                              : 224;

  static constexpr int kQueryBytes = kRows * kColumns * kRowBytes;
  static constexpr int kKeyBytes = kKeys * kColumns * kRowBytes, kValueBytes = kKeys * kColumnsV * kRowBytes;
  static constexpr int kKeysAt = kQueryStages * kQueryBytes, kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kEnd = kValuesAt + kValueStages * kValueBytes;
  static constexpr int kSharedBytes = kEnd + kBlockBytes;  // its start is aligned by hand
  static_assert(kDim % 16 == 0 && kDimV % 32 == 0 && kKeys % 16 == 0, "whole products and stores");
};

// Warps that copy values in pieces, at the edges of what is seen.
template <typename Sizes>
constexpr int kEdgeCopiersOf = Sizes::kOwnDirector && Sizes::kColumns > 1 ? 2 : 1;

// Warps that ask for the boxes of a tile.
template <typename Sizes>
PD_FN constexpr int askers_of(int box_rows) {
  return box_rows < kLargeBoxRows ? kEdgeCopiersOf<Sizes> : 1;
}

// The least rows of a box: a lane asks for one box of a tile.
template <typename Sizes>
constexpr int least_box_rows() {
  const int columns = Sizes::kColumns > Sizes::kColumnsV ? Sizes::kColumns : Sizes::kColumnsV;
  int rows = kSwizzledRows;
  while (Sizes::kKeys / rows * columns > askers_of<Sizes>(rows) * 32) rows *= 2;
  return rows;
}

// The same as numbers.
struct PrefillInstance {
  int head_dim, head_dim_v, rows, keys, threads, shared_bytes, least_box_rows;
  int tile_rows;  // that a tile of rows has in a call, see plan.cpp
};

template <typename Sizes>
constexpr PrefillInstance prefill_instance() {
  return {Sizes::kDim,
          Sizes::kDimV,
          Sizes::kRows,
          Sizes::kKeys,
          Sizes::kThreads,
          Sizes::kSharedBytes,
          least_box_rows<Sizes>(),
          Sizes::kRows};
}

template <typename Sizes>
bool has_sizes(const PrefillInstance& instance) {
  return instance.head_dim == Sizes::kDim && instance.head_dim_v == Sizes::kDimV && instance.rows == Sizes::kRows;
}

// Of these there are kernels with softcap and ALiBi, and others without.
using PrefillSizes64 = PrefillSizes<64, 64, 128>;
using PrefillSizes128 = PrefillSizes<128, 128, 128>;
using PrefillSizes192x128 = PrefillSizes<192, 128, 128>;
using PrefillSizes256 = PrefillSizes<256, 256, 64>;
// Of these only without. In tall tiles a thread has no registers for them. plan.cpp says where tiles are tall.
using PrefillSizes96 = PrefillSizes<96, 96, 128>;
using PrefillSizes192 = PrefillSizes<192, 192, 96>;
using TallPrefillSizes64 = PrefillSizes<64, 64, 64, 4>;
using TallPrefillSizes96 = PrefillSizes<96, 96, 96, 3>;
using TallPrefillSizes128 = PrefillSizes<128, 128, 64, 3>;

// For dimensions up to 256. all_scores: with softcap or ALiBi.
inline PrefillInstance find_prefill_instance(int64_t head_dim, int64_t head_dim_v, bool all_scores, bool tall) {
  const int64_t larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (!all_scores) {
    if (larger <= 64 && tall) return prefill_instance<TallPrefillSizes64>();
    if (larger > 64 && larger <= 96)
      return tall ? prefill_instance<TallPrefillSizes96>() : prefill_instance<PrefillSizes96>();
    if (larger > 96 && larger <= 128 && tall) return prefill_instance<TallPrefillSizes128>();
    if (head_dim_v > 128 && larger <= 192) return prefill_instance<PrefillSizes192>();
  }
  if (larger <= 64) return prefill_instance<PrefillSizes64>();
  if (larger <= 128) return prefill_instance<PrefillSizes128>();
  if (head_dim <= 192 && head_dim_v <= 128) return prefill_instance<PrefillSizes192x128>();
  return prefill_instance<PrefillSizes256>();
}

}  // namespace paged_attn
