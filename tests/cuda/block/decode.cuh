// The instructions of the route decode on the host that no other file here has, as the PTX manual describes them.
#pragma once

#include "decode/shape.cuh"
#include "partials.cuh"

namespace paged_attn {

PD_DEVICE uint64_t read_once_policy() { return 0; }

// A lane (g, t) has values 2t and 2t + 1 of row g, and gets rows 2t and 2t + 1 of column g.
PD_DEVICE uint32_t transpose_8x8(uint32_t x) {
  const int g = lane() / 4, t = lane() % 4;
  const int64_t* const all = exchange(x);
  const auto value = [&](int row) { return static_cast<uint32_t>(all[row * 4 + g / 2]) >> g % 2 * 16 & 0xffff; };
  return value(2 * t) | value(2 * t + 1) << 16;
}

}  // namespace paged_attn
