#include "call_times.h"

#include <algorithm>
#include <cmath>

#include "e4m3_sizes.h"
#include "facts.h"

namespace paged_attn {
namespace {

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
constexpr double kComputeRate = 5300;    // operations of a multiprocessor in a ns
constexpr double kFirstComeKeys = 1024;  // with fewer the second tile of a block does not wait for the end of its first
// Of the time, at least, that cuts are to save; the same where tiles are even and compute, so that little is left out
// of the model.
constexpr double kCutsSave = 0.03, kExactCutsSave = 0.05;

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

// What a call takes beside the keys of its tiles and their partials, in ns.
double fixed(double rounds) { return (rounds > 1 ? kFixedTimeOfRounds : kFixedTime) + rounds * kBetweenTiles; }

}  // namespace

CallTimes::CallTimes(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits,
                     bool may_read)
    : tiles_(static_cast<double>(tiles)), processors_(limits.processors), rate_(1. * limits.read_rate / processors_) {
  const double rows = static_cast<double>(longest_query(p) * p.group), dims = static_cast<double>(p.head_dim_v);
  reads_ = may_read && rows <= instance.tile_rows;
  const bool sees_all = p.window_left < 0 || p.window_left + 1 >= p.max_kv_len;  // before it
  queries_ = p.window_right == 0 && sees_all && !reads_ ? static_cast<double>(longest_query(p)) : 0;
  key_bytes_ = static_cast<double>((p.head_dim + p.head_dim_v) * dtype_bytes(p.cache.dtype));
  key_ = reads_ ? key_bytes_ / rate_ : key_time(p, instance, false);
  even_ = is_even(p);
  cut_key_ = reads_ || !even_ ? 1 : key_time(p, instance, true) / key_;
  // A partial is written and read, as float32.
  partial_bytes_ = (reads_ ? rows : instance.tile_rows) * dims * 2 * sizeof(float);
  idle_key_ = reads_ ? alone() : std::max(key_operations(p, instance) / kIdleComputeRate, kWeightsTime);
}

double CallTimes::rounds(int64_t splits) const {
  const double all = tiles_ * static_cast<double>(splits), full = std::floor(all / processors_);
  const double rest = all - full * processors_;
  if (rest == 0) return full;
  if (!reads_) return full + 1;
  const double own = full == 0 && rest > processors_ / 2 ? kPairedRate : kAloneRate;
  return full + std::max(rest / processors_, std::min(rate_ / own, 1.));
}

double CallTimes::alone() const { return key_bytes_ / kIdleRate; }

double CallTimes::of_round() const { return std::max(alone(), key_); }

double CallTimes::least_keys_when_idle(int64_t splits) const {
  const double count = static_cast<double>(splits);
  return (kIdleCombineTime + tiles_ * count * partial_bytes_ / kIdlePartialRate) / (idle_key_ * (0.9 - 1 / count));
}

double CallTimes::least_keys(int64_t splits) const {
  const double count = static_cast<double>(splits), whole = rounds(1), cut = rounds(splits);
  const bool exact = even_ && !reads_;
  const double more = exact ? fixed(cut) - fixed(whole) : 0, kept = 1 - (exact ? kExactCutsSave : kCutsSave);
  const double cost = (cut * partial_bytes_ / rate_ + kCombineTime + more) / key_;  // in keys
  const double from = cost / (kept - cut_key_ / count);
  if (!reads_ && from <= std::min(longest_alone(1), longest_alone(splits))) return from;
  const double gain = kept * whole - cut * cut_key_ / count;
  if (gain <= 0) return INFINITY;
  const double keys = (cost + kept * unequal(1) - unequal(splits) * cut_key_ / count) / gain;
  return whole > 1 ? std::max(keys, longest_alone(1)) : keys;
}

double CallTimes::time(int64_t splits, double keys) const {
  const double count = static_cast<double>(splits), all = rounds(splits), longest = keys / count;
  double busy = std::max(longest, all * longest - unequal(splits) / count);
  if (all > 1 && longest < kFirstComeKeys)
    busy = std::max(busy, 2 * longest - queries_ * processors_ / (tiles_ * count * count));
  const double combine = all > 1 ? kCombineTime : kIdleCombineTime;
  const double partials = splits > 1 ? combine + tiles_ * count * partial_bytes_ / (rate_ * processors_) : 0;
  return fixed(all) + busy * key_ * (splits > 1 ? cut_key_ : 1) + partials;
}

double CallTimes::unequal(int64_t splits) const {
  const double all = rounds(splits);
  return all > 1 ? queries_ * all * all * processors_ / (2 * tiles_ * static_cast<double>(splits)) : 0;
}

double CallTimes::longest_alone(int64_t splits) const {
  const double all = rounds(splits);
  return all > 1 ? unequal(splits) / (all - 1) : INFINITY;
}

}  // namespace paged_attn
