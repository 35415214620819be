// Attention for everything that no other kernel takes: wide heads on GPUs without wgmma, and in float32 or over 8-bit
// caches anywhere, float32 queries over an 8-bit cache, qv outside of MLA's sizes, rows that are no whole pieces of 16
// bytes. Products of 16-bit numbers, or of tf32 for float32 queries.
//
// A thread block takes 16 or 32 rows of one (request, kv_head), and a share of their keys in tiles of 128 or 256. Keys
// and values go from memory straight into the registers of the one warp that multiplies them:
//
//     8 or 16 warps    scores of 16 keys each | tops | weights | values of 64 or 32 dimensions each
//
// Grid: as many blocks as fit beside each other, which share the keys of all rows evenly, see balance.cuh; or one block
// for each (item, kv_head, split). Blocks with shares of the same rows meet as in decode, see exchange.cuh.
// Shared memory: see FallbackSizes.
#pragma once

#include "../exchange.cuh"
#include "products.cuh"

namespace paged_attn {

// What a block does: its stretch, and the segment that it is at. In shared memory, as it is rarely looked at.
struct FallbackControl {
  Walker walker;
  Dealing dealing;
  Item item;
  Segment segment;
  KeyPlaces keys;
  Partials partials;       // of other blocks, to be added
  float scale, qv_factor;  // of the sum of q.k and qv.v, and of qv.v before
  bool found, reads_keys;  // there is a segment; k_descale is not 0, which leaves qv.v alone
  int first_key, end;
};

// The first warp finds the block's stretch.
PD_DEVICE void find_stretch_or_split(const Problem& p, const Plan& plan, FallbackControl& control) {
  Walker walker = {};
  Dealing dealing = {};
  if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, walker);
  if (plan.balanced) {
    find_stretch(p, plan, walker, dealing);
  } else {
    find_split(p, plan, walker, dealing);
  }
  if (threadIdx.x == 0) {
    control.walker = walker;
    control.dealing = dealing;
  }
}

// One thread steps to the next segment: should lengths change during the call, threads would find different ones.
template <typename Kv, int kTileKeys>
PD_DEVICE void find_segment(const Problem& p, const Plan& plan, FallbackControl& control) {
  const Item& item = control.item;
  const Segment& segment = control.segment;
  control.found = control.walker.next(p, plan, control.dealing, control.segment, control.item);
  if (!control.found) return;
  const Cache& c = p.cache;
  const int head = segment.head;
  control.keys.start(p, item);
  // Nor are there more partials than blocks before this one.
  const int behind = min(partials_behind(item, segment, control.dealing), static_cast<int>(blockIdx.x));
  control.partials = {segment.first ? behind : 0, 1, 1};
  const float k_factor = k_descale_of(c, item.b, head), v_factor = p.qv ? v_descale_of(c, item.b, head) : 1.f;
  control.reads_keys = !p.qv || k_factor != 0.f;
  control.scale = query_scale(p, item.b, head) * (control.reads_keys ? k_factor : v_factor);
  control.qv_factor = control.reads_keys ? v_factor / k_factor : 1.f;
  control.first_key = segment.tile * kTileKeys;
  control.end = min(segment.tile_end * kTileKeys, item.key_end);
}

PD_DEVICE FallbackRow find_row(const Problem& p, const Plan& plan, const Item& item, int head, int row) {
  if (row >= item.rows) return {};
  const QueryRow query = query_row(p, plan, item, head, row);
  const KvRange seen = row_keys(p, plan, item, query.token);
  return {static_cast<int>(seen.begin), static_cast<int>(seen.end), item.kv_len - item.q_len + query.token,
          row_slope(p, item.b, query.q_head)};
}

// Shared memory of a block, see FallbackSizes.
template <typename Shape>
struct FallbackMemory {
  FallbackControl* control;
  FallbackRow* rows;
  float* references;
  FallbackPlace* places;
  float *tops, *totals;
  uint4* weights;
  uint32_t* queries;

  PD_MEMBER explicit FallbackMemory(char* shared) {
    static_assert(sizeof(FallbackControl) <= Shape::kControlBytes, "the plan counts it");
    control = reinterpret_cast<FallbackControl*>(shared);
    rows = reinterpret_cast<FallbackRow*>(shared + Shape::kControlBytes);
    references = reinterpret_cast<float*>(rows + Shape::kRows);
    places = reinterpret_cast<FallbackPlace*>(references + 2 * Shape::kRows);
    tops = reinterpret_cast<float*>(places + 2 * Shape::kTileKeys);
    totals = tops + Shape::kWarps * Shape::kRows;
    weights = reinterpret_cast<uint4*>(totals + Shape::kWarps * Shape::kRows);
    queries = reinterpret_cast<uint32_t*>(shared + Shape::kWorkBytes);
  }
};

