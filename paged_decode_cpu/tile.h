// The two products of one tile of keys, scores = queries x keys and acc += probabilities x values,
// each in two forms:
//   dot_*, transposed_*  few rows: read the cache rows in place, every loaded register serves kRows rows
//   pack_*, matrix_*     many rows: keys and values are first packed into panels, which one register-blocked matrix
//                        kernel multiplies (as a GEMM does, see BLIS)
// Ops says how numbers are held (ops_f32.h, ops_pairs.h). "Row" is one query token and head. Every product takes the
// Prefetcher `next`, which fetches the next tile meanwhile.
#pragma once

#include "ops_defaults.h"
#include "prefetcher.h"
#include "spec/ranges.h"
#include "vec.h"

namespace paged_attn {
namespace {

#if PD_LANES == 16 || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

#ifndef PD_MAX_TILE
#define PD_MAX_TILE 128
#endif
constexpr int64_t kMaxTile = PD_MAX_TILE;                    // keys
constexpr int64_t kPaddedKeys = 32;                          // addresses of a tile are padded to a multiple of it
constexpr int kPackedRegs = kVectorRegisters == 32 ? 4 : 2;  // registers that hold a row of a panel
constexpr int kPanel = kPackedRegs * kLanes;                 // columns of a panel

template <class Ops>
struct ValueRegs {
  static constexpr int kChunk = Ops::kRegs * Ops::kDepth;  // registers of one chunk of values
};

// Steps of dot_values between two calls of Prefetcher::advance: with 16 registers a step has few multiplications.
constexpr int kValueSteps = kVectorRegisters == 32 ? 1 : 2;

// Chunks that dot_values takes at a time: its accumulators fill half of the registers, at most 8 per row.
constexpr int value_chunks(int rows, int chunk_regs) {
  int regs = kVectorRegisters / 2 / rows;
  if (regs > 8) regs = 8;
  return regs > chunk_regs ? regs / chunk_regs : 1;
}

// Elements [d, d + kChunk) of kLanes keys; depth is filled with 0.
template <class Ops>
inline void load_block(const char* const* k, int64_t offset, int64_t d, int64_t depth, f32v (*block)[kLanes]) {
  for (int c = 0; c < kLanes; ++c) {
    typename Ops::Reg key[Ops::kRegs];
    const char* row = k[c] + offset + d * Ops::kBytes;
    if (d + Ops::kChunk <= depth) {
      Ops::load_keys(row, key);
    } else {
      Ops::load_keys_tail(row, depth - d, key);
    }
    for (int i = 0; i < Ops::kRegs; ++i) block[i][c] = bit_cast<f32v>(key[i]);
  }
}

// acc[c] += the products of one query and kLanes keys, lane by lane, over the elements from *d on, in pieces of kPiece
// bytes of each key; moves *d behind the last whole one. Only where such a piece is more than one load.
template <class Ops, int kPiece>
inline void dot_pieces(const typename Ops::Elem* q, const char* const* k, int64_t offset, int64_t depth, f32v* acc,
                       int64_t* d) {
  constexpr int kChunks = kPiece / (Ops::kChunk * Ops::kBytes), kRegs = kChunks * Ops::kRegs;
  if constexpr (kChunks > 1 && kRegs <= kVectorRegisters - kLanes - kVectorRegisters / 4)
    for (; *d + kPiece / Ops::kBytes <= depth; *d += kPiece / Ops::kBytes) {
      typename Ops::Reg query[kRegs], key[Ops::kRegs];
#pragma GCC unroll 8
      for (int i = 0; i < kRegs; ++i) query[i] = Ops::load_elems(q + *d + i * kLanes * Ops::kDepth);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) {
        const char* row = one_register(k[c] + offset + *d * Ops::kBytes);
#pragma GCC unroll 8
        for (int i = 0; i < kChunks; ++i) {
          Ops::load_keys(row + i * Ops::kChunk * Ops::kBytes, key);
#pragma GCC unroll 2
          for (int r = 0; r < Ops::kRegs; ++r) acc[c] = Ops::dot(acc[c], key[r], query[i * Ops::kRegs + r]);
        }
      }
    }
}

// acc[r * kKeys + c] += the products of kRows queries and kKeys keys, lane by lane. `cached`: the keys lie in the
// processor's caches.
template <class Ops, int kRows, int kKeys>
inline void dot_keys(const typename Ops::Elem* q, int64_t q_stride, const char* const* k, int64_t offset, int64_t depth,
                     bool cached, f32v* acc) {
  constexpr int kRegElems = kLanes * Ops::kDepth;
  int64_t d = 0;
  // At the stride of many heads, kLanes keys map to a few sets of L1, and a line would be evicted before its second
  // half is read. So each line is read at once; several lines of a key at once where keys come from L2 or L3, which is
  // slower where they come from memory.
  if constexpr (kRows == 1) {
    if (cached) {
      dot_pieces<Ops, 256>(q, k, offset, depth, acc, &d);
      dot_pieces<Ops, 128>(q, k, offset, depth, acc, &d);
    }
    dot_pieces<Ops, kLine>(q, k, offset, depth, acc, &d);
  }
  const auto step = [&](auto load) {
    typename Ops::Reg query[kRows][Ops::kRegs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < Ops::kRegs; ++i) query[r][i] = Ops::load_elems(q + r * q_stride + d + i * kRegElems);
#pragma GCC unroll 16
    for (int c = 0; c < kKeys; ++c) {
      typename Ops::Reg key[Ops::kRegs];
      load(k[c] + offset + d * Ops::kBytes, key);
#pragma GCC unroll 8
      for (int i = 0; i < Ops::kRegs; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r * kKeys + c] = Ops::dot(acc[r * kKeys + c], key[i], query[r][i]);
    }
  };
  for (; d + Ops::kChunk <= depth; d += Ops::kChunk) step(Ops::load_keys);
  if (d < depth) step([&](const char* row, typename Ops::Reg* key) { Ops::load_keys_tail(row, depth - d, key); });
}

// scores[row][key] for kRows rows and n keys; k[] must hold valid rows up to the next multiple of
// kLanes. Rows of scores are kMaxTile apart. With `carry` the products are added to scores * carry. Not inlined, as
// g++ 12 then spills the accumulators at every step: +60 %.
template <class Ops, int kRows>
  requires(!Ops::kNeon)
[[gnu::noinline]] void dot_scores(const typename Ops::Elem* q, int64_t q_stride, const char* const* k, int64_t offset,
                                  int64_t n, int64_t depth, float* scores, const float* carry, Prefetcher& next) {
  constexpr int kKeys = kLanes / kRows;
  const uint32_t chunks = pd_ceil_div(depth, Ops::kChunk);
  for (int64_t j = 0; j < n; j += kLanes) {
    f32v sums[kRows];
    for (int part = 0; part < kRows; ++part) {
      next.advance<Prefetcher::kFewPiece>(kKeys * chunks);
      next.ask_again<kKeys>(j + part * kKeys, 0, depth * Ops::kBytes);
      f32v acc[kLanes];
      for (f32v& a : acc) a = f32v{};
      dot_keys<Ops, kRows, kKeys>(q, q_stride, k + j + part * kKeys, offset, depth, next.cached, acc);
      sums[part] = sum_lanes(acc);
    }
    if constexpr (kRows > 1) transpose_groups<kRows>(sums);
    for (int r = 0; r < kRows; ++r) {
      float* out = scores + r * kMaxTile + j;
      if (carry) sums[r] += load<DType::kFloat32>(out) * *carry;
      store<DType::kFloat32>(out, sums[r]);
    }
  }
}

// The same for so many rows that to transpose the keys in registers costs less than to sum across lanes.
template <class Ops, int kRows>
void transposed_scores(const typename Ops::Elem* q, int64_t q_stride, const char* const* k, int64_t offset, int64_t n,
                       int64_t depth, float* scores, const float* carry, Prefetcher& next) {
  for (int64_t j = 0; j < n; j += kLanes) {
    f32v sum[kRows];
#pragma GCC unroll 8
    for (f32v& x : sum) x = f32v{};
    for (int64_t d = 0; d < depth; d += Ops::kChunk) {
      next.advance<Prefetcher::kFewPiece>(kLanes);
      next.ask_again<kLanes>(j, d * Ops::kBytes, Ops::kChunk * Ops::kBytes);
      f32v block[Ops::kRegs][kLanes];
      load_block<Ops>(k + j, offset, d, depth, block);
      for (int i = 0; i < Ops::kRegs; ++i) {
        transpose(block[i]);
        const typename Ops::Elem* elems = q + d + i * kLanes * Ops::kDepth;
#pragma GCC unroll 16
        for (int c = 0; c < kLanes; ++c)
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
            sum[r] = Ops::dot_broadcast(sum[r], bit_cast<typename Ops::Reg>(block[i][c]),
                                        elems + r * q_stride + c * Ops::kDepth);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* out = scores + r * kMaxTile + j;
      if (carry) sum[r] += load<DType::kFloat32>(out) * *carry;
      store<DType::kFloat32>(out, sum[r]);
    }
  }
}

// acc[row] += sum over keys of p[row][key] * value[key], for the kBlock chunks of elements that
// begin `column` bytes into a row; with kTail for the first `left` elements of one. Rows of p are kMaxTile apart.
template <class Ops, int kRows, int kBlock, bool kTail = false>
inline void dot_values_block(const typename Ops::Elem* p, const char* const* v, int64_t offset, int64_t column,
                             int64_t n, float* acc, int64_t acc_stride, Prefetcher& next, int64_t left = 0) {
  constexpr int kChunkRegs = ValueRegs<Ops>::kChunk, kRegs = kBlock * kChunkRegs;
  f32v sum[kRows][kRegs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) sum[r][i] = load<DType::kFloat32>(acc + r * acc_stride + i * kLanes);
  // Of blocks within a line the first one asks for it.
  const bool asks = kBlock * Ops::kChunk * Ops::kBytes >= kLine || column % kLine == 0;
  const auto add = [&]<int kSteps>(int64_t j) {
    next.advance<Prefetcher::kFewPiece>(kSteps * kBlock * Ops::kDepth);
    if (asks) next.ask_again<kSteps * Ops::kDepth>(j, column, kBlock * Ops::kChunk * Ops::kBytes);
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step, j += Ops::kDepth) {
      const char* rows[Ops::kDepth];
#pragma GCC unroll 2
      for (int c = 0; c < Ops::kDepth; ++c) rows[c] = one_register(v[j + c] + offset + column);
      typename Ops::Reg value[kRegs];
#pragma GCC unroll 8
      for (int b = 0; b < kBlock; ++b) {
        if constexpr (kTail) {
          Ops::load_values_tail(rows, 0, left, value);
        } else {
          Ops::load_values(rows, b * Ops::kChunk * Ops::kBytes, value + b * kChunkRegs);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        typename Ops::Reg weight = Ops::broadcast(p + r * kMaxTile + j);
#pragma GCC unroll 8
        for (int i = 0; i < kRegs; ++i) sum[r][i] = Ops::dot(sum[r][i], value[i], weight);
      }
    }
  };
  int64_t j = 0;
  if constexpr (kValueSteps > 1)
    for (; j + kValueSteps * Ops::kDepth <= n; j += kValueSteps * Ops::kDepth) add.template operator()<kValueSteps>(j);
  for (; j < n; j += Ops::kDepth) add.template operator()<1>(j);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) store<DType::kFloat32>(acc + r * acc_stride + i * kLanes, sum[r][i]);
}

// acc[row] += sum over keys of p[row][key] * value[key]. Rows of acc are padded to whole chunks.
template <class Ops, int kRows>
  requires(!Ops::kNeon)
void dot_values(const typename Ops::Elem* p, const char* const* v, int64_t offset, int64_t n, int64_t width, float* acc,
                int64_t acc_stride, Prefetcher& next) {
  constexpr int kBlock = value_chunks(kRows, ValueRegs<Ops>::kChunk);
  int64_t d = 0;
  for (; d + kBlock * Ops::kChunk <= width; d += kBlock * Ops::kChunk)
    dot_values_block<Ops, kRows, kBlock>(p, v, offset, d * Ops::kBytes, n, acc + d, acc_stride, next);
  for (; d + Ops::kChunk <= width; d += Ops::kChunk)
    dot_values_block<Ops, kRows, 1>(p, v, offset, d * Ops::kBytes, n, acc + d, acc_stride, next);
  if (d < width)
    dot_values_block<Ops, kRows, 1, true>(p, v, offset, d * Ops::kBytes, n, acc + d, acc_stride, next, width - d);
}

// The right side of the matrix kernel lies in panels of kPanel columns, each [steps][kPanel] units of
// kDepth elements, so that what one pass reads is contiguous and uses all of L1.

// Panels of keys, steps = depth / kDepth: the transpose of n cache rows. k[] must hold valid rows up
// to the next multiple of kLanes; depth is filled with 0 to a multiple of kChunk.
template <class Ops>
  requires(!Ops::kNeon)
void pack_keys(const char* const* k, int64_t offset, int64_t n, int64_t depth, int64_t steps,
               typename Ops::Elem* keys) {
  for (int64_t j = 0; j < n; j += kLanes) {
    typename Ops::Elem* panel = keys + (j / kPanel * steps * kPanel + j % kPanel) * Ops::kDepth;
    for (int64_t d = 0; d < depth; d += Ops::kChunk) {
      f32v block[Ops::kRegs][kLanes];
      load_block<Ops>(k + j, offset, d, depth, block);
      for (int i = 0; i < Ops::kRegs; ++i) {
        transpose(block[i]);
        for (int c = 0; c < kLanes; ++c)
          memcpy(panel + (d / Ops::kDepth + i * kLanes + c) * kPanel * Ops::kDepth, &block[i][c], sizeof(f32v));
      }
    }
  }
}

// Panels of values, steps = keys / kDepth; width is filled with 0 to a multiple of kChunk. v[] must
// hold valid rows up to the next multiple of kDepth.
template <class Ops>
  requires(!Ops::kNeon)
void pack_values(const char* const* v, int64_t offset, int64_t n, int64_t width, int64_t steps,
                 typename Ops::Elem* values) {
  constexpr int kChunkRegs = ValueRegs<Ops>::kChunk;
  for (int64_t j = 0; j < n; j += Ops::kDepth)
    for (int64_t d = 0; d < width; d += Ops::kChunk) {
      typename Ops::Reg value[kChunkRegs];
      if (d + Ops::kChunk <= width) {
        Ops::load_values(v + j, offset + d * Ops::kBytes, value);
      } else {
        Ops::load_values_tail(v + j, offset + d * Ops::kBytes, width - d, value);
      }
      for (int i = 0; i < kChunkRegs; ++i) {
        const int64_t column = d + i * kLanes, panel = column / kPanel;
        memcpy(values + ((panel * steps + j / Ops::kDepth) * kPanel + column % kPanel) * Ops::kDepth, &value[i],
               sizeof(f32v));
      }
    }
}

// c[row][column] = (c * carry, or 0) + sum over steps of a[row][step] * b[step][column] for one panel
// or a part of it; `a` is read kDepth elements at a time.
template <class Ops, int kRows, int kRegs>
inline void matrix_step(const typename Ops::Elem* a, int64_t a_stride, const typename Ops::Elem* b, int64_t steps,
                        float* c, int64_t c_stride, const float* carry, Prefetcher& next) {
  f32v sum[kRows][kRegs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) sum[r][i] = f32v{};
  for (int64_t s = 0; s < steps; ++s) {
    next.advance(1);
    typename Ops::Reg right[kRegs];
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) right[i] = Ops::load_elems(b + (s * kPanel + i * kLanes) * Ops::kDepth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      typename Ops::Reg left = Ops::broadcast(a + r * a_stride + s * Ops::kDepth);
#pragma GCC unroll 8
      for (int i = 0; i < kRegs; ++i) sum[r][i] = Ops::dot(sum[r][i], left, right[i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) {
      float* out = c + r * c_stride + i * kLanes;
      store<DType::kFloat32>(out, carry ? load<DType::kFloat32>(out) * *carry + sum[r][i] : sum[r][i]);
    }
}

// kRows rows and one panel, or the first `columns` of it.
template <class Ops, int kRows>
void matrix_rows(const typename Ops::Elem* a, int64_t a_stride, const typename Ops::Elem* panel, int64_t steps,
                 int64_t columns, float* c, int64_t c_stride, const float* carry, Prefetcher& next) {
  if (columns >= kPanel)
    return matrix_step<Ops, kRows, kPackedRegs>(a, a_stride, panel, steps, c, c_stride, carry, next);
  for (int64_t part = 0; part < columns; part += kLanes)
    matrix_step<Ops, kRows, 1>(a, a_stride, panel + part * Ops::kDepth, steps, c + part, c_stride, carry, next);
}

template <class Ops>
struct MatrixRows {
  using Function = void (*)(const typename Ops::Elem*, int64_t, const typename Ops::Elem*, int64_t, int64_t, float*,
                            int64_t, const float*, Prefetcher&);
  static constexpr Function kTable[OpsDefaults::kStepRows] = {matrix_rows<Ops, 1>, matrix_rows<Ops, 2>,
                                                              matrix_rows<Ops, 3>, matrix_rows<Ops, 4>,
                                                              matrix_rows<Ops, 5>, matrix_rows<Ops, 6>};
};

// The product with all panels of b, which hold panel_steps steps each, of which the first `steps`
// count. Columns is a multiple of kLanes.
template <class Ops>
  requires(!Ops::kNeon)
void matrix(int64_t rows, const typename Ops::Elem* a, int64_t a_stride, const typename Ops::Elem* b,
            int64_t panel_steps, int64_t steps, int64_t columns, float* c, int64_t c_stride, const float* carry,
            Prefetcher& next) {
  const auto* const by_rows = MatrixRows<Ops>::kTable;
  for (int64_t column = 0; column < columns; column += kPanel)
    for (int64_t done = 0, left = rows; left > 0;) {
      // Steps of almost equal height: a last one of a single row would wait for the latency of its own sums.
      const int64_t count = pd_ceil_div(left, pd_ceil_div(left, OpsDefaults::kStepRows));
      by_rows[count - 1](a + done * a_stride, a_stride, b + column * panel_steps * Ops::kDepth, steps, columns - column,
                         c + done * c_stride + column, c_stride, carry, next);
      done += count;
      left -= count;
    }
}

}  // namespace
}  // namespace paged_attn

#if defined(PD_NEON)
#include "tile_neon.h"
#endif
