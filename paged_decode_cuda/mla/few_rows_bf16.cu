#include "few_rows_table.cuh"

namespace paged_attn {

const void* few_rows_mla_kernel_bf16(int rows, bool latents, bool basic) {
  return find_few_rows_mla_kernel<Bf16>(rows, latents, basic);
}

}  // namespace paged_attn
