// What the warps of a block tell each other, and what the kernel is told.
#pragma once

#include "../hopper.cuh"
#include "../rows.cuh"
#include "ring.cuh"
#include "sizes.h"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_, typename Sizes>
struct PrefillShape : Sizes {
  using Type = Type_;
  // bf16 holds weights as large as float32 does. So once all rows of a warp have a reference score, tiles are no longer
  // searched for their largest score: the sum of a tile's weights tells afterwards whether the reference score must
  // move. See PrefillRows::move_base_late().
  static constexpr bool kMovesLate = IsBf16<Type>::value && requires { requires Sizes::kSkipsSearch; };
  static constexpr bool kShortTiles = requires { requires Sizes::kShortTiles; };  // not all sizes say so
  // Where queries do not come in boxes, the consumers themselves copy those of a block's first work: they would wait
  // for them anyway, and one warp takes long. With short tiles the director has registers enough to be as fast.
  static constexpr bool kGathersFirst = Sizes::kTransposedStages == 0 && !Sizes::kNarrow && !kShortTiles;
  // Of two consumers that do not take turns, the second begins when the first has its first scores. If both began at
  // once they would stay in step, and no product would run while they compute weights (docs/cuda/prefill.md).
  static constexpr bool kStaggers = Sizes::kConsumers == 2 && requires { requires !Sizes::kTurns; };
  static constexpr int kEdgeCopiers = kEdgeCopiersOf<Sizes>;
  // Instructions before the code of the loaders. With them their loops lie where the loop of the consumers leaves the
  // instruction cache free (docs/cuda/prefill.md). Measured at head_dim 128 and 192.
  static constexpr int kCodeGap = !Sizes::kOwnDirector ? 0 : Sizes::kDim == 192 ? 368 : 335;
};

// What the kernel reads beside the problem.
struct PrefillCall : Plan {
  static constexpr bool kHasSections = true, kCutsKeys = true;
  CUtensorMap keys, values;  // of the cache: [page, kv_head, slot, dim] from the slowest to the fastest
  CUtensorMap queries;       // [batch, token, kv_head, head of its group, dim]
  FastDivisor tile_rows;     // rows of a tile: those of the kernel, or fewer that are whole tokens
  int32_t query_box_rows;    // tiles of so many rows or more get their queries in a box
  uint64_t copy_policy;      // of L2, for keys and values
  int32_t box_rows;          // slots of a box; 0: no bulk copies
  int32_t blocks_in_grid;
  bool one_round;               // no block has a second tile of rows, or split of one
  int32_t l2_keys;              // of one head, that L2 keeps with their values
  unsigned long long* tickets;  // one word, which counts the tiles of rows that were taken: see tickets.cuh
  // Split-KV. Keys are cut where the longest tile of rows sees cut_from_tiles tiles of keys or more: those of each tile
  // of rows into `splits`, but no more than splits_per_tile for each tile of keys. Where lengths differ, long requests
  // have more splits and short ones fewer: about splits_wanted in all, most_splits of a tile of rows at most, and
  // most_split_rate for each tile of keys. The partials of cut rows wait in `sums` and `ml` for the combine kernel.
  int32_t splits, most_splits, cut_from_tiles;
  float splits_per_tile, splits_wanted, most_split_rate;
  unsigned long long* cut;  // whether any keys were cut: 0, 1, or kNotYetKnown
  static constexpr unsigned long long kNotYetKnown = 2;
  int2* row_splits;       // [tokens, q_heads], where any were cut: how many splits the row has, and its request
  bool looks_early;       // whether blocks of the combine kernel read `cut` before they wait for the end of this kernel
  int32_t combine_warps;  // of the combine kernel, for each row: 1, 2 or 4
  float* sums;            // [most_splits, tokens, q_heads, head_dim_v]
  float2* ml;             // [most_splits, tokens, q_heads]: reference scores and sums of weights
};

// What a block works on: a tile of rows of one request and kv_head, and all of its keys or one split of them.
struct Work {
  static constexpr float kWhole = 0.f;  // no keys are cut
  Item item;
  int head, split, splits;
  float split_rate;  // splits for each tile of keys; kWhole; or below 0: every tile of rows has -split_rate splits
  bool cut;          // it has one of several splits: its sums are a partial
  bool exists;
  bool gathers;  // the consumers copy their queries themselves
  // kCareful: every tile is searched for its largest score, as keys are cut. kRepeated: also that, and scores are
  // multiplied first, as weights were too large or references far out the first time.
  enum Care : uint8_t { kQuick, kCareful, kRepeated } care;

