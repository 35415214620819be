// Attention of many rows in float32 on the matrix unit (tf32.cuh).
//
// A thread block takes 64 or 32 rows of one (request, kv_head), 16 to a warp, and a share of their keys. A group of
// warps has all these rows, and walks through tiles of keys of its own. All its warps read the same keys and values:
//
//     keys       | 0 arrives | scores 0 |  1 arrives ...          | scores 1 |
//     values     | 0 arrives ...        | weights 0, 0 multiplied |  1 arrives ...
//
// so a tile of keys arrives while the values before it are multiplied, and values while the keys are. Meanwhile another
// group works, or another block on the multiprocessor. Groups take tiles in turns and meet in the end:
//
//     group 0    tiles 0, 3, 6, ...  |
//     group 1    tiles 1, 4, 7, ...  | -> sums of the block
//     group 2    tiles 2, 5, 8, ...  |
//
// Grid: one block per (item, kv_head, split), the items with the last rows first: under a causal mask they see the most
// keys. Blocks with shares of the same rows meet as in decode, see exchange.cuh.
// Shared memory: queries; keys and values of each group. In the end it takes the sums of all groups.
#pragma once

#include "../exchange.cuh"
#include "../hopper.cuh"
#include "loader.cuh"
#include "products.cuh"

namespace paged_attn {

// What a block does and keeps besides. In shared memory: it is rarely looked at, and registers are scarce.
template <typename Shape>
struct Float32Work {
  Item item;
  Segment segment;
  KeyPlaces keys;
  Partials partials;  // of other blocks, to be added
  uint64_t met;       // where all threads arrive when the sums of their groups are there
  float scale;        // of q.k
  bool infinite;      // values may be infinite
  uint2 places[Shape::kGroups * Shape::kTileKeys];
  float2 sums[Shape::kGroups * Shape::kRows];  // (m, l)
};

// False when there is nothing to do.
template <typename Shape>
PD_DEVICE bool find_work(const Problem& p, const Plan& plan, Float32Work<Shape>& work) {
  Walker walker = {};
  Dealing dealing = {};
  Segment segment;
  Item item;
  find_split<true>(p, plan, walker, dealing);
  const bool found = walker.next(p, plan, dealing, segment, item);
  if (found && threadIdx.x == 0) {
    work.item = item;
    work.segment = segment;
    work.keys.start(p, item);
    work.scale = score_scale(p, item.b, segment.head);
    work.infinite = false;
    barrier_init(shared_address(&work.met), Shape::kThreads);
    work.partials = {segment.first ? partials_behind(item, segment, dealing) : 0, 1, 1};
  }
  // Each warp looks at the lengths. Where these change during the call, the block has work only if all warps found it.
  return __syncthreads_and(found);
}

// Adds other blocks' partials to four dimensions of a row; writes the row or its partial.
template <typename Shape>
PD_DEVICE void finish_quad(const Problem& p, const Plan& plan, const Float32Work<Shape>& work, int row, int quad,
                           RowSum& sum) {
  add_partials(plan, 0, 1, work.partials, row, quad, sum);
  if (quad * 4 >= p.head_dim_v) return;
  if (work.segment.first) {
    write_output<4>(p, plan, work.item, work.segment.head, row, quad, sum);
  } else {
    write_partial(plan, row, quad, sum);
  }
}

// The end of the rows of a warp that shares them with none.
template <typename Shape>
PD_DEVICE void finish_rows(const Problem& p, const Plan& plan, const Float32Work<Shape>& work, Float32Rows<Shape>& rows,
                           char* target) {
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
    finish_quad(p, plan, work, row, quad, sum);
  }
}

// The end of all rows, which every group has left in `group_sums`.
template <typename Shape>
PD_DEVICE void finish_groups(const Problem& p, const Plan& plan, const Float32Work<Shape>& work,
                             const char* group_sums) {
#pragma unroll 1
  for (int i = threadIdx.x; i < work.item.rows * Shape::kQuads; i += Shape::kThreads) {
    const int row = i / Shape::kQuads, quad = i % Shape::kQuads;
    const char* const first = group_sums + (row * Shape::kQuads + Shape::place_out(row, quad)) * 16;
    float2 ml[Shape::kGroups];
    float4 values[Shape::kGroups];
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      ml[group] = work.sums[group * Shape::kRows + row];
      values[group] = *reinterpret_cast<const float4*>(first + group * Shape::kQueryBytes);
    }
    RowSum sum;
    sum.add(ml, values);
    finish_quad(p, plan, work, row, quad, sum);
  }
}

