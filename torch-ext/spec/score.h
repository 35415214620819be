// One score, in natural-log units: softcap first, ALiBi second (the order of flash-attn 2).
// F is float or a type of several lanes with + and *, for which pd_tanh is overloaded.
#pragma once

#include "qualifiers.h"

namespace paged_attn {

// distance is |q_pos - key|. Off: softcap == 0, slope == 0.
template <typename F>
PD_FN F pd_score(F qk, float scale, float softcap, float slope, F distance) {
  F s = qk * scale;
  if (softcap != 0.f) s = pd_tanh(s * (1.f / softcap)) * softcap;
  return s - distance * slope;
}

}  // namespace paged_attn
