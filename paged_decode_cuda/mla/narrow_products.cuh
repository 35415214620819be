// The products of the kernel for 8-bit caches. Their left operand, keys or latents, is widened to fp16 in registers,
// which holds every value of both formats exactly.
#pragma once

#include "../matrices.cuh"
#include "narrow_shape.cuh"

namespace paged_attn {

// As fp8_pair_to_fp16(), which the compiler gives the upper half shifted down: here every instruction counts.
template <typename Kv, bool kHigh>
PD_DEVICE uint32_t widen_half(uint32_t word) {
#if __CUDA_ARCH__ >= 890
  if constexpr (__is_same(Kv, E4m3)) {
    uint32_t pair;
    if constexpr (kHigh) {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
          : "=r"(pair)
          : "r"(word));
    } else {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
          : "=r"(pair)
          : "r"(word));
    }
    return pair;
  }
#endif
  return fp8_pair_to_fp16<Kv, kHigh>(word);
}

// The left operand of a product.
using NarrowOperand = uint32_t[4];

// A word has dims 4 t to 4 t + 3 of a key: x of key g, y of key g + 8.
template <typename Kv>
PD_DEVICE void widen_keys(uint32_t x, uint32_t y, NarrowOperand& a) {
  a[0] = widen_half<Kv, false>(x);
  a[1] = widen_half<Kv, false>(y);
  a[2] = widen_half<Kv, true>(x);
  a[3] = widen_half<Kv, true>(y);
}

// A word has latents 2 g and 2 g + 1 of key 2 t, then of the next one; y: 8 keys further. Latents 2 g become rows g of
// the operand, the others rows g + 8.
template <typename Kv>
PD_DEVICE void widen_latents(uint32_t x, uint32_t y, NarrowOperand& a) {
  if constexpr (__is_same(Kv, E5m2)) {  // the upper byte of an fp16
    a[0] = __byte_perm(x, 0, 0x2404);
    a[1] = __byte_perm(x, 0, 0x3414);
    a[2] = __byte_perm(y, 0, 0x2404);
    a[3] = __byte_perm(y, 0, 0x3414);
    return;
  }
  const uint32_t first = __byte_perm(x, 0, 0x3120), second = __byte_perm(y, 0, 0x3120);
  a[0] = widen_half<Kv, false>(first);
  a[1] = widen_half<Kv, true>(first);
  a[2] = widen_half<Kv, false>(second);
  a[3] = widen_half<Kv, true>(second);
}

// Where a thread stands in its consumer. Found again by each step: across them registers are scarce.
struct NarrowPlace {
  unsigned thread, warp, lane;
  unsigned g, t;  // of the lane, see NarrowTiles

  PD_MEMBER NarrowPlace() {
    thread = static_cast<unsigned>(this_thread()) % kWarpgroup;
    warp = thread / kWarp;
    lane = thread % kWarp;
    g = lane / 4;
    t = lane % 4;
  }

  PD_MEMBER int key() const { return warp * 16 + g; }       // of a tile; the other one is 8 further
  PD_MEMBER int row(int j) const { return 8 * j + t * 2; }  // of the block, and the next one
};

// `kSteps` products, one after the other. An operand is widened while two products run, from words that were loaded
// two to four products before; load(words, i) brings those of products 2 i and 2 i + 1. The fence of a product stands
// before the wait for an earlier one: else the compiler moves all that is to be widened behind that wait. The last
// products may still be on their way at the end.
template <int kSteps, int kOperands, typename Load, typename Widen, typename Multiply>
PD_DEVICE void stream_products(NarrowOperand (&a)[kOperands], Load load, Widen widen, Multiply multiply) {
  uint32_t words[2][4];
  load(words[0], 0);
  load(words[1], 1);
  widen(words[0][0], words[0][1], a[0]);
  settle(a[0]);
  products_begin();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    multiply(a[i % kOperands], i);
    products_commit();
    if (i + 1 < kSteps) {
      const int next = i + 1, pair = next / 2;
      uint32_t (&own)[4] = words[pair % 2];
      widen(own[next % 2 * 2], own[next % 2 * 2 + 1], a[next % kOperands]);
      settle(a[next % kOperands]);
      products_begin();
      if (next % 2 == 1 && pair + 2 < kSteps / 2) load(own, pair + 2);
    }
    products_wait<1>();
    settle(a[(i + 2) % kOperands]);
  }
}

}  // namespace paged_attn
