// The products of a warp and its softmax: scores of a tile, probabilities, and their product with the values.
//
//     S^T = K Q^T      16 keys x 8 rows          O^T = V^T P^T      16 dimensions x 8 rows
//
// In both the rows are the columns of the result, so a lane (g = lane / 4, t = lane % 4) has keys g, g + 8 or
// dimensions around g of rows 2t, 2t + 1, and what it knows of those rows (m, l, scale) it needs for nothing else.
#pragma once

#include "../rows.cuh"
#include "../tf32.cuh"
#include "shape.cuh"

namespace paged_attn {

// One warp's rows, in the layout of the matrix unit. A lane holds rows 2t, 2t + 1 of each row tile.
template <typename Kv, int kHeadDim, int kRowTiles>
struct Rows {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  static constexpr int kLaneRows = 2 * kRowTiles;
  static constexpr float kBelow = Shape::kFp32 || IsBf16<Kv>::value ? 0.f : PD_HALF_BELOW;

  uint32_t q[Shape::kSharedQueries ? 1 : Shape::kChunksK][Shape::kStepsK][kRowTiles][2];
  float acc[Shape::kChunksV][Shape::kVecV / 2][kRowTiles][4];
  float m[kLaneRows], l[kLaneRows];
  float scale[Shape::kFp8 ? kLaneRows : 1];  // of q.k, natural units; per row when the queries were normalised

  // What the weights of a row are relative to. (m is the running maximum of online softmax.)
  PD_MEMBER float reference(int i) const { return m[i] - kBelow; }

  // Row of the tile that a lane's entry i stands for.
  static PD_MEMBER int lane_row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  static PD_MEMBER int lane_token(const Plan& plan, const Item& item, int i) {
    return plan.group.divide(item.first_row + lane_row(i));
  }

  PD_MEMBER void start(const Problem& p, const Plan& plan, const Item& item, int head, char* queries) {
    if constexpr (Shape::kSharedQueries) {
      share_queries(p, plan, item, head, queries);
    } else {
      load_queries(p, plan, item, head);
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      m[i] = -INFINITY;
      l[i] = 0.f;
    }
#pragma unroll
    for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
      for (int j = 0; j < Shape::kVecV / 2; ++j)
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
          for (int r = 0; r < 4; ++r) acc[c][j][n][r] = 0.f;
  }

  // Into shared memory, for all warps of the block.
  PD_MEMBER void share_queries(const Problem& p, const Plan& plan, const Item& item, int head, char* queries) {
    scale[0] = score_scale(p, item.b, head);
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kPieces; i += blockDim.x) {
      const int row = i / Shape::kPieces, piece = i % Shape::kPieces;
      uint4 words = {};
      if (row < item.rows && piece * Shape::kVecK < p.head_dim) {
        const int64_t offset = q_offset(p, item, query_row(p, plan, item, head, row));
        words = reinterpret_cast<const uint4*>(static_cast<const float*>(p.q) + offset)[piece];
      }
      reinterpret_cast<uint4*>(queries)[row * Shape::kPieces + Shape::place_k(row, piece)] = words;
    }
  }

