// The products of tile.h for Arm, where a register holds only four floats, with the Ops of ops_neon.h.
//   - Few rows multiply keys in place, eight or four keys at a time, so that a loaded query serves several.
//   - A weight or a packed query is loaded for four steps at once, and each step takes one lane of it.
//   - With kDepth == 4 (bfmmla) four rows and more multiply in pairs: a register of sums is two rows by two columns.
#pragma once

#include <type_traits>

#include "ops_neon.h"

namespace paged_attn {
namespace {

// Scores of four keys at `out`, or sums of four columns; with `carry` added to those that are there times it.
[[gnu::always_inline]] inline void put_sums(float* out, f32v x, const float* carry) {
  if (carry) x += load<DType::kFloat32>(out) * *carry;
  store<DType::kFloat32>(out, x);
}

template <int kN, class Step>
[[gnu::always_inline]] inline void each_lane(Step step) {
  const auto all = [&]<int... kI>(Indices<kI...>) { (step(std::integral_constant<int, kI>{}), ...); };
  all(typename MakeIndices<kN>::type{});
}

// Calls add(count, d, load) for all chunks of a row, kAtOnce of them while there are so many, then one at a time;
// load(address) reads one, the last one of a row as far as it goes.
template <class Ops, int kAtOnce, class Add>
[[gnu::always_inline]] inline void each_chunk(int64_t n, Add add) {
  constexpr std::integral_constant<int, kAtOnce> kMany;
  constexpr std::integral_constant<int, 1> kOne;
  int64_t d = 0;
  for (; d + kAtOnce * Ops::kChunk <= n; d += kAtOnce * Ops::kChunk) add(kMany, d, Ops::load_chunk);
  if constexpr (kAtOnce > 1)
    for (; d + Ops::kChunk <= n; d += Ops::kChunk) add(kOne, d, Ops::load_chunk);
  if (d < n) add(kOne, d, [&](const char* row) { return Ops::load_chunk_tail(row, n - d); });
}

// ---- scores, few rows: scores[row][key] for kRows rows and kKeys keys ----

// Lanes of the sums are added up at the end.
template <class Ops, int kRows, int kKeys>
[[gnu::always_inline]] inline void dot_some_keys(const typename Ops::Elem* q, int64_t q_stride, const char* const* k,
                                                 int64_t offset, int64_t depth, float* scores, const float* carry) {
  // A chunk of a float32 cache is two registers, which one instruction loads if their address lies in a register.
  constexpr bool kTwoLoads = Ops::kBytes == 4;
  f32v acc[kRows][kKeys] = {};
  each_chunk<Ops, kTwoLoads && kRows <= 2 ? 2 : 1>(depth, [&](auto count, int64_t d, auto load_chunk) {
    typename Ops::Chunk query[count][kRows];
    for (int i = 0; i < count; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) query[i][r] = Ops::load_elems(q + r * q_stride + d + i * Ops::kChunk);
#pragma GCC unroll 8
    for (int c = 0; c < kKeys; ++c) {
      const char* row = k[c] + offset + d * Ops::kBytes;
      if constexpr (kTwoLoads) row = one_register(row);
      for (int i = 0; i < count; ++i) {
        const auto key = load_chunk(row + i * Ops::kChunk * Ops::kBytes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][c] = Ops::dot(acc[r][c], key, query[i][r]);
      }
    }
  });
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < kKeys; c += kLanes) put_sums(scores + r * kMaxTile + c, sum_lanes(acc[r] + c), carry);
}

// Two rows by two keys are one register.
template <class Ops, int kRows, int kKeys>
[[gnu::always_inline]] inline void multiply_some_keys(const typename Ops::Elem* q, int64_t q_stride,
                                                      const char* const* k, int64_t offset, int64_t depth,
                                                      float* scores, const float* carry) {
  f32v acc[kRows / 2][kKeys / 2] = {};
  each_chunk<Ops, 1>(depth, [&](auto, int64_t d, auto load_chunk) {
    typename Ops::Chunk query[kRows / 2][2], key[2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += 2)
      Ops::pair_rows(Ops::load_elems(q + r * q_stride + d), Ops::load_elems(q + (r + 1) * q_stride + d), query[r / 2]);
#pragma GCC unroll 4
    for (int c = 0; c < kKeys; c += 2) {
      const int64_t at = offset + d * Ops::kBytes;
      Ops::pair_rows(load_chunk(k[c] + at), load_chunk(k[c + 1] + at), key);
#pragma GCC unroll 4
      for (int r = 0; r < kRows / 2; ++r)
        acc[r][c / 2] = Ops::multiply(Ops::multiply(acc[r][c / 2], query[r][0], key[0]), query[r][1], key[1]);
    }
  });
#pragma GCC unroll 4
  for (int r = 0; r < kRows / 2; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < kKeys; c += kLanes) {
      const f32v a = acc[r][c / 2], b = acc[r][c / 2 + 1];
      float* out = scores + 2 * r * kMaxTile + c;
      put_sums(out, __builtin_shufflevector(a, b, 0, 1, 4, 5), carry);
      put_sums(out + kMaxTile, __builtin_shufflevector(a, b, 2, 3, 6, 7), carry);
    }
}

template <class Ops, int kRows>
  requires Ops::kNeon
[[gnu::noinline]] void dot_scores(const typename Ops::Elem* q, int64_t q_stride, const char* const* k, int64_t offset,
                                  int64_t n, int64_t depth, float* scores, const float* carry, Prefetcher& next) {
  constexpr bool kPairs = Ops::kDepth == 4 && kRows >= 4;
  constexpr int kKeys = kPairs || kRows < 4 ? 8 : 4;
  const auto some = [&](auto count, int64_t j) {
    if constexpr (kPairs) {
      multiply_some_keys<Ops, kRows, count>(q, q_stride, k + j, offset, depth, scores + j, carry);
    } else {
      dot_some_keys<Ops, kRows, count>(q, q_stride, k + j, offset, depth, scores + j, carry);
    }
  };
  const uint32_t chunks = pd_ceil_div(depth, Ops::kChunk);
  int64_t j = 0;
  for (; j + kKeys <= round_up(n, 4); j += kKeys) {
    next.advance(kKeys * chunks);
    next.ask_again<kKeys>(j, 0, depth * Ops::kBytes);
    some(std::integral_constant<int, kKeys>{}, j);
  }
  if (j < n) some(std::integral_constant<int, 4>{}, j);
}

// ---- values, few rows: acc[row] += sum over keys of p[row][key] * value[key] ----

// Four keys of one chunk of values.
template <class Ops, int kRows>
[[gnu::always_inline]] inline void add_four_keys(const typename Ops::Chunk* value, const typename Ops::Four* weights,
                                                 f32v (*sum)[2]) {
  if constexpr (Ops::kDepth == 4) {
    typename Ops::Chunk pairs[2][2];
    Ops::pair_keys(value[0], value[1], pairs[0]);
    Ops::pair_keys(value[2], value[3], pairs[1]);
    each_lane<2>([&](auto pair) {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) Ops::template add_weighted<pair>(sum[r], pairs[pair], weights[r]);
    });
  } else {
    each_lane<4>([&](auto key) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) Ops::template add_weighted<key>(sum[r], value[key], weights[r]);
    });
  }
}

