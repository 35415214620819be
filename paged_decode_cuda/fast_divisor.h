// Division of a non-negative int by a number that the host knows: a multiplication and a shift.
#pragma once

#include <stdint.h>

#include "spec/problem.h"

namespace paged_attn {

struct FastDivisor {
  uint32_t divisor = 1, multiplier = 0;
  int32_t shift = -1;

  FastDivisor() = default;
  explicit FastDivisor(int64_t value) : divisor(static_cast<uint32_t>(value)) {
    if (value <= 1) return;                               // 0 divides nothing: it says that there is nothing to divide
    while ((int64_t{1} << (shift + 1)) < value) ++shift;  // 2^(shift + 1) >= value
    multiplier = static_cast<uint32_t>((uint64_t{1} << (32 + shift)) / static_cast<uint64_t>(value) + 1);
  }

  PD_METHOD int divide(int n) const { return shift < 0 ? n : static_cast<int>(high_product(n) >> shift); }

 private:
  PD_METHOD uint32_t high_product(int n) const {
#ifdef __CUDA_ARCH__
    return __umulhi(static_cast<uint32_t>(n), multiplier);
#else
    return static_cast<uint32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier >> 32);
#endif
  }
};

}  // namespace paged_attn
