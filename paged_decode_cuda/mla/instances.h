// The kernels that exist, of a Problem and an MlaCall.
#pragma once

namespace paged_attn {

constexpr int kCombineTeam = 128, kCombineThreads = 4 * kCombineTeam;

const void* mla_kernel_fp16(bool all_scores);
const void* mla_kernel_bf16(bool all_scores);
const void* mla_combine_kernel();

}  // namespace paged_attn