// kBlock chunks at column d; load_chunk(address) reads one.
template <class Ops, int kRows, int kBlock, class Load>
[[gnu::always_inline]] inline void dot_values_block(const typename Ops::Elem* p, const char* const* v, int64_t offset,
                                                    int64_t d, int64_t n, float* acc, int64_t acc_stride,
                                                    Prefetcher& next, Load load_chunk) {
  f32v sum[kBlock][kRows][2];
  const auto each_sum = [&](auto work) {
#pragma GCC unroll 8
    for (int b = 0; b < kBlock; ++b)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) work(sum[b][r][i], acc + r * acc_stride + d + b * Ops::kChunk + i * kLanes);
  };
  each_sum([](f32v& x, const float* at) { x = load<DType::kFloat32>(at); });
  int64_t j = 0;
  do {  // there are keys; were there none, g++ would store the sums from other registers, and copy all of them
    next.advance(kBlock * 4);
    next.ask_again<4>(j, d * Ops::kBytes, kBlock * Ops::kChunk * Ops::kBytes);
    typename Ops::Four weights[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) weights[r] = Ops::load_four(p + r * kMaxTile + j);
    const char* rows[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) rows[c] = one_register(v[j + c] + offset + d * Ops::kBytes);
#pragma GCC unroll 8
    for (int b = 0; b < kBlock; ++b) {
      typename Ops::Chunk value[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) value[c] = load_chunk(rows[c] + b * Ops::kChunk * Ops::kBytes);
      add_four_keys<Ops, kRows>(value, weights, sum[b]);
    }
    j += 4;
  } while (j < n);
  each_sum([](f32v x, float* at) { store<DType::kFloat32>(at, x); });
}

