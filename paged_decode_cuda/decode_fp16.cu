#include "decode.cuh"
#include "decode_table.h"

namespace paged_attn {

DecodeKernel decode_kernel_fp16(int head_dim, int row_tiles) { return find_decode_kernel<Fp16>(head_dim, row_tiles); }

}  // namespace paged_attn
