// From the sums of a row to its output and lse, and the factors on the way.
#pragma once

#include "items.cuh"
#include "ptx.cuh"

namespace paged_attn {

// Tokens of q past cu_seqlens_q[batch] belong to no request: out 0, lse -inf.
PD_DEVICE void clear_unclaimed(const Problem& p) {
  if (!p.cu_seqlens_q) return;
  for (int64_t token = query_begin(p, static_cast<int>(p.batch)) + blockIdx.x; token < p.total_q; token += gridDim.x) {
    for (int h = 0; h < p.q_heads; ++h) {
      int64_t out = token * p.out_stride_token + h * p.out_stride_head;
      for (int dim = threadIdx.x; dim < p.head_dim_v; dim += blockDim.x)
        store_float(p.out, out_dtype(p.q_dtype), out + dim, 0.f);
      if (p.lse && threadIdx.x == 0) p.lse[h * p.lse_stride_head + token] = -INFINITY;
    }
  }
}

// Whose query a row of an item is.
struct QueryRow {
  int token, q_head;  // the token counted from the first of its request
};

PD_DEVICE QueryRow query_row(const Problem& p, const Plan& plan, const Item& item, int head, int row) {
  const int token = plan.group.divide(item.first_row + row);
  return {token, head * static_cast<int>(p.group) + item.first_row + row - token * static_cast<int>(p.group)};
}

// Where it begins in q and in qv, in elements.
PD_DEVICE int64_t q_offset(const Problem& p, const Item& item, const QueryRow& query) {
  return item.b * p.q_stride_batch + (item.q_begin + query.token) * p.q_stride_token + query.q_head * p.q_stride_head;
}
PD_DEVICE int64_t qv_offset(const Problem& p, const Item& item, const QueryRow& query) {
  return item.b * p.qv_stride_batch + (item.q_begin + query.token) * p.qv_stride_token +
         query.q_head * p.qv_stride_head;
}

// Place of one row's result.
struct RowTarget {
  int64_t out, lse;  // element offsets
  int q_head;
};

PD_DEVICE RowTarget row_target(const Problem& p, const Plan& plan, const Item& item, int head, int row) {
  const QueryRow query = query_row(p, plan, item, head, row);
  const int64_t b = item.b, q_head = query.q_head, token = item.q_begin + query.token;
  return {b * p.out_stride_batch + token * p.out_stride_token + q_head * p.out_stride_head,
          b * p.lse_stride_batch + q_head * p.lse_stride_head + token, query.q_head};
}

// Of a (batch, kv_heads) table that may be absent.
PD_DEVICE float descale_of(const Optional<const float>& table, int64_t stride_batch, int64_t stride_head, int b,
                           int head) {
  return table ? table[b * stride_batch + head * stride_head] : 1.f;
}

PD_DEVICE float k_descale_of(const Cache& c, int b, int head) {
  return descale_of(c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head, b, head);
}

PD_DEVICE float v_descale_of(const Cache& c, int b, int head) {
  return descale_of(c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head, b, head);
}

// Adds the sink and gives the factor from acc to the output; writes the lse when `write_lse`.
PD_DEVICE float finish_row(const Problem& p, const RowTarget& target, int b, int head, float m, float l,
                           bool write_lse) {
  float factor = 1.f;
  if (p.sinks) pd_add_sink(load_float(p.sinks, p.sinks_dtype, target.q_head), &m, &l, &factor);
  if (write_lse && p.lse) p.lse[target.lse] = pd_lse(m, l);
  return pd_with_v_descale(factor * pd_normalizer(l), v_descale_of(p.cache, b, head));
}

// The factor of q: softmax scale and the scale of quantised q.
PD_DEVICE float query_scale(const Problem& p, int b, int head) {
  return p.scale * descale_of(p.q_descale, p.q_descale_stride_batch, p.q_descale_stride_head, b, head);
}

// The factor of q.k.
PD_DEVICE float score_scale(const Problem& p, int b, int head) {
  return query_scale(p, b, head) * k_descale_of(p.cache, b, head);
}

PD_DEVICE float row_slope(const Problem& p, int b, int q_head) {
  return p.alibi_slopes ? p.alibi_slopes[b * p.alibi_stride_batch + q_head] : 0.f;
}

}  // namespace paged_attn
