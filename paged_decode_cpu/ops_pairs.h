// How numbers are held while they are multiplied: as pairs of 16-bit numbers, of which vdpbf16ps (bfloat16) and the
// matrix unit (float16 too) take two products per lane and instruction. 8-bit numbers are widened by a table, exactly.
#pragma once

#include "ops_defaults.h"
#include "vec.h"

namespace paged_attn {
namespace {

// The 128 magnitudes of an 8-bit format as 16-bit numbers, high and low bytes apart: vpermi2b looks 64
// bytes up in 128 entries by the low 7 bits of each index.
struct WideTable {
  uint8_t high[128], low[128];
};

constexpr WideTable wide_table(DType type, const Fp8Values& values, int exponent_bits, int mantissa_bits,
                               bool has_infinity) {
  WideTable table{};
  const bool half = type == DType::kFloat16;
  const int wide_bits = half ? 10 : 7, infinity = half ? 0x7c00 : 0x7f80;
  const int bias = ((1 << (exponent_bits - 1)) - 1) - (half ? 15 : 127);
  for (int i = 0; i < 128; ++i) {
    int exponent = i >> mantissa_bits, mantissa = i & ((1 << mantissa_bits) - 1), bits = 0;
    if (values.value[i] != values.value[i]) {
      bits = infinity | 1 << (wide_bits - 1);
    } else if (has_infinity && exponent == (1 << exponent_bits) - 1) {
      bits = infinity;
    } else if (i != 0) {
      if (exponent == 0) {  // subnormal: shift the leading one into place
        for (exponent = 1; !(mantissa >> mantissa_bits); --exponent) mantissa <<= 1;
        mantissa &= (1 << mantissa_bits) - 1;
      }
      exponent -= bias;
      mantissa <<= wide_bits - mantissa_bits;
      bits = exponent > 0 ? exponent << wide_bits | mantissa : (1 << wide_bits | mantissa) >> (1 - exponent);
    }
    table.high[i] = bits >> 8;
    table.low[i] = bits & 0xff;
  }
  return table;
}

template <DType kType>
alignas(64) constexpr WideTable kE4M3Wide = wide_table(kType, kE4M3Values, 4, 3, false);
template <DType kType>
alignas(64) constexpr WideTable kE5M2Wide = wide_table(kType, kE5M2Values, 5, 2, true);

template <DType kElem, DType kCacheType>
struct OpsPairs : OpsDefaults {
  using Elem = uint16_t;
  using Reg = __m512i;
  static constexpr DType kElemType = kElem;
  static constexpr bool kFp8 = dtype_bytes(kCacheType) == 1;
  static constexpr int kDepth = 2;
  static constexpr int kRegs = kFp8 ? 2 : 1;
  static constexpr int kChunk = 32 * kRegs;
  static constexpr int kBytes = dtype_bytes(kCacheType);
  static constexpr int kMaxDotRows = 8;
  static constexpr bool kTransposesKeys = true;
  static constexpr int kMinPackedRows = kFp8 ? 16 : 24;  // 8-bit keys are looked up once then
  static constexpr int kValueKeys = 2;

