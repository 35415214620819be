// Attention of few rows over many keys on the matrix unit (mma m16n8k16): fp16 and bf16 caches, and fp8 ones widened to
// fp16 in registers.
//
// A warp takes a tile of keys of one (request, kv_head). Keys are the M side of both products, rows the N side:
// S^T = K Q^T and O^T = V^T P^T, so 8 rows (a group of heads, several tokens) fill a matrix tile and one row wastes
// nothing of the memory's time. The order of the terms of a product is free, so a lane's 16-byte pieces hold whole
// terms and no value changes lanes on its way to the matrix unit. Each warp has a queue of its own in shared memory,
// several tiles deep, which it fills by asynchronous copies of whole 128-byte lines (half lines cost a quarter of the
// bandwidth) and reads without a barrier of the block. The copies run ahead across the end of a segment into the next
// one.
//
// Grid: plan.blocks thread blocks; the warps of a block take the tiles of a segment in turns.
// Shared memory: the queues, warp by warp, whose free stages also carry the accumulators when the warps merge; then (m,
// l), and sums of groups of threads.
#pragma once

#include "../exchange.cuh"
#include "basic_call.cuh"
#include "sizes.h"

namespace paged_attn {

template <typename Kv, int kHeadDim, int kRowTiles>
struct DecodeShape : DecodeSizes<Kv::kBytes, kHeadDim, kRowTiles> {
  using DecodeSizes<Kv::kBytes, kHeadDim, kRowTiles>::kPieces;
  static constexpr bool kBf16 = IsBf16<Kv>::value;
  static constexpr bool kFp8 = Kv::kBytes == 1;

  // Places of pieces in a row of shared memory, such that the 8 lanes that read at a time find them in different banks:
  // of keys, 4 pieces of rows g and g + 1; of values, 2 pieces of rows 2t. Rows of 64 bytes have too few for that.
  static PD_MEMBER int place_k(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row % 2 * 4); }
  static PD_MEMBER int place_v(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row / 2 % 4 * 2); }
};
static_assert(sizeof(RowSum) == DecodeSizes<2, 64, 1>::kSumBytes, "what a thread leaves");

// Copies tiles into the queue of its warp, up to kStages - 1 tiles ahead of their use.
template <typename Kv, int kHeadDim, int kRowTiles>
struct TileLoader {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  static constexpr uint32_t kNowhere = ~0u;

  Walker walker;
  Segment segment;
  int key_begin, key_end;  // of the item
  int tile;                // next to copy
  bool live;               // there is one
  int page, slot;          // of key `lane` of that tile; page -1: nothing to read there
  union {
    const int32_t* pages;  // of the request
    struct {
      int page, slot;
    } base;  // where it begins, without a block table
  };
  uint32_t k_head, v_head;  // where the head begins in a slot, in pieces

  PD_MEMBER void start(const Walker& first) {
    walker = first;
    tile = segment.tile_end = 0;
    live = false;
  }

  // Moves to the next segment until this warp has a tile in it, and looks up its pages, one tile before they are
  // needed.
  PD_MEMBER void find_tile(const Problem& p, const Plan& plan, const Dealing& dealing) {
    const Cache& cache = p.cache;
    if (tile >= segment.tile_end) {
      Item item;
      do {
        live = walker.next(p, plan, dealing, segment, item);
        if (!live) return;
        tile = segment.tile + threadIdx.x / kWarp;
      } while (tile >= segment.tile_end);
      k_head = segment.head * plan.k_head_pieces;
      v_head = segment.head * plan.v_head_pieces;
      const int b = item.b;
      key_begin = item.key_begin;
      key_end = item.key_end;
      if (plan.basic) {
        pages = cache.block_table + static_cast<int64_t>(b) * plan.table_stride;
      } else if (cache.block_table) {
        pages = cache.block_table + table_row(p, b) * cache.block_table_stride;
      } else {
        base.page = cache.cu_seqlens_k ? 0 : table_row(p, b);
        base.slot = cache.cu_seqlens_k ? cache.cu_seqlens_k[b] : 0;
      }
    }
    // In pages of whole runs the first key of a run stands for all.
    const int own = tile * Shape::kTileKeys + threadIdx.x % Shape::kTileKeys, run = plan.whole_runs ? kRunKeys : 1;
    const int key = own & -run;
    page = -1;
    if (key + run <= key_begin || key >= key_end) return;
    if (plan.basic || cache.block_table) {
      const int index = plan.page_size.divide(key);
      slot = key - index * static_cast<int>(plan.page_size.divisor);
      if (index < plan.max_pages) page = pages[index];
    } else {
      slot = base.slot + key;
      if (slot >= 0 && slot < cache.page_size) page = base.page;
    }
  }

