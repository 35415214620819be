// The kernels that exist, by their rows and dtypes.
#pragma once

#include "../ptx.cuh"
#include "plan.h"

namespace paged_attn {

// Queries in float32, float16 (8-bit ones become that) and bfloat16.
const void* fallback_fp32_kernel_of(const FallbackInstance& instance, DType cache);
const void* fallback_fp16_kernel_of(const FallbackInstance& instance, DType cache);
const void* fallback_bf16_kernel_of(const FallbackInstance& instance, DType cache);

}  // namespace paged_attn
