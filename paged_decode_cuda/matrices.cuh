// Matrices of 8 rows of 16 bytes on their way between shared memory and the registers of a warp, four at a time. Their
// rows are at the addresses of the lanes, 8 lanes to a matrix.
#pragma once

#include "ptx.cuh"

namespace paged_attn {

// Lane 4 i + j gets word j of row i of each.
PD_DEVICE void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Lane 4 i + j gets value i of rows 2 j and 2 j + 1 of each. A value has 16 bits, or is a pair of 8.
PD_DEVICE void load_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Lane 4 i + j has word j of row i of each.
PD_DEVICE void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace paged_attn
