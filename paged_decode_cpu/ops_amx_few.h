// The matrix unit for few rows of a kv_head (decode, short drafts), on a cache whose numbers it multiplies, keys and
// values in place, or on an 8-bit one, which is widened 16 keys at a time.
//
//   scores   keys are the left side, 16 of them, and queries the right one, laid out once:
//              keys x queries = scores with a row for each key, transposed in registers afterwards
//   values   the right side, where the unit expects pairs of keys: a row of it is k0 k1 of column 0, k0 k1 of column 1,
//            and so on. Read where it lies a row is one key, and its pairs are columns 0 1, columns 2 3, ... So a row
//            of probabilities is on the left twice, once with a zero behind each, once with a zero before each:
//              (p 0) x values = sums of the even columns,   (0 p) x values = sums of the odd columns
//            Half of the products are with zeros, yet no values are laid out. (An infinite value makes its neighbour's
//            sum NaN; attend_again repairs that.)
//
//   tiles 0 1   sums of values: two rows for each query (even and odd columns), 32 columns each
//   tile 4      probabilities: two rows for each query, 16 keys
//   tile 5      scores of 16 keys: a column for each query
//   tile 6      16 keys, 32 elements each; or 16 keys of values, 32 columns each
//   tile 7      16 pairs of queries, 32 elements each
//
// As few tiles are in use as possible, for the reason in ops_amx.h.
//
// All kv_heads go through each step before the next one (scores, softmax, values), so that none waits for its own sums.
#pragma once

#include "ops_amx.h"

namespace paged_attn {
namespace {

template <DType kElem, DType kCacheType = kElem>
struct OpsAmxFew : OpsAmx<kElem, kElem, kCacheType> {
  using Many = OpsAmx<kElem, kElem, kCacheType>;
  using Many::kBytes, Many::kMaxDotRows;
  using typename Many::Elem;

  static constexpr bool kFewRows = true;
  static constexpr int kMostRows = 16, kFewestKeys = 32;  // with fewer keys vectors are as fast
  static constexpr int kMinPackedRows = kMostRows + 1;    // never
  static constexpr int kKeys = 16;                        // of one product
  static constexpr int kChunk = 32;                       // elements of one product
  static constexpr int kRowStep = 4;
  static constexpr int64_t kMostRowsAtOnce = 8;     // of probabilities
  static constexpr int kProbabilityTile = 16 * 32;  // elements of one left tile of them
  static constexpr int kColumns = 32;               // of one product; head_dim_v is a multiple of it

  using Softmax = SoftmaxRows<OpsAmxFew>;
  using ScratchFew = Scratch<OpsAmxFew>;

  // Rows are taken in equal shares, so that the padding of the last share lies within head_rows.
  static int64_t rows_at_once(int64_t rows) { return pd_ceil_div(rows, pd_ceil_div(rows, kMostRowsAtOnce)); }

  static TileConfig config(int64_t rows) {
    TileConfig config;
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(2 * rows_at_once(rows));
    config.row_bytes[5] = config.row_bytes[7] = static_cast<uint16_t>(4 * round_up(rows, kRowStep));
    return config;
  }

  // As how many steps start_fetch (fetch.h) counts a product of 16 keys and 32 elements.
  static uint32_t steps_of(int64_t rows) { return static_cast<uint32_t>(kKeys * pd_ceil_div(rows, kMaxDotRows)); }

  // A row of sums has the even columns first, then the odd ones.
  static void load_sums(const float* acc, int64_t d, int64_t width, f32v* chunk) {
    const f32v even = load<DType::kFloat32>(acc + d / 2), odd = load<DType::kFloat32>(acc + (width + d) / 2);
    chunk[0] = interleaved<0>(even, odd, LaneIndices{});
    chunk[1] = interleaved<1>(even, odd, LaneIndices{});
  }

  // Turns the rows of every head, [row][depth], into right tiles, [32 elements][pair][row], four rows at a time.
  static void lay_out_queries(const ScratchFew& s, const Item& item) {
    Elem *q = s.q, *plain = s.keys;  // a copy of the rows, where no keys are yet
    for (int64_t h = 0; h < item.heads(); ++h, q += s.head_rows * s.depth) {
      memcpy(plain, q, item.rows() * s.depth * sizeof(Elem));
      for (int64_t d = 0; d < s.depth; d += kChunk)
        for (int64_t r = 0; r < item.rows(); r += 4) {
          f32v v[4];
          for (int i = 0; i < 4; ++i) memcpy(&v[i], plain + (r + i) * s.depth + d, sizeof v[i]);
          transpose_quarters(v);
          Elem* tile = q + d * s.head_rows + 2 * r;
          for (int pair = 0; pair < 16; ++pair)
            memcpy(tile + 2 * s.head_rows * pair, reinterpret_cast<const float*>(&v[pair % 4]) + pair / 4 * 4,
                   4 * sizeof(float));
        }
    }
    memory_is_read();
  }