  // Starts the copies of the tile that was found last into a stage and finds the next. The first call only finds.
  // Always one group, so that groups count tiles.
  PD_MEMBER void copy(const Problem& p, const Plan& plan, const Dealing& dealing, uint32_t stage) {
    if (live) {
      // In pieces of 16 bytes a cache of 64 GiB fits into 32 bits, half of the registers and shuffles of a pointer.
      const bool found = static_cast<uint32_t>(page) < static_cast<uint32_t>(p.cache.num_pages);
      const uint32_t k_place = found ? page * plan.k_page_pieces + slot * plan.k_slot_pieces + k_head : kNowhere;
      const uint32_t v_place = found ? page * plan.v_page_pieces + slot * plan.v_slot_pieces + v_head : kNowhere;
      if (plan.whole_runs) {
        copy_tile<kRunKeys>(p, plan, stage, k_place, v_place);
      } else {
        copy_tile<1>(p, plan, stage, k_place, v_place);
      }
      tile += blockDim.x / kWarp;
    }
    copy_commit();
    find_tile(p, plan, dealing);
  }

  template <int kRun>
  PD_MEMBER void copy_tile(const Problem& p, const Plan& plan, uint32_t stage, uint32_t k_place, uint32_t v_place) {
    copy_rows<kRun, false>(stage, p.cache.k, k_place, plan.k_slot_pieces, static_cast<int>(p.head_dim));
    copy_rows<kRun, true>(stage + Shape::kStageBytesK, p.cache.v, v_place, plan.v_slot_pieces,
                          static_cast<int>(p.head_dim_v));
  }

