// The producer warps: three copy tiles of keys, one finds out what is to be done.
//
// Where a page holds whole boxes, tiles come in bulk copies; the blocks of a cluster copy half of each and send it to
// both. A tile is keys and values at once, and a weight of 0 does not hide a value, so rows that nobody sees are set to
// zero once the copies have arrived. Elsewhere rows come in pieces of 16 bytes, with zeros where there is nothing to
// see, and every block copies for itself.
#pragma once

#include "director.cuh"

namespace paged_attn {

struct MlaLoader : MlaCopier {
  static constexpr int kColumnBytes = kKeys * kRowBytes;

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
      if (key + row >= places.key_begin && key + row < places.key_end) continue;
#pragma unroll 1
      for (int c = first_column(half); c < first_column(half + 1); ++c)
        store_piece(stage + c * kColumnBytes + row * kRowBytes + piece * 16, 0, 0, 0, 0);
    }
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

  // Every lane arrives when its own pieces are there.
  PD_MEMBER void gather(const Problem& p, const MlaCall& call, MlaControl& control, const KeyPlaces& places,
                        uint32_t stage, int key, int head) const {
    const Lookup at = look_up(p, call, places, key, head);
#pragma unroll 1
    for (int i = 0; i < Sizes::kHalves; ++i) {
      const int half = i ^ ring.stage;
      barrier_wait(shared_address(&control.keys_empty[ring.stage][half]), ring.phase ^ 1);
      copy_pieces(p, at, stage, half);
      arrive_with_pieces(shared_address(&control.keys_full[ring.stage][half]));
    }
  }
};

}  // namespace paged_attn
