// The attention loop for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#define PD_LANES 16
#include "attend.h"
#include "write.h"

namespace paged_attn {

// Processors with AVX-512 and without BF16 are Intel's.
const Kernel kAvx512Kernel = {"avx512",    products_f32, scratch_bytes_f32,         attend_f32, merge_partials,
                              write_token, {20},         {.reads_ahead_from = 2048}};

}  // namespace paged_attn
#endif
