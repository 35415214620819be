// Multi-head latent attention with 8-bit caches, on Hopper's matrix unit.
//
// A product may have one operand in registers, and for it the keys are chosen: they are widened to fp16 on their way
// from shared memory to registers, and nothing is written back (narrow_products.cuh). So both products are turned
// around. q comes as fp16 too (narrow_queries.cuh).
//
//     scores^T [64 keys, 64 rows]      = keys [64, 576]        q^T [576, 64]         keys in registers
//     sums^T   [256 latents, 64 rows] += latents^T [256, 64]   weights^T [64, 64]    latents in registers
//
// Requests of up to 32 rows have blocks of 32 rows: the same with 32 in place of 64, and four tiles of keys.
//
// Producer warps are those of kernel.cuh. Consumers take turns with the scores of tiles, and each adds every tile to
// its half of the latents. A warpgroup of its own makes weights of scores, while consumers multiply. A thread of a
// consumer has two keys, or two latents, of 16 rows; one of the weigher has 16 keys of two rows.
//
//   consumer 0   scores n     | values n - 1 | values n     | scores n + 2 | ...
//   consumer 1   ... n - 1    | scores n + 1 | values n     | values n + 1 | ...
//   weigher                   | weights n    |              | weights n + 1
//
// Who waits for whom; every count is that of a phase.
//
//   barrier        arrivals                                    waited for by
//   work_full      1: the director                             loaders, consumers, weigher
//   work_empty     480 threads of loaders, consumers and       the director
//                  weigher
//   keys_full      96 threads of the loaders, and 36864 bytes  consumers
//                  where they come in boxes
//   keys_empty     8 consumer warps of every block of the      loaders
//                  cluster
//   edge           1: loader 0, and 36864 bytes                loaders, where a tile has rows that nobody sees
//   scores_full    128 threads of the consumer that has        weigher
//                  scored a tile
//   scores_empty   128 threads of the weigher                  the consumer that has scored the next one
//   ready          128 threads of the weigher                  consumers: weights are there, and whether reference
//                                                              scores have moved
//   weights_empty  256 threads of consumers                    weigher
//   meet           384 threads of consumers and weigher        themselves: queries and what is known of their rows are
//                                                              there; (base, sum) of a finished row is there, and
//                                                              nobody reads its queries any more
//   kPartial       128 threads of a consumer                   themselves: a partial is written, or may be read
#pragma once

#include "../prefill/weights.cuh"
#include "narrow_products.cuh"
#include "narrow_queries.cuh"
#include "narrow_weigher.cuh"

namespace paged_attn {

template <typename Kv, typename Sizes, bool kFull>
struct NarrowTiles {
  static constexpr int kKeys = Sizes::kKeys, kRows = Sizes::kRows;
  static constexpr int kOperands = 3;                  // that products may read, or that are made
  static constexpr int kMatrices = Sizes::kDimV / 64;  // of latents that a consumer has

  const Problem& p;
  const MlaCall& call;
  NarrowControl<Sizes>& control;
  uint32_t shared;
  unsigned half;  // of the latents: whose consumer this is
  Ring<Sizes::kStages> keys;
  Ring<2> slot;
  uint32_t count;  // of tiles that this block has scored before
  // Entries 4 j + 2 r + e are of row 8 j + 2 t + e of the block. s: of key 16 warp + g + 8 r; acc: of latent 2 g + r of
  // the 16 of this warp, of each matrix
  float s[kRows / 2], acc[kMatrices][kRows / 2];

  PD_MEMBER void start(int consumer, uint32_t address) {
    half = consumer;
    shared = address;
    keys = {};
    slot = {};
    count = 0;
  }

  // Of the threads of this consumer. The numbers of the barriers are constants of the instructions.
  PD_MEMBER void meet_own() const {
    if (half == 0) {
      named_barrier_sync(kPartial, kWarpgroup);
    } else {
      named_barrier_sync(kPartial + 1, kWarpgroup);
    }
  }
  PD_MEMBER int row_of_item(int row) const { return static_cast<int>(blockIdx.y) * kRows + row; }
  PD_MEMBER uint32_t stage_at(int stage) const { return shared + Sizes::kKeysAt + stage * Sizes::kKeyBytes; }
  PD_MEMBER uint32_t weights_of(uint32_t buffer) const {
    return shared + Sizes::kWeightsAt + buffer * Sizes::kWeightBytes;
  }

  PD_MEMBER void await_keys() const { barrier_wait(shared_address(&control.keys_full[keys.stage]), keys.phase); }

