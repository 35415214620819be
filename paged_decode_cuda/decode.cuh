// Attention of few rows over many keys on the matrix unit (mma m16n8k16): fp16 and bf16 caches, and fp8 ones widened to
// fp16 in registers.
//
// A warp takes a tile of keys of one (request, kv_head). Keys are the M side of both products, rows the N side:
// S^T = K Q^T and O^T = V^T P^T, so 8 rows (a group of heads, several tokens) fill a matrix tile and one row wastes
// nothing of the memory's time. The order of the terms of a product is free, so a lane's 16-byte pieces hold whole terms
// and no value changes lanes on its way to the matrix unit. Each warp has a queue of its own in shared memory, several
// tiles deep, which it fills by asynchronous copies of whole 128-byte lines (half lines cost a quarter of the bandwidth)
// and reads without a barrier of the block. The copies run ahead across the end of a segment into the next one.
//
// Grid: plan.blocks thread blocks of `warps` warps; the warps of a block take the tiles of a segment in turns.
// Shared memory: the queues, warp by warp; then accumulators and (m, l) for the merge of the warps.
#pragma once

#include "work.cuh"

namespace paged_attn {

template <typename Kv, int kHeadDim, int kRowTiles>
struct DecodeShape {
  static constexpr int kRows = 8 * kRowTiles;
  // Elements of a copy, of keys and of values: 8 lanes share a row of values.
  static constexpr int kVecK = 16 / Kv::kBytes;
  static constexpr int kVecV = kVecK < kHeadDim / 8 ? kVecK : kHeadDim / 8;
  static constexpr int kCopyBytesV = kVecV * Kv::kBytes;
  static constexpr int kChunksK = kHeadDim / (4 * kVecK);
  static constexpr int kChunksV = kHeadDim / (8 * kVecV);
  // Tiles of about 8 KiB: K and V of 16 keys, or 32 when a row is short.
  static constexpr int kTileKeys = kHeadDim * Kv::kBytes <= 128 ? 32 : 16;
  static constexpr int kSubTiles = kTileKeys / 16;
  // 16-byte pieces of a row of keys or values.
  static constexpr int kPieces = kHeadDim * Kv::kBytes / 16;
  static constexpr int kStageBytesK = kTileKeys * kPieces * 16;
  static constexpr int kStageBytes = 2 * kStageBytesK;
  static constexpr int kStages = kStageBytes >= 8192 ? 3 : 6;
  // Places of pieces in a row of shared memory, such that the 8 lanes that read at a time find them in different banks:
  // of keys, 4 pieces of rows g and g + 1; of values, 2 pieces of rows 2t. Rows of 64 bytes have too few for that.
  static PD_MEMBER int place_k(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row % 2 * 4); }
  static PD_MEMBER int place_v(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row / 2 % 4 * 2); }
  static constexpr int kAccRegs = kHeadDim / 16 * 4 * kRowTiles;
  static constexpr bool kBf16 = IsBf16<Kv>::value;
  static constexpr bool kFp8 = Kv::kBytes == 1;
  static constexpr int kQueueBytes = kStages * kStageBytes;
};

// Copies tiles into the queue of its warp, up to kStages - 1 tiles ahead of their use.
template <typename Kv, int kHeadDim, int kRowTiles>
struct TileLoader {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;

  Walker walker;
  Segment segment;
  int tile;          // next to copy
  bool live;         // there is one
  int page, slot;    // of key `lane` of that tile; page -1: nothing to read there
  const int32_t* pages;
  int base_page, base_slot;  // of a request without a table
  const char *k_head, *v_head;

  PD_MEMBER void start(const Problem& p, const Plan& plan, const Walker& first) {
    walker = first;
    tile = 0;
    segment.tile_end = 0;
    find_tile(p, plan, threadIdx.x / kWarp);
  }

