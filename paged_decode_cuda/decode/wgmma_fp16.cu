#include "instances.h"
#include "wgmma_kernel.cuh"

namespace paged_attn {

const void* wgmma_decode_kernel_fp16(int head_dim, int row_tiles, DecodeKind kind) {
  return find_wgmma_kernel<Fp16>(head_dim, row_tiles, kind);
}

}  // namespace paged_attn
