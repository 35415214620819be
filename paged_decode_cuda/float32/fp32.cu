#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

const void* float32_kernel_of(int head_dim) {
  switch (head_dim) {
    case 64: return reinterpret_cast<const void*>(&float32_kernel<64>);
    case 128: return reinterpret_cast<const void*>(&float32_kernel<128>);
    default: return reinterpret_cast<const void*>(&float32_kernel<256>);
  }
}

}  // namespace paged_attn
