// A register of kLanes floats, in the compiler's own vector types: one source for every instruction
// set. The file that includes this defines PD_LANES. Everything here has internal linkage: a shared
// inline function compiled once with AVX-512 could be the copy that the linker keeps for all.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "fp8.h"
#include "spec/problem.h"

#if defined(__AVX512F__) || defined(__F16C__)
// GCC warns of the undefined registers that its own intrinsics start from.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

// Only the files that define PD_NEON use Arm's own instructions; the portable path does without, on Arm too.
#if defined(PD_NEON)
#include <arm_neon.h>
#endif

namespace paged_attn {
namespace {

constexpr int kLanes = PD_LANES;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint8_t u8v __attribute__((vector_size(kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline f32v splat(float x) { return x - f32v{}; }

template <int... kI>
struct Indices {};
template <int kN, int... kI>
struct MakeIndices : MakeIndices<kN - 1, kN - 1, kI...> {};
template <int... kI>
struct MakeIndices<0, kI...> {
  using type = Indices<kI...>;
};
using LaneIndices = typename MakeIndices<kLanes>::type;

template <int... kI>
inline i32v lane_numbers(Indices<kI...>) {
  return i32v{kI...};
}

// Lane i reads lane i ^ kW.
template <int kW, int... kI>
inline f32v crossed(f32v v, Indices<kI...>) {
  return __builtin_shufflevector(v, v, (kI ^ kW)...);
}

// Groups of kW lanes, a and b in turns: the even groups of both registers, or the odd ones.
template <int kW, int... kI>
inline f32v low_halves(f32v a, f32v b, Indices<kI...>) {
  return __builtin_shufflevector(a, b, (kI & kW ? (kI ^ kW) + kLanes : kI)...);
}
template <int kW, int... kI>
inline f32v high_halves(f32v a, f32v b, Indices<kI...>) {
  return __builtin_shufflevector(a, b, (kI & kW ? kI + kLanes : kI ^ kW)...);
}

// The even or odd ones of the lanes of both registers, and the first or second half of their lanes in turns.
template <int... kI>
inline f32v even_lanes(f32v a, f32v b, Indices<kI...>) {
  return __builtin_shufflevector(a, b, (2 * kI)...);
}
template <int... kI>
inline f32v odd_lanes(f32v a, f32v b, Indices<kI...>) {
  return __builtin_shufflevector(a, b, (2 * kI + 1)...);
}
template <int kHalf, int... kI>
inline f32v interleaved(f32v a, f32v b, Indices<kI...>) {
  return __builtin_shufflevector(a, b, (kHalf * kLanes / 2 + kI / 2 + kI % 2 * kLanes)...);
}

// The shuffles that need no register for their indices, low and high: kW = 1 and 2 interleave numbers or pairs of
// numbers within every group of 4 lanes (a0 b0 a1 b1 and a2 b2 a3 b3; a0 a1 b0 b1 and a2 a3 b2 b3), kW = 4 takes the
// even or odd groups of `a` and then those of `b`.
template <int kW, int kHigh, int... kI>
inline f32v shuffle(f32v a, f32v b, Indices<kI...>) {
  if constexpr (kW == 1)
    return __builtin_shufflevector(a, b, (kI / 4 * 4 + kHigh * 2 + kI % 4 / 2 + kI % 2 * kLanes)...);
  if constexpr (kW == 2)
    return __builtin_shufflevector(a, b, (kI / 4 * 4 + kHigh * 2 + kI % 2 + kI % 4 / 2 * kLanes)...);
  if constexpr (kW == 4)
    return __builtin_shufflevector(
        a, b, (kI * 2 / kLanes * kLanes + kI / 4 % (kLanes > 4 ? kLanes / 8 : 1) * 8 + kHigh * 4 % kLanes + kI % 4)...);
}
template <int kW>
inline f32v low(f32v a, f32v b) {
  return shuffle<kW, 0>(a, b, LaneIndices{});
}
template <int kW>
inline f32v high(f32v a, f32v b) {
  return shuffle<kW, 1>(a, b, LaneIndices{});
}
template <int kW>
inline f32v add_halves(f32v a, f32v b) {
  return low<kW>(a, b) + high<kW>(a, b);
}

// Sums across lanes of kLanes registers at once: lane i of the result is the sum of v[i].
inline f32v sum_lanes(f32v* v) {
#if defined(PD_NEON)
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
  for (int i = 0; i < kLanes; i += 4)
    v[i / 4] = add_halves<2>(add_halves<1>(v[i], v[i + 1]), add_halves<1>(v[i + 2], v[i + 3]));
  if constexpr (kLanes > 4)
    for (int count = kLanes / 4; count > 1; count /= 2)
      for (int i = 0; i < count; i += 2) v[i / 2] = add_halves<4>(v[i], v[i + 1]);
  return v[0];
#endif
}

// Transposes kLanes x kLanes values of 32 bits in place.
inline void transpose(f32v* v) {
  for (int i = 0; i < kLanes; i += 4) {
    const f32v ab = low<1>(v[i], v[i + 1]), cd = low<1>(v[i + 2], v[i + 3]);
    const f32v AB = high<1>(v[i], v[i + 1]), CD = high<1>(v[i + 2], v[i + 3]);
    v[i] = low<2>(ab, cd);
    v[i + 1] = high<2>(ab, cd);
    v[i + 2] = low<2>(AB, CD);
    v[i + 3] = high<2>(AB, CD);
  }
  for (int i = 0; i < 4 && kLanes > 4; ++i) {
    const f32v even = low<4>(v[i], v[4 + i]), odd = high<4>(v[i], v[4 + i]);
    if constexpr (kLanes == 8) {
      v[i] = even;
      v[4 + i] = odd;
    } else if constexpr (kLanes == 16) {
      const f32v later_even = low<4>(v[8 + i], v[12 + i]), later_odd = high<4>(v[8 + i], v[12 + i]);
      v[i] = low<4>(even, later_even);
      v[4 + i] = low<4>(odd, later_odd);
      v[8 + i] = high<4>(even, later_even);
      v[12 + i] = high<4>(odd, later_odd);
    }
  }
}

// Transposes kRows x kRows groups of kLanes / kRows lanes in place.
template <int kRows, int kStep = kRows / 2>
inline void transpose_groups(f32v* v) {
  for (int base = 0; base < kRows; base += 2 * kStep)
    for (int i = base; i < base + kStep; ++i) {
      f32v a = v[i], b = v[i + kStep];
      v[i] = low_halves<kStep * kLanes / kRows>(a, b, LaneIndices{});
      v[i + kStep] = high_halves<kStep * kLanes / kRows>(a, b, LaneIndices{});
    }
  if constexpr (kStep > 1) transpose_groups<kRows, kStep / 2>(v);
}

inline f32v max(f32v a, f32v b) { return a > b ? a : b; }

template <int kW = kLanes / 2>
inline float max_lanes(f32v v) {
  v = max(v, crossed<kW>(v, LaneIndices{}));
  if constexpr (kW == 1) {
    return v[0];
  } else {
    return max_lanes<kW / 2>(v);
  }
}

inline bool any_above(f32v a, f32v b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(bit_cast<__m512>(a), bit_cast<__m512>(b), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), _CMP_GT_OQ)) != 0;
#elif defined(PD_NEON)
  return vmaxvq_u32(vcgtq_f32(a, b)) != 0;
#else
  i32v above = a > b;
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= above[i];
  return any != 0;
#endif
}

template <int kW = kLanes / 2>
inline float add_lanes(f32v v) {
  v += crossed<kW>(v, LaneIndices{});
  if constexpr (kW == 1) {
    return v[0];
  } else {
    return add_lanes<kW / 2>(v);
  }
}

// 2^x for x <= 0, to one or two units in the last place; 0 below 2^-125 (2^-126 without AVX-512), NaN stays NaN.
inline f32v exp2(f32v x) {
#if defined(__AVX512F__)
  // Minimax polynomial of 2^f on [0, 1], f = x - floor(x), relative error 1e-7.
  const __m512 exponent = bit_cast<__m512>(x);
  const f32v f = bit_cast<f32v>(_mm512_reduce_ps(exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  f32v p = splat(1.8671305e-3f);
  p = p * f + 9.01702941e-3f;
  p = p * f + 5.57999138e-2f;
  p = p * f + 0.24016445f;
  p = p * f + 0.693151312f;
  p = p * f + 1.f;
  // p * 2^floor(x), and 0 where that may be subnormal: a subnormal result takes Intel's processors 66 ns for each
  // register.
  const __mmask16 normal = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-125.f), _CMP_NLT_UQ);  // or NaN
  return bit_cast<f32v>(_mm512_maskz_scalef_ps(normal, bit_cast<__m512>(p), exponent));
#else
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
  const f32v shift = splat(12582912.f);
  x = x < splat(-127.f) ? splat(-127.f) : x;
  f32v shifted = x + shift;
  f32v f = x - (shifted - shift);
  // Minimax polynomial of 2^f on [-0.5, 0.5], relative error 2e-9 before rounding.
  f32v p = splat(1.53458118e-4f);
  p = p * f + 1.33999312e-3f;
  p = p * f + 9.61848896e-3f;
  p = p * f + 5.55032878e-2f;
  p = p * f + 0.240226469f;
  p = p * f + 0.693147206f;
  p = p * f + 1.f;
  u32v exponent = (bit_cast<u32v>(shifted) + 127u) << 23;
  return p * bit_cast<f32v>(exponent);
#endif
}

inline f32v pd_tanh(f32v x) {
  f32v ax = x < splat(0.f) ? -x : x;
  // Near 0 the quotient below cancels: there x + x^3 * (minimax polynomial in x^2), error 4e-9.
  f32v z = x * x;
  f32v p = splat(-5.71704495e-3f);
  p = p * z + 2.06505872e-2f;
  p = p * z - 5.37434981e-2f;
  p = p * z + 0.133314913f;
  p = p * z - 0.333332839f;
  f32v small = x + x * z * p;
  f32v e = exp2(ax * -2.8853900817779268f);  // exp(-2 |x|)
  f32v large = (1.f - e) / (1.f + e);
  large = x < splat(0.f) ? -large : large;
  return ax < splat(0.625f) ? small : large;
}

// Whole numbers of 8 or 16 bits to twice as many, in one instruction: g++ 12 widens two halves and joins them.
inline u16v widened(u8v x) {
#if defined(__AVX512F__)
  return bit_cast<u16v>(_mm256_cvtepu8_epi16(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  return bit_cast<u16v>(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bit_cast<int64_t>(x))));
#else
  return __builtin_convertvector(x, u16v);
#endif
}
inline u32v widened(u16v x) {
#if defined(__AVX512F__)
  return bit_cast<u32v>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)));
#elif defined(__AVX2__)
  return bit_cast<u32v>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x)));
