// From pages in memory to the ring of stages in shared memory, by the warpgroup that copies.
//
// The ring has kStages stages of 64 keys. The copies run ahead of the products as far as the ring goes, across the ends
// of segments. The consumers take the tiles of a segment in turns.
//
//     stage       0       1       2       3       4       5
//             [ K | V | K | V | K | V | K | V | K | V | K | V ]
//     taken by    0       1       0       1       0       1
//
// K and V lie as columns of 64 dimensions, rows of 128 bytes in the swizzle of wgmma (hopper.cuh).
#pragma once

#include "../balance.cuh"
#include "../key_places.cuh"
#include "../rows.cuh"
#include "wgmma_shape.cuh"

namespace paged_attn {

// What the warpgroups of a block tell each other.
template <typename Shape>
struct WgmmaBarriers {
  uint64_t full[Shape::kStages][2], empty[Shape::kStages][2];  // K and V of a stage
  uint64_t queries_full[Shape::kQueryBuffers], queries_empty[Shape::kQueryBuffers];

  PD_MEMBER void init() {
    for (int i = 0; i < Shape::kStages; ++i) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&full[i][half]), kWarpgroup);
        barrier_init(shared_address(&empty[i][half]), Shape::kWarps);
      }
    }
    for (int i = 0; i < Shape::kQueryBuffers; ++i) {
      barrier_init(shared_address(&queries_full[i]), kWarpgroup);
      barrier_init(shared_address(&queries_empty[i]), Shape::kEndThreads / kWarp);
    }
  }
};

// A place in the ring. kValues: its V, else its K.
template <typename Shape>
struct WgmmaRing {
  uint32_t stages;  // where they begin in shared memory
  WgmmaBarriers<Shape>& barriers;
  int stage;
  uint32_t phase;

  template <bool kValues>
  PD_MEMBER uint32_t address() const {
    return stages + stage * Shape::kStageBytes + (kValues ? Shape::kStageBytesK : 0);
  }
  template <bool kValues>
  PD_MEMBER void await_full() const {
    barrier_wait(shared_address(&barriers.full[stage][kValues]), phase);
  }
  template <bool kValues>
  PD_MEMBER void await_empty() const {
    barrier_wait(shared_address(&barriers.empty[stage][kValues]), phase ^ 1);
  }
  template <bool kValues>
  PD_MEMBER void arrive_full() const {
    arrive_with_pieces(shared_address(&barriers.full[stage][kValues]));
  }
  // For this warp.
  template <bool kValues>
  PD_MEMBER void release() const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(&barriers.empty[stage][kValues]));
  }
  PD_MEMBER void go_to(int tile) {
    stage = tile % Shape::kStages;
    phase = tile / Shape::kStages & 1;
  }
  PD_MEMBER void advance(int tiles) {
    stage += tiles;
    if (stage >= Shape::kStages) {
      stage -= Shape::kStages;
      phase ^= 1;
    }
  }
};

// The queries of a segment, in one of two buffers.
template <typename Shape>
struct WgmmaQueries {
  uint32_t buffers;  // where they begin in shared memory
  WgmmaBarriers<Shape>& barriers;
  int buffer;
  uint32_t phase;

  PD_MEMBER uint32_t address() const { return buffers + buffer * Shape::kQueryBytes; }
  PD_MEMBER void await_full() const { barrier_wait(shared_address(&barriers.queries_full[buffer]), phase); }
  PD_MEMBER void await_empty() const { barrier_wait(shared_address(&barriers.queries_empty[buffer]), phase ^ 1); }
  PD_MEMBER void arrive_full() const { arrive_with_pieces(shared_address(&barriers.queries_full[buffer])); }
  PD_MEMBER void release() const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(&barriers.queries_empty[buffer]));
  }
  PD_MEMBER void advance() {
    phase ^= buffer;
    buffer ^= 1;
  }
};

// One warp of the warpgroup that copies: 16 keys of every tile.
template <typename Shape>
struct WgmmaLoader {
  static constexpr int kLanes = 8, kRows = kWarp / kLanes;  // lanes to a line of 128 bytes; rows at a time

  // Pages of a batch of tiles. kRuns: in pages of whole runs a lane has looked up a run of this warp, one for each of
  // 32 tiles. Else it has keys of every second tile, so many that the next batch is there before this one is used up.
  static constexpr int kTilesOfLookup = kWarp / Shape::kUnitKeys;
  template <bool kRuns>
  struct Batch {
    static constexpr int kLookups = kRuns ? 1 : 8, kTiles = kRuns ? kWarp : kLookups * kTilesOfLookup;
    int first_unit;
    int page[kLookups];

