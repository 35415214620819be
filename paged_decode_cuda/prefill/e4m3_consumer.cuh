// A consumer warpgroup of the prefill kernel whose operands are 8-bit. Its queries stay in registers, and it takes a
// tile of keys in one step or two; see transposer.cuh for the orders of keys and dimensions in the second product.
//
// The matrix unit adds 8-bit products with fewer bits than float32 has, and cuts off what it cannot hold: a sum over
// thousands of keys would come out too small. So it adds those of a few tiles only (kTilesOfSum). Then the sums are put
// away in shared memory, in float32, with those of the tiles before.
#pragma once

#include "e4m3_products.cuh"
#include "parts.cuh"

namespace paged_attn {

// What PrefillRows needs to know of a step.
template <typename Shape>
struct E4m3Step {
  using Type = typename Shape::Type;
  static constexpr int kKeys = Shape::kStepKeys;
};

template <typename Shape, bool kFull>
struct E4m3Consumer {
  static constexpr int kStepKeys = Shape::kStepKeys;
  using Weights = uint32_t[kStepKeys / 8];

  float s[kStepKeys / 2], acc[Shape::kDimV / 2];
  uint32_t query[Shape::kDim / 8];
  PrefillRows<E4m3Step<Shape>, kFull> rows;
  float factor[2];
  bool moved;
  float base_away[2];  // reference scores of the sums that were put away

  // 16 rows of this warp from `queries`, where those of the block lie.
  PD_MEMBER void load_query(uint32_t queries, int first_row) {
    const int lane = threadIdx.x % kWarp, row = first_row + lane % 16;
#pragma unroll
    for (int k = 0; k < Shape::kDim / 32; ++k) {
      load_matrices(queries + row * kRowBytes + ((2 * k + lane / 16) ^ row % 8) * 16, query[4 * k], query[4 * k + 1],
                    query[4 * k + 2], query[4 * k + 3]);
    }
  }

  // Issues scores = q k^T.
  PD_MEMBER void issue_scores(uint64_t keys) {
    settle(s);
    settle(query);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kDim / 32; ++k) {
      multiply_e4m3(s, query[4 * k], query[4 * k + 1], query[4 * k + 2], query[4 * k + 3], advance(keys, k * 32),
                    k > 0);
    }
    products_commit();
  }

  // Issues acc += weights v.
  PD_MEMBER void issue_values(Weights& weights, uint64_t values) {
    rescale();
    settle(acc);
    settle(weights);
    products_begin();
#pragma unroll
    for (int k = 0; k < kStepKeys / 32; ++k) {
      multiply_e4m3(acc, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                    advance(values, k * 32), 1);
    }
    products_commit();
  }

