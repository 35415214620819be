// Attention of many rows on Hopper's matrix unit.
//
// A block has a producer warpgroup, which copies keys and values into a ring of tiles, and two consumer warpgroups of
// 64 rows each (a row is a token and one head of the kv_head's group). A consumer issues the product q.k of a tile,
// then the product of the weights of the tile before with its values, and computes the weights of the tile while the
// latter runs. The two consumers take turns at issuing, so that one's exponentials run under the other's products.
// Blocks stay and take tile of rows after tile of rows; keys go from the last one to the first one.
#pragma once

#include "loader.cuh"

namespace paged_attn {

// The rows of one consumer thread: two of them, g and g + 8 of its warp's 16, and in each the columns 8 j + 2 t and
// the next, where g = lane / 4 and t = lane % 4. Entry 4 j + 2 r + e of sums is row r, column 8 j + 2 t + e.
template <typename Shape, bool kFull>
struct PrefillRows {
  static constexpr int kKeys = Shape::kKeys;

  float base[2], l[2];   // reference score in log2 units, and this thread's part of the sum of weights
  int begin[2], end[2];  // keys that the row sees
  float scale;           // from what q.k gives to log2 units
  // kFull: the score is no multiple of q.k
  float natural_scale, slope[2];
  int q_pos[2];

  PD_MEMBER void start(const Problem& p, const PrefillCall& plan, const Work& work, int first_row) {
    const Item& item = work.item;
    natural_scale = score_scale(p, item.b, work.head);
    // Otherwise the largest score is not that of the largest q.k; see score().
    scale = !kFull && natural_scale > 0.f ? natural_scale * PD_LOG2E : PD_LOG2E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(first_row + r * 8, max(item.rows - 1, 0)), token = plan.group.divide(item.first_row + row);
      const KvRange seen = row_keys(p, plan, item, token);
      begin[r] = static_cast<int>(seen.begin);
      end[r] = static_cast<int>(seen.end);
      base[r] = -INFINITY;
      l[r] = 0.f;
      if constexpr (kFull) {
        q_pos[r] = item.kv_len - item.q_len + token;
        const int q_head =
            work.head * static_cast<int>(p.group) + item.first_row + row - token * static_cast<int>(p.group);
        slope[r] = row_slope(p, item.b, q_head);
      }
    }
  }

  PD_MEMBER void mask(float (&s)[kKeys / 2], int first_key) const {
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int from = begin[r] - column;
      const unsigned count = static_cast<unsigned>(end[r] - begin[r]);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          if (static_cast<unsigned>(8 * j + e - from) >= count) x = -INFINITY;
        }
    }
  }

  // From q.k to scores, where these are no positive multiples of it.
  PD_MEMBER void score(const Problem& p, float (&s)[kKeys / 2], int first_key) const {
    if constexpr (kFull) {
      const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int r = i / 2 % 2, key = column + i / 4 * 8 + i % 2;
        s[i] = pd_score(s[i], natural_scale, p.softcap, slope[r], fabsf(static_cast<float>(q_pos[r] - key)));
      }
    } else if (!(natural_scale > 0.f)) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] *= natural_scale;
    }
  }

  // From scores of the tile to weights. The reference of a row moves only when a score is far above it, so weights may
  // exceed 1. True when that of a row of this warp has moved; then `factor` takes earlier sums to the new one.
  PD_MEMBER bool weigh(float (&s)[kKeys / 2], float (&factor)[2]) {
    constexpr float kFar = 8.f;  // log2 units: weights stay below 256
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shift[2];
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(s[i], s[i + 1]));
    const bool far = top[0] * scale > base[0] + kFar || top[1] * scale > base[1] + kFar;
    const bool moved = __any_sync(~0u, far);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        const float moved_base = fmaxf(base[r], top[r] * scale);
        factor[r] = fast_rescale(base[r], moved_base);
        base[r] = moved_base;
        l[r] *= factor[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = base[r] == -INFINITY ? 0.f : -base[r];
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = fast_exp2(fmaf(s[i], scale, shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
    l[0] += sum[0];
    l[1] += sum[1];
    return moved;
  }
};

// Weights as operands of the second product: pairs of neighbouring keys.
template <bool kBf16, int kCount>
PD_DEVICE void pack_weights(const float (&s)[kCount], uint32_t (&weights)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) weights[i] = pack_pair<kBf16>(s[2 * i], s[2 * i + 1]);
}

