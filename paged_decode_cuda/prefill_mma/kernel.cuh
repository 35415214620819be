// Attention of many rows on the matrix unit that every GPU since compute capability 8.0 has (mma m16n8k16).
//
// A block has a tile of 128 rows, or 64 (a row is a token and one head of the kv_head's group). Each warp has rows of
// its own: their weights and sums stay in its registers. All share the tiles of keys and values. Values come while
// scores are computed, the next keys while weights are multiplied with values. Blocks stay and take tile of rows after
// tile of rows; two of them on a multiprocessor fill each other's waits. Keys go from the last one to the first one.
#pragma once

#include <type_traits>

#include "loader.cuh"
#include "products.cuh"

namespace paged_attn {

// Whether some row does not see the whole tile.
template <typename Shape>
PD_DEVICE bool is_masked(const Item& item, int tile) {
  const int first_key = tile * Shape::kKeys;
  return first_key + Shape::kKeys > item.inner_end || first_key < item.inner_begin;
}

// Whether scores are multiplied before references are taken away: what is left to the FMA is then 1.
template <typename Rows>
PD_DEVICE bool is_multiplied(const Rows& rows) {
  return rows[0].multiplier == 1.f;
}

// From q.k of a tile of keys to scores whose reference is known; earlier sums are moved to that. What only some calls
// and some tiles need of a row is found again each time, as registers are scarce.
template <typename Shape>
PD_DEVICE void refer_scores(const Problem& p, const Plan& plan, const Work& work, LaneRows<Shape>& rows,
                            bool all_scores, bool masked, int first_row, int tile,
                            float (&s)[Shape::kRowTiles][Shape::kKeys / 2],
                            float (&acc)[Shape::kRowTiles][Shape::kDimV / 2]) {
  const int first_key = tile * Shape::kKeys;
  bool far_out = false;
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    if (all_scores) {
      PrefillRows<Shape, true> found;
      found.start(p, plan, work, first_row + i * 16);
      found.score(p, s[i], first_key);
    } else if (is_multiplied(rows)) {
      PrefillRows<Shape, false> found;
      found.start(p, plan, work, first_row + i * 16);
      found.multiply(s[i]);
    }
    if (masked) {
      PrefillRows<Shape, false> found;
      found.start(p, plan, work, first_row + i * 16);
      found.mask(s[i], first_key);
    }
    float factor[2];
    if (rows[i].move_base(s[i], factor)) {
      far_out = far_out || rows[i].is_far_out();
#pragma unroll
      for (int j = 0; j < Shape::kDimV / 2; ++j) acc[i][j] *= factor[j / 2 % 2];
    }
  }
  if (!is_multiplied(rows) && __any_sync(~0u, far_out)) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
      rows[i].multiply(s[i]);
      rows[i].multiplier = 1.f;
    }
  }
}

template <typename Shape>
using Tiles = std::conditional_t<Shape::kWidens, TileWidening<Shape>, TileCopies<Shape>>;

PD_DEVICE int last_tile(const Item& item) { return item.first_tile + item.tiles - 1; }

// Asks for the queries of a tile of rows and for its first keys and values.
template <typename Shape>
PD_DEVICE void start_copies(const Problem& p, const Plan& plan, const PrefillMmaControl<Shape>& control, int slot,
                            uint32_t shared, Tiles<Shape>& tiles) {
  const Work& work = control.work[slot];
  if (!work.exists) return;
  copy_queries<Shape>(p, plan, work, shared);
  tiles.start(p, plan, control.places[slot], work.head, last_tile(work.item), shared);
}

// Writes 16 rows of a warp, each lane its own two. `first_row`: of this lane.
template <typename Shape>
PD_DEVICE void store_rows(const Problem& p, const PrefillMmaCall& plan, const Work& work,
                          const float (&acc)[Shape::kDimV / 2], PrefillRows<Shape, false>& rows, int first_row) {
  const Item& item = work.item;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    const float l = row_sum(rows.l[r]);
    const bool exists = row < item.rows;
    RowTarget target = {};
    float factor = 0.f;
    if (exists) {
      target = row_target(p, plan, item, work.head, row);
      factor = finish_row(p, target, item.b, work.head, rows.base[r], l, threadIdx.x % 4 == 0);
    }
    uint16_t* const out = static_cast<uint16_t*>(p.out) + target.out;
    store_row<IsBf16<typename Shape::Type>::value>(acc, r, factor, out, exists, p.head_dim_v);
  }
}