  // Transposes the four 4 x 4 blocks of four registers.
  [[gnu::always_inline]] static void transpose_quarters(f32v* v) {
    const f32v ab = low<1>(v[0], v[1]), cd = low<1>(v[2], v[3]);
    const f32v ab1 = high<1>(v[0], v[1]), cd1 = high<1>(v[2], v[3]);
    v[0] = low<2>(ab, cd);
    v[1] = high<2>(ab, cd);
    v[2] = low<2>(ab1, cd1);
    v[3] = high<2>(ab1, cd1);
  }

  // Keys or values of one head in a tile: the rows of its slots, `offset` bytes into each. Of every 16 rows the
  // distance between them, or 0 where it is not the same for all.
  struct Rows {
    const char* const* slots;
    int64_t offset;
    const int64_t* distances;
  };

  static void find_distances(const char* const* slots, int64_t n, int64_t* distances) {
    for (int64_t j = 0; j < n; j += kKeys, slots += kKeys) {
      const int64_t distance = slots[1] - slots[0];
      bool even = true;
      for (int i = 2; i < kKeys; ++i) even &= slots[i] - slots[i - 1] == distance;
      distances[j / kKeys] = even ? distance : 0;
    }
  }

  // n numbers of an 8-bit cache, a multiple of kChunk.
  [[gnu::always_inline]] static void widen(const char* row, int64_t n, Elem* elems) {
    typename Many::Reg wide[2];
    int64_t d = 0;
    for (; d + 2 * kChunk <= n; d += 2 * kChunk) {
      Many::load_keys(row + d, wide);
      _mm512_storeu_si512(elems + d, wide[0]);
      _mm512_storeu_si512(elems + d + kChunk, wide[1]);
    }
    if (d == n) return;
    Many::load_keys_tail(row + d, kChunk, wide);
    _mm512_storeu_si512(elems + d, wide[0]);
  }

  // Where n elements of each of the 16 rows from j on lie, and at what distance: in place, or in `copy`.
  struct Place {
    const char* first;
    int64_t distance;
  };
  [[gnu::always_inline]] static Place place_of(const Rows& rows, int64_t j, int64_t n, Elem* copy) {
    const char* const* slots = rows.slots + j;
    const int64_t bytes = n * int64_t(sizeof(Elem));
    if constexpr (kBytes == sizeof(Elem)) {
      if (const int64_t distance = rows.distances[j / kKeys]) return {slots[0] + rows.offset, distance};
      for (int i = 0; i < kKeys; ++i) memcpy(copy + i * n, slots[i] + rows.offset, bytes);
    } else {
      for (int i = 0; i < kKeys; ++i) widen(slots[i] + rows.offset, n, copy + i * n);
    }
    memory_is_read();
    return {reinterpret_cast<const char*>(copy), bytes};
  }

  // Prefetches into L1 the lines that are read after the current 16 rows. They were prefetched into L2 with their tile,
  // of which the processor drops some, or hardware prefetchers bring them.
  [[gnu::always_inline]] static void ask_for(const Rows& rows, int64_t j, int64_t from, int64_t bytes) {
    const char* const* slots = rows.slots + j;
    const auto ask = [&](auto slot_of) __attribute__((always_inline)) {
      for (int64_t at = from; at < from + bytes; at += kLine)
        for (int i = 0; i < kKeys; ++i) __builtin_prefetch(slot_of(i) + rows.offset + at, 0, 3);
    };
    if (const int64_t distance = rows.distances[j / kKeys]) {
      ask([&](int i) { return slots[0] + i * distance; });
    } else {
      ask([&](int i) { return slots[i]; });
    }
  }

  // scores[16 keys][stride] to rows.
  static void four_rows(const float* scores, int64_t stride, float* out) {
    f32v v[4];
    for (int i = 0; i < 4; ++i) {
      const auto keys = [&](int at) { return _mm_load_ps(scores + stride * (i + at)); };
      __m512 x = _mm512_broadcast_f32x4(keys(0));
      x = _mm512_mask_broadcast_f32x4(x, 0x00f0, keys(4));
      x = _mm512_mask_broadcast_f32x4(x, 0x0f00, keys(8));
      v[i] = bit_cast<f32v>(_mm512_mask_broadcast_f32x4(x, 0xf000, keys(12)));
    }
    transpose_quarters(v);
    for (int i = 0; i < 4; ++i) store<DType::kFloat32>(out + i * kMaxTile, v[i]);
  }

  // Scores of the rows of one head. `after` are the rows that are read next.
  static void scores_in_place(const ScratchFew& s, int64_t n, const Rows& keys, const Rows& after, const Elem* q,
                              int64_t rows, float* scores, Prefetcher& next) {
    const uint32_t steps = steps_of(rows);
    alignas(64) float products[16 * 16];
    for (int64_t j = 0; j < n; j += kKeys) {
      const Place place = place_of(keys, j, s.depth, s.keys);
      const bool last = j + kKeys >= n;
      _tile_zero(5);
      for (int64_t d = 0; d < s.depth; d += kChunk) {
        next.advance(steps);
        if (d * kBytes % kLine == 0) ask_for(last ? after : keys, last ? 0 : j + kKeys, d * kBytes, kLine);
        _tile_loadd(6, place.first + d * int64_t(sizeof(Elem)), place.distance);
        _tile_loadd(7, q + d * s.head_rows, 4 * s.head_rows);
        PD_MULTIPLY_TILES(kElem, 5, 6, 7);
      }
      _tile_stored(5, products, 4 * s.head_rows);
      memory_is_read();
      for (int64_t r = 0; r < rows; r += 4) four_rows(products + r, s.head_rows, scores + r * kMaxTile + j);
    }
  }

