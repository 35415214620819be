// What a consumer does with a tile: scores, weights, and their product with the values.
//
//     S^T = K Q^T      64 keys x 8 to 32 rows          O^T = V^T P^T      64 dimensions x as many rows
//
// As in products.cuh the rows are the columns of both results, but a whole warpgroup multiplies (wgmma), and both
// operands are in shared memory. So a tile of 64 keys takes a warp some 300 instructions, where 16 keys take it 600
// there. Warp w has keys 16 w to 16 w + 15 of a tile, and the same 16 of every 64 dimensions. In it a lane (g = lane /
// 4, t = lane % 4) has keys, or dimensions, g and g + 8 of rows 2t and 2t + 1 of each row tile.
#pragma once

#include "wgmma_loader.cuh"

namespace paged_attn {

template <typename Shape>
struct WgmmaRows {
  static constexpr int kRowTiles = Shape::kRows / 8, kLaneRows = 2 * kRowTiles, kSums = 4 * kRowTiles;
  static constexpr int kWarps = Shape::kWarps;
  static constexpr float kBelow = Shape::kBf16 ? 0.f : PD_HALF_BELOW;
  // A score that is so far above the base moves it. Before that a weight is 2^15 at most, which float16 holds.
  static constexpr float kFarAbove = kBelow + 8.f;

  float s[kSums];  // scores, then how far they are above their base
  float acc[Shape::kColumns][kSums];
  float base[kLaneRows], far[kLaneRows];  // weights are relative to it; far is -inf while there is none
  float l[kLaneRows];                     // of this lane's keys
  float scale;                            // of q.k, in log2 units

  static PD_MEMBER int barrier() { return Shape::kConsumerBarrier + Shape::consumer(); }
  static PD_MEMBER void sync() { named_barrier_sync(barrier(), kWarpgroup); }

  // Row of the item that a lane's entry i stands for; the entry of a sum; a sum of an entry; the key of a sum, counted
  // from the first one of the tile.
  static PD_MEMBER int lane_row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static PD_MEMBER int entry_of(int sum) { return sum / 4 * 2 + sum % 2; }
  static PD_MEMBER int sum_of(int i, int half) { return i / 2 * 4 + i % 2 + half * 2; }
  static PD_MEMBER int key_of(int half) { return Shape::part() * 16 + half * 8 + threadIdx.x % kWarp / 4; }

  static PD_MEMBER int lane_token(const Plan& plan, const Item& item, int i) {
    return plan.group.divide(item.first_row + lane_row(i));
  }

  PD_MEMBER void start(const Problem& p, const Item& item, int head) {
    scale = score_scale(p, item.b, head) * PD_LOG2E;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      base[i] = l[i] = 0.f;
      far[i] = -INFINITY;
    }
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c)
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[c][i] = 0.f;
  }

  PD_MEMBER void score_keys(uint32_t stage, uint32_t queries) {
    const uint64_t keys = matrix_descriptor(stage, kRowBytes), q = matrix_descriptor(queries, kRowBytes);
    settle(s);
    products_begin();
#pragma unroll
    for (int i = 0; i < Shape::kColumns * kColumn / 16; ++i) {
      const int c = i / (kColumn / 16), bytes = i % (kColumn / 16) * 32;
      multiply_few<false>(typename Shape::Type{}, s, advance(keys, c * Shape::kKeys * kRowBytes + bytes),
                          advance(q, c * Shape::kRows * kRowBytes + bytes), i > 0);
    }
    products_commit();
    products_wait<0>();
    settle(s);
  }

  // Adds the values of the tile at `stage`, and the weights w to the sums of weights meanwhile.
  PD_MEMBER void add_values(uint32_t stage, uint32_t weights, const float (&w)[kSums]) {
    const uint64_t values = matrix_descriptor(stage, kRowBytes), rows = matrix_descriptor(weights, kRowBytes);
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) settle(acc[c]);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k)
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c)
        multiply_few<true>(typename Shape::Type{}, acc[c], advance(values, (c * Shape::kKeys + k * 16) * kRowBytes),
                           advance(rows, k * 32), 1);
    products_commit();