#else
  return __builtin_convertvector(x, u32v);
#endif
}

// Whole numbers below 256 to 8 bits: for AVX2 g++ 12 takes them out of the register one by one.
inline u8v narrowed(u32v x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i words = _mm256_packus_epi32(bit_cast<__m256i>(x), bit_cast<__m256i>(x));
  const __m256i bytes = _mm256_packus_epi16(words, words);  // of both halves the first four count
  const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  return bit_cast<u8v>(_mm_cvtsi128_si64(joined));
#else
  return __builtin_convertvector(x, u8v);
#endif
}

// ---- stored numbers to floats and back. `load` reads kLanes elements, `load_tail` the first n of
// ---- them (0 <= n < kLanes) and fills with 0.

inline f32v half_to_float(u16v h) {
#if defined(__AVX512F__)
  return bit_cast<f32v>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
#elif defined(__F16C__)
  return bit_cast<f32v>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
#elif defined(PD_NEON)
  return vcvt_f32_f16(bit_cast<float16x4_t>(h));
#else
  u32v x = __builtin_convertvector(h, u32v);
  u32v sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  u32v normal = (magnitude << 13) + (112u << 23);
  u32v special = (magnitude << 13) | (255u << 23);
  f32v subnormal = __builtin_convertvector(bit_cast<i32v>(magnitude), f32v) * 5.9604644775390625e-8f;  // 2^-24
  u32v bits = magnitude >= 0x7c00u ? special : normal;
  bits = magnitude < 0x400u ? bit_cast<u32v>(subnormal) : bits;
  return bit_cast<f32v>(bits | sign);
#endif
}