  // This consumer is done with a tile.
  PD_MEMBER void release(int stage) const {
    __syncwarp();
    const int lane = this_thread() % kWarp;
    if (lane < call.cluster) barrier_arrive_at(shared_address(&control.keys_empty[stage]), lane);
  }

  PD_MEMBER void release_work() {
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
  }

  // The next work; nullptr at the end. Work without rows for this block only lets its tiles pass.
  PD_MEMBER const MlaWork* next() {
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const MlaWork& work = control.work[slot.stage];
      if (!work.exists) return nullptr;
      if (row_of_item(0) < work.item.rows) return &work;
#pragma unroll 1
      for (int tiles = work.tile_end - work.tile; tiles > 0; --tiles) {
        await_keys();
        release(keys.stage);
        keys.advance();
      }
      release_work();
    }
  }

  PD_MEMBER void finish_products() {
    products_wait<0>();
    settle(s);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) settle(acc[m]);
  }

  // s = keys q^T of a tile.
  PD_MEMBER void score_tile(uint32_t stage, NarrowOperand (&a)[kOperands]) {
    const NarrowPlace place;
    const unsigned key = place.warp * 16 + place.lane % 16, high = place.lane / 16;
    const uint32_t from[2] = {stage + narrow_place(key, high), stage + narrow_place(key, 2 + high)};
    const uint64_t queries = matrix_descriptor(shared, kRowBytes);
    settle(s);
    stream_products<Sizes::kDim / 16>(
        a, [&](uint32_t (&words)[4], int i) { load_matrices(words, from[i % 2] + i / 2 * Sizes::kNarrowColumn); },
        [](uint32_t x, uint32_t y, NarrowOperand& own) { widen_keys<Kv>(x, y, own); },
        [&](const NarrowOperand& own, int i) {
          const uint64_t q = advance(queries, i / 4 * kRows * kRowBytes + i % 4 * 32);
          multiply_keys(s, own[0], own[1], own[2], own[3], q, i > 0);
        });
  }

  // Leaves q.k of a tile for the weigher.
  PD_MEMBER void give_scores() {
    const NarrowPlace place;
    const uint32_t target = shared + Sizes::kScoresAt + place.t * 8;
    barrier_wait(shared_address(&control.scores_empty), count % 2 ^ 1);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_shared_floats(target + score_place<Sizes>(place.key() + r * 8, j), s[4 * j + 2 * r],
                            s[4 * j + 2 * r + 1]);
    }
    barrier_arrive(shared_address(&control.scores_full));
  }

  // acc += latents^T weights^T of a tile, for the latents of this consumer.
  PD_MEMBER void add_values(uint32_t stage, uint32_t buffer, NarrowOperand (&a)[kOperands]) {
    const NarrowPlace place;
    const uint32_t from = stage + narrow_place(place.lane, place.warp) + half * kMatrices * Sizes::kNarrowColumn;
    const uint64_t weights = matrix_descriptor(weights_of(buffer), kRowBytes);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) settle(acc[m]);
    stream_products<kMatrices * 4>(
        a,
        [&](uint32_t (&words)[4], int i) {
          load_transposed(words, from + i / 2 * Sizes::kNarrowColumn + i % 2 * kWarp * Sizes::kNarrowRow);
        },
        [](uint32_t x, uint32_t y, NarrowOperand& own) { widen_latents<Kv>(x, y, own); },
        [&](const NarrowOperand& own, int i) {
          multiply_keys(acc[i / 4], own[0], own[1], own[2], own[3], advance(weights, i % 4 * 32), 1);
        });
  }

  // Multiplies the sums of rows whose reference scores have moved with a tile.
  PD_MEMBER void scale_rows(uint32_t buffer) {
    const NarrowPlace place;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      if (!control.moved[buffer][j / Sizes::kGroups]) continue;
      const float2 factor = *reinterpret_cast<const float2*>(&control.factor[buffer][place.row(j)]);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][4 * j + i] *= i % 2 == 0 ? factor.x : factor.y;
      }
    }
  }

  // Tile `n` of all that this block has scored, whose weights are in `buffer`.
  PD_MEMBER void add(uint32_t n, uint32_t buffer, int stage, NarrowOperand (&a)[kOperands]) {
    barrier_wait(shared_address(&control.ready[buffer]), n / Sizes::kWeightBuffers % 2);
    if (*reinterpret_cast<const uint32_t*>(control.moved[buffer]) != 0) scale_rows(buffer);
    add_values(stage_at(stage), buffer, a);
    finish_products();
    release(stage);
    barrier_arrive(shared_address(&control.weights_empty[buffer]));
  }

  // The stage of the tile before.
  PD_MEMBER int stage_before() const { return keys.stage == 0 ? Sizes::kStages - 1 : keys.stage - 1; }

  PD_MEMBER void add_tiles(const MlaWork& work) {
    NarrowOperand a[kOperands];
#pragma unroll 1
    for (int tile = work.tile; tile < work.tile_end; ++tile) {
      await_keys();
      if (count % 2 == half) {
        score_tile(stage_at(keys.stage), a);
        finish_products();
        give_scores();
        if (tile > work.tile) add(count - 1, 1 - half, stage_before(), a);
        add(count, half, keys.stage, a);
      }
      keys.advance();
      ++count;
    }
    if (work.tile_end > work.tile && count % 2 == half) add(count - 1, 1 - half, stage_before(), a);
  }

  // ---- The end of a row ----

  // Where latents 2 g and 2 g + 1 of row e of the first two, and of the row 8 below, are in a partial: see mla_sums().
  // Those of other rows and matrices are in_partial(j, m) further, where j is even.
  PD_MEMBER float4* first_in_partial(int64_t partial, const NarrowPlace& place, int e) const {
    return mla_sums(call, partial, half) + (2 * place.warp + place.g / 4) * kWarpgroup + (2 * place.t + e) * 4 +
           place.g % 4;
  }
  static PD_MEMBER int in_partial(int j, int m) { return 8 * m * kWarpgroup + j / 2 * kWarp; }

  // Nobody reads the sums of rows that do not exist.
  PD_MEMBER void write_partial(const MlaWork& work, const float2& ml) const {
    const int64_t partial = mla_partial(call, blockIdx.x, blockIdx.y, work.first);
    const NarrowPlace place;
    const int own = place.thread;
    if (half == 0 && own < kRows && row_of_item(own) < work.item.rows) call.ml[partial * MlaSizes::kRows + own] = ml;
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (row_of_item(place.row(j) + e) >= work.item.rows) continue;
        float4* const sums = first_in_partial(partial, place, e);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          const float* const first = &acc[m][4 * j + e];
          sums[in_partial(j, m)] = make_float4(first[0], first[2], first[4], first[6]);
        }
      }
    }
    if (!work.two_partials) return;  // only the other kernel reads it
    meet_own();
    if (own == 0) publish_word(mla_published(call, partial, half), launch_number());
  }

  // Adds the one partial that is behind this block's keys to this half of the rows.
  PD_MEMBER void add_partial(const MlaWork& work, float2& ml) {
    const int64_t partial = mla_partial(call, static_cast<int>(blockIdx.x) - 1, blockIdx.y, false);
    const NarrowPlace place;
    const int own = place.thread;
    if (own == 0) {
      // With the first half come (m, l), which both consumers need.
      await_word(mla_published(call, partial, 0), launch_number());
      if (half == 1) await_word(mla_published(call, partial, 1), launch_number());
    }
    meet_own();
    if (own < kRows && row_of_item(own) < work.item.rows) {
      const float2 other = load_shared_by_blocks(call.ml + partial * MlaSizes::kRows + own);
      const float top = fmaxf(ml.x, other.x), shift = top == -INFINITY ? 0.f : top;
      const float mine = fast_exp2(ml.x - shift), theirs = fast_exp2(other.x - shift);
      control.own_factor[half][own] = mine;
      control.other_factor[half][own] = theirs;
      ml = make_float2(top, ml.y * mine + other.y * theirs);
    }
    meet_own();
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = place.row(j) + e;
        if (row_of_item(row) >= work.item.rows) continue;
        const float mine[2] = {control.own_factor[half][row], control.own_factor[half][row + 8]};
        const float theirs[2] = {control.other_factor[half][row], control.other_factor[half][row + 8]};
        const float4* const other = first_in_partial(partial, place, e);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          const float4 sums = load_shared_by_blocks(other + in_partial(j, m));
          float* const first = &acc[m][4 * j + e];
          first[0] = first[0] * mine[0] + sums.x * theirs[0];
          first[2] = first[2] * mine[0] + sums.y * theirs[0];
          first[4] = first[4] * mine[1] + sums.z * theirs[1];
          first[6] = first[6] * mine[1] + sums.w * theirs[1];
        }
      }
    }
  }

  // Writes this half of the rows.
  PD_MEMBER void write_rows(const MlaWork& work, const float2& ml) {
    const NarrowPlace place;
    const int own = place.thread;
    if (own < kRows) {
      const bool exists = row_of_item(own) < work.item.rows;
      control.target[half][own] = -1;
      if (exists) {
        const RowTarget target = row_target(p, call, work.item, work.head, row_of_item(own));
        control.target[half][own] = target.out;
        control.last_factor[half][own] = finish_row(p, target, work.item.b, work.head, ml.x, ml.y, half == 0);
      }
    }
    meet_own();
    const bool bf16 = p.q_dtype == DType::kBFloat16;
    uint16_t* const out = static_cast<uint16_t*>(p.out) + half * Sizes::kDimV + place.warp * 16 + place.g * 2;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t target = control.target[half][place.row(j) + e];
        const float factor = control.last_factor[half][place.row(j) + e];
        if (target < 0) continue;
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          const float x = acc[m][4 * j + e] * factor, y = acc[m][4 * j + 2 + e] * factor;
          *reinterpret_cast<uint32_t*>(out + target + m * 64) = bf16 ? pack_pair<true>(x, y) : pack_pair<false>(x, y);
        }
      }
    }
  }

  PD_MEMBER void run() {
    // Where queries can be asked for before there is work, they are, by the code that all others take: it is long, and
    // a second copy of it would come from memory too.
    for (bool ahead = control.expected.x >= 0;; ahead = false) {
      const MlaWork* const work = ahead ? nullptr : next();
      if (!ahead && !work) return;
      const Item item = ahead ? expected_item(p, call, control.expected.x) : work->item;
      const int head = ahead ? control.expected.y : work->head;
      if (ahead || !work->asked) {
        if (p.q_dtype == DType::kBFloat16) {
          copy_narrow_queries<Sizes, true>(p, call, item, head, control, shared);
        } else {
          copy_narrow_queries<Sizes, false>(p, call, item, head, control, shared);
        }
      }
      if (ahead) continue;
      describe_rows<Sizes, kFull>(p, call, *work, control);
      barrier_meet(shared_address(&control.meet), 0);
#pragma unroll
      for (int i = 0; i < kMatrices * kRows / 2; ++i) acc[i / (kRows / 2)][i % (kRows / 2)] = 0.f;
      add_tiles(*work);
      barrier_meet(shared_address(&control.meet), 1);
      float2 ml = control.ml[NarrowPlace().thread % kRows];
      if (!work->first || (work->behind > 0 && !work->two_partials)) {
        write_partial(*work, ml);
      } else {
        if (work->two_partials) add_partial(*work, ml);
        write_rows(*work, ml);
      }
      release_work();
    }
  }
};

