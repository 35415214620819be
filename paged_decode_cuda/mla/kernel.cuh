// Multi-head latent attention on Hopper's matrix unit: the values of a key are the first 512 of its 576 dimensions, so
// a tile of keys is copied once and serves both products.
//
//   warpgroup 0   warps 0 to 2 copy tiles of keys, warp 3 finds work;      88 registers per thread
//                 where pages hold no boxes, warp 3 copies too
//   warpgroup 1   consumer 0: latents 0..255 of the output                208
//   warpgroup 2   consumer 1: latents 256..511 of the output              208
//
// The consumers take turns with the tiles: the one whose turn it is computes scores and weights of all 64 rows, for
// both. So the weights of one are made beside products of the other.
//
//   warpgroup 1    weights n | V[0:256] W n   | K Q n + 2     | V[0:256] W n + 1   | weights n + 2 | ...
//   warpgroup 2    K Q n + 1 | V[256:512] W n | weights n + 1 | V[256:512] W n + 1 | K Q n + 3     | ...
//
// A tile has two halves: the columns that are values of consumer 0, and the others. Loaders bring a half of tile n + 2
// as soon as its consumer has added that half of tile n.
//
// A block has 64 rows, which fill its shared memory with queries and two tiles of keys, and its registers with 64 x 512
// sums. Weights travel through shared memory in the order of registers: a thread has the rows and keys of its
// counterpart in the other consumer. Blocks of a cluster have 64 rows each of the same request and share every copy.
//
// Who waits for whom; every count is that of a phase. Keys have a barrier for each half of a stage.
//
//   barrier        arrivals                                   waited for by
//   work_full      1: the director                            loaders, consumers
//   work_empty     3 or 4 warps of loaders and 8 of           the director
//                  consumers, all threads
//   keys_full      3 loader warps and the bytes of the        consumers
//                  half (32768, 40960), or the 128 threads
//                  of 4 that copy in pieces
//   keys_empty     4 warps of the half's consumer in every    loaders
//                  block of the cluster
//   edge           1: loader 0, and the bytes of the half,    loaders
//                  where a tile has rows that nobody sees:
//                  keys_full then counts no bytes
//   meet           256 threads of the consumers               themselves: queries are there; a finished row's (base,
//                                                             sum) is there, and nobody reads its queries any more
//   ready          128 threads of the consumer that has       the other one
//                  weighed a tile
//   kPartial       128 threads of a consumer                  themselves: a partial is written, or may be read
//
// Where the keys of a row are in two clusters, the one with the first keys may add the partial that the other one has
// published (MlaCall::adds_two). It waits only for a cluster of a smaller index, which has started: see
// ../exchange.cuh,
// 1. All other partials are added by another kernel (combine.cu).
//
// To read next: shape.cuh (messages and barriers), director.cuh (roles of warps, who finds the work), loader.cuh.
#pragma once

#include "../prefill/weights.cuh"
#include "loader.cuh"

namespace paged_attn {

constexpr int kMlaConsumers = MlaSizes::kConsumers * kWarpgroup;

// Both consumers bring the queries of this block's rows of an item.
PD_DEVICE void copy_mla_queries(const Problem& p, const MlaCall& call, const Item& item, int head, uint32_t queries) {
  using Sizes = MlaSizes;
  const int thread = threadIdx.x - kWarpgroup, piece = thread % kCopyLanes;
#pragma unroll 1
  for (int row = thread / kCopyLanes; row < Sizes::kRows; row += kMlaConsumers / kCopyLanes) {
    const int own = static_cast<int>(blockIdx.y) * Sizes::kRows + row;
    const QueryRow query = query_row(p, call, item, head, own);
    const bool exists = own < item.rows;
    const int64_t rope = exists ? q_offset(p, item, query) : 0, latents = exists ? qv_offset(p, item, query) : 0;
    const char* const source = static_cast<const char*>(p.qv.data) + latents * 2 + piece * 16;
    const uint32_t target = queries + row * kRowBytes + (piece ^ row % 8) * 16;
#pragma unroll
    for (int c = 0; c < Sizes::kLatentColumns; ++c) {
      copy_piece(target + c * Sizes::kRows * kRowBytes, source + c * kRowBytes, exists);
    }
    copy_piece(target + Sizes::kLatentColumns * Sizes::kRows * kRowBytes,
               static_cast<const char*>(p.q) + rope * 2 + piece * 16, exists);
  }
}

// What both consumers know of themselves and do alike.
struct MlaConsumer {
  int half;  // of the latents and of a tile, which it adds; the tiles of the stage of this number are its own
  int lane;
  int row;  // of the block; this thread has that and the one 8 below
  uint32_t shared;
  Ring<MlaSizes::kStages> keys;
  Ring<2> slot;