inline u16v float_to_half(f32v x) {
#if defined(__AVX512F__)
  return bit_cast<u16v>(_mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return bit_cast<u16v>(_mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(PD_NEON)
  return bit_cast<u16v>(vcvt_f16_f32(x));
#else
  u32v bits = bit_cast<u32v>(x);
  u32v sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  u32v normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14: adding 0.5 leaves the value, rounded to the subnormal step, in the low bits.
  u32v subnormal = bit_cast<u32v>(bit_cast<f32v>(magnitude) + 0.5f) - (126u << 23);
  u32v half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) - 0x1000u ? u32v{} + 0x7c00u : half;
  half = magnitude > (255u << 23) ? u32v{} + 0x7e00u : half;
  return __builtin_convertvector(half | sign, u16v);
#endif
}

#if defined(__F16C__)
// 8-bit numbers as half-precision ones: those of e5m2 are its upper bytes. Those of e4m3 have the bits of numbers 2^8
// times smaller, subnormal ones too; only their NaN needs the full exponent.
template <DType kType>
inline u16v half_of_fp8(u8v x) {
  const u16v wide = widened(x);
  if constexpr (kType == DType::kFloat8E5M2) return wide << 8;
  const u16v magnitude = wide & 0x7f, nan = magnitude == 0x7f;
  return magnitude << 7 | (wide & 0x80) << 8 | nan;
}
#endif

#if defined(__AVX2__)
// The same for twice as many, the first of them in `low`.
typedef uint8_t u8v2 __attribute__((vector_size(2 * kLanes)));
typedef uint16_t u16v2 __attribute__((vector_size(4 * kLanes)));
struct Halves {
  u16v low, high;
};
template <DType kType>
inline Halves halves_of_fp8(u8v2 x) {
#if defined(__AVX512F__)
  const u16v2 wide = bit_cast<u16v2>(_mm512_cvtepi8_epi16(bit_cast<__m256i>(x)));
#else
  const u16v2 wide = bit_cast<u16v2>(_mm256_cvtepi8_epi16(bit_cast<__m128i>(x)));
#endif
  if constexpr (kType == DType::kFloat8E5M2) return bit_cast<Halves>(wide << 8);
  const u16v2 half = (wide << 7) & 0xbfff;  // the sign is in all upper bits
  return bit_cast<Halves>((wide << 9) == 0xfe00 ? u16v2{} + 0x7fff : half);
}
#endif

// What half_of_fp8 leaves to be multiplied.
constexpr float fp8_unit(DType type) { return type == DType::kFloat8E4M3 ? 256.f : 1.f; }

inline f32v bfloat_to_float(u16v b) { return bit_cast<f32v>(widened(b) << 16); }

inline u16v float_to_bfloat(f32v x) {
#if defined(__AVX512BF16__)
  return bit_cast<u16v>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));  // 0 below the smallest normal number
