// The products of a warp and its softmax: scores of a tile, probabilities, and their product with the values.
//
//     S^T = K Q^T      16 keys x 8 rows          O^T = V^T P^T      16 dimensions x 8 rows
//
// In both the rows are the columns of the result, so a lane (g = lane / 4, t = lane % 4) has keys g, g + 8 or
// dimensions around g of rows 2t, 2t + 1, and what it knows of those rows (m, l, scale) it needs for nothing else.
#pragma once

#include "../rows.cuh"
#include "shape.cuh"

namespace paged_attn {

// One warp's rows, in the layout of the matrix unit. A lane holds rows 2t, 2t + 1 of each row tile.
template <typename Kv, int kHeadDim, int kRowTiles>
struct Rows {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  static constexpr int kLaneRows = 2 * kRowTiles;

  uint32_t q[Shape::kChunksK][Shape::kVecK / 4][kRowTiles][2];
  float acc[Shape::kChunksV][Shape::kVecV / 2][kRowTiles][4];
  float m[kLaneRows], l[kLaneRows];
  float scale[Shape::kFp8 ? kLaneRows : 1];  // of q.k, natural units; per row when the queries were normalised

  // Row of the tile that a lane's entry i stands for.
  static PD_MEMBER int lane_row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  static PD_MEMBER int lane_token(const Plan& plan, const Item& item, int i) {
    return plan.group.divide(item.first_row + lane_row(i));
  }

  PD_MEMBER void start(const Problem& p, const Plan& plan, const Item& item, int head) {
    load_queries(p, plan, item, head);
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

  PD_MEMBER void load_queries(const Problem& p, const Plan& plan, const Item& item, int head) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const float scale_all = score_scale(p, item.b, head);
    const bool narrow = Shape::kFp8 && (p.q_dtype == DType::kFloat8E4M3 || p.q_dtype == DType::kFloat8E5M2);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + g, token = plan.group.divide(item.first_row + row);
      const int q_head = head * static_cast<int>(p.group) + item.first_row + row - token * static_cast<int>(p.group);
      const int64_t offset =
          item.b * p.q_stride_batch + (item.q_begin + token) * p.q_stride_token + q_head * p.q_stride_head;
      const char* source = static_cast<const char*>(p.q) + offset * (narrow ? 1 : 2);
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        const int dim = (chunk * 4 + t) * Shape::kVecK;
        uint4 words[2] = {};
        if (row < item.rows && dim < p.head_dim) {
          const uint4* piece = reinterpret_cast<const uint4*>(source + dim * (narrow ? 1 : 2));
          words[0] = piece[0];
          if (Shape::kFp8 && !narrow) words[1] = piece[1];
        }
#pragma unroll
        for (int half = 0; half < Shape::kVecK / 8; ++half) {
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

  // Those of row tile n, for an fp8 cache.
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
      const float base = m[i] == -INFINITY ? 0.f : m[i];
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][i / 2][i % 2 + half * 2];
          x = fast_exp2(x - base);
          l[i] += x;
        }
    }
    add_values(stage + Shape::kStageBytesK, s);
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

  PD_MEMBER void score_keys(const char* stage, float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    stage += g * Shape::kPieces * 16;
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
      // Two sums, as each product waits for the one before it.
      float part[kRowTiles][2][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        const int place = Shape::lane_place_k(g, t, chunk);
        const uint4 low = *reinterpret_cast<const uint4*>(stage + (sub * 16 * Shape::kPieces + place) * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(stage + ((sub * 16 + 8) * Shape::kPieces + place) * 16);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int step = 0; step < Shape::kVecK / 4; ++step)
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            if constexpr (Shape::kFp8) {
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
        for (int r = 0; r < 4; ++r) s[sub][n][r] = part[n][0][r] + part[n][1][r];
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
      const float slope = exists ? row_slope(p, item.b, row_target(p, plan, item, head, lane_row(i)).q_head) : 0.f;
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

  // Leaves (m, l) and the accumulators of this warp for write_rows: rows of float4 at places spread over the banks.
  PD_MEMBER void publish(char* stage, float2* shared_ml) {
    const int lane = threadIdx.x % kWarp, g = lane / 4;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
      if (lane < 4) shared_ml[lane_row(i)] = make_float2(m[i], l[i]);
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
    const int t = row / 2 % 4, spread = Shape::kVecV == 16 ? t : t % 2 + t / 2 * 4;
    return reinterpret_cast<float4*>(stage) + row * (kHeadDim / 4) + (quad ^ spread);
  }
};

}  // namespace paged_attn
