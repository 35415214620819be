// The producer warps: three copy tiles of keys, one finds out what is to be done.
//
// Where a page holds whole boxes, tiles come in bulk copies; the blocks of a cluster copy half of each and send it to
// both. A tile is keys and values at once, and a weight of 0 does not hide a value, so rows that nobody sees are set to
// zero once the copies have arrived. Elsewhere rows come in pieces of 16 bytes, with zeros where there is nothing to
// see, and every block copies for itself. All four warps do that, as each of the four schedulers of a multiprocessor
// issues one copy in some 60 cycles.
#pragma once

#include "director.cuh"

namespace paged_attn {

struct MlaLoader : MlaCopier {
  static constexpr int kGatherers = Sizes::kLoaders + 1;                // the director too
  static constexpr int kRuns = kKeys / (kGatherers * kCopyRows);        // of 4 rows, of a warp
  static constexpr int kRunBytes = kGatherers * kCopyRows * kRowBytes;  // from one run of a warp to its next
  static constexpr int kColumnBytes = kKeys * kRowBytes, kHalfColumns = Sizes::kLatentColumns / 2;
  static_assert(2 * kRuns == kCopyLanes, "two lanes look up the same row");

  Ring<Sizes::kStages> ring;
  uint32_t edge_phases;  // a bit for every half of a stage

  PD_MEMBER void start(const MlaCall& call, int warp) {
    start_copier(call, warp);
    ring = {};
    edge_phases = 0;
  }

  PD_MEMBER int own_half() const { return own_column < Sizes::kLatentColumns / 2 ? 0 : 1; }
  static PD_MEMBER int first_column(int half) {
    return half == Sizes::kHalves ? kColumns : half * Sizes::kLatentColumns / 2;
  }
  static PD_MEMBER int half_bytes(int half) { return (first_column(half + 1) - first_column(half)) * kColumnBytes; }

  // Rows of a tile that nobody sees; each warp has a third of the others' rows too.
  PD_MEMBER void clear_unseen(const KeyPlaces& places, uint32_t stage, int key, int half) const {
    const int piece = lane % kCopyLanes;
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      if (places.sees(key + row)) continue;
#pragma unroll 1
      for (int c = first_column(half); c < first_column(half + 1); ++c)
        store_piece(stage + c * kColumnBytes + row * kRowBytes + piece * 16, 0, 0, 0, 0);
    }
  }

  // keys_full: an arrival of each loader warp, and the bytes. edge: one arrival, and the bytes, of a half some of whose
  // rows are cleared before keys_full. Bytes may come before they are expected: a phase does not end without its
  // arrivals. None comes a phase too early: whoever sends them has found the stage empty in both blocks.
  PD_MEMBER void copy_boxes(const Problem& p, const MlaCall& call, MlaControl& control, const KeyPlaces& places,
                            uint32_t stage, int key, int head) {
    const bool inside = places.sees_all(key, kKeys);
    int2 place = make_int2(-1, 0);
    if (has_box) {
      place = places.find_box(p, call, key + own_row, call.box_rows);
      // Where the stage is free, the copy follows at once.
      const uint32_t free = ring.phase ^ 1;
      if (!barrier_passed(shared_address(&control.keys_empty[ring.stage][0]), free) ||
          !barrier_passed(shared_address(&control.keys_empty[ring.stage][1]), free)) {
        prefetch_own_box(call, head, place);
      }
    }
    // First the half that the consumer of this tile multiplies first.
#pragma unroll 1
    for (int i = 0; i < Sizes::kHalves; ++i) {
      const int half = i ^ ring.stage;
      const uint32_t arrived = shared_address(&control.keys_full[ring.stage][half]);
      const uint32_t edge = shared_address(&control.edge[ring.stage][half]);
      const uint32_t counted = inside ? arrived : edge;
      barrier_wait(shared_address(&control.keys_empty[ring.stage][half]), ring.phase ^ 1);
      if (loader == 0 && lane == 0) barrier_arrive_expecting(counted, half_bytes(half));
      if (has_box && half == own_half()) {
        copy_own_box(call, stage + own_column * kColumnBytes + own_row * kRowBytes, counted, head, place);
      }
      if (!inside) {
        const int bit = ring.stage * Sizes::kHalves + half;
        barrier_wait(edge, edge_phases >> bit & 1);
        edge_phases ^= 1u << bit;
        clear_unseen(places, stage, key, half);
        fence_async_proxy();
      }
      __syncwarp();
      if (lane == 0 && !(inside && loader == 0)) barrier_arrive(arrived);
    }
  }

  // ---- Gathering: a lane looks up one row of this warp, and copies pieces of all of them ----

  // Where a row lies, in pieces of 16 bytes.
  struct Row {
    uint32_t latents, rope;
  };

  // The row of a tile whose page this lane looks up: that of its 8 lanes in run lane % kRuns.
  PD_MEMBER int own_tile_row() const { return (lane % kRuns * kGatherers + loader) * kCopyRows + lane / kCopyLanes; }