// The same in pairs of rows: two rows by two columns are one register.
template <class Ops, int kRows, int kBlock, class Load>
[[gnu::always_inline]] inline void multiply_values_block(const typename Ops::Elem* p, const char* const* v,
                                                         int64_t offset, int64_t d, int64_t n, float* acc,
                                                         int64_t acc_stride, Prefetcher& next, Load load_chunk) {
  f32v sum[kBlock][kRows / 2][4];
  const auto each_sum = [&](auto work) {
#pragma GCC unroll 2
    for (int b = 0; b < kBlock; ++b)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
          work(sum[b][r / 2] + 2 * i, acc + r * acc_stride + d + b * Ops::kChunk + i * kLanes);
  };
  each_sum([&](f32v* x, const float* at) {
    const f32v a = load<DType::kFloat32>(at), b = load<DType::kFloat32>(at + acc_stride);
    x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  });
  for (int64_t j = 0; j < n; j += 4) {
    next.advance(kBlock * 4);
    next.ask_again<4>(j, d * Ops::kBytes, kBlock * Ops::kChunk * Ops::kBytes);
    typename Ops::Chunk weights[kRows / 2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows / 2; ++r)
      weights[r] = Ops::pair_fours(p + 2 * r * kMaxTile + j, p + (2 * r + 1) * kMaxTile + j);
#pragma GCC unroll 2
    for (int b = 0; b < kBlock; ++b) {
      typename Ops::Chunk value[4], columns[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) value[c] = load_chunk(v[j + c] + offset + (d + b * Ops::kChunk) * Ops::kBytes);
      Ops::pair_columns(value, columns);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < kRows / 2; ++r) sum[b][r][i] = Ops::multiply(sum[b][r][i], weights[r], columns[i]);
    }
  }
  each_sum([&](const f32v* x, float* at) {
    store<DType::kFloat32>(at, __builtin_shufflevector(x[0], x[1], 0, 1, 4, 5));
    store<DType::kFloat32>(at + acc_stride, __builtin_shufflevector(x[0], x[1], 2, 3, 6, 7));
  });
}

template <class Ops, int kRows>
  requires Ops::kNeon
[[gnu::noinline]] void dot_values(const typename Ops::Elem* p, const char* const* v, int64_t offset, int64_t n,
                                  int64_t width, float* acc, int64_t acc_stride, Prefetcher& next) {
  constexpr int kBlock = 8 / kRows;  // 16 registers of sums
  each_chunk<Ops, kBlock>(width, [&](auto count, int64_t d, auto load_chunk) {
    if constexpr (Ops::kDepth == 4 && kRows >= 4) {
      multiply_values_block<Ops, kRows, count>(p, v, offset, d, n, acc, acc_stride, next, load_chunk);
    } else {
      dot_values_block<Ops, kRows, count>(p, v, offset, d, n, acc, acc_stride, next, load_chunk);
    }
  });
}

// ---- many rows: panels as in tile.h, [steps][kPanel] units of kDepth elements ----

template <class Ops>
typename Ops::Chunk load_up_to(const char* row, int64_t n) {
  return n >= Ops::kChunk ? Ops::load_chunk(row) : Ops::load_chunk_tail(row, n);
}

// k[] must hold valid rows up to the next multiple of eight.
template <class Ops>
  requires Ops::kNeon
void pack_keys(const char* const* k, int64_t offset, int64_t n, int64_t depth, int64_t steps,
               typename Ops::Elem* keys) {
  for (int64_t j = 0; j < n; j += 8) {
    typename Ops::Elem* panel = keys + (j / kPanel * steps * kPanel + j % kPanel) * Ops::kDepth;
    for (int64_t d = 0; d < depth; d += Ops::kChunk) {
      typename Ops::Chunk x[8];
      for (int c = 0; c < 8; ++c) x[c] = load_up_to<Ops>(k[j + c] + offset + d * Ops::kBytes, depth - d);
      if constexpr (Ops::kDepth == 4) {
        for (int c = 0; c < 8; c += 2) {
          Ops::pair_rows(x[c], x[c + 1], x + c);
          for (int i = 0; i < 2; ++i) Ops::store_chunk(panel + ((d / 4 + i) * kPanel + c) * 4, x[c + i]);
        }
      } else {
        Ops::transpose_chunks(x);
        for (int i = 0; i < 8; ++i) Ops::store_chunk(panel + (d + i) * kPanel, x[i]);
      }
    }
  }
}

// v[] must hold valid rows up to the next multiple of kDepth.
template <class Ops>
  requires Ops::kNeon
