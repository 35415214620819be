#include "plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../decode/plan.h"
#include "../layout.h"
#include "e4m3_sizes.h"
#include "instances.h"
#include "narrow_sizes.h"

namespace paged_attn {
namespace {

constexpr int64_t kMostSplits = 32;         // of a tile of rows, where the caller names no number
constexpr int64_t kMostSplitsOfRounds = 8;  // the same with more than one round of tiles
constexpr int64_t kMostRounds = 4;          // with more of them a long tile hardly takes longer than all rounds
constexpr int64_t kPartialTiles = 5;        // of rows, for each multiprocessor: their partials have memory
// With kIdle times as many multiprocessors as tiles of rows, or more, most would be idle without splits. Then splits
// are short, as few partials are written: kShortSplitKeys where tiles only read or are very few, else kIdleSplitKeys.
constexpr int64_t kIdle = 3, kVeryFewTiles = 8, kShortSplitKeys = 128, kIdleSplitKeys = 256;
// By measurement on H100s and H200s. GB/s that a multiprocessor reads: while the other one of its pair does nothing,
// while both read, and where most of the GPU is idle.
constexpr double kAloneRate = 60, kPairedRate = 39, kIdleRate = 42;
constexpr double kCombineTime = 4000;  // ns, of the combine kernel
// The same where most of the GPU is idle; and there the rate at which all partials are written and read (GB/s),
// operations of a multiprocessor in a ns, and ns that the weights of a key take for all rows of a tile.
constexpr double kIdleCombineTime = 2800, kIdlePartialRate = 6500, kIdleComputeRate = 6600, kWeightsTime = 8;
// ns that a call takes beside its tiles, where each block has one and where some have several, and that a block takes
// between two tiles.
constexpr double kFixedTime = 6300, kFixedTimeOfRounds = 9000, kBetweenTiles = 1200;
// How long a multiprocessor alone has keys, in ns: those that are worth a cut, and what a table must have room for
// where there are more rounds of tiles than one.
constexpr double kLong = 30000, kMayBeLong = 60000;
// The combine kernel: where a row may have kManySplits, four warps add it if there are very few rows, two if few. Rows
// and blocks are counted for each multiprocessor. More blocks would take long to start where nothing was cut.
constexpr int64_t kManySplits = 8, kVeryFewCombinedRows = 8, kFewCombinedRows = 12, kMostCombineBlocks = 8;
constexpr double kComputeRate = 5300;  // operations of a multiprocessor in a ns
constexpr int64_t kMostE4m3Dims = 128;
constexpr int64_t kUsualDim = 128;
constexpr int64_t kShortWindow = 512;  // keys
constexpr int64_t kShortPrompt = 4096, kTilesOfShortPrompts = 3;
// Keys for each query, where many are likely and where most are: a table may have room for many more.
constexpr int64_t kManyKeys = 4, kMostKeys = 16;
constexpr double kFirstComeKeys = 1024;  // with fewer the second tile of a block does not wait for the end of its first
// Of the time, at least: cuts; cuts where tiles are even and compute, so that little is left out of the model; what is
// chosen by its cost; and of prompts of several rounds, which the model flatters, cuts and tiles that are not tall.
constexpr double kCutsSave = 0.03, kExactCutsSave = 0.05, kChoiceSaves = 0.02, kPromptCutsSave = 0.2,
                 kPromptRowsSave = 0.15;
constexpr int64_t kFewWidenedRows = 32;  // take less time in the decode kernel where they leave multiprocessors idle
// Up to so many dimensions the decode kernel reads keys at full rate for 16 rows, above only for 8: for 16 at half of
// it.
constexpr int64_t kDecodeDims = 128, kDecodeWideRows = 8;
// Tiles of up to so many keys may have whole tokens, if that leaves no more than one of so many rows empty.
constexpr int64_t kKeysOfWholeTokens = 1024, kMostEmptyRows = 16;
constexpr int64_t kFewKeys = 256;  // for so many, as in a window, it is as fast where it has multiprocessors for all

// Whether requests are prompts with no more keys before them than they have themselves, as far as the host can tell.
bool prompts(const Problem& p) {
  const bool alone = p.cache.cu_seqlens_k && p.total_q == p.cache.page_size;
  const int64_t queries = longest_query(p), keys = alone ? queries : p.max_kv_len;
  return p.window_right == 0 && keys <= 2 * queries;
}

// How the keys of tiles of rows are cut: into so many splits, where the longest tile sees so many keys; and, where
// lengths differ, into how many in all (`wanted`) and of one tile at most (`most`). The device, which knows the
// lengths, takes fewer splits where they would have fewer keys than `least` each, and `least_long` where lengths
// differ.
struct Cuts {
  int64_t splits, keys, wanted, most;
  int64_t least = 1, least_long = kSplitKeys;
};

constexpr Cuts kWhole = {1, 0, 0, 1};

// Products of 8 bits are of e4m3 alone.
bool in_8_bits(const Problem& p) {
  return p.q_dtype == DType::kFloat8E4M3 && p.cache.dtype == DType::kFloat8E4M3 &&
         pd_max(p.head_dim, p.head_dim_v) <= kMostE4m3Dims;
}

// Operations of the two products with a key, for all rows of a tile.
double key_operations(const Problem& p, const PrefillInstance& instance) {
  return 2. * instance.rows * static_cast<double>(p.head_dim + p.head_dim_v);
}

// ns that a key takes for all rows of a tile that compute, by measurement on H200s. cut: of splits. Then bfloat16 looks
// for the largest score of every tile of keys, as float16 always does. More so in tall tiles.
double key_time(const Problem& p, const PrefillInstance& instance, bool cut) {
  const bool e4m3 = in_8_bits(p), fp16 = p.q_dtype == DType::kFloat16, searches = cut || fp16;
  const bool tall =
      instance.rows > (e4m3 && instance.head_dim <= 64 ? PrefillE4m3Sizes64::kRows : PrefillSizes64::kRows);
  if (instance.head_dim <= 64 && tall) return e4m3 || fp16 ? 15.5 : 14.9;
  if (instance.head_dim <= 64) return e4m3 ? 14.5 : 8.7;
  if (instance.head_dim <= 96) return !tall ? 11 : searches ? 15.3 : 13.3;
  if (instance.head_dim <= 128 && tall) return e4m3 ? 17 : searches ? 18 : 16;
  if (instance.head_dim <= 128) return searches ? 12 : 11.3;
  return key_operations(p, instance) / kComputeRate;
}

// Whether all requests have nearly as many tokens as the longest.
bool even(const Problem& p) { return !p.cu_seqlens_q || 10 * p.total_q >= 9 * p.batch * longest_query(p); }

// What cuts gain and cost, in the time that a multiprocessor needs for a key of a tile of rows while all are busy.
class CutTimes {
 public:
  // may_read: whether tiles only read where requests have one each. Tall ones with rows for most of them compute.
  CutTimes(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits,
           bool may_read = true)
      : tiles_(static_cast<double>(tiles)), processors_(limits.processors), rate_(1. * limits.read_rate / processors_) {
    const double rows = static_cast<double>(longest_query(p) * p.group), dims = static_cast<double>(p.head_dim_v);
    reads_ = may_read && rows <= instance.tile_rows;
    const bool sees_all = p.window_left < 0 || p.window_left + 1 >= p.max_kv_len;  // before it
    queries_ = p.window_right == 0 && sees_all && !reads_ ? static_cast<double>(longest_query(p)) : 0;
    key_bytes_ = static_cast<double>((p.head_dim + p.head_dim_v) * dtype_bytes(p.cache.dtype));
    key_ = reads_ ? key_bytes_ / rate_ : key_time(p, instance, false);
    even_ = even(p);
    cut_key_ = reads_ || !even_ ? 1 : key_time(p, instance, true) / key_;
    // A partial is written and read, as float32.
    partial_bytes_ = (reads_ ? rows : instance.tile_rows) * dims * 2 * sizeof(float);
    partial_ = partial_bytes_ / rate_ / key_;
    combine_ = kCombineTime / key_;
    idle_key_ = reads_ ? alone() : std::max(key_operations(p, instance) / kIdleComputeRate, kWeightsTime);
  }

