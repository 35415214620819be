// The kernels that exist, by what find_float32_instance() says.
#pragma once

namespace paged_attn {

const void* float32_kernel_of(int head_dim);

}  // namespace paged_attn