  PD_MEMBER void start(const Problem& p, const MlaCall& call, const MlaControl& control, int consumer,
                       uint32_t address) {
    half = consumer;
    lane = threadIdx.x % kWarp;
    row = threadIdx.x / kWarp % 4 * 16 + lane / 4;
    shared = address;
    if (control.expected.x < 0) return;
    copy_mla_queries(p, call, expected_item(p, call, control.expected.x), control.expected.y, shared);
  }

  PD_MEMBER int row_of_item(int r) const { return static_cast<int>(blockIdx.y) * MlaSizes::kRows + row + 8 * r; }
  PD_MEMBER uint32_t stage() const { return shared + MlaSizes::kKeysAt + keys.stage * MlaSizes::kKeyBytes; }

  PD_MEMBER void await_keys(const MlaCall& call, MlaControl& control, int which) const {
    barrier_wait(shared_address(&control.keys_full[keys.stage][which]), keys.phase);
    if (call.box_rows == 0) fence_async_proxy();
  }

  // This consumer is done with its half of the tile, and so is the other one.
  PD_MEMBER void release(const MlaCall& call, MlaControl& control) const {
    if (lane < call.cluster) barrier_arrive_at(shared_address(&control.keys_empty[keys.stage][half]), lane);
  }
  PD_MEMBER void release_keys(const MlaCall& call, MlaControl& control) {
    release(call, control);
    keys.advance();
  }

  PD_MEMBER void release_work(MlaControl& control) {
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
  }

  // The next work, whose queries are asked for; nullptr at the end. Work without rows for this block only lets its
  // tiles pass.
  PD_MEMBER const MlaWork* next(const Problem& p, const MlaCall& call, MlaControl& control) {
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const MlaWork& work = control.work[slot.stage];
      if (!work.asked) await_pieces();  // queries that were asked for in vain: others take their place, or none do
      if (!work.exists) return nullptr;
      if (static_cast<int>(blockIdx.y) * MlaSizes::kRows < work.item.rows) {
        if (!work.asked) copy_mla_queries(p, call, work.item, work.head, shared);
        return &work;
      }
#pragma unroll 1
      for (int tiles = work.tile_end - work.tile; tiles > 0; --tiles) {
        await_keys(call, control, half);
        __syncwarp();  // the lanes that release speak for all
        release_keys(call, control);
      }
      release_work(control);
    }
  }

  PD_MEMBER void await_queries(MlaControl& control) const {
    await_pieces();
    fence_async_proxy();
    barrier_meet(shared_address(&control.meet), 0);
  }

