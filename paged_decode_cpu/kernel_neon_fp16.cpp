// The attention loop for Arm's processors that multiply float16 into float32 sums (FEAT_FHM).
#if defined(__aarch64__)
#define PD_LANES 4
#define PD_NEON
#include "attend_neon_fp16.h"
#include "write.h"

namespace paged_attn {

const Kernel kNeonFp16Kernel = {"neon_fp16",      products_neon_fp16, scratch_bytes_neon,
                                attend_neon_fp16, merge_partials,     write_token};

}  // namespace paged_attn
#endif
