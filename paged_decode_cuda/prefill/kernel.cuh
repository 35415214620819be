// Attention of many rows on Hopper's matrix unit (wgmma): a persistent kernel of producer and consumer warps.
//
// A block has a producer warpgroup, which copies keys and values into rings of tiles, two to four consumer warpgroups
// of 64 rows each (a row is a token and one head of the kv_head's group), and the director, a warp that finds the next
// tile of rows and brings its queries. A consumer issues the product q.k of a tile, then the product of the weights of
// the tile before with its values. It computes the weights of the tile while the latter, or the products of the other
// consumers, run (four of them fill each other's waits without that). Three consumers take turns at issuing, and two
// with head_dim up to 64 or above 128. Blocks stay and take tile of rows after tile of rows; keys go from the last one
// to the first one.
//
// To read next: shape.cuh (messages and barriers), weights.cuh (online softmax), loader.cuh (producers, the director),
// schedule.cuh (the tile scheduler). docs/cuda/prefill.md says why it is so.
#pragma once

#include "e4m3_consumer.cuh"
#include "loader.cuh"
#include "partials.cuh"
#include "score_again.cuh"
#include "transposer.cuh"

namespace paged_attn {

// Writes the rows of a warp.
template <typename Shape, bool kFull, bool kBf16>
PD_DEVICE void store_rows(const Problem& p, const PrefillCall& plan, const Work& work,
                          const float (&acc)[Shape::kDimV / 2], const PrefillRows<Shape, kFull>& rows, int first_row) {
  const Item& item = work.item;
  const OwnRow own(rows, first_row);
  RowTarget target = {};
  float factor = 0.f;
  if (own.row < item.rows) {
    target = row_target(p, plan, item, work.head, own.row);
    factor = finish_row(p, target, item.b, work.head, own.base, own.sum, own.speaks());
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t out = OwnRow::told(target.out, r);
    store_row<kBf16>(acc, r, OwnRow::told(factor, r), static_cast<uint16_t*>(p.out) + out,
                     first_row + r * 8 < item.rows, p.head_dim_v);
  }
}

template <typename Shape, bool kFull>
PD_DEVICE void consume(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  const int consumer = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) - 1,
            other = consumer + 1 < Shape::kConsumers ? consumer + 1 : 0;
  const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
  const int first_row = consumer * 64 + warp * 16 + lane / 4;
  const uint64_t first_queries = matrix_descriptor(shared + consumer * 64 * kRowBytes, kRowBytes);
  const uint64_t first_keys = matrix_descriptor(shared + Shape::kKeysAt, kRowBytes);
  const uint64_t first_values = matrix_descriptor(shared + Shape::kValuesAt, Shape::kKeys * kRowBytes);
  Ring<Shape::kKeyStages> keys;
  Ring<Shape::kValueStages> values;
  Ring<2> slot;
  Ring<Shape::kQueryStages> queries;
  float s[Shape::kKeys / 2], acc[Shape::kDimV / 2];
  uint32_t weights[Shape::kKeys / 4];
  PrefillRows<Shape, kFull> rows;

  auto release = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const bool gathered = !Shape::kNarrow && plan.box_rows == 0;
  auto await = [&](uint64_t& barrier, uint32_t phase) {
    barrier_wait(shared_address(&barrier), phase);
    if (gathered) fence_async_proxy();
  };
  // With ALiBi weights take so long that two consumers would often compute theirs at the same time.
  const bool takes_turns = Shape::kTurns || (kFull && Shape::kOverlaps && p.alibi_slopes);
  // The last consumer gives the first one its first turn.
  if (takes_turns && consumer + 1 == Shape::kConsumers) named_barrier_arrive(kTurn, 2 * kWarpgroup);

