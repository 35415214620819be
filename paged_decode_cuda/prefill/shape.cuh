// What the warps of a block tell each other, and what the kernel is told.
#pragma once

#include "../rows.cuh"
#include "products.cuh"
#include "ring.cuh"
#include "sizes.h"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_, typename Sizes>
struct PrefillShape : Sizes {
  using Type = Type_;
  // bf16 holds weights as large as float32 does. So once all rows of a warp have a reference, nobody looks for the
  // largest score: the sums of the weights tell afterwards when it is to be moved. See PrefillRows.
  static constexpr bool kMovesLate = IsBf16<Type>::value && requires { requires Sizes::kSkipsSearch; };
  static constexpr bool kShortTiles = requires { requires Sizes::kShortTiles; };  // not all sizes say so
  // Where queries do not come in boxes the consumers copy those of a block's first work, which they would wait for: one
  // warp takes long, and four have nothing else to do. With short tiles the director has registers to be fast enough.
  static constexpr bool kGathersFirst = Sizes::kTransposedStages == 0 && !Sizes::kNarrow && !kShortTiles;
  // Of two consumers that do not take turns the second one begins behind the first scores of the first. If both began
  // at once, some would go on at once, and nothing would run beside their weights.
  static constexpr bool kStaggers = Sizes::kConsumers == 2 && requires { requires !Sizes::kTurns; };
  // Instructions between the director's code and that of the loaders. With them the loops of the loaders lie where the
  // loop of the consumers leaves the instruction cache free (docs/cuda.md). Measured at head_dim 128 and 192.
  static constexpr int kCodeGap = !Sizes::kOwnDirector ? 0 : Sizes::kDim == 192 ? 218 : 184;
};

// What the kernel reads beside the problem.
struct PrefillCall : Plan {
  static constexpr bool kHasSections = true, kCutsKeys = true;
  CUtensorMap keys, values;  // of the cache: [page, kv_head, slot, dim] from the slowest to the fastest
  CUtensorMap queries;       // [batch, token, kv_head, head of its group, dim]
  int32_t query_box_rows;    // so many rows of a tile or more come as a box of queries
  uint64_t copy_policy;      // of L2, for keys and values
  int32_t box_rows;          // slots of a box; 0: no bulk copies
  int32_t blocks_in_grid;
  bool one_round;               // no block has a second tile of rows, or part of one
  int32_t l2_keys;              // of one head, that L2 keeps
  unsigned long long* tickets;  // one word
  // The keys of a tile of rows are cut into so many parts, if the longest tile of rows has part_tiles tiles of keys or
  // more, but not into more than parts_of_tile for each of them. Where lengths differ, long ones are cut into more and
  // short ones into fewer: about parts_wanted of all tiles of rows, most_parts of one at most, and most_part_rate of
  // each tile of keys. Then the sums of every row of each wait for the combine kernel: [most_parts, tokens, q_heads,
  // head_dim_v], and [most_parts, tokens, q_heads] references and weights.
  int32_t parts, most_parts, part_tiles;
  float parts_of_tile, parts_wanted, most_part_rate;
  unsigned long long* cut;  // whether keys were cut: 0, 1, or kNotYetKnown
  static constexpr unsigned long long kNotYetKnown = 2;
  int2* row_parts;        // [tokens, q_heads]: into how many parts, if so, and of which request the row is
  bool looks_early;       // whether the blocks of that kernel ask if keys were cut before they wait for this one
  int32_t combine_warps;  // of that kernel, for each row: 1, 2 or 4
  float* sums;
  float2* ml;
};

// What a block works on: a tile of rows of one request and kv_head, and a part of its keys.
struct Work {
  static constexpr float kWhole = 0.f;  // no keys are cut
  Item item;
  int head, part, parts;
  float part_rate;  // parts for each tile of keys; kWhole; or below 0: every tile of rows has -part_rate parts
  bool cut;         // its sums are those of a part
  bool exists;
  bool gathers;  // the consumers copy their queries themselves
  bool careful;  // done once more, since some weights were too large: the largest score is looked for in every tile

  // It has all of its keys, where those of others are cut. The combine kernel has to be told.
  PD_MEMBER bool says_whole() const { return !cut && part_rate != kWhole; }
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
  int longest;  // tiles of keys of the longest row tile or part of one
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

// Named barriers; 0 is that of the whole block. Behind kTurn, whose turn it is to issue, lie those of the consumers.
constexpr int kSurvey = 1, kTurn = 2, kCutUnknown = 15;

// Barriers and messages, outside of the dynamic part.
template <typename Shape>
struct PrefillControl : TransposedBarriers<Shape::kTransposedStages> {
  uint64_t keys_full[Shape::kKeyStages], keys_empty[Shape::kKeyStages];
  uint64_t values_full[Shape::kValueStages], values_empty[Shape::kValueStages];
  uint64_t queries_full[Shape::kQueryStages], queries_empty[Shape::kQueryStages];
  uint64_t work_full[2], work_empty[2];
  Work work[2], next;        // the next one waits for a place
  bool again[2];             // a consumer asks for this work once more
  KnownRequests<352> known;  // no block has room for more than 360
};

}  // namespace paged_attn
