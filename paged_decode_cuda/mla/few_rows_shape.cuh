// What the warps of a block tell each other, and the ring of parts of tiles.
#pragma once

#include "../decode/wgmma_shape.cuh"
#include "../prefill/ring.cuh"
#include "few_rows_sizes.h"
#include "shape.cuh"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_, int kRowTiles, bool kLatents>
struct FewRowsShape : FewRowsSizes<kRowTiles, kLatents>, WarpgroupPlaces {
  using Type = Type_;
  static constexpr bool kBf16 = IsBf16<Type>::value;
  static PD_MEMBER int consumer() { return 0; }  // the only one
  static constexpr int kConsumerBarrier = 1;     // its barrier's number
};

template <typename Shape>
struct FewRowsControl {
  uint64_t full[Shape::kStages], empty[Shape::kStages];  // of parts
  float tops[Shape::kWarps][Shape::kRows];               // the largest scores of each warp
  // Of finished rows: sums of weights of each warp, what they are relative to, the factor of the output and its place
  float l[Shape::kWarps][Shape::kRows], base[Shape::kRows], factor[Shape::kRows];
  int64_t place[Shape::kRows];

  PD_MEMBER void init() {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(shared_address(&full[i]), kWarpgroup);
      barrier_init(shared_address(&empty[i]), Shape::kWarps);
    }
  }
};

// A place in the ring.
template <typename Shape>
struct PartRing {
  FewRowsControl<Shape>& control;
  uint32_t shared;  // where the ring begins
  Ring<Shape::kStages> place;

  PD_MEMBER uint32_t address() const { return shared + place.stage * Shape::kPartBytes; }
  PD_MEMBER void await_full() const { barrier_wait(shared_address(&control.full[place.stage]), place.phase); }
  PD_MEMBER void await_empty() const { barrier_wait(shared_address(&control.empty[place.stage]), place.phase ^ 1); }
  PD_MEMBER void arrive_full() const { arrive_with_pieces(shared_address(&control.full[place.stage])); }
  // For this warp.
  PD_MEMBER void release() const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(&control.empty[place.stage]));
  }
  PD_MEMBER void advance() { place.advance(); }
};

}  // namespace paged_attn
