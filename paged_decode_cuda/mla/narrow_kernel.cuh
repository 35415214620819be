// Multi-head latent attention with 8-bit caches, on Hopper's matrix unit.
//
// A product may have one operand in registers, and for it the keys are chosen: they are widened to fp16 on their way
// from shared memory to registers, and nothing is written back. So both products are turned around.
//
//     scores^T [64 keys, 64 rows]      = keys [64, 576]        q^T [576, 64]         keys in registers
//     sums^T   [256 latents, 64 rows] += latents^T [256, 64]   weights^T [64, 64]    latents in registers
//
// Requests of up to 32 rows have blocks of 32 rows: the same with 32 in place of 64, and four tiles of keys.
//
// fp16 holds every value of both formats exactly. q comes as fp16 too: each row is multiplied by the power of two that
// brings its largest number to 2^14 or above, and the inverse goes into the scale of its scores. What is lost is below
// 2^-28 of the largest number of the row.
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

#include "../matrices.cuh"
#include "../prefill/weights.cuh"
#include "narrow_weigher.cuh"

namespace paged_attn {

constexpr int kNarrowConsumers = NarrowMlaSizes::kConsumers * kWarpgroup;

// ---- Queries ----

// 16 values each; the last are those of the rotary part.
constexpr int kNarrowOwn = NarrowMlaSizes::kLatents / 16 / kCopyLanes + 1;
using QueryWords = uint32_t[kNarrowOwn][8];

// A row of this block, or the last one that exists in its place.
struct NarrowRow {
  QueryRow query;
  bool exists;
};

template <typename Sizes>
PD_DEVICE NarrowRow narrow_row(const Problem& p, const MlaCall& call, const Item& item, int head, int row) {
  const int own = static_cast<int>(blockIdx.y) * Sizes::kRows + row;
  return {query_row(p, call, item, head, min(own, item.rows - 1)), own < item.rows};
}

// This lane's part of a row of queries.
template <typename Sizes>
PD_DEVICE void load_narrow_query(const Problem& p, const MlaCall& call, const Item& item, int head, int row,
                                 QueryWords& words) {
  const int place = this_thread() % kCopyLanes;
  const NarrowRow own = narrow_row<Sizes>(p, call, item, head, row);
  const int64_t rope = q_offset(p, item, own.query), latents = qv_offset(p, item, own.query);
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
    const bool last = i == kNarrowOwn - 1;
    const char* const from = last ? static_cast<const char*>(p.q) + rope * 2
                                  : static_cast<const char*>(p.qv.data) + latents * 2 + i * kCopyLanes * 32;
    const bool has = own.exists && (!last || place < Sizes::kRope / 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 piece = has ? reinterpret_cast<const uint4*>(from + place * 32)[h] : make_uint4(0, 0, 0, 0);
      words[i][4 * h] = piece.x;
      words[i][4 * h + 1] = piece.y;
      words[i][4 * h + 2] = piece.z;
      words[i][4 * h + 3] = piece.w;
    }
  }
}

// Stores it as fp16, multiplied by 2^up; up is returned. A product takes keys in the order in which a thread has them:
// of 16 dims these are 0, 1, 4, 5, 8, 9, 12, 13, then the others. So q is stored in that order.
template <typename Sizes, bool kBf16>
PD_DEVICE int store_narrow_query(const QueryWords& words, int row, uint32_t queries) {
  constexpr int kTop = 127 + 14;  // exponent of what the largest value becomes
  const unsigned place = this_thread() % kCopyLanes;
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      const float2 values = pair_values<kBf16>(words[i][w]);
      top = fmaxf(top, fmaxf(fabsf(values.x), fabsf(values.y)));
    }
  }
#pragma unroll
  for (int step = 1; step < kCopyLanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  // Both 127 + up and 127 - up are exponents of a normal number: up is at least 141 - 255.
  const int up = min(max(kTop - static_cast<int>(__float_as_uint(top) >> 23), -126), 100);
  const float factor = __uint_as_float(static_cast<uint32_t>(127 + up) << 23);
  const auto scaled = [factor](uint32_t word) {
    const float2 values = pair_values<kBf16>(word);
    return pack_pair<false>(values.x * factor, values.y * factor);
  };
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
    if (i == kNarrowOwn - 1 && place >= Sizes::kRope / 16) continue;
    const unsigned unit = i * kCopyLanes + place, piece = unit % 4 * 2;  // 4 of them in a column
    const uint32_t target = queries + unit / 4 * Sizes::kRows * kRowBytes + row * kRowBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_piece(target + ((piece + h) ^ row % 8) * 16, scaled(words[i][h]), scaled(words[i][h + 2]),
                  scaled(words[i][h + 4]), scaled(words[i][h + 6]));
    }
  }
  return up;
}

// Both consumers bring the queries of this block's rows of an item.
template <typename Sizes, bool kBf16>
PD_DEVICE void copy_narrow_queries(const Problem& p, const MlaCall& call, const Item& item, int head,
                                   NarrowControl<Sizes>& control, uint32_t queries) {
  constexpr int kAtOnce = kNarrowConsumers / kCopyLanes, kOwnRows = Sizes::kRows / kAtOnce;
  const unsigned thread = this_thread() - kWarpgroup;
  const float natural = score_scale(p, item.b, head);
  QueryWords words[kOwnRows];
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r)
    load_narrow_query<Sizes>(p, call, item, head, thread / kCopyLanes + r * kAtOnce, words[r]);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const unsigned row = thread / kCopyLanes + r * kAtOnce;
    const int up = store_narrow_query<Sizes, kBf16>(words[r], row, queries);
    if (thread % kCopyLanes == 0) control.scale[row] = natural * __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
  }
  fence_async_proxy();
}

