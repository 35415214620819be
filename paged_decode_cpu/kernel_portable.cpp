// The attention loop for the baseline of the architecture: SSE2, NEON.
#define PD_LANES 4
#include "attend.h"
#include "write.h"

namespace paged_attn {

const Kernel kPortableKernel = {"portable", products_f32, scratch_bytes_f32, attend_f32, merge_partials, write_token};

}  // namespace paged_attn