  while (true) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const Work& work = control.work[slot.stage];  // read again where it is needed: registers are scarce
    if (!work.exists) break;
    await(control.queries_full[queries.stage], queries.phase);
    const int last_tile = work.item.first_tile;  // tiles go from the last keys to the first
    if (consumer * 64 >= work.item.rows) {
      // No row for this warpgroup: it only lets the stages pass.
      release(control.queries_empty[queries.stage]);
      queries.advance();
#pragma unroll 1
      for (int i = work.item.tiles; i > 0; --i) {
        await(control.keys_full[keys.stage], keys.phase);
        release(control.keys_empty[keys.stage]);
        keys.advance();
        await(control.values_full[values.stage], values.phase);
        release(control.values_empty[values.stage]);
        values.advance();
      }
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();
      continue;
    }
    const uint64_t own_queries = advance(first_queries, queries.stage * Shape::kQueryBytes);
    const bool turns = takes_turns && work.item.rows > 64 * (Shape::kConsumers - 1);  // everybody has rows
    if constexpr (Shape::kGathersFirst) {
      if (work.gathers) {
        const int first = consumer * 64 + warp * 16;
        copy_queries<Shape>(p, plan, work, shared + queries.stage * Shape::kQueryBytes, first, first + 16);
        await_pieces();
        fence_async_proxy();
        named_barrier_sync(kTurn + Shape::kConsumers + consumer, kWarpgroup);
      }
    }
    rows.start(p, plan, work, first_row, work.care == Work::kRepeated);
    if constexpr (Shape::kNarrow) {
      narrow_queries<Shape>(p, shared + queries.stage * Shape::kQueryBytes, consumer * 64 + warp * 16, rows.divisor);
      fence_async_proxy();
      named_barrier_sync(kTurn + Shape::kConsumers + consumer, kWarpgroup);
    }
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] = 0.f;
    const int inner_begin = work.item.inner_begin, inner_end = work.item.inner_end;
    int tile = last_tile + work.item.tiles - 1;

    float factor[2], sum[2] = {0.f, 0.f};
    // lost: sums may not be what they should, so that this work is to be done once more.
    bool moved = false, have_bases = false, lost = false;
    auto do_again = [&]() {
      if (work.care != Work::kRepeated) control.again[slot.stage] = true;
    };
    auto move_base = [&]() {
      moved = rows.move_base(s, factor);
      if (!moved) return;
      // To ask at once costs two consumers of head_dim 64 up to 8 %, to ask at the end costs four 1 %.
      if constexpr (Shape::kOverlaps) {
        lost |= rows.is_far_out();
      } else if (rows.is_far_out()) {
        do_again();
      }
    };
    auto finish_scores = [&]() {
      const int first_key = tile * Shape::kKeys;
      rows.score(p, s, first_key);
      if (first_key + Shape::kKeys > inner_end || first_key < inner_begin) rows.mask(s, first_key);
    };
    auto prepare = [&]() {
      finish_scores();
      if (Shape::kMovesLate && have_bases) {
        moved = rows.move_base_late(sum, factor, lost);
      } else {
        move_base();
        if (Shape::kMovesLate) have_bases = work.care == Work::kQuick && rows.have_bases();
      }
    };
    auto weigh = [&]() {
      rows.weigh(s, sum);
      rows.add(sum);
    };
    auto rescale = [&]() {
      if (!moved) return;
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] *= factor[i / 2 % 2];
    };

    auto keys_of_stage = [&]() { return made_now(advance(first_keys, keys.stage * Shape::kKeyBytes)); };
    auto values_of_stage = [&]() { return made_now(advance(first_values, values.stage * Shape::kValueBytes)); };
    auto score = [&]() {
      const uint64_t tile_keys = keys_of_stage();
      await(control.keys_full[keys.stage], keys.phase);
      settle(s);
      products_begin();
      issue_scores<Shape>(s, own_queries, tile_keys);
      products_commit();
      products_wait<0>();
      settle(s);
    };
    auto release_keys = [&]() {
      release(control.keys_empty[keys.stage]);
      keys.advance();
    };
    auto add_values = [&]() {
      const uint64_t tile_values = values_of_stage();
      await(control.values_full[values.stage], values.phase);
      settle(acc);
      settle(weights);
      products_begin();
      issue_values<Shape>(acc, weights, tile_values);
      products_commit();
      products_wait<0>();
      settle(acc);
      release(control.values_empty[values.stage]);
      values.advance();
    };

    if constexpr (!Shape::kOverlaps) {
      // Once all rows have a reference score, a tile is not searched for its largest score first: the sums of its
      // weights tell when some are too large. Then this warp computes its scores again.
      auto weigh_and_pack = [&]() {
        rescale();
        rows.weigh(s, sum);
        pack_weights<kBf16>(s, weights);
      };
#pragma unroll 1
      for (; tile >= last_tile; --tile) {
        score();
        finish_scores();
        const bool guess = have_bases;
        moved = false;
        if constexpr (kBf16) {
          if (!guess) move_base();
          if (moved) have_bases = rows.have_bases();
        } else if (!guess) {
          // What a row sees of its first tile may be one key, far below those to come, and float16 has little room
          // above a reference. So one more tile is searched.
          have_bases = rows.have_bases();
          move_base();
        }
        weigh_and_pack();
        if (guess && rows.too_large(sum)) {
          const int warp_row = consumer * 64 + warp * 16;
          score_again<Shape>(s, shared + queries.stage * Shape::kQueryBytes + warp_row * kRowBytes,
                             shared + Shape::kKeysAt + keys.stage * Shape::kKeyBytes);
          finish_scores();
          move_base();
          weigh_and_pack();
        }
        rows.add(sum);
        release_keys();
        add_values();
      }
      release(control.queries_empty[queries.stage]);
      queries.advance();
    } else if (tile >= last_tile) {
      // Queries without a second stage are given back with their last scores.
      const auto end_scores = [&]() {
        release_keys();
        if (Shape::kQueryStages == 1 && tile == last_tile) release(control.queries_empty[queries.stage]);
      };
      // Each slot has a barrier of its own, as the first consumer may be one work ahead.
      const bool staggers = Shape::kStaggers && !takes_turns && work.item.rows > 64;
      if (staggers && consumer == 1) named_barrier_sync(kTurn + slot.stage, 2 * kWarpgroup);
      score();
      if (staggers && consumer == 0) named_barrier_arrive(kTurn + slot.stage, 2 * kWarpgroup);
      end_scores();
      prepare();
      weigh();
      pack_weights<kBf16>(s, weights);

#pragma unroll 1
      for (--tile; tile >= last_tile; --tile) {
        const uint64_t tile_keys = keys_of_stage();
        await(control.keys_full[keys.stage], keys.phase);
        if (turns) named_barrier_sync(kTurn + consumer, 2 * kWarpgroup);
        settle(s);
        settle(acc);
        settle(weights);
        products_begin();
        issue_scores<Shape>(s, own_queries, tile_keys);
        products_commit();
        rescale();
        const uint64_t tile_values = values_of_stage();
        await(control.values_full[values.stage], values.phase);
        products_begin();
        issue_values<Shape>(acc, weights, tile_values);
        products_commit();
        if (turns) named_barrier_arrive(kTurn + other, 2 * kWarpgroup);
        products_wait<1>();
        settle(s);
        end_scores();
        prepare();
        const auto end_values = [&]() {
          products_wait<0>();
          settle(acc);
          settle(weights);
          release(control.values_empty[values.stage]);
          values.advance();
        };
        if constexpr (Shape::kLateWait) {
          weigh();
          await_value(rows.l[0] + rows.l[1]);
          end_values();
        } else {
          // This frees the registers of the old weights, so that new ones are packed beside the exponentials.
          end_values();
          weigh();
        }
        pack_weights<kBf16>(s, weights);
      }
      if (Shape::kQueryStages > 1) release(control.queries_empty[queries.stage]);
      queries.advance();
      rescale();
      add_values();
      if (Shape::kMovesLate && have_bases) {
        moved = rows.move_base_late(sum, factor, lost);
        rescale();
      }
    } else {
      release(control.queries_empty[queries.stage]);
      queries.advance();
    }
    // The vote tells the compiler that the branch is uniform in a warp: it keeps the usual case close to the loop.
    if (__any_sync(~0u, work.cut)) {
      store_partial<Shape, kFull>(p, plan, work, acc, rows, first_row);
    } else if (Shape::kNarrow && out_dtype(p.q_dtype) == DType::kBFloat16) {
      store_rows<Shape, kFull, true>(p, plan, work, acc, rows, first_row);
    } else {
      store_rows<Shape, kFull, kBf16>(p, plan, work, acc, rows, first_row);
    }
    if (work.says_whole()) leave_out(p, plan, work, first_row);
    if (lost) do_again();
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
  }
}

