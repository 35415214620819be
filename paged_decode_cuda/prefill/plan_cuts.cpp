#include "plan_cuts.h"

#include <algorithm>
#include <cmath>

#include "facts.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr Cuts kWhole = {1, 0, 0, 1};

constexpr int64_t kMostSplits = 32;         // of a tile of rows, where the caller names no number
constexpr int64_t kMostSplitsOfRounds = 8;  // the same with more than one round of tiles
constexpr int64_t kUsualDim = 128;
// Keys for each query, where many are likely and where most are: a table may have room for many more.
constexpr int64_t kManyKeys = 4, kMostKeys = 16;
constexpr double kPromptCutsSave = 0.2;  // of the time of prompts of several rounds, at least: the model flatters cuts
// Keys of a split where most multiprocessors would be idle: few partials are written there. The first where tiles only
// read or are very few.
constexpr int64_t kShortSplitKeys = 128, kIdleSplitKeys = 256, kVeryFewTiles = 8;
// How long a multiprocessor alone has keys, in ns: those that are worth a cut, and what a table must have room for
// where there are more rounds of tiles than one.
constexpr double kLong = 30000, kMayBeLong = 60000;

// All tiles into as many splits, `most` at most: the number that pays from the fewest keys on; or, where tiles compute
// and are even or of prompts, that with which the call costs least.
Cuts cut_alike(const Problem& p, const CallTimes& times, int64_t tiles, int64_t keys, int64_t most,
               int64_t processors) {
  const bool are_prompts = has_prompts(p), in_rounds = are_prompts && times.rounds(1) > 1;
  const bool by_cost = (is_even(p) || are_prompts) && !times.reads();
  const double save = in_rounds ? kPromptCutsSave : kChoiceSaves;
  most = pd_min(most, kMostSplits);
  Cuts best = kWhole;
  double least = by_cost ? cost_of(p, times, best, keys) : INFINITY;
  for (int64_t splits = 2; splits <= most; ++splits) {
    // More splits without another round of them are shorter.
    if (by_cost && splits < most && times.rounds(splits + 1) == times.rounds(splits)) continue;
    const double from = times.least_keys(splits);
    if (from > static_cast<double>(keys)) continue;
    const Cuts cuts = {splits, static_cast<int64_t>(from), pd_max(splits * tiles, processors), splits};
    const double own = by_cost ? cost_of(p, times, cuts, keys) : from;
    // Where cuts cost as much as none, likely keys are too few for them; there may be more.
    const bool first = best.splits == 1, less = own < (first ? (1 - save) * least : least);
    if (!less && !(first && own == least && !in_rounds)) continue;
    best = cuts;
    least = own;
  }
  return best;
}

// Splits that are worth their partials where tiles are few: more of long keys, as of few rows, whose partials are
// small.
int64_t most_written(const Problem& p, const CallTimes& times, int64_t keys) {
  const int64_t dims = pd_max(p.head_dim_v, kUsualDim), most = kMostSplits * kUsualDim / dims;
  if (!times.reads()) return pd_max(most, keys * dims / (2 * kSplitKeys * kUsualDim));
  return pd_max(most, pd_max(pd_min(keys / kIdleSplitKeys, kMostSplits), keys / kSplitKeys));
}

// The same where few tiles leave most multiprocessors idle: as many splits as there are multiprocessors for.
Cuts cut_to_fill(const Problem& p, const CallTimes& times, int64_t tiles, int64_t keys, int64_t room,
                 int64_t processors) {
  const int64_t free = pd_min(pd_min(processors / tiles, room), most_written(p, times, keys));
  const bool short_ones = tiles <= kVeryFewTiles || times.reads();
  const int64_t least = short_ones && free <= kMostSplits ? kShortSplitKeys : kIdleSplitKeys;
  const int64_t most = pd_min(free, keys / least);
  double from = INFINITY;
  for (int64_t splits = 2; splits <= most; ++splits)
    from = std::min(from, std::max(times.least_keys_when_idle(splits), static_cast<double>(splits * least)));
  if (from > static_cast<double>(keys)) {
    Cuts whole = kWhole;
    whole.least_long = least;
    return whole;
  }
  return {most, static_cast<int64_t>(from), processors, most, least, least};
}

