#include "instances.h"
#include "wgmma_kernel.cuh"

namespace paged_attn {

const void* wgmma_decode_kernel_bf16(int head_dim, int row_tiles, DecodeKind kind) {
  return find_wgmma_kernel<Bf16>(head_dim, row_tiles, kind);
}

}  // namespace paged_attn
