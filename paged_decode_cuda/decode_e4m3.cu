#include "decode.cuh"
#include "decode_table.h"

namespace paged_attn {

DecodeKernel decode_kernel_e4m3(int head_dim, int row_tiles) { return find_decode_kernel<E4m3>(head_dim, row_tiles); }

}  // namespace paged_attn
