// The kernels that exist, of a Problem and an MlaCall.
#pragma once

#include "plan.h"

namespace paged_attn {

constexpr int kCombineThreads = 128, kCombineFewThreads = 256;  // of a block of the kernels that add parts

const void* mla_kernel_fp16(bool all_scores);
const void* mla_kernel_bf16(bool all_scores);
// Of 8-bit caches, with q in either.
const void* mla_kernel_e4m3(bool all_scores);
const void* mla_kernel_e5m2(bool all_scores);
const void* mla_combine_kernel(bool few_rows);

}  // namespace paged_attn
