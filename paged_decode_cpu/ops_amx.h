// The matrix unit of an Intel processor (AMX): many rows multiply in tiles of 16 rows x 32 elements, which are bfloat16
// or, where the unit has it (AMX-FP16), float16. Elsewhere float16 goes through it in pieces (ops_pieces.h).
//
//   tile 4         left:  16 rows x 32 elements of queries or probabilities
//   tile 6         right: 16 steps x 16 columns of keys or values
//   tiles 0 1 2 3  four products, 16 x 16 floats each: of two tiles of rows and two of columns
//
// A core whose other hardware thread is busy has few tiles to spare: each tile that is in use makes all products slower
// there (docs/cpu.md). So both sides have one tile, which is loaded more often.
//
// The panels of tile.h are what the right tiles want: a row of a tile is one step of a panel, 16 columns of it. All
// tiles are whole: rows and keys are filled up (kRowStep, kValueKeys).
//
// The matrix unit works beside the vector units. So the rows go through a software pipeline in parts of kPartRows:
// while tiles multiply the scores of part i, then the values of part i - 2, vectors make the exponentials of part i -
// 1, some rows after each step of a product (SoftmaxRows::step).
#pragma once

#include "attend.h"
#include "ops_pieces.h"

namespace paged_attn {
namespace {

// What ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the matrix unit of this thread, and releases it at the end: then no context switch saves its 8 KiB.
struct TileUnit {
  explicit TileUnit(const TileConfig& config) { _tile_loadconfig(&config); }
  ~TileUnit() { _tile_release(); }
  TileUnit(const TileUnit&) = delete;
};

// tdpfp16ps: _tile_dpbf16ps for float16. Encoded by hand, for compilers and assemblers that do not know it.
#ifndef PD_TILE_DPFP16PS
#define PD_TILE_DPFP16PS(sum, left, right) \
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(0x03 | (15 - (right)) << 3), "i"(0xc0 | (sum) << 3 | (left)))
#endif

// Tile `sum` += tile `left` x tile `right`, of elements of type `elem`. Numbers of tiles are parts of an instruction.
#define PD_MULTIPLY_TILES(elem, sum, left, right) \
  do {                                            \
    if constexpr (elem == DType::kFloat16) {      \
      PD_TILE_DPFP16PS(sum, left, right);         \
    } else {                                      \
      _tile_dpbf16ps(sum, left, right);           \
    }                                             \
  } while (0)

// A compiler barrier: the intrinsics of tiles do not tell the compiler which memory they read and write.
[[gnu::always_inline]] inline void memory_is_read() { asm volatile("" ::: "memory"); }

// softmax_row for scores that need only a factor (no softcap, no slope), on n keys, padded to whole pairs of registers.
template <class Ops, bool kMasked>
[[gnu::always_inline]] inline void softmax_plain(float* scores, int64_t n, KvRange visible, float factor, uint16_t* p,
                                                 float* m, float* l, float* acc, int64_t width) {
  const __m512i from_first = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(static_cast<int>(-visible.begin)));
  const __m512i count = _mm512_set1_epi32(static_cast<int>(pd_max(visible.end - visible.begin, 0)));
  const auto score = [&](int64_t j) {
    const f32v x = load<DType::kFloat32>(scores + j);
    if constexpr (!kMasked) return x;
    // Keys before the first visible one are negative, so large as unsigned numbers.
    const __m512i key = _mm512_add_epi32(from_first, _mm512_set1_epi32(static_cast<int>(j)));
    const __mmask16 seen = _mm512_cmplt_epu32_mask(key, count);
    return bit_cast<f32v>(_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, bit_cast<__m512>(x)));
  };
  f32v top = splat(-INFINITY), top1 = top;
  for (int64_t j = 0; j < n; j += 2 * kLanes) {
    top = max(top, score(j));
    top1 = max(top1, score(j + kLanes));
  }
  top = max(top, top1) * factor;
  f32v sum = load<DType::kFloat32>(l), sum1 = f32v{};
  const f32v base = splat(base_of<Ops>(top, m, &sum, acc, width, scores, round_up(n, 2 * kLanes), &factor));
  for (int64_t j = 0; j < n; j += 2 * kLanes) {
    const f32v x = exp2(score(j) * factor - base), x1 = exp2(score(j + kLanes) * factor - base);
    sum += x;
    sum1 += x1;
    Ops::store_probabilities(p + j, x, x1);
  }
  store<DType::kFloat32>(l, sum + sum1);
}

// Turns the scores of a part into probabilities, per_step rows at every step of a product of other parts.
template <class Ops>
struct SoftmaxRows {
  const Problem& problem;
  const Item& item;
  const Scratch<Ops>& s;
  const TileRows& tile;
  int64_t h;
  Part part;
  float* scores;
  uint16_t* probabilities;
  int64_t done, per_step;
  const bool plain = problem.softcap == 0.f && s.scales[h].score > 0.f;