  // All rows of a tile, 8 consecutive lanes to a line: the memory system takes 8 lanes of 16 bytes at a time. The first
  // of kRun keys says where they are.
  template <int kRun, bool kValues>
  PD_MEMBER void copy_rows(uint32_t stage, const void* cache, uint32_t place_of_key, uint32_t slot_pieces,
                           int head_dim) {
    constexpr int kLanes = Shape::kPieces < 8 ? Shape::kPieces : 8, kRows = kWarp / kLanes;
    constexpr bool kAlone = kRun == 1;
    constexpr int kStep = kAlone ? kRows : kRun;  // rows whose place takes one shuffle
    const int lane = threadIdx.x % kWarp, first_row = lane / kLanes, piece = lane % kLanes;
    const int place = kValues ? Shape::place_v(first_row, piece) : Shape::place_k(first_row, piece);
    const uint32_t target = stage + (first_row * Shape::kPieces + place) * 16;
    const char* first = static_cast<const char*>(cache) + piece * 16;
    const int first_key = tile * Shape::kTileKeys + first_row - key_begin;  // of those that are seen
    const uint64_t policy = read_once_policy(), slot_bytes = static_cast<uint64_t>(slot_pieces) * 16;
#pragma unroll
    for (int run = 0; run < Shape::kTileKeys; run += kStep) {
      const uint32_t offset = __shfl_sync(~0u, place_of_key, kAlone ? run + first_row : run);
      const uint32_t keys = offset == kNowhere ? 0 : key_end - key_begin;
      const char* source = first + static_cast<uint64_t>(offset == kNowhere ? 0 : offset) * 16;
      if (!kAlone) source += first_row * slot_bytes;
#pragma unroll
      for (int row = run; row < run + kStep; row += kRows) {
        const bool valid = kAlone ? keys > 0 : static_cast<uint32_t>(first_key + row) < keys;
        // The place of a piece of values depends on its row modulo 8, and first_row only on the lane.
        const uint32_t exchange = kValues ? (Shape::place_v(row, 0) ^ Shape::place_v(0, 0)) * 16 : 0;
#pragma unroll
        for (int c = 0; c < Shape::kPieces; c += kLanes) {
          copy_async((target ^ exchange) + (row * Shape::kPieces + c) * 16, source + c * 16,
                     valid && (c + piece) * Shape::kVecK < head_dim, policy);
        }
        source += kRows * slot_bytes;
      }
    }
  }
};

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
        // The same as place_k(g, chunk * 4 + t), with the part that is known at compile time apart.
        const int place = Shape::kPieces < 8 ? chunk * 4 + t : (chunk % 2 * 4 ^ g % 2 * 4) + t + chunk / 2 * 8;
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
            // place_v(2t, chunk * 8 + g)
            const uint4 words = *reinterpret_cast<const uint4*>(row + ((g ^ t * 2) + chunk * 8) * 16);
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
            uint32_t near = __byte_perm(v[0][j / 2], v[1][j / 2], j % 2 ? 0x7362 : 0x5140);
            uint32_t far = __byte_perm(v[2][j / 2], v[3][j / 2], j % 2 ? 0x7362 : 0x5140);
            a[0] = fp8_pair_to_fp16<Kv, false>(near);
            a[1] = fp8_pair_to_fp16<Kv, true>(near);
            a[2] = fp8_pair_to_fp16<Kv, false>(far);
            a[3] = fp8_pair_to_fp16<Kv, true>(far);
          } else {
            a[0] = __byte_perm(v[0][j], v[1][j], 0x5410);
            a[1] = __byte_perm(v[0][j], v[1][j], 0x7632);
            a[2] = __byte_perm(v[2][j], v[3][j], 0x5410);
            a[3] = __byte_perm(v[2][j], v[3][j], 0x7632);
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

// What the warps of a block published for four dimensions of a row, kBatch warps at a time. free_stages: which stage of
// each warp's queue holds its accumulators.
template <typename Shape, typename Rows, int kBatch>
PD_DEVICE RowSum sum_batches(char* queues, const int* free_stages, const float2* shared_ml, int row, int quad) {
  const int warps = blockDim.x / kWarp;
  RowSum sum;
#pragma unroll 1
  for (int first = 0; first < warps; first += kBatch) {
    float2 ml[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int w = first + j;
      ml[j] = shared_ml[w * Shape::kRows + row];
      values[j] = *Rows::quad_of(queues + w * Shape::kQueueBytes + free_stages[w] * Shape::kStageBytes, row, quad);
    }
    sum.add(ml, values);
  }
  return sum;
}

// All warps of the biggest block at once: a batch takes 0.14 us. Between the sizes, kWarps divides their number; it may
// be any number where shared memory is scarce.
template <typename Shape, typename Rows>
PD_DEVICE RowSum sum_warps(char* queues, const int* free_stages, const float2* shared_ml, int row, int quad) {
  if (blockDim.x == Shape::kMostWarps * kWarp) {
    return sum_batches<Shape, Rows, Shape::kMostWarps>(queues, free_stages, shared_ml, row, quad);
  }
  return blockDim.x % (Shape::kWarps * kWarp) == 0
             ? sum_batches<Shape, Rows, Shape::kWarps>(queues, free_stages, shared_ml, row, quad)
             : sum_batches<Shape, Rows, 1>(queues, free_stages, shared_ml, row, quad);
}

// How the threads of a block share the merge of a segment: each takes four dimensions of a row at a time; where threads
// are left over, groups of them share the parts. Known when the segment begins, so not computed at its end.
struct Sharing {
  Parts parts;  // of other blocks, to be added
  int groups;
};

template <typename Shape>
PD_DEVICE Sharing share_merge(const Item& item, const Segment& segment, const Dealing& dealing) {
  // Many more parts than are looked at in one go are merged in two levels: a block for itself and those before it.
  constexpr int kManyBatches = 3;
  Sharing sharing = {{0, 1}, 1};
  const int many = kManyBatches * kPartsAtOnce * dealing.length;
  if (!segment.first && item.tiles <= many) return sharing;
  const int behind = parts_behind(item, segment, dealing);
  if (behind == 0) return sharing;
  const int threads = blockDim.x, pieces = item.rows * Shape::kQuads;
  while ((sharing.groups + 1) * pieces <= threads) ++sharing.groups;
  const int fan = kPartsAtOnce * sharing.groups + 1;
  const bool two_levels = item.tiles > many * sharing.groups;
  if (segment.first) {
    sharing.parts = {two_levels ? (behind - 1) / fan + 1 : behind, two_levels ? fan : 1};
  } else if (two_levels && (segment.tile - item.first_tile - 1) / dealing.length % fan == 0) {
    sharing.parts.count = min(behind, fan - 1);
  }
  sharing.groups = max(min(sharing.groups, sharing.parts.count), 1);
  return sharing;
}

// Merges the warps and the parts that this block adds; writes the rows or their partial.
template <typename Shape, typename Rows>
PD_DEVICE void finish_segment(const Problem& p, const Plan& plan, const Item& item, const Segment& segment,
                              const Sharing& sharing, char* queues, const int* free_stages, const float2* shared_ml,
                              RowSum* shared_sums) {
  constexpr int kQuads = Shape::kQuads;
  const int threads = blockDim.x, thread = threadIdx.x, pieces = item.rows * kQuads, groups = sharing.groups;
#pragma unroll 1
  for (int first = 0; first < pieces * groups; first += threads) {
    int row = (first + thread) / kQuads, group = 0;
    const int quad = (first + thread) % kQuads;
    while (row >= item.rows && group < groups) {
      row -= item.rows;
      ++group;
    }
    const bool exists = group < groups && quad * 4 < p.head_dim_v;  // others are only in the team of such a thread
    RowSum sum;
    if (exists && group == 0) sum = sum_warps<Shape, Rows>(queues, free_stages, shared_ml, row, quad);
    if (group < groups) add_parts(plan, group, groups, sharing.parts, row, quad, sum);
    if (groups > 1) {
      // One round, in which all threads are.
      if (group > 0) shared_sums[thread] = sum;
      __syncthreads();
#pragma unroll 1
      for (int g = 1; g < groups && group == 0; ++g) {
        const RowSum& other = shared_sums[thread + g * pieces];
        const float2 ml[1] = {make_float2(other.m, other.l)};
        const float4 values[1] = {make_float4(other.acc[0], other.acc[1], other.acc[2], other.acc[3])};
        sum.add(ml, values);
      }
    }
    if (!exists || group > 0) continue;
    if (segment.first) {
      write_output<true>(p, plan, item, segment.head, row, quad, sum);
    } else {
      write_partial(plan, row, quad, sum);
    }
  }
}

// The kernels differ in what is known when they are compiled.
template <typename Kv, int kHeadDim, int kRowTiles>
PD_DEVICE void decode(const Problem& p, const Plan& plan) {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  extern __shared__ __align__(128) char queues[];
  __shared__ int free_stages[Shape::kMostWarps];
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;

  char* queue = queues + warp * Shape::kQueueBytes;
  const uint32_t queue_address = static_cast<uint32_t>(__cvta_generic_to_shared(queue));
  float2* shared_ml = reinterpret_cast<float2*>(queues + warps * Shape::kQueueBytes);
  RowSum* shared_sums = reinterpret_cast<RowSum*>(shared_ml + warps * Shape::kRows);
  Dealing dealing = {};
  Walker walker = {};
  if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, walker);
  TileLoader<Kv, kHeadDim, kRowTiles> loader;
  loader.start(walker);

  // A line of code that is met for the first time costs as much as a line of data, so everything stands here once. The
  // first segment is an empty one, in which the copies get their lead.
  Segment segment = {};
  Item item = {};
  Sharing sharing = {};
  bool open = false;
  int tile = 0, lead = Shape::kStages, free_stage = Shape::kStages - 1;
  Rows<Kv, kHeadDim, kRowTiles> rows;
  while (true) {
    // For each tile of this warp: copy a later one, attend
#pragma unroll 1
    while (lead > 0 || tile < segment.tile_end) {
      if (lead == Shape::kStages) {
        // The predecessor is awaited here, inside, when all that the loops keep in registers is there.
        wait_for_predecessor();
        let_successor_start();
        prefetch_line(p.cache.block_table, plan.table_lines);
        prefetch_line(p.q, plan.q_lines);
        if (plan.balanced) {
          find_stretch(p, plan, walker, dealing);
        } else {
          find_split(p, plan, walker, dealing);
        }
        loader.start(walker);
      }
      const int read_stage = free_stage + 1 == Shape::kStages ? 0 : free_stage + 1;
      const char* stage = queue + read_stage * Shape::kStageBytes;
      float s[Shape::kSubTiles][kRowTiles][4];
      if (lead == 0) {
        // The tile has arrived for every lane, and every lane is done with the stage that is filled next.
        copy_wait<Shape::kStages - 2>();
        __syncwarp();
        // Reads of shared memory queue behind copies, so the keys are read before the next copies start.
        rows.score_keys(stage, s);
      }
      loader.copy(p, plan, dealing, queue_address + free_stage * Shape::kStageBytes);
      free_stage = read_stage;
      if (lead > 0) {
        --lead;
        continue;
      }
      rows.attend(p, plan, item, segment.head, stage, tile, s);
      tile += warps;
    }

    if (open) {
      // Merge the warps through the stage that each has free, then the parts
      __syncwarp();
      rows.publish(queue + free_stage * Shape::kStageBytes, shared_ml + warp * Shape::kRows);
      if (threadIdx.x % kWarp == 0) free_stages[warp] = free_stage;
      __syncthreads();
      finish_segment<Shape, Rows<Kv, kHeadDim, kRowTiles>>(p, plan, item, segment, sharing, queues, free_stages,
                                                           shared_ml, shared_sums);
      __syncthreads();
    }
    open = true;
    if (!walker.next(p, plan, dealing, segment, item)) break;
    rows.start(p, plan, item, segment.head);
    sharing = share_merge<Shape>(item, segment, dealing);
    tile = segment.tile + warp;
  }
  clear_unclaimed(p);
}

template <typename Kv, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeShape<Kv, kHeadDim, kRowTiles>::kMostWarps* kWarp, 1)
    decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan given) {
  touch(p);
  touch(given);
  Plan plan = given;
  plan.basic = false;  // as the host sees to, but now the compiler knows
  decode<Kv, kHeadDim, kRowTiles>(p, plan);
}

template <typename Kv, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeShape<Kv, kHeadDim, kRowTiles>::kMostWarps* kWarp, 1)
    basic_decode_kernel(const __grid_constant__ BasicCall call) {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  touch(call);
  decode<Kv, kHeadDim, kRowTiles>(basic_problem(call, Kv::kDType, kHeadDim),
                                  basic_plan(call, Shape::kRowShift, Shape::kTileShift, kHeadDim));
}

}  // namespace paged_attn
