// Attention of many rows on the matrix unit that every GPU since compute capability 8.0 has (mma m16n8k16).
//
// A block has a tile of 128 rows (a row is a token and one head of the kv_head's group). Each warp has rows of its own:
// their scores, weights and sums stay in its registers. All share the tiles of keys and values. Values come while
// scores are computed, the next keys while weights are multiplied with values. Blocks stay and take tile of rows after
// tile of rows; two of them on a multiprocessor fill each other's waits. Keys go from the last one to the first one.
#pragma once

#include <type_traits>

#include "loader.cuh"
#include "products.cuh"

namespace paged_attn {

// From q.k of a tile of keys to scores whose reference is known; earlier sums are moved to that. What only some calls
// and some tiles need of a row is found again each time, as registers are scarce.
template <typename Shape>
PD_DEVICE void refer_scores(const Problem& p, const Plan& plan, const Work& work, LaneRows<Shape>& rows,
                            bool all_scores, int first_row, int tile, float (&s)[Shape::kRowTiles][Shape::kKeys / 2],
                            float (&acc)[Shape::kRowTiles][Shape::kDimV / 2]) {
  const int first_key = tile * Shape::kKeys;
  const bool masked = first_key + Shape::kKeys > work.item.inner_end || first_key < work.item.inner_begin;
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    if constexpr (!Shape::kAllScores) {
      rows[i].score(p, s[i], first_key);
    } else if (all_scores) {
      PrefillRows<Shape, true> found;
      found.start(p, plan, work, first_row + i * 16);
      found.score(p, s[i], first_key);
    }
    if (masked) {
      PrefillRows<Shape, false> found;
      found.start(p, plan, work, first_row + i * 16);
      found.mask(s[i], first_key);
    }
    float factor[2];
    if (rows[i].move_base(s[i], factor)) {
#pragma unroll
      for (int j = 0; j < Shape::kDimV / 2; ++j) acc[i][j] *= factor[j / 2 % 2];
    }
  }
}

// One tile of rows. `slot`: of its work; that of the next one is filled on the way.
template <typename Shape>
PD_DEVICE void attend(const Problem& p, const PrefillMmaCall& plan, PrefillMmaControl<Shape>& control, int slot,
                      uint32_t shared) {
  const Work& work = control.work[slot];
  const int warp = threadIdx.x / kWarp, first_row = warp * Shape::kWarpRows + threadIdx.x % kWarp / 4;
  int tile = work.item.first_tile + work.item.tiles - 1;
  int ticket = 0;
  if (threadIdx.x == 0) ticket = static_cast<int>(next_ticket(plan.tickets));
  copy_queries<Shape>(p, plan, work, shared);
  const KeyPlaces& key_places = control.places[slot];
  std::conditional_t<Shape::kWidens, TileWidening<Shape>, TileCopies<Shape>> tiles;
  tiles.start(p, plan, key_places, work.head, tile, shared);
  if (warp == 0) find_work<Shape>(p, plan, control, slot ^ 1, ticket);

  LaneRows<Shape> rows;
  float acc[Shape::kRowTiles][Shape::kDimV / 2];
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    rows[i].start(p, plan, work, first_row + i * 16);
#pragma unroll
    for (int j = 0; j < Shape::kDimV / 2; ++j) acc[i][j] = 0.f;
  }
  // Whether scores are more than positive multiples of q.k.
  const bool all_scores = p.softcap != 0.f || p.alibi_slopes || !(rows[0].natural_scale > 0.f);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    rows[i].scale = Shape::kAllScores && all_scores ? PD_LOG2E : rows[0].scale;
    rows[i].natural_scale = rows[0].natural_scale;
  }
  const bool busy = warp * Shape::kWarpRows < work.item.rows;

  tiles.start_arrived(p, plan, work.head, shared);
  __syncthreads();
#pragma unroll 1
  for (; tile >= work.item.first_tile; --tile) {
    tiles.before_scores(p, plan, key_places, work.head, tile, shared);
    float s[Shape::kRowTiles][Shape::kKeys / 2];
    if (busy) {
      multiply_keys<Shape>(shared, s);
      refer_scores<Shape>(p, plan, work, rows, all_scores, first_row, tile, s, acc);
    }
    tiles.arrive();
    __syncthreads();
    if (tile > work.item.first_tile) tiles.before_values(p, plan, key_places, work.head, tile, shared);
    if (busy) multiply_values<Shape>(shared, s, rows, acc);
    tiles.arrive();
    __syncthreads();
  }
  tiles.finish();
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    store_rows<Shape, false>(p, plan, work, acc[i], rows[i], first_row + i * 16);
  }
  __syncthreads();
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    prefill_mma_kernel(const __grid_constant__ Problem p, const __grid_constant__ PrefillMmaCall plan) {
  extern __shared__ __align__(128) uint8_t raw[];
  static_assert(sizeof(PrefillMmaControl<Shape>) <= Shape::kControlBytes, "there is room");
  auto& control = *reinterpret_cast<PrefillMmaControl<Shape>*>(raw + Shape::kControlAt);
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < kWarp) find_first_work<Shape>(p, plan, control);
  __syncthreads();
#pragma unroll 1
  for (int slot = 0; control.work[slot].exists; slot ^= 1) attend<Shape>(p, plan, control, slot, shared_address(raw));
  clear_unclaimed(p);
}

}  // namespace paged_attn
