// Instructions for 8-bit operands: products of a warpgroup, and numbers on their way into them.
#pragma once

#include "../hopper.cuh"

namespace paged_attn {

// Four values as e4m3, the first in the lowest byte; beyond the largest finite value they are that.
PD_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// d = or += 64 rows times as many rows of shared memory as d has columns, 32 terms of both. The 64 rows are in shared
// memory too, or in registers. A, B, C, D, E, F are the numbers of the operands behind the sums.
#define PD_E4M3_PRODUCTS(COLUMNS, COUNT, A, B, C, D, E, F)                                                        \
  PD_DEVICE void multiply_e4m3(float (&d)[COUNT], uint64_t a, uint64_t b, int keep) {                             \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                 "k32.f32.e4m3.e4m3 {" PD_LIST_##COUNT "}, %" #A ", %" #B ", keep, 1, 1;\n}\n"                    \
                 : PD_OPERANDS_##COUNT(d, 0)                                                                      \
                 : "l"(a), "l"(b), "r"(keep)                                                                      \
                 : "memory");                                                                                     \
  }                                                                                                               \
  PD_LEFT_IN_REGISTERS(multiply_e4m3, "k32.f32.e4m3.e4m3", "", COLUMNS, COUNT, A, B, C, D, E, F)

PD_E4M3_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
PD_E4M3_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)

#undef PD_E4M3_PRODUCTS

}  // namespace paged_attn