  static f32v dot(f32v acc, Reg a, Reg b)
    requires(kElem == DType::kBFloat16)
  {
    return bit_cast<f32v>(_mm512_dpbf16_ps(bit_cast<__m512>(acc), (__m512bh)a, (__m512bh)b));
  }
  // dot(acc, a, broadcast(p)); g++ 12 does not fold the broadcast into the instruction.
  static f32v dot_broadcast(f32v acc, Reg a, const Elem* p)
    requires(kElem == DType::kBFloat16)
  {
    typedef int32_t __attribute__((may_alias)) Pair;
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*reinterpret_cast<const Pair*>(p)));
    return acc;
  }
  static Reg broadcast(const Elem* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Reg load_elems(const Elem* p) { return _mm512_loadu_si512(p); }
  static void store_elems(Elem* p, f32v x) { store<kElemType>(p, x); }
  // 32 numbers, in order.
  static Reg narrowed(f32v low, f32v high) {
    if constexpr (kElem == DType::kBFloat16)
      return (Reg)_mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low));
    const Reg first = _mm512_castsi256_si512(bit_cast<__m256i>(float_to_half(low)));
    return _mm512_inserti64x4(first, bit_cast<__m256i>(float_to_half(high)), 1);
  }

  // r[0] and r[1]: what unpacklo and unpackhi would leave of 16-bit numbers.
  static void look_up(__m512i bytes, Reg* r) {
    constexpr const WideTable& table = kCacheType == DType::kFloat8E4M3 ? kE4M3Wide<kElem> : kE5M2Wide<kElem>;
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), bytes, _mm512_load_si512(table.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), bytes, _mm512_load_si512(table.high + 64));
    // high | (bytes & 0x80)
    high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    r[0] = _mm512_unpacklo_epi8(low, high);
    r[1] = _mm512_unpackhi_epi8(low, high);
  }

  // Eight-byte groups 0 4 1 5 2 6 3 7 first: the unpacks then leave the elements in order.
  static void decode(__m512i bytes, Reg* r) {
    look_up(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes), r);
  }

  static void load_keys(const char* row, Reg* r) {
    __m512i x = _mm512_loadu_si512(row);
    if constexpr (kFp8) {
      decode(x, r);
    } else {
      r[0] = x;
    }
  }
  static void load_keys_tail(const char* row, int64_t n, Reg* r) {
    if constexpr (kFp8) {
      decode(_mm512_maskz_loadu_epi8((__mmask64(1) << n) - 1, row), r);
    } else {
      r[0] = _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, row);
    }
  }

  // Interleaves two keys element by element; 8-bit ones as bytes, before they are looked up.
  static void interleave(Reg a, Reg b, Reg* r) {
    if constexpr (kFp8) {
      look_up(_mm512_unpacklo_epi8(a, b), r);
      look_up(_mm512_unpackhi_epi8(a, b), r + 2);
    } else {
      r[0] = _mm512_unpacklo_epi16(a, b);
      r[1] = _mm512_unpackhi_epi16(a, b);
    }
  }
  static void load_values(const char* const* rows, int64_t offset, Reg* r) {
    interleave(_mm512_loadu_si512(rows[0] + offset), _mm512_loadu_si512(rows[1] + offset), r);
  }
  static void load_values_tail(const char* const* rows, int64_t offset, int64_t n, Reg* r) {
    const __mmask64 mask = (__mmask64(1) << n * kBytes) - 1;
    interleave(_mm512_maskz_loadu_epi8(mask, rows[0] + offset), _mm512_maskz_loadu_epi8(mask, rows[1] + offset), r);
  }

  // The unpacks work in groups of 128 bits: register i of n has the elements 4 i to 4 i + 3 of every 4 n.
  static void in_order(f32v* r) {
    if constexpr (kFp8) {
      const f32v ab = low<4>(r[0], r[1]), cd = low<4>(r[2], r[3]);      // groups 0 and 2 of each
      const f32v ab1 = high<4>(r[0], r[1]), cd1 = high<4>(r[2], r[3]);  // groups 1 and 3
      r[0] = low<4>(ab, cd);
      r[1] = low<4>(ab1, cd1);
      r[2] = high<4>(ab, cd);
      r[3] = high<4>(ab1, cd1);
    } else {
      const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
      const __m512 even = bit_cast<__m512>(r[0]), odd = bit_cast<__m512>(r[1]);
      r[0] = bit_cast<f32v>(_mm512_permutex2var_ps(even, first, odd));
      r[1] = bit_cast<f32v>(_mm512_permutex2var_ps(even, second, odd));
    }
  }
};

template <DType kCacheType>
using OpsBf16 = OpsPairs<DType::kBFloat16, kCacheType>;

}  // namespace
}  // namespace paged_attn
