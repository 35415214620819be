// Attention of many rows in float32 on the matrix unit (tf32.cuh).
//
// A thread block takes 64 rows of one (request, kv_head), 16 to a warp, and a share of their keys, tile by tile. All
// warps read the same keys and values:
//
//     keys       | 0 arrives | scores 0 |  1 arrives ...          | scores 1 |
//     values     | 0 arrives ...        | weights 0, 0 multiplied |  1 arrives ...
//
// so a tile of keys arrives while the values before it are multiplied, and values while the keys are. A second block on
// the multiprocessor works meanwhile.
//
// Grid: one block per (item, kv_head, split), the items with the last rows first: under a causal mask they see the most
// keys. Blocks with shares of the same rows meet as in decode, see exchange.cuh.
// Shared memory: queries, keys, values; the queries' place also takes the sums of the rows in the end.
#pragma once

#include "../exchange.cuh"
#include "loader.cuh"
#include "products.cuh"

namespace paged_attn {

// What a block does and keeps besides. In shared memory: it is rarely looked at, and registers are scarce.
template <int kHeadDim>
struct Work {
  Item item;
  Segment segment;
  KeySource source;
  Partials partials;  // of other blocks, to be added
  float scale;        // of q.k
  bool infinite;      // values may be infinite
  uint2 places[Float32Sizes<kHeadDim>::kTileKeys];
  float2 sums[Float32Sizes<kHeadDim>::kRows];  // (m, l)
};

// False when there is nothing to do.
template <int kHeadDim>
PD_DEVICE bool find_work(const Problem& p, const Plan& plan, Work<kHeadDim>& work) {
  Walker walker = {};
  Dealing dealing = {};
  Segment segment;
  Item item;
  find_split<true>(p, plan, walker, dealing);
  if (!walker.next(p, plan, dealing, segment, item)) return false;
  if (threadIdx.x == 0) {
    work.item = item;
    work.segment = segment;
    work.source = find_source(p, item, segment.head);
    work.scale = score_scale(p, item.b, segment.head);
    work.infinite = false;
    work.partials = {segment.first ? partials_behind(item, segment, dealing) : 0, 1, 1};
  }
  __syncthreads();
  return true;
}

// Writes the rows of a warp, or their partial.
template <int kHeadDim>
PD_DEVICE void finish_rows(const Problem& p, const Plan& plan, const Work<kHeadDim>& work, Float32Rows<kHeadDim>& rows,
                           char* target) {
  using Shape = Float32Shape<kHeadDim>;
  const int lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * Shape::kWarpRows;
  const int count = min(work.item.rows - first_row, Shape::kWarpRows);
  __syncwarp();  // all lanes are done with the queries
  rows.publish(target);
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < count * Shape::kQuads; first += kWarp) {
    const int i = (first + lane) / Shape::kQuads, row = first_row + i, quad = (first + lane) % Shape::kQuads;
    if (i >= count) continue;
    const float2 ml = work.sums[row];
    const float4 values = reinterpret_cast<const float4*>(target)[row * Shape::kQuads + Shape::place_out(row, quad)];
    RowSum sum = {ml.x, ml.y, {values.x, values.y, values.z, values.w}};
    add_partials(plan, 0, 1, work.partials, row, quad, sum);
    if (quad * 4 >= p.head_dim_v) continue;
    if (work.segment.first) {
      write_output<4>(p, plan, work.item, work.segment.head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(Float32Sizes<kHeadDim>::kThreads, Float32Sizes<kHeadDim>::kBlocks)
    float32_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  using Shape = Float32Shape<kHeadDim>;
  extern __shared__ __align__(128) char shared[];
  char *const queries = shared, *const keys = queries + Shape::kQueryBytes, *const values = keys + Shape::kKeyBytes;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t keys_at = address + Shape::kQueryBytes, values_at = keys_at + Shape::kKeyBytes;
  wait_for_predecessor();
  let_successor_start();
  clear_unclaimed(p);

  Work<kHeadDim>& work = *reinterpret_cast<Work<kHeadDim>*>(values + Shape::kKeyBytes);
  static_assert(sizeof(work) <= Shape::kWorkBytes, "the plan counts it");
  if (!find_work(p, plan, work)) return;
  const Item& item = work.item;
  const int head = work.segment.head;

  Float32Loader<kHeadDim> loader = {work.places};
  loader.copy_queries(p, plan, item, head, address);
  Float32Rows<kHeadDim> rows;
  rows.sums = work.sums;
  const auto works = [&] { return static_cast<int>(threadIdx.x) / kWarp * Shape::kWarpRows < item.rows; };
  // Once more, with more care, where a sum is no finite number in the end.
#pragma unroll 1
  while (true) {
    rows.start();
    loader.find(p, plan, work.source, work.segment.tile);
    loader.copy_keys(p, keys_at);
    copy_commit();
    loader.copy_values(p, values_at);
    copy_commit();
    if (!work.infinite) {  // the queries of this warp have come
      copy_wait<1>();
      __syncwarp();
      if (works()) rows.interleave(queries, static_cast<int>(p.head_dim));
    }
#pragma unroll 1
    for (int tile = work.segment.tile; tile < work.segment.tile_end; ++tile) {
      copy_wait<1>();
      __syncthreads();
      if (tile + 1 < work.segment.tile_end) loader.find(p, plan, work.source, tile + 1);
      typename Float32Rows<kHeadDim>::Scores s;
      if (works()) rows.score_keys(queries, keys, static_cast<int>(p.head_dim), s);
      __syncthreads();
      if (tile + 1 < work.segment.tile_end) loader.copy_keys(p, keys_at);
      copy_commit();
      if (works()) rows.weigh(p, plan, item, work.segment.head, work.scale, tile, s);
      copy_wait<1>();
      __syncthreads();
      if (works()) {
        if (work.infinite) {
          rows.template add_values<true>(values, static_cast<int>(p.head_dim_v), s);
        } else {
          rows.template add_values<false>(values, static_cast<int>(p.head_dim_v), s);
        }
      }
      __syncthreads();
      if (tile + 1 < work.segment.tile_end) loader.copy_values(p, values_at);
      copy_commit();
    }
    const bool again = __syncthreads_or(works() && !work.infinite && rows.any_infinite());
    if (!again) break;
    if (threadIdx.x == 0) work.infinite = true;
    __syncthreads();
  }
  if (works()) finish_rows(p, plan, work, rows, queries);
}

}  // namespace paged_attn