// Issues scores = q k^T for 64 rows.
template <typename Shape>
PD_DEVICE void issue_scores(float (&s)[Shape::kKeys / 2], uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < Shape::kDim / 16; ++k) {
    const int column = k * 16 / kColumn, bytes = k * 16 % kColumn * 2;
    multiply_scores(typename Shape::Type{}, s, advance(queries, column * Shape::kRows * kRowBytes + bytes),
                    advance(keys, column * Shape::kKeys * kRowBytes + bytes), k > 0);
  }
}

// Issues acc += weights v.
template <typename Shape>
PD_DEVICE void issue_values(float (&acc)[Shape::kDimV / 2], const uint32_t (&weights)[Shape::kKeys / 4],
                            uint64_t values) {
#pragma unroll
  for (int k = 0; k < Shape::kKeys / 16; ++k) {
    multiply_values(typename Shape::Type{}, acc, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                    weights[4 * k + 3], advance(values, k * 16 * kRowBytes));
  }
}

// Writes the rows of a warp. The four lanes of a row exchange their pairs, so that each stores 16 bytes.
template <typename Shape, bool kFull>
PD_DEVICE void store_rows(const Problem& p, const PrefillCall& plan, const Work& work,
                          const float (&acc)[Shape::kDimV / 2], PrefillRows<Shape, kFull>& rows, int first_row) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  const int t = threadIdx.x % 4;
  const Item& item = work.item;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    float l = rows.l[r];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const bool exists = row < item.rows;
    RowTarget target = {};
    float factor = 0.f;
    if (exists) {
      target = row_target(p, plan, item, work.head, row);
      factor = finish_row(p, target, item.b, work.head, rows.base[r], l, t == 0);
    }
    uint16_t* const out = static_cast<uint16_t*>(p.out) + target.out;
#pragma unroll
    for (int j = 0; j < Shape::kDimV / 8; j += 4) {
      uint32_t words[4], turned[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack_pair<kBf16>(acc[4 * (j + i) + 2 * r] * factor, acc[4 * (j + i) + 2 * r + 1] * factor);
      // Word i of lane t becomes word t of lane i: by 1, then by 2.
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? words[i] : words[i + 1], 1);
        turned[i] = t & 1 ? other : words[i];
        turned[i + 1] = t & 1 ? words[i + 1] : other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, t & 2 ? turned[i] : turned[i + 2], 2);
        words[i] = t & 2 ? other : turned[i];
        words[i + 2] = t & 2 ? turned[i + 2] : other;
      }
      const int dim = (j + t) * 8;
      if (exists && dim < p.head_dim_v)
        *reinterpret_cast<uint4*>(out + dim) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <typename Shape, bool kFull>