  // Left tiles of `rows` rows: for every 16 keys a row of probabilities with a zero behind each, then one with a zero
  // before each.
  static void lay_out_probabilities(const Elem* p, int64_t rows, int64_t keys, Elem* tiles) {
    for (int64_t j = 0; j < keys; j += kKeys, tiles += kProbabilityTile)
      for (int64_t r = 0; r < rows; ++r) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + r * kMaxTile + j));
        const __m512i before = _mm512_cvtepu16_epi32(x);
        _mm512_storeu_si512(tiles + 64 * r, before);
        _mm512_storeu_si512(tiles + 64 * r + 32, _mm512_slli_epi32(before, 16));
      }
    memory_is_read();
  }

  // acc += probabilities x values of one head, for one or two tiles of columns from `column` on.
  template <int kColumnTiles>
  static void sum_values(const ScratchFew& s, int64_t n, Rows values, int64_t column, float* acc, Prefetcher& next) {
    constexpr int64_t kBytesAtOnce = kColumnTiles * kColumns * kBytes;
    const int64_t stride = s.width * int64_t(sizeof(float)) / 2;
    const Elem* p = s.values;
    alignas(64) Elem copy[kKeys * kColumnTiles * kColumns];
    values.offset += column * kBytes;
    acc += column / 2;
    _tile_loadd(0, acc, stride);
    if constexpr (kColumnTiles == 2) _tile_loadd(1, acc + 16, stride);
    for (int64_t j = 0; j < n; j += kKeys, p += kProbabilityTile) {
      const Place place = place_of(values, j, kColumnTiles * kColumns, copy);
      next.advance(kColumnTiles * kKeys);
      // After the last keys comes what follows in the slots: more columns, or the next head.
      const bool last = j + kKeys >= n;
      ask_for(values, last ? 0 : j + kKeys, last ? kBytesAtOnce : 0, kBytesAtOnce);
      _tile_loadd(4, p, 64);
      _tile_loadd(6, place.first, place.distance);
      PD_MULTIPLY_TILES(kElem, 0, 4, 6);
      if constexpr (kColumnTiles == 2) {
        _tile_loadd(6, place.first + 64, place.distance);
        PD_MULTIPLY_TILES(kElem, 1, 4, 6);
      }
    }
    _tile_stored(0, acc, stride);
    if constexpr (kColumnTiles == 2) _tile_stored(1, acc + 16, stride);
  }

  static void values_in_place(const ScratchFew& s, int64_t n, const Rows& values, const Elem* p, int64_t rows,
                              float* acc, Prefetcher& next) {
    const int64_t at_once = rows_at_once(rows);
    for (int64_t r = 0; r < rows; r += at_once) {
      lay_out_probabilities(p + r * kMaxTile, pd_min(rows - r, at_once), n, s.values);
      int64_t column = 0;
      for (; column + 2 * kColumns <= s.width; column += 2 * kColumns)
        sum_values<2>(s, n, values, column, acc + r * s.width, next);
      if (column < s.width) sum_values<1>(s, n, values, column, acc + r * s.width, next);
    }
  }

  static void attend_tiles(const Problem& p, const Item& item, const ScratchFew& s, const TileRows& tile,
                           Prefetcher& next) {
    const Cache& c = p.cache;
    const int64_t rows = item.rows(), heads = item.heads();
    int64_t key_distances[kMaxTile / kKeys], value_distances[kMaxTile / kKeys];
    find_distances(tile.k, tile.n, key_distances);
    find_distances(tile.v, tile.n, value_distances);
    const auto keys = [&](int64_t h) -> Rows {
      return {tile.k, (item.kv_head_begin + h) * c.k_stride_head * kBytes, key_distances};
    };
    const auto values = [&](int64_t h) -> Rows {
      return {tile.v, (item.kv_head_begin + h) * c.v_stride_head * kBytes, value_distances};
    };
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = h * s.head_rows;
      scores_in_place(s, tile.n, keys(h), h + 1 < heads ? keys(h + 1) : values(0), s.q + row * s.depth, rows,
                      s.scores + row * kMaxTile, next);
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = h * s.head_rows * kMaxTile;
      next.advance(kSoftmaxSteps * rows * pd_ceil_div(tile.n, kLanes));
      Softmax{p, item, s, tile, h, Part{0, rows, 0, tile.n}, s.scores + row, s.p + row, 0, rows}.finish();
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = h * s.head_rows;
      values_in_place(s, tile.n, values(h), s.p + row * kMaxTile, rows, s.acc + row * s.width, next);
    }
    memory_is_read();
  }
};

}  // namespace
}  // namespace paged_attn