  // Writes this half of a partial in the order of registers: 16 bytes of two rows, thread by thread.
  PD_MEMBER void write_partial(const MlaCall& call, const MlaWork& work, const float (&acc)[MlaSizes::kDimV / 2],
                               const float (&base)[2], const float (&l)[2]) const {
    const int64_t partial = mla_partial(call, blockIdx.x, blockIdx.y, work.first);
    if (row_of_item(0) < work.item.rows) {
      float4* const sums = mla_sums(call, partial, half) + threadIdx.x % kWarpgroup;
#pragma unroll
      for (int j = 0; j < MlaSizes::kDimV / 8; ++j)
        sums[j * kWarpgroup] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
      if (half == 0 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) call.ml[partial * MlaSizes::kRows + row + 8 * r] = make_float2(base[r], l[r]);
      }
    }
    if (!work.two_partials) return;  // only the other kernel reads it
    named_barrier_sync(kPartial + half, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) publish_word(mla_published(call, partial, half), launch_number());
  }

  // Adds the one partial that is behind this block's keys to this half of the rows.
  PD_MEMBER void add_partial(const MlaCall& call, const MlaWork& work, float (&acc)[MlaSizes::kDimV / 2],
                             float (&base)[2], float (&l)[2]) const {
    const int64_t partial = mla_partial(call, static_cast<int>(blockIdx.x) - 1, blockIdx.y, false);
    if (threadIdx.x % kWarpgroup == 0) {
      // With the first half come (m, l), which both consumers need.
      await_word(mla_published(call, partial, 0), launch_number());
      if (half == 1) await_word(mla_published(call, partial, 1), launch_number());
    }
    named_barrier_sync(kPartial + half, kWarpgroup);
    if (row_of_item(0) >= work.item.rows) return;
    float own[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 ml = load_shared_by_blocks(call.ml + partial * MlaSizes::kRows + row + 8 * r);
      const float top = fmaxf(base[r], ml.x), shift = top == -INFINITY ? 0.f : top;
      own[r] = fast_exp2(base[r] - shift);
      other[r] = fast_exp2(ml.x - shift);
      base[r] = top;
      l[r] = l[r] * own[r] + ml.y * other[r];
    }
    const float4* const sums = mla_sums(call, partial, half) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int j = 0; j < MlaSizes::kDimV / 8; ++j) {
      const float4 x = load_shared_by_blocks(sums + j * kWarpgroup);
      acc[4 * j] = acc[4 * j] * own[0] + x.x * other[0];
      acc[4 * j + 1] = acc[4 * j + 1] * own[0] + x.y * other[0];
      acc[4 * j + 2] = acc[4 * j + 2] * own[1] + x.z * other[1];
      acc[4 * j + 3] = acc[4 * j + 3] * own[1] + x.w * other[1];
    }
  }

  // Writes this half of the rows, or of their partial.
  template <bool kBf16>
  PD_MEMBER void write(const Problem& p, const MlaCall& call, const MlaWork& work, float (&acc)[MlaSizes::kDimV / 2],
                       float (&base)[2], float (&l)[2]) const {
    if (!work.first || (work.behind > 0 && !work.two_partials)) {
      write_partial(call, work, acc, base, l);
      return;
    }
    if (work.two_partials) add_partial(call, work, acc, base, l);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row_of_item(r);
      const bool exists = own < work.item.rows;
      RowTarget target = {};
      float factor = 0.f;
      if (exists) {
        target = row_target(p, call, work.item, work.head, own);
        factor = finish_row(p, target, work.item.b, work.head, base[r], l[r], half == 0 && lane % 4 == 0);
      }
      store_row<kBf16>(acc, r, factor, static_cast<uint16_t*>(p.out) + target.out + half * MlaSizes::kDimV, exists,
                       MlaSizes::kDimV);
    }
  }
};

// Weights on their way from one consumer to the other: piece i of thread t at (i, t).
PD_DEVICE uint32_t weights_at(uint32_t buffer, int i) {
  return buffer + (i * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
}

template <int kCount>
PD_DEVICE void store_weights(uint32_t buffer, const uint32_t (&w)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) store_piece(weights_at(buffer, i / 4), w[i], w[i + 1], w[i + 2], w[i + 3]);
}

template <int kCount>
PD_DEVICE void load_weights(uint32_t buffer, uint32_t (&w)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) load_piece(weights_at(buffer, i / 4), w[i], w[i + 1], w[i + 2], w[i + 3]);
}

template <int kCount>
PD_DEVICE void scale_sums(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor[i / 2 % 2];
}

