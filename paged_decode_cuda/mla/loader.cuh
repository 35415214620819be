// The producer warps: three copy tiles of keys, one finds out what is to be done.
//
// Where a page holds whole boxes, tiles come in bulk copies; the blocks of a cluster copy half of each and send it to
// both. A tile is keys and values at once, and a weight of 0 does not hide a value, so rows that nobody sees are set to
// zero once the copies have arrived. Elsewhere rows come in pieces of 16 bytes, with zeros where there is nothing to
// see, and every block copies for itself.
//
// 8-bit keys arrive in the second half of their place, as rows of 64 bytes column by column, and are widened in place
// to q's dtype, which holds each of them exactly. A column is read by all three warps before any of them writes it, so
// that nothing is overwritten before it is read.
#pragma once

#include "../prefill/places.cuh"
#include "shape.cuh"

namespace paged_attn {

// Named barriers: of both consumers, of the loaders, of each consumer.
constexpr int kMeet = 1, kWidening = 2, kPart = 3;

// kBf16: of q.
template <bool kBf16>
struct MlaLoader {
  using Sizes = MlaSizes;
  static constexpr int kKeys = Sizes::kKeys, kColumns = Sizes::kColumns, kColumnBytes = kKeys * kRowBytes;
  static constexpr int kNarrowRow = kRowBytes / 2, kNarrowColumn = kColumnBytes / 2;
  static constexpr uint32_t kNothing = ~0u;

  int lane, loader;         // of the warp, of the three
  int own_column, own_row;  // the box that this lane asks for
  bool has_box;
  Ring<Sizes::kStages> ring;
  uint32_t edge_phases;  // a bit for every half of a stage
  // A half that is on its way and has not been announced: its barrier, or kNothing; of an 8-bit one, its first key too
  uint32_t gathered;
  int gathered_key;

  PD_MEMBER void start(const MlaCall& call, int warp) {
    lane = threadIdx.x % kWarp;
    loader = warp;
    const int boxes = call.box_rows > 0 ? kKeys / call.box_rows : 0;  // of a column
    const int own = loader * kWarp + lane;
    static_assert(kKeys / 8 * kColumns <= Sizes::kLoaders * kWarp, "there is a lane for every box");
    own_column = own / max(boxes, 1);
    own_row = (own - own_column * boxes) * call.box_rows;
    ring = {};
    edge_phases = 0;
    gathered = kNothing;
    has_box = own_column < kColumns && boxes > 0 && own % call.cluster == static_cast<int>(blockIdx.y);
  }

  PD_MEMBER int own_half() const { return own_column < Sizes::kLatentColumns / 2 ? 0 : 1; }
  static PD_MEMBER int first_column(int half) {
    return half == Sizes::kHalves ? kColumns : half * Sizes::kLatentColumns / 2;
  }
  static PD_MEMBER int half_bytes(int half) { return (first_column(half + 1) - first_column(half)) * kColumnBytes; }

  // Where column i of an 8-bit half arrives in a stage.
  static PD_MEMBER int narrow_at(int half, int i) {
    const int columns = first_column(half + 1) - first_column(half);
    return first_column(half) * kColumnBytes + (columns + i) * kNarrowColumn;
  }

  PD_MEMBER void prefetch_own_box(const MlaCall& call, int head, int2 place) const {
    const bool latents = own_column < Sizes::kLatentColumns;
    prefetch_box(latents ? call.latents : call.rope, latents ? own_column * kColumn : 0, place.y, head, place.x);
  }

  PD_MEMBER void copy_own_box(const MlaCall& call, uint32_t stage, uint32_t arrived, int head, int2 place) const {
    const bool latents = own_column < Sizes::kLatentColumns;
    const CUtensorMap& tensor = latents ? call.latents : call.rope;
    const int dim = latents ? own_column * kColumn : 0;
    const uint32_t target =
        call.narrow ? stage + narrow_at(own_half(), own_column - first_column(own_half())) + own_row * kNarrowRow
                    : stage + own_column * kColumnBytes + own_row * kRowBytes;
    if (call.cluster > 1) {
      copy_box_to((1 << Sizes::kMostCluster) - 1, target, tensor, arrived, dim, place.y, head, place.x);
    } else {
      copy_box(target, tensor, arrived, dim, place.y, head, place.x);
    }
  }

  // Rows of a tile that nobody sees; each warp has a third of the others' rows too.
  PD_MEMBER void clear_unseen(const KeyPlaces& places, uint32_t stage, int key, int half) const {
    const int piece = lane % kCopyLanes;
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      if (key + row >= places.key_begin && key + row < places.key_end) continue;
#pragma unroll 1
      for (int c = first_column(half); c < first_column(half + 1); ++c)
        store_piece(stage + c * kColumnBytes + row * kRowBytes + piece * 16, 0, 0, 0, 0);
    }
  }

