// The products of a warp and its softmax.
//
//     S = Q K^T      16 rows x 8 keys, 8 dimensions at a time          O = P V      16 rows x 8 dimensions, 8 keys
//
// A lane (g = lane / 4, t = lane % 4) has rows g and g + 8. Which dimension or key is which term of a product is free,
// so a score is where it is needed as a weight. Operands are several registers side by side: what is read lands in them
// as it is, since moving it there would be every sixth instruction.
#pragma once

#include "../rows.cuh"
#include "../tf32.cuh"
#include "shape.cuh"

namespace paged_attn {

template <typename Shape>
struct Float32Rows {
  static constexpr int kSubTiles = Shape::kSubTiles;
  using Scores = float[kSubTiles][4];  // keys 2t and 2t + 1 of row g, then of row g + 8

  float acc[Shape::kValueChunks][4][4];  // [chunk][i]: dimensions 8 i + 2t and the next, rows as above
  float2* sums;                          // in shared memory: (m, l) of the rows of the item, of this group

  // Row of the item that entry i stands for. Each group has all of them.
  static PD_MEMBER int lane_row(int i) {
    const int thread = this_thread();
    return Shape::place_in_group(thread / kWarp) * Shape::kWarpRows + thread % kWarp / 4 + i * 8;
  }

  PD_MEMBER void start() {
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[lane_row(i)] = {-INFINITY, 0.f};
#pragma unroll
    for (int c = 0; c < Shape::kValueChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[c][i][r] = 0.f;
  }

  // Puts this warp's queries in the order of operands: of rows g and g + 8 a lane has a piece each, and words of the
  // two change places.
  static PD_MEMBER void interleave(char* queries, int head_dim) {
    const int thread = this_thread(), g = thread % kWarp / 4, t = thread % 4;
    queries += lane_row(0) * Shape::kPieces * 16;
#pragma unroll 2
    for (int chunk = 0; chunk * 16 < head_dim; ++chunk) {
      char* const first = queries + Shape::place_k(g, chunk * 4 + t) * 16;
      uint4 &low = *reinterpret_cast<uint4*>(first), &high = *reinterpret_cast<uint4*>(first + 8 * Shape::kPieces * 16);
      const uint4 x = low, y = high;
      low = make_uint4(x.x, y.x, x.y, y.y);
      high = make_uint4(x.z, y.z, x.w, y.w);
    }
  }

  // q.k of a tile.
  static PD_MEMBER void score_keys(const char* queries, const char* keys, int head_dim, Scores& s) {
    if constexpr (Shape::kSumDims >= Shape::kHeadDim) {
      score_dims<false>(queries, keys, 0, head_dim, s);
    } else {
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[sub][r] = 0.f;
#pragma unroll 1
      for (int from = 0; from < head_dim; from += Shape::kSumDims)
        score_dims<true>(queries, keys, from, min(from + Shape::kSumDims, head_dim), s);
    }
  }

  // The same of the dimensions from `from` to `until`. kAdds: to what is there.
  template <bool kAdds>
  static PD_MEMBER void score_dims(const char* queries, const char* keys, int from, int until, Scores& s) {
    const int thread = this_thread(), g = thread % kWarp / 4, t = thread % 4;
    float part[kSubTiles][4] = {}, rest[kSubTiles][4] = {};
    queries += lane_row(0) * Shape::kPieces * 16;
    keys += g * Shape::kPieces * 16;
#pragma unroll 2
    for (int chunk = from / 16; chunk * 16 < until; ++chunk) {
      const int place = Shape::place_k(g, chunk * 4 + t) * 16;  // rows g + 8 and those of other sub-tiles are as even
      const uint4 low = *reinterpret_cast<const uint4*>(queries + place);  // interleaved
      const uint4 high = *reinterpret_cast<const uint4*>(queries + 8 * Shape::kPieces * 16 + place);
      const Tf32Pair<4> rows[2] = {Tf32Pair<4>({low.x, low.y, low.z, low.w}),
                                   Tf32Pair<4>({high.x, high.y, high.z, high.w})};
#pragma unroll
      for (int sub = 0; sub < kSubTiles; sub += 2) {
        const char* row = keys + sub * 8 * Shape::kPieces * 16 + place;
        const uint4 first = *reinterpret_cast<const uint4*>(row);
        const uint4 second = *reinterpret_cast<const uint4*>(row + 8 * Shape::kPieces * 16);
        float (&sum)[2][4] = *reinterpret_cast<float (*)[2][4]>(&part[sub]);
        float (&small)[2][4] = *reinterpret_cast<float (*)[2][4]>(&rest[sub]);
        const Tf32Pair<2> low_keys[2] = {Tf32Pair<2>({first.x, first.y}, Shape::kRounded),
                                         Tf32Pair<2>({second.x, second.y}, Shape::kRounded)};
        add_products(sum, small, rows[0], low_keys);
        const Tf32Pair<2> high_keys[2] = {Tf32Pair<2>({first.z, first.w}, Shape::kRounded),
                                          Tf32Pair<2>({second.z, second.w}, Shape::kRounded)};
        add_products(sum, small, rows[1], high_keys);
      }
    }
#pragma unroll
    for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float sum = with_rest(part[sub][r], rest[sub][r]);
        s[sub][r] = kAdds ? s[sub][r] + sum : sum;
      }
  }

