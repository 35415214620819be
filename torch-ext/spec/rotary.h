// Rotary embedding, element by element. Plain numbers only: this file is compiled for every device.
#pragma once

#include "qualifiers.h"

namespace paged_attn {

// Elements turn in pairs: neighbours (interleaved), or half a rotary_dim apart.
//
//   interleaved   0 1 | 2 3 | 4 5 ...         half-split   0 h | 1 h+1 | 2 h+2 ...     h = rotary_dim / 2
struct RotaryPair {
  int angle;    // column of cos and sin
  int partner;  // the other element
  bool second;  // whether this one is the second of the two
};

PD_FN RotaryPair rotary_pair(int dim, int rotary_dim, bool interleaved) {
  const int half_dim = rotary_dim / 2;
  RotaryPair pair;
  pair.second = interleaved ? dim % 2 == 1 : dim >= half_dim;
  pair.angle = interleaved ? dim / 2 : pair.second ? dim - half_dim : dim;
  pair.partner = interleaved ? dim ^ 1 : pair.second ? dim - half_dim : dim + half_dim;
  return pair;
}

// Element x, the other of its pair being y.
PD_FN float pd_rotate(float x, float y, float cos, float sin, bool second) {
  return second ? y * sin + x * cos : x * cos - y * sin;
}

}  // namespace paged_attn