// Issues scores += q k^T for `kCount` columns of 64 dimensions; the first product replaces them if `first`.
template <typename Shape, int kCount>
PD_DEVICE void issue_columns(float (&s)[Shape::kKeys / 2], uint64_t queries, uint64_t keys, bool first) {
#pragma unroll
  for (int i = 0; i < kCount * kColumn / 16; ++i) {
    const int c = i / (kColumn / 16), bytes = i % (kColumn / 16) * 32;
    multiply_scores(typename Shape::Type{}, s, advance(queries, c * Shape::kRows * kRowBytes + bytes),
                    advance(keys, c * Shape::kKeys * kRowBytes + bytes), !first || i > 0);
  }
}

// What a consumer does with tiles.
template <typename Shape, bool kFull>
struct MlaTiles {
  static constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  static constexpr int kKeyColumn = Shape::kKeys * kRowBytes, kQueryColumn = Shape::kRows * kRowBytes;  // bytes
  static constexpr int kHalf = Shape::kLatentColumns / 2;                                               // columns

  const Problem& p;
  const MlaCall& call;
  MlaControl& control;
  MlaConsumer own;
  uint32_t ready_phase;
  float s[Shape::kKeys / 2], acc[Shape::kDimV / 2];
  uint32_t weights[Shape::kKeys / 4];
  PrefillRows<Shape, kFull> rows;

  PD_MEMBER uint32_t buffer() const { return own.shared + Shape::kWeightsAt; }

  // acc += weights v, for this consumer's half of the latents of the tile at `stage`.
  PD_MEMBER void issue_tile_values(uint32_t stage) {
    settle(acc);
    settle(weights);
    products_begin();
    issue_values<Shape>(acc, weights, matrix_descriptor(stage + own.half * kHalf * kKeyColumn, kKeyColumn));
    products_commit();
  }

  PD_MEMBER void await_values() {
    products_wait<0>();
    settle(acc);
    settle(weights);
  }

