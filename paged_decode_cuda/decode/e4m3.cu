#include "table.cuh"

namespace paged_attn {

const void* decode_kernel_e4m3(int head_dim, int row_tiles, DecodeKind kind) {
  return find_decode_kernel<E4m3>(head_dim, row_tiles, kind);
}

}  // namespace paged_attn