  // From q.k to weights, which are in s afterwards.
  PD_MEMBER void weigh(const Problem& p, const Plan& plan, const Item& item, int head, float scale, int tile,
                       Scores& s) {
    if (p.softcap != 0.f || p.alibi_slopes) {
      modify_scores(p, plan, item, head, scale, tile, s);
    } else {
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[sub][r] *= scale * PD_LOG2E;
    }
    if (tile * Shape::kTileKeys < item.inner_begin || (tile + 1) * Shape::kTileKeys > item.inner_end) {
      mask_scores(p, plan, item, tile, s);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 old = sums[lane_row(i)];
      float top = old.x, l = 0.f;
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub) top = fmaxf(top, fmaxf(s[sub][2 * i], s[sub][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float factor = fast_rescale(old.x, top), base = top == -INFINITY ? 0.f : top;
      if (__any_sync(~0u, top != old.x)) rescale(i, factor);
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][2 * i + half];
          x = fast_exp2(x - base);
          l += x;
        }
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      __syncwarp();
      if (this_thread() % 4 == 0) sums[lane_row(i)] = {top, old.y * factor + l};
    }
  }

  PD_MEMBER void rescale(int i, float factor) {
#pragma unroll
    for (int c = 0; c < Shape::kValueChunks; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc[c][j][2 * i] *= factor;
        acc[c][j][2 * i + 1] *= factor;
      }
  }

