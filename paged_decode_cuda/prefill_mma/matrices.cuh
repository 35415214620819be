// Loads of matrices from shared memory into the registers of a warp.
#pragma once

#include "../ptx.cuh"

namespace paged_attn {

// Four matrices of 8 x 8 values whose rows are the pieces at the addresses of the lanes, 8 lanes to a matrix.
PD_DEVICE void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The same, each transposed.
PD_DEVICE void load_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

}  // namespace paged_attn
