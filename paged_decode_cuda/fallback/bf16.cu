#include "table.cuh"

namespace paged_attn {

const void* fallback_bf16_kernel_of(const FallbackInstance& instance, DType cache) {
  return fallback_kernel_of<Bf16>(instance, cache);
}

}  // namespace paged_attn