  [[gnu::always_inline]] void step() {
    const int64_t until = pd_min(part.count, done + per_step);
    for (; done < until; ++done) {
      if (plain && !has_slope(part.first + done)) {
        plain_row(part.first + done, done * kMaxTile);
      } else {
        row(part.first + done, done * kMaxTile);
      }
    }
    memory_is_read();
  }
  void finish() {
    per_step = part.count;
    step();
  }

 private:
  // A slope of 0 is as good as none, to the last bit.
  bool has_slope(int64_t r) const {
    return problem.alibi_slopes && score_of(problem, item, s, h, r, tile.begin + part.from).slope != 0.f;
  }

  KvRange seen_by(int64_t r) const {
    const int64_t begin = tile.begin + part.from;
    return {pd_max(s.visible[r].begin - begin, 0), pd_min(s.visible[r].end - begin, part.keys)};
  }

  [[gnu::noinline]] void plain_row(int64_t r, int64_t offset) {
    const int64_t i = h * s.head_rows + r, n = part.keys;
    const KvRange visible = seen_by(r);
    const bool whole = visible.begin <= 0 && visible.end == n && n % (2 * kLanes) == 0;
    const auto softmax = [&]<bool kMasked>() __attribute__((always_inline)) {
      softmax_plain<Ops, kMasked>(scores + offset, n, visible, s.scales[h].score * PD_LOG2E, probabilities + offset,
                                  &s.m[i], s.l + i * kLanes, s.acc + i * s.width, s.width);
    };
    if (whole) return softmax.template operator()<false>();
    softmax.template operator()<true>();
  }

  [[gnu::noinline]] void row(int64_t r, int64_t offset) {
    const int64_t i = h * s.head_rows + r;
    softmax_row<Ops>(scores + offset, part.keys, seen_by(r), score_of(problem, item, s, h, r, tile.begin + part.from),
                     probabilities + offset, &s.m[i], s.l + i * kLanes, s.acc + i * s.width, s.width);
  }
};

// How many elements the pieces of a number (ops_pieces.h) lie apart: in the left side of a product (a, rows of queries
// or probabilities) and in the right side (b, panels of keys or values).
struct PieceStrides {
  int64_t a, b;
};

template <DType kElem, DType kQueryType, DType kCacheType>
struct OpsAmx : OpsOfPiece<kElem, kCacheType, 0>::type {
  using Elem = uint16_t;
  static constexpr int kMinPackedRows = 1;
  static constexpr int kPartRows = 32;
  static constexpr int kScoreRows = 2 * kPartRows;
  static constexpr int kStepRows = 32;
  static constexpr int kRowStep = 16;
  static constexpr int kValueKeys = 32;
  static constexpr bool kTiles = true;
  static constexpr int kLeftPieces = pieces_of(kQueryType, kElem);
  static constexpr int kRightPieces = pieces_of(kCacheType, kElem);

  static constexpr int kTileSteps = 16;  // steps of one right tile

  // Scores take all products of pieces, as the lse is held to float32. Values leave out the smallest one, which is
  // below the rounding of the output.
  static constexpr PieceProducts<kLeftPieces, kRightPieces, true> kScoreProducts{};
  static constexpr PieceProducts<kLeftPieces, kRightPieces, false> kValueProducts{};
  static constexpr int64_t kProbabilityPiece = int64_t(kPartRows) * kMaxTile;

  // The pieces of a number lie `piece` elements apart.
  [[gnu::always_inline]] static void store_pieces(Elem* p, int64_t piece, f32v x) {
    for (int i = 0; i < kLeftPieces; ++i, p += piece) {
      const f32v first = i < kLeftPieces - 1 ? first_piece(x) : x;
      store<kElem>(p, first);
      x -= first;
    }
  }
  static void store_elems(Elem* p, f32v x) { store_pieces(p, kProbabilityPiece, x); }
  static void store_query(Elem* p, int64_t depth, f32v x) { store_pieces(p, depth, x); }
  [[gnu::always_inline]] static void store_probabilities(Elem* p, f32v x, f32v x1) {
    for (int i = 0; i < kLeftPieces; ++i, p += kProbabilityPiece) {
      const bool last = i == kLeftPieces - 1;
      const f32v first = last ? x : first_piece(x), first1 = last ? x1 : first_piece(x1);
      _mm512_storeu_si512(p, OpsAmx::narrowed(first, first1));
      x -= first;
      x1 -= first1;
    }
  }

