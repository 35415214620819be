// From the products of one row with the keys of a tile to probabilities.
#pragma once

#include "vec.h"  // has the tanh of spec/score.h

#include "spec/score.h"
#include "spec/state.h"

namespace paged_attn {
namespace {

// Probabilities are relative to a score that may lie this much (in log2) below the largest one: a row changes it once
// or twice then, and not at every new maximum.
constexpr float kMaxLogProbability = 8.f;

// How far below the top score, in log2, a row begins. float16 has its full precision from 2^-14 on and ends at 2^16: a
// probability begins at 2^7, may grow to 2^15, and down to 2^-21 of the first one it has all its bits.
template <class Ops>
constexpr float kBaseBelow = Ops::kElemType == DType::kFloat16 ? PD_HALF_BELOW : 0.f;

// From which size on float32 rounds what a row is relative to by more than a probability may be wrong, so that its
// scores must be rounded alike: by more than 1, or, where probabilities are rounded to 16 bits, by more than 2^-11.
// Rounded alike, the score that a row began with gets a power of two, which 16 bits hold.
template <class Ops>
constexpr float kFarScore = Ops::kElemType == DType::kFloat32 ? 1 << 24 : 1 << 13;

// The sums of a row are relative to *m from now on to new_m.
inline void change_base(float new_m, float* m, f32v* sum, float* acc, int64_t width) {
  const float old_m = *m;
  *m = new_m;
  if (old_m == -INFINITY) return;  // they are 0
  const float rescale = pd_rescale(old_m, new_m);
  *sum *= rescale;
  for (int64_t d = 0; d < width; d += kLanes) store<DType::kFloat32>(acc + d, load<DType::kFloat32>(acc + d) * rescale);
}

// Far out, a base is rounded by many powers of two, and so must be the scores that it is taken from: the product that
// goes straight into a subtraction, in one instruction, is not. So they are multiplied here, and their factor is 1
// then.
[[gnu::noinline]] inline void round_scores(float* scores, int64_t n, float* factor) {
  for (int64_t j = 0; j < n; j += kLanes)
    store<DType::kFloat32>(scores + j, load<DType::kFloat32>(scores + j) * *factor);
  *factor = 1.f;
}

// The base of a row that has n more scores, of which `top` has the largest: it moves when that lies more than
// kMaxLogProbability above where it would be with a new base, and *sum and acc move along.
template <class Ops>
[[gnu::always_inline]] inline float base_of(f32v top, float* m, f32v* sum, float* acc, int64_t width, float* scores,
                                            int64_t n, float* factor) {
  if (any_above(top, splat(*m + (kMaxLogProbability + kBaseBelow<Ops>))))
    change_base(max_lanes(top) - kBaseBelow<Ops>, m, sum, acc, width);
  const float base = *m == -INFINITY ? 0.f : *m;
  if (fabsf(base) > kFarScore<Ops>) round_scores(scores, n, factor);
  return base;
}

// What turns the products of one row into scores.
struct ScoreOf {
  float scale, softcap, slope;
  float q_pos;  // counted from the start of the tile: far out, float32 no longer holds every position
};

// Turns the products of one row with n keys into probabilities relative to *m. Keys outside
// [visible.begin, visible.end), counted from the start of the tile, get probability 0.
template <class Ops>
inline void softmax_row(float* scores, int64_t n, KvRange visible, const ScoreOf& score, typename Ops::Elem* p,
                        float* m, float* l, float* acc, int64_t width) {
  static const i32v kLaneNumbers = lane_numbers(LaneIndices{});
  const bool whole = visible.begin <= 0 && visible.end == n && n % kLanes == 0;
  // Without softcap and slope the scale and the change to log2 units are one factor, taken late.
  const bool plain = score.softcap == 0.f && score.slope == 0.f && whole && score.scale >= 0.f;
  float factor = plain ? score.scale * PD_LOG2E : 1.f;
  f32v top = splat(-INFINITY);
  if (plain) {
    for (int64_t j = 0; j < n; j += kLanes) top = max(top, load<DType::kFloat32>(scores + j));
    top *= factor;
  } else {
    for (int64_t j = 0; j < n; j += kLanes) {
      i32v key = kLaneNumbers + static_cast<int32_t>(j);
      f32v distance = score.q_pos - __builtin_convertvector(key, f32v);
      distance = distance < splat(0.f) ? -distance : distance;
      f32v x =
          pd_score(load<DType::kFloat32>(scores + j), score.scale, score.softcap, score.slope, distance) * PD_LOG2E;
      x = key < i32v{} + static_cast<int32_t>(visible.begin) ? splat(-INFINITY) : x;
      x = key >= i32v{} + static_cast<int32_t>(visible.end) ? splat(-INFINITY) : x;
      store<DType::kFloat32>(scores + j, x);
      top = max(top, x);
    }
  }
  f32v sum = load<DType::kFloat32>(l);
  const float base = base_of<Ops>(top, m, &sum, acc, width, scores, n, &factor);
  for (int64_t j = 0; j < n; j += kLanes) {
    f32v x = exp2(load<DType::kFloat32>(scores + j) * factor - base);
    sum += x;
    Ops::store_elems(p + j, x);
  }
  for (int64_t j = round_up(n, kLanes); j < round_up(n, Ops::kValueKeys); j += kLanes) Ops::store_elems(p + j, f32v{});
  store<DType::kFloat32>(l, sum);
}

}  // namespace
}  // namespace paged_attn
