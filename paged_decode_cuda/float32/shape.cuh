// Where pieces lie in shared memory.
#pragma once

#include "../ptx.cuh"
#include "sizes.h"

namespace paged_attn {

// A row is kPieces pieces of 16 bytes. They change places such that the 8 lanes that read at a time find them in
// different banks: of queries and keys, 4 pieces of rows g and g + 1; of values, words of 2 pieces of rows 2t.
template <typename Sizes>
struct Float32Shape : Sizes {
  static constexpr int kHeadDim = Sizes::kHeadDim;
  static constexpr int kValueChunks = kHeadDim / 32;  // of a row of values: 8 pieces
  // Sums of more than 128 products are cut off too often on the matrix unit. Added in float32 every 128 products they
  // leave room for parts of keys and values that are cut off.
  static constexpr int kSumDims = 128;
  static constexpr bool kRounded = kHeadDim <= 128;
  static constexpr int kSubTiles = Sizes::kTileKeys / 8;
  static constexpr int kWarpKeys = Sizes::kTileKeys / Sizes::kGroupWarps;  // that a warp copies

  // Of a warp: its group, and its place in it.
  static PD_MEMBER int group_of(int warp) { return Sizes::kGroups == 1 ? 0 : warp / Sizes::kGroupWarps; }
  static PD_MEMBER int place_in_group(int warp) { return Sizes::kGroups == 1 ? warp : warp % Sizes::kGroupWarps; }

  static PD_MEMBER int place_k(int row, int piece) { return piece ^ (row % 2 * 4); }
  static PD_MEMBER int place_v(int row, int piece) { return piece ^ (row / 2 % 4 * 2); }

  // Of sums on their way to the output: two pieces of four rows at a time.
  static PD_MEMBER int place_out(int row, int piece) { return piece ^ (row % 4 * 2); }
};

}  // namespace paged_attn