#pragma unroll
    for (int i = 0; i < kSums; ++i) l[entry_of(i)] += w[i];
    products_wait<0>();
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) settle(acc[c]);
  }

  // Weights of the scores, for this lane and, as rows of 64 keys, in shared memory.
  PD_MEMBER void weigh(uint32_t weights, float (&w)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) w[i] = fast_exp2(s[i]);
    uint32_t pairs[kSums / 2];
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) pairs[i] = pack_pair<Shape::kBf16>(w[2 * i], w[2 * i + 1]);
    // A lane says where a row of a matrix of 8 x 8 shall be: of row tile n, of its first or second 8 keys.
    const int matrix = threadIdx.x % kWarp / 8, row = matrix / 2 % kRowTiles * 8 + threadIdx.x % 8;
    const uint32_t place = weights + Shape::piece_at(Shape::kRows, row, Shape::part() * 2 + matrix % 2);
    if constexpr (kRowTiles <= 2) {
      store_transposed(place, pairs);
    } else {
#pragma unroll
      for (int n = 0; n < kRowTiles; n += 2) {
        store_transposed(place + n * kBlockBytes, {pairs[2 * n], pairs[2 * n + 1], pairs[2 * n + 2], pairs[2 * n + 3]});
      }
    }
  }

  // A tile of which this consumer has the scores. `tops`: room for the largest scores of each warp.
  PD_MEMBER void attend(const Problem& p, const Plan& plan, const Item& item, const Segment& segment, int first_key,
                        const WgmmaRing<Shape>& ring, uint32_t weights, float (&tops)[kWarps][Shape::kRows]) {
    float w[kSums];
    find_weights(p, plan, item, segment, first_key, weights, tops, w, [&] { ring.template await_full<true>(); });
    add_values(ring.template address<true>(), weights, w);
  }

  // From scores to weights. await_values(): what is waited for before the warps meet.
  template <typename Await>
  PD_MEMBER void find_weights(const Problem& p, const Plan& plan, const Item& item, const Segment& segment,
                              int first_key, uint32_t weights, float (&tops)[kWarps][Shape::kRows], float (&w)[kSums],
                              Await await_values) {
    if (p.softcap != 0.f || p.alibi_slopes) {
      modify_scores(p, plan, item, segment.head, first_key);
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) s[i] = fmaf(s[i], scale, -base[entry_of(i)]);
    }
    // Keys behind the end of the segment belong to another block.
    const int end = segment.tile_end * Shape::kUnitKeys;
    if (first_key < item.inner_begin || first_key + Shape::kKeys > min(item.inner_end, end)) {
      mask_scores(p, plan, item, first_key, end);
    }
    // Weights are made before it is known whether a base moves, which is rare after the first tile.
    weigh(weights, w);
    await_values();
    fence_async_proxy();
    bool moves = false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) moves |= s[i] > far[entry_of(i)];
    if (named_barrier_any(barrier(), kWarpgroup, moves)) {
      move_bases(tops);
      weigh(weights, w);
      fence_async_proxy();
      sync();
    }
  }

  // To the largest scores that there have been. All warps of the consumer move them alike.
  PD_MEMBER void move_bases(float (&tops)[kWarps][Shape::kRows]) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float top = fmaxf(s[sum_of(i, 0)], s[sum_of(i, 1)]);
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (threadIdx.x % kWarp < 4) tops[Shape::part()][lane_row(i)] = top;
    }
    sync();
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float top = tops[0][lane_row(i)];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) top = fmaxf(top, tops[w][lane_row(i)]);
      const bool first = far[i] == -INFINITY;
      const float by = top == -INFINITY ? 0.f : first ? top - kBelow : fmaxf(top - kBelow, 0.f);
      const float factor = first ? 0.f : fast_exp2(-by);
      if (top > -INFINITY) far[i] = kFarAbove;
      base[i] += by;
      l[i] *= factor;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s[sum_of(i, half)] -= by;
#pragma unroll
        for (int c = 0; c < Shape::kColumns; ++c) acc[c][sum_of(i, half)] *= factor;
      }
    }
  }

  // q.k to scores with softcap and ALiBi, above their base.
  PD_MEMBER void modify_scores(const Problem& p, const Plan& plan, const Item& item, int head, int first_key) {
    const float natural = score_scale(p, item.b, head);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const bool exists = lane_row(i) < item.rows;
      const int q_pos = item.kv_len - item.q_len + lane_token(plan, item, i);
      const float slope = exists ? row_slope(p, item.b, query_row(p, plan, item, head, lane_row(i)).q_head) : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = s[sum_of(i, half)];
        const float distance = fabsf(static_cast<float>(q_pos - (first_key + key_of(half))));
        x = fmaf(pd_score(x, natural, p.softcap, slope, distance), PD_LOG2E, -base[i]);
      }
    }
  }

  // -inf where the row does not see the key. Only the tiles at the ends of what the rows see come here.
  PD_MEMBER void mask_scores(const Problem& p, const Plan& plan, const Item& item, int first_key, int end_key) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      KvRange keys = {0, 0};
      if (lane_row(i) < item.rows) keys = row_keys(p, plan, item, lane_token(plan, item, i));
      const int begin = static_cast<int>(keys.begin), end = min(static_cast<int>(keys.end), end_key);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + key_of(half);
        if (key < begin || key >= end) s[sum_of(i, half)] = -INFINITY;
      }
    }
  }

  // At the end of a segment: the weights of all keys of this warp; m of an entry. All entries before anything is left
  // by four lanes alone: behind a branch that not all lanes take every shuffle takes 150 cycles more.
  PD_MEMBER void add_up_weights() {
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2)
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) l[i] += __shfl_xor_sync(~0u, l[i], step);
  }
  PD_MEMBER float m_of(int i) const { return far[i] == -INFINITY ? -INFINITY : base[i]; }

  // Leaves the sums of this consumer, and (m, l) of this warp.
  PD_MEMBER void publish(char* sums, float2* warp_ml) {
    const int lane = threadIdx.x % kWarp, g = lane / 4;
    add_up_weights();
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (lane < 4) warp_ml[lane_row(i)] = make_float2(m_of(i), l[i]);
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = c * kColumn + Shape::part() * 16 + half * 8 + g;
          reinterpret_cast<float*>(quad_of(sums, lane_row(i), dim / 4))[dim % 4] = acc[c][sum_of(i, half)];
        }
    }
  }

  // Leaves what rows are relative to, and the sums of weights of this warp: at the end of segments whose sums stay in
  // registers.
  PD_MEMBER void publish(float (&all_bases)[Shape::kRows], float (&warp_l)[Shape::kRows]) {
    add_up_weights();
    if (threadIdx.x % kWarp >= 4) return;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      warp_l[lane_row(i)] = l[i];
      if (Shape::part() == 0) all_bases[lane_row(i)] = m_of(i);
    }
  }

  // Quads are spread over the banks: the lanes that store at a time have two of four rows.
  static PD_MEMBER float4* quad_of(char* sums, int row, int quad) {
    return reinterpret_cast<float4*>(sums) + row * Shape::kQuads + (quad ^ row / 2 % 4 * 2);
  }
};

}  // namespace paged_attn
