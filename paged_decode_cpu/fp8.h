// The values of the two 8-bit floating-point formats, computed at compile time from their definition.
#pragma once

#include <stdint.h>

namespace paged_attn {
namespace {

struct Fp8Values {
  float value[256];
};

// exponent_bits + mantissa_bits == 7. e4m3fn has no infinity and one NaN (all ones); e5m2 is IEEE-like.
constexpr float fp8_value(int bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int magnitude = bits & 0x7f;
  const int exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  const bool top = exponent == (1 << exponent_bits) - 1;
  float x = 0.f;
  if (top && has_infinity) {
    x = mantissa == 0 ? __builtin_huge_valf() : __builtin_nanf("");
  } else if (!has_infinity && magnitude == 0x7f) {
    x = __builtin_nanf("");
  } else {
    x = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    int power = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
    for (; power > 0; --power) x *= 2.f;
    for (; power < 0; ++power) x *= 0.5f;
  }
  return bits & 0x80 ? -x : x;
}

constexpr Fp8Values fp8_values(int exponent_bits, int mantissa_bits, bool has_infinity) {
  Fp8Values table{};
  for (int i = 0; i < 256; ++i) table.value[i] = fp8_value(i, exponent_bits, mantissa_bits, has_infinity);
  return table;
}

constexpr Fp8Values kE4M3Values = fp8_values(4, 3, false);
constexpr Fp8Values kE5M2Values = fp8_values(5, 2, true);

}  // namespace
}  // namespace paged_attn
