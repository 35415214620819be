// From pages in memory to the ring of parts, by the warpgroup that copies. Keys are found and copied as in `decode`, in
// pieces of 16 bytes and with zeros for what nobody sees. What is copied of latents is a key and its value at once.
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

  // key, value: where they lie in the cache.
  template <bool kRuns>
  PD_MEMBER void copy_part(const Problem& p, const MlaCall& call, uint32_t key, uint32_t value, int first_lane,
                           int unit, int part) const {
    constexpr int kColumns = Shape::kPartColumns;
    // Of latents, the last column of the last part is that of the key alone.
    const bool last = Shape::kLatents && part == Shape::kParts - 1;
    const bool of_values = Shape::kLatents || part >= Shape::kKeyParts;
    const int column = (part % Shape::kKeyParts) * kColumns;
    const void* const from = static_cast<const char*>(of_values ? p.cache.v : p.cache.k) + column * kRowBytes;
    const uint32_t place = of_values ? value : key, slot = of_values ? call.v_slot_pieces : call.k_slot_pieces;
    if (last) {
      keys.template copy_rows<kRuns, kColumns - 1>(ring.address(), from, place, first_lane, unit, slot);
      keys.template copy_rows<kRuns, 1>(ring.address() + (kColumns - 1) * Shape::kKeys * kRowBytes, p.cache.k, key,
                                        first_lane, unit, call.k_slot_pieces);
    } else {
      keys.template copy_rows<kRuns, kColumns>(ring.address(), from, place, first_lane, unit, slot);
    }
  }

  template <bool kRuns>
  PD_MEMBER void copy_tiles(const Problem& p, const MlaCall& call, const Segment& segment) {
    typename Keys::template Lookups<kRuns> lookups;
    lookups.start(p, call, keys.places, segment);
#pragma unroll 1
    for (int unit = segment.tile; unit < segment.tile_end; unit += Shape::kUnits) {
      const auto place = lookups.find(p, call, keys.places);
      const uint32_t key = keys.template offset_of<false>(p, call, place);
      const uint32_t value = keys.template offset_of<true>(p, call, place);
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        ring.await_empty();
        copy_part<kRuns>(p, call, key, value, place.first_lane, unit, part);
        ring.arrive_full();
        ring.advance();
      }
      lookups.go_on(p, call, keys.places, unit, segment.tile_end);
    }
  }
};

}  // namespace paged_attn