  // The products of one pair of pieces, each of which keeps one tile of the product before.
  template <int kRowTiles, int kColumnTiles>
  [[gnu::always_inline]] static void multiply_tiles(const Elem* a, int64_t a_stride, const Elem* b) {
    constexpr int64_t kStride = kPanel * 4;
    const auto left = [&](int64_t tile) { _tile_loadd(4, a + 8 * a_stride * tile, a_stride); };
    const auto right = [&](int64_t tile) { _tile_loadd(6, b + 32 * tile, kStride); };
    right(0);
    left(0);
    PD_MULTIPLY_TILES(kElem, 0, 4, 6);
    if constexpr (kRowTiles == 2) {
      left(1);
      PD_MULTIPLY_TILES(kElem, 2, 4, 6);
    }
    if constexpr (kColumnTiles == 1) return;
    right(1);
    if constexpr (kRowTiles == 2) {
      PD_MULTIPLY_TILES(kElem, 3, 4, 6);
      left(0);
    }
    PD_MULTIPLY_TILES(kElem, 1, 4, 6);
  }

  template <int kRowTiles, int kColumnTiles, const auto& kProducts>
  [[gnu::always_inline]] static void multiply_pieces(const Elem* a, int64_t a_stride, const Elem* b,
                                                     const PieceStrides& piece) {
#pragma GCC unroll 4
    for (int i = 0; i < kProducts.count; ++i)
      multiply_tiles<kRowTiles, kColumnTiles>(a + kProducts.left[i] * piece.a, a_stride,
                                              b + kProducts.right[i] * piece.b);
  }

  // c[16 * kRowTiles rows][16 * kColumnTiles columns] = (c, or 0) + a x b; strides of a and c in bytes.
  template <int kRowTiles, int kColumnTiles, const auto& kProducts, class Beside>
  static void product(const Elem* a, int64_t a_stride, const Elem* b, const PieceStrides& piece, int64_t steps,
                      float* c, int64_t c_stride, bool add, Prefetcher& next, Beside& beside) {
    float *c1 = c + 16, *c2 = c + 16 * c_stride / 4, *c3 = c2 + 16;
    if (add) {
      _tile_loadd(0, c, c_stride);
      if constexpr (kColumnTiles == 2) _tile_loadd(1, c1, c_stride);
      if constexpr (kRowTiles == 2) _tile_loadd(2, c2, c_stride);
      if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_loadd(3, c3, c_stride);
    } else {
      _tile_zero(0);
      if constexpr (kColumnTiles == 2) _tile_zero(1);
      if constexpr (kRowTiles == 2) _tile_zero(2);
      if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s += kTileSteps, a += 2 * kTileSteps, b += 2 * kTileSteps * kPanel) {
      next.advance(kTileSteps * kColumnTiles / 4);
      multiply_pieces<kRowTiles, kColumnTiles, kProducts>(a, a_stride, b, piece);
      beside.step();
    }
    _tile_stored(0, c, c_stride);
    if constexpr (kColumnTiles == 2) _tile_stored(1, c1, c_stride);
    if constexpr (kRowTiles == 2) _tile_stored(2, c2, c_stride);
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_stored(3, c3, c_stride);
  }

  template <int kRowTiles, const auto& kProducts, class Beside>
  static void columns_of(const Elem* a, int64_t a_stride, const Elem* b, const PieceStrides& piece, int64_t panel_steps,
                         int64_t steps, int64_t columns, float* c, int64_t c_stride, bool add, Prefetcher& next,
                         Beside& beside) {
    for (int64_t column = 0; column < columns; column += 32) {
      const Elem* right = b + (column / kPanel * panel_steps * kPanel + column % kPanel) * 2;
      if (columns - column >= 32) {
        product<kRowTiles, 2, kProducts>(a, a_stride, right, piece, steps, c + column, c_stride, add, next, beside);
      } else {
        product<kRowTiles, 1, kProducts>(a, a_stride, right, piece, steps, c + column, c_stride, add, next, beside);
      }
    }
  }

  // As matrix() of tile.h, for at most kPartRows rows; whole tiles of rows are read and written.
  template <const auto& kProducts, class Beside>
  [[gnu::noinline]] static void matrix(int64_t rows, const Elem* a, int64_t a_stride, const Elem* b,
                                       const PieceStrides& piece, int64_t panel_steps, int64_t steps, int64_t columns,
                                       float* c, int64_t c_stride, bool add, Prefetcher& next, Beside& beside) {
    const auto columns_of_rows = rows > 16 ? columns_of<2, kProducts, Beside> : columns_of<1, kProducts, Beside>;
    memory_is_read();
    columns_of_rows(a, a_stride * 2, b, piece, panel_steps, steps, columns, c, c_stride * 4, add, next, beside);
    memory_is_read();
  }

  using Softmax = SoftmaxRows<OpsAmx>;

