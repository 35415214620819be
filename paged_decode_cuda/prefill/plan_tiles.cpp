#include "plan_tiles.h"

#include "e4m3_sizes.h"
#include "facts.h"
#include "narrow_sizes.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr int64_t kShortPrompt = 4096, kTilesOfShortPrompts = 3;  // tokens; tiles for each multiprocessor
// Of the time of prompts, at least, where tiles are not tall: the model flatters them.
constexpr double kPromptRowsSave = 0.15;
// Tiles of up to so many keys may have whole tokens, if that leaves no more than one of so many rows empty.
constexpr int64_t kKeysOfWholeTokens = 1024, kMostEmptyRows = 16;

// Whether the longest request fills more than half of a tile.
bool is_half_full(const Problem& p, const PrefillInstance& instance) {
  return 2 * p.max_q_len * p.group > instance.tile_rows;
}

// Whether tall tiles of rows take less time than others, of which each row takes 6 % more: every multiprocessor is busy
// until the last round of tiles.
bool fewer_rounds(const Problem& p, int tall, int other, int processors) {
  const auto time = [&](int rows) { return pd_ceil_div(usual_tiles(p, rows), int64_t{processors}) * rows; };
  return time(tall) * 100 < time(other) * 106;
}

// A tile of rows may have whole tokens, for then one bulk copy brings its queries. Else the director brings them row by
// row, which takes it as long as 500 keys take the others. But a few rows of the kernel are left empty, so that tiles
// are more. It pays where tiles have few keys, or most of them few rows, many blocks have two tiles, and none has one
// more for it.
PrefillInstance with_whole_tokens(const Problem& p, PrefillInstance instance, const DeviceLimits& limits) {
  const int rows = instance.rows, empty = static_cast<int>(rows % p.group);
  if (empty == 0 || p.deterministic || kMostEmptyRows * empty > rows) return instance;
  const bool few_keys = most_keys(p, rows) <= kKeysOfWholeTokens, few_rows = p.total_q * p.group < p.batch * rows;
  const int64_t tiles = usual_tiles(p, rows), processors = limits.processors;
  const int64_t rounds = pd_ceil_div(tiles, processors);
  const bool same = rounds > kMostRounds || pd_ceil_div(usual_tiles(p, rows - empty), processors) == rounds;
  if ((few_keys || few_rows) && 2 * tiles > 3 * processors && same) instance.tile_rows -= empty;
  return instance;
}

TileChoice choice_of(const Problem& p, const PrefillInstance& instance, const DeviceLimits& limits) {
  const int64_t tiles = most_tiles(p, instance.tile_rows);
  return {instance, tiles, cuts_of(p, tiles, instance, limits)};
}

// Whether the model of a call's time holds: tiles of rows are about equally long, each request has several, and all are
// so many at most.
bool has_few_even_tiles(const Problem& p, int rows, int64_t most) {
  return (is_even(p) || has_short_window(p)) && longest_query(p) * p.group > rows && usual_tiles(p, rows) <= most;
}

// Whether a call costs less with these tiles than with others. Tall ones may fit into one round where others take two,
// or leave fewer multiprocessors idle where their keys are cut.
bool costs_less(const Problem& p, const TileChoice& these, const TileChoice& others, const DeviceLimits& limits,
                double save = kChoiceSaves) {
  const auto cost = [&](const TileChoice& choice) {
    const int rows = choice.instance.tile_rows;
    const CallTimes times(p, usual_tiles(p, rows), choice.instance, limits, false);
    // A short window begins and ends inside tiles of keys: in all one of them is computed for nothing.
    const int outside = has_short_window(p) ? choice.instance.keys : 0;
    return cost_of(p, times, choice.cuts, most_keys(p, rows) + outside);
  };
  return cost(these) < (1 - save) * cost(others);
}

// Whether rows see few keys, many of them at their edge: prompts with no more keys before them than they have
// themselves. There smaller tiles of keys save more than a third consumer costs. Tiles of rows then differ in length,
// so there must be several for each block.
bool has_short_prompts(const Problem& p, int64_t tiles, int processors) {
  return tiles >= kTilesOfShortPrompts * processors && longest_query(p) <= kShortPrompt && has_prompts(p);
}

// Whether tall tiles are faster, where no model tells which cost less: they are where they are more than half full and
// give every multiprocessor one. Products of 8 bits above head_dim 64 ask for rounds enough, too, and those of 16 bits
// at head_dim 128 for short prompts or short windows. Where results must not depend on the other requests, neither may
// the tiles.
bool suits_tall(const Problem& p, const PrefillInstance& tall, const PrefillInstance& other, int processors) {
  const int64_t tiles = most_tiles(p, tall.tile_rows);
  const bool many = is_half_full(p, tall) && tiles >= processors;
  const auto in_fewer_rounds = [&] { return fewer_rounds(p, tall.tile_rows, other.tile_rows, processors); };
  if (in_8_bits(p) && tall.head_dim > TallPrefillE4m3Sizes64::kDim)
    return many && !p.deterministic && in_fewer_rounds();
  if (tall.head_dim == TallPrefillSizes128::kDim)
    return many && !p.deterministic &&
           (has_short_prompts(p, tiles, processors) || (has_short_window(p) && in_fewer_rounds()));
  return many || p.deterministic;
}

}  // namespace

// An 8-bit cache has instances of its own: one for products of 8 bits, one that widens it. With few rounds of tiles a
// model says which of two instances costs less.
TileChoice choose_tiles(const Problem& p, const DeviceLimits& limits) {
  if (widens(p)) {
    const PrefillInstance only = find_prefill_narrow_instance(p.head_dim, p.head_dim_v);
    return choice_of(p, with_whole_tokens(p, only, limits), limits);
  }
  const auto find = [&](bool tall) {
    const auto instances = in_8_bits(p) ? find_prefill_e4m3_instance : find_prefill_instance;
    return with_whole_tokens(p, instances(p.head_dim, p.head_dim_v, all_scores(p), tall), limits);
  };
  const PrefillInstance tall = find(true);
  const TileChoice other = choice_of(p, find(false), limits);
  if (tall.rows == other.instance.rows) return other;  // no tall tiles
  const int rows = other.instance.tile_rows, processors = limits.processors;
  if (is_half_full(p, tall) && !p.deterministic && has_few_even_tiles(p, rows, 2 * processors)) {
    const TileChoice taller = choice_of(p, tall, limits);
    if (costs_less(p, taller, other, limits)) return taller;
  }
  if (!suits_tall(p, tall, other.instance, processors)) return other;
  const TileChoice taller = choice_of(p, tall, limits);
  const bool few_rounds = !p.deterministic && has_prompts(p) && has_few_even_tiles(p, rows, 3 * processors);
  return few_rounds && costs_less(p, other, taller, limits, kPromptRowsSave) ? other : taller;
}

}  // namespace paged_attn