  PD_MEMBER void modify_scores(const Problem& p, const Plan& plan, const Item& item, int head, float scale, int tile,
                               Scores& s) {
    const int first = tile * Shape::kTileKeys + this_thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_row(i);
      const int q_pos = item.kv_len - item.q_len + plan.group.divide(item.first_row + row);
      const bool exists = row < item.rows;
      const float slope = exists ? row_slope(p, item.b, row_target(p, plan, item, head, row).q_head) : 0.f;
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][2 * i + half];
          const float distance = fabsf(static_cast<float>(q_pos - (first + sub * 8 + half)));
          x = pd_score(x, scale, p.softcap, slope, distance) * PD_LOG2E;
        }
    }
  }

  // -inf where the row does not see the key.
  PD_MEMBER void mask_scores(const Problem& p, const Plan& plan, const Item& item, int tile, Scores& s) {
    const int first = tile * Shape::kTileKeys + this_thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_row(i);
      KvRange seen = {0, 0};
      if (row < item.rows) seen = row_keys(p, plan, item, plan.group.divide(item.first_row + row));
#pragma unroll
      for (int sub = 0; sub < kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first + sub * 8 + half;
          if (key < seen.begin || key >= seen.end) s[sub][2 * i + half] = -INFINITY;
        }
    }
  }

  // Adds the values of a tile, each times its weight. The sums of 16 keys are added in float32, see tf32.cuh: small
  // products first, so that they are not cut off where the big ones join them. kInfinite: values may be infinite, so
  // the two stay apart.
  template <bool kInfinite>
  PD_MEMBER void add_values(const char* tile, int head_dim_v, const Scores& s) {
    const int thread = this_thread(), g = thread % kWarp / 4, t = thread % 4;
    // The compiler orders loads and products between two of these questions, and would load too much ahead without.
    constexpr int kOrdered = Shape::kHeadDim > 64 ? 2 : 1;
    const char* values[4];  // of keys 2t, this lane's dimensions 8 i + g of 32; see place_v
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = tile + t * 2 * Shape::kPieces * 16 + ((i ^ t) * 8 + g) * 4;
#pragma unroll
    for (int pair = 0; pair < kSubTiles; pair += 2) {
      const Tf32Pair<4> weights[2] = {weights_of(s[pair]), weights_of(s[pair + 1])};
#pragma unroll
      for (int chunk = 0; chunk < Shape::kValueChunks; ++chunk) {
        if (chunk % kOrdered == 0 && chunk * 32 >= head_dim_v) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum[2][4] = {};
          Tf32Pair<2> keys[2][2];  // [sub][i]
#pragma unroll
          for (int sub = 0; sub < 2; ++sub) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const char* const first = values[2 * half + i] + (pair + sub) * 8 * Shape::kPieces * 16 + chunk * 128;
              keys[sub][i] = Tf32Pair<2>({*reinterpret_cast<const uint32_t*>(first),
                                          *reinterpret_cast<const uint32_t*>(first + Shape::kPieces * 16)},
                                         Shape::kRounded);
            }
            add_small_products(sum, weights[sub], keys[sub]);
          }
          if constexpr (kInfinite) {
            float big[2][4] = {};
#pragma unroll
            for (int sub = 0; sub < 2; ++sub) add_big_products(big, weights[sub], keys[sub]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int r = 0; r < 4; ++r) sum[i][r] = with_rest(big[i][r], sum[i][r]);
          } else {
#pragma unroll
            for (int sub = 0; sub < 2; ++sub) add_big_products(sum, weights[sub], keys[sub]);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[chunk][2 * half + i][r] += sum[i][r];
        }
      }
    }
  }

  // Whether a sum is no finite number, as an infinite value leaves it without kInfinite.
  PD_MEMBER bool any_infinite() const {
    float all = 0.f;
#pragma unroll
    for (int c = 0; c < Shape::kValueChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) all += acc[c][i][r] - acc[c][i][r];
    return isnan(all);
  }

  // Of 8 keys: terms t and t + 4 of the product are keys 2t and 2t + 1.
  static PD_MEMBER Tf32Pair<4> weights_of(const float (&x)[4]) {
    return Tf32Pair<4>({__float_as_uint(x[0]), __float_as_uint(x[2]), __float_as_uint(x[1]), __float_as_uint(x[3])});
  }

  // Leaves the accumulators where this warp's queries were.
  PD_MEMBER void publish(char* target) {
    const int t = this_thread() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_row(i);
      float4* const pieces = reinterpret_cast<float4*>(target) + row * Shape::kQuads;
#pragma unroll
      for (int c = 0; c < Shape::kValueChunks; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2* const piece = reinterpret_cast<float2*>(&pieces[Shape::place_out(row, c * 8 + 2 * j + t / 2)]);
          piece[t % 2] = make_float2(acc[c][j][2 * i], acc[c][j][2 * i + 1]);
        }
    }
  }
};

}  // namespace paged_attn
