#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {
namespace {

template <int kHeadDim>
const void* kernel_of(const Float32Instance& instance) {
  if (instance.groups == 1) return reinterpret_cast<const void*>(&float32_kernel<Float32Sizes<kHeadDim, 64, 1>>);
  return instance.rows == 32 ? reinterpret_cast<const void*>(&float32_kernel<Float32Groups<kHeadDim, 32>>)
                             : reinterpret_cast<const void*>(&float32_kernel<Float32Groups<kHeadDim, 64>>);
}

}  // namespace

const void* float32_kernel_of(const Float32Instance& instance) {
  switch (instance.head_dim) {
    case 64: return kernel_of<64>(instance);
    case 128: return kernel_of<128>(instance);
    default: return kernel_of<256>(instance);
  }
}

}  // namespace paged_attn
