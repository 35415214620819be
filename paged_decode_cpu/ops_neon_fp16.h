// float16 on Arm with FEAT_FHM: fmlal multiplies float16 numbers and adds the exact products to float32 sums, so
// nothing is widened before. (Sums in float16 would be twice as fast and too coarse.)
#pragma once

#include "ops_neon.h"

namespace paged_attn {
namespace {

template <DType kCacheType>
struct OpsNeonFp16 : OpsNeon {
  using Elem = float16_t;
  static constexpr DType kElemType = DType::kFloat16;
  using Chunk = float16x8_t;
  using Four = float16x4_t;
  static constexpr int kDepth = 1;
  static constexpr int kBytes = dtype_bytes(kCacheType);
  static constexpr int kMaxDotRows = 4;
  static constexpr float kUnit = fp8_unit(kCacheType);

  static void store_elems(Elem* p, f32v x) { vst1_f16(p, vcvt_f16_f32(x)); }
  static void store_chunk(Elem* p, Chunk x) { vst1q_f16(p, x); }
  static Chunk load_elems(const Elem* p) { return vld1q_f16(p); }
  static Four load_four(const Elem* p) { return vld1_f16(p); }
  static Chunk load_chunk(const char* row) { return load_half<kCacheType>(row); }
  static Chunk load_chunk_tail(const char* row, int64_t n) { return load_chunk(PaddedChunk<kBytes>(row, n).bytes); }

  static f32v dot(f32v acc, Chunk a, Chunk b) { return vfmlalq_high_f16(vfmlalq_low_f16(acc, a, b), a, b); }

  template <int kLane>
  [[gnu::always_inline]] static void add_weighted(f32v* sum, Chunk x, Four weights) {
    sum[0] = vfmlalq_lane_low_f16(sum[0], x, weights, kLane);
    sum[1] = vfmlalq_lane_high_f16(sum[1], x, weights, kLane);
  }

  // 8 x 8 numbers: single ones, pairs and groups of four change places between two rows.
  static void transpose_chunks(Chunk* x) {
    for (int i = 0; i < 8; i += 2) {
      const Chunk a = x[i], b = x[i + 1];
      x[i] = vtrn1q_f16(a, b);
      x[i + 1] = vtrn2q_f16(a, b);
    }
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
      const float32x4_t a = vreinterpretq_f32_f16(x[i]), b = vreinterpretq_f32_f16(x[i + 2]);
      x[i] = vreinterpretq_f16_f32(vtrn1q_f32(a, b));
      x[i + 2] = vreinterpretq_f16_f32(vtrn2q_f32(a, b));
    }
    for (int i = 0; i < 4; ++i) {
      const float64x2_t a = vreinterpretq_f64_f16(x[i]), b = vreinterpretq_f64_f16(x[i + 4]);
      x[i] = vreinterpretq_f16_f64(vtrn1q_f64(a, b));
      x[i + 4] = vreinterpretq_f16_f64(vtrn2q_f64(a, b));
    }
  }
};

}  // namespace
}  // namespace paged_attn