  bool reads() const { return reads_; }

  // Rounds of tiles of rows. Where no two read the same keys, memory bounds: a round that is not full takes as long as
  // its tiles read, but no multiprocessor reads faster than it can.
  double rounds(int64_t splits) const {
    const double all = tiles_ * static_cast<double>(splits), full = std::floor(all / processors_);
    const double rest = all - full * processors_;
    if (rest == 0) return full;
    if (!reads_) return full + 1;
    const double own = full == 0 && rest > processors_ / 2 ? kPairedRate : kAloneRate;
    return full + std::max(rest / processors_, std::min(rate_ / own, 1.));
  }

  // How long a multiprocessor alone reads a key, in ns.
  double alone() const { return key_bytes_ / kIdleRate; }

  // How long a key takes a tile in a round of its own, in ns: to be read, or for all rows of one that computes.
  double of_round() const { return std::max(alone(), key_); }

  // From how many keys on splits gain 10 %, where they are all there at the same time and most of the GPU is idle
  // without.
  double least_keys_when_idle(int64_t splits) const {
    const double count = static_cast<double>(splits);
    return (kIdleCombineTime + tiles_ * count * partial_bytes_ / kIdlePartialRate) / (idle_key_ * (0.9 - 1 / count));
  }

  // From how many keys on splits pay: rounds(1) * keys against rounds(splits) * (keys / splits + partial) + combine.
  // With several rounds both are less by what unequal() says, but never less than the longest tile. Infinite: never.
  double least_keys(int64_t splits) const {
    const double count = static_cast<double>(splits), whole = rounds(1), cut = rounds(splits);
    const bool exact = even_ && !reads_;
    const double more = exact ? fixed(cut) - fixed(whole) : 0, kept = 1 - (exact ? kExactCutsSave : kCutsSave);
    const double cost = cut * partial_ + combine_ + more / key_, from = cost / (kept - cut_key_ / count);
    if (!reads_ && from <= std::min(longest_alone(1), longest_alone(splits))) return from;
    const double gain = kept * whole - cut * cut_key_ / count;
    if (gain <= 0) return INFINITY;
    const double keys = (cost + kept * unequal(1) - unequal(splits) * cut_key_ / count) / gain;
    return whole > 1 ? std::max(keys, longest_alone(1)) : keys;
  }