    // The key of a lookup of this lane, the first one of a run.
    PD_MEMBER int key_of(int lookup) const {
      const int lane = threadIdx.x % kWarp;
      const int tile = kRuns ? lane : lookup * kTilesOfLookup + lane / Shape::kUnitKeys;
      return (first_unit + tile * Shape::kUnits + Shape::part()) * Shape::kUnitKeys +
             (kRuns ? 0 : lane % Shape::kUnitKeys);
    }

    PD_MEMBER void look_up(const Problem& p, const Plan& plan, const KeyPlaces& places, int unit, int end_unit) {
      first_unit = unit;
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
        page[i] = -1;
        if (i > 0 && unit + i * kTilesOfLookup * Shape::kUnits >= end_unit) continue;
        if (places.sees_some(key_of(i), kRuns ? kRunKeys : 1)) page[i] = places.page_of(p, plan, key_of(i));
      }
    }
  };

  // A lookup of this lane, and whose lookup is that of the first key.
  struct Place {
    int page, slot, first_lane;
  };

  // Of the tiles of a segment, one after the other.
  template <bool kRuns>
  struct Lookups {
    Batch<kRuns> now, next;
    int index = 0;  // of a tile in its batch

    PD_MEMBER void start(const Problem& p, const Plan& plan, const KeyPlaces& places, const Segment& segment) {
      next.look_up(p, plan, places, segment.tile, segment.tile_end);
    }

    PD_MEMBER Place find(const Problem& p, const Plan& plan, const KeyPlaces& places) {
      if (index == 0) now = next;
      int page = now.page[0];
      const int lookup = kRuns ? 0 : index / kTilesOfLookup;
#pragma unroll
      for (int i = 1; i < now.kLookups; ++i) page = lookup == i ? now.page[i] : page;
      const int slot = places.slot_of(p, plan, now.key_of(lookup));
      return {page, slot, kRuns ? index : index % kTilesOfLookup * Shape::kUnitKeys};
    }

    // After the copies of a tile, as the first ones of a segment are in a hurry.
    PD_MEMBER void go_on(const Problem& p, const Plan& plan, const KeyPlaces& places, int unit, int end_unit) {
      if (index == 0) next.look_up(p, plan, places, unit + now.kTiles * Shape::kUnits, end_unit);
      if (++index == now.kTiles) index = 0;
    }
  };

  KeyPlaces places;
  uint32_t k_head, v_head;  // where the head begins in a slot, in pieces

  PD_MEMBER void start(const Problem& p, const Plan& plan, const Segment& segment, const Item& item) {
    const int key_head = segment.head >> plan.key_head_shift;
    k_head = key_head * plan.k_head_pieces;
    v_head = key_head * plan.v_head_pieces;
    places.start(p, item);
    places.key_end = min(places.key_end, segment.tile_end * Shape::kUnitKeys);
  }

  PD_MEMBER void copy_segment(const Problem& p, const Plan& plan, const Segment& segment, const Item& item,
                              WgmmaRing<Shape>& ring, WgmmaQueries<Shape>& queries) {
    start(p, plan, segment, item);
    if (plan.whole_runs) {
      copy_tiles<true>(p, plan, segment, item, ring, queries);
    } else {
      copy_tiles<false>(p, plan, segment, item, ring, queries);
    }
  }

  template <bool kRuns>
  PD_MEMBER void copy_tiles(const Problem& p, const Plan& plan, const Segment& segment, const Item& item,
                            WgmmaRing<Shape>& ring, WgmmaQueries<Shape>& queries) const {
    Lookups<kRuns> lookups;
    lookups.start(p, plan, places, segment);
#pragma unroll 1
    for (int unit = segment.tile; unit < segment.tile_end; unit += Shape::kUnits) {
      const Place place = lookups.find(p, plan, places);
      ring.template await_empty<false>();
      copy_half<kRuns, false>(p, plan, place, unit, ring.template address<false>());
      ring.template arrive_full<false>();
      if (unit == segment.tile) {
        queries.await_empty();
        copy_queries(p, plan, segment.head, item, queries.address());
        queries.arrive_full();
        queries.advance();
      }
      ring.template await_empty<true>();
      copy_half<kRuns, true>(p, plan, place, unit, ring.template address<true>());
      ring.template arrive_full<true>();
      ring.advance(1);
      lookups.go_on(p, plan, places, unit, segment.tile_end);
    }
  }

  // Rows that do not exist are zero.
  static PD_MEMBER void copy_queries(const Problem& p, const Plan& plan, int head, const Item& item, uint32_t target) {
#pragma unroll
    for (int i = threadIdx.x % kWarpgroup; i < Shape::kRows * Shape::kPieces; i += kWarpgroup) {
      const int row = i / Shape::kPieces, piece = i % Shape::kPieces;
      const bool exists = row < item.rows && piece * 8 < p.head_dim;
      const int64_t offset = exists ? q_offset(p, item, query_row(p, plan, item, head, row)) + piece * 8 : 0;
      copy_async(target + Shape::piece_at(Shape::kRows, row, piece), static_cast<const uint16_t*>(p.q) + offset,
                 exists);
    }
  }

  template <bool kRuns, bool kValues>
  PD_MEMBER void copy_half(const Problem& p, const Plan& plan, const Place& place, int unit, uint32_t target) const {
    const uint32_t slot_pieces = kValues ? plan.v_slot_pieces : plan.k_slot_pieces;
    const void* const cache = kValues ? p.cache.v : p.cache.k;
    const int dims = static_cast<int>(kValues ? p.head_dim_v : p.head_dim);
    copy_rows<kRuns, Shape::kColumns>(target, cache, offset_of<kValues>(p, plan, place), place.first_lane, unit,
                                      slot_pieces, dims);
  }

  // Of a key or a value in the cache, in pieces.
  template <bool kValues>
  PD_MEMBER uint32_t offset_of(const Problem& p, const Plan& plan, const Place& place) const {
    const uint32_t slot_pieces = kValues ? plan.v_slot_pieces : plan.k_slot_pieces;
    const uint32_t page_pieces = kValues ? plan.v_page_pieces : plan.k_page_pieces;
    if (!page_exists(p, place.page)) return KeyPlaces::kNowhere;
    return place.page * page_pieces + place.slot * slot_pieces + (kValues ? v_head : k_head);
  }

  // kColumns columns of the 16 rows of this warp, 8 consecutive lanes to a line. Where pages hold whole runs the first
  // key stands for all.
  template <bool kRuns, int kColumns>
  PD_MEMBER void copy_rows(uint32_t target, const void* cache, uint32_t place_of_key, int first_lane, int unit,
                           uint32_t slot_pieces, int head_dim = kColumns * kColumn) const {
    constexpr bool kAlone = !kRuns;
    constexpr int kStep = kAlone ? kRows : kRunKeys;  // rows whose place takes one shuffle
    const int lane = threadIdx.x % kWarp, first_row = lane / kLanes, piece = lane % kLanes;
    const char* const first = static_cast<const char*>(cache) + piece * 16;
    const int first_key =
        (unit + Shape::part()) * Shape::kUnitKeys + first_row - places.key_begin;  // of those that are seen
    const uint64_t policy = read_once_policy(), slot_bytes = static_cast<uint64_t>(slot_pieces) * 16;
    const uint32_t to = target + Shape::piece_at(Shape::kKeys, Shape::part() * Shape::kUnitKeys + first_row, piece);
#pragma unroll
    for (int run = 0; run < Shape::kUnitKeys; run += kStep) {
      const uint32_t offset = __shfl_sync(~0u, place_of_key, kAlone ? first_lane + run + first_row : first_lane);
      const uint32_t keys = offset == KeyPlaces::kNowhere ? 0 : places.key_end - places.key_begin;
      const char* source = first + static_cast<uint64_t>(offset == KeyPlaces::kNowhere ? 0 : offset) * 16;
      if (!kAlone) source += first_row * slot_bytes;
#pragma unroll
      for (int row = run; row < run + kStep; row += kRows) {
        const bool valid = kAlone ? keys > 0 : static_cast<uint32_t>(first_key + row) < keys;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          // The place of a piece depends on its row modulo 8, of which a lane's rows have two.
          copy_async((to ^ row % 8 * 16) + Shape::piece_at(Shape::kKeys, row / 8 * 8, c * kLanes) + row % 8 * kRowBytes,
                     source + c * kLanes * 16, valid && (c * kLanes + piece) * 8 < head_dim, policy);
        }
        source += kRows * slot_bytes;
      }
    }
  }
};

}  // namespace paged_attn
