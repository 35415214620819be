#include "table.cuh"

namespace paged_attn {

const void* fallback_fp16_kernel_of(const FallbackInstance& instance, DType cache) {
  return fallback_kernel_of<Fp16>(instance, cache);
}

}  // namespace paged_attn