  // Where keys lane and lane + 32 of a tile lie, in pieces.
  struct Lookup {
    uint32_t latents[2], rope[2];
  };

  PD_MEMBER Lookup look_up(const Problem& p, const MlaCall& call, const KeyPlaces& places, int key, int head) const {
    Lookup at;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = key + h * kWarp + lane;
      int2 place = make_int2(-1, 0);
      if (own >= places.key_begin && own < places.key_end) place = places.find(p, call, own);
      const bool found = place.x >= 0;
      at.latents[h] = found ? place.x * call.v_page_pieces + place.y * call.v_slot_pieces + head * call.v_head_pieces
                            : KeyPlaces::kNowhere;
      at.rope[h] = found ? place.x * call.k_page_pieces + place.y * call.k_slot_pieces + head * call.k_head_pieces : 0;
    }
    return at;
  }

  PD_MEMBER void copy_pieces(const Problem& p, const Lookup& at, uint32_t stage, int half) const {
    const int piece = lane % kCopyLanes;
    const char* const all_latents = static_cast<const char*>(p.cache.v) + first_column(half) * kRowBytes + piece * 16;
    const char* const all_rope = static_cast<const char*>(p.cache.k) + piece * 16;
    const uint32_t first = stage + first_column(half) * kColumnBytes;
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      const uint32_t from = __shfl_sync(~0u, i < kWarp ? at.latents[0] : at.latents[1], row % kWarp);
      const uint32_t from_rope = __shfl_sync(~0u, i < kWarp ? at.rope[0] : at.rope[1], row % kWarp);
      const bool found = from != KeyPlaces::kNowhere;
      const uint32_t target = first + row * kRowBytes + (piece ^ row % 8) * 16;
      const char* const source = all_latents + static_cast<uint64_t>(found ? from : 0) * 16;
#pragma unroll
      for (int c = 0; c < Sizes::kLatentColumns / 2; ++c) {
        copy_piece(target + c * kColumnBytes, source + c * kRowBytes, found);
      }
      if (half == 0) continue;
      copy_piece(target + Sizes::kLatentColumns / 2 * kColumnBytes, all_rope + static_cast<uint64_t>(from_rope) * 16,
                 found);
    }
  }

  // keys_full: an arrival of each loader warp, and the bytes. edge: one arrival, and the bytes, of a half some of whose
  // rows are cleared before keys_full. Bytes may come before they are expected: a phase does not end without its
  // arrivals. None comes a phase too early: whoever sends them has found the stage empty in both blocks.
  PD_MEMBER void copy_boxes(const Problem& p, const MlaCall& call, MlaControl& control, const KeyPlaces& places,
                            uint32_t stage, int key, int head) {
    const bool inside = key >= places.key_begin && key + kKeys <= places.key_end;
    int2 place = make_int2(-1, 0);
    if (has_box) {
      place = places.find_box(p, call, key + own_row, call.box_rows);
      prefetch_own_box(call, head, place);
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
      if (has_box && half == own_half()) copy_own_box(call, stage, counted, head, place);
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

  // The copies of the last half that was asked for have come.
  PD_MEMBER void announce() {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(gathered);
    gathered = kNothing;
  }

  // Says that a half has come when the next one is on its way, or when there is nothing else to do.
  PD_MEMBER void gather(const Problem& p, const MlaCall& call, MlaControl& control, const KeyPlaces& places,
                        uint32_t stage, int key, int head) {
    const Lookup at = look_up(p, call, places, key, head);
#pragma unroll 1
    for (int i = 0; i < Sizes::kHalves; ++i) {
      const int half = i ^ ring.stage;
      const uint32_t empty = shared_address(&control.keys_empty[ring.stage][half]);
      const bool waits = gathered != kNothing;
      if (waits && __any_sync(~0u, !barrier_passed(empty, ring.phase ^ 1))) {
        await_pieces();
        announce();
      }
      barrier_wait(empty, ring.phase ^ 1);
      copy_pieces(p, at, stage, half);
      commit_pieces();
      if (gathered != kNothing) {
        await_batches<1>();
        announce();
      }
      gathered = shared_address(&control.keys_full[ring.stage][half]);
    }
  }

  // The same piece by piece, 4 of them in a column.
  PD_MEMBER void copy_narrow_pieces(const Problem& p, const Lookup& at, uint32_t stage, int half) const {
    const int piece = lane % kCopyLanes, column = piece / 4;
    const char* const all_latents = static_cast<const char*>(p.cache.v) + first_column(half) * kNarrowRow + piece * 16;
    const char* const all_rope = static_cast<const char*>(p.cache.k) + piece * 16;
    const uint32_t first = stage + narrow_at(half, 0) + column * kNarrowColumn + piece % 4 * 16;
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      const uint32_t from = __shfl_sync(~0u, i < kWarp ? at.latents[0] : at.latents[1], row % kWarp);
      const uint32_t from_rope = __shfl_sync(~0u, i < kWarp ? at.rope[0] : at.rope[1], row % kWarp);
      const bool found = from != KeyPlaces::kNowhere;
      const uint32_t target = first + row * kNarrowRow;
      const char* const source = all_latents + static_cast<uint64_t>(found ? from : 0) * 16;
#pragma unroll
      for (int c = 0; c < Sizes::kLatentColumns / 2; c += 2) {
        copy_piece(target + c * kNarrowColumn, source + c * kNarrowRow, found);
      }
      if (half == 1 && column == 0) {
        copy_piece(target + Sizes::kLatentColumns / 2 * kNarrowColumn, all_rope + static_cast<uint64_t>(from_rope) * 16,
                   found);
      }
    }
  }

  // Widens one half of a stage in place; zeros where nobody sees a key.
  template <typename Kv>
  PD_MEMBER void widen_half(const KeyPlaces& places, uint32_t stage, int key, int half) const {
    constexpr int kPieces = kNarrowColumn / 16, kStep = Sizes::kLoaders * kWarp;
    constexpr int kOwn = (kPieces + kStep - 1) / kStep;
    const int own = loader * kWarp + lane;
    const int first = first_column(half), columns = first_column(half + 1) - first;
#pragma unroll 1
    for (int c = 0; c < columns; ++c) {
      uint32_t words[kOwn][4];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int piece = own + i * kStep, row = key + piece / 4;
        words[i][0] = words[i][1] = words[i][2] = words[i][3] = 0;
        if (piece < kPieces && row >= places.key_begin && row < places.key_end)
          load_piece(stage + narrow_at(half, c) + piece * 16, words[i][0], words[i][1], words[i][2], words[i][3]);
      }
      named_barrier_sync(kWidening, kStep);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int piece = own + i * kStep, row = piece / 4;
        if (piece >= kPieces) break;
        const uint32_t target = stage + (first + c) * kColumnBytes + row * kRowBytes;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t low = words[i][2 * e], high = words[i][2 * e + 1];
          store_piece(target + ((piece % 4 * 2 + e) ^ row % 8) * 16, widen_pair<kBf16, Kv, false>(low),
                      widen_pair<kBf16, Kv, true>(low), widen_pair<kBf16, Kv, false>(high),
                      widen_pair<kBf16, Kv, true>(high));
        }
      }
    }
  }

  // The 8-bit half that was asked for last arrives, is widened and announced. kBehind: halves asked for since.
  template <bool kBoxes, int kBehind>
  PD_MEMBER void finish_narrow(const Problem& p, MlaControl& control, const KeyPlaces& places, uint32_t shared) {
    const int bit = static_cast<int>(gathered), stage = bit / Sizes::kHalves, half = bit % Sizes::kHalves;
    if constexpr (kBoxes) {
      barrier_wait(shared_address(&control.edge[stage][half]), edge_phases >> bit & 1);
      edge_phases ^= 1u << bit;
    } else {
      await_batches<kBehind>();
      named_barrier_sync(kWidening, Sizes::kLoaders * kWarp);
    }
    const uint32_t target = shared + Sizes::kKeysAt + stage * Sizes::kKeyBytes;
    // Chosen for a half, not for each pair: the time of the widening is that of its instructions.
    if (p.cache.dtype == DType::kFloat8E4M3) {
      widen_half<E4m3>(places, target, gathered_key, half);
    } else {
      widen_half<E5m2>(places, target, gathered_key, half);
    }
    gathered = shared_address(&control.keys_full[stage][half]);
    announce();
  }

  // A tile of 8-bit keys: a half is widened while the next one is on its way.
  template <bool kBoxes>
  PD_MEMBER void copy_narrow(const Problem& p, const MlaCall& call, MlaControl& control, const KeyPlaces& places,
                             uint32_t shared, int key, int head) {
    const uint32_t stage = shared + Sizes::kKeysAt + ring.stage * Sizes::kKeyBytes;
    int2 place = make_int2(-1, 0);
    Lookup at = {};
    if constexpr (kBoxes) {
      if (has_box) {
        place = places.find_box(p, call, key + own_row, call.box_rows);
        prefetch_own_box(call, head, place);
      }
    } else {
      at = look_up(p, call, places, key, head);
    }
#pragma unroll 1
    for (int i = 0; i < Sizes::kHalves; ++i) {
      const int half = i ^ ring.stage;
      const uint32_t empty = shared_address(&control.keys_empty[ring.stage][half]);
      // The three warps must decide alike, as they widen together: the first one does.
      if (gathered != kNothing && !agree(control, barrier_passed(empty, ring.phase ^ 1))) {
        finish_narrow<kBoxes, 0>(p, control, places, shared);
      }
      barrier_wait(empty, ring.phase ^ 1);
      if constexpr (kBoxes) {
        const uint32_t edge = shared_address(&control.edge[ring.stage][half]);
        if (loader == 0 && lane == 0) barrier_arrive_expecting(edge, half_bytes(half) / 2);
        if (has_box && half == own_half()) copy_own_box(call, stage, edge, head, place);
        __syncwarp();
      } else {
        copy_narrow_pieces(p, at, stage, half);
        commit_pieces();
      }
      if (gathered != kNothing) finish_narrow<kBoxes, 1>(p, control, places, shared);
      gathered = ring.stage * Sizes::kHalves + half;
      gathered_key = key;
    }
  }

  // What the first loader says.
  PD_MEMBER bool agree(MlaControl& control, bool passed) const {
    if (loader == 0 && lane == 0) control.goes_on = passed;
    named_barrier_sync(kWidening, Sizes::kLoaders * kWarp);
    const bool answer = control.goes_on;
    named_barrier_sync(kWidening, Sizes::kLoaders * kWarp);
    return answer;
  }

  template <bool kBoxes, bool kNarrow>
  PD_MEMBER void run(const Problem& p, const MlaCall& call, MlaControl& control, uint32_t shared) {
    Ring<2> slot;
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const MlaWork& work = control.work[slot.stage];
      if (!work.exists) break;
      KeyPlaces places;
      places.start(p, work.item);
      const int head = work.head, tile_end = work.tile_end;
      int tile = work.tile;
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();

#pragma unroll 1
      for (; tile < tile_end; ++tile) {
        const uint32_t stage = shared + Sizes::kKeysAt + ring.stage * Sizes::kKeyBytes;
        if constexpr (kNarrow) {
          copy_narrow<kBoxes>(p, call, control, places, shared, tile * kKeys, head);
        } else if constexpr (kBoxes) {
          copy_boxes(p, call, control, places, stage, tile * kKeys, head);
        } else {
          gather(p, call, control, places, stage, tile * kKeys, head);
        }
        ring.advance();
      }
      if constexpr (kNarrow) {
        if (gathered != kNothing) finish_narrow<kBoxes, 0>(p, control, places, shared);
      } else if (!kBoxes && gathered != kNothing) {
        await_pieces();
        announce();
      }
    }
  }
};

