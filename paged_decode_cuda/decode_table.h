// From sizes to the instance of decode_kernel for one cache dtype.
#pragma once

#include "decode.cuh"
#include "instances.h"

namespace paged_attn {

template <typename Kv, int kHeadDim, int kRowTiles>
DecodeKernel describe_decode_kernel() {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  DecodeKernel kernel = {};
  kernel.function = reinterpret_cast<const void*>(&decode_kernel<Kv, kHeadDim, kRowTiles>);
  kernel.plain_function = reinterpret_cast<const void*>(&plain_decode_kernel<Kv, kHeadDim, kRowTiles>);
  kernel.head_dim = kHeadDim;
  kernel.rows = Shape::kRows;
  kernel.tile_shift = Shape::kTileShift;
  kernel.warps = Shape::kWarps;
  kernel.most_warps = Shape::kMostWarps;
  kernel.shared_bytes_per_warp = Shape::kSharedBytesPerWarp;
  return kernel;
}

template <typename Kv, int kHeadDim>
DecodeKernel find_decode_kernel(int row_tiles) {
  return row_tiles == 1 ? describe_decode_kernel<Kv, kHeadDim, 1>() : describe_decode_kernel<Kv, kHeadDim, 2>();
}

// `head_dim` is the larger of head_dim and head_dim_v.
template <typename Kv>
DecodeKernel find_decode_kernel(int head_dim, int row_tiles) {
  if (head_dim <= 64) return find_decode_kernel<Kv, 64>(row_tiles);
  if (head_dim <= 128) return find_decode_kernel<Kv, 128>(row_tiles);
  // Two row tiles of 256 would not fit into the registers.
  if (head_dim <= 256) return describe_decode_kernel<Kv, 256, 1>();
  return {};
}

}  // namespace paged_attn
