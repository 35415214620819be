// Multi-head latent attention of few rows over 16-bit caches: one token of 16 heads, as a rank has with tensor
// parallelism. And heads of 512 of any number of rows, whose values are not in their keys.
//
// In blocks of 64 rows (kernel.cuh) most of the matrix unit's work would be for rows that do not exist, and two tiles
// are all that fits beside their queries. Here keys, and then latents, are the M side of the products, as in `decode`.
// A block has two warpgroups and a multiprocessor of its own.
//
//     copies       0a 0b 0c 1a 1b 1c 2a 2b 2c | 0a ...      tiles of 64 keys in three parts, segment after segment
//     multiplies         [    0    ][    1    ] ...  end     scores, weights, values of a tile
//
// Copies go on while a segment ends. Every warp finds the block's work by itself. Partials are those of kernel.cuh, and
// the same second kernel adds them (combine.cu).
#pragma once

#include "../decode/find_work.cuh"
#include "few_rows_loader.cuh"
#include "few_rows_products.cuh"

namespace paged_attn {

// The records of this block for the second kernel.
struct FewRowsRecord {
  const MlaCall& call;
  bool cut;  // it has written one: a stretch has the first keys of one cut item at most

  PD_MEMBER bool says() const { return call.slots > 0 && threadIdx.x == 0; }
  PD_MEMBER void write(const Item& item, int head, int behind) {
    cut = true;
    if (says()) call.records[blockIdx.x] = {behind, head, item.b, item.first_row, item.rows, item.q_begin, 0};
  }
  PD_MEMBER void end(bool even) const {
    if (!says()) return;
    if (!cut) call.records[blockIdx.x].behind = 0;
    call.records[blockIdx.x].even = even;
  }
};

template <typename Shape>
PD_DEVICE void attend_few_rows(const Problem& p, const MlaCall& call) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  __shared__ FewRowsControl<Shape> control;
  const uint32_t shared = (shared_address(raw) + kBlockBytes - 1) & ~(kBlockBytes - 1u);
  if (threadIdx.x == 0) control.init();
  Dealing dealing = {};
  Walker walker = {};
  if (call.blocks_each.divisor > 0) expect_even_stretch(p, call, walker);
  __syncthreads();
  find_work<false>(p, call, walker, dealing);
  const PartRing<Shape> ring = {control, shared};
  Segment segment = {};
  Item item = {};
  if (threadIdx.x >= Shape::kConsumerThreads) {
    FewRowsLoader<Shape> loader = {ring};
    while (walker.next(p, call, dealing, segment, item)) loader.copy_segment(p, call, segment, item);
    await_pieces();
  } else {
    FewRowsRecord record = {call};
    FewRowsTiles<Shape> tiles = {control, shared, ring};
    while (walker.next(p, call, dealing, segment, item)) {
      // Where lengths change during the call, blocks see different ones: no more than there are blocks before this one.
      const int behind = min(partials_behind(item, segment, dealing), static_cast<int>(blockIdx.x));
      if (segment.first && behind > 0) record.write(item, segment.head, behind);
      tiles.attend(p, call, item, segment);
      tiles.finish(p, call, item, segment, behind);
    }
    record.end(dealing.most > 0);
  }
  clear_unclaimed(p);
#endif
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    few_rows_mla_kernel(const __grid_constant__ Problem p, const __grid_constant__ MlaCall given) {
  touch(p);
  touch(given);
  MlaCall call = given;
  call.basic = false;  // as the host sees to, but now the compiler knows
  attend_few_rows<Shape>(p, call);
}

// Of basic calls (MlaPlan): so much is known when this is compiled.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    basic_few_rows_mla_kernel(const __grid_constant__ Problem given_problem, const __grid_constant__ MlaCall given) {
  touch(given_problem);
  touch(given);
  Problem p = given_problem;
  p.window_left = -1;
  p.attention_chunk = 0;
  p.softcap = 0.f;
  p.alibi_slopes = {};
  p.cache_leftpad = {};
  p.cache.cu_seqlens_k = {};
  p.append.cu_seqlens_k_new = {};
  MlaCall call = given;
  call.basic = call.balanced = true;
  call.direct_items = call.items;
  call.row_tiles.divisor = 1;
  attend_few_rows<Shape>(p, call);
}

}  // namespace paged_attn
