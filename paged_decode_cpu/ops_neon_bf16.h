// bfloat16 on Arm with FEAT_BF16. bfdot adds the products of pairs, four pairs of numbers per instruction; bfmmla
// multiplies 2 x 4 numbers by 4 x 2, twice as many. Numbers reach bfmmla as halves of registers, four of one row and
// four of another, which costs an instruction per register, so it is for four rows and more.
#pragma once

#include "ops_neon.h"

namespace paged_attn {
namespace {

template <DType kCacheType>
struct OpsNeonBf16 : OpsNeon {
  using Elem = bfloat16_t;
  static constexpr DType kElemType = DType::kBFloat16;
  using Chunk = bfloat16x8_t;
  using Four = bfloat16x4_t;
  static constexpr int kDepth = 4;
  static constexpr int kBytes = dtype_bytes(kCacheType);
  static constexpr int kMaxDotRows = 8;
  static constexpr float kUnit = fp8_unit(kCacheType);

  static void store_elems(Elem* p, f32v x) { vst1_bf16(p, vcvt_bf16_f32(x)); }
  static void store_chunk(Elem* p, Chunk x) { vst1q_bf16(p, x); }
  static Chunk load_elems(const Elem* p) { return vld1q_bf16(p); }
  static Four load_four(const Elem* p) { return vld1_bf16(p); }
  static Chunk load_chunk(const char* row) {
    if constexpr (kCacheType == DType::kBFloat16) return vld1q_bf16(reinterpret_cast<const bfloat16_t*>(row));
    const float16x8_t x = load_half<kCacheType>(row);
    return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(vcvt_f32_f16(vget_low_f16(x))), vcvt_high_f32_f16(x));
  }
  static Chunk load_chunk_tail(const char* row, int64_t n) { return load_chunk(PaddedChunk<kBytes>(row, n).bytes); }

  static f32v dot(f32v acc, Chunk a, Chunk b) { return vbfdotq_f32(acc, a, b); }

  // sum[2] += x * weights, for the keys 2 * kPair and 2 * kPair + 1, which lie side by side in x.
  template <int kPair>
  [[gnu::always_inline]] static void add_weighted(f32v* sum, const Chunk* x, Four weights) {
    sum[0] = vbfdotq_lane_f32(sum[0], x[0], weights, kPair);
    sum[1] = vbfdotq_lane_f32(sum[1], x[1], weights, kPair);
  }

  // The elements of two keys side by side.
  static void pair_keys(Chunk a, Chunk b, Chunk* r) {
    const uint16x8_t x = vreinterpretq_u16_bf16(a), y = vreinterpretq_u16_bf16(b);
    r[0] = vreinterpretq_bf16_u16(vzip1q_u16(x, y));
    r[1] = vreinterpretq_bf16_u16(vzip2q_u16(x, y));
  }

  // Two rows as bfmmla takes them: their first four elements, and their last four.
  static void pair_rows(Chunk a, Chunk b, Chunk* r) {
    const uint64x2_t x = vreinterpretq_u64_bf16(a), y = vreinterpretq_u64_bf16(b);
    r[0] = vreinterpretq_bf16_u64(vtrn1q_u64(x, y));
    r[1] = vreinterpretq_bf16_u64(vtrn2q_u64(x, y));
  }
  static Chunk pair_fours(const Elem* a, const Elem* b) { return vcombine_bf16(vld1_bf16(a), vld1_bf16(b)); }

  // Eight columns of four keys as bfmmla takes them: columns 2 i and 2 i + 1 in r[i].
  static void pair_columns(const Chunk* v, Chunk* r) {
    Chunk even[2], odd[2];
    pair_keys(v[0], v[2], even);
    pair_keys(v[1], v[3], odd);
    pair_keys(even[0], odd[0], r);
    pair_keys(even[1], odd[1], r + 2);
  }

  // Four sums: of two rows of a by two rows (or columns) of b.
  static f32v multiply(f32v acc, Chunk a, Chunk b) { return vbfmmlaq_f32(acc, a, b); }
};

}  // namespace
}  // namespace paged_attn
