// From memory to shared memory: the next tile of rows, its queries, tiles of keys and of values.
//
// Every warp copies its share of the keys of a tile. A lane looks up one of them, a tile before it is needed. Copies
// are pieces of 16 bytes (cp.async), so the size of a page does not matter.
#pragma once

#include "../prefill/tickets.cuh"
#include "shape.cuh"

namespace paged_attn {

// Finds the first tile of rows of this block, one warp.
template <typename Shape>
PD_DEVICE void find_first_work(const Problem& p, const PrefillMmaCall& plan, PrefillMmaControl<Shape>& control) {
  const int lane = threadIdx.x % kWarp;
  Scheduler<Shape> scheduler;
  if (blockIdx.x == 0 && lane == 0) open_tickets(plan.tickets);
  const int index = blockIdx.x;
  scheduler.survey(p, plan, control.known, control.work[0], 0, 1, [] { __syncwarp(); });
  const bool found = scheduler.start(p, plan, control.known, index, control.work[0]) ||
                     scheduler.find(p, plan, control.known, index, control.work[0]);
  control.leave(p, scheduler, 0);
  if (lane > 0) return;
  // Who has work takes a ticket later, so until then nobody clears the word. Without any tile nobody takes one.
  if (found) await_tickets(plan.tickets);
  if (scheduler.ends == 0 && !found && blockIdx.x == 0) close_tickets(plan.tickets);
}

// Finds the next one, by a ticket that lane 0 has.
template <typename Shape>
PD_DEVICE void find_work(const Problem& p, const PrefillMmaCall& plan, PrefillMmaControl<Shape>& control, int slot,
                         int ticket) {
  Scheduler<Shape> scheduler = control.scheduler(p);
  ticket = __shfl_sync(~0u, ticket, 0);
  const bool found = scheduler.find(p, plan, control.known, ticket + plan.blocks_in_grid, control.work[slot]);
  control.leave(p, scheduler, slot);
  // As many tickets are taken as there are tiles.
  if (!found && ticket == scheduler.ends - 1 && threadIdx.x % kWarp == 0) close_tickets(plan.tickets);
}

// The queries of this warp.
template <typename Shape>
PD_DEVICE void copy_queries(const Problem& p, const Plan& plan, const Work& work, uint32_t shared) {
  const int lane = threadIdx.x % kWarp, piece = lane % Shape::kTurned;
  const Item& item = work.item;
#pragma unroll 2
  for (int i = 0; i < Shape::kWarpRows; i += Shape::kCopyRows) {
    const int row = threadIdx.x / kWarp * Shape::kWarpRows + i + lane / Shape::kTurned;
    const int64_t offset = q_offset(p, item, query_row(p, plan, item, work.head, row));
    const bool exists = row < item.rows;
    const char* const source = static_cast<const char*>(p.q) + (exists ? offset * 2 : 0) + piece * 16;
    const uint32_t target = shared + row * Shape::kRowBytes + (piece ^ Shape::turn(row)) * 16;
#pragma unroll
    for (int c = 0; c < Shape::kPieces; c += Shape::kTurned) {
      copy_piece(target + c * 16, source + c * 16, exists && (c + piece) * 8 < p.head_dim);
    }
  }
}

// Where this lane's key of a tile lies: page and slot. A page that does not exist: nothing to read there.
template <typename Shape>
PD_DEVICE int2 look_up(const Problem& p, const Plan& plan, const KeyPlaces& places, int tile) {
  const int own = tile * Shape::kKeys + threadIdx.x / kWarp * Shape::kWarpKeys + threadIdx.x % kWarp % Shape::kWarpKeys;
  return places.look_up(p, plan, own);
}

// In pieces of 16 bytes. With key_place(), the head's product inside of the branch, the kernel of head_dim 128 spills.
PD_DEVICE uint32_t pieces_of(const Problem& p, int2 place, uint32_t page, uint32_t slot, uint32_t head) {
  return page_exists(p, place.x) ? place.x * page + place.y * slot + head : KeyPlaces::kNowhere;
}

PD_DEVICE uint32_t key_pieces(const Problem& p, const Plan& plan, int2 place, int head) {
  return pieces_of(p, place, plan.k_page_pieces, plan.k_slot_pieces, head * plan.k_head_pieces);
}

PD_DEVICE uint32_t value_pieces(const Problem& p, const Plan& plan, int2 place, int head) {
  return pieces_of(p, place, plan.v_page_pieces, plan.v_slot_pieces, head * plan.v_head_pieces);
}

// Tiles of 16 bits. With two stages, for a tile of keys and one of values, values come while scores are computed, the
// next keys while weights are multiplied with values. With four the next tile comes while this one is used.
template <typename Shape>
struct TileCopies {
  static constexpr bool kWholeTile = Shape::kStages == 4;