  // How long the call takes, in ns, where the longest tile of rows sees so many keys.
  double time(int64_t splits, double keys) const {
    const double count = static_cast<double>(splits), all = rounds(splits), longest = keys / count;
    double busy = std::max(longest, all * longest - unequal(splits) / count);
    if (all > 1 && longest < kFirstComeKeys)
      busy = std::max(busy, 2 * longest - queries_ * processors_ / (tiles_ * count * count));
    const double combine = all > 1 ? kCombineTime : kIdleCombineTime;
    const double partials = splits > 1 ? combine + tiles_ * count * partial_bytes_ / (rate_ * processors_) : 0;
    return fixed(all) + busy * key_ * (splits > 1 ? cut_key_ : 1) + partials;
  }

 private:
  // What a call takes beside the keys of its tiles and their partials, in ns.
  static double fixed(double rounds) { return (rounds > 1 ? kFixedTimeOfRounds : kFixedTime) + rounds * kBetweenTiles; }

  // Tiles of a prompt see from no keys to all of them: over as many keys as it has queries their number falls. As long
  // ones come first, a block with several tiles has less to do than so many long ones, by this number of keys.
  double unequal(int64_t splits) const {
    const double all = rounds(splits);
    return all > 1 ? queries_ * all * all * processors_ / (2 * tiles_ * static_cast<double>(splits)) : 0;
  }

  // With so many keys or fewer the longest tile takes as long as those of a block with several.
  double longest_alone(int64_t splits) const {
    const double all = rounds(splits);
    return all > 1 ? unequal(splits) / (all - 1) : INFINITY;
  }

