// The partials of rows whose keys were cut, on their way from the prefill kernel to the combine kernel.
#pragma once

#include "shape.cuh"
#include "weights.cuh"

namespace paged_attn {

// The first token of a request among those of all.
PD_DEVICE int first_token(const Problem& p, const Item& item) {
  return p.cu_seqlens_q ? item.q_begin : item.b * static_cast<int>(p.max_q_len);
}

// Where the partial of a row waits for the combine kernel: its number in PrefillCall::sums and ml.
PD_DEVICE int64_t partial_index(const Problem& p, int split, int token, int q_head) {
  return (split * p.total_q + token) * p.q_heads + q_head;
}

// Begins the partial of a row: where `writes`, stores its reference score and the sum of its weights, and with the
// first split also how many there are and whose row it is. `first`: the first token of the request. Returns the number
// of the partial.
PD_DEVICE int64_t begin_partial(const Problem& p, const PrefillCall& plan, const Work& work, int first, int row,
                                float base, float l, bool writes) {
  const QueryRow query = query_row(p, plan, work.item, work.head, row);
  const int64_t place = partial_index(p, work.split, first + query.token, query.q_head);
  if (writes) {
    plan.ml[place] = make_float2(base, l);
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

// Leaves partials of the rows of a warp for the combine kernel. As in store_rows(), a lane finds the place of one row.
template <typename Shape, bool kFull>
PD_DEVICE void store_partial(const Problem& p, const PrefillCall& plan, const Work& work,
                             const float (&acc)[Shape::kDimV / 2], const PrefillRows<Shape, kFull>& rows,
                             int first_row) {
  const Item& item = work.item;
  const int t = threadIdx.x % kQuad;
  const float first_sum = row_sum(rows.l[0]), second_sum = row_sum(rows.l[1]);
  const bool second = t % 2 > 0;
  const int own = first_row + (second ? 8 : 0);
  int64_t place = 0;
  if (own < item.rows)
    place = begin_partial(p, plan, work, first_token(p, item), own, second ? rows.base[1] : rows.base[0],
                          second ? second_sum : first_sum, t < 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const sums = plan.sums + __shfl_sync(~0u, place, r, kQuad) * p.head_dim_v;
    if (first_row + r * 8 >= item.rows) continue;
#pragma unroll
    for (int j = 0; j < Shape::kDimV / 8; ++j) {
      const int dim = j * 8 + t * 2;
      if (dim < p.head_dim_v)
        *reinterpret_cast<float2*>(sums + dim) = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
    }
  }
}

}  // namespace paged_attn