  PD_MEMBER void load_queries(const Problem& p, const Plan& plan, const Item& item, int head) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const float scale_all = score_scale(p, item.b, head);
    const bool narrow = Shape::kFp8 && (p.q_dtype == DType::kFloat8E4M3 || p.q_dtype == DType::kFloat8E5M2);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + g;
      const int64_t offset = q_offset(p, item, query_row(p, plan, item, head, row));
      const int bytes = Shape::kFp32 ? 4 : narrow ? 1 : 2;
      const char* source = static_cast<const char*>(p.q) + offset * bytes;
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        const int dim = (chunk * 4 + t) * Shape::kVecK;
        uint4 words[2] = {};
        if (row < item.rows && dim < p.head_dim) {
          const uint4* piece = reinterpret_cast<const uint4*>(source + dim * bytes);
          words[0] = piece[0];
          if (Shape::kFp8 && !narrow) words[1] = piece[1];
        }
#pragma unroll
        for (int half = 0; half < Shape::kStepsK / 2; ++half) {
          q[chunk][2 * half][n][0] = words[half].x;
          q[chunk][2 * half][n][1] = words[half].y;
          q[chunk][2 * half + 1][n][0] = words[half].z;
          q[chunk][2 * half + 1][n][1] = words[half].w;
        }
      }
      if constexpr (Shape::kFp8) {
        queries_to_fp16(p, n, scale_all);
      } else {
        scale[0] = scale_all;
      }
    }
  }

  // Makes fp16 of the queries of row tile n, for an fp8 cache.
  PD_MEMBER void queries_to_fp16(const Problem& p, int n, float scale_all) {
    const int t = threadIdx.x % 4;
    float up = scale_all;
    if (p.q_dtype == DType::kBFloat16) {
      up *= ldexpf(1.f, bf16_to_fp16(n));
    } else if (p.q_dtype != DType::kFloat16) {
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        const uint32_t words[4] = {q[chunk][0][n][0], q[chunk][0][n][1], q[chunk][1][n][0], q[chunk][1][n][1]};
        const bool e4m3 = p.q_dtype == DType::kFloat8E4M3;
#pragma unroll
        for (int step = 0; step < Shape::kVecK / 4; ++step) {
          q[chunk][step][n][0] =
              e4m3 ? fp8_pair_to_fp16<E4m3, false>(words[step]) : fp8_pair_to_fp16<E5m2, false>(words[step]);
          q[chunk][step][n][1] =
              e4m3 ? fp8_pair_to_fp16<E4m3, true>(words[step]) : fp8_pair_to_fp16<E5m2, true>(words[step]);
        }
      }
    }
    // A lane loads row g and scores rows 2t, 2t + 1.
    scale[2 * n] = __shfl_sync(~0u, up, t * 2 * 4);
    scale[2 * n + 1] = __shfl_sync(~0u, up, (t * 2 + 1) * 4);
  }

  // bf16 has more range than fp16 but fewer bits, so a row divided by the power of two below its largest value loses
  // nothing that float32 sums would keep. Returns the exponent.
  PD_MEMBER int bf16_to_fp16(int n) {
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunksK; ++chunk)
#pragma unroll
      for (int w = 0; w < Shape::kVecK / 2; ++w) {
        const uint32_t word = q[chunk][w / 2][n][w % 2];
        largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word & 0xffff0000u))));
      }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = largest > 0.f && largest < INFINITY ? ilogbf(largest) : 0;
    // Two factors: a single one would overflow for a row of subnormals.
    const float down = ldexpf(1.f, -(exponent / 2)), rest = ldexpf(1.f, -(exponent - exponent / 2));
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunksK; ++chunk)
#pragma unroll
      for (int w = 0; w < Shape::kVecK / 2; ++w) {
        uint32_t& word = q[chunk][w / 2][n][w % 2];
        word = pack_pair<false>(__uint_as_float(word << 16) * down * rest,
                                __uint_as_float(word & 0xffff0000u) * down * rest);
      }
    return exponent;
  }

  // Probabilities and output of one tile of keys, from its q.k.
  PD_MEMBER void attend(const Problem& p, const Plan& plan, const Item& item, int head, const char* stage, int tile,
                        float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    if (p.softcap != 0.f || p.alibi_slopes) {
      modify_scores(p, plan, item, head, tile, s);
    } else {
      scale_scores(s);
    }
    if (tile * Shape::kTileKeys < item.inner_begin || (tile + 1) * Shape::kTileKeys > item.inner_end) {
      mask_scores(p, plan, item, tile, s);
    }

    // Online softmax
    float top[kLaneRows];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      top[i] = m[i];
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
        top[i] = fmaxf(top[i], fmaxf(s[sub][i / 2][i % 2], s[sub][i / 2][i % 2 + 2]));
      }
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
      moved |= top[i] != m[i];
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        rescale(i, fast_rescale(m[i], top[i]));
        m[i] = top[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const float base = m[i] == -INFINITY ? 0.f : reference(i);
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][i / 2][i % 2 + half * 2];
          x = fast_exp2(x - base);
          l[i] += x;
        }
    }
    if constexpr (Shape::kFp32) {
      add_float_values(stage + Shape::kStageBytesK, static_cast<int>(p.head_dim_v), s);
    } else {
      add_values(stage + Shape::kStageBytesK, s);
    }
  }

  PD_MEMBER void rescale(int i, float factor) {
    l[i] *= factor;
#pragma unroll
    for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
      for (int j = 0; j < Shape::kVecV / 2; ++j) {
        acc[c][j][i / 2][i % 2] *= factor;
        acc[c][j][i / 2][i % 2 + 2] *= factor;
      }
  }

  PD_MEMBER void score_keys(const char* stage, const char* queries, float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    constexpr int kUnrolled = Shape::kSharedQueries ? 2 : Shape::kChunksK;
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    stage += g * Shape::kPieces * 16;
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
      // Two sums, as each product waits for the one before it.
      float part[kRowTiles][2][4] = {}, rest[kRowTiles][4] = {};
#pragma unroll kUnrolled
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        const int place = Shape::lane_place_k(g, t, chunk);
        if constexpr (Shape::kSharedQueries) {
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            const uint4 row = reinterpret_cast<const uint4*>(queries)[(n * 8 + g) * Shape::kPieces + place];
            q[0][0][n][0] = row.x;
            q[0][0][n][1] = row.y;
            q[0][1][n][0] = row.z;
            q[0][1][n][1] = row.w;
          }
        }
        const uint4 low = *reinterpret_cast<const uint4*>(stage + (sub * 16 * Shape::kPieces + place) * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(stage + ((sub * 16 + 8) * Shape::kPieces + place) * 16);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int step = 0; step < Shape::kStepsK; ++step)
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            if constexpr (Shape::kFp32) {
              const Tf32Pair<4> keys(
                  {low_words[2 * step], high_words[2 * step], low_words[2 * step + 1], high_words[2 * step + 1]});
              add_product(part[n][step % 2], rest[n], keys, Tf32Pair<2>(q[Shape::kSharedQueries ? 0 : chunk][step][n]));
            } else if constexpr (Shape::kFp8) {
              mma_16x8x16<false>(part[n][step % 2], fp8_pair_to_fp16<Kv, false>(low_words[step]),
                                 fp8_pair_to_fp16<Kv, false>(high_words[step]),
                                 fp8_pair_to_fp16<Kv, true>(low_words[step]),
                                 fp8_pair_to_fp16<Kv, true>(high_words[step]), q[chunk][step][n]);
            } else {
              mma_16x8x16<Shape::kBf16>(part[n][step % 2], low_words[2 * step], high_words[2 * step],
                                        low_words[2 * step + 1], high_words[2 * step + 1], q[chunk][step][n]);
            }
          }
      }
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          s[sub][n][r] = part[n][0][r] + part[n][1][r];
          if constexpr (Shape::kFp32) s[sub][n][r] = with_rest(s[sub][n][r], rest[n][r]);
        }
    }
  }

  // q.k to scores in log2 units, where no feature asks for more than the scale.
  PD_MEMBER void scale_scores(float (&s)[Shape::kSubTiles][kRowTiles][4]) {
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) s[sub][i / 2][i % 2 + half * 2] *= row_scale(i) * PD_LOG2E;
  }

  PD_MEMBER float row_scale(int i) const { return scale[Shape::kFp8 ? i : 0]; }

  // The same with softcap and ALiBi.
  PD_MEMBER void modify_scores(const Problem& p, const Plan& plan, const Item& item, int head, int tile,
                               float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int first = tile * Shape::kTileKeys + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const bool exists = lane_row(i) < item.rows;
      const int q_pos = item.kv_len - item.q_len + lane_token(plan, item, i);
      const float slope = exists ? row_slope(p, item.b, query_row(p, plan, item, head, lane_row(i)).q_head) : 0.f;
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][i / 2][i % 2 + half * 2];
          float distance = fabsf(static_cast<float>(q_pos - (first + sub * 16 + half * 8)));
          x = pd_score(x, row_scale(i), p.softcap, slope, distance) * PD_LOG2E;
        }
    }
  }

  // -inf where the row does not see the key. Only the tiles at the ends of what the rows see come here.
  PD_MEMBER void mask_scores(const Problem& p, const Plan& plan, const Item& item, int tile,
                             float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int first = tile * Shape::kTileKeys + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      KvRange keys = {0, 0};
      if (lane_row(i) < item.rows) keys = row_keys(p, plan, item, lane_token(plan, item, i));
      const int begin = static_cast<int>(keys.begin), end = static_cast<int>(keys.end);
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int key = first + sub * 16 + half * 8;
          if (key < begin || key >= end) s[sub][i / 2][i % 2 + half * 2] = -INFINITY;
        }
    }
  }

  PD_MEMBER void add_values(const char* stage, const float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    stage += t * 2 * Shape::kPieces * 16;
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
      uint32_t probability[kRowTiles][2];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        probability[n][0] = transpose_8x8(pack_pair<Shape::kBf16>(s[sub][n][0], s[sub][n][1]));
        probability[n][1] = transpose_8x8(pack_pair<Shape::kBf16>(s[sub][n][2], s[sub][n][3]));
      }
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksV; ++chunk) {
        uint32_t v[4][4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const char* row = stage + (sub * 16 + quarter / 2 * 8 + quarter % 2) * Shape::kPieces * 16;
          if constexpr (Shape::kVecV == Shape::kVecK) {
            const uint4 words = *reinterpret_cast<const uint4*>(row + Shape::lane_place_v(g, t, chunk) * 16);
            v[quarter][0] = words.x;
            v[quarter][1] = words.y;
            v[quarter][2] = words.z;
            v[quarter][3] = words.w;
          } else {
            const uint2 words = *reinterpret_cast<const uint2*>(row + g * 8);
            v[quarter][0] = words.x;
            v[quarter][1] = words.y;
          }
        }
#pragma unroll
        for (int j = 0; j < Shape::kVecV / 2; ++j) {
          uint32_t a[4];
          if constexpr (Shape::kFp8) {
            // Two values of each key per step: interleave the keys first, then widen.
            const unsigned in_turns = j % 2 ? kHighBytesInTurns : kLowBytesInTurns;
            uint32_t near = __byte_perm(v[0][j / 2], v[1][j / 2], in_turns);
            uint32_t far = __byte_perm(v[2][j / 2], v[3][j / 2], in_turns);
            a[0] = fp8_pair_to_fp16<Kv, false>(near);
            a[1] = fp8_pair_to_fp16<Kv, true>(near);
            a[2] = fp8_pair_to_fp16<Kv, false>(far);
            a[3] = fp8_pair_to_fp16<Kv, true>(far);
          } else {
            a[0] = __byte_perm(v[0][j], v[1][j], kLowHalves);
            a[1] = __byte_perm(v[0][j], v[1][j], kHighHalves);
            a[2] = __byte_perm(v[2][j], v[3][j], kLowHalves);
            a[3] = __byte_perm(v[2][j], v[3][j], kHighHalves);
          }
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            mma_16x8x16<Shape::kBf16>(acc[chunk][j][n], a[0], a[1], a[2], a[3], probability[n]);
          }
        }
      }
    }
  }

  // The same for float32: the sums of 16 keys are added in float32, as the matrix unit cuts its sums off.
  PD_MEMBER void add_float_values(const char* stage, int head_dim_v, const float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    stage += t * 2 * Shape::kPieces * 16;
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
      Tf32Pair<2> weights[kRowTiles][2];  // of 8 keys each
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weights[n][half] = transposed_8x8(s[sub][n][2 * half], s[sub][n][2 * half + 1]);
        }
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksV; ++chunk) {
        if (chunk % 2 == 0 && chunk * 32 >= head_dim_v) break;  // 64 dimensions are ordered by themselves, see tf32.cuh
        uint4 first[2], second[2];                              // values of keys 2t and 2t + 1
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* row = stage + (sub * 16 + half * 8) * Shape::kPieces * 16 + Shape::lane_place_v(g, t, chunk) * 16;
          first[half] = *reinterpret_cast<const uint4*>(row);
          second[half] = *reinterpret_cast<const uint4*>(row + Shape::kPieces * 16);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float sum[kRowTiles][4] = {}, rest[kRowTiles][4] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 &x = first[half], &y = second[half];
            const Tf32Pair<4> values = j == 0 ? Tf32Pair<4>({x.x, x.y, y.x, y.y}) : Tf32Pair<4>({x.z, x.w, y.z, y.w});
#pragma unroll
            for (int n = 0; n < kRowTiles; ++n) add_product(sum[n], rest[n], values, weights[n][half]);
          }
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[chunk][j][n][r] += with_rest(sum[n][r], rest[n][r]);
        }
      }
    }
  }

  // Leaves (m, l) and the accumulators of this warp for finish_segment(): rows of float4 at places spread over the
  // banks.
  PD_MEMBER void publish(char* stage, float2* shared_ml) {
    const int lane = threadIdx.x % kWarp, g = lane / 4;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
      if (lane < 4) shared_ml[lane_row(i)] = make_float2(reference(i), l[i]);
#pragma unroll
      for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
        for (int j = 0; j < Shape::kVecV / 2; j += 2) {
          const int quad = ((c * 8 + g) * Shape::kVecV + 2 * j) / 4;
          *quad_of(stage, lane_row(i), quad) =
              make_float4(acc[c][j][i / 2][i % 2], acc[c][j][i / 2][i % 2 + 2], acc[c][j + 1][i / 2][i % 2],
                          acc[c][j + 1][i / 2][i % 2 + 2]);
        }
    }
  }

  static PD_MEMBER float4* quad_of(char* stage, int row, int quad) {
    const int t = row / 2 % 4, spread = Shape::kVecV == 16 ? t : Shape::kVecV == 8 ? t % 2 + t / 2 * 4 : t * 2;
    return reinterpret_cast<float4*>(stage) + row * (kHeadDim / 4) + (quad ^ spread);
  }
};

}  // namespace paged_attn
