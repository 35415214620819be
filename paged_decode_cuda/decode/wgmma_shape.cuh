// The sizes of an instance with what only the device knows: the number type, where pieces lie in shared memory, and who
// takes part in the end of a segment.
#pragma once

#include "../hopper.cuh"
#include "wgmma_sizes.h"

namespace paged_attn {

// A warpgroup and what it multiplies.
struct WarpgroupPlaces {
  static constexpr int kWarps = kWarpgroup / kWarp;
  // Which of them this is: whose part of a tile.
  static PD_MEMBER int part() { return threadIdx.x / kWarp % kWarps; }

  // A piece of 16 bytes in columns of `rows` rows.
  static PD_MEMBER int piece_at(int rows, int row, int piece) {
    constexpr int kPieces = kRowBytes / 16;
    return (piece / kPieces * rows + row) * kRowBytes + (piece % kPieces ^ row % kSwizzledRows) * 16;
  }
};

template <typename Kv, int kHeadDim, int kRowTiles>
struct WgmmaShape : WgmmaSizes<kHeadDim, kRowTiles>, WarpgroupPlaces {
  using Type = Kv;
  static constexpr bool kBf16 = IsBf16<Kv>::value;
  static constexpr int kOutputBytes = 2;
  static constexpr int kColumns = kHeadDim / kColumn;

  static PD_MEMBER int consumer() { return threadIdx.x / kWarpgroup; }

  // In a kernel that calls a function the compiler lets no product run beside anything.
  static constexpr bool kCallsNothing = true;
  static PD_MEMBER int end_threads() { return WgmmaSizes<kHeadDim, kRowTiles>::kEndThreads; }
  static PD_MEMBER void end_sync() { named_barrier_sync(kEndBarrier, end_threads()); }

  // Barriers by name: of all consumers, and of each.
  static constexpr int kEndBarrier = 1, kConsumerBarrier = 2;
};

}  // namespace paged_attn