// Sets up the mbarriers, by one thread. Which threads arrive at which barrier follows from who copies keys and values.
// askers: warps that ask for the boxes of a tile.
template <typename Shape>
PD_DEVICE void init_prefill_barriers(const PrefillCall& plan, PrefillControl<Shape>& control, int askers) {
  constexpr bool kTransposes = Shape::kTransposedStages > 0;
  const bool gathers = plan.box_rows == 0;
  int key_copiers = gathers ? Shape::kGatherers * kWarp : askers;
  int value_copiers = gathers ? key_copiers : kTransposes ? kWarp : Shape::kEdgeCopiers;
  int producers = (gathers ? Shape::kGatherers : askers + Shape::kEdgeCopiers) + kTransposes;
  if constexpr (Shape::kNarrow) {
    key_copiers = value_copiers = Shape::kKeys;  // the lanes of a warp arrive for its 32 rows
    producers = Shape::kWideners;
  }
  for (int i = 0; i < Shape::kKeyStages; ++i) {
    barrier_init(shared_address(&control.keys_full[i]), key_copiers);
    barrier_init(shared_address(&control.keys_empty[i]), Shape::kConsumerWarps);
  }
  for (int i = 0; i < Shape::kValueStages; ++i) {
    barrier_init(shared_address(&control.values_full[i]), value_copiers);
    barrier_init(shared_address(&control.values_empty[i]), kTransposes ? kWarp : Shape::kConsumerWarps);
  }
  if constexpr (kTransposes) {
    for (int i = 0; i < Shape::kTransposedStages; ++i) {
      barrier_init(shared_address(&control.transposed_full[i]), kWarp);
      barrier_init(shared_address(&control.transposed_empty[i]), Shape::kConsumerWarps);
    }
  }
  barrier_init(shared_address(&control.next_wanted), 1);
  for (int i = 0; i < 2; ++i) {
    control.again[i] = false;
    barrier_init(shared_address(&control.work_full[i]), 1);
    barrier_init(shared_address(&control.work_empty[i]), (Shape::kConsumerWarps + producers) * kWarp);
  }
  for (int i = 0; i < Shape::kQueryStages; ++i) {
    barrier_init(shared_address(&control.queries_full[i]), 1);
    barrier_init(shared_address(&control.queries_empty[i]), Shape::kConsumerWarps);
  }
  fence_async_proxy();
}

