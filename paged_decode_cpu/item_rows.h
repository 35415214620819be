// The rows of an item: their queries in, their results out.
#pragma once

#include "kernel.h"
#include "rotary.h"
#include "rows.h"
#include "spec/request.h"
#include "spec/state.h"

namespace paged_attn {
namespace {

// The token and the head of its group that a row of an item is.
struct RowAt {
  int64_t group, token, head;

  RowAt(const Problem& p, const Item& item)
      : group(p.group), token(item.row_begin / p.group), head(item.row_begin % p.group) {}
  void next() {
    if (++head < group) return;
    head = 0;
    ++token;
  }
};

// Reads the query rows of one kind (q, or qv), rotated where asked, into out[heads, rows, stride]. `row` has
// room for one.
template <class Ops>
void load_queries(const Problem& p, const Item& item, const Request& request, const void* source, int64_t stride_batch,
                  int64_t stride_token, int64_t stride_head, int64_t n, bool rotated, int64_t stride, int64_t head_rows,
                  float* row, typename Ops::Elem* out) {
  using Elem = typename Ops::Elem;
  constexpr bool kFloats = Ops::kElemType == DType::kFloat32;
  const int64_t row_elems = Ops::kLeftPieces * stride;
  const bool as_it_is = p.q_dtype == Ops::kElemType && n == stride && !rotated && !Ops::kDeinterleaves;
  for (int64_t h = item.kv_head_begin; h < item.kv_head_end; ++h, out += (head_rows - item.rows()) * row_elems) {
    RowAt at(p, item);
    for (int64_t r = 0; r < item.rows(); ++r, at.next(), out += row_elems) {
      const int64_t head = h * p.group + at.head;
      const int64_t offset =
          item.batch * stride_batch + (request.q_begin + at.token) * stride_token + head * stride_head;
      const char* q = static_cast<const char*>(source) + offset * dtype_bytes(p.q_dtype);
      if (as_it_is) {
        for (int64_t i = 0; i < n; i += Ops::kChunk) memcpy(out + i, q + i * sizeof(Elem), Ops::kChunk * sizeof(Elem));
        continue;
      }
      if constexpr (kFloats) row = out;
      read_row(p.q_dtype, q, n, row);
      for (int64_t i = n; i < stride; ++i) row[i] = 0.f;
      if (rotated) rotate(p.rotary, p.q_dtype, rotary_query_position(p, request, item.batch, at.token), row);
      if constexpr (Ops::kDeinterleaves)
        for (int64_t i = 0; i < stride; i += Ops::kChunk) Ops::deinterleave(row + i);
      for (int64_t i = 0; i < stride && !kFloats; i += kLanes) {
        const f32v x = load<DType::kFloat32>(row + i);
        if constexpr (Ops::kLeftPieces > 1) {
          Ops::store_query(out + i, stride, x);
        } else {
          Ops::store_elems(out + i, x);
        }
      }
    }
  }
}

// Ends one row: adds the sink, writes the lse, and returns the factor of the sums of its values. A factor of 0 means a
// result of 0, even where the sums are NaN. write_result follows.
inline float finish_row(const Problem& p, const Request& request, int64_t b, int64_t token, int64_t head, float m,
                        float l) {
  float factor = 1.f;
  if (p.sinks) pd_add_sink(load_scalar(p.sinks_dtype, p.sinks, head), &m, &l, &factor);
  if (p.lse) p.lse[b * p.lse_stride_batch + head * p.lse_stride_head + request.q_begin + token] = pd_lse(m, l);
  return l == 0.f ? 0.f : factor * pd_normalizer(l);
}

inline void write_result(const Problem& p, const Request& request, int64_t b, int64_t token, int64_t head,
                         const float* row) {
  const int64_t offset =
      b * p.out_stride_batch + (request.q_begin + token) * p.out_stride_token + head * p.out_stride_head;
  const DType dtype = out_dtype(p.q_dtype);
  write_row(dtype, row, p.head_dim_v, static_cast<char*>(p.out) + offset * dtype_bytes(dtype));
}

}  // namespace
}  // namespace paged_attn
