// The attention loop for the instructions of kernel_avx512_bf16.cpp, with other prefetches, for AMD's Zen 5
// (docs/cpu.md).
#if defined(__x86_64__)
#define PD_LANES 16
#define PD_FEW_PIECE 64
#define PD_FETCH_LOCALITY 3
#define PD_SWEEP_BYTES 1024
#include "attend_bf16.h"
#include "write.h"

namespace paged_attn {

const Kernel kAvx512Zen5Kernel = {"avx512_zen5",  products_bf16, scratch_bytes_bf16, attend_bf16,
                                  merge_partials, write_token,   PartOfSlot{},       Walk{.near_bytes = kL2Bytes}};

}  // namespace paged_attn
#endif
