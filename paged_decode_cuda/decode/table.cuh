// From sizes to the instance of the decode kernel for one cache dtype.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

template <typename Kv, int kHeadDim, int kRowTiles>
const void* decode_kernel_of(DecodeKind kind) {
  switch (kind) {
    case DecodeKind::kFull: return reinterpret_cast<const void*>(&decode_kernel<Kv, kHeadDim, kRowTiles>);
    case DecodeKind::kBasic: return reinterpret_cast<const void*>(&basic_decode_kernel<Kv, kHeadDim, kRowTiles, false>);
    default: return reinterpret_cast<const void*>(&basic_decode_kernel<Kv, kHeadDim, kRowTiles, true>);
  }
}

template <typename Kv>
const void* find_decode_kernel(int head_dim, int row_tiles, DecodeKind kind) {
  const bool one = row_tiles == 1;
  switch (head_dim) {
    case 64: return one ? decode_kernel_of<Kv, 64, 1>(kind) : decode_kernel_of<Kv, 64, 2>(kind);
    case 128:
      if (one) return decode_kernel_of<Kv, 128, 1>(kind);
      if constexpr (Kv::kBytes == 4) {
        return reinterpret_cast<const void*>(&decode_kernel<Kv, 128, 2>);  // see decode_basic_why_not()
      } else {
        return decode_kernel_of<Kv, 128, 2>(kind);
      }
    default: return decode_kernel_of<Kv, 256, 1>(kind);
  }
}

}  // namespace paged_attn
