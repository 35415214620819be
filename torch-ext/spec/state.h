// The state of the online softmax. A partial result of a row over some of its keys is (m, l, acc):
//   m    the reference score in log2 units: the largest score, or one near it; PD_EMPTY when no key was seen
//   l    sum of exp2(score - m)
//   acc  sum of exp2(score - m) * value, not normalised
// Any m gives the same result but for rounding; one near the largest score avoids overflow. Empty is (PD_EMPTY, 0, 0),
// the neutral element of the merge. PD_EMPTY is -inf (so no fast-math here), or, where a compiler assumes finite
// numbers, a number below all scores.
#pragma once

#include "qualifiers.h"

namespace paged_attn {

#define PD_LOG2E 1.4426950408889634f
#define PD_LN2 0.6931471805599453f

// How far below the largest score, in log2 units, the reference score begins where weights are float16: then the
// largest weight is 2^7. float16 ends at 2^16 and loses precision below 2^-14, and a row may have a million keys of
// such small weights.
#define PD_HALF_BELOW 7.f

// What a device keeps of a row beside its acc.
struct State {
  float m, l;
};

// Factor that takes sums relative to `from` to sums relative to `to` (to >= from). The comparison
// covers two empty partials and two infinite ones, where a difference would be NaN.
PD_FN float pd_rescale(float from, float to) { return from == to ? 1.f : PD_EXP2(from - to); }

// The union of partials over disjoint keys, in their order. `of(i)` is the State of one; the acc of the union is the
// sum of theirs, each times pd_rescale(its m, m of the union).
template <class StateOf>
PD_FN State pd_merge(int64_t count, StateOf of) {
  State sum = {PD_EMPTY, 0.f};
  for (int64_t i = 0; i < count; ++i) sum.m = of(i).m > sum.m ? of(i).m : sum.m;
  for (int64_t i = 0; i < count; ++i) sum.l += of(i).l * pd_rescale(of(i).m, sum.m);
  return sum;
}

// The State of a part of which only the result is known: its out is the acc then. A part without keys has an lse of
// -inf, for which a device that knows no infinity has another test.
PD_FN State pd_state_of_result(float lse, bool is_empty) {
  State state = {PD_EMPTY, 0.f};
  if (!is_empty) {
    state.m = lse * PD_LOG2E;
    state.l = 1.f;
  }
  return state;
}

// A sink is one more key without a value: merged once per row, after all splits. *acc_factor: for acc, as m may change.
PD_FN void pd_add_sink(float sink, PD_THREAD float* m, PD_THREAD float* l, PD_THREAD float* acc_factor) {
  float sink_m = sink * PD_LOG2E;
  float new_m = *m > sink_m ? *m : sink_m;
  *acc_factor = pd_rescale(*m, new_m);
  *l = *l * *acc_factor + (sink_m == PD_EMPTY ? 0.f : pd_rescale(sink_m, new_m));
  *m = new_m;
}

// log of the whole denominator, natural units; PD_EMPTY when no key and no sink was seen.
PD_FN float pd_lse(float m, float l) { return l == 0.f ? PD_EMPTY : (m + PD_LOG2(l)) * PD_LN2; }

// Factor that turns acc into the output; 0 for a row that saw nothing.
PD_FN float pd_normalizer(float l) { return l == 0.f ? 0.f : 1.f / l; }

// The same with v_descale. For a row that saw nothing that of an idle entry may be no number.
PD_FN float pd_with_v_descale(float normalizer, float v_descale) {
  return normalizer == 0.f ? 0.f : normalizer * v_descale;
}

}  // namespace paged_attn
