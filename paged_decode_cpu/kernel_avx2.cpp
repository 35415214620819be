// The attention loop for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#define PD_LANES 8
// Measured on an AMD Zen 3; Intel's processors of this kind have less of L2.
#define PD_L2_KIB 512
#define PD_ASKED_AGAIN_ROWS 3
#include "attend.h"
#include "write.h"

namespace paged_attn {

const Kernel kAvx2Kernel = {"avx2",      products_f32, scratch_bytes_f32,         attend_f32, merge_partials,
                            write_token, {},           {.reads_ahead_from = 8192}};

}  // namespace paged_attn
#endif
