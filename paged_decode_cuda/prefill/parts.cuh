// The sums of rows whose keys were cut into parts, on their way from the kernel to the combine kernel.
#pragma once

#include "shape.cuh"
#include "weights.cuh"

namespace paged_attn {

// The first token of a request among those of all.
PD_DEVICE int first_token(const Problem& p, const Item& item) {
  return p.cu_seqlens_q ? item.q_begin : item.b * static_cast<int>(p.max_q_len);
}

// Where the sums of a row of a part wait for the combine kernel.
PD_DEVICE int64_t part_row(const Problem& p, int part, int token, int q_head) {
  return (part * p.total_q + token) * p.q_heads + q_head;
}

// Reference and sum of weights of a row. The first part also says how many there are, and of which request it is.
PD_DEVICE void store_weight(const PrefillCall& plan, const Work& work, int64_t place, float base, float l) {
  plan.ml[place] = make_float2(base, l);
  if (work.part == 0) plan.row_parts[place] = make_int2(work.parts, work.item.b);
}

// The combine kernel has nothing to do with the rows of a warp.
PD_DEVICE void leave_out(const Problem& p, const PrefillCall& plan, const Work& work, int first_row) {
#pragma unroll 1
  for (int row = first_row; row < min(work.item.rows, first_row + 16); row += 8) {
    if (threadIdx.x % 4 > 0) continue;
    const QueryRow query = query_row(p, plan, work.item, work.head, row);
    plan.row_parts[part_row(p, 0, first_token(p, work.item) + query.token, query.q_head)] = make_int2(1, 0);
  }
}

// Leaves the rows of a warp for the combine kernel.
template <typename Shape, bool kFull>
PD_DEVICE void store_part(const Problem& p, const PrefillCall& plan, const Work& work,
                          const float (&acc)[Shape::kDimV / 2], const PrefillRows<Shape, kFull>& rows, int first_row) {
  const Item& item = work.item;
  const int t = threadIdx.x % 4;
  const int first = first_token(p, item);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    const float l = row_sum(rows.l[r]);
    if (row >= item.rows) continue;
    const QueryRow query = query_row(p, plan, item, work.head, row);
    const int64_t place = part_row(p, work.part, first + query.token, query.q_head);
    if (t == 0) store_weight(plan, work, place, rows.base[r], l);
    float* const sums = plan.sums + place * p.head_dim_v;
#pragma unroll
    for (int j = 0; j < Shape::kDimV / 8; ++j) {
      const int dim = j * 8 + t * 2;
      if (dim < p.head_dim_v)
        *reinterpret_cast<float2*>(sums + dim) = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
    }
  }
}

}  // namespace paged_attn
