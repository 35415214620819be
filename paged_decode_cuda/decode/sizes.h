// The sizes of an instance of the decode kernel, for the host and for the device. Nothing here needs CUDA.
#pragma once

#include <stdint.h>

namespace paged_attn {

constexpr int kWarp = 32;
constexpr int kRowSumBytes = 6 * sizeof(float);  // a RowSum, see exchange.cuh

// kBytes: of an element of the cache. kHeadDim: the class of head_dim, 64, 128 or 256. kRowTiles: tiles of 8 rows.
template <int kBytes, int kHeadDim, int kRowTiles>
struct DecodeSizes {
  static constexpr int kRowShift = 2 + kRowTiles;  // 8 or 16 rows
  static constexpr int kRows = 1 << kRowShift;
  static constexpr int kQuads = kHeadDim / 4;  // of dimensions of a row
  // Elements of a 16-byte piece; of values a lane takes fewer when 8 lanes share a short row.
  static constexpr int kVecK = 16 / kBytes;
  static constexpr int kVecV = kVecK < kHeadDim / 8 ? kVecK : kHeadDim / 8;
  static constexpr int kChunksK = kHeadDim / (4 * kVecK);
  static constexpr int kStepsK = kBytes == 4 ? 2 : kVecK / 4;  // products of a chunk of keys: of 8 terms, or of 16
  static constexpr int kChunksV = kHeadDim / (8 * kVecV);
  static constexpr int kPieces = kHeadDim * kBytes / 16;  // of a row
  // K and V of 16 keys are a tile, or of 32 when a row is short: 8 KiB mostly.
  static constexpr int kTileShift = kHeadDim * kBytes <= 128 ? 5 : 4;
  static constexpr int kTileKeys = 1 << kTileShift;
  static constexpr int kSubTiles = kTileKeys / 16;
  static constexpr int kStageBytesK = kTileKeys * kPieces * 16;
  static constexpr int kStageBytes = 2 * kStageBytesK;
  // How many blocks a multiprocessor holds: two where 16 rows or wide heads need many registers, else three. The
  // shortest rows count as three too, although no launch bound makes the compiler keep to it.
  static constexpr int kWarps = kStageBytes > (kBytes == 4 ? 16384 : 8192) ? 3 : 4;
  static constexpr bool kManyRegisters = kHeadDim * kBytes > 256 || kHeadDim > 128 || kRowTiles > 1;
  static constexpr int kBlocks = kManyRegisters && kHeadDim * kBytes > 64 ? 2 : 3;
  // The same warps in a single block leave fewer partials, but all of them meet at the end of a segment.
  static constexpr int kMostWarps = kWarps * (kManyRegisters ? 2 : 3);
  // As many as the largest multiprocessor holds. A smaller one gets fewer warps, see plan_block().
  static constexpr int kStagesThatFit = 227 * 1024 / kBlocks / (kWarps * kStageBytes);
  static constexpr int kStages = kStagesThatFit < 4 ? kStagesThatFit : 4;
  // float32: stages are large and few, so the keys and the values of a stage are copied apart, each as soon as its
  // place has been read. Groups of copies that may be on their way when a tile, or a half of one, is awaited.
  static constexpr bool kHalves = kBytes == 4;
  static constexpr int kGroupsBehind = kHalves ? 2 * kStages - 1 : kStages - 2;
  // Where a stage that is free holds the sums of its warp. Of halves it is free but for the keys.
  static constexpr int kSumsAt = kHalves ? kStageBytesK : 0;

  // Shared memory of a warp: its queue, (m, l) of its rows, a sum per thread. And of a block: what every warp has free.
  static constexpr int kQueueBytes = kStages * kStageBytes;
  static constexpr int kWarpBytes = kQueueBytes + kRows * 2 * static_cast<int>(sizeof(float)) + kWarp * kRowSumBytes;
  static constexpr int kBlockBytes = 128;
  // Queries stay in registers, but for float32 ones of many dimensions or rows: two words take the place of one.
  static constexpr bool kSharedQueries = kBytes == 4 && kHeadDim * kRowTiles > 128;
  static constexpr int kQueryBytes = kSharedQueries ? kRows * kPieces * 16 : 0;
  static_assert(kStages >= (kHalves ? 1 : 2), "copies run ahead");
  static_assert(kRows * kHeadDim * 4 <= kStageBytes - kSumsAt, "a free stage also holds the sums of a warp");
  static_assert(kMostWarps * static_cast<int>(sizeof(int)) <= kBlockBytes, "the free stages fit");
};

// The same as numbers, for the planner.
struct DecodeInstance {
  int bytes, head_dim, row_tiles;  // which it is
  int rows, row_shift, tile_shift;
  int warps, blocks, most_warps;             // beside each other on a large multiprocessor, and of a single block
  int warp_bytes, block_bytes, query_bytes;  // of shared memory; the last two of a block
  bool wgmma;                                // whether warpgroups multiply, see wgmma_sizes.h
};

template <int kBytes, int kHeadDim, int kRowTiles>
constexpr DecodeInstance decode_instance() {
  using Sizes = DecodeSizes<kBytes, kHeadDim, kRowTiles>;
  return {kBytes,        kHeadDim,       kRowTiles,         Sizes::kRows,      Sizes::kRowShift,   Sizes::kTileShift,
          Sizes::kWarps, Sizes::kBlocks, Sizes::kMostWarps, Sizes::kWarpBytes, Sizes::kBlockBytes, Sizes::kQueryBytes,
          false};
}

// The instance for a cache of `bytes` per element. `head_dim` is the larger of head_dim and head_dim_v, up to 256; two
// row tiles of 256 would not fit into the registers.
inline DecodeInstance find_decode_instance(int bytes, int64_t head_dim, int row_tiles) {
  if (bytes == 4) {
    if (head_dim <= 64) return row_tiles == 1 ? decode_instance<4, 64, 1>() : decode_instance<4, 64, 2>();
    if (head_dim <= 128) return row_tiles == 1 ? decode_instance<4, 128, 1>() : decode_instance<4, 128, 2>();
    return decode_instance<4, 256, 1>();
  }
  if (bytes == 1) {
    if (head_dim <= 64) return row_tiles == 1 ? decode_instance<1, 64, 1>() : decode_instance<1, 64, 2>();
    if (head_dim <= 128) return row_tiles == 1 ? decode_instance<1, 128, 1>() : decode_instance<1, 128, 2>();
    return decode_instance<1, 256, 1>();
  }
  if (head_dim <= 64) return row_tiles == 1 ? decode_instance<2, 64, 1>() : decode_instance<2, 64, 2>();
  if (head_dim <= 128) return row_tiles == 1 ? decode_instance<2, 128, 1>() : decode_instance<2, 128, 2>();
  return decode_instance<2, 256, 1>();
}

}  // namespace paged_attn
