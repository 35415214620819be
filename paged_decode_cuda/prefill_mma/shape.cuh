// Where things lie in shared memory, and what the kernel is told.
//
// Queries, keys and values are rows of 16-byte pieces. The matrix unit's loads take one piece of 8 rows at a time,
// which must lie in different banks. So pieces trade places: piece i of row r is at i ^ (r % 8) where rows are a
// multiple of 128 bytes long, and at i ^ (r / 2 % 4) where rows are an odd multiple of 64.
//
//     rows of 128 bytes          0 1 2 3 4 5 6 7        rows of 192 bytes      0 1 2 3 4 5 6 7 8 9 ...
//                                1 0 3 2 5 4 7 6                               0 1 2 3 4 5 6 7 8 9
//                                2 3 0 1 6 7 4 5                               1 0 3 2 5 4 7 6 9 8
#pragma once

#include "../key_places.cuh"
#include "../prefill/pieces.cuh"
#include "../prefill/schedule.cuh"
#include "../rows.cuh"
#include "sizes.h"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_, typename Sizes>
struct PrefillMmaShape : Sizes {
  using Type = Type_;
  using Sizes::kTurned;

  // Where a tile of keys lies, and its values.
  static PD_MEMBER uint32_t keys_at(uint32_t shared, int stage) {
    return shared + Sizes::kKeysAt + stage * Sizes::kTileBytes;
  }
  static PD_MEMBER uint32_t values_at(uint32_t shared, int stage) {
    return shared + Sizes::kValuesAt + stage * Sizes::kTileBytes;
  }

  static PD_MEMBER int turn(int row) { return kTurned == 8 ? row % 8 : row / 2 % 4; }

  // Address of the piece `step` steps of 2 pieces after one whose address is given.
  static PD_MEMBER uint32_t step_pieces(uint32_t address, int step) {
    constexpr int kTurnedBytes = kTurned * 16;
    return (address ^ (step * 32 % kTurnedBytes)) + step * 32 / kTurnedBytes * kTurnedBytes;
  }
};

// What the kernel reads beside the problem.
struct PrefillMmaCall : Plan {
  static constexpr bool kHasSections = false;  // the warps that multiply find their tiles too: no registers left
  static constexpr bool kCutsKeys = false;
  FastDivisor tile_rows;  // rows of a tile
  int32_t blocks_in_grid;
  int32_t l2_keys;              // of one head, that L2 keeps
  unsigned long long* tickets;  // one word
};

// What the warps tell each other.
template <typename Shape>
struct PrefillMmaControl {
  Work work[2];         // this one and the next
  KeyPlaces places[2];  // of their keys
  // Where the walk through the tiles of rows is; in registers it would be in everybody's way.
  KnownRequests<0> known;
  int bucket, first;
  bool left;
  RequestTiles own[kWarp];
  int ends[kWarp];

  PD_MEMBER Scheduler<Shape> scheduler(const Problem& p) const {
    const int lane = threadIdx.x % kWarp;
    return {bucket, first, own[lane], static_cast<int>(p.kv_heads), ends[lane], left};
  }

  PD_MEMBER void leave(const Problem& p, const Scheduler<Shape>& scheduler, int slot) {
    const int lane = threadIdx.x % kWarp;
    __syncwarp();  // every lane has read what stood here
    own[lane] = scheduler.own;
    ends[lane] = scheduler.ends;
    if (lane == 0) {
      bucket = scheduler.bucket;
      first = scheduler.first;
      left = scheduler.left;
      if (work[slot].exists) places[slot].start(p, work[slot].item);
    }
    __syncwarp();
  }
};

}  // namespace paged_attn
