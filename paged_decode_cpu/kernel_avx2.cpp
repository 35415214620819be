// The attention loop for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#define PD_LANES 8
#include "attend.h"
#include "write.h"

namespace paged_attn {

const Kernel kAvx2Kernel = {"avx2", products_f32, scratch_bytes_f32, attend_f32, merge_partials, write_token};

}  // namespace paged_attn
#endif
