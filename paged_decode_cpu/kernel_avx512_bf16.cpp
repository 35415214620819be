// The attention loop for AVX-512 with BF16 and VBMI.
#if defined(__x86_64__)
#define PD_LANES 16
#include "attend_bf16.h"
#include "write.h"

namespace paged_attn {

const Kernel kAvx512Bf16Kernel = {
    "avx512_bf16",  products_bf16, scratch_bytes_bf16, attend_bf16,
    merge_partials, write_token,   PartOfSlot{},       Walk{.near_bytes = kL2Bytes, .near_rows = 1}};

}  // namespace paged_attn
#endif
