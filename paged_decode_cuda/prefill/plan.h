// When the prefill kernel serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

struct PrefillPlan {
  PrefillInstance instance;
  bool widens;                         // the cache has 8 bits, and its products 16
  bool all_scores;                     // with softcap and ALiBi, which half of the instances do without
  bool read_once;                      // no two blocks copy the same keys, as far as the host can tell
  int32_t box_rows;                    // slots of a page that one bulk copy takes; 0: pages are too small for that
  int64_t items;                       // tiles of rows, at most, of every kv_head
  bool few_tiles;                      // of rows: their keys are cut unless they are very few
  int64_t splits;                      // of the keys of every item; 1: none is cut
  int64_t most_splits, splits_wanted;  // where lengths differ: of a long one, and of all
  int64_t cut_from_keys;               // keys are cut only where the longest item sees so many
  int64_t least_split_keys;            // of a split: fewer keys have fewer splits
  int64_t least_long_split_keys;       // the same where lengths differ
  int64_t blocks;
  bool one_round;         // every block has one tile of rows, or one split of one, at most
  int64_t combine_warps;  // that add the partials of a row together
  int64_t combine_blocks;
  int combine_bytes;  // of shared memory for each of them, beside what it uses
  int64_t l2_keys;    // keys and values of so many places of one head may stay in L2
};

// Of both routes for long queries.
constexpr int64_t kFewTiles = 6;        // times the tiles of rows: with more multiprocessors decode may be faster
constexpr int64_t kL2Bytes = 24 << 20;  // of keys and values that all blocks read together

// "" or why the prefill kernel does not serve this.
const char* prefill_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
PrefillPlan plan_prefill(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
