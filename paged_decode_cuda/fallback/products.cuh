// The two products of a tile of keys, and the softmax between them.
//
//     S = Q K^T      a warp: all rows x 16 keys           O = P V      a warp: all rows x 64 or 32 dimensions
//
// So no two warps read the same key, nor the same value. Where there are fewer than 512 dimensions of values, several
// warps have the same ones, and each takes a part of the keys.
#pragma once

#include "loader.cuh"

namespace paged_attn {

// Of a row of the item.
struct FallbackRow {
  int begin, end, position;  // the keys that it sees, and where it stands among them
  float slope;
};

// Which dimensions of values a warp has, and which steps of a tile: the first and each one `parts` after it.
struct FallbackPart {
  int dim, part, parts;
};

template <typename Shape>
PD_DEVICE FallbackPart find_part(int64_t head_dim_v) {
  int blocks = 1;  // of dimensions, a power of two
  while (blocks * Shape::kWarpDims < head_dim_v) blocks *= 2;
  const int warp = this_thread() / kWarp;
  return {warp % blocks * Shape::kWarpDims, warp / blocks, Shape::kWarps / blocks};
}

template <typename Shape>
struct FallbackTiles {
  using Products = typename Shape::Products;
  using ValueProducts = typename Shape::ValueProducts;
  using Kv = typename Shape::Kv;
  static constexpr int kRowTiles = Shape::kRowTiles;
  using Scores = float[kRowTiles][2][4];  // [16 rows][8 keys]: keys 2t and 2t + 1 of row g, then of row g + 8

  // In shared memory
  const FallbackRow* rows;
  float* references;            // of rows, before a tile; behind them those after it, and so on in turns
  const FallbackPlace* places;  // of this tile's keys
  float* tops;                  // [warp][row]: the largest scores of the keys that a warp has
  float* totals;                // the same: sums of weights
  uint4* weights;

  float acc[kRowTiles][Shape::kValueDims][4];  // [16 rows][product]: columns 2t and 2t + 1, rows as of scores

  static PD_MEMBER int own_warp() { return this_thread() / kWarp; }
  static PD_MEMBER int lane_row(int tile, int half) { return tile * 16 + half * 8 + this_thread() % kWarp / 4; }

