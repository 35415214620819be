// The attention loop for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#define PD_LANES 16
// Processors with AVX-512 and without BF16 are Intel's.
#define PD_READS_AHEAD_FROM 2048
#include "attend.h"
#include "write.h"

namespace paged_attn {

const Kernel kAvx512Kernel = {"avx512",       products_f32, scratch_bytes_f32, attend_f32,
                              merge_partials, write_token,  PartOfSlot{20}};

}  // namespace paged_attn
#endif
