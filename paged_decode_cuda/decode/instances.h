// The kernels that exist, by what find_decode_instance() says: one of a Problem and a Plan, and one of a BasicCall.
#pragma once

#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

const void* decode_kernel_fp32(int head_dim, int row_tiles, bool basic);
const void* decode_kernel_fp16(int head_dim, int row_tiles, bool basic);
const void* decode_kernel_bf16(int head_dim, int row_tiles, bool basic);
const void* decode_kernel_e4m3(int head_dim, int row_tiles, bool basic);
const void* decode_kernel_e5m2(int head_dim, int row_tiles, bool basic);

}  // namespace paged_attn
