// Rotary embedding of one row, in place, in float32.
#pragma once

#include "spec/problem.h"
#include "spec/rotary.h"
#include "vec.h"

namespace paged_attn {
namespace {

inline float load_scalar(DType dtype, const void* base, int64_t index) {
  const char* p = static_cast<const char*>(base) + index * dtype_bytes(dtype);
  switch (dtype) {
    case DType::kFloat32: return load_tail<DType::kFloat32>(p, 1)[0];
    case DType::kFloat16: return load_tail<DType::kFloat16>(p, 1)[0];
    default: return load_tail<DType::kBFloat16>(p, 1)[0];
  }
}

// interleaved: pairs (0, 1), (2, 3), ...; else element i pairs with i + rotary_dim / 2.
inline void rotate(const Rotary& rotary, DType dtype, int64_t position, float* x) {
  const int64_t half = rotary.rotary_dim / 2;
  const int64_t step = rotary.interleaved ? 2 : 1;
  const int64_t other = rotary.interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float cos = load_scalar(dtype, rotary.cos, position * rotary.cos_stride + i);
    float sin = load_scalar(dtype, rotary.sin, position * rotary.sin_stride + i);
    float a = x[i * step], b = x[i * step + other];
    x[i * step] = pd_rotate(a, b, cos, sin, /*second=*/false);
    x[i * step + other] = pd_rotate(b, a, cos, sin, /*second=*/true);
  }
}

}  // namespace
}  // namespace paged_attn
