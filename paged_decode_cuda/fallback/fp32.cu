#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

const void* fallback_fp32_kernel_of(const FallbackInstance&, DType cache) {
  switch (cache) {
    case DType::kFloat32: return reinterpret_cast<const void*>(&fallback_kernel<Fp32, Fp32, 1>);
    case DType::kFloat8E4M3: return reinterpret_cast<const void*>(&fallback_kernel<Fp32, E4m3, 1>);
    default: return reinterpret_cast<const void*>(&fallback_kernel<Fp32, E5m2, 1>);
  }
}

}  // namespace paged_attn
