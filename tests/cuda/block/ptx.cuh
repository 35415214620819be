// The instructions of paged_decode_cuda/ptx.cuh that blocks on the host need.
#pragma once

#include <math.h>

#include <type_traits>
#include <utility>

#include "decode/sizes.h"
#include "lanes.h"
#include "plan.h"
#include "spec/problem.h"
#include "spec/ranges.h"
#include "spec/state.h"

namespace paged_attn {

PD_DEVICE float pd_tanh(float x) { return tanhf(x); }

}  // namespace paged_attn

#include "spec/score.h"

namespace paged_attn {

PD_DEVICE float fast_exp2(float x) { return exp2f(x); }
constexpr float kFastCapScale = 2.f * PD_LOG2E, kMostFastCap = 64.f;
PD_DEVICE float fast_capped(float scaled, float softcap) {
  return fmaf(-2.f * softcap, 1.f / (fast_exp2(scaled) + 1.f), softcap);
}
PD_DEVICE float fast_rescale(float from, float to) { return from == to ? 1.f : fast_exp2(from - to); }
PD_DEVICE void wait_for_predecessor() {}
PD_DEVICE void let_successor_start() {
  if (blockIdx.x == 0 && machine.when_released) std::exchange(machine.when_released, nullptr)();
}
PD_DEVICE void prefetch_l2(const void*) {}
template <typename T>
PD_DEVICE void touch(const T&) {}
PD_DEVICE unsigned long long launch_number() { return 8 * 0x9e3779b97f4a7c15ull; }

struct Fp32 {
  static constexpr DType kDType = DType::kFloat32;
  static constexpr int kBytes = 4;
};
struct Fp16 {
  static constexpr DType kDType = DType::kFloat16;
  static constexpr int kBytes = 2;
};
struct Bf16 {
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr int kBytes = 2;
};
struct E4m3 {
  static constexpr DType kDType = DType::kFloat8E4M3;
  static constexpr int kBytes = 1;
};
struct E5m2 {
  static constexpr DType kDType = DType::kFloat8E5M2;
  static constexpr int kBytes = 1;
};
PD_DEVICE uint32_t __byte_perm(uint32_t a, uint32_t b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return word;
}

template <typename Kv>
struct IsBf16 {
  static constexpr bool value = false;
};
template <>
struct IsBf16<Bf16> {
  static constexpr bool value = true;
};

template <typename Type>
PD_DEVICE float value_at(const void* place) {
  if constexpr (IsBf16<Type>::value) {
    uint16_t half;
    memcpy(&half, place, 2);
    return __uint_as_float(static_cast<uint32_t>(half) << 16);
  } else {
    _Float16 half;
    memcpy(&half, place, 2);
    return static_cast<float>(half);
  }
}

PD_DEVICE uint16_t narrow_bf16(float x) {
  if (isnan(x)) return 0x7fff;
  const uint32_t bits = __float_as_uint(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
PD_DEVICE uint16_t narrow_fp16(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
template <bool kBf16>
PD_DEVICE uint32_t pack_pair(float low, float high) {
  const uint32_t l = kBf16 ? narrow_bf16(low) : narrow_fp16(low), h = kBf16 ? narrow_bf16(high) : narrow_fp16(high);
  return h << 16 | l;
}

template <bool kBf16>
PD_DEVICE float2 pair_values(uint32_t pair) {
  using Type = std::conditional_t<kBf16, Bf16, Fp16>;
  const uint16_t halves[2] = {static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)};
  return make_float2(value_at<Type>(&halves[0]), value_at<Type>(&halves[1]));
}

// e5m2 is the upper byte of an fp16; e4m3 has the same layout with a bias of 7 and 3 bits of mantissa.
template <typename Kv>
PD_DEVICE float narrow_value(uint8_t bits) {
  if constexpr (__is_same(Kv, E5m2)) {
    const uint16_t half = static_cast<uint16_t>(bits << 8);
    return value_at<Fp16>(&half);
  }
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent == 0 ? ldexpf(static_cast<float>(mantissa), -9)
                                   : ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 128 ? -size : size;
}
// The nearest e4m3, the even one of two; beyond the largest finite value it is that.
PD_DEVICE uint32_t narrow_e4m3(float x) {
  if (isnan(x)) return 0x7f;
  const float size = fabsf(x);
  uint32_t bits = 0;  // the largest that is not above it
  while (bits < 0x7e && narrow_value<E4m3>(static_cast<uint8_t>(bits + 1)) <= size) ++bits;
  if (bits < 0x7e) {
    const float below = size - narrow_value<E4m3>(static_cast<uint8_t>(bits));
    const float above = narrow_value<E4m3>(static_cast<uint8_t>(bits + 1)) - size;
    if (above < below || (above == below && bits % 2 == 1)) ++bits;
  }
  return bits | (x < 0.f ? 0x80u : 0u);
}

PD_DEVICE int this_thread() { return threadIdx.x; }
PD_DEVICE void stop_with_error() { fail("the kernel has stopped with an error"); }

template <typename Kv, bool kHigh>
PD_DEVICE uint32_t fp8_pair_to_fp16(uint32_t word) {
  const uint32_t pair = kHigh ? word >> 16 : word;
  return pack_pair<false>(narrow_value<Kv>(static_cast<uint8_t>(pair)),
                          narrow_value<Kv>(static_cast<uint8_t>(pair >> 8)));
}
PD_DEVICE uint32_t fp16_pair_to_bf16(uint32_t pair) {
  const uint16_t halves[2] = {static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)};
  return pack_pair<true>(value_at<Fp16>(&halves[0]), value_at<Fp16>(&halves[1]));
}

// d += a * b on a 16x8 tile with 16 terms. A lane (g, t) has of a terms 2t and 2t + 1 of rows g and g + 8, then of the
// same rows those 8 further; of b the same terms of column g; of d columns 2t and 2t + 1 of both rows.
template <bool kBf16>
PD_DEVICE void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, const uint32_t (&b)[2]) {
  using Type = std::conditional_t<kBf16, Bf16, Fp16>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Operands* const all = exchange_operands({{a0, a1, a2, a3}, {b[0], b[1]}});
  float a[2][16], terms[2][16];
  for (int i = 0; i < 2; ++i) {
    for (int term = 0; term < 16; ++term) {
      const int lane = term % 8 / 2, high = term / 8;
      const auto half = [&](uint32_t word) {
        const uint16_t bits = static_cast<uint16_t>(word >> term % 2 * 16);
        return value_at<Type>(&bits);
      };
      a[i][term] = half(all[g * 4 + lane].a[high * 2 + i]);
      terms[i][term] = half(all[(2 * t + i) * 4 + lane].b[high]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int term = 0; term < 16; ++term) sum += double(a[i / 2][term]) * terms[i % 2][term];
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace paged_attn

#include "numbers.cuh"
