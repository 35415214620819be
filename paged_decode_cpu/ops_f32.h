// How numbers are held while they are multiplied: as float32, whatever is stored in the cache.
#pragma once

#include "ops_defaults.h"
#include "vec.h"

namespace paged_attn {
namespace {

template <DType kCacheType>
struct OpsF32 : OpsDefaults {
  using Elem = float;  // a query element or a probability in scratch memory
  using Reg = f32v;
  static constexpr DType kElemType = DType::kFloat32;
#if defined(__AVX2__)
  // Two bfloat16 numbers of a 32-bit lane are widened in one instruction each (shift, mask). That deinterleaves a
  // chunk: one register has its even elements, one its odd ones. 8-bit numbers are widened two registers at a time.
  static constexpr bool kDeinterleaves = kCacheType == DType::kBFloat16;
  static constexpr bool kFp8 = dtype_bytes(kCacheType) == 1;
#else
  static constexpr bool kFp8 = false;
#endif
  static constexpr int kDepth = 1;                              // elements that one 32-bit lane multiplies at once
  static constexpr int kRegs = kDeinterleaves || kFp8 ? 2 : 1;  // registers that one load of a cache row fills
  static constexpr int kChunk = kRegs * kLanes;                 // elements of a row that one load reads
  static constexpr int kBytes = dtype_bytes(kCacheType);
  // Rows that share what is loaded. Eight only gain where widening takes long.
  static constexpr int kMaxDotRows = kFp8 && kLanes == 16 ? 8 : 4;
  // From here on laying out keys and values pays: 8-bit ones are widened once then.
  static constexpr int kMinPackedRows = kLanes == 16 ? (kFp8 ? 16 : 24) : kLanes == 8 ? 20 : 12;
  static constexpr float kUnit = kFp8 ? fp8_unit(kCacheType) : 1.f;

  static f32v dot(f32v acc, Reg a, Reg b) { return acc + a * b; }
  static Reg broadcast(const Elem* p) { return splat(*p); }
  static Reg load_elems(const Elem* p) { return load<DType::kFloat32>(p); }
  static void store_elems(Elem* p, f32v x) { store<DType::kFloat32>(p, x); }

#if defined(__AVX2__)
  static void widen_pairs(u32v x, Reg* r) {
    r[0] = bit_cast<f32v>(x << 16);
    r[1] = bit_cast<f32v>(x & 0xffff0000u);
  }
  static void widen_bytes(u8v2 x, Reg* r) {
    const Halves half = halves_of_fp8<kCacheType>(x);
    r[0] = half_to_float(half.low);
    r[1] = half_to_float(half.high);
  }
  // Two registers from a row.
  static void load_two(const char* row, Reg* r) {
    if constexpr (kDeinterleaves) return widen_pairs(bit_cast<u32v>(load<DType::kFloat32>(row)), r);
    if constexpr (kFp8) {
      u8v2 bytes;
      memcpy(&bytes, row, sizeof bytes);
      widen_bytes(bytes, r);
    }
  }
  static void load_two_tail(const char* row, int64_t n, Reg* r) {
#if defined(__AVX512F__)
    const __mmask32 first = (__mmask32(1) << n) - 1;
    if constexpr (kDeinterleaves) return widen_pairs(bit_cast<u32v>(_mm512_maskz_loadu_epi16(first, row)), r);
    if constexpr (kFp8) return widen_bytes(bit_cast<u8v2>(_mm256_maskz_loadu_epi8(first, row)), r);
#else
    char padded[kChunk * kBytes] = {};
    memcpy(padded, row, n * kBytes);
    load_two(padded, r);
#endif
  }
#endif

  static void load_keys(const char* row, Reg* r) {
#if defined(__AVX2__)
    if constexpr (kRegs == 2) return load_two(row, r);
#endif
    r[0] = load<kCacheType>(row);
  }
  static void load_keys_tail(const char* row, int64_t n, Reg* r) {
#if defined(__AVX2__)
    if constexpr (kRegs == 2) return load_two_tail(row, n, r);
#endif
    r[0] = load_tail<kCacheType>(row, n);
  }

  // Values of kDepth keys, lane by lane, so that one dot() adds them weighted by kDepth probabilities.
  static void load_values(const char* const* rows, int64_t offset, Reg* r) { load_keys(rows[0] + offset, r); }
  static void load_values_tail(const char* const* rows, int64_t offset, int64_t n, Reg* r) {
    load_keys_tail(rows[0] + offset, n, r);
  }

  // Brings a chunk of a query into the order in which load_keys leaves that of a key.
  static void deinterleave(float* chunk) {
    const f32v a = load_elems(chunk), b = load_elems(chunk + kLanes);
    store_elems(chunk, even_lanes(a, b, LaneIndices{}));
    store_elems(chunk + kLanes, odd_lanes(a, b, LaneIndices{}));
  }
  // The kRegs registers of a chunk of accumulators, in the order of the elements.
  static void in_order(f32v* r) {
    if constexpr (kDeinterleaves) {
      const f32v even = r[0], odd = r[1];
      r[0] = interleaved<0>(even, odd, LaneIndices{});
      r[1] = interleaved<1>(even, odd, LaneIndices{});
    }
  }
};

}  // namespace
}  // namespace paged_attn