void pack_values(const char* const* v, int64_t offset, int64_t n, int64_t width, int64_t steps,
                 typename Ops::Elem* values) {
  for (int64_t j = 0; j < n; j += Ops::kDepth)
    for (int64_t d = 0; d < width; d += Ops::kChunk) {
      typename Ops::Elem* out = values + ((d / kPanel * steps + j / Ops::kDepth) * kPanel + d % kPanel) * Ops::kDepth;
      typename Ops::Chunk x[Ops::kDepth];
      for (int c = 0; c < Ops::kDepth; ++c) x[c] = load_up_to<Ops>(v[j + c] + offset + d * Ops::kBytes, width - d);
      if constexpr (Ops::kDepth == 4) Ops::pair_columns(x, x);
      for (int c = 0; c < Ops::kDepth; ++c) Ops::store_chunk(out + c * 8, x[c]);
    }
}

// c[row][column] = (c * carry, or 0) + sum over steps of a[row][step] * b[step][column], for kRows rows and eight
// columns of a panel.
template <class Ops, int kRows>
void neon_matrix_step(const typename Ops::Elem* a, int64_t a_stride, const typename Ops::Elem* b, int64_t steps,
                      float* c, int64_t c_stride, const float* carry, Prefetcher& next) {
  if constexpr (Ops::kDepth == 4) {
    constexpr int kPairs = (kRows + 1) / 2;
    f32v sum[kPairs][4] = {};
    for (int64_t s = 0; s < steps; ++s) {
      next.advance(s & 1);  // a step is half a panel
      typename Ops::Chunk left[kPairs], right[4];
#pragma GCC unroll 4
      for (int r = 0; r < kPairs; ++r) {
        // The last pair may have only one row; the sums of the other one are not stored.
        const typename Ops::Elem* row = a + 2 * r * a_stride + s * 4;
        left[r] = Ops::pair_fours(row, 2 * r + 1 < kRows ? row + a_stride : row);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) right[i] = Ops::load_elems(b + (s * kPanel + 2 * i) * 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < kPairs; ++r) sum[r][i] = Ops::multiply(sum[r][i], left[r], right[i]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kPairs; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const f32v x = sum[r][2 * i], y = sum[r][2 * i + 1];
        float* out = c + 2 * r * c_stride + i * kLanes;
        put_sums(out, __builtin_shufflevector(x, y, 0, 1, 4, 5), carry);
        if (2 * r + 1 < kRows) put_sums(out + c_stride, __builtin_shufflevector(x, y, 2, 3, 6, 7), carry);
      }
  } else {
    f32v sum[kRows][2] = {};
    for (int64_t s = 0; s < steps; s += 4) {
      next.advance(2);  // four steps of half a panel
      typename Ops::Four left[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) left[r] = Ops::load_four(a + r * a_stride + s);
      each_lane<4>([&](auto i) {
        const typename Ops::Chunk right = Ops::load_elems(b + (s + i) * kPanel);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) Ops::template add_weighted<i>(sum[r], right, left[r]);
      });
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) put_sums(c + r * c_stride + i * kLanes, sum[r][i], carry);
  }
}

template <class Ops>
struct NeonMatrixRows {
  using Function = void (*)(const typename Ops::Elem*, int64_t, const typename Ops::Elem*, int64_t, float*, int64_t,
                            const float*, Prefetcher&);
  static constexpr Function kTable[8] = {neon_matrix_step<Ops, 1>, neon_matrix_step<Ops, 2>, neon_matrix_step<Ops, 3>,
                                         neon_matrix_step<Ops, 4>, neon_matrix_step<Ops, 5>, neon_matrix_step<Ops, 6>,
                                         neon_matrix_step<Ops, 7>, neon_matrix_step<Ops, 8>};
};

// Steps of the product with the values are padded to a multiple of four keys: there a has zeros, and b some values.
template <class Ops>
  requires Ops::kNeon
void matrix(int64_t rows, const typename Ops::Elem* a, int64_t a_stride, const typename Ops::Elem* b,
            int64_t panel_steps, int64_t steps, int64_t columns, float* c, int64_t c_stride, const float* carry,
            Prefetcher& next) {
  const int64_t filled = round_up(steps * Ops::kDepth, 4) / Ops::kDepth;
  for (int64_t column = 0; column < columns; column += 8) {
    const auto* right = b + (column / kPanel * panel_steps * kPanel + column % kPanel) * Ops::kDepth;
    for (int64_t done = 0, left = rows; left > 0;) {
      const int64_t count = pd_ceil_div(left, pd_ceil_div(left, 8));
      NeonMatrixRows<Ops>::kTable[count - 1](a + done * a_stride, a_stride, right, filled, c + done * c_stride + column,
                                             c_stride, carry, next);
      done += count;
      left -= count;
    }
  }
}

}  // namespace
}  // namespace paged_attn