#else
  u32v bits = bit_cast<u32v>(x);
  u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = (bits & 0x7fffffffu) > (255u << 23) ? u32v{} + 0x7fc0u : rounded;
  return __builtin_convertvector(rounded, u16v);
#endif
}

// Nearest 8-bit number, ties to even, saturating; NaN stays NaN. The mantissa is rounded in the
// float's own bits; below the smallest normal number, adding `step` (2^23 subnormal steps) rounds.
template <int kMantissaBits, int kBias>
inline u8v float_to_fp8(f32v x, float largest, float smallest_normal, float step) {
  constexpr int kShift = 23 - kMantissaBits;
  u32v bits = bit_cast<u32v>(x);
  u32v sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  f32v ax = bit_cast<f32v>(magnitude);
  f32v clamped = ax > splat(largest) ? splat(largest) : ax;
  u32v m = bit_cast<u32v>(clamped);
  u32v normal = ((m + ((1u << (kShift - 1)) - 1) + ((m >> kShift) & 1u)) >> kShift) - ((127u - kBias) << kMantissaBits);
  u32v subnormal = bit_cast<u32v>(clamped + step) - bit_cast<u32v>(splat(step));
  u32v code = clamped < splat(smallest_normal) ? subnormal : normal;
  code = magnitude > (255u << 23) ? u32v{} + 0x7fu : code;
  return narrowed(code | sign);
}