// Finds the work of this cluster, which both of its blocks do alike.
PD_DEVICE void direct_mla(const Problem& p, const MlaCall& call, MlaControl& control) {
  const int lane = threadIdx.x % kWarp;
  Walker walker = {};
  Dealing dealing = {};
  if (call.blocks_each.divisor > 0) expect_even_stretch(p, call, walker);
  if (call.balanced) {
    find_stretch(p, call, walker, dealing);
  } else {
    find_split(p, call, walker, dealing);
  }
  Ring<2> slot;
  const bool says = call.slots > 0 && blockIdx.y == 0;
  MlaRecord cut = {};
  while (true) {
    Segment segment = {};
    MlaWork next = {};
    next.exists = walker.next(p, call, dealing, segment, next.item);
    if (next.exists) {
      next.head = segment.head;
      next.tile = segment.tile;
      next.tile_end = segment.tile_end;
      next.first = segment.first;
      next.behind = partials_behind(next.item, segment, dealing);
      // Before the last part of a pair stand others of a whole stretch each, but for the first one.
      const int before = segment.tile - next.item.first_tile;
      next.two_parts = next.first ? next.behind == 1 : next.behind == 0 && before <= dealing.length;
      const MlaRecord own = {segment.pair, static_cast<int>(blockIdx.x), next.two_parts ? 0 : next.behind};
      if (lane == 0 && next.first && says && !call.by_cluster) call.records[segment.pair] = own;
      if (next.first && own.behind > 0) cut = own;
    }
    barrier_wait(shared_address(&control.work_empty[slot.stage]), slot.phase ^ 1);
    if (lane == 0) {
      control.work[slot.stage] = next;
      barrier_arrive(shared_address(&control.work_full[slot.stage]));
    }
    __syncwarp();
    if (!next.exists) break;
    slot.advance();
  }
  if (lane == 0 && says && call.by_cluster) call.records[blockIdx.x] = cut;
}

}  // namespace paged_attn
