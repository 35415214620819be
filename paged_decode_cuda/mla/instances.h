// The kernels that exist, of a Problem and an MlaCall.
#pragma once

#include "plan.h"

namespace paged_attn {

constexpr int kCombineTeam = 128, kCombineTeams = 4;  // threads; where rows are few

const void* mla_kernel_fp16(bool all_scores);
const void* mla_kernel_bf16(bool all_scores);
// Of 8-bit caches, with q in either.
const void* mla_kernel_e4m3(bool all_scores);
const void* mla_kernel_e5m2(bool all_scores);
const void* mla_combine_kernel(MlaCombine which);

}  // namespace paged_attn
