// Whether two tensors share memory, told from addresses, sizes and strides. For tensors that lie apart a few additions
// tell.
#pragma once

#include <cstdint>
#include <utility>

#include "spec/problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// The rows of a tensor in a buffer, all of row_bytes. Row (i, j, l) begins at
// begin + i * stride[0] + j * stride[1] + l * stride[2], in bytes.
struct Rows {
  const void* buffer;
  int64_t begin, row_bytes;
  int64_t size[3], stride[3];

  bool empty() const { return size[0] * size[1] * size[2] * row_bytes == 0; }
  int64_t last_row() const {
    return begin + (size[0] - 1) * stride[0] + (size[1] - 1) * stride[1] + (size[2] - 1) * stride[2];
  }
};

// Rows of `width` elements. Strides count elements, as in Problem.
template <typename T>
Rows rows_at(const Address<T>& at, DType dtype, int64_t width, const int64_t (&size)[3], const int64_t (&stride)[3]) {
#ifdef METAL_KERNEL
  const void* buffer = at.buffer;
  const int64_t begin = at.offset;
#else
  const void* buffer = nullptr;
  const int64_t begin = reinterpret_cast<int64_t>(at);
#endif
  const int64_t bytes = dtype_bytes(dtype);
  return {buffer,
          begin,
          width * bytes,
          {size[0], size[1], size[2]},
          {stride[0] * bytes, stride[1] * bytes, stride[2] * bytes}};
}

// Whether a row of a and a row of b share a byte, if b begins `distance` bytes after a and both have the same strides.
// Recursive, the largest stride first: in that dimension two such rows are distance / stride steps apart, rounded down
// or up. Exact where each stride is at least the extent of the dimensions inside it; else it may miss an overlap.
inline bool rows_meet(const Rows& a, const Rows& b, int64_t distance, const int (&order)[3], int dim = 0) {
  if (dim >= 3) return distance < a.row_bytes && -distance < b.row_bytes;
  const int d = order[dim];
  const int64_t stride = a.size[d] > 1 ? a.stride[d] : b.stride[d];
  if ((a.size[d] == 1 && b.size[d] == 1) || stride <= 0) return rows_meet(a, b, distance, order, dim + 1);
  const int64_t down = distance / stride - (distance % stride < 0);
  for (const int64_t steps : {down, down + 1})
    if (steps < a.size[d] && -steps < b.size[d] && rows_meet(a, b, distance - steps * stride, order, dim + 1))
      return true;
  return false;
}

// Dimensions by their strides, the largest first. A dimension of size 1 in one tensor has the stride of the other.
inline bool rows_meet(const Rows& a, const Rows& b) {
  const auto stride = [&](int d) { return a.size[d] > 1 ? a.stride[d] : b.stride[d]; };
  int order[3] = {0, 1, 2};
  for (const int i : {0, 1, 0})
    if (stride(order[i]) < stride(order[i + 1])) std::swap(order[i], order[i + 1]);
  return rows_meet(a, b, b.begin - a.begin, order);
}

// A row of one byte.
inline Rows byte_at(const Rows& rows, int64_t byte) { return {rows.buffer, byte, 1, {1, 1, 1}, {0, 0, 0}}; }

inline bool same_strides(const Rows& a, const Rows& b) {
  for (int d = 0; d < 3; ++d)
    if (a.size[d] > 1 && b.size[d] > 1 && a.stride[d] != b.stride[d]) return false;
  return true;
}

// Whether a and b certainly share a byte; views of one tensor whose rows alternate share none. With equal strides this
// is as exact as rows_meet. Otherwise only the first and the last byte of each are looked for in the other: the exact
// answer is a bounded Diophantine problem, which can take very long (numpy.shares_memory).
inline bool share_memory(const Rows& a, const Rows& b) {
  const int64_t a_last = a.last_row() + a.row_bytes - 1, b_last = b.last_row() + b.row_bytes - 1;
  if (a_last < b.begin || b_last < a.begin || a.buffer != b.buffer || a.empty() || b.empty()) return false;
  if (same_strides(a, b)) return rows_meet(a, b);
  return rows_meet(a, byte_at(b, b.begin)) || rows_meet(a, byte_at(b, b_last)) || rows_meet(b, byte_at(a, a.begin)) ||
         rows_meet(b, byte_at(a, a_last));
}

}  // namespace paged_attn
