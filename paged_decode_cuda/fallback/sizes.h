// The sizes of the fallback kernel, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include <stdint.h>

#include "spec/qualifiers.h"

namespace paged_attn {

// kRowTiles_: of 16 rows, in an item. kWordNumbers_: numbers in a word of what is multiplied, 2 of 16 bits or a
// float32. kPieceNumbers_: numbers of the cache in a piece of 16 bytes.
template <int kRowTiles_, int kWordNumbers_, int kPieceNumbers_>
struct FallbackSizes {
  static constexpr int kRowTiles = kRowTiles_, kWordNumbers = kWordNumbers_, kPieceNumbers = kPieceNumbers_;
  static constexpr int kRows = 16 * kRowTiles, kRowShift = kRowTiles == 1 ? 4 : 5;
  // 16 warps on a multiprocessor have 128 registers for each thread: two blocks, or one with half as many dimensions of
  // values for each warp where rows or float32 take the registers.
  static constexpr int kBlocks = kRowTiles == 1 && kWordNumbers == 2 ? 2 : 1;
  static constexpr int kWarps = 16 / kBlocks, kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = 16;            // of a tile, that a warp scores
  static constexpr int kWarpDims = 512 / kWarps;  // of values, that a warp sums up
  static constexpr int kTileShift = kBlocks == 2 ? 7 : 8, kTileKeys = 1 << kTileShift;
  static_assert(kTileKeys == kWarps * kWarpKeys, "each warp scores as many");
  // Of a key four lanes read a piece each at a time. A lane has its words then, in groups of four.
  static constexpr int kChunkDims = 4 * kPieceNumbers, kGroups = kPieceNumbers / kWordNumbers / 4;
  // Words from a query to the next: 8 lanes that read 16 bytes each, of two rows, find them in different banks.
  PD_METHOD static constexpr int query_stride(int64_t head_dim) {
    const int words = static_cast<int>((head_dim + kChunkDims - 1) / kChunkDims) * kChunkDims / kWordNumbers;
    return (words + 31) / 32 * 32 + 16;
  }
  // Quads of dimensions from a row of sums to the next.
  PD_METHOD static constexpr int sum_stride(int64_t head_dim_v) {
    return static_cast<int>((head_dim_v + kWarpDims - 1) / kWarpDims) * (kWarpDims / 4) + 1;
  }

  // In shared memory, one behind the other. In the end sums take the place of queries.
  static constexpr int kControlBytes = 256;
  static constexpr int kRowBytes = kRows * (16 + 2 * 4);
  static constexpr int kPlaceBytes = 2 * kTileKeys * 16;
  static constexpr int kTopBytes = 2 * kWarps * kRows * 4;
  static constexpr int kWeightBytes = kTileKeys * kRows * 4 / kWordNumbers;
  static constexpr int kWorkBytes = kControlBytes + kRowBytes + kPlaceBytes + kTopBytes + kWeightBytes;
  // head_dim_qv: of qv, 0 without
  static constexpr int shared_bytes(int64_t head_dim, int64_t head_dim_qv, int64_t head_dim_v) {
    const int queries = kRows * (query_stride(head_dim) + (head_dim_qv > 0 ? query_stride(head_dim_qv) : 0)) * 4;
    const int sums = kRows * sum_stride(head_dim_v) * 16;
    return kWorkBytes + (queries > sums ? queries : sums);
  }
};
static_assert(FallbackSizes<2, 2, 8>::shared_bytes(576, 0, 512) <= 99 << 10 &&
                  FallbackSizes<2, 2, 8>::shared_bytes(64, 512, 512) <= 99 << 10 &&
                  FallbackSizes<1, 1, 4>::shared_bytes(576, 0, 512) <= 99 << 10 &&
                  FallbackSizes<1, 1, 4>::shared_bytes(64, 512, 512) <= 99 << 10,
              "every device has that much");

// The same as numbers, for the planner.
struct FallbackInstance {
  int row_tiles;  // which it is, beside the dtypes
  int row_shift, tile_shift, warps, blocks, shared_bytes;
};

template <typename Sizes>
constexpr FallbackInstance fallback_instance(int64_t head_dim, int64_t head_dim_qv, int64_t head_dim_v) {
  return {Sizes::kRowTiles, Sizes::kRowShift, Sizes::kTileShift,
          Sizes::kWarps,    Sizes::kBlocks,   Sizes::shared_bytes(head_dim, head_dim_qv, head_dim_v)};
}

}  // namespace paged_attn