// The rows of a segment, or their partials, once all warps are done with its keys. Where queries were are the sums of
// all warps now.
template <typename Shape>
PD_DEVICE void finish_segment(const Problem& p, const Plan& plan, const FallbackMemory<Shape>& memory,
                              const FallbackTiles<Shape>& tiles) {
  const FallbackControl& control = *memory.control;
  const int tiles_done = (max(control.end - control.first_key, 0) + Shape::kTileKeys - 1) / Shape::kTileKeys;
  const float* const references = memory.references + (control.segment.tile + tiles_done) % 2 * Shape::kRows;
  float4* const sums = reinterpret_cast<float4*>(memory.queries);
  const int stride = Shape::sum_stride(p.head_dim_v);
  const FallbackPart own = find_part<Shape>(p.head_dim_v);
#pragma unroll 1
  for (int part = 0; part < own.parts; ++part) {
    if (part == own.part && own.dim < p.head_dim_v) tiles.publish(sums, stride, own.dim, part > 0);
    __syncthreads();
  }
  const int quads = (plan.partial_quads + kTeam - 1) / kTeam * kTeam;
#pragma unroll 1
  for (int i = threadIdx.x; i < control.item.rows * quads; i += Shape::kThreads) {
    const int row = i / quads, quad = i % quads;
    const float4 values = sums[row * stride + min(quad, plan.partial_quads - 1)];
    RowSum sum = {references[row], 0.f, {values.x, values.y, values.z, values.w}};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) sum.l += memory.totals[w * Shape::kRows + row];
    add_partials(plan, 0, 1, control.partials, row, quad, sum);
    if (quad >= plan.partial_quads) continue;
    if (control.segment.first) {
      write_output<0>(p, plan, control.item, control.segment.head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

template <typename Shape>
PD_DEVICE void attend_segment(const Problem& p, const FallbackWork& plan, const FallbackMemory<Shape>& memory) {
  using Kv = typename Shape::Kv;
  constexpr int kTileKeys = Shape::kTileKeys;
  const FallbackControl& control = *memory.control;
  FallbackPlace* const places = memory.places;
  uint32_t *const queries = memory.queries, *const qv = queries + Shape::kRows * Shape::query_stride(p.head_dim);
  const int head = control.segment.head;
  if (threadIdx.x < Shape::kRows) {
    memory.rows[threadIdx.x] = find_row(p, plan, control.item, head, threadIdx.x);
    memory.references[control.segment.tile % 2 * Shape::kRows + threadIdx.x] = -INFINITY;
  }
  if (threadIdx.x < kTileKeys)
    places[control.segment.tile % 2 * Shape::kTileKeys + threadIdx.x] =
        find_place(p, head, control.keys.look_up(p, plan, control.first_key + threadIdx.x));
  for (int i = threadIdx.x; i < Shape::kWarps * Shape::kRows; i += Shape::kThreads) memory.totals[i] = 0.f;
  load_queries<Shape>(p, plan, control.item, head, false, queries);
  if (p.qv) load_queries<Shape>(p, plan, control.item, head, true, qv);
  __syncthreads();

  FallbackTiles<Shape> tiles = {memory.rows, memory.references, places, memory.tops, memory.totals, memory.weights};
  tiles.start();
#pragma unroll 1
  for (int first = control.first_key; first < control.end; first += kTileKeys) {
    const int thread = this_thread(), warp = thread / kWarp;
    // Of this tile, and of the next one.
    const int odd = first / kTileKeys % 2;
    tiles.places = places + odd * kTileKeys;
    FallbackPlace* const next = places + (1 - odd) * kTileKeys;
    const bool finds = thread < kTileKeys && first + kTileKeys < control.end;
    int page = -1;
    if (finds) page = control.keys.look_up(p, plan, first + kTileKeys + thread).x;

    typename FallbackTiles<Shape>::Scores s = {};
    const int own_first = first + warp * Shape::kWarpKeys;
    if (own_first < control.end) {
      const uint8_t* keys[2];
      if (p.qv) {
#pragma unroll
        for (int o = 0; o < 2; ++o) keys[o] = row_at<Kv>(p.cache.v, tiles.score_place(o).value);
        tiles.add_scores(keys, plan.value_grain, qv, static_cast<int>(p.head_dim_v), s);
        tiles.scale_scores(control.qv_factor, s);
      }
      if (control.reads_keys) {
#pragma unroll
        for (int o = 0; o < 2; ++o) keys[o] = row_at<Kv>(p.cache.k, tiles.score_place(o).key);
        tiles.add_scores(keys, plan.key_grain, queries, static_cast<int>(p.head_dim), s);
      }
    }
    // Values are on their way while scores become weights.
    const FallbackPart own = find_part<Shape>(p.head_dim_v);
    const int steps =
        own.dim < p.head_dim_v ? (min(control.end - first, kTileKeys) + Shape::kStepKeys - 1) / Shape::kStepKeys : 0;
    typename FallbackTiles<Shape>::Steps values;
    tiles.load_values(p.cache.v, plan.value_grain, static_cast<int>(p.head_dim_v), own, steps, values);
    tiles.finish_scores(p, control.scale, own_first, s);
    __syncthreads();
    if (this_thread() < kTileKeys)
      next[this_thread()] =
          find_place(p, control.segment.head, {page, control.keys.slot_of(p, plan, first + kTileKeys + this_thread())});
    tiles.weigh(odd, s);
    __syncthreads();
    tiles.add_values(p.cache.v, plan.value_grain, static_cast<int>(p.head_dim_v), own, steps, values);
  }

  __syncthreads();
  finish_segment<Shape>(p, plan, memory, tiles);
}

template <typename Q, typename Kv, int kRowTiles>
__global__ void __launch_bounds__(FallbackShape<Q, Kv, kRowTiles>::kThreads, FallbackShape<Q, Kv, kRowTiles>::kBlocks)
    fallback_kernel(const __grid_constant__ Problem p, const __grid_constant__ FallbackWork plan) {
  using Shape = FallbackShape<Q, Kv, kRowTiles>;
  extern __shared__ __align__(128) char shared[];
  const FallbackMemory<Shape> memory(shared);
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < kWarp) find_stretch_or_split(p, plan, *memory.control);
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) find_segment<Kv, Shape::kTileKeys>(p, plan, *memory.control);
    __syncthreads();
    if (!memory.control->found) break;
    attend_segment<Shape>(p, plan, memory);
    __syncthreads();
  }
  clear_unclaimed(p);
}

}  // namespace paged_attn