// Where one round takes all tiles, a long one alone would take longer than the others: it is cut into `most` splits.
// Where tiles compute, partials of them have more rows to write, so there keys must be more.
Cuts cut_in_one_round(const Problem& p, const CallTimes& times, const Cuts& alike, int64_t keys, int64_t tiles,
                      int64_t room, int64_t processors) {
  const int64_t most = pd_min(pd_min(room, keys / alike.least_long), kMostSplits);
  if (most <= alike.splits || p.batch == 1) return alike;  // the only request has no others
  const double from = times.reads() ? 2 * kSplitKeys : kLong / times.of_round();
  const bool fits = 2 * tiles <= processors;  // all splits, with a long one cut, into one round
  const int64_t wanted = fits ? processors : 2 * processors;
  const Cuts by_length = {1, static_cast<int64_t>(from), wanted, most, 1, alike.least_long};
  if (alike.splits == 1) {
    const bool may_differ = times.reads() || static_cast<double>(keys) >= from;
    return may_differ ? by_length : alike;
  }
  if (is_mixed(p) && by_length.keys < alike.keys) return by_length;
  return {alike.splits, alike.keys, fits ? wanted : alike.wanted, most, alike.least, alike.least_long};
}

// With more rounds, so would a tile that is longer than what a multiprocessor reads in all of them. Half a split for
// each tile is lost by rounding up. Lengths may also be even, and then the second kernel costs 1 to 2 us for nothing.
Cuts cut_in_rounds(const Problem& p, const CallTimes& times, const Cuts& alike, int64_t keys, int64_t tiles, int rows,
                   int64_t processors) {
  const bool may_be_long = static_cast<double>(keys) * times.alone() >= kMayBeLong;
  if (!may_be_long || !(times.reads() || is_mixed(p))) return alike;
  const int64_t room = kPartialTiles * processors * rows / (p.total_q * p.q_heads);
  const int64_t most = pd_min(room, kMostSplitsOfRounds);
  if (most <= alike.splits) return alike;
  const int64_t from = alike.splits > 1 ? alike.keys : static_cast<int64_t>(kLong / times.alone());
  return {alike.splits, from, 3 * processors + tiles / 2, most};
}

}  // namespace

Cuts cuts_of(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits) {
  if (p.num_splits > 0) return {p.num_splits, 0, 0, p.num_splits};
  if (p.deterministic) return kWhole;
  const int64_t likely = likely_tiles(p, instance.tile_rows);
  if (likely == 0) return kWhole;
  const int64_t keys = most_keys(p, instance.tile_rows), processors = limits.processors;
  const int64_t room = kPartialTiles * processors / tiles;  // splits of each tile that there is memory for
  const CallTimes times(p, likely, instance, limits);
  const Cuts alike = likely * kIdle <= processors
                         ? cut_to_fill(p, times, likely, keys, room, processors)
                         : cut_alike(p, times, likely, keys, pd_min(keys / kSplitKeys, room), processors);
  if (likely <= processors) return cut_in_one_round(p, times, alike, keys, likely, room, processors);
  if (likely > kMostRounds * processors) return alike;
  return cut_in_rounds(p, times, alike, keys, likely, instance.tile_rows, processors);
}

double cost_of(const Problem& p, const CallTimes& times, const Cuts& cuts, int64_t keys) {
  const auto time = [&](int64_t likely) {
    const int64_t own = pd_min(likely, keys);
    const int64_t splits = own < cuts.keys ? 1 : pd_max(pd_min(cuts.splits, own / cuts.least), 1);
    return times.time(splits, static_cast<double>(own));
  };
  const int64_t queries = longest_query(p), most = kMostKeys * queries;
  const bool wide = keys > most;
  return (wide ? 2 : 1) * time(queries) + time(kManyKeys * queries) + (wide ? 1 : 2) * time(most);
}

}  // namespace paged_attn
