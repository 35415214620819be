// From pages in memory to the ring of parts, by the warpgroup that copies. Keys are found and copied as in `decode`, in
// pieces of 16 bytes and with zeros for what nobody sees; but what is copied is a key and its value at once.
#pragma once

#include "../decode/wgmma_loader.cuh"
#include "few_rows_shape.cuh"

namespace paged_attn {

template <typename Shape>
struct FewRowsLoader {
  using Keys = WgmmaLoader<Shape>;

  PartRing<Shape> ring;
  Keys keys;

  PD_MEMBER void copy_segment(const Problem& p, const MlaCall& call, const Segment& segment, const Item& item) {
    keys.start(p, call, segment, item);
    if (call.whole_runs) {
      copy_tiles<true>(p, call, segment);
    } else {
      copy_tiles<false>(p, call, segment);
    }
  }

  template <bool kRuns>
  PD_MEMBER void copy_tiles(const Problem& p, const MlaCall& call, const Segment& segment) {
    typename Keys::template Lookups<kRuns> lookups;
    lookups.start(p, call, keys.places, segment);
#pragma unroll 1
    for (int unit = segment.tile; unit < segment.tile_end; unit += Shape::kUnits) {
      const auto place = lookups.find(p, call, keys.places);
      const uint32_t latents = keys.template offset_of<true>(p, call, place);
      const uint32_t rope = keys.template offset_of<false>(p, call, place);
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        constexpr int kColumns = Shape::kPartColumns;
        const char* const from = static_cast<const char*>(p.cache.v) + part * kColumns * kRowBytes;
        ring.await_empty();
        if (part < Shape::kParts - 1) {
          keys.template copy_rows<kRuns, kColumns>(ring.address(), from, latents, place.first_lane, unit,
                                                   call.v_slot_pieces);
        } else {
          constexpr int kRopeAt = (kColumns - 1) * Shape::kKeys * kRowBytes;
          keys.template copy_rows<kRuns, kColumns - 1>(ring.address(), from, latents, place.first_lane, unit,
                                                       call.v_slot_pieces);
          keys.template copy_rows<kRuns, 1>(ring.address() + kRopeAt, p.cache.k, rope, place.first_lane, unit,
                                            call.k_slot_pieces);
        }
        ring.arrive_full();
        ring.advance();
      }
      lookups.go_on(p, call, keys.places, unit, segment.tile_end);
    }
  }
};

}  // namespace paged_attn