  // Moves to the next segment until this warp has a tile in it.
  PD_MEMBER void find_tile(const Problem& p, const Plan& plan, int warp) {
    live = true;
    while (tile >= segment.tile_end) {
      if (!walker.next(p, plan, segment)) {
        live = false;
        return;
      }
      tile = segment.tile + warp;
    }
    const Cache& cache = p.cache;
    k_head = static_cast<const char*>(cache.k) + segment.head * cache.k_stride_head * Kv::kBytes;
    v_head = static_cast<const char*>(cache.v) + segment.head * cache.v_stride_head * Kv::kBytes;
    int b = walker.item.b;
    pages = cache.block_table ? cache.block_table + table_row(p, b) * cache.block_table_stride : nullptr;
    base_page = cache.cu_seqlens_k ? 0 : table_row(p, b);
    base_slot = cache.cu_seqlens_k ? cache.cu_seqlens_k[b] : 0;
    find_pages(p, plan);
  }

  // Looks up the pages of `tile`, one tile before they are needed.
  PD_MEMBER void find_pages(const Problem& p, const Plan& plan) {
    int key = tile * Shape::kTileKeys + threadIdx.x % Shape::kTileKeys;
    page = -1;
    slot = key;
    if (key < walker.item.key_begin || key >= walker.item.key_end) return;
    if (pages) {
      int index = plan.page_size.divide(key);
      slot = key - index * static_cast<int>(plan.page_size.divisor);
      if (index < p.cache.max_pages) page = pages[index];
    } else {
      page = base_page;
      slot = base_slot + key;
      if (slot >= p.cache.page_size) page = -1;
    }
    if (page >= p.cache.num_pages) page = -1;
  }

  static constexpr uint32_t kNowhere = ~0u;

  // All rows of a tile, 8 consecutive lanes to a line: the memory system takes 8 lanes of 16 bytes at a time.
  template <bool kValues>
  PD_MEMBER void copy_rows(uint32_t stage, const char* head, uint32_t place_of_key, int head_dim) {
    constexpr int kLanes = Shape::kPieces < 8 ? Shape::kPieces : 8, kRows = kWarp / kLanes;
    const int lane = threadIdx.x % kWarp, first_row = lane / kLanes, piece = lane % kLanes;
    const uint32_t target = stage + (first_row * Shape::kPieces +
                                     (kValues ? Shape::place_v(first_row, piece) : Shape::place_k(first_row, piece))) * 16;
#pragma unroll
    for (int row = 0; row < Shape::kTileKeys; row += kRows) {
      uint32_t place = __shfl_sync(~0u, place_of_key, row + first_row);
      const char* source = head + static_cast<uint64_t>(place == kNowhere ? 0 : place) * 16 + piece * 16;
      // The place of a piece depends on its row modulo 8, and with 4 rows at a time that is one of two.
      const uint32_t exchange = kValues && kRows == 4 && row % 8 != 0 ? 4 * 16 : 0;
#pragma unroll
      for (int c = 0; c < Shape::kPieces; c += kLanes) {
        bool valid = place != kNowhere && (c + piece) * Shape::kVecK < head_dim;
        copy_async<16>((target ^ exchange) + (row * Shape::kPieces + c) * 16, valid ? source + c * 16 : head, valid);
      }
    }
  }

