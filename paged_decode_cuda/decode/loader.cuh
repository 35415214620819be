// From pages in memory to the queues in shared memory.
//
// A warp's queue has kStages stages of one tile: K, then V, a row of 16-byte pieces for every key. Copies run ahead of
// the products by kStages - 1 tiles, across the end of a segment into the next one.
//
//     stage      0        1        2            tile t is multiplied, t + 1 and t + 2 are on their way;
//              tile t   t + 1    t + 2          then t + 3 goes where t was
//
// In halves (kHalves) the keys of a stage and its values are copied apart, each where the last ones have been read:
// with one stage the keys of t + 1 come while the values of t are multiplied.
#pragma once

#include "../balance.cuh"
#include "../key_places.cuh"
#include "shape.cuh"

namespace paged_attn {

// Copies tiles into the queue of its warp, up to kStages - 1 tiles ahead of their use.
template <typename Kv, int kHeadDim, int kRowTiles>
struct DecodeLoader {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;

  Walker walker;
  Segment segment;
  KeyPlaces places;
  int tile;                 // next to copy
  bool live;                // there is one
  int page, slot;           // of key `lane` of that tile; page -1: nothing to read there
  uint32_t k_head, v_head;  // where the head begins in a slot, in pieces

  PD_MEMBER void start(const Walker& first) {
    walker = first;
    tile = segment.tile_end = 0;
    live = false;
  }

  // Moves to the next segment until this warp has a tile in it, and looks up its pages, one tile before they are
  // needed.
  PD_MEMBER void find_tile(const Problem& p, const Plan& plan, const Dealing& dealing) {
    if (tile >= segment.tile_end) {
      Item item;
      do {
        live = walker.next(p, plan, dealing, segment, item);
        if (!live) return;
        tile = segment.tile + threadIdx.x / kWarp;
      } while (tile >= segment.tile_end);
      const int key_head = segment.head >> plan.key_head_shift;
      k_head = key_head * plan.k_head_pieces;
      v_head = key_head * plan.v_head_pieces;
      places.start(p, item);
    }
    // In pages of whole runs the first key of a run stands for all.
    const int own = tile * Shape::kTileKeys + threadIdx.x % Shape::kTileKeys, run = plan.whole_runs ? kRunKeys : 1;
    const int key = own & -run;
    page = places.sees_some(key, run) ? places.page_of(p, plan, key) : -1;
    slot = places.slot_of(p, plan, key);
  }

  // Starts the copies of the tile that was found last into a stage and finds the next. The first call only finds.
  // Always one group, so that groups count tiles.
  PD_MEMBER void copy(const Problem& p, const Plan& plan, const Dealing& dealing, uint32_t stage) {
    if (live) copy_half<false>(p, plan, stage);
    copy_values(p, plan, dealing, stage);
  }

  // The same in halves, a group each: the keys of the tile that was found last; later its values, after which the next
  // one is found.
  PD_MEMBER void copy_keys(const Problem& p, const Plan& plan, uint32_t stage) {
    if (live) copy_half<false>(p, plan, stage);
    copy_commit();
  }

  PD_MEMBER void copy_values(const Problem& p, const Plan& plan, const Dealing& dealing, uint32_t stage) {
    if (live) {
      copy_half<true>(p, plan, stage);
      tile += blockDim.x / kWarp;
    }
    copy_commit();
    find_tile(p, plan, dealing);
  }

  template <bool kValues>
  PD_MEMBER void copy_half(const Problem& p, const Plan& plan, uint32_t stage) {
    // In pieces of 16 bytes a cache of 64 GiB fits into 32 bits, half of the registers and shuffles of a pointer.
    const bool found = page_exists(p, page);
    const uint32_t slot_pieces = kValues ? plan.v_slot_pieces : plan.k_slot_pieces;
    const uint32_t page_pieces = kValues ? plan.v_page_pieces : plan.k_page_pieces;
    const uint32_t place =
        found ? page * page_pieces + slot * slot_pieces + (kValues ? v_head : k_head) : KeyPlaces::kNowhere;
    const void* const cache = kValues ? p.cache.v : p.cache.k;
    const uint32_t target = stage + (kValues ? Shape::kStageBytesK : 0);
    const int dims = static_cast<int>(kValues ? p.head_dim_v : p.head_dim);
    if (plan.whole_runs) {
      copy_rows<kRunKeys, kValues>(target, cache, place, slot_pieces, dims);
    } else {
      copy_rows<1, kValues>(target, cache, place, slot_pieces, dims);
    }
  }

  // All rows of a tile, 8 consecutive lanes to a line: the memory system takes 8 lanes of 16 bytes at a time. The first
  // of kRun keys says where they are.
  template <int kRun, bool kValues>
  PD_MEMBER void copy_rows(uint32_t stage, const void* cache, uint32_t place_of_key, uint32_t slot_pieces,
                           int head_dim) {
    constexpr int kLanes = Shape::kPieces < 8 ? Shape::kPieces : 8, kRows = kWarp / kLanes;
    constexpr bool kAlone = kRun == 1;
    constexpr int kStep = kAlone ? kRows : kRun;  // rows whose place takes one shuffle
    const int lane = threadIdx.x % kWarp, first_row = lane / kLanes, piece = lane % kLanes;
    const int place = kValues ? Shape::place_v(first_row, piece) : Shape::place_k(first_row, piece);
    const uint32_t target = stage + (first_row * Shape::kPieces + place) * 16;
    const char* first = static_cast<const char*>(cache) + piece * 16;
    const int first_key = tile * Shape::kTileKeys + first_row - places.key_begin;  // of those that are seen
    const uint64_t policy = read_once_policy(), slot_bytes = static_cast<uint64_t>(slot_pieces) * 16;
#pragma unroll
    for (int run = 0; run < Shape::kTileKeys; run += kStep) {
      const uint32_t offset = __shfl_sync(~0u, place_of_key, kAlone ? run + first_row : run);
      const uint32_t keys = offset == KeyPlaces::kNowhere ? 0 : places.key_end - places.key_begin;
      const char* source = first + static_cast<uint64_t>(offset == KeyPlaces::kNowhere ? 0 : offset) * 16;
      if (!kAlone) source += first_row * slot_bytes;
#pragma unroll
      for (int row = run; row < run + kStep; row += kRows) {
        const bool valid = kAlone ? keys > 0 : static_cast<uint32_t>(first_key + row) < keys;
        // The place of a piece of values depends on its row modulo 8, and first_row only on the lane.
        const uint32_t exchange = kValues ? (Shape::place_v(row, 0) ^ Shape::place_v(0, 0)) * 16 : 0;
#pragma unroll
        for (int c = 0; c < Shape::kPieces; c += kLanes) {
          copy_async((target ^ exchange) + (row * Shape::kPieces + c) * 16, source + c * 16,
                     valid && (c + piece) * Shape::kVecK < head_dim, policy);
        }
        source += kRows * slot_bytes;
      }
    }
  }
};

}  // namespace paged_attn