  // Takes the sums to references that have moved since.
  PD_MEMBER void rescale() {
    if (moved) {
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] *= factor[i / 2 % 2];
    }
    moved = false;
  }

  // Adds what was put away at `place`.
  PD_MEMBER void fetch(uint32_t place) {
    rescale();
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) f[r] = fast_rescale(base_away[r], rows.base[r]);
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 8; ++i) {
      float4 x;
      load_sums(place + i * kWarpgroup * 16, x);
      acc[4 * i] = fmaf(x.x, f[0], acc[4 * i]);
      acc[4 * i + 1] = fmaf(x.y, f[0], acc[4 * i + 1]);
      acc[4 * i + 2] = fmaf(x.z, f[1], acc[4 * i + 2]);
      acc[4 * i + 3] = fmaf(x.w, f[1], acc[4 * i + 3]);
    }
  }

  // Puts the sums away, with what is there unless they are the `first`.
  PD_MEMBER void put_away(uint32_t place, bool first) {
    if (first) {
      rescale();
    } else {
      fetch(place);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) base_away[r] = rows.base[r];
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 8; ++i)
      store_sums(place + i * kWarpgroup * 16, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] = 0.f;
  }

  // From q.k to weights. Where a reference moves, rescale() does the sums: a product may be on its way to them.
  PD_MEMBER void weigh(const Problem& p, const Item& item, int first_key) {
    rows.score(p, s, first_key);
    if (first_key + kStepKeys > item.inner_end || first_key < item.inner_begin) rows.mask(s, first_key);
    moved = rows.move_base(s, factor);
    rows.weigh(s);
  }

  // Weights as operands of the second product: of two blocks of 8 keys, two neighbours each.
  PD_MEMBER void pack(Weights& weights) const {
#pragma unroll
    for (int i = 0; i < kStepKeys / 8; ++i) {
      const int at = i / 2 * 8 + i % 2 * 2;
      weights[i] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
  }

  // Sums of dimensions 16 i + 4 t ... + 3 of row g + 8 r.
  PD_MEMBER float4 sums(int r, int i) const {
    return make_float4(acc[8 * i + 2 * r], acc[8 * i + 4 + 2 * r], acc[8 * i + 1 + 2 * r], acc[8 * i + 5 + 2 * r]);
  }

  // Writes the rows of a warp in bfloat16, or leaves them for the combine kernel.
  PD_MEMBER void store(const Problem& p, const PrefillCall& plan, const Work& work, int first_row) {
    const Item& item = work.item;
    const int t = threadIdx.x % 4;
    const int first_token = p.cu_seqlens_q ? item.q_begin : item.b * static_cast<int>(p.max_q_len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + r * 8;
      const float l = row_sum(rows.l[r]);
      if (row >= item.rows) continue;
      const RowTarget target = row_target(p, plan, item, work.head, row);
      if (plan.parts > 1) {
        const int token = plan.group.divide(item.first_row + row);
        const int64_t place = part_row(p, plan, work.part, first_token + token, target.q_head);
        if (t == 0) plan.ml[place] = make_float2(rows.base[r], l);
#pragma unroll
        for (int i = 0; i < Shape::kDimV / 16; ++i) {
          const int dim = i * 16 + t * 4;
          if (dim < p.head_dim_v) *reinterpret_cast<float4*>(plan.sums + place * p.head_dim_v + dim) = sums(r, i);
        }
        continue;
      }
      const float normalizer = finish_row(p, target, item.b, work.head, rows.base[r], l, t == 0);
      uint16_t* const out = static_cast<uint16_t*>(p.out) + target.out;
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 16; ++i) {
        const int dim = i * 16 + t * 4;
        const float4 x = sums(r, i);
        if (dim < p.head_dim_v)
          *reinterpret_cast<uint2*>(out + dim) = make_uint2(pack_pair<true>(x.x * normalizer, x.y * normalizer),
                                                            pack_pair<true>(x.z * normalizer, x.w * normalizer));
      }
    }
  }
};

