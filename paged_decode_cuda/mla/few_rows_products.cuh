// What the warpgroup that multiplies does with the tiles of a segment, and at its end.
//
//     S^T = K Q^T      64 keys x 16 or 32 rows         O^T = V^T P^T      512 latents x as many rows
//
// Scores and weights are those of `decode` (wgmma_rows.cuh). Of latents both products read the same parts.
#pragma once

#include "../decode/wgmma_rows.cuh"
#include "few_rows_shape.cuh"

namespace paged_attn {

template <typename Shape>
struct FewRowsTiles {
  using Rows = WgmmaRows<Shape>;
  using Type = typename Shape::Type;
  static constexpr int kRowTiles = Rows::kRowTiles, kSums = Rows::kSums;

  FewRowsControl<Shape>& control;
  uint32_t shared;
  PartRing<Shape> ring;
  uint32_t turn;  // of the weights' buffers, in bytes
  Rows rows;

  // Eight lanes have a line of 128 bytes at a time. Rows that do not exist are zero.
  PD_MEMBER void copy_queries(const Problem& p, const MlaCall& call, const Item& item, int head) const {
    constexpr int kLanes = 8, kAtOnce = kWarpgroup / kLanes;  // rows
    const int piece = threadIdx.x % kLanes;
#pragma unroll
    for (int first = 0; first < Shape::kRows; first += kAtOnce) {
      const int row = first + threadIdx.x / kLanes;
      const bool exists = row < item.rows;
      const QueryRow query = query_row(p, call, item, head, exists ? row : 0);
      const auto* const q = static_cast<const uint16_t*>(p.q) + q_offset(p, item, query) + piece * 8;
      const auto* const latents =
          Shape::kLatents ? static_cast<const uint16_t*>(p.qv.data) + qv_offset(p, item, query) + piece * 8 : nullptr;
      const uint32_t target = shared + Shape::kQueriesAt + Shape::piece_at(Shape::kRows, row, piece);
#pragma unroll
      for (int c = 0; c < Shape::kKeyColumns; ++c) {
        const uint16_t* const from = !Shape::kLatents      ? q + c * kColumn
                                     : c < Shape::kColumns ? latents + c * kColumn
                                                           : q;
        copy_async(target + c * Shape::kRows * kRowBytes, from, exists);
      }
    }
  }

  // Part after part, as they come.
  PD_MEMBER void score_keys() {
    PartRing<Shape> part = ring;
    const uint64_t queries = matrix_descriptor(shared + Shape::kQueriesAt, kRowBytes);
    settle(rows.s);
#pragma unroll
    for (int first = 0; first < Shape::kKeyColumns; first += Shape::kPartColumns) {
      part.await_full();
      fence_async_proxy();
      const uint64_t keys = matrix_descriptor(part.address(), kRowBytes);
      products_begin();
#pragma unroll
      for (int i = 0; i < Shape::kPartColumns * kColumn / 16; ++i) {
        const int c = i / (kColumn / 16), bytes = i % (kColumn / 16) * 32;
        multiply_few<false>(Type{}, rows.s, advance(keys, c * Shape::kKeys * kRowBytes + bytes),
                            advance(queries, (first + c) * Shape::kRows * kRowBytes + bytes), first + i > 0);
      }
      products_commit();
      part.advance();
    }
    products_wait<0>();
    settle(rows.s);
    if constexpr (!Shape::kLatents) {
#pragma unroll
      for (int i = 0; i < Shape::kKeyParts; ++i) release();
    }
  }

