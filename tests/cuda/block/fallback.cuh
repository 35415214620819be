// What the route fallback needs on the host besides.
#pragma once

#include "float32.cuh"

namespace paged_attn {

// Selectors of __byte_perm
constexpr unsigned kLowBytesInTurns = 0x5140, kHighBytesInTurns = 0x7362;

}  // namespace paged_attn