PD_DEVICE void consume(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared) {
  constexpr bool kBf16 = IsBf16<typename Shape::Type>::value;
  constexpr int kTurn = 2;  // named barriers: whose turn it is to issue
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
  auto await = [&](uint64_t& barrier, uint32_t phase) { barrier_wait(shared_address(&barrier), phase); };
  if (consumer + 1 == Shape::kConsumers) named_barrier_arrive(kTurn, 2 * kWarpgroup);

  while (true) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const Work& work = control.work[slot.stage];  // read again where it is needed: registers are scarce
    if (!work.exists) break;
    await(control.queries_full[queries.stage], queries.phase);
    const int last_tile = work.item.first_tile;
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
      __syncwarp();
      release(control.work_empty[slot.stage]);
      slot.advance();
      continue;
    }
    const uint64_t own_queries = advance(first_queries, queries.stage * Shape::kQueryBytes);
    const bool turns = work.item.rows > 64 * (Shape::kConsumers - 1);  // everybody has rows
    rows.start(p, plan, work, first_row);
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] = 0.f;
    const int inner_begin = work.item.inner_begin, inner_end = work.item.inner_end;
    int tile = last_tile + work.item.tiles - 1;

    float factor[2];
    bool moved = false;
    auto soften = [&]() {
      const int first_key = tile * Shape::kKeys;
      rows.score(p, s, first_key);
      if (first_key + Shape::kKeys > inner_end || first_key < inner_begin) rows.mask(s, first_key);
      moved = rows.weigh(s, factor);
    };
    auto rescale = [&]() {
      if (!moved) return;
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 2; ++i) acc[i] *= factor[i / 2 % 2];
    };

    if (tile >= last_tile) {
      await(control.keys_full[keys.stage], keys.phase);
      settle(s);
      products_begin();
      issue_scores<Shape>(s, own_queries, advance(first_keys, keys.stage * Shape::kKeyBytes));
      products_commit();
      products_wait<0>();
      settle(s);
      release(control.keys_empty[keys.stage]);
      keys.advance();
      soften();
      pack_weights<kBf16>(s, weights);

#pragma unroll 1
      for (--tile; tile >= last_tile; --tile) {
        await(control.keys_full[keys.stage], keys.phase);
        if (turns) named_barrier_sync(kTurn + consumer, 2 * kWarpgroup);
        settle(s);
        settle(acc);
        settle(weights);
        products_begin();
        issue_scores<Shape>(s, own_queries, advance(first_keys, keys.stage * Shape::kKeyBytes));
        products_commit();
        rescale();
        await(control.values_full[values.stage], values.phase);
        products_begin();
        issue_values<Shape>(acc, weights, advance(first_values, values.stage * Shape::kValueBytes));
        products_commit();
        if (turns) named_barrier_arrive(kTurn + other, 2 * kWarpgroup);
        products_wait<1>();
        settle(s);
        release(control.keys_empty[keys.stage]);
        keys.advance();
        soften();
        await_value(rows.l[0] + rows.l[1]);
        products_wait<0>();
        settle(acc);
        settle(weights);
        release(control.values_empty[values.stage]);
        values.advance();
        pack_weights<kBf16>(s, weights);
      }
      release(control.queries_empty[queries.stage]);
      queries.advance();
      rescale();
      await(control.values_full[values.stage], values.phase);
      settle(acc);
      settle(weights);
      products_begin();
      issue_values<Shape>(acc, weights, advance(first_values, values.stage * Shape::kValueBytes));
      products_commit();
      products_wait<0>();
      settle(acc);
      release(control.values_empty[values.stage]);
      values.advance();
    } else {
      release(control.queries_empty[queries.stage]);
      queries.advance();
    }
    store_rows<Shape, kFull>(p, plan, work, acc, rows, first_row);
    __syncwarp();
    release(control.work_empty[slot.stage]);
    slot.advance();
  }
}

template <typename Shape, bool kFull>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    prefill_kernel(const __grid_constant__ Problem p, const __grid_constant__ PrefillCall plan) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  __shared__ PrefillControl<Shape> control;
  const uint32_t shared = (shared_address(raw) + kBlockBytes - 1) & ~(kBlockBytes - 1u);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kKeyStages; ++i) {
      barrier_init(shared_address(&control.keys_full[i]), 1);
      barrier_init(shared_address(&control.keys_empty[i]), Shape::kConsumerWarps);
    }
    for (int i = 0; i < Shape::kValueStages; ++i) {
      barrier_init(shared_address(&control.values_full[i]), 1);
      barrier_init(shared_address(&control.values_empty[i]), Shape::kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&control.work_full[i]), 1);
      barrier_init(shared_address(&control.work_empty[i]), Shape::kConsumerWarps + 2);
    }
    for (int i = 0; i < Shape::kQueryStages; ++i) {
      barrier_init(shared_address(&control.queries_full[i]), 1);
      barrier_init(shared_address(&control.queries_empty[i]), Shape::kConsumerWarps);
    }
    fence_async_proxy();
  }
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < kWarpgroup) {
    give_registers<Shape::kProducerRegisters>();
    const int warp = threadIdx.x / kWarp;
    if (warp == 0) {
      TileLoader<Shape, false>::run(p, plan, control, shared);
    } else if (warp == 1) {
      TileLoader<Shape, true>::run(p, plan, control, shared);
    } else if (warp == 2) {
      direct<Shape>(p, plan, control, shared);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    consume<Shape, kFull>(p, plan, control, shared);
  }
  clear_unclaimed(p);
#endif
}

}  // namespace paged_attn
