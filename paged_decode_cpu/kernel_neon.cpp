// The attention loop for Arm's vector instructions, those that every 64-bit processor has.
#if defined(__aarch64__)
#define PD_LANES 4
#define PD_NEON
#include "attend_neon.h"
#include "write.h"

namespace paged_attn {

const Kernel kNeonKernel = {"neon", products_neon, scratch_bytes_neon, attend_neon, merge_partials, write_token};

}  // namespace paged_attn
#endif