// Tells the weigher what it has to know of the rows. Each thread describes one row.
template <typename Sizes, bool kFull>
PD_DEVICE void describe_rows(const Problem& p, const MlaCall& call, const MlaWork& work,
                             NarrowControl<Sizes>& control) {
  const int row = this_thread() - kWarpgroup;
  if (row >= Sizes::kRows) return;
  const Item& item = work.item;
  const NarrowRow own = narrow_row<Sizes>(p, call, item, work.head, row);
  const KvRange seen = row_keys(p, call, item, own.query.token);
  control.seen[row] = make_int2(static_cast<int>(seen.begin), static_cast<int>(seen.end));
  if constexpr (kFull) {
    control.slope[row] = row_slope(p, item.b, own.query.q_head);
    control.position[row] = item.kv_len - item.q_len + own.query.token;
  }
}

// ---- Operands ----

// As fp8_pair_to_fp16(), which the compiler gives the upper half shifted down: here every instruction counts.
template <typename Kv, bool kHigh>
PD_DEVICE uint32_t widen_half(uint32_t word) {
#if __CUDA_ARCH__ >= 890
  if constexpr (__is_same(Kv, E4m3)) {
    uint32_t pair;
    if constexpr (kHigh) {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
          : "=r"(pair)
          : "r"(word));
    } else {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
          : "=r"(pair)
          : "r"(word));
    }
    return pair;
  }
#endif
  return fp8_pair_to_fp16<Kv, kHigh>(word);
}

// The left operand of a product.
using NarrowOperand = uint32_t[4];

// A word has dims 4 t to 4 t + 3 of a key: x of key g, y of key g + 8.
template <typename Kv>
PD_DEVICE void widen_keys(uint32_t x, uint32_t y, NarrowOperand& a) {
  a[0] = widen_half<Kv, false>(x);
  a[1] = widen_half<Kv, false>(y);
  a[2] = widen_half<Kv, true>(x);
  a[3] = widen_half<Kv, true>(y);
}

// A word has latents 2 g and 2 g + 1 of key 2 t, then of the next one; y: 8 keys further. Latents 2 g become rows g of
// the operand, the others rows g + 8.
template <typename Kv>
PD_DEVICE void widen_latents(uint32_t x, uint32_t y, NarrowOperand& a) {
  if constexpr (__is_same(Kv, E5m2)) {  // the upper byte of an fp16
    a[0] = __byte_perm(x, 0, 0x2404);
    a[1] = __byte_perm(x, 0, 0x3414);
    a[2] = __byte_perm(y, 0, 0x2404);
    a[3] = __byte_perm(y, 0, 0x3414);
    return;
  }
  const uint32_t first = __byte_perm(x, 0, 0x3120), second = __byte_perm(y, 0, 0x3120);
  a[0] = widen_half<Kv, false>(first);
  a[1] = widen_half<Kv, true>(first);
  a[2] = widen_half<Kv, false>(second);
  a[3] = widen_half<Kv, true>(second);
}

// ---- Consumers ----

// Where a thread stands in its consumer. Found again by each step: across them registers are scarce.
struct NarrowPlace {
  unsigned thread, warp, lane;
  unsigned g, t;  // of the lane, see NarrowTiles

  PD_MEMBER NarrowPlace() {
    thread = static_cast<unsigned>(this_thread()) % kWarpgroup;
    warp = thread / kWarp;
    lane = thread % kWarp;
    g = lane / 4;
    t = lane % 4;
  }

  PD_MEMBER int key() const { return warp * 16 + g; }       // of a tile; the other one is 8 further
  PD_MEMBER int row(int j) const { return 8 * j + t * 2; }  // of the block, and the next one
};

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

  // `kSteps` products, one after the other. An operand is widened while two products run, from words that were loaded
  // two to four products before; load(words, i) brings those of products 2 i and 2 i + 1. The fence of a product stands
  // before the wait for an earlier one: else the compiler moves all that is to be widened behind that wait. The last
  // products may still be on their way at the end.
  template <int kSteps, typename Load, typename Widen, typename Multiply>
  static PD_MEMBER void stream(NarrowOperand (&a)[kOperands], Load load, Widen widen, Multiply multiply) {
    uint32_t words[2][4];
    load(words[0], 0);
    load(words[1], 1);
    widen(words[0][0], words[0][1], a[0]);
    settle(a[0]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      multiply(a[i % kOperands], i);
      products_commit();
      if (i + 1 < kSteps) {
        const int next = i + 1, pair = next / 2;
        uint32_t (&own)[4] = words[pair % 2];
        widen(own[next % 2 * 2], own[next % 2 * 2 + 1], a[next % kOperands]);
        settle(a[next % kOperands]);
        products_begin();
        if (next % 2 == 1 && pair + 2 < kSteps / 2) load(own, pair + 2);
      }
      products_wait<1>();
      settle(a[(i + 2) % kOperands]);
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
    stream<Sizes::kDim / 16>(
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
    stream<kMatrices * 4>(
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