  // It has all of its keys, where those of others are cut. The combine kernel has to be told.
  PD_MEMBER bool says_whole() const { return !cut && split_rate != kWhole; }
};

// The tiles of rows of a request.
struct RequestTiles {
  int rows;              // how many
  int most;              // tiles of keys of the last one
  int below, in_bucket;  // how many are in buckets below the present one, and in it
};

// Of some requests: tiles of keys of the longest tile of rows, tiles of rows, and tiles of keys of all of these.
struct Totals {
  int longest, rows, tiles;

  PD_MEMBER void add(const Totals& other) {
    longest = max(longest, other.longest);
    rows += other.rows;
    tiles += other.tiles;
  }
};

// What a block has found out about the batch. To look at 32 requests takes half a microsecond, so it remembers the
// first kRemembered.
template <int kRemembered>
struct KnownRequests {
  static constexpr int kMost = kRemembered;
  static constexpr int kKeyBits = 20;  // of a word, for tiles of keys; those of rows have the rest
  static constexpr uint32_t kUnknown = ~0u;
  int longest;  // tiles of keys of the longest tile of rows or split of one
  // With more than 32 requests: the tiles up to the end of each cell (see schedule.cuh), and requests of a group.
  int cells[kWarp], group_size;
  Totals totals[4];  // of those that each warp has looked at
  uint32_t words[kRemembered];

  PD_MEMBER void note(int b, int rows, int most) {
    if (b >= kMost) return;
    const bool fits = rows < (1 << (32 - kKeyBits)) - 1 && most < 1 << kKeyBits;
    words[b] = fits ? static_cast<uint32_t>(rows) << kKeyBits | static_cast<uint32_t>(most) : kUnknown;
  }

  // False: it has to be looked at.
  PD_MEMBER bool find(int b, int& rows, int& most) const {
    const uint32_t word = b < kMost ? words[b] : kUnknown;
    rows = static_cast<int>(word >> kKeyBits);
    most = static_cast<int>(word & ((1u << kKeyBits) - 1));
    return word != kUnknown;
  }
};

// Where there is no room for them.
template <>
struct KnownRequests<0> {
  static constexpr int kMost = 0;
  int longest;
  int cells[kWarp], group_size;
  Totals totals[1];

  PD_MEMBER void note(int, int, int) {}
  PD_MEMBER bool find(int, int&, int&) const { return false; }
};

// Barriers of the stages of transposed values, where there are any.
template <int kStages>
struct TransposedBarriers {
  uint64_t transposed_full[kStages], transposed_empty[kStages];
};
template <>
struct TransposedBarriers<0> {};

// Named barriers; 0 is __syncthreads(). kTurn + i: it is the turn of consumer i to issue; or, where consumers stagger,
// the first scores of the work in slot i are done. kTurn + kConsumers + i: the threads of consumer i meet.
constexpr int kSurvey = 1, kTurn = 2, kCutUnknown = 15;

// Barriers and messages, outside of the dynamic part.
template <typename Shape>
struct PrefillControl : TransposedBarriers<Shape::kTransposedStages> {
  uint64_t keys_full[Shape::kKeyStages], keys_empty[Shape::kKeyStages];
  uint64_t values_full[Shape::kValueStages], values_empty[Shape::kValueStages];
  uint64_t queries_full[Shape::kQueryStages], queries_empty[Shape::kQueryStages];
  uint64_t work_full[2], work_empty[2];
  uint64_t next_wanted;      // see want_next()
  Work work[2], next;        // next: found by the director, and not yet in its slot
  uint32_t again[2];         // whether some consumer asks that the work of this slot be done once more
  KnownRequests<352> known;  // no block has room for more than 360
};

// How many keys of a work are still to be asked for when the next work is wanted. Later there is no time to find it and
// to bring its queries. Sooner, blocks would get the tiles of rows that are left as they have begun, not as they end.
constexpr int kKeysBeforeNext = 512;

// The tile of keys with which that is so.
template <typename Shape>
PD_DEVICE int tile_before_next(const Item& item) {
  return item.first_tile + min(item.tiles - 1, kKeysBeforeNext / Shape::kKeys);
}

// Tells the director so, by one thread. Not for works without keys.
template <typename Shape>
PD_DEVICE void want_next(PrefillControl<Shape>& control) {
  barrier_arrive(shared_address(&control.next_wanted));
}

}  // namespace paged_attn
