// Attention of few rows over many keys where a warpgroup multiplies (wgmma): 16-bit caches on compute capability
// 9.0, where cuts are balanced. See wgmma_rows.cuh.
//
// A block has three warpgroups and a multiprocessor of its own.
//
//     copies       K0 V0 K1 V1 K2 V2 K3 V3 | K0 V0 K1 ...      tiles of 64 keys, segment after segment
//     consumer 0      [ 0 ]       [ 2 ]        end  [ 0 ]      the end: the consumers' sums become those of the block
//     consumer 1            [ 1 ]       [ 3 ]  end
//
// Copies go on while a segment ends. Every warp finds the block's work by itself.
//
// Shared memory: the ring, two buffers of queries, then of each consumer its weights, which are sums at the end of a
// segment, and what else the end needs.
#pragma once

#include "basic_call.cuh"
#include "find_work.cuh"
#include "wgmma_end.cuh"

namespace paged_attn {

template <typename Shape>
PD_DEVICE void decode_by_warpgroups(const Problem& p, const Plan& plan) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char ring_and_more[];
  __shared__ WgmmaBarriers<Shape> barriers;
  __shared__ float tops[Shape::kConsumers][Shape::kWarps][Shape::kRows];
  WgmmaRing<Shape> ring = {shared_address(ring_and_more), barriers};
  WgmmaQueries<Shape> queries = {shared_address(ring_and_more + Shape::kQueriesAt), barriers};
  if (threadIdx.x == 0) barriers.init();
  Dealing dealing = {};
  Walker walker = {};
  if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, walker);
  __syncthreads();
  find_work(p, plan, walker, dealing);
  Segment segment = {};
  Item item = {};
  if (threadIdx.x >= Shape::kEndThreads) {
    WgmmaLoader<Shape> loader;
    while (walker.next(p, plan, dealing, segment, item)) loader.copy_segment(p, plan, segment, item, ring, queries);
    await_pieces();
    return;
  }

  const WgmmaEnd<Shape> end = {ring_and_more};
  const uint32_t weights = shared_address(ring_and_more + Shape::kSumsAt + Shape::consumer() * Shape::kSumBytes);
  clear_unclaimed(p);
  WgmmaRows<Shape> rows;
  int tiles = 0;      // before this segment
  uint32_t turn = 0;  // of the weights' buffers, in bytes
  while (walker.next(p, plan, dealing, segment, item)) {
    rows.start(p, item, segment.head);
    const auto merge = end.begin(item, segment, dealing);
    ring.go_to(tiles + Shape::consumer());
    queries.await_full();
#pragma unroll 1
    for (int unit = segment.tile + Shape::consumer() * Shape::kUnits; unit < segment.tile_end;
         unit += Shape::kConsumers * Shape::kUnits) {
      ring.template await_full<false>();
      fence_async_proxy();
      rows.score_keys(ring.template address<false>(), queries.address());
      ring.template release<false>();
      rows.attend(p, plan, item, segment, unit * Shape::kUnitKeys, ring, weights + turn, tops[Shape::consumer()]);
      turn ^= Shape::kWeightBytes;
      ring.template release<true>();
      ring.advance(Shape::kConsumers);
    }
    queries.release();
    queries.advance();
    tiles += (segment.tile_end - segment.tile + Shape::kUnits - 1) / Shape::kUnits;
    end.finish(p, plan, item, segment, dealing, merge, rows);
  }
#endif
}

template <typename Kv, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(WgmmaSizes<kHeadDim, kRowTiles>::kThreads, 1)
    wgmma_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan given) {
  touch(p);
  touch(given);
  Plan plan = given;
  plan.basic = false;  // as the host sees to, but now the compiler knows
  decode_by_warpgroups<WgmmaShape<Kv, kHeadDim, kRowTiles>>(p, plan);
}

// kPacked: with cu_seqlens_q.
template <typename Kv, int kHeadDim, int kRowTiles, bool kPacked>
__global__ void __launch_bounds__(WgmmaSizes<kHeadDim, kRowTiles>::kThreads, 1)
    basic_wgmma_decode_kernel(const __grid_constant__ BasicCall call) {
  using Shape = WgmmaShape<Kv, kHeadDim, kRowTiles>;
  touch(call);
  decode_by_warpgroups<Shape>(basic_problem(call, Kv::kDType, kHeadDim, kPacked),
                              basic_plan(call, Shape::kRowShift, Shape::kTileShift, kHeadDim));
}

template <typename Kv, int kHeadDim, int kRowTiles>
const void* wgmma_kernel_of(DecodeKind kind) {
  switch (kind) {
    case DecodeKind::kFull: return reinterpret_cast<const void*>(&wgmma_decode_kernel<Kv, kHeadDim, kRowTiles>);
    case DecodeKind::kBasic:
      return reinterpret_cast<const void*>(&basic_wgmma_decode_kernel<Kv, kHeadDim, kRowTiles, false>);
    default: return reinterpret_cast<const void*>(&basic_wgmma_decode_kernel<Kv, kHeadDim, kRowTiles, true>);
  }
}

template <typename Kv, int kHeadDim>
const void* find_wgmma_kernel(int row_tiles, DecodeKind kind) {
  switch (row_tiles) {
    case 1: return wgmma_kernel_of<Kv, kHeadDim, 1>(kind);
    case 2: return wgmma_kernel_of<Kv, kHeadDim, 2>(kind);
    default: return wgmma_kernel_of<Kv, kHeadDim, 4>(kind);
  }
}

template <typename Kv>
const void* find_wgmma_kernel(int head_dim, int row_tiles, DecodeKind kind) {
  switch (head_dim) {
    case 64: return find_wgmma_kernel<Kv, 64>(row_tiles, kind);
    case 128: return find_wgmma_kernel<Kv, 128>(row_tiles, kind);
    default: return wgmma_kernel_of<Kv, 256, 1>(kind);
  }
}

}  // namespace paged_attn
