// The kernels that exist, of a Problem and an MlaCall.
#pragma once

namespace paged_attn {

// Threads of a block of the kernels that add partials: of many rows; of fewer; of few rows, with up to so many
// partials, and with more.
constexpr int kCombineManyThreads = 256;
constexpr int kCombineThreads = 128, kCombineFewThreads = 256, kCombineMostThreads = 512;
constexpr int kCombineFewPartials = 32;

const void* mla_kernel_fp16(bool all_scores);
const void* mla_kernel_bf16(bool all_scores);
// In blocks of 16 rows or 32; without latents, of keys and values of 512.
const void* few_rows_mla_kernel_fp16(int rows, bool latents, bool basic);
const void* few_rows_mla_kernel_bf16(int rows, bool latents, bool basic);
// Of 8-bit caches, with q in either.
const void* mla_kernel_e4m3(bool few_rows, bool all_scores);
const void* mla_kernel_e5m2(bool few_rows, bool all_scores);
const void* mla_combine_kernel(int threads, bool together);

}  // namespace paged_attn