  double tiles_, processors_, rate_;  // the last: GB/s for each of them while all read
  bool reads_, even_;
  double queries_;        // of a prompt, in whose tiles of rows the number of keys falls by so much
  double key_, cut_key_;  // ns; and how many times that of a split
  double key_bytes_, partial_bytes_, partial_, combine_, idle_key_;
};

// Tiles of rows, if every request is as long as the longest one is said to be.
int64_t expected_tiles(const Problem& p, int rows) {
  return p.batch * pd_ceil_div(longest_query(p) * p.group, rows) * p.kv_heads;
}

// The same, but never more than there may be. With cu_seqlens_q that is about one more for every request, and a last
// round would seem to have few, or many, for tiles that are not there.
int64_t likely_tiles(const Problem& p, int rows) { return pd_min(most_tiles(p, rows), expected_tiles(p, rows)); }

// Whether most requests have far fewer tokens than the longest, as decode steps beside a chunk of a prompt. Then some
// tiles of rows only read, though others compute.
bool mixed(const Problem& p) { return p.cu_seqlens_q && 2 * p.total_q <= p.batch * longest_query(p); }

// As many as there will be: where lengths differ, about half of the last tile of every request is empty.
int64_t usual_tiles(const Problem& p, int rows) {
  if (even(p)) return likely_tiles(p, rows);
  const int64_t tiles = (p.total_q * p.group + p.batch * rows / 2) / rows;
  return pd_max(tiles, pd_min(p.batch, p.total_q)) * p.kv_heads;
}

// What a call with these cuts costs, to compare it with others: its time in ns, as the sum of four likely numbers of
// keys. `keys` is the most: twice likely if it is not much more than there are queries, else prompts are.
double cost_of(const Problem& p, const CutTimes& times, const Cuts& cuts, int64_t keys) {
  const auto time = [&](int64_t likely) {
    const int64_t own = pd_min(likely, keys);
    const int64_t splits = own < cuts.keys ? 1 : pd_max(pd_min(cuts.splits, own / cuts.least), 1);
    return times.time(splits, static_cast<double>(own));
  };
  const int64_t queries = longest_query(p), most = kMostKeys * queries;
  const bool wide = keys > most;
  return (wide ? 2 : 1) * time(queries) + time(kManyKeys * queries) + (wide ? 1 : 2) * time(most);
}

// All tiles into as many splits, `most` at most: the number that pays from the fewest keys on; or, where tiles compute
// and are even or of prompts, that with which the call costs least.
Cuts cut_alike(const Problem& p, const CutTimes& times, int64_t tiles, int64_t keys, int64_t most, int64_t processors) {
  const bool are_prompts = prompts(p), in_rounds = are_prompts && times.rounds(1) > 1;
  const bool by_cost = (even(p) || are_prompts) && !times.reads();
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
int64_t most_written(const Problem& p, const CutTimes& times, int64_t keys) {
  const int64_t dims = pd_max(p.head_dim_v, kUsualDim), most = kMostSplits * kUsualDim / dims;
  if (!times.reads()) return pd_max(most, keys * dims / (2 * kSplitKeys * kUsualDim));
  return pd_max(most, pd_max(pd_min(keys / kIdleSplitKeys, kMostSplits), keys / kSplitKeys));
}

// The same where few tiles leave most multiprocessors idle: as many splits as there are multiprocessors for.
Cuts cut_to_fill(const Problem& p, const CutTimes& times, int64_t tiles, int64_t keys, int64_t room,
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
Cuts cut_in_one_round(const Problem& p, const CutTimes& times, const Cuts& alike, int64_t keys, int64_t tiles,
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
  if (mixed(p) && by_length.keys < alike.keys) return by_length;
  return {alike.splits, alike.keys, fits ? wanted : alike.wanted, most, alike.least, alike.least_long};
}

// With more rounds, so would a tile that is longer than what a multiprocessor reads in all of them. Half a split for
// each tile is lost by rounding up. Lengths may also be even, and then the second kernel costs 1 to 2 us for nothing.
Cuts cut_in_rounds(const Problem& p, const CutTimes& times, const Cuts& alike, int64_t keys, int64_t tiles, int rows,
                   int64_t processors) {
  const bool may_be_long = static_cast<double>(keys) * times.alone() >= kMayBeLong;
  if (!may_be_long || !(times.reads() || mixed(p))) return alike;
  const int64_t room = kPartialTiles * processors * rows / (p.total_q * p.q_heads);
  const int64_t most = pd_min(room, kMostSplitsOfRounds);
  if (most <= alike.splits) return alike;
  const int64_t from = alike.splits > 1 ? alike.keys : static_cast<int64_t>(kLong / times.alone());
  return {alike.splits, from, 3 * processors + tiles / 2, most};
}

// As asked for, else what pays. The kernel compares that with the lengths that it finds, as the table may be much
// wider. Where a result must not depend on the other requests, neither may the cuts.
Cuts cuts_of(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits) {
  if (p.num_splits > 0) return {p.num_splits, 0, 0, p.num_splits};
  if (p.deterministic) return kWhole;
  const int64_t likely = likely_tiles(p, instance.tile_rows);
  if (likely == 0) return kWhole;
  const int64_t keys = most_keys(p, instance.tile_rows), processors = limits.processors;
  const int64_t room = kPartialTiles * processors / tiles;  // splits of each tile that there is memory for
  const CutTimes times(p, likely, instance, limits);
  const Cuts alike = likely * kIdle <= processors
                         ? cut_to_fill(p, times, likely, keys, room, processors)
                         : cut_alike(p, times, likely, keys, pd_min(keys / kSplitKeys, room), processors);
  if (likely <= processors) return cut_in_one_round(p, times, alike, keys, likely, room, processors);
  if (likely > kMostRounds * processors) return alike;
  return cut_in_rounds(p, times, alike, keys, likely, instance.tile_rows, processors);
}

// Keys and values are widened to float16 in shared memory.
bool widens(const Problem& p) { return dtype_bytes(p.cache.dtype) == 1 && !in_8_bits(p); }

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

// The kernel of a call, its tiles of rows at most, and how their keys are cut.
struct Choice {
  PrefillInstance instance;
  int64_t tiles;
  Cuts cuts;
};

Choice choice_of(const Problem& p, const PrefillInstance& instance, const DeviceLimits& limits) {
  const int64_t tiles = most_tiles(p, instance.tile_rows);
  return {instance, tiles, cuts_of(p, tiles, instance, limits)};
}

// Whether tiles of rows see few keys, whatever the lengths.
bool has_short_window(const Problem& p) {
  const int64_t window = p.window_left + p.window_right;
  return p.window_left >= 0 && p.window_right >= 0 && window <= kShortWindow && window < p.max_kv_len;
}

// Whether the model of a call's time holds: tiles of rows are about equally long, each request has several, and all
// take so many rounds at most.
bool has_few_even_rounds(const Problem& p, int rows, int processors, int64_t rounds = 2) {
  return (even(p) || has_short_window(p)) && longest_query(p) * p.group > rows &&
         usual_tiles(p, rows) <= rounds * processors;
}

// Whether a call costs less with these tiles than with others. Tall ones may fit into one round where others take two,
// or leave fewer multiprocessors idle where their keys are cut.
bool costs_less(const Problem& p, const Choice& these, const Choice& others, const DeviceLimits& limits,
                double save = kChoiceSaves) {
  const auto cost = [&](const Choice& choice) {
    const int rows = choice.instance.tile_rows;
    const CutTimes times(p, usual_tiles(p, rows), choice.instance, limits, false);
    // A short window begins and ends inside tiles of keys: in all one of them is computed for nothing.
    const int outside = has_short_window(p) ? choice.instance.keys : 0;
    return cost_of(p, times, choice.cuts, most_keys(p, rows) + outside);
  };
  return cost(these) < (1 - save) * cost(others);
}

// Whether rows see few keys, many of them at their edge: prompts with no more keys before them than they have
// themselves. There smaller tiles of keys save more than a third consumer costs. Tiles of rows then differ in length,
// so there must be several for each block.
bool short_prompts(const Problem& p, int64_t tiles, int processors) {
  return tiles >= kTilesOfShortPrompts * processors && longest_query(p) <= kShortPrompt && prompts(p);
}

// An 8-bit cache has instances of its own: one for products of 8 bits, one that widens it. Tall tiles of rows are
// faster where they are more than half full and either cost less, with few rounds, or give every multiprocessor one. In
// the latter case products of 8 bits above head_dim 64 ask for rounds enough, too, and those of 16 bits at head_dim 128
// for short prompts. Where results must not depend on the other requests, neither may the tiles.
Choice choose(const Problem& p, const DeviceLimits& limits) {
  if (widens(p)) {
    const PrefillInstance only = find_prefill_narrow_instance(p.head_dim, p.head_dim_v);
    return choice_of(p, with_whole_tokens(p, only, limits), limits);
  }
  const auto find = [&](bool tall) {
    const auto instances = in_8_bits(p) ? find_prefill_e4m3_instance : find_prefill_instance;
    return with_whole_tokens(p, instances(p.head_dim, p.head_dim_v, all_scores(p), tall), limits);
  };
  const PrefillInstance tall = find(true);
  const Choice other = choice_of(p, find(false), limits);
  if (tall.rows == other.instance.rows) return other;  // no tall tiles
  const int rows = other.instance.tile_rows, processors = limits.processors;
  const int64_t tiles = most_tiles(p, tall.tile_rows);
  const bool full = 2 * p.max_q_len * p.group > tall.tile_rows, many = full && tiles >= processors;
  if (full && !p.deterministic && has_few_even_rounds(p, rows, processors)) {
    const Choice taller = choice_of(p, tall, limits);
    if (costs_less(p, taller, other, limits)) return taller;
  }
  bool takes_tall = many || p.deterministic;
  if (in_8_bits(p) && tall.head_dim > TallPrefillE4m3Sizes64::kDim)
    takes_tall = many && !p.deterministic && fewer_rounds(p, tall.tile_rows, rows, processors);
  else if (tall.head_dim == TallPrefillSizes128::kDim)
    takes_tall = many && !p.deterministic &&
                 (short_prompts(p, tiles, processors) ||
                  (has_short_window(p) && fewer_rounds(p, tall.tile_rows, rows, processors)));
  if (!takes_tall) return other;
  const Choice taller = choice_of(p, tall, limits);
  const bool few_rounds = !p.deterministic && prompts(p) && has_few_even_rounds(p, rows, processors, 3);
  return few_rounds && costs_less(p, other, taller, limits, kPromptRowsSave) ? other : taller;
}

// Whether a request has no more rows than one tile of the decode kernel, which is as fast there. Widening takes long,
// so for it all rounds of tiles must be full enough. `deterministic` needs the splits that decode alone has.
bool suits_decode(const Problem& p, const DeviceLimits& limits) {
  if (!has_few_rows(p)) return false;
  if (p.deterministic || pd_max(p.head_dim, p.head_dim_v) <= kDecodeDims || has_few_rows(p, kDecodeWideRows))
    return true;
  const int64_t tiles = p.batch * p.kv_heads, processors = limits.processors;
  const int64_t rounds = pd_ceil_div(tiles, processors);
  if (widens(p)) return rounds < 2 || 4 * tiles < 3 * rounds * processors;
  return 3 * tiles < 2 * processors && most_keys(p, kFewRows) <= kFewKeys;
}

// Whether the decode kernel takes less time. It reads all keys for each 16 rows: on an H200 in 0.05, 0.2 and 0.9 ns for
// each key of such a tile, with up to 64, 128 and 256 dimensions, and above 128 keys it has partials to add. The
// prefill kernel takes 11 or 20 ns for each key where it cuts none. The limits are where both were as fast.
bool little_work(const Problem& p, const PrefillInstance& instance) {
  constexpr int kDecodeRows = 16;
  const int64_t keys = pd_max(most_keys(p, instance.tile_rows), 1), tiles = likely_tiles(p, kDecodeRows);
  const int64_t work = tiles * keys * dtype_bytes(p.cache.dtype);
  if (instance.head_dim <= 64) return work < 90000;
  if (instance.head_dim <= 128) return work < 45000 && tiles < 58 - (keys <= 128 ? 0 : 10000 / keys);
  return work < 22500 && tiles < 24 + 1000 / keys;
}

// The combine kernel. Several warps add the partials of a row where they may be many and rows are few. Its blocks
// start while those of the kernel before end, and the first multiprocessors that are free would take nearly all. So
// each asks for so much shared memory that none of them takes more than its share, or two.
void plan_combine(const Problem& p, const DeviceLimits& limits, PrefillPlan& plan) {
  const int64_t rows = p.total_q * p.q_heads, processors = limits.processors;
  const bool few = plan.most_splits >= kManySplits && rows <= kFewCombinedRows * processors;
  plan.combine_warps = !few ? 1 : rows > kVeryFewCombinedRows * processors ? kMostTogether / 2 : kMostTogether;
  const int64_t blocks = pd_ceil_div(rows * plan.combine_warps, int64_t{kCombineThreads / kWarp});
  plan.combine_blocks = pd_min(blocks, kMostCombineBlocks * processors);
  const int64_t share = pd_max(pd_ceil_div(plan.combine_blocks, processors), 2);
  const int64_t used = kSharedCostOfBlock + kCombineSharedBytes;
  plan.combine_bytes = static_cast<int>(pd_max(limits.shared_per_processor / share - used, 0));
}

}  // namespace

int64_t most_tiles(const Problem& p, int rows) {
  if (!p.cu_seqlens_q) return expected_tiles(p, rows);
  // The last tile of every request has a row at least.
  const int64_t unused = pd_min(p.batch, p.total_q) * (rows - 1);
  return (p.total_q * p.group + unused) / rows * p.kv_heads;
}

const char* prefill_why_not(const Problem& p, const DeviceLimits& limits) {
  if (*hopper_why_not(limits) != '\0') return hopper_why_not(limits);
  if (suits_decode(p, limits)) return "no more rows than one tile of the decode kernel";
  if (p.q_dtype == DType::kFloat32) return "float32";
  const char* const reason = decode_why_not(p, limits);
  if (*reason != '\0') return reason;
  if (dtype_bytes(p.cache.dtype) == 2 && p.q_dtype != p.cache.dtype) return "q and the cache differ in dtype";
  const auto [instance, tiles, cuts] = choose(p, limits);
  if (tiles > INT32_MAX / 2) return "there are more tiles of rows than 32 bits count";
  const int64_t splits = cuts.splits;
  // Where results must not depend on the other requests, none of the following may either.
  if (p.deterministic && splits > 1) return "deterministic and num_splits above 1";
  if (splits > 1 && (splits > kPartialTiles * limits.processors || tiles * splits > kPartialTiles * limits.processors))
    return "num_splits above 1 and more rows than it is meant for";
  if (!p.deterministic && tiles * splits * kFewTiles < limits.processors && little_work(p, instance))
    return "too few tiles of rows to fill the device";
  const int64_t busy = 2 * tiles > limits.processors ? tiles : tiles * splits;
  if (widens(p) && has_few_rows(p, kFewWidenedRows) && (p.deterministic || 4 * busy < 3 * limits.processors))
    return "an 8-bit cache and no more rows than the decode kernel is faster for";
  return "";
}

PrefillPlan plan_prefill(const Problem& p, const DeviceLimits& limits) {
  const Cache& c = p.cache;
  PrefillPlan plan = {};
  const auto [instance, tiles, cuts] = choose(p, limits);
  plan.instance = instance;
  plan.all_scores = all_scores(p);
  plan.widens = widens(p);
  plan.items = tiles / p.kv_heads;
  plan.few_tiles = kIdle * tiles <= limits.processors;
  plan.splits = cuts.splits;
  plan.most_splits = cuts.most;
  plan.splits_wanted = cuts.wanted;
  plan.cut_from_keys = cuts.keys;
  plan.least_split_keys = cuts.least;
  plan.least_long_split_keys = cuts.least_long;
  plan.blocks = pd_max(pd_min(tiles * plan.most_splits, limits.processors), 1);
  plan.read_once = longest_query(p) * p.group <= plan.instance.tile_rows;
  // A warp looks at as many requests at once as it has lanes. Where they have one tile of rows each, finding the first
  // tile takes no time, nor does finding that none is left. Entries of cu_seqlens_q that fall make more tiles than all
  // tokens have: then some are left out.
  plan.one_round = !plan.read_once && p.batch <= kWarp && tiles * plan.most_splits <= plan.blocks;
  plan_combine(p, limits, plan);
  plan.l2_keys = kL2Bytes / ((p.head_dim + p.head_dim_v) * dtype_bytes(c.dtype));
  // A tile is whole boxes, and so is a page; other caches are one page in which a box may begin anywhere. A box begins
  // where the swizzle does.
  const int64_t rows = c.block_table ? std::gcd(plan.instance.keys, c.page_size) : plan.instance.keys;
  const bool bulk = rows % kSwizzledRows == 0 && rows >= plan.instance.least_box_rows && !plan.widens;
  plan.box_rows = bulk ? static_cast<int32_t>(rows) : 0;
  return plan;
}

}  // namespace paged_attn