  // Starts the copies of one tile into a stage and moves on. Always one group, so that groups count tiles.
  PD_MEMBER void copy(const Problem& p, const Plan& plan, uint32_t stage) {
    if (live) {
      const Cache& cache = p.cache;
      // In units of 16 bytes a cache of 64 GiB fits into 32 bits, half of the registers and shuffles of a pointer.
      const bool found = page >= 0;
      uint32_t k_place = found ? static_cast<uint32_t>((page * cache.k_stride_page + slot * cache.k_stride_slot) *
                                                        Kv::kBytes / 16)
                               : kNowhere;
      uint32_t v_place = found ? static_cast<uint32_t>((page * cache.v_stride_page + slot * cache.v_stride_slot) *
                                                        Kv::kBytes / 16)
                               : kNowhere;
      copy_rows<false>(stage, k_head, k_place, static_cast<int>(p.head_dim));
      copy_rows<true>(stage + Shape::kStageBytesK, v_head, v_place, static_cast<int>(p.head_dim_v));
      tile += blockDim.x / kWarp;
      if (tile < segment.tile_end) {
        find_pages(p, plan);
      } else {
        find_tile(p, plan, threadIdx.x / kWarp);
      }
    }
    copy_commit();
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
  int all_begin, all_end;                    // keys that every row sees need no mask

  // Row of the tile that a lane's entry i stands for.
  static PD_MEMBER int lane_row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  static PD_MEMBER int lane_token(const Plan& plan, const Item& item, int i) {
    return plan.group.divide(item.first_row + lane_row(i));
  }

  PD_MEMBER void start(const Problem& p, const Plan& plan, const Item& item, int head) {
    load_queries(p, plan, item, head);
    all_begin = 0;
    all_end = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      m[i] = -INFINITY;
      l[i] = 0.f;
      if (lane_row(i) < item.rows) {
        KvRange keys = row_keys(p, item, lane_token(plan, item, i));
        all_begin = max(all_begin, static_cast<int>(keys.begin));
        all_end = min(all_end, static_cast<int>(keys.end));
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      all_begin = max(all_begin, __shfl_xor_sync(~0u, all_begin, step));
      all_end = min(all_end, __shfl_xor_sync(~0u, all_end, step));
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
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      int row = n * 8 + g;
      bool exists = row < item.rows;
      int token = plan.group.divide(item.first_row + row);
      int q_head = head * static_cast<int>(p.group) + item.first_row + row - token * static_cast<int>(p.group);
      int64_t offset = item.b * p.q_stride_batch + (item.q_begin + token) * p.q_stride_token + q_head * p.q_stride_head;
      if constexpr (!Shape::kFp8) {
#pragma unroll
        for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
          int dim = (chunk * 4 + t) * Shape::kVecK;
          uint4 words = make_uint4(0, 0, 0, 0);
          if (exists && dim < p.head_dim) {
            words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.q) + offset + dim);
          }
          q[chunk][0][n][0] = words.x;
          q[chunk][0][n][1] = words.y;
          q[chunk][1][n][0] = words.z;
          q[chunk][1][n][1] = words.w;
        }
        scale[0] = scale_all;
      } else {
        load_queries_as_fp16(p, offset, exists, n, scale_all);
      }
    }
  }

  // The queries of row tile n for an fp8 cache, as fp16.
  PD_MEMBER void load_queries_as_fp16(const Problem& p, int64_t offset, bool exists, int n, float scale_all) {
    const int t = threadIdx.x % 4;
    const bool fp8 = p.q_dtype == DType::kFloat8E4M3 || p.q_dtype == DType::kFloat8E5M2;
    const char* row = static_cast<const char*>(p.q) + offset * (fp8 ? 1 : 2);
    uint32_t words[Shape::kChunksK][8];
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
      int dim = (chunk * 4 + t) * Shape::kVecK;
      uint4 low = make_uint4(0, 0, 0, 0), high = low;
      if (exists && dim < p.head_dim) {
        const uint4* source = reinterpret_cast<const uint4*>(row + dim * (fp8 ? 1 : 2));
        low = source[0];
        if (!fp8) high = source[1];
      }
      store_words(words[chunk], low, high);
    }
    float up = scale_all;
    if (p.q_dtype == DType::kBFloat16) up *= ldexpf(1.f, bf16_to_fp16(words));
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunksK; ++chunk)
#pragma unroll
      for (int step = 0; step < Shape::kVecK / 4; ++step) {
        uint32_t low = words[chunk][2 * step], high = words[chunk][2 * step + 1];
        if (p.q_dtype == DType::kFloat8E4M3) {
          low = fp8_pair_to_fp16<E4m3, false>(words[chunk][step]);
          high = fp8_pair_to_fp16<E4m3, true>(words[chunk][step]);
        } else if (p.q_dtype == DType::kFloat8E5M2) {
          low = fp8_pair_to_fp16<E5m2, false>(words[chunk][step]);
          high = fp8_pair_to_fp16<E5m2, true>(words[chunk][step]);
        }
        q[chunk][step][n][0] = low;
        q[chunk][step][n][1] = high;
      }
    // A lane loads row g and scores rows 2t, 2t + 1.
    scale[2 * n] = __shfl_sync(~0u, up, t * 2 * 4);
    scale[2 * n + 1] = __shfl_sync(~0u, up, (t * 2 + 1) * 4);
  }

  static PD_MEMBER void store_words(uint32_t (&words)[8], const uint4& low, const uint4& high) {
    words[0] = low.x;
    words[1] = low.y;
    words[2] = low.z;
    words[3] = low.w;
    words[4] = high.x;
    words[5] = high.y;
    words[6] = high.z;
    words[7] = high.w;
  }

  // bf16 has more range than fp16 but fewer bits, so a row divided by the power of two below its largest value loses
  // nothing that float32 sums would keep. Returns the exponent.
  static PD_MEMBER int bf16_to_fp16(uint32_t (&words)[Shape::kChunksK][8]) {
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunksK; ++chunk)
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        uint32_t word = words[chunk][w];
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
      for (int w = 0; w < 8; ++w) {
        uint32_t word = words[chunk][w];
        words[chunk][w] = pack_pair<false>(__uint_as_float(word << 16) * down * rest,
                                           __uint_as_float(word & 0xffff0000u) * down * rest);
      }
    return exponent;
  }

  // Scores, probabilities and output of one tile of keys.
  PD_MEMBER void attend(const Problem& p, const Plan& plan, const Item& item, int head, uint32_t stage, int tile) {
    float s[Shape::kSubTiles][kRowTiles][4];
    score_keys(stage, s);
    if (p.softcap != 0.f || p.alibi_slopes) {
      modify_scores(p, plan, item, head, tile, s);
    } else {
      scale_scores(s);
    }
    if (tile * Shape::kTileKeys < all_begin || (tile + 1) * Shape::kTileKeys > all_end) mask_scores(p, plan, item, tile, s);

    // Online softmax
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float top = m[i];
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub) top = fmaxf(top, fmaxf(s[sub][i / 2][i % 2], s[sub][i / 2][i % 2 + 2]));
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (__any_sync(~0u, top != m[i])) {
        float factor = pd_rescale(m[i], top);
        m[i] = top;
        l[i] *= factor;
#pragma unroll
        for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
          for (int j = 0; j < Shape::kVecV / 2; ++j) {
            acc[c][j][i / 2][i % 2] *= factor;
            acc[c][j][i / 2][i % 2 + 2] *= factor;
          }
      }
      float base = top == -INFINITY ? 0.f : top;
