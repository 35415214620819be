// The producer warps of the kernel for 8-bit caches. A tile arrives as it is, in columns of 64 bytes of a key,
// swizzled, so that eight rows of a matrix lie in eight different groups of banks.
#pragma once

#include "director.cuh"
#include "narrow_shape.cuh"

namespace paged_attn {

// Where piece `piece` of 16 bytes of a key lies in a stage.
PD_DEVICE uint32_t narrow_place(unsigned key, unsigned piece) {
  using Sizes = NarrowMlaSizes;
  return piece / 4 * Sizes::kNarrowColumn + key * Sizes::kNarrowRow + (piece % 4 ^ key / 2 % 4) * 16;
}

template <typename Sizes_>
struct NarrowLoader : MlaCopier {
  using Sizes = Sizes_;

  Ring<Sizes::kStages> ring;
  uint32_t edge_phases;  // a bit for every stage

  PD_MEMBER void start(const MlaCall& call, int warp) {
    start_copier(call, warp);
    ring = {};
    edge_phases = 0;
  }

  // Rows of a tile that nobody sees; each warp has a third of the others' rows too.
  PD_MEMBER void clear_unseen(const KeyPlaces& places, uint32_t stage, int key) const {
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      if (places.sees(key + row)) continue;
#pragma unroll 1
      for (int piece = lane % kCopyLanes; piece < Sizes::kNarrowPieces; piece += kCopyLanes)
        store_piece(stage + narrow_place(row, piece), 0, 0, 0, 0);
    }
  }

  // As MlaLoader::copy_boxes(), by whole tiles.
  PD_MEMBER void copy_boxes(const Problem& p, const MlaCall& call, NarrowControl<Sizes>& control,
                            const KeyPlaces& places, uint32_t stage, int key, int head) {
    const bool inside = places.sees_all(key, kKeys);
    int2 place = make_int2(-1, 0);
    if (has_box) {
      place = places.find_box(p, call, key + own_row, call.box_rows);
      prefetch_own_box(call, head, place);
    }
    const uint32_t arrived = shared_address(&control.keys_full[ring.stage]);
    const uint32_t edge = shared_address(&control.edge[ring.stage]);
    const uint32_t counted = inside ? arrived : edge;
    barrier_wait(shared_address(&control.keys_empty[ring.stage]), ring.phase ^ 1);
    if (loader == 0 && lane == 0) barrier_arrive_expecting(counted, Sizes::kKeyBytes);
    if (has_box) {
      const uint32_t target = stage + own_column * Sizes::kNarrowColumn + own_row * Sizes::kNarrowRow;
      copy_own_box(call, target, counted, head, place);
    }
    if (!inside) {
      barrier_wait(edge, edge_phases >> ring.stage & 1);
      edge_phases ^= 1u << ring.stage;
      clear_unseen(places, stage, key);
      fence_async_proxy();
    }
    if (!(inside && loader == 0 && lane == 0)) barrier_arrive(arrived);
  }

  // Piece by piece, with zeros where nobody sees a key. Every lane arrives when its own are there.
  PD_MEMBER void gather(const Problem& p, const MlaCall& call, NarrowControl<Sizes>& control, const KeyPlaces& places,
                        uint32_t stage, int key, int head) const {
    const Lookup at = look_up(p, call, places, key, head);
    const int piece = lane % kCopyLanes;
    const char* const all_latents = static_cast<const char*>(p.cache.v) + piece * 16;
    const char* const all_rope = static_cast<const char*>(p.cache.k) + piece * 16;
    barrier_wait(shared_address(&control.keys_empty[ring.stage]), ring.phase ^ 1);
#pragma unroll 1
    for (int i = loader * kCopyRows; i < kKeys; i += Sizes::kLoaders * kCopyRows) {
      const int row = i + lane / kCopyLanes;
      const uint32_t from = __shfl_sync(~0u, i < kWarp ? at.latents[0] : at.latents[1], row % kWarp);
      const uint32_t from_rope = __shfl_sync(~0u, i < kWarp ? at.rope[0] : at.rope[1], row % kWarp);
      const bool found = from != KeyPlaces::kNowhere;
      const uint32_t target = stage + narrow_place(row, piece);
      const char* const source = all_latents + static_cast<uint64_t>(found ? from : 0) * 16;
#pragma unroll
      for (int c = 0; c < Sizes::kLatentColumns; c += 2) {
        copy_piece(target + c * Sizes::kNarrowColumn, source + c * Sizes::kNarrowRow, found);
      }
      if (piece < 4) {
        copy_piece(target + Sizes::kLatentColumns * Sizes::kNarrowColumn,
                   all_rope + static_cast<uint64_t>(from_rope) * 16, found);
      }
    }
    arrive_with_pieces(shared_address(&control.keys_full[ring.stage]));
  }
};

}  // namespace paged_attn
