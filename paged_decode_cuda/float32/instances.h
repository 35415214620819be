// The kernels that exist, by what find_float32_instance() says.
#pragma once

#include "sizes.h"

namespace paged_attn {

const void* float32_kernel_of(const Float32Instance& instance);

}  // namespace paged_attn
