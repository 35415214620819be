// The sizes of an instance of the float32 kernel, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include <stdint.h>

namespace paged_attn {

// kHeadDim_: the class of head_dim, 64, 128 or 256. kRows_: of an item. kGroups_: of warps, each with all rows and with
// tiles of keys of its own.
template <int kHeadDim_, int kRows_, int kGroups_>
struct Float32Sizes {
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kGroups = kGroups_;
  static constexpr int kRowShift = kRows == 64 ? 6 : 5;
  static constexpr int kWarpRows = 16, kGroupWarps = kRows / kWarpRows;
  static constexpr int kWarps = kGroups * kGroupWarps, kThreads = 32 * kWarps;
  static constexpr int kTileShift = kHeadDim > 128 ? 4 : 5, kTileKeys = 1 << kTileShift;
  static constexpr int kPieces = kHeadDim / 4;  // of 16 bytes, of a row
  static constexpr int kQuads = kHeadDim / 4;   // of dimensions of a row
  // The queries; of each group a tile of keys and a tile of values. With one group 48 KiB, or 96, which every device
  // has.
  static constexpr int kQueryBytes = kRows * kPieces * 16, kKeyBytes = kTileKeys * kPieces * 16;
  static constexpr int kGroupBytes = 2 * kKeyBytes;
  static constexpr int kWorkBytes = 136 + kGroups * (kTileKeys + kRows) * 8;  // what a block does and keeps besides
  static constexpr int kSharedBytes = kQueryBytes + kGroups * kGroupBytes + kWorkBytes;
  // Beside each other on a multiprocessor with 227 KB, as the compiler is told.
  static constexpr int kBlocks = kGroups > 1 ? 1 : kHeadDim > 128 ? 2 : 3;
  static_assert(1 << kRowShift == kRows, "rows of an item are a power of two");
  static_assert(kGroups * kQueryBytes <= kQueryBytes + kGroups * kGroupBytes,
                "there is room for the sums of all groups");
};

// Where there are enough items for every multiprocessor, one group: several blocks stand beside each other, and one
// works where another begins or ends. Where there are few, one block has as many warps as registers allow.
template <int kHeadDim, int kRows>
using Float32Groups = Float32Sizes<kHeadDim, kRows,
                                   (kHeadDim > 128  ? 8
                                    : kHeadDim > 64 ? 12
                                                    : 16) *
                                       16 / kRows>;

// The same as numbers, for the planner.
struct Float32Instance {
  int head_dim, rows, groups;  // which it is
  int row_shift, tile_shift, threads, blocks, shared_bytes;
};

template <typename Sizes>
constexpr Float32Instance float32_instance() {
  return {Sizes::kHeadDim,   Sizes::kRows,    Sizes::kGroups, Sizes::kRowShift,
          Sizes::kTileShift, Sizes::kThreads, Sizes::kBlocks, Sizes::kSharedBytes};
}

template <int kHeadDim>
constexpr Float32Instance float32_instance(int rows, bool groups) {
  if (rows <= 32 && groups) return float32_instance<Float32Groups<kHeadDim, 32>>();
  return groups ? float32_instance<Float32Groups<kHeadDim, 64>>() : float32_instance<Float32Sizes<kHeadDim, 64, 1>>();
}

// `head_dim` is the larger of head_dim and head_dim_v, up to 256. Items of 32 rows come in groups only.
inline Float32Instance find_float32_instance(int64_t head_dim, int rows, bool groups) {
  if (head_dim <= 64) return float32_instance<64>(rows, groups);
  return head_dim <= 128 ? float32_instance<128>(rows, groups) : float32_instance<256>(rows, groups);
}

}  // namespace paged_attn