#pragma unroll
      for (int sub = 0; sub < Shape::kSubTiles; ++sub)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[sub][i / 2][i % 2 + half * 2];
          x = fast_exp2(x - base);
          l[i] += x;
        }
    }
    add_values(stage, s);
  }

  PD_MEMBER void score_keys(uint32_t stage, float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const uint32_t source = stage + g * Shape::kPieces * 16;
#pragma unroll
    for (int sub = 0; sub < Shape::kSubTiles; ++sub) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[sub][n][r] = 0.f;
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunksK; ++chunk) {
        uint32_t low[4], high[4];  // keys g and g + 8
        const uint32_t piece = source + Shape::place_k(g, chunk * 4 + t) * 16;
        load_shared<16>(piece + sub * 16 * Shape::kPieces * 16, low);
        load_shared<16>(piece + (sub * 16 + 8) * Shape::kPieces * 16, high);
#pragma unroll
        for (int step = 0; step < Shape::kVecK / 4; ++step)
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            if constexpr (Shape::kFp8) {
              mma_16x8x16<false>(s[sub][n], fp8_pair_to_fp16<Kv, false>(low[step]),
                                 fp8_pair_to_fp16<Kv, false>(high[step]), fp8_pair_to_fp16<Kv, true>(low[step]),
                                 fp8_pair_to_fp16<Kv, true>(high[step]), q[chunk][step][n]);
            } else {
              mma_16x8x16<Shape::kBf16>(s[sub][n], low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1],
                                        q[chunk][step][n]);
            }
          }
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
      if (lane_row(i) < item.rows) keys = row_keys(p, item, lane_token(plan, item, i));
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

  PD_MEMBER void add_values(uint32_t stage, const float (&s)[Shape::kSubTiles][kRowTiles][4]) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const uint32_t source = stage + Shape::kStageBytesK + t * 2 * Shape::kPieces * 16;
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
        uint32_t v[4][Shape::kCopyBytesV / 4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const uint32_t row = source + (sub * 16 + quarter / 2 * 8 + quarter % 2) * Shape::kPieces * 16;
          if constexpr (Shape::kCopyBytesV == 16) {
            load_shared<16>(row + Shape::place_v(2 * t, chunk * 8 + g) * 16, v[quarter]);
          } else {
            load_shared<8>(row + (chunk * 8 + g) * 8, v[quarter]);
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

  // Brings the sum over all warps into the first one.
  PD_MEMBER void merge_warps(float* shared_acc, float2* shared_ml) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
    }
    if (warps == 1) return;
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) shared_ml[warp * Shape::kRows + lane_row(i)] = make_float2(m[i], l[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float top = -INFINITY, sum = 0.f;
      for (int w = 0; w < warps; ++w) top = fmaxf(top, shared_ml[w * Shape::kRows + lane_row(i)].x);
      for (int w = 0; w < warps; ++w) {
        float2 other = shared_ml[w * Shape::kRows + lane_row(i)];
        sum += other.y * pd_rescale(other.x, top);
      }
      float factor = pd_rescale(m[i], top);
      m[i] = top;
      l[i] = sum;
#pragma unroll
      for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
        for (int j = 0; j < Shape::kVecV / 2; ++j) {
          acc[c][j][i / 2][i % 2] *= factor;
          acc[c][j][i / 2][i % 2 + 2] *= factor;
        }
    }
    for (int half = warps / 2; half > 0; half /= 2) {
      float* mine = shared_acc + warp % half * Shape::kAccRegs * kWarp + lane;
      if (warp >= half && warp < 2 * half) exchange<true>(mine);
      __syncthreads();
      if (warp < half) exchange<false>(mine);
      __syncthreads();
    }
  }

  template <bool kStore>
  PD_MEMBER void exchange(float* mine) {
#pragma unroll
    for (int c = 0; c < Shape::kChunksV; ++c)
#pragma unroll
      for (int j = 0; j < Shape::kVecV / 2; ++j)
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            float& other = mine[(((c * (Shape::kVecV / 2) + j) * kRowTiles + n) * 4 + r) * kWarp];
            if constexpr (kStore) {
              other = acc[c][j][n][r];
            } else {
              acc[c][j][n][r] += other;
            }
          }
  }

  // The finished rows, when the block had all of their keys.
  PD_MEMBER void write_output(const Problem& p, const Plan& plan, const Item& item, int head) {
    const int g = threadIdx.x % kWarp / 4;
    const DType out_dtype = output_dtype(p);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (lane_row(i) >= item.rows) continue;
      RowTarget target = row_target(p, plan, item, head, lane_row(i));
      float factor = finish_row(p, target, item.b, head, m[i], l[i], g == 0);
#pragma unroll
      for (int c = 0; c < Shape::kChunksV; ++c) {
        int dim = (c * 8 + g) * Shape::kVecV;
        if (dim >= p.head_dim_v) continue;
#pragma unroll
        for (int j = 0; j < Shape::kVecV / 2; j += 4) {
          uint32_t words[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            float low = acc[c][j + w][i / 2][i % 2] * factor, high = acc[c][j + w][i / 2][i % 2 + 2] * factor;
            words[w] = out_dtype == DType::kBFloat16 ? pack_pair<true>(low, high) : pack_pair<false>(low, high);
          }
          uint16_t* out = static_cast<uint16_t*>(p.out) + target.out + dim + 2 * j;
          *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  PD_MEMBER void write_partial(const Problem& p, const Plan& plan, const Item& item, int slot) {
    const int g = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      int row = lane_row(i);
      if (row >= item.rows) continue;
      int64_t place = static_cast<int64_t>(slot) * plan.rows_per_tile + row;
      if (g == 0) plan.partial_ml[place] = make_float2(m[i], l[i]);
#pragma unroll
      for (int c = 0; c < Shape::kChunksV; ++c) {
        int dim = (c * 8 + g) * Shape::kVecV;
        if (dim >= p.head_dim_v) continue;
        float4* target = reinterpret_cast<float4*>(plan.partial_acc + place * plan.partial_stride + dim);
#pragma unroll
        for (int j = 0; j < Shape::kVecV / 2; j += 2) {
          target[j / 2] = make_float4(acc[c][j][i / 2][i % 2], acc[c][j][i / 2][i % 2 + 2],
                                      acc[c][j + 1][i / 2][i % 2], acc[c][j + 1][i / 2][i % 2 + 2]);
        }
      }
    }
  }
};

template <typename Kv, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(128, 1)
    decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  using Shape = DecodeShape<Kv, kHeadDim, kRowTiles>;
  extern __shared__ __align__(128) char shared[];
  __shared__ ScanScratch scratch;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;

  wait_for_predecessor();
  let_successor_start();

  // Which keys
  Walker walker;
  Stretch stretch = {};
  if (plan.balanced) {
    stretch = find_stretch(p, plan, scratch, walker);
  } else {
    find_split(p, plan, walker);
  }

  // Start the copies
  const uint32_t queue = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * Shape::kStages * Shape::kStageBytes;
  TileLoader<Kv, kHeadDim, kRowTiles> loader;
  loader.start(p, plan, walker);
#pragma unroll
  for (int stage = 0; stage < Shape::kStages - 1; ++stage) loader.copy(p, plan, queue + stage * Shape::kStageBytes);
  int read_stage = 0, copy_stage = Shape::kStages - 1;

  float* shared_acc = reinterpret_cast<float*>(shared + warps * Shape::kStages * Shape::kStageBytes);
  float2* shared_ml = reinterpret_cast<float2*>(shared_acc + warps / 2 * Shape::kAccRegs * kWarp);
  Merge merge = {};
  Segment segment;
  Rows<Kv, kHeadDim, kRowTiles> rows;
  while (walker.next(p, plan, segment)) {
    rows.start(p, plan, walker.item, segment.head);

    // For each tile of this warp: copy a later one, attend
    for (int tile = segment.tile + warp; tile < segment.tile_end; tile += warps) {
      // The tile has arrived for every lane, and every lane is done with the stage that is filled next.
      copy_wait<Shape::kStages - 2>();
      __syncwarp();
      loader.copy(p, plan, queue + copy_stage * Shape::kStageBytes);
      copy_stage = copy_stage + 1 == Shape::kStages ? 0 : copy_stage + 1;
#ifdef PA_NOCOMPUTE
      if (p.batch < 0)
#endif
      rows.attend(p, plan, walker.item, segment.head, queue + read_stage * Shape::kStageBytes, tile);
      read_stage = read_stage + 1 == Shape::kStages ? 0 : read_stage + 1;
    }

    // Merge the warps, write the rows or their partial
    rows.merge_warps(shared_acc, shared_ml);
    if (warp == 0) {
      if (segment.first && segment.last) {
        rows.write_output(p, plan, walker.item, segment.head);
      } else {
        Ownership own = own_segment(p, plan, stretch, walker, segment);
        rows.write_partial(p, plan, walker.item, own.slot);
        if (own.merge.count > 0) merge = own.merge;
      }
    }
  }
  record_merge(plan, merge);
  clear_unclaimed(p);
}

}  // namespace paged_attn