template <typename Sizes>
PD_DEVICE void init_narrow_barriers(const MlaCall& call, NarrowControl<Sizes>& control) {
  for (int i = 0; i < Sizes::kStages; ++i) {
    barrier_init(shared_address(&control.keys_full[i]), Sizes::kLoaders * kWarp);
    barrier_init(shared_address(&control.keys_empty[i]), Sizes::kConsumerWarps * call.cluster);
    barrier_init(shared_address(&control.edge[i]), 1);
  }
  barrier_init(shared_address(&control.scores_full), kWarpgroup);
  barrier_init(shared_address(&control.scores_empty), kWarpgroup);
  for (int i = 0; i < Sizes::kWeightBuffers; ++i)
    barrier_init(shared_address(&control.weights_empty[i]), kNarrowConsumers);
  init_work_barriers(control, Sizes::kLoaders, Sizes::kMeeting);
}

template <typename Kv, typename Sizes, bool kFull>
__global__ void __launch_bounds__(Sizes::kThreads, 1)
    narrow_mla_kernel(const __grid_constant__ Problem p, const __grid_constant__ MlaCall call) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  __shared__ NarrowControl<Sizes> control;
  // The same in every block of a cluster, as its copies go to the same place.
  const uint32_t shared = (shared_address(raw) + kBlockBytes - 1) & ~(kBlockBytes - 1u);
  if (threadIdx.x == 0) {
    init_narrow_barriers(call, control);
    prefetch_description(call.latents);
    prefetch_description(call.rope);
  }
  run_block<Sizes, NarrowLoader<Sizes>>(
      p, call, control, shared,
      [&](int consumer) {
        NarrowTiles<Kv, Sizes, kFull> tiles = {p, call, control};
        tiles.start(consumer, shared);
        tiles.run();
      },
      [&] {
        NarrowWeigher<Sizes, kFull> weigher = {p, call, control};
        weigher.start(shared);
        weigher.run();
      });
#endif
}

}  // namespace paged_attn
