// The warp that transposes 8-bit values: from a row for every key, as they are copied, to a row for every dimension.
//
// The matrix unit adds over the keys in any order, as long as weights and values have the same one. A consumer thread
// has the weights of keys 8 j + 2 t and the next (t = lane % 4), and of 32 of them they fill its operands in this
// order: place 16 h + 4 t + 2 a + e is key 16 h + 8 a + 2 t + e. That is also how a transposing load leaves keys with
// the lanes, so weights and values meet without any shuffle.
//
// The order of dimensions is another one too: of 16, the even ones are rows 0 to 7 and the odd ones rows 8 to 15. So a
// thread has sums of four neighbours, and stores have no bank conflicts.
#pragma once

#include "../matrices.cuh"
#include "shape.cuh"

namespace paged_attn {

// Selectors of __byte_perm(a, b, .): the lower and the upper bytes of 16-bit values.
constexpr unsigned kEvenBytes = 0x6420, kOddBytes = 0x7531;

template <typename Shape>
PD_DEVICE void transpose_tile(uint32_t values, uint32_t transposed) {
  constexpr int kKeys = 32, kDims = 16;  // of four matrices
  constexpr int kBatch = 4;              // so many times four are loaded before the first ones are stored
  const int row = threadIdx.x % 8, matrix = threadIdx.x % kWarp / 8;
  const uint32_t from = values + (8 * matrix + row) * kRowBytes;
  const uint32_t to = transposed + (8 * (matrix % 2) + row) * kRowBytes;
#pragma unroll 1
  for (int k = 0; k < Shape::kKeys / kKeys; ++k) {
#pragma unroll
    for (int first = 0; first < Shape::kDimV / kDims; first += kBatch) {
      uint32_t pairs[kBatch][4];  // of dimensions, of keys 2 t and 2 t + 1 of each 8
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        load_transposed(pairs[i], from + k * kKeys * kRowBytes + ((first + i) ^ row) * 16);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t words[4] = {
            __byte_perm(pairs[i][0], pairs[i][1], kEvenBytes), __byte_perm(pairs[i][0], pairs[i][1], kOddBytes),
            __byte_perm(pairs[i][2], pairs[i][3], kEvenBytes), __byte_perm(pairs[i][2], pairs[i][3], kOddBytes)};
        store_matrices(to + (first + i) * kDims * kRowBytes + ((2 * k + matrix / 2) ^ row) * 16, words);
      }
    }
  }
}

template <typename Shape>
PD_DEVICE void transpose_values(PrefillControl<Shape>& control, uint32_t shared) {
  Ring<Shape::kValueStages> values;
  Ring<Shape::kTransposedStages> transposed;
  Ring<2> slot;
  while (true) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const bool exists = control.work[slot.stage].exists;
    int tiles = control.work[slot.stage].item.tiles;
    if (!exists) break;
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      barrier_wait(shared_address(&control.values_full[values.stage]), values.phase);
      barrier_wait(shared_address(&control.transposed_empty[transposed.stage]), transposed.phase ^ 1);
      transpose_tile<Shape>(shared + Shape::kValuesAt + values.stage * Shape::kValueBytes,
                            shared + Shape::kTransposedAt + transposed.stage * Shape::kTransposedBytes);
      fence_async_proxy();
      barrier_arrive(shared_address(&control.transposed_full[transposed.stage]));
      barrier_arrive(shared_address(&control.values_empty[values.stage]));
      values.advance();
      transposed.advance();
    }
  }
}

}  // namespace paged_attn