  static void scores_of(const Scratch<OpsAmx>& s, int64_t h, const Part& part, float* scores, Prefetcher& next,
                        Softmax& beside) {
    const int64_t row = h * s.head_rows + part.first, columns = round_up(part.keys, kLanes);
    const auto multiply = [&](const Elem* q, int64_t depth, const Elem* keys, bool add) {
      const int64_t stride = kLeftPieces * depth;
      matrix<kScoreProducts>(part.count, q + row * stride, stride, keys + part.from * depth, {depth, depth * s.tile},
                             depth / 2, depth / 2, columns, scores, kMaxTile, add, next, beside);
    };
    multiply(s.q, s.depth, s.keys, false);
    if (!s.scales[h].with_qv) return;
    for (int64_t r = 0; r < part.count; ++r)
      for (int64_t j = r * kMaxTile; j < r * kMaxTile + columns; j += kLanes)
        store<DType::kFloat32>(scores + j, load<DType::kFloat32>(scores + j) * s.scales[h].qv_carry);
    multiply(s.qv, s.width, s.value_keys, true);
  }

  static void values_of(const Scratch<OpsAmx>& s, int64_t h, const Part& part, const Elem* p, Prefetcher& next,
                        Softmax& beside) {
    matrix<kValueProducts>(part.count, p, kMaxTile, s.values + part.from * kPanel,
                           {kProbabilityPiece, round_up(s.width, kPanel) * s.tile}, s.tile / 2,
                           round_up(part.keys, kValueKeys) / 2, s.width,
                           s.acc + (h * s.head_rows + part.first) * s.width, s.width, true, next, beside);
  }

  // Lays out keys and values of a tile, piece by piece.
  template <int kPiece = 0>
  static void pack_pieces(const Problem& p, const Scratch<OpsAmx>& s, const TileRows& tile, int64_t k_offset,
                          int64_t v_offset) {
    using Ops = typename OpsOfPiece<kElem, kCacheType, kPiece>::type;
    pack_keys<Ops>(tile.k, k_offset, tile.n, p.head_dim, s.depth / 2, s.keys + kPiece * s.depth * s.tile);
    pack_values<Ops>(tile.v, v_offset, round_up(tile.n, kValueKeys), p.head_dim_v, s.tile / 2,
                     s.values + kPiece * round_up(s.width, kPanel) * s.tile);
    if (p.qv)
      pack_keys<Ops>(tile.v, v_offset, tile.n, p.head_dim_v, s.width / 2, s.value_keys + kPiece * s.width * s.tile);
    if constexpr (kPiece + 1 < kRightPieces) pack_pieces<kPiece + 1>(p, s, tile, k_offset, v_offset);
  }

  // Steps of the products of a part, scores and values.
  static int64_t steps_of(const Scratch<OpsAmx>& s, const Part& part) {
    return pd_ceil_div(part.keys, 32) * (s.depth + s.width) / 32;
  }

  static void attend_tiles(const Problem& p, const Item& item, const Scratch<OpsAmx>& s, const TileRows& tile,
                           Prefetcher& next) {
    for (int64_t h = 0; h < item.heads(); ++h) attend_tile(p, item, s, tile, h, next);
  }

  static void attend_tile(const Problem& p, const Item& item, const Scratch<OpsAmx>& s, const TileRows& tile, int64_t h,
                          Prefetcher& next) {
    const Cache& c = p.cache;
    const int64_t kv_head = item.kv_head_begin + h, rows = item.rows();
    pack_pieces(p, s, tile, kv_head * c.k_stride_head * OpsAmx::kBytes, kv_head * c.v_stride_head * OpsAmx::kBytes);
    const auto scores = [&](int64_t i) { return s.scores + i % 2 * kPartRows * kMaxTile; };
    const auto probabilities = [&](int64_t i) { return s.p + i % 2 * kLeftPieces * kProbabilityPiece; };
    Part part = {}, last = {}, before = {};  // i, i - 1, i - 2: whose scores, exponentials and values are made now
    for (int64_t first = 0, i = 0; first < rows || part.count > 0 || last.count > 0; ++i) {
      before = last;
      last = part;
      part = {};
      for (; first < rows && part.keys == 0; first += kPartRows)
        part = part_of(s, tile, first, pd_min(rows - first, kPartRows), kPanel);
      if (part.keys == 0) part.count = 0;
      // About half of a part's steps are those of its scores, half those of its values.
      const int64_t steps =
          pd_max(1, (part.count > 0 ? steps_of(s, part) : 0) / 2 + (before.count > 0 ? steps_of(s, before) : 0) / 2);
      Softmax softmax = {
          p, item, s, tile, h, last, scores(i + 1), probabilities(i + 1), 0, pd_ceil_div(last.count, steps)};
      if (part.count > 0) scores_of(s, h, part, scores(i), next, softmax);
      if (before.count > 0) values_of(s, h, before, probabilities(i), next, softmax);
      softmax.finish();
    }
  }
};

}  // namespace
}  // namespace paged_attn