  PD_MEMBER Row place_row(const Problem& p, const MlaCall& call, const KeyPlaces& places, int key, int page,
                          int head) const {
    const int slot = places.slot_of(p, call, key);
    if (!page_exists(p, page)) return {KeyPlaces::kNowhere, 0};
    return {call.value_place(page, slot, head), call.key_place(page, slot, head)};
  }

  // Asks for this warp's rows; the blocks of a cluster each for half of their lines.
  PD_MEMBER void prefetch_rows(const Problem& p, const MlaCall& call, const Row& row) const {
    if (row.latents == KeyPlaces::kNowhere) return;
    const char* const latents = static_cast<const char*>(p.cache.v) + static_cast<uint64_t>(row.latents) * 16;
    const char* const rope = static_cast<const char*>(p.cache.k) + static_cast<uint64_t>(row.rope) * 16;
    // Two lanes have the same row.
#pragma unroll 1
    for (int c = lane / kRuns % 2 + 2 * static_cast<int>(blockIdx.y); c < kColumns; c += 2 * call.cluster)
      prefetch_l2(c < Sizes::kLatentColumns ? latents + c * kRowBytes : rope);
  }

  // This warp's rows of half of a tile. Every lane arrives when its own pieces are there.
  PD_MEMBER void gather_half(const Problem& p, MlaControl& control, const Row& own, uint32_t stage, int half) const {
    const int piece = lane % kCopyLanes, row = loader * kCopyRows + lane / kCopyLanes;
    const char* const latents = static_cast<const char*>(p.cache.v) + first_column(half) * kRowBytes + piece * 16;
    const char* const rope = static_cast<const char*>(p.cache.k) + piece * 16;
    const uint32_t target =
        stage + first_column(half) * kColumnBytes + row * kRowBytes + (piece ^ row % kSwizzledRows) * 16;
    static_assert(kGatherers * kCopyRows % kSwizzledRows == 0, "a piece has the same place in every run");
    uint32_t from[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) from[i] = __shfl_sync(~0u, own.latents, i, kCopyLanes);
    barrier_wait(shared_address(&control.keys_empty[ring.stage][half]), ring.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const bool found = from[i] != KeyPlaces::kNowhere;
      const char* const source = latents + static_cast<uint64_t>(found ? from[i] : 0) * 16;
#pragma unroll
      for (int c = 0; c < kHalfColumns; ++c)
        copy_piece(target + i * kRunBytes + c * kColumnBytes, source + c * kRowBytes, found);
    }
    if (half == 1) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const uint32_t from_rope = __shfl_sync(~0u, own.rope, i, kCopyLanes);
        copy_piece(target + i * kRunBytes + kHalfColumns * kColumnBytes, rope + static_cast<uint64_t>(from_rope) * 16,
                   from[i] != KeyPlaces::kNowhere);
      }
    }
    arrive_with_pieces(shared_address(&control.keys_full[ring.stage][half]));
  }

  // What load_tiles() and direct_mla() do, by warps that all gather; the last one also finds the work. It looks for
  // the next when it has brought a tile and there is a place, or when it needs one.
  PD_MEMBER void gather_tiles(const Problem& p, const MlaCall& call, MlaControl& control, uint32_t shared,
                              MlaExpected& expected) {
    MlaDirector director;
    const bool directs = loader == Sizes::kLoaders;
    if (directs) director.start(p, call, expected);
    bool more = directs, ahead = false;  // there may be more to tell; what was told last is not yet taken
    Ring<2> slot;
    MlaTask task;
    task.tile = task.tile_end = 0;
    Row next = {};
    int page = -1;  // of this lane's row of the tile behind `next`
#pragma unroll 1
    while (true) {
      if (more && !ahead && (task.tile == task.tile_end || director.may_tell(control))) {
        more = director.tell(p, call, control);
        ahead = true;
      }
      if (task.tile == task.tile_end) {
        if (!task.take(p, control, slot)) return;
        ahead = false;
        const int key = task.tile * kKeys + own_tile_row();
        next = place_row(p, call, task.places, key, task.places.look_up(p, call, key).x, task.head);
        page = task.places.look_up(p, call, key + kKeys).x;
      }
      const int key = task.tile * kKeys + own_tile_row();
      const Row own = next;
      next = place_row(p, call, task.places, key + kKeys, page, task.head);
      page = task.places.look_up(p, call, key + 2 * kKeys).x;
      if (task.tile + 1 < task.tile_end) prefetch_rows(p, call, next);
      const uint32_t stage = shared + Sizes::kKeysAt + ring.stage * Sizes::kKeyBytes;
      // First the half that the consumer of this tile multiplies first.
      gather_half(p, control, own, stage, ring.stage);
      gather_half(p, control, own, stage, 1 - ring.stage);
      ring.advance();
      ++task.tile;
    }
  }
};

}  // namespace paged_attn
