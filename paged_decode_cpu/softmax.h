// Online softmax: from the products of one row with the keys of a tile to probabilities, exp2(score - base), which are
// not normalised. The base is the row's reference score, the m of spec/state.h. It lags behind the running maximum, so
// that the sums are seldom rescaled.
#pragma once

#include "vec.h"  // has the tanh of spec/score.h

#include "spec/score.h"
#include "spec/state.h"

namespace paged_attn {
namespace {

// How far, in log2, a score may exceed the score that the base was taken from before the base moves: a row moves it
// once or twice, not at every new maximum.
constexpr float kMaxLogProbability = 8.f;

// How far below the top score, in log2, a new base lies. float16 has its full precision from 2^-14 on and ends at 2^16:
// the first top score has probability 2^7, later ones up to 2^15, and scores down to 2^-21 of the first have all bits.
template <class Ops>
constexpr float kBaseBelow = Ops::kElemType == DType::kFloat16 ? PD_HALF_BELOW : 0.f;

// From this size on a base is rounded to float32 by too much: by 1 or more, or, where probabilities are rounded to 16
// bits, by 2^-11 or more. Then scores are rounded alike (round_scores): the score that the base was taken from gets a
// power of two as its probability, which 16 bits hold exactly.
template <class Ops>
constexpr float kFarScore = Ops::kElemType == DType::kFloat32 ? 1 << 24 : 1 << 13;

// Moves the base of a row from *m to new_m, and rescales its sums.
inline void change_base(float new_m, float* m, f32v* sum, float* acc, int64_t width) {
  const float old_m = *m;
  *m = new_m;
  if (old_m == -INFINITY) return;  // they are 0
  const float rescale = pd_rescale(old_m, new_m);
  *sum *= rescale;
  for (int64_t d = 0; d < width; d += kLanes) store<DType::kFloat32>(acc + d, load<DType::kFloat32>(acc + d) * rescale);
}

// The base of huge scores was rounded to float32, so the scores must be rounded in the same way before it is
// subtracted. softmax_row computes score * factor - base in one instruction (FMA), which does not round the product. So
// scores are multiplied here, and their factor becomes 1.
[[gnu::noinline]] inline void round_scores(float* scores, int64_t n, float* factor) {
  for (int64_t j = 0; j < n; j += kLanes)
    store<DType::kFloat32>(scores + j, load<DType::kFloat32>(scores + j) * *factor);
  *factor = 1.f;
}

// The base of a row for n more scores, of which `top` has the largest. The base moves if that exceeds the score it was
// taken from by more than kMaxLogProbability; *sum and acc are rescaled then.
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