  // Takes the weights that the other consumer has made of its tile. Only while no product is on its way to acc.
  PD_MEMBER void take_weights() {
    barrier_wait(shared_address(&control.ready[1 - own.half]), ready_phase);
    ready_phase ^= 1;
    load_weights(buffer(), weights);
    if (control.moved[own.row / 16]) {
      const float factor[2] = {control.factor[own.row], control.factor[own.row + 8]};
      scale_sums(acc, factor);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = control.base[own.row + 8 * r];
        rows.l[r] *= fast_rescale(rows.base[r], base);
        rows.base[r] = base;
      }
      rows.starts_to_multiply();  // as the other consumer has
    }
  }

  // Makes the weights of this consumer's tile, for both.
  PD_MEMBER void give_weights(int tile, int inner_begin, int inner_end) {
    const int first_key = tile * Shape::kKeys;
    float factor[2] = {1.f, 1.f};
    rows.score(p, s, first_key);
    if (first_key + Shape::kKeys > inner_end || first_key < inner_begin) rows.mask(s, first_key);
    const bool moved = rows.move_base(s, factor);
    if (moved && rows.starts_to_multiply()) rows.multiply(s);
    rows.weigh(s);
    pack_weights<kBf16>(s, weights);
    store_weights(buffer(), weights);
    __syncwarp();  // all lanes have read what the other consumer told
    if (own.lane == 0) control.moved[own.row / 16] = moved;
    if (moved && own.lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        control.factor[own.row + 8 * r] = factor[r];
        control.base[own.row + 8 * r] = rows.base[r];
      }
    }
    barrier_arrive(shared_address(&control.ready[own.half]));
    if (moved) scale_sums(acc, factor);
  }

  // Adds a tile whose weights the other consumer makes.
  PD_MEMBER void add_other() {
    own.await_keys(call, control, own.half);
    take_weights();
    issue_tile_values(own.stage());
    await_values();
    own.release_keys(call, control);
  }

  // Scores and adds a tile of this consumer. kBehind: the one before it is the other's, and is added while the scores
  // are computed.
  template <bool kBehind>
  PD_MEMBER void add_own(int tile, int inner_begin, int inner_end) {
    const MlaConsumer before = own;
    if (kBehind) own.keys.advance();
    const int here = own.half * kHalf, there = kHalf - here;
    const uint64_t queries = matrix_descriptor(own.shared, kRowBytes), keys = matrix_descriptor(own.stage(), kRowBytes);
    own.await_keys(call, control, own.half);
    settle(s);
    products_begin();
    issue_columns<Shape, kHalf>(s, advance(queries, here * kQueryColumn), advance(keys, here * kKeyColumn), true);
    products_commit();
    if (kBehind) {
      before.await_keys(call, control, own.half);
      take_weights();
      issue_tile_values(before.stage());
    }
    own.await_keys(call, control, 1 - own.half);
    products_begin();
    issue_columns<Shape, kHalf>(s, advance(queries, there * kQueryColumn), advance(keys, there * kKeyColumn), false);
    issue_columns<Shape, 1>(s, advance(queries, 2 * kHalf * kQueryColumn), advance(keys, 2 * kHalf * kKeyColumn),
                            false);
    products_commit();
    if (kBehind) {
      products_wait<1>();
      before.release(call, control);
    }
    products_wait<0>();
    settle(s);
    settle(acc);
    settle(weights);
    give_weights(tile, inner_begin, inner_end);
    issue_tile_values(own.stage());
    await_values();
    own.release_keys(call, control);
  }

  PD_MEMBER void run() {
    ready_phase = 0;
    while (const MlaWork* const work = own.next(p, call, control)) {
      rows.start(p, call, *work, own.row_of_item(0));
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] = 0.f;
      own.await_queries(control);
      const int inner_begin = work->item.inner_begin, inner_end = work->item.inner_end, end = work->tile_end;
      int tile = work->tile;
      // The stage says whose a tile is.
      if (tile < end && own.keys.stage == own.half) add_own<false>(tile++, inner_begin, inner_end);
#pragma unroll 1
      for (; tile + 1 < end; tile += 2) add_own<true>(tile + 1, inner_begin, inner_end);
      if (tile < end) add_other();
      float l[2] = {row_sum(rows.l[0]), row_sum(rows.l[1])};
      if (own.lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) control.sum[own.half][own.row + 8 * r] = l[r];
      }
      barrier_meet(shared_address(&control.meet), 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) l[r] += control.sum[1 - own.half][own.row + 8 * r];
      own.template write<kBf16>(p, call, *work, acc, rows.base, l);
      own.release_work(control);
    }
  }
};

PD_DEVICE void init_mla_barriers(const MlaCall& call, MlaControl& control) {
  for (int i = 0; i < MlaSizes::kStages; ++i) {
    for (int half = 0; half < MlaSizes::kHalves; ++half) {
      barrier_init(shared_address(&control.keys_full[i][half]), keys_arrivals(call, MlaLoader::kGatherers));
      barrier_init(shared_address(&control.keys_empty[i][half]), MlaSizes::kConsumerWarps / 2 * call.cluster);
      barrier_init(shared_address(&control.edge[i][half]), 1);
    }
  }
  init_work_barriers(control, call.box_rows > 0 ? MlaSizes::kLoaders : MlaLoader::kGatherers, kMlaConsumers);
}

template <typename Shape, bool kFull>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    mla_kernel(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  __shared__ MlaControl control;
  // The same in every block of a cluster, as its copies go to the same place.
  const uint32_t shared = (shared_address(raw) + kBlockBytes - 1) & ~(kBlockBytes - 1u);
  if (threadIdx.x == 0) {
    init_mla_barriers(call, control);
    prefetch_description(call.latents);
    prefetch_description(call.rope);
  }
  run_block<Shape, MlaLoader>(p, call, control, shared, [&](int consumer) {
    MlaTiles<Shape, kFull> tiles = {p, call, control};
    tiles.own.start(p, call, control, consumer, shared);
    tiles.run();
  });
#endif
}

}  // namespace paged_attn
