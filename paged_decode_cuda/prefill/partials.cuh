// The partials of rows whose keys were cut, on their way from the prefill kernel to the combine kernel.
#pragma once

#include "shape.cuh"
#include "weights.cuh"

namespace paged_attn {

// A lane has two rows of a tile, 8 apart. It finds out about one, its own, and is told of the other one by a lane that
// has it too: long code that runs once for each tile is slow to fetch.
struct OwnRow {
  int row;
  float base, sum;  // its reference score and the sum of its weights

  // The lanes of a row trade: each adds what it has of its own row to what the one beside it has.
  template <typename Rows>
  PD_MEMBER OwnRow(const Rows& rows, int first_row) {
    const bool second = threadIdx.x % 2 > 0;
    row = first_row + (second ? 8 : 0);
    base = second ? rows.base[1] : rows.base[0];
    sum = (second ? rows.l[1] : rows.l[0]) + __shfl_xor_sync(~0u, second ? rows.l[0] : rows.l[1], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }

  // Two lanes have the same own row. Whether this is the one that writes what there is once for a row.
  static PD_MEMBER bool speaks() { return threadIdx.x % kQuad < 2; }

  // What is known of the first row or the second one, from a lane whose own it is.
  template <typename T>
  static PD_MEMBER T told(T known, int r) {
    return __shfl_sync(~0u, known, r, kQuad);
  }
};

// The first token of a request among those of all.
PD_DEVICE int first_token(const Problem& p, const Item& item) {
  return p.cu_seqlens_q ? item.q_begin : item.b * static_cast<int>(p.max_q_len);
}

// Where the partial of a row waits for the combine kernel: its number in PrefillCall::sums and ml.
PD_DEVICE int64_t partial_index(const Problem& p, int split, int token, int q_head) {
  return (split * p.total_q + token) * p.q_heads + q_head;
}

// Begins the partial of a lane's own row: stores its reference score and the sum of its weights, and with the first
// split also how many there are and whose row it is. Returns the number of the partial.
PD_DEVICE int64_t begin_partial(const Problem& p, const PrefillCall& plan, const Work& work, const OwnRow& own) {
  const QueryRow query = query_row(p, plan, work.item, work.head, own.row);
  const int64_t place = partial_index(p, work.split, first_token(p, work.item) + query.token, query.q_head);
  if (own.speaks()) {
    plan.ml[place] = make_float2(own.base, own.sum);
    if (work.split == 0) plan.row_splits[place] = make_int2(work.splits, work.item.b);
  }
  return place;
}

// Says that the keys of a warp's rows were not cut: the combine kernel leaves them as they are.
PD_DEVICE void leave_out(const Problem& p, const PrefillCall& plan, const Work& work, int first_row) {
#pragma unroll 1
  for (int row = first_row; row < min(work.item.rows, first_row + 16); row += 8) {
    if (threadIdx.x % 4 > 0) continue;
    const QueryRow query = query_row(p, plan, work.item, work.head, row);
    plan.row_splits[partial_index(p, 0, first_token(p, work.item) + query.token, query.q_head)] = make_int2(1, 0);
  }
}

// Leaves partials of the rows of a warp for the combine kernel.
template <typename Shape, bool kFull>
PD_DEVICE void store_partial(const Problem& p, const PrefillCall& plan, const Work& work,
                             const float (&acc)[Shape::kDimV / 2], const PrefillRows<Shape, kFull>& rows,
                             int first_row) {
  const Item& item = work.item;
  const OwnRow own(rows, first_row);
  int64_t place = 0;
  if (own.row < item.rows) place = begin_partial(p, plan, work, own);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const sums = plan.sums + OwnRow::told(place, r) * p.head_dim_v;
    if (first_row + r * 8 >= item.rows) continue;
#pragma unroll
    for (int j = 0; j < Shape::kDimV / 8; ++j) {
      const int dim = j * 8 + threadIdx.x % kQuad * 2;
      if (dim < p.head_dim_v)
        *reinterpret_cast<float2*>(sums + dim) = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
    }
  }
}

}  // namespace paged_attn