// Waits for the warps of a group.
template <typename Shape>
PD_DEVICE void sync_group(int group) {
  if constexpr (Shape::kGroups == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(Shape::kGroupWarps * kWarp) : "memory");
  }
}

template <typename Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    float32_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  using Shape = Float32Shape<Sizes>;
  extern __shared__ __align__(128) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, group = Shape::group_of(warp);
  char *const queries = shared, *const keys = queries + Shape::kQueryBytes + group * Shape::kGroupBytes;
  char* const values = keys + Shape::kKeyBytes;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t keys_at = address + static_cast<uint32_t>(keys - shared), values_at = keys_at + Shape::kKeyBytes;
  wait_for_predecessor();
  let_successor_start();
  clear_unclaimed(p);

  Float32Work<Shape>& work = *reinterpret_cast<Float32Work<Shape>*>(shared + Shape::kSharedBytes - Shape::kWorkBytes);
  static_assert(sizeof(work) <= Shape::kWorkBytes, "the plan counts it");
  if (!find_work(p, plan, work)) return;
  const Item& item = work.item;
  const int head = work.segment.head;

  Float32Loader<Shape> loader = {work.places + group * Shape::kTileKeys};
  if (group == 0) loader.copy_queries(p, plan, item, head, address);
  Float32Rows<Shape> rows;
  rows.sums = work.sums + group * Shape::kRows;
  const auto works = [&] { return Shape::place_in_group(warp) * Shape::kWarpRows < item.rows; };
  // Once more, with more care, where a sum is no finite number in the end.
#pragma unroll 1
  while (true) {
    rows.start();
    loader.find(p, plan, work.keys, work.segment.head, work.segment.tile + group);
    loader.copy_keys(p, keys_at);
    copy_commit();
    loader.copy_values(p, values_at);
    copy_commit();
    if (group == 0 && !work.infinite) {  // the queries of this warp have come
      copy_wait<1>();
      __syncwarp();
      if (works()) rows.interleave(queries, static_cast<int>(p.head_dim));
    }
    if (Shape::kGroups > 1) __syncthreads();
#pragma unroll 1
    for (int tile = work.segment.tile + group; tile < work.segment.tile_end; tile += Shape::kGroups) {
      const int next = tile + Shape::kGroups;
      copy_wait<1>();
      sync_group<Shape>(group);
      if (next < work.segment.tile_end) loader.find(p, plan, work.keys, work.segment.head, next);
      typename Float32Rows<Shape>::Scores s;
      if (works()) rows.score_keys(queries, keys, static_cast<int>(p.head_dim), s);
      sync_group<Shape>(group);
      if (next < work.segment.tile_end) loader.copy_keys(p, keys_at);
      copy_commit();
      if (works()) rows.weigh(p, plan, item, work.segment.head, work.scale, tile, s);
      copy_wait<1>();
      sync_group<Shape>(group);
      if (works()) {
        if (work.infinite) {
          rows.template add_values<true>(values, static_cast<int>(p.head_dim_v), s);
        } else {
          rows.template add_values<false>(values, static_cast<int>(p.head_dim_v), s);
        }
      }
      sync_group<Shape>(group);
      if (next < work.segment.tile_end) loader.copy_values(p, values_at);
      copy_commit();
    }
    if (Shape::kGroups > 1) copy_wait<0>();  // a group without a tile has copies on their way
    const bool again = __syncthreads_or(works() && !work.infinite && rows.any_infinite());
    if (!again) break;
    if (threadIdx.x == 0) work.infinite = true;
    __syncthreads();
  }
  if constexpr (Shape::kGroups == 1) {
    if (works()) finish_rows(p, plan, work, rows, queries);
  } else {
    if (works()) rows.publish(shared + group * Shape::kQueryBytes);
    // Not a __syncthreads(): behind the named barriers of groups racecheck sees races where it stands.
    const uint32_t met = shared_address(&work.met);
    barrier_arrive(met);
    while (!barrier_passed(met, 0)) {
    }
    finish_groups(p, plan, work, shared);
  }
}

}  // namespace paged_attn
