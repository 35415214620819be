// The sizes of an instance of the float32 kernel, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include <stdint.h>

namespace paged_attn {

// kHeadDim: the class of head_dim, 64, 128 or 256.
template <int kHeadDim>
struct Float32Sizes {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16;
  static constexpr int kRowShift = 6, kRows = 1 << kRowShift;
  static constexpr int kTileShift = kHeadDim > 128 ? 4 : 5, kTileKeys = 1 << kTileShift;
  static constexpr int kPieces = kHeadDim / 4;  // of 16 bytes, of a row
  static constexpr int kQuads = kHeadDim / 4;   // of dimensions of a row
  // The queries, a tile of keys, a tile of values: 48 KiB, or 96, which every device has.
  static constexpr int kQueryBytes = kRows * kPieces * 16, kKeyBytes = kTileKeys * kPieces * 16;
  static constexpr int kWorkBytes = 128 + kTileKeys * 8 + kRows * 8;  // what a block does and keeps besides
  static constexpr int kSharedBytes = kQueryBytes + 2 * kKeyBytes + kWorkBytes;
  // Beside each other on a multiprocessor with 227 KB, as the compiler is told.
  static constexpr int kBlocks = kHeadDim > 128 ? 2 : 3;
  static_assert(kWarps * kWarpRows == kRows, "each warp has rows of its own");
};

// The same as numbers, for the planner.
struct Float32Instance {
  int head_dim;  // which it is
  int row_shift, tile_shift, threads, blocks, shared_bytes;
};

template <int kHeadDim>
constexpr Float32Instance float32_instance() {
  using Sizes = Float32Sizes<kHeadDim>;
  return {kHeadDim, Sizes::kRowShift, Sizes::kTileShift, Sizes::kThreads, Sizes::kBlocks, Sizes::kSharedBytes};
}

// `head_dim` is the larger of head_dim and head_dim_v, up to 256.
inline Float32Instance find_float32_instance(int64_t head_dim) {
  if (head_dim <= 64) return float32_instance<64>();
  return head_dim <= 128 ? float32_instance<128>() : float32_instance<256>();
}

}  // namespace paged_attn
