// The kernels that exist, by what find_prefill_instance() says; of a Problem and a PrefillCall.
#pragma once

#include "sizes.h"

namespace paged_attn {

const void* prefill_kernel_fp16(const PrefillInstance& instance, bool all_scores);
const void* prefill_kernel_bf16(const PrefillInstance& instance, bool all_scores);
const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores);  // q and cache; see e4m3_sizes.h

const void* prefill_kernel_narrow(const PrefillInstance& instance,
                                  bool all_scores);  // 16-bit q, 8-bit cache; see narrow_sizes.h

// Adds the partials of rows whose keys were cut, one warp of a block for each row, or several.
constexpr int kCombineThreads = 256;  // smaller blocks are more, and take longer to start
constexpr int kMostTogether = 4;      // warps of a row
constexpr int kCombineSharedBytes = kCombineThreads * 24;
const void* prefill_combine_kernel();

}  // namespace paged_attn
