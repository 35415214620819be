#include "table.cuh"

namespace paged_attn {

const void* decode_kernel_fp32(int head_dim, int row_tiles, DecodeKind kind) {
  return find_decode_kernel<Fp32>(head_dim, row_tiles, kind);
}

}  // namespace paged_attn