// One tile of rows, whose first copies are on their way. `slot`: of its work; that of the next one is filled.
template <typename Shape>
PD_DEVICE void attend(const Problem& p, const PrefillMmaCall& plan, PrefillMmaControl<Shape>& control, int slot,
                      uint32_t shared, Tiles<Shape>& tiles) {
  const Work& work = control.work[slot];
  const KeyPlaces& key_places = control.places[slot];
  const int warp = threadIdx.x / kWarp, first_row = warp * Shape::kWarpRows + threadIdx.x % kWarp / 4;
  if (warp == 0) {
    int ticket = 0;
    if (threadIdx.x == 0) ticket = static_cast<int>(next_ticket(plan.tickets));
    find_work<Shape>(p, plan, control, slot ^ 1, ticket);
  }

  LaneRows<Shape> rows;
  float acc[Shape::kRowTiles][Shape::kDimV / 2];
  clear(acc);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) rows[i].start(p, plan, work, first_row + i * 16);
  const bool all_scores = Shape::kAllScores && (p.softcap != 0.f || p.alibi_slopes);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    rows[i].multiplier = all_scores || rows[0].multiplies() ? 1.f : rows[0].multiplier;
  }
  const bool busy = warp * Shape::kWarpRows < work.item.rows;

  tiles.start_arrived(p, plan, work.head, shared);
  __syncthreads();
  Queries<Shape> queries;
  queries.start(shared);
  bool guesses = false;  // whether all rows have references, and scores are multiples of q.k
#pragma unroll 1
  for (int tile = last_tile(work.item); tile >= work.item.first_tile; --tile) {
    const bool last = tile == work.item.first_tile;
    tiles.before_scores(p, plan, key_places, work.head, tile, last, shared);
    Weights<Shape> weights;
    float s[Shape::kRowTiles][Shape::kKeys / 2];
    if (busy) {
      const bool masked = is_masked<Shape>(work.item, tile);
      bool done = false;
      if constexpr (Shape::kGuesses) {
        done = guesses && !masked && guess_weights<Shape>(shared, tiles.keys(shared), queries, rows, weights);
      }
      if (!done) {
        multiply_keys<Shape>(shared, tiles.keys(shared), queries, s);
        refer_scores<Shape>(p, plan, work, rows, all_scores, masked, first_row, tile, s, acc);
        if constexpr (Shape::kGuesses) {
          weigh<Shape>(s, rows, weights);
          guesses = !is_multiplied(rows);
#pragma unroll
          for (int i = 0; i < Shape::kRowTiles; ++i) guesses = guesses && rows[i].have_bases();
        }
      }
    }
    if constexpr (Shape::kStages == 2) {
      tiles.arrive();
      __syncthreads();
      if (!last) tiles.before_values(p, plan, key_places, work.head, tile, shared);
    }
    if (busy) {
      if constexpr (!Shape::kGuesses) weigh<Shape>(s, rows, weights);
      multiply_values<Shape>(tiles.values(shared), weights, acc);
    }
    tiles.next_tile();
    tiles.arrive();
    __syncthreads();
  }
  tiles.finish();
  start_copies<Shape>(p, plan, control, slot ^ 1, shared, tiles);
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    store_rows<Shape>(p, plan, work, acc[i], rows[i], first_row + i * 16);
  }
  __syncthreads();
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    prefill_mma_kernel(const __grid_constant__ Problem p, const __grid_constant__ PrefillMmaCall plan) {
  extern __shared__ __align__(128) uint8_t raw[];
  static_assert(sizeof(PrefillMmaControl<Shape>) <= Shape::kControlBytes, "there is room");
  auto& control = *reinterpret_cast<PrefillMmaControl<Shape>*>(raw + Shape::kControlAt);
  const uint32_t shared = shared_address(raw);
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < kWarp) find_first_work<Shape>(p, plan, control);
  __syncthreads();
  Tiles<Shape> tiles;
  start_copies<Shape>(p, plan, control, 0, shared, tiles);
#pragma unroll 1
  for (int slot = 0; control.work[slot].exists; slot ^= 1) attend<Shape>(p, plan, control, slot, shared, tiles);
  clear_unclaimed(p);
}

}  // namespace paged_attn
