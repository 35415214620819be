#include "simt.cuh"

#include "instances.h"

namespace paged_attn {
namespace {

template <typename T>
const void* kernel_for(const Problem& p) {
  // Dimensions per lane: 4 and 8 cover head_dim 128 and 256, the widest one (576, 512).
  if (p.qv) return reinterpret_cast<const void*>(&simt_kernel<T, 8, 16, true>);
  int64_t widest = pd_max(p.head_dim, p.head_dim_v);
  if (widest <= 128) return reinterpret_cast<const void*>(&simt_kernel<T, 4, 4, false>);
  if (widest <= 256) return reinterpret_cast<const void*>(&simt_kernel<T, 8, 8, false>);
  return reinterpret_cast<const void*>(&simt_kernel<T, 18, 16, false>);
}

}  // namespace

const void* simt_kernel_for(const Problem& p) {
  switch (p.cache.dtype) {
    case DType::kFloat32: return kernel_for<float>(p);
    case DType::kFloat16: return kernel_for<__half>(p);
    case DType::kBFloat16: return kernel_for<__nv_bfloat16>(p);
    case DType::kFloat8E4M3: return kernel_for<__nv_fp8_e4m3>(p);
    case DType::kFloat8E5M2: return kernel_for<__nv_fp8_e5m2>(p);
  }
  return nullptr;
}

}  // namespace paged_attn
