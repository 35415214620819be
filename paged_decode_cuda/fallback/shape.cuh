// What is multiplied: words of two 16-bit numbers, or of a float32 that goes as tf32 (tf32.cuh). A product is
//
//     16 rows x 8 columns  +=  (16 rows x 8 words) * (8 words x 8 columns)
//
// A lane (g = lane / 4, t = lane % 4) has words t and t + 4 of rows g and g + 8, and of column g. Which number is which
// term of a product is free, as long as both sides agree.
#pragma once

#include <type_traits>

#include "../ptx.cuh"
#include "../tf32.cuh"
#include "sizes.h"

namespace paged_attn {

// Of 16-bit numbers.
template <bool kBf16>
struct PairProducts {
  static constexpr int kWordNumbers = 2;
  // How far below the largest score the reference score is, in log2 units: see PD_HALF_BELOW.
  static constexpr float kBelow = kBf16 ? 0.f : PD_HALF_BELOW;

  static PD_MEMBER void add(float (&sum)[4], float (&)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_16x8x16<kBf16>(sum, a[0], a[1], a[2], a[3], b);
  }
  static PD_MEMBER uint32_t word(float low, float high) { return pack_pair<kBf16>(low, high); }
};

// Of float32. kExact: the right side is exact in tf32.
template <bool kExact>
struct Tf32Products {
  static constexpr int kWordNumbers = 1;
  static constexpr float kBelow = 0.f;

  // rest: the sum of small parts, see with_rest().
  static PD_MEMBER void add(float (&sum)[4], float (&rest)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const Tf32Pair<4> left(a);
    if constexpr (kExact) {
      mma_16x8x8(rest, left.small, b);
      mma_16x8x8(sum, left.big, b);
    } else {
      add_product(sum, rest, left, Tf32Pair<2>(b));
    }
  }
};

template <typename Q, typename Kv>
using FallbackProducts =
    std::conditional_t<std::is_same_v<Q, Fp32>, Tf32Products<Kv::kBytes == 1>, PairProducts<IsBf16<Q>::value>>;

template <typename Q_, typename Kv_, int kRowTiles>
struct FallbackShape : FallbackSizes<kRowTiles, FallbackProducts<Q_, Kv_>::kWordNumbers, 16 / Kv_::kBytes> {
  using Q = Q_;
  using Kv = Kv_;
  using Products = FallbackProducts<Q, Kv>;
  static constexpr bool kPairs = Products::kWordNumbers == 2;
  // Values of 8 bits become float16, which takes half the work, and the weights have three bits more.
  using ValueProducts = std::conditional_t<kPairs && Kv::kBytes == 1, PairProducts<false>, Products>;

  // Keys that a product of weights and values takes, four lanes at a time; those of a lane. Key i of a lane is the
  // (i / 2 * 8 + 2 t + i % 2)-th: so a score is where it is needed as a weight.
  static constexpr int kStepKeys = 8 * Products::kWordNumbers, kLaneKeys = kStepKeys / 4;
  static constexpr int kWarpSteps = FallbackShape::kWarpKeys / kStepKeys;

  // A lane reads so many neighbouring dimensions of a value: column g of product i is dimension kValueDims * g + i.
  static constexpr int kValueDims = FallbackShape::kWarpDims / 8, kValueWords = kValueDims * Kv::kBytes / 4;

  // Chunks of two keys, and steps of values, that a lane waits for at a time, as far as registers reach. Keys of 8 bits
  // become more words.
  static constexpr int kBatchChunks = kRowTiles == 2 ? 2 : Kv::kBytes == 1 ? 3 : 4;
  static constexpr int kBatchSteps = kLaneKeys * kValueWords == 16 || FallbackShape::kRowTiles == 2 ? 1 : 2;

  static PD_MEMBER int lane_key(int i) { return i / 2 * 8 + this_thread() % 4 * 2 + i % 2; }
};

// Four numbers of 8 bits.
template <typename Kv>
PD_DEVICE void widen_bytes(uint32_t word, float (&x)[4]) {
  const uint32_t low = fp8_pair_to_fp16<Kv, false>(word), high = fp8_pair_to_fp16<Kv, true>(word);
  const float2 first = pair_values<false>(low), second = pair_values<false>(high);
  x[0] = first.x;
  x[1] = first.y;
  x[2] = second.x;
  x[3] = second.y;
}

// Two pairs of 16-bit numbers.
template <typename Q, typename Kv>
PD_DEVICE void widen_pairs(uint32_t word, uint32_t& low, uint32_t& high) {
  low = fp8_pair_to_fp16<Kv, false>(word);
  high = fp8_pair_to_fp16<Kv, true>(word);
  if constexpr (IsBf16<Q>::value) {
    low = fp16_pair_to_bf16(low);
    high = fp16_pair_to_bf16(high);
  }
}

// Four words of products from a piece of a key: its `group`-th.
template <typename Shape>
PD_DEVICE void key_words(const uint32_t (&piece)[4], int group, uint32_t (&words)[4]) {
  using Kv = typename Shape::Kv;
  if constexpr (Kv::kBytes > 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = piece[i];
  } else if constexpr (Shape::kPairs) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      widen_pairs<typename Shape::Q, Kv>(piece[2 * group + i], words[2 * i], words[2 * i + 1]);
  } else {
    float x[4];
    widen_bytes<Kv>(piece[group], x);
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = __float_as_uint(x[e]);
  }
}

// What a lane has of values, of each of its keys so many words, as the right sides of products.
template <typename Shape>
PD_DEVICE void value_words(const uint32_t (&values)[Shape::kLaneKeys][Shape::kValueWords],
                           uint32_t (&words)[Shape::kValueDims][2]) {
  using Kv = typename Shape::Kv;
#pragma unroll
  for (int w = 0; w < Shape::kValueWords; ++w)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Shape::kPairs) {
        const uint32_t first = values[2 * i][w], second = values[2 * i + 1][w];
        if constexpr (Kv::kBytes == 2) {
          words[2 * w][i] = __byte_perm(first, second, kLowHalves);
          words[2 * w + 1][i] = __byte_perm(first, second, kHighHalves);
        } else {
          widen_pairs<Fp16, Kv>(__byte_perm(first, second, kLowBytesInTurns), words[4 * w][i], words[4 * w + 1][i]);
          widen_pairs<Fp16, Kv>(__byte_perm(first, second, kHighBytesInTurns), words[4 * w + 2][i],
                                words[4 * w + 3][i]);
        }
      } else if constexpr (Kv::kBytes == 4) {
        words[w][i] = values[i][w];
      } else {
        float x[4];
        widen_bytes<Kv>(values[i][w], x);
#pragma unroll
        for (int e = 0; e < 4; ++e) words[4 * w + e][i] = __float_as_uint(x[e]);
      }
    }
}

// The weights of a warp's keys as left sides of products: of row g and g + 8 keys 2t and 2t + 1 of each eight.
template <typename Shape>
PD_DEVICE uint4 weight_words(const float (&x)[2][4], int step) {
  if constexpr (Shape::kPairs) {
    using Products = typename Shape::ValueProducts;
    return make_uint4(Products::word(x[0][0], x[0][1]), Products::word(x[0][2], x[0][3]),
                      Products::word(x[1][0], x[1][1]), Products::word(x[1][2], x[1][3]));
  } else {
    const float (&w)[4] = x[step];
    return make_uint4(__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]), __float_as_uint(w[3]));
  }
}

}  // namespace paged_attn
