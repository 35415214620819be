// Sizes of what Hopper's instructions work with, for the kernels and for the planners.
#pragma once

namespace paged_attn {

constexpr int kWarpgroup = 128;    // threads
constexpr int kColumn = 64;        // 16-bit values of a row in one column of shared memory
constexpr int kRowBytes = 128;     // of it
constexpr int kBlockBytes = 1024;  // 8 such rows, the unit of the swizzle
constexpr int kSwizzledRows = kBlockBytes / kRowBytes;

}  // namespace paged_attn