template <typename Shape, bool kFull>
PD_DEVICE void consume_e4m3(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control,
                            uint32_t shared) {
  constexpr int kStepKeys = Shape::kStepKeys, kSteps = Shape::kKeys / kStepKeys;  // of a tile
  const int consumer = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) - 1, lane = threadIdx.x % kWarp;
  const int warp_row = consumer * 64 + threadIdx.x / kWarp % 4 * 16;
  const uint64_t first_keys = matrix_descriptor(shared + Shape::kKeysAt, kRowBytes);
  const uint64_t first_values = matrix_descriptor(shared + Shape::kTransposedAt, kRowBytes);
  Ring<Shape::kKeyStages> keys;
  Ring<Shape::kTransposedStages> values;
  Ring<2> slot;
  Ring<Shape::kQueryStages> queries;
  E4m3Consumer<Shape, kFull> own;
  typename E4m3Consumer<Shape, kFull>::Weights weights;

  auto release = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const bool gathered = plan.box_rows == 0;
  auto await = [&](uint64_t& barrier, uint32_t phase) {
    barrier_wait(shared_address(&barrier), phase);
    if (gathered) fence_async_proxy();
  };
  const int thread = consumer * Shape::kDimV / 8 * kWarpgroup + threadIdx.x % kWarpgroup;
  const uint32_t sums = shared + Shape::kSumsAt + thread * 16;  // piece i is kWarpgroup * i pieces further
  auto keys_of = [&](int step) {
    return advance(first_keys, keys.stage * Shape::kKeyBytes + step * kStepKeys * kRowBytes);
  };
  auto values_of = [&](int step) {
    return advance(first_values, values.stage * Shape::kTransposedBytes + step * kStepKeys);
  };
  auto release_keys = [&]() {
    release(control.keys_empty[keys.stage]);
    keys.advance();
  };
  auto release_values = [&]() {
    release(control.transposed_empty[values.stage]);
    values.advance();
  };

  while (true) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const Work& work = control.work[slot.stage];  // read again where it is needed: registers are scarce
    if (!work.exists) break;
    await(control.queries_full[queries.stage], queries.phase);
    const int last_tile = work.item.first_tile;
    int tile = last_tile + work.item.tiles - 1;
    own.load_query(shared + queries.stage * Shape::kQueryBytes, warp_row);
    __syncwarp();
    release(control.queries_empty[queries.stage]);
    queries.advance();
    if (consumer * 64 >= work.item.rows) {
      // No row for this warpgroup: it only lets the stages pass.
#pragma unroll 1
      for (; tile >= last_tile; --tile) {
        await(control.keys_full[keys.stage], keys.phase);
        release_keys();
        await(control.transposed_full[values.stage], values.phase);
        release_values();
      }
      __syncwarp();
      release(control.work_empty[slot.stage]);
      slot.advance();
      continue;
    }
    own.rows.start(p, plan, work, warp_row + lane / 4);
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 2; ++i) own.acc[i] = 0.f;
    own.moved = false;
    int until = Shape::kTilesOfSum;  // the sums are put away
    bool first = true;
    // From step kFrom of a tile, whose weights are there, to the one before it: kTo of this tile or of the next one.
    auto step = [&]<int kFrom, int kTo>() {
      if (kTo == kSteps - 1) await(control.keys_full[keys.stage], keys.phase);
      own.issue_scores(keys_of(kTo));
      if (kFrom == kSteps - 1) await(control.transposed_full[values.stage], values.phase);
      own.issue_values(weights, values_of(kFrom));
      products_wait<1>();
      settle(own.s);
      if (kTo == 0) release_keys();
      own.weigh(p, work.item, tile * Shape::kKeys + kTo * kStepKeys);
      products_wait<0>();
      settle(own.acc);
      settle(weights);
      own.pack(weights);
      if (kFrom > 0) return;
      release_values();
      if (--until > 0) return;
      own.put_away(sums, first);
      first = false;
      until = Shape::kTilesOfSum;
    };
    if (tile >= last_tile) {
      await(control.keys_full[keys.stage], keys.phase);
      own.issue_scores(keys_of(kSteps - 1));
      products_wait<0>();
      settle(own.s);
      if (kSteps == 1) release_keys();
      own.weigh(p, work.item, tile * Shape::kKeys + (kSteps - 1) * kStepKeys);
      own.pack(weights);
#pragma unroll 1
      while (true) {
        if constexpr (kSteps == 2) step.template operator()<1, 0>();
        if (--tile < last_tile) break;
        step.template operator()<0, kSteps - 1>();
      }
      if (kSteps == 1) await(control.transposed_full[values.stage], values.phase);
      own.issue_values(weights, values_of(0));
      products_wait<0>();
      settle(own.acc);
      release_values();
      if (!first) own.fetch(sums);
    }
    own.store(p, plan, work, warp_row + lane / 4);
    __syncwarp();
    release(control.work_empty[slot.stage]);
    slot.advance();
  }
}

}  // namespace paged_attn
