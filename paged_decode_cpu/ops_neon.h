// How numbers are held while they are multiplied on Arm: always eight elements of a row (a chunk), whatever they are.
//
//   OpsNeonF32    as float32 in two registers; any cache
//   OpsNeonFp16   as float16, products added to float32 (FEAT_FHM); ops_neon_fp16.h
//   OpsNeonBf16   as bfloat16 (FEAT_BF16); ops_neon_bf16.h
//
// tile_neon.h multiplies them.
#pragma once

#include "ops_defaults.h"
#include "vec.h"

namespace paged_attn {
namespace {

// Eight 8-bit numbers as float16: those of e5m2 are its upper bytes. Those of e4m3 have the bits of float16 numbers
// 2^8 times smaller, subnormal ones too; only their NaN needs the full exponent.
template <DType kType>
inline float16x8_t half_of_fp8(uint8x8_t x) {
  const uint16x8_t upper = vshll_n_u8(x, 8);
  if constexpr (kType == DType::kFloat8E5M2) return vreinterpretq_f16_u16(upper);
  const uint8x8_t magnitude = vand_u8(x, vdup_n_u8(0x7f)), nan = vceq_u8(magnitude, vdup_n_u8(0x7f));
  return vreinterpretq_f16_u16(vsriq_n_u16(upper, vshll_n_u8(vorr_u8(magnitude, nan), 8), 1));
}

template <DType kType>
inline float16x8_t load_half(const char* row) {
  if constexpr (kType == DType::kFloat16) return vld1q_f16(reinterpret_cast<const float16_t*>(row));
  return half_of_fp8<kType>(vld1_u8(reinterpret_cast<const uint8_t*>(row)));
}

// The first n elements of a chunk, filled with 0.
template <int kBytes>
struct PaddedChunk {
  char bytes[8 * kBytes] = {};
  PaddedChunk(const char* row, int64_t n) { memcpy(bytes, row, n * kBytes); }
};

// What all of them have in common.
struct OpsNeon : OpsDefaults {
  static constexpr bool kNeon = true;
  static constexpr int kChunk = 8;
  static constexpr int kMinPackedRows = 12;
  static constexpr int kStepRows = 8;
  static constexpr int kValueKeys = 4;
  static void in_order(f32v*) {}
};

template <DType kCacheType>
struct OpsNeonF32 : OpsNeon {
  using Elem = float;
  static constexpr DType kElemType = DType::kFloat32;
  struct Chunk {
    f32v low, high;
  };
  using Four = f32v;  // probabilities of four keys, or elements of a query
  static constexpr int kDepth = 1;
  static constexpr int kBytes = dtype_bytes(kCacheType);
  static constexpr int kMaxDotRows = 4;
  static constexpr float kUnit = fp8_unit(kCacheType);

  static void store_elems(Elem* p, f32v x) { store<DType::kFloat32>(p, x); }
  static void store_chunk(Elem* p, const Chunk& x) {
    store_elems(p, x.low);
    store_elems(p + kLanes, x.high);
  }
  static Chunk load_elems(const Elem* p) { return {vld1q_f32(p), vld1q_f32(p + kLanes)}; }
  static Four load_four(const Elem* p) { return vld1q_f32(p); }

  static Chunk load_chunk(const char* row) {
    if constexpr (kCacheType == DType::kFloat32) return load_elems(reinterpret_cast<const float*>(row));
    if constexpr (kCacheType == DType::kBFloat16) {
      const uint16x8_t x = vld1q_u16(reinterpret_cast<const uint16_t*>(row));
      return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
    }
    const float16x8_t x = load_half<kCacheType>(row);
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
  }
  static Chunk load_chunk_tail(const char* row, int64_t n) { return load_chunk(PaddedChunk<kBytes>(row, n).bytes); }

  static f32v dot(f32v acc, const Chunk& a, const Chunk& b) {
    return vfmaq_f32(vfmaq_f32(acc, a.low, b.low), a.high, b.high);
  }

  // sum[2] += x * weights[kLane]
  template <int kLane>
  [[gnu::always_inline]] static void add_weighted(f32v* sum, const Chunk& x, Four weights) {
    sum[0] = vfmaq_laneq_f32(sum[0], x.low, weights, kLane);
    sum[1] = vfmaq_laneq_f32(sum[1], x.high, weights, kLane);
  }

  // Columns of chunks become chunks.
  static void transpose_chunks(Chunk* x) {
    for (int i = 0; i < 8; i += kLanes) {
      f32v low[kLanes], high[kLanes];
      for (int c = 0; c < kLanes; ++c) {
        low[c] = x[i + c].low;
        high[c] = x[i + c].high;
      }
      transpose(low);
      transpose(high);
      for (int c = 0; c < kLanes; ++c) {
        x[i + c].low = low[c];
        x[i + c].high = high[c];
      }
    }
    // Now x[c] has the columns c and c + 4 of keys 0 to 3, and x[c + 4] those of keys 4 to 7.
    for (int c = 0; c < kLanes; ++c) {
      const f32v later = x[c].high;
      x[c].high = x[c + kLanes].low;
      x[c + kLanes].low = later;
    }
  }
};

}  // namespace
}  // namespace paged_attn
