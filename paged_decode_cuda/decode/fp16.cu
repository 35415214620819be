#include "table.cuh"

namespace paged_attn {

const void* decode_kernel_fp16(int head_dim, int row_tiles, bool basic) {
  return find_decode_kernel<Fp16>(head_dim, row_tiles, basic);
}

}  // namespace paged_attn
