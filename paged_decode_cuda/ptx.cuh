// The few machine instructions and conversions that the kernels need. No attention here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "decode/sizes.h"
#include "lanes.h"
#include "spec/problem.h"
#include "spec/ranges.h"
#include "spec/state.h"

namespace paged_attn {

PD_DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What score.h expects for float, with a relative error of 4e-7: a quotient of polynomials (minimax up to 9.01, where
// float32 rounds to 1). tanhf() branches, which takes several times as long for many scores, and tanh.approx is off by
// 5e-4. Small arguments are accurate too, as a cap far above every score must change nothing.
PD_DEVICE float pd_tanh(float x) {
  asm("min.NaN.f32 %0, %0, %1;\n\tmax.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(9.01f), "f"(-9.01f));
  const float z = x * x;
  float above = fmaf(1.34019893e-8f, z, 2.06485077e-5f), below = fmaf(7.79746591e-7f, z, 3.28977493e-4f);
  above = fmaf(fmaf(fmaf(above, z, 3.49822533e-3f), z, 1.33833327e-1f), z, 1.f);
  below = fmaf(fmaf(fmaf(below, z, 2.58872784e-2f), z, 4.6716654e-1f), z, 1.f);
  return x * above * fast_reciprocal(below);
}

}  // namespace paged_attn

#include "spec/score.h"

namespace paged_attn {

PD_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// softcap * tanh(x) as softcap - 2 softcap / (exp(2 x) + 1), of x * kFastCapScale: a third of pd_tanh's instructions.
// Its error is 3e-7 of softcap, however small the result. With softcaps up to kMostFastCap that is 2e-5 at most, where
// a weight of 16 bits is off by 5e-4 or more.
constexpr float kFastCapScale = 2.f * PD_LOG2E, kMostFastCap = 64.f;
PD_DEVICE float fast_capped(float scaled, float softcap) {
  return fmaf(-2.f * softcap, fast_reciprocal(fast_exp2(scaled) + 1.f), softcap);
}

// pd_rescale with the fast exponential.
PD_DEVICE float fast_rescale(float from, float to) { return from == to ? 1.f : fast_exp2(from - to); }

// Programmatic dependent launch: a kernel may be resident before its predecessor ends, and touches no memory until
// then.
PD_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings the arguments of a kernel into the constant cache, a line at a time. The sum must seem to matter, or the loads
// are dropped; bytes, as whole words would stay in registers.
template <typename T>
PD_DEVICE void touch(const T& argument) {
  constexpr int kLine = 64;
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); i += kLine) sum += reinterpret_cast<const uint8_t*>(&argument)[i];
  if (sum == ~0u) asm volatile("nanosleep.u32 0;");
}

PD_DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What is read once shall not drive out of L2 what is read again.
PD_DEVICE uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Asynchronous copy of 16 bytes into shared memory; reads nothing and writes zeros when `valid` is false.
PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// The same of what other blocks read too.
PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

PD_DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

PD_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
PD_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Selectors of __byte_perm(a, b, .), which counts the bytes of a from 0 and those of b from 4. Two words of 16-bit
// values: their low halves, their high halves. Two words of 8-bit values: byte by byte in turns, of the low and the
// high halves.
constexpr unsigned kLowHalves = 0x5410, kHighHalves = 0x7632;
constexpr unsigned kLowBytesInTurns = 0x5140, kHighBytesInTurns = 0x7362;

// Transposes the 8x8 matrix of 16-bit values that a warp holds, two values per lane.
PD_DEVICE uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Tags of what is stored, with the type that the matrix unit gets. float32 goes as two parts, see tf32.cuh. fp8 becomes
// fp16, which holds every value of both formats exactly and gives the probabilities 3 bits more than bf16 would.
struct Fp32 {
  static constexpr DType kDType = DType::kFloat32;
  static constexpr int kBytes = 4;
};
struct Fp16 {
  static constexpr DType kDType = DType::kFloat16;
  static constexpr int kBytes = 2;
};
struct Bf16 {
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr int kBytes = 2;
};
struct E4m3 {
  static constexpr DType kDType = DType::kFloat8E4M3;
  static constexpr int kBytes = 1;
};
struct E5m2 {
  static constexpr DType kDType = DType::kFloat8E5M2;
  static constexpr int kBytes = 1;
};

template <typename Kv>
struct IsBf16 {
  static constexpr bool value = false;
};
template <>
struct IsBf16<Bf16> {
  static constexpr bool value = true;
};

// d += a * b on a 16x8 tile with 16 terms.
template <bool kBf16>
PD_DEVICE void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, const uint32_t (&b)[2]) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
  }
}

