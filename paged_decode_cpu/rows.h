// One row of a tensor to floats and back, whatever its type.
#pragma once

#include "spec/ranges.h"
#include "vec.h"

namespace paged_attn {
namespace {

template <DType kType>
inline void read_row(const char* source, int64_t n, float* x) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store<DType::kFloat32>(x + i, load<kType>(source + i * dtype_bytes(kType)));
  if (i < n) store<DType::kFloat32>(x + i, load_tail<kType>(source + i * dtype_bytes(kType), n - i));
}

template <DType kType>
inline void write_row(const float* x, int64_t n, char* target) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store<kType>(target + i * dtype_bytes(kType), load<DType::kFloat32>(x + i));
  if (i < n) store_tail<kType>(target + i * dtype_bytes(kType), load_tail<DType::kFloat32>(x + i, n - i), n - i);
}

// x has room for n floats, rounded up to whole registers.
inline void read_row(DType type, const char* source, int64_t n, float* x) {
  switch (type) {
    case DType::kFloat32: return read_row<DType::kFloat32>(source, n, x);
    case DType::kFloat16: return read_row<DType::kFloat16>(source, n, x);
    case DType::kBFloat16: return read_row<DType::kBFloat16>(source, n, x);
    case DType::kFloat8E4M3: return read_row<DType::kFloat8E4M3>(source, n, x);
    case DType::kFloat8E5M2: return read_row<DType::kFloat8E5M2>(source, n, x);
  }
}

inline void write_row(DType type, const float* x, int64_t n, char* target) {
  switch (type) {
    case DType::kFloat32: return write_row<DType::kFloat32>(x, n, target);
    case DType::kFloat16: return write_row<DType::kFloat16>(x, n, target);
    case DType::kBFloat16: return write_row<DType::kBFloat16>(x, n, target);
    case DType::kFloat8E4M3: return write_row<DType::kFloat8E4M3>(x, n, target);
    case DType::kFloat8E5M2: return write_row<DType::kFloat8E5M2>(x, n, target);
  }
}

}  // namespace
}  // namespace paged_attn