  // Adds the values of the tile, and the weights w to the sums of weights meanwhile. A part is free once it is added.
  PD_MEMBER void add_values(const float (&w)[kSums]) {
    const uint64_t weights = matrix_descriptor(shared + Shape::kWeightsAt + turn, kRowBytes);
    PartRing<Shape> part = ring;
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) settle(rows.acc[c]);
#pragma unroll
    for (int first = 0; first < Shape::kColumns; first += Shape::kPartColumns) {
      if (!Shape::kLatents) {
        part.await_full();
        fence_async_proxy();
      }
      if (!Shape::kLatents || first == 0) products_begin();
      const uint64_t values = matrix_descriptor(part.address(), kRowBytes);
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k)
#pragma unroll
        for (int c = 0; c < Shape::kPartColumns && first + c < Shape::kColumns; ++c)
          multiply_few<true>(Type{}, rows.acc[first + c], advance(values, (c * Shape::kKeys + k * 16) * kRowBytes),
                             advance(weights, k * 32), 1);
      products_commit();
      part.advance();
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) rows.l[Rows::entry_of(i)] += w[i];
    release_parts<(Shape::kColumns - 1) / Shape::kPartColumns>();
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) settle(rows.acc[c]);
    turn ^= Shape::kWeightBytes;
  }
  // One after the other, as their products are done: kBehind groups come behind the first.
  template <int kBehind>
  PD_MEMBER void release_parts() {
    products_wait<kBehind>();
    release();
    if constexpr (kBehind > 0) release_parts<kBehind - 1>();
  }
  PD_MEMBER void release() {
    ring.release();
    ring.advance();
  }

  PD_MEMBER void attend(const Problem& p, const MlaCall& call, const Item& item, const Segment& segment) {
    copy_queries(p, call, item, segment.head);
    rows.start(p, item, segment.head);
    await_pieces();
    fence_async_proxy();
    Rows::sync();
#pragma unroll 1
    for (int unit = segment.tile; unit < segment.tile_end; unit += Shape::kUnits) {
      score_keys();
      float w[kSums];
      rows.find_weights(p, call, item, segment, unit * Shape::kUnitKeys, shared + Shape::kWeightsAt + turn,
                        control.tops, w, [] {});
      add_values(w);
    }
  }

  // ---- The end of a segment ----

  // Neighbouring lanes have neighbouring dimensions of the same two rows. Then each has both dimensions of one row.
  static PD_MEMBER float2 both_dims(float first_row, float second_row) {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const float other = __shfl_xor_sync(~0u, odd ? first_row : second_row, 4);
    return odd ? make_float2(other, second_row) : make_float2(first_row, other);
  }
  // That row, of every row tile; and the first of the dimensions, of every 8.
  static PD_MEMBER int own_row() { return threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }
  static PD_MEMBER int own_dim() { return threadIdx.x % kWarp / 8 * 2; }
  // Sums of two rows at a dimension of a column: of a row tile, and the first or the second 8 of 16 dimensions.
  PD_MEMBER float2 dims_of(int column, int row_tile, int half) const {
    const float* const sums = rows.acc[column] + row_tile * 4 + half * 2;
    return both_dims(sums[0], sums[1]);
  }

  // behind: clusters that have the other keys of the item, behind these.
  PD_MEMBER void finish(const Problem& p, const MlaCall& call, const Item& item, const Segment& segment, int behind) {
    const int row = threadIdx.x;
    rows.publish(control.base, control.l[Shape::part()]);
    Rows::sync();
    const bool whole = segment.first && behind == 0;
    const int64_t partial = mla_partial(call, blockIdx.x, 0, segment.first);
    if (row < item.rows) {
      float l = 0.f;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) l += control.l[w][row];
      if (whole) {
        const RowTarget target = row_target(p, call, item, segment.head, row);
        control.factor[row] = finish_row(p, target, item.b, segment.head, control.base[row], l, true);
        control.place[row] = target.out;
      } else {
        call.ml[partial * MlaSizes::kRows + row] = make_float2(control.base[row], l);
      }
    }
    __syncwarp();  // or lanes that have a row would go on by themselves, and every shuffle below take 150 cycles
    if (whole) {
      Rows::sync();
      write_rows(p, item);
      Rows::sync();  // what is said of rows has been read
    } else {
      write_partial(call, partial);
    }
  }

  PD_MEMBER void write_rows(const Problem& p, const Item& item) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + own_row();
      const bool exists = row < item.rows;
      const float factor = exists ? control.factor[row] : 0.f;
      uint16_t* const out =
          static_cast<uint16_t*>(p.out) + (exists ? control.place[row] : 0) + Shape::part() * 16 + own_dim();
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 own = dims_of(c, n, half);
          if (!exists) continue;
          *reinterpret_cast<uint32_t*>(out + c * kColumn + half * 8) =
              pack_pair<Shape::kBf16>(own.x * factor, own.y * factor);
        }
    }
  }

  // In the order that mla_sums() tells. Nobody reads the sums of rows that do not exist.
  PD_MEMBER void write_partial(const MlaCall& call, int64_t partial) const {
    constexpr int kHalf = Shape::kColumns / 2;
#pragma unroll
    for (int n = 0; n < kRowTiles; n += 2) {
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 low = dims_of(c, n, half), high = dims_of(c, n + 1, half);
          const int step = (c % kHalf * kColumn + Shape::part() * 16) / 8 + half;
          float4* const sums = mla_sums(call, partial, c / kHalf) + step * kWarpgroup + n / 2 * kWarp;
          sums[own_row() * 4 + own_dim() / 2] = make_float4(low.x, low.y, high.x, high.y);
        }
    }
  }
};

}  // namespace paged_attn
