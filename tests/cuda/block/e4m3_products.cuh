// The instructions of paged_decode_cuda/prefill/e4m3_products.cuh on the host, as the PTX manual describes them.
#pragma once

#include "../hopper.cuh"

namespace paged_attn {

PD_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  return narrow_e4m3(a) | narrow_e4m3(b) << 8 | narrow_e4m3(c) << 16 | narrow_e4m3(d) << 24;
}

template <int kCount, typename TermOf>
PD_DEVICE void issue_e4m3(float* sums, uint64_t matrix, int keep, TermOf term_of) {
  const int column = threadIdx.x % 4 * 2;
  uint8_t* const memory = shared_at(0);
  issue_product([=] {
    const Matrix b(matrix);
    for (int i = 0; i < kCount; ++i) {
      double sum = keep ? sums[i] : 0.;
      for (int t = 0; t < 32; ++t) {
        const uint8_t other = memory[b.byte_at(i / 4 * 8 + column + i % 2, t)];
        sum += double(term_of(i / 2 % 2, t)) * narrow_value<E4m3>(other);
      }
      sums[i] = static_cast<float>(sum);
    }
  });
}

// The rows of `rows` that belong to this thread's sums.
template <int kCount>
PD_DEVICE void multiply_e4m3(float (&d)[kCount], uint64_t rows, uint64_t matrix, int keep) {
  const int row = threadIdx.x % kWarpgroup / kWarp * 16 + lane() / 4;
  uint8_t* const memory = shared_at(0);
  issue_e4m3<kCount>(d, matrix, keep,
                     [=](int r, int t) { return narrow_value<E4m3>(memory[Matrix(rows).byte_at(row + 8 * r, t)]); });
}

// Terms 4 (lane % 4) ... + 3 of rows g and g + 8 are in a0 and a1; those 16 further in a2 and a3. The columns of d are
// rows of the other matrix.
template <int kCount>
PD_DEVICE void multiply_e4m3(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t matrix,
                             int keep) {
  const uint32_t own[4] = {a0, a1, a2, a3};
  struct Terms {
    float x[2][32];
  } all;
  for (int i = 0; i < 4; ++i) {
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = __shfl_sync(~0u, own[i], lane() / 4 * 4 + t);
      for (int e = 0; e < 4; ++e)
        all.x[i % 2][i / 2 * 16 + t * 4 + e] = narrow_value<E4m3>(static_cast<uint8_t>(word >> 8 * e));
    }
  }
  issue_e4m3<kCount>(d, matrix, keep, [=](int r, int t) { return all.x[r][t]; });
}

}  // namespace paged_attn