template <bool kBf16>
PD_DEVICE uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

template <bool kBf16>
PD_DEVICE float2 pair_values(uint32_t pair) {
  if constexpr (kBf16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Ends the kernel with an error (cudaErrorLaunchFailure).
PD_DEVICE void stop_with_error() { asm volatile("trap;"); }

// Of this launch, though the replays of a graph share it. Multiplied, so that no memory is likely to hold it.
PD_DEVICE unsigned long long launch_number() {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return (number + 1) * 0x9e3779b97f4a7c15ull;
}

// Exact where the pair comes from fp8.
PD_DEVICE uint32_t fp16_pair_to_bf16(uint32_t pair) {
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return pack_pair<true>(values.x, values.y);
}

// threadIdx.x, read again: the compiler cannot keep what follows from it in registers, where these are scarce.
PD_DEVICE int this_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Two fp8 values in the low or high half of a word, as a pair of fp16.
template <typename Kv, bool kHigh>
PD_DEVICE uint32_t fp8_pair_to_fp16(uint32_t word) {
  if constexpr (sizeof(Kv) && IsBf16<Kv>::value) return word;
  // e5m2 is the upper byte of an fp16.
  if constexpr (__is_same(Kv, E5m2)) return __byte_perm(word, 0, kHigh ? 0x3424 : 0x1404);
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(kHigh ? word >> 16 : word)));
  return pair;
#else
  // Moved into place, the 4-bit exponent lacks the difference of the biases, 8: a multiplication by 2^8 is exact for
  // subnormals too. The one code of NaN is an all-ones magnitude.
  uint32_t wide = __byte_perm(word, 0, kHigh ? 0x3424 : 0x1404);
  uint32_t bits = (wide & 0x80008000u) | ((wide & 0x7f007f00u) >> 1);
  __half2 value = __hmul2(*reinterpret_cast<__half2*>(&bits), __float2half2_rn(256.f));
  uint32_t pair = *reinterpret_cast<uint32_t*>(&value);
  if ((wide & 0x00007f00u) == 0x00007f00u) pair |= 0x00007fffu;
  if ((wide & 0x7f000000u) == 0x7f000000u) pair |= 0x7fff0000u;
  return pair;
#endif
}

// One value of any dtype. The dtype is the same for the whole grid, so the branch does not diverge.
PD_DEVICE float load_float(const void* base, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(base)[index];
    case DType::kFloat16: return __half2float(static_cast<const __half*>(base)[index]);
    case DType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
    case DType::kFloat8E4M3: return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(base)[index]);
    default: return static_cast<float>(static_cast<const __nv_fp8_e5m2*>(base)[index]);
  }
}

// fp8 saturates: a value beyond the largest finite one is stored as that.
PD_DEVICE void store_float(void* base, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(base)[index] = value; break;
    case DType::kFloat16: static_cast<__half*>(base)[index] = __float2half_rn(value); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(value); break;
    case DType::kFloat8E4M3:
      static_cast<__nv_fp8_storage_t*>(base)[index] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
      break;
    default: static_cast<__nv_fp8_storage_t*>(base)[index] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
  }
}

}  // namespace paged_attn
