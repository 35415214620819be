// The kernels that exist, one list: a 16-bit or fp8 cache, a class of head_dim, one or two tiles of 8 rows. Everything
// else runs in simt.cu.
#pragma once

#include <cuda_runtime.h>

#include "spec/problem.h"

namespace paged_attn {

struct Plan;

// A kernel and what its launch needs to know.
struct DecodeKernel {
  const void* function;        // of a Problem and a Plan; nullptr: no such instance
  const void* plain_function;  // of a PlainCall
  int head_dim, rows, tile_shift;
  int warps, most_warps;  // of one of several blocks on a multiprocessor, and of a single one
  int shared_bytes_per_warp;
};

DecodeKernel decode_kernel_fp16(int head_dim, int row_tiles);
DecodeKernel decode_kernel_bf16(int head_dim, int row_tiles);
DecodeKernel decode_kernel_e4m3(int head_dim, int row_tiles);
DecodeKernel decode_kernel_e5m2(int head_dim, int row_tiles);

// Any dtype and head_dim; nullptr when the cache's dtype is unknown.
const void* simt_kernel_for(const Problem& p);

}  // namespace paged_attn