// Rows of the kernel that a tile of whole tokens leaves empty become zero, as no box brings them: whatever stood there
// would move the references of their warp. By all threads, of which each has a piece of a column.
template <typename Shape>
PD_DEVICE void clear_empty_rows(const PrefillCall& plan, uint32_t shared) {
  const uint32_t first = plan.tile_rows.divisor * kRowBytes + threadIdx.x * 16;
  if (first >= Shape::kRows * kRowBytes) return;
#pragma unroll 1
  for (int column = 0; column < Shape::kQueryStages * Shape::kColumns; ++column)
    store_piece(shared + column * Shape::kRows * kRowBytes + first, 0, 0, 0, 0);
  fence_async_proxy();
}

template <typename Shape, bool kFull>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    prefill_kernel(const __grid_constant__ Problem p, const __grid_constant__ PrefillCall plan) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  __shared__ PrefillControl<Shape> control;
  static_assert(Shape::kSharedBytes + sizeof(PrefillControl<Shape>) <= 227 * 1024, "there is room");
  const uint32_t shared = (shared_address(raw) + kBlockBytes - 1) & ~(kBlockBytes - 1u);
  const bool gathers = plan.box_rows == 0;
  const int askers = askers_of<Shape>(plan.box_rows);
  constexpr bool kTransposes = Shape::kTransposedStages > 0;
  if (threadIdx.x == 0) init_prefill_barriers<Shape>(plan, control, askers);
  clear_empty_rows<Shape>(plan, shared);
  __syncthreads();
  wait_for_predecessor();
  // `cut` becomes unknown before blocks of the combine kernel start, or they would read what an earlier call left. The
  // first thread that lets them start speaks for its whole block, so in this block only the thread that writes may. The
  // director stores the answer later.
  const bool writes = plan.looks_early && blockIdx.x == 0;
  if (writes && threadIdx.x < kWarp) {
    if (threadIdx.x == 0) store_relaxed(plan.cut, PrefillCall::kNotYetKnown);
    named_barrier_arrive(kCutUnknown, 2 * kWarp);
    __threadfence();
  }
  if (!writes || threadIdx.x == 0) let_successor_start();
  // By the four warps of the director's warpgroup.
  const auto survey = [&] {
    Scheduler<Shape> scheduler;
    const auto meet = [] { named_barrier_sync(kSurvey, kWarpgroup); };
    scheduler.survey(p, plan, control.known, control.next, threadIdx.x / kWarp % 4, 4, meet);
  };
  if (threadIdx.x < kWarpgroup) {
    give_registers<Shape::kProducerRegisters>();
    if constexpr (!Shape::kOwnDirector) survey();
    const int warp = threadIdx.x / kWarp;
    constexpr int kTransposer = 2, kDirector = 3;
    if (!Shape::kOwnDirector && warp == kDirector) {
      direct<Shape>(p, plan, control, shared);
    } else if (kTransposes && warp == kTransposer) {
      if constexpr (kTransposes) transpose_values<Shape>(control, shared);
    } else if constexpr (Shape::kNarrow) {
      widen_tiles<Shape>(p, plan, control, shared);
    } else if (gathers) {
      Gatherer<Shape> gatherer;
      gatherer.run(p, plan, control, shared, warp);
    } else if (warp < askers) {
      PrefillLoader<Shape, false>::run(p, plan, control, shared, warp, askers, askers);
    } else if (warp < askers + Shape::kEdgeCopiers) {
      PrefillLoader<Shape, true>::run(p, plan, control, shared, warp - askers, Shape::kEdgeCopiers, askers);
    }
  } else if (Shape::kOwnDirector && threadIdx.x >= (1 + Shape::kConsumers) * kWarpgroup) {
    give_registers<Shape::kProducerRegisters>();
    survey();
    if (threadIdx.x / kWarp == (1 + Shape::kConsumers) * kWarpgroup / kWarp) direct<Shape>(p, plan, control, shared);
  } else if (Shape::kNarrow && threadIdx.x >= (1 + Shape::kConsumers) * kWarpgroup) {
    give_registers<Shape::kProducerRegisters>();
    if constexpr (Shape::kNarrow) widen_tiles<Shape>(p, plan, control, shared);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    if constexpr (kTransposes) {
      consume_e4m3<Shape, kFull>(p, plan, control, shared);
    } else {
      consume<Shape, kFull>(p, plan, control, shared);
    }
  }
  clear_unclaimed(p);
#endif
}

}  // namespace paged_attn
