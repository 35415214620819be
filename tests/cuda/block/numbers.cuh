// The end of ptx.cuh: numbers of 16 and 8 bits, as the headers of CUDA name them, and values of any dtype.
#pragma once

namespace paged_attn {

struct __half {
  uint16_t bits;
  operator float() const { return value_at<Fp16>(&bits); }
};
struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return value_at<Bf16>(&bits); }
};
struct [[gnu::may_alias]] __half2 {
  __half x, y;
};
PD_DEVICE float2 __half22float2(const __half2& pair) { return make_float2(pair.x, pair.y); }

// The nearest number of 8 bits, the even one of two. Beyond the largest finite one it is that, infinities too.
PD_DEVICE uint8_t narrow_fp8(float x, bool e4m3) {
  if (isnan(x)) return 0x7f;
  const int mantissa = e4m3 ? 3 : 2, least = e4m3 ? -6 : -14, largest = e4m3 ? 0x7e : 0x7b;
  const float size = fminf(fabsf(x), 0x1p17f);
  const int exponent = size < ldexpf(1.f, least) ? least : ilogbf(size);
  const int code = (exponent - least << mantissa) + static_cast<int>(nearbyintf(ldexpf(size, mantissa - exponent)));
  return static_cast<uint8_t>(min(code, largest) | signbit(x) << 7);
}
enum { __NV_SATFINITE, __NV_E4M3, __NV_E5M2 };
PD_DEVICE uint16_t __nv_cvt_float2_to_fp8x2(float2 pair, int, int kind) {
  return static_cast<uint16_t>(narrow_fp8(pair.x, kind == __NV_E4M3) | narrow_fp8(pair.y, kind == __NV_E4M3) << 8);
}

PD_DEVICE float __frcp_rn(float x) { return 1.f / x; }
PD_DEVICE float __fmul_rn(float a, float b) {
  volatile float rounded = a * b;  // no part of an FMA
  return rounded;
}
PD_DEVICE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Several numbers at a time: a GPU has no such access across their alignment, and `streamed` says where they may be.
struct Streamed {
  const void* begin;
  int64_t bytes;
};
inline std::vector<Streamed> streamed;
PD_DEVICE void check_streamed(const void* place, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (address % bytes != 0) fail("numbers that are not aligned");
  for (const Streamed& s : streamed) {
    const auto begin = reinterpret_cast<uintptr_t>(s.begin);
    if (address >= begin && address + bytes <= begin + s.bytes) return;
  }
  fail("numbers outside of the tensors");
}
template <typename T>
PD_DEVICE T __ldcs(const T* place) {
  check_streamed(place, sizeof(T));
  T value;
  memcpy(&value, place, sizeof(T));
  return value;
}
template <typename T>
PD_DEVICE void __stcs(T* place, const T& value) {
  check_streamed(place, sizeof(T));
  memcpy(place, &value, sizeof(T));
}

PD_DEVICE float load_float(const void* base, DType dtype, int64_t index) {
  const uint8_t* const place = static_cast<const uint8_t*>(base) + index * dtype_bytes(dtype);
  switch (dtype) {
    case DType::kFloat32: return *reinterpret_cast<const float*>(place);
    case DType::kFloat16: return value_at<Fp16>(place);
    case DType::kBFloat16: return value_at<Bf16>(place);
    case DType::kFloat8E4M3: return narrow_value<E4m3>(*place);
    default: return narrow_value<E5m2>(*place);
  }
}
PD_DEVICE void store_float(void* base, DType dtype, int64_t index, float value) {
  uint8_t* const place = static_cast<uint8_t*>(base) + index * dtype_bytes(dtype);
  switch (dtype) {
    case DType::kFloat32: *reinterpret_cast<float*>(place) = value; break;
    case DType::kFloat16: *reinterpret_cast<uint16_t*>(place) = narrow_fp16(value); break;
    case DType::kBFloat16: *reinterpret_cast<uint16_t*>(place) = narrow_bf16(value); break;
    default: *place = narrow_fp8(value, dtype == DType::kFloat8E4M3);
  }
}

}  // namespace paged_attn
