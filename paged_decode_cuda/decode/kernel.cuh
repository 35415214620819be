// Attention of few rows over many keys on the matrix unit (mma m16n8k16): fp16 and bf16 caches, fp8 ones widened to
// fp16 in registers, and float32 ones as two tf32 parts of every number.
//
// A warp takes a tile of keys of one (request, kv_head). Keys are the M side of both products, rows the N side:
// S^T = K Q^T and O^T = V^T P^T. So 8 rows (a group of heads, several tokens) fill a matrix tile, and the products of a
// single row still take less time than reading its keys. The order of the terms of a product is free, so a lane's
// 16-byte pieces hold whole terms, and no value changes lanes on its way to the matrix unit. Each warp has a queue of
// its own in shared memory, several tiles deep. It fills the queue by asynchronous copies of whole 128-byte lines (half
// lines cost a quarter of the bandwidth) and reads it without a barrier of the block. The copies run ahead across the
// end of a segment into the next one.
//
// Grid: plan.blocks thread blocks; the warps of a block take the tiles of a segment in turns.
// Shared memory: the queues, warp by warp, whose free stages also carry the accumulators when the warps merge; then (m,
// l), and sums of groups of threads.
#pragma once

#include "basic_call.cuh"
#include "find_work.cuh"
#include "loader.cuh"
#include "products.cuh"
#include "segment_end.cuh"

namespace paged_attn {

// What both kernels do; they differ in what is known when they are compiled.
//
// Instructions that run for the first time must be fetched from memory, like data. So every piece of code stands here
// once, and the start is a part of the loops: a segment without tiles, in which the copies get their lead. With 3
// stages a warp does, turn by turn of the inner loop,
//
//     lead 3        2        1        0             0             0
//     find work
//     look up 0     copy 0   copy 1   multiply 0    multiply 1    multiply 2      its own tiles 0, 1, 2, ...
//                                     copy 2        copy 3        copy 4
//
// until the tiles of its segment are used up. Copies take tiles of the next segment then.
//
// In halves (float32) the values of a tile go where those of the tile before it were, when the next turn begins; and
// its keys where keys have just been read. With one stage:
//
//     lead 1        0                      0
//     find work
//     look up 0     copy values 0          copy values 1
//     copy keys 0   score keys 0           score keys 1
//                   copy keys 1            copy keys 2
//                   multiply values 0      multiply values 1
template <typename Kv, int kHeadDim, int kRowTiles>
PD_DEVICE void decode(const Problem& p, const Plan& plan) {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  using WarpRows = Rows<Kv, kHeadDim, kRowTiles>;
  extern __shared__ __align__(128) char queues[];
  __shared__ int free_stages[Shape::kMostWarps];
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  char* queue = queues + warp * Shape::kQueueBytes;
  const uint32_t queue_address = static_cast<uint32_t>(__cvta_generic_to_shared(queue));
  float2* shared_ml = reinterpret_cast<float2*>(queues + warps * Shape::kQueueBytes);
  RowSum* shared_sums = reinterpret_cast<RowSum*>(shared_ml + warps * Shape::kRows);
  char* queries = reinterpret_cast<char*>(shared_sums + blockDim.x);

  Dealing dealing = {};
  Walker walker = {};
  if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, walker);
  DecodeLoader<Kv, kHeadDim, kRowTiles> loader;
  loader.start(walker);

  Segment segment = {};
  Item item = {};
  Sharing sharing = {};
  bool open = false;  // there is a segment to end
  int tile = 0, lead = Shape::kStages, free_stage = Shape::kStages - 1;
  WarpRows rows;
  while (true) {
#pragma unroll 1
    while (lead > 0 || tile < segment.tile_end) {
      if (lead == Shape::kStages) {
        // Not before the loops: here the registers that they keep are already taken.
        find_work(p, plan, walker, dealing);
        loader.start(walker);
      }
      const int read_stage = free_stage + 1 == Shape::kStages ? 0 : free_stage + 1;
      const char* stage = queue + read_stage * Shape::kStageBytes;
      const uint32_t free_address = queue_address + free_stage * Shape::kStageBytes;
      float s[Shape::kSubTiles][kRowTiles][4];
      if constexpr (Shape::kHalves) {
        __syncwarp();
        loader.copy_values(p, plan, dealing, free_address);
      }
      if (lead == 0) {
        // The tile has arrived for every lane, and every lane is done with the stage that is filled next.
        copy_wait<Shape::kGroupsBehind>();
        __syncwarp();
        // Reads of shared memory queue behind copies, so the keys are read before the next copies start.
        rows.score_keys(stage, queries, s);
      }
      if constexpr (Shape::kHalves) {
        __syncwarp();
        loader.copy_keys(p, plan, queue_address + read_stage * Shape::kStageBytes);
      } else {
        loader.copy(p, plan, dealing, free_address);
      }
      free_stage = read_stage;
      if (lead > 0) {
        --lead;
        continue;
      }
      if constexpr (Shape::kHalves) {
        copy_wait<Shape::kGroupsBehind>();
        __syncwarp();
      }
      rows.attend(p, plan, item, segment.head, stage, tile, s);
      tile += warps;
    }

    if (open) {
      __syncwarp();
      rows.publish(queue + free_stage * Shape::kStageBytes + Shape::kSumsAt, shared_ml + warp * Shape::kRows);
      if (threadIdx.x % kWarp == 0) free_stages[warp] = free_stage;
      __syncthreads();
      const WarpSums<Shape, WarpRows> published = {queues, free_stages, shared_ml};
      finish_segment<Shape>(p, plan, item, segment, sharing, published, shared_sums);
      __syncthreads();
    } else {
      clear_unclaimed(p);  // while the first tiles are on their way
    }
    open = true;
    if (!walker.next(p, plan, dealing, segment, item)) break;
    rows.start(p, plan, item, segment.head, queries);
    if (Shape::kSharedQueries) __syncthreads();
    sharing = share_merge<Shape>(item, segment, dealing);
    tile = segment.tile + warp;
  }
}

template <typename Kv, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeShape<Kv, kHeadDim, kRowTiles>::kMostWarps* kWarp, 1)
    decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan given) {
  touch(p);
  touch(given);
  Plan plan = given;
  plan.basic = false;  // as the host sees to, but now the compiler knows
  decode<Kv, kHeadDim, kRowTiles>(p, plan);
}

// kPacked: with cu_seqlens_q.
template <typename Kv, int kHeadDim, int kRowTiles, bool kPacked>
__global__ void __launch_bounds__(DecodeShape<Kv, kHeadDim, kRowTiles>::kMostWarps* kWarp, 1)
    basic_decode_kernel(const __grid_constant__ BasicCall call) {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  touch(call);
  decode<Kv, kHeadDim, kRowTiles>(basic_problem(call, Kv::kDType, kHeadDim, kPacked),
                                  basic_plan(call, Shape::kRowShift, Shape::kTileShift, kHeadDim));
}

}  // namespace paged_attn
