// Products of float32 numbers on the matrix unit.
//
// It takes tf32: the first 11 of the 24 bits of a float32. So a number goes as two, what it is cut off to and what that
// leaves, and of the four products of two such pairs three are added:
//
//     a = big + small        a * b = big * big + (big * small + small * big)        small * small is below 2^-20 of it
//
// That is as exact as products added in float32. The matrix unit cuts the bits off its sums that float32 does not hold,
// so sums are short there, and the two of big and small parts are added in float32.
#pragma once

#include "ptx.cuh"

namespace paged_attn {

// Several float32 numbers. The unit does not read the low bits of a word, so a number stands for its big part. The
// small part is rounded to what is read, or cut off, which takes an instruction less and is half as exact.
template <int kCount>
struct Tf32Pair {
  uint32_t big[kCount], small[kCount];

  Tf32Pair() = default;
  PD_MEMBER explicit Tf32Pair(const uint32_t (&words)[kCount], bool rounded = true) {
    constexpr uint32_t kRead = 0xffffe000, kHalf = 0x1000;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      big[i] = words[i];
      const float rest = __uint_as_float(words[i]) - __uint_as_float(words[i] & kRead);
      small[i] = __float_as_uint(rest) + (rounded ? kHalf : 0);
    }
  }
};

// d += a * b on a 16x8 tile with 8 terms.
PD_DEVICE void mma_16x8x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The product of the big parts, and what else there is.
PD_DEVICE void add_product(float (&sum)[4], float (&rest)[4], const Tf32Pair<4>& a, const Tf32Pair<2>& b) {
  mma_16x8x8(rest, a.small, b.big);
  mma_16x8x8(rest, a.big, b.small);
  mma_16x8x8(sum, a.big, b.big);
}

// Several products of the same `a`. One that adds to the sum of another waits for it, so those stand apart.
template <int kCount>
PD_DEVICE void add_small_products(float (&sum)[kCount][4], const Tf32Pair<4>& a, const Tf32Pair<2> (&b)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) mma_16x8x8(sum[i], a.small, b[i].big);
#pragma unroll
  for (int i = 0; i < kCount; ++i) mma_16x8x8(sum[i], a.big, b[i].small);
}

template <int kCount>
PD_DEVICE void add_big_products(float (&sum)[kCount][4], const Tf32Pair<4>& a, const Tf32Pair<2> (&b)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) mma_16x8x8(sum[i], a.big, b[i].big);
}

// Both, the small ones aside.
template <int kCount>
PD_DEVICE void add_products(float (&sum)[kCount][4], float (&rest)[kCount][4], const Tf32Pair<4>& a,
                            const Tf32Pair<2> (&b)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) mma_16x8x8(rest[i], a.small, b[i].big);
  add_big_products(sum, a, b);
#pragma unroll
  for (int i = 0; i < kCount; ++i) mma_16x8x8(rest[i], a.big, b[i].small);
}

// Of an infinity nothing can be left: infinity - infinity is NaN.
PD_DEVICE float with_rest(float sum, float rest) { return isnan(rest) ? sum : sum + rest; }

// Transposes the 8x8 matrix of float32 that a warp holds, two neighbours of a row per lane.
PD_DEVICE Tf32Pair<2> transposed_8x8(float x, float y) {
  const uint32_t low = __byte_perm(__float_as_uint(x), __float_as_uint(y), kLowHalves);
  const uint32_t high = __byte_perm(__float_as_uint(x), __float_as_uint(y), kHighHalves);
  const uint32_t low_t = transpose_8x8(low), high_t = transpose_8x8(high);
  return Tf32Pair<2>({__byte_perm(low_t, high_t, kLowHalves), __byte_perm(low_t, high_t, kHighHalves)});
}

}  // namespace paged_attn