  int2 place;  // of the tile whose keys, or keys and values, are copied next; with two stages: of the last one
  int stage;   // of the keys of this tile

  template <int kPieces>
  static PD_MEMBER void copy(const void* cache, uint32_t own, int dims, uint32_t rows) {
    const int lane = threadIdx.x % kWarp, piece = lane % Shape::kTurned, first = lane / Shape::kTurned;
    const char* const base = static_cast<const char*>(cache) + piece * 16;
#pragma unroll
    for (int i = 0; i < Shape::kWarpKeys; i += Shape::kCopyRows) {
      const uint32_t from = __shfl_sync(~0u, own, i + first);
      const int row = threadIdx.x / kWarp * Shape::kWarpKeys + i + first;
      const bool found = from != KeyPlaces::kNowhere;
      const char* const source = base + static_cast<uint64_t>(found ? from : 0) * 16;
      const uint32_t target = rows + row * kPieces * 16 + (piece ^ Shape::turn(row)) * 16;
#pragma unroll
      for (int c = 0; c < kPieces; c += Shape::kTurned) {
        copy_piece(target + c * 16, source + c * 16, found && (c + piece) * 8 < dims);
      }
    }
  }

  PD_MEMBER void copy_keys(const Problem& p, const Plan& plan, int head, uint32_t target) const {
    copy<Shape::kPieces>(p.cache.k, key_pieces(p, plan, place, head), static_cast<int>(p.head_dim), target);
  }
  PD_MEMBER void copy_values(const Problem& p, const Plan& plan, int head, uint32_t target) const {
    copy<Shape::kPiecesV>(p.cache.v, value_pieces(p, plan, place, head), static_cast<int>(p.head_dim_v), target);
  }

  PD_MEMBER uint32_t keys(uint32_t shared) const { return Shape::keys_at(shared, stage); }
  PD_MEMBER uint32_t values(uint32_t shared) const { return Shape::values_at(shared, stage); }

  // The first tile. What is copied is there after arrive().
  PD_MEMBER void start(const Problem& p, const Plan& plan, const KeyPlaces& places, int head, int tile,
                       uint32_t shared) {
    stage = 0;
    place = look_up<Shape>(p, plan, places, tile);
    copy_keys(p, plan, head, keys(shared));
    if constexpr (kWholeTile) {
      copy_values(p, plan, head, values(shared));
      place = look_up<Shape>(p, plan, places, tile - 1);
    }
  }
  PD_MEMBER void start_arrived(const Problem&, const Plan&, int, uint32_t) { arrive(); }

  // The keys of a tile are there for all, and nobody reads values, or the tile before.
  PD_MEMBER void before_scores(const Problem& p, const Plan& plan, const KeyPlaces& places, int head, int tile,
                               bool last, uint32_t shared) {
    if constexpr (!kWholeTile) {
      copy_values(p, plan, head, values(shared));
      place = look_up<Shape>(p, plan, places, tile - 1);
    } else if (!last) {
      copy_keys(p, plan, head, Shape::keys_at(shared, stage ^ 1));
      copy_values(p, plan, head, Shape::values_at(shared, stage ^ 1));
      place = look_up<Shape>(p, plan, places, tile - 2);
    }
  }

  // With two stages: the values are there for all, and nobody reads keys.
  PD_MEMBER void before_values(const Problem& p, const Plan& plan, const KeyPlaces&, int head, int, uint32_t shared) {
    copy_keys(p, plan, head, keys(shared));
  }

  PD_MEMBER void arrive() { await_pieces(); }
  PD_MEMBER void next_tile() { stage ^= kWholeTile ? 1 : 0; }
  PD_MEMBER void finish() {}
};

// Tiles of 8 bits come a tile ahead of their use, into pieces that belong to one thread each. It widens its own before
// the others read them, so no barrier is needed beside those of the 16-bit tiles.
template <typename Shape>
struct TileWidening {
  // Pieces of a raw row; so many lanes share it. A warp takes so many rows at a time.
  template <int kDim>
  static constexpr int kLanes = kDim / 16 % 8 == 0 ? 8 : 4;

  int2 place;  // of the tile whose keys are asked for next, or whose values are

  static PD_MEMBER uint32_t keys(uint32_t shared) { return Shape::keys_at(shared, 0); }
  static PD_MEMBER uint32_t values(uint32_t shared) { return Shape::values_at(shared, 0); }

