// The instructions of paged_decode_cuda/matrices.cuh on the host, as the PTX manual describes them.
#pragma once

#include "ptx.cuh"

namespace paged_attn {

// Word i of a lane (g, t): values 2t and 2t + 1 of row g of matrix i, whose rows are at the addresses of lanes 8i to
// 8i + 7.
PD_DEVICE void load_matrices(uint32_t (&words)[4], uint32_t address) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (address % 16 != 0) fail("a row of a matrix that is not aligned");
  const int64_t* const rows = exchange(address);
  for (int i = 0; i < 4; ++i) memcpy(&words[i], shared_at(static_cast<uint32_t>(rows[i * 8 + g])) + t * 4, 4);
}

// Rows 2t and 2t + 1 of column g.
PD_DEVICE void load_transposed(uint32_t (&words)[4], uint32_t address) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (address % 16 != 0) fail("a row of a matrix that is not aligned");
  const int64_t* const rows = exchange(address);
  for (int i = 0; i < 4; ++i) {
    uint16_t halves[2];
    for (int e = 0; e < 2; ++e)
      memcpy(&halves[e], shared_at(static_cast<uint32_t>(rows[i * 8 + t * 2 + e])) + g * 2, 2);
    words[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  }
}

PD_DEVICE void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (address % 16 != 0) fail("a row of a matrix that is not aligned");
  const int64_t* const rows = exchange(address);
  for (int i = 0; i < 4; ++i) memcpy(shared_at(static_cast<uint32_t>(rows[i * 8 + g])) + t * 4, &words[i], 4);
  __syncwarp();
}

}  // namespace paged_attn