  PD_MEMBER void start() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int d = 0; d < Shape::kValueDims; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][d][i] = 0.f;
  }

  // Adds the products of all queries and this warp's keys, two of which this lane reads. What has been multiplied makes
  // room for what is loaded next.
  static PD_MEMBER void add_scores(const uint8_t* const (&keys)[2], int grain, const uint32_t* queries, int dims,
                                   Scores& s) {
    constexpr int kBatch = Shape::kBatchChunks;
    const int lane = this_thread() % kWarp, t = lane % 4, chunks = (dims + Shape::kChunkDims - 1) / Shape::kChunkDims;
    const int stride = Shape::query_stride(dims);
    const uint32_t* const own = queries + lane / 4 * stride + t * 4;
    uint32_t pieces[kBatch][2][4];
    with_grain<Kv::kBytes>(grain, [&](auto of) {
#pragma unroll
      for (int c = 0; c < kBatch; ++c)
#pragma unroll
        for (int o = 0; o < 2; ++o)
          load_words<decltype(of)::value>(keys[o], dims * Kv::kBytes, (c * 4 + t) * 16, pieces[c][o]);
    });
#pragma unroll 1
    for (int first = 0; first < chunks; first += kBatch) {
      Scores part = {}, rest = {};
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int chunk = first + c;
        if (chunk >= chunks) break;
#pragma unroll
        for (int group = 0; group < Shape::kGroups; ++group) {
          uint32_t words[2][4];
#pragma unroll
          for (int o = 0; o < 2; ++o) key_words<Shape>(pieces[c][o], group, words[o]);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            const uint32_t* const from = own + r * 16 * stride + (chunk * Shape::kGroups + group) * 16;
            const uint4 x = *reinterpret_cast<const uint4*>(from);
            const uint4 y = *reinterpret_cast<const uint4*>(from + 8 * stride);
#pragma unroll
            for (int o = 0; o < 2; ++o) {
              float (&sum)[4] = Shape::kPairs ? s[r][o] : part[r][o];
              const uint32_t (&w)[4] = words[o];
              Products::add(sum, rest[r][o], {x.x, y.x, x.y, y.y}, {w[0], w[1]});
              Products::add(sum, rest[r][o], {x.z, y.z, x.w, y.w}, {w[2], w[3]});
            }
          }
        }
        if (chunk + kBatch < chunks) {
          with_grain<Kv::kBytes>(grain, [&](auto of) {
#pragma unroll
            for (int o = 0; o < 2; ++o)
              load_words<decltype(of)::value>(keys[o], dims * Kv::kBytes, ((chunk + kBatch) * 4 + t) * 16,
                                              pieces[c][o]);
          });
        }
      }
      if constexpr (!Shape::kPairs) {  // in float32, see tf32.cuh
#pragma unroll
        for (int i = 0; i < 8; ++i) s[0][i / 4][i % 4] += with_rest(part[0][i / 4][i % 4], rest[0][i / 4][i % 4]);
      }
    }
  }

  static PD_MEMBER void scale_scores(float factor, Scores& s) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) s[r][i / 4][i % 4] *= factor;
  }

  // From q.k to scores in log2 units, -inf where a row does not see a key. `first`: of the keys of this warp.
  PD_MEMBER void finish_scores(const Problem& p, float scale, int first, Scores& s) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const FallbackRow row = rows[lane_row(r, half)];
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
          float& x = s[r][i / 2][2 * half + i % 2];
          const float distance = fabsf(static_cast<float>(row.position - key));
          x = pd_score(x, scale, p.softcap, row.slope, distance) * PD_LOG2E;
          if (key < row.begin || key >= row.end) x = -INFINITY;
          top = fmaxf(top, x);
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (lane % 4 == 0) tops[own_warp() * Shape::kRows + lane_row(r, half)] = top;
      }
  }

  // From scores to weights, which it leaves for all warps, when every warp has left its tops. odd: whether the tile is.
  PD_MEMBER void weigh(int odd, Scores& s) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) top = fmaxf(top, tops[w * Shape::kRows + lane_row(r, half)]);
        const float before = references[odd * Shape::kRows + lane_row(r, half)];
        top = fmaxf(before, top - ValueProducts::kBelow);
        const float factor = pd_rescale(before, top), base = top == -INFINITY ? 0.f : top;
        if (own_warp() == 0 && this_thread() % 4 == 0) references[(1 - odd) * Shape::kRows + lane_row(r, half)] = top;
        float l = 0.f;
        if (factor != 1.f) rescale(r, half, factor);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = s[r][i / 2][2 * half + i % 2];
          x = exp2f(x - base);
          l += x;
        }
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (this_thread() % 4 == 0) {
          float& total = totals[own_warp() * Shape::kRows + lane_row(r, half)];
          total = total * factor + l;
        }
      }