  // Where the pieces of this thread are: `visit(row, piece of the row, its raw place, lane that knows the row)`.
  template <int kDim, typename Visit>
  static PD_MEMBER void each_piece(uint32_t raw, Visit visit) {
    constexpr int kOfRow = kLanes<kDim>, kRows = kWarp / kOfRow;
    static_assert(kDim / 16 % kOfRow == 0 && Shape::kWarpKeys % kRows == 0, "whole passes");
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < Shape::kWarpKeys; i += kRows)
#pragma unroll
      for (int c = 0; c < kDim / 16; c += kOfRow) {
        const int own = i + lane / kOfRow;
        visit(threadIdx.x / kWarp * Shape::kWarpKeys + own, c + lane % kOfRow, raw + threadIdx.x * 16, own);
        raw += Shape::kThreads * 16;
      }
  }

  template <int kDim>
  static PD_MEMBER void ask(const void* cache, uint32_t own, int dims, uint32_t raw) {
    each_piece<kDim>(raw, [&](int, int piece, uint32_t target, int lane) {
      const uint32_t from = __shfl_sync(~0u, own, lane);
      const bool found = from != KeyPlaces::kNowhere && piece * 16 < dims;
      copy_piece(target, static_cast<const char*>(cache) + (static_cast<uint64_t>(found ? from : 0) + piece) * 16,
                 found);
    });
    commit_pieces();
  }

  template <int kDim, typename Raw>
  static PD_MEMBER void widen_as(uint32_t raw, uint32_t rows) {
    constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
    each_piece<kDim>(raw, [&](int row, int piece, uint32_t source, int) {
      uint32_t words[4];
      load_piece(source, words[0], words[1], words[2], words[3]);
      const uint32_t target = rows + row * kDim * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a = words[2 * half], b = words[2 * half + 1];
        store_piece(target + ((2 * piece + half) ^ Shape::turn(row)) * 16, widen_pair<kBf16, Raw, false>(a),
                    widen_pair<kBf16, Raw, true>(a), widen_pair<kBf16, Raw, false>(b), widen_pair<kBf16, Raw, true>(b));
      }
    });
  }

  template <int kDim>
  static PD_MEMBER void widen(const Problem& p, uint32_t raw, uint32_t rows) {
    await_batches<1>();  // what was asked for last may still be on its way
    if (p.cache.dtype == DType::kFloat8E4M3) {
      widen_as<kDim, E4m3>(raw, rows);
    } else {
      widen_as<kDim, E5m2>(raw, rows);
    }
  }

  PD_MEMBER void ask_keys(const Problem& p, const Plan& plan, int head, uint32_t shared) const {
    ask<Shape::kDim>(p.cache.k, key_pieces(p, plan, place, head), static_cast<int>(p.head_dim),
                     shared + Shape::kRawKeysAt);
  }
  PD_MEMBER void ask_values(const Problem& p, const Plan& plan, int head, uint32_t shared) const {
    ask<Shape::kDimV>(p.cache.v, value_pieces(p, plan, place, head), static_cast<int>(p.head_dim_v),
                      shared + Shape::kRawValuesAt);
  }

  PD_MEMBER void start(const Problem& p, const Plan& plan, const KeyPlaces& places, int head, int tile,
                       uint32_t shared) {
    place = look_up<Shape>(p, plan, places, tile);
    ask_keys(p, plan, head, shared);
    ask_values(p, plan, head, shared);
    place = look_up<Shape>(p, plan, places, tile - 1);
  }
  PD_MEMBER void start_arrived(const Problem& p, const Plan& plan, int head, uint32_t shared) {
    widen<Shape::kDim>(p, shared + Shape::kRawKeysAt, keys(shared));
    ask_keys(p, plan, head, shared);
  }

  PD_MEMBER void before_scores(const Problem& p, const Plan& plan, const KeyPlaces& places, int head, int tile, bool,
                               uint32_t shared) {
    widen<Shape::kDimV>(p, shared + Shape::kRawValuesAt, values(shared));
    ask_values(p, plan, head, shared);
    place = look_up<Shape>(p, plan, places, tile - 2);
  }

  PD_MEMBER void before_values(const Problem& p, const Plan& plan, const KeyPlaces&, int head, int, uint32_t shared) {
    widen<Shape::kDim>(p, shared + Shape::kRawKeysAt, keys(shared));
    ask_keys(p, plan, head, shared);
  }

  PD_MEMBER void arrive() {}
  PD_MEMBER void next_tile() {}
  PD_MEMBER void finish() { await_pieces(); }  // what was asked for in vain
};

}  // namespace paged_attn