template <DType kType>
inline f32v load(const void* source) {
  if constexpr (kType == DType::kFloat32) {
    f32v x;
    memcpy(&x, source, sizeof x);
    return x;
  } else if constexpr (kType == DType::kFloat16 || kType == DType::kBFloat16) {
    u16v x;
    memcpy(&x, source, sizeof x);
    return kType == DType::kFloat16 ? half_to_float(x) : bfloat_to_float(x);
  } else {
#if defined(__F16C__)
    u8v x;
    memcpy(&x, source, sizeof x);
    return half_to_float(half_of_fp8<kType>(x)) * fp8_unit(kType);
#else
    const uint8_t* bytes = static_cast<const uint8_t*>(source);
    const float* table = kType == DType::kFloat8E4M3 ? kE4M3Values.value : kE5M2Values.value;
    f32v x;
    for (int i = 0; i < kLanes; ++i) x[i] = table[bytes[i]];
    return x;
#endif
  }
}

template <DType kType>
inline f32v load_tail(const void* source, int64_t n) {
#if defined(__AVX512F__)
  // Nothing is read for the other lanes.
  const __mmask16 first = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (kType == DType::kFloat32) return bit_cast<f32v>(_mm512_maskz_loadu_ps(first, source));
  if constexpr (dtype_bytes(kType) == 2) {
    const u16v x = bit_cast<u16v>(_mm256_maskz_loadu_epi16(first, source));
    return kType == DType::kFloat16 ? half_to_float(x) : bfloat_to_float(x);
  }
#elif defined(__AVX2__)
  if constexpr (kType == DType::kFloat32) {
    const __m256i first =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), bit_cast<__m256i>(lane_numbers(LaneIndices{})));
    return bit_cast<f32v>(_mm256_maskload_ps(static_cast<const float*>(source), first));
  }
#endif
  char padded[4 * kLanes] = {};
  memcpy(padded, source, n * dtype_bytes(kType));
  return load<kType>(padded);
}

template <DType kType>
inline void store(void* target, f32v x) {
  if constexpr (kType == DType::kFloat32) {
    memcpy(target, &x, sizeof x);
  } else if constexpr (kType == DType::kFloat8E4M3) {
    u8v y = float_to_fp8<3, 7>(x, 448.f, 0.015625f, 16384.f);
    memcpy(target, &y, sizeof y);
  } else if constexpr (kType == DType::kFloat8E5M2) {
    u8v y = float_to_fp8<2, 15>(x, 57344.f, 6.103515625e-05f, 128.f);
    memcpy(target, &y, sizeof y);
  } else {
    u16v y = kType == DType::kFloat16 ? float_to_half(x) : float_to_bfloat(x);
    memcpy(target, &y, sizeof y);
  }
}

template <DType kType>
inline void store_tail(void* target, f32v x, int64_t n) {
  char padded[4 * kLanes];
  store<kType>(padded, x);
  memcpy(target, padded, n * dtype_bytes(kType));
}

}  // namespace
}  // namespace paged_attn