#pragma unroll
      for (int step = 0; step < Shape::kWarpSteps; ++step)
        *weight_place(own_warp() * Shape::kWarpSteps + step, r) = weight_words<Shape>(s[r], step);
    }
  }

  // Of one of the two keys whose pieces this lane reads.
  PD_MEMBER const FallbackPlace& score_place(int o) const {
    const int thread = this_thread();
    return places[thread / kWarp * Shape::kWarpKeys + o * 8 + thread % kWarp / 4];
  }

  PD_MEMBER void rescale(int r, int half, float factor) {
#pragma unroll
    for (int d = 0; d < Shape::kValueDims; ++d)
#pragma unroll
      for (int i = 0; i < 2; ++i) acc[r][d][2 * half + i] *= factor;
  }

  PD_MEMBER uint4* weight_place(int step, int r) const {
    return weights + (step * kRowTiles + r) * kWarp + this_thread() % kWarp;
  }

  // What a lane has of the values of a step: of each of its keys so many words.
  using Step = uint32_t[Shape::kLaneKeys][Shape::kValueWords];
  using Steps = Step[Shape::kBatchSteps];

  // Begins to load the first steps of this warp. `cache`: of values of `dims` dimensions.
  PD_MEMBER void load_values(const void* cache, int grain, int dims, const FallbackPart& own, int steps,
                             Steps& values) const {
    const uint8_t* rows_of[Shape::kBatchSteps][Shape::kLaneKeys];
#pragma unroll
    for (int n = 0; n < Shape::kBatchSteps; ++n) find_values(cache, own.part + n * own.parts, steps, rows_of[n]);
    with_grain<Kv::kBytes>(grain, [&](auto of) {
#pragma unroll
      for (int n = 0; n < Shape::kBatchSteps; ++n)
        load_step<decltype(of)::value>(rows_of[n], dims, value_at(own), values[n]);
    });
  }

  // Adds the values of this warp's dimensions and steps, each times its weight. `values`: the first ones.
  PD_MEMBER void add_values(const void* cache, int grain, int dims, const FallbackPart& own, int steps, Steps& values) {
#pragma unroll 1
    for (int first = own.part; first < steps; first += Shape::kBatchSteps * own.parts) {
      float part[kRowTiles][Shape::kValueDims][4] = {}, rest[kRowTiles][Shape::kValueDims][4] = {};
#pragma unroll
      for (int n = 0; n < Shape::kBatchSteps; ++n) {
        const int step = first + n * own.parts, next = step + Shape::kBatchSteps * own.parts;
        if (step >= steps) break;
        uint32_t words[Shape::kValueDims][2];
        value_words<Shape>(values[n], words);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const uint4 w = *weight_place(step, r);
#pragma unroll
          for (int d = 0; d < Shape::kValueDims; ++d)
            ValueProducts::add(Shape::kPairs ? acc[r][d] : part[r][d], rest[r][d], {w.x, w.y, w.z, w.w}, words[d]);
        }
        if (next < steps) {
          const uint8_t* rows_of[Shape::kLaneKeys];
          find_values(cache, next, steps, rows_of);
          with_grain<Kv::kBytes>(
              grain, [&](auto of) { load_step<decltype(of)::value>(rows_of, dims, value_at(own), values[n]); });
        }
      }
      if constexpr (!Shape::kPairs) {
#pragma unroll
        for (int d = 0; d < Shape::kValueDims; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[0][d][i] += with_rest(part[0][d][i], rest[0][d][i]);
      }
    }
  }

  // Where this lane's values of a step are. There are none behind the last step.
  PD_MEMBER void find_values(const void* cache, int step, int steps,
                             const uint8_t* (&rows_of)[Shape::kLaneKeys]) const {
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) {
      const int64_t place =
          step < steps ? places[step * Shape::kStepKeys + Shape::lane_key(i)].value : FallbackPlace::kNowhere;
      rows_of[i] = row_at<Kv>(cache, place);
    }
  }

  // The byte of a value at which this lane reads.
  static PD_MEMBER int value_at(const FallbackPart& own) {
    return (own.dim + this_thread() % kWarp / 4 * Shape::kValueDims) * Kv::kBytes;
  }

  template <int kGrain>
  static PD_MEMBER void load_step(const uint8_t* const (&rows_of)[Shape::kLaneKeys], int dims, int at, Step& values) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneKeys; ++i) load_words<kGrain>(rows_of[i], dims * Kv::kBytes, at, values[i]);
  }

  // Leaves the sums of this warp in shared memory, or adds them to what another has left.
  PD_MEMBER void publish(float4* target, int stride, int dim, bool adds) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int column = 0; column < 2; ++column)
#pragma unroll
          for (int d = 0; d < Shape::kValueDims; d += 4) {
            const int first = dim + (2 * t + column) * Shape::kValueDims + d;
            float4& quad = target[lane_row(r, half) * stride + first / 4];
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = acc[r][d + e][2 * half + column];
            const float4 before = adds ? quad : make_float4(0.f, 0.f, 0.f, 0.f);
            quad = make_float4(before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]);
          }
  }
};

}  // namespace paged_attn
