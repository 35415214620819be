// Basic calls: pages, the lengths, a head_dim with a kernel of its own, sinks at most. They are the common ones and
// have a kernel of their own, for which the rest of the problem is known when it is compiled: two thirds of the code,
// less than half of the arguments, and 0.5 to 1 us less for every call.
#pragma once

#include "../items.cuh"
#include "plan.h"

namespace paged_attn {

// Fields have the names of Problem and Cache. Whether an optional tensor is given stands apart from its address, in
// four bytes instead of 32.
struct BasicCall {
  int64_t kv_heads, group, max_q_len, total_q;
  const void* q;
  void* out;
  float* lse;
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  const int32_t* cache_seqlens;
  const int32_t* cu_seqlens_q;
  float scale;
  bool has_lse, has_sinks, has_k_descale, has_v_descale;
  int64_t window_right;
  const void* sinks;
  struct {
    void* k;
    void* v;
    int64_t num_pages;
    const int32_t* block_table;
    const float* k_descale;
    const float* v_descale;
    int64_t k_descale_stride_batch, k_descale_stride_head;
    int64_t v_descale_stride_batch, v_descale_stride_head;
  } cache;
  CommonPlan plan;
};

// Fields of the same type here and there: from a Problem to a BasicCall, or back.
template <typename To, typename From>
PD_FN void copy_basic_fields(To& to, const From& from) {
  to.kv_heads = from.kv_heads;
  to.group = from.group;
  to.max_q_len = from.max_q_len;
  to.total_q = from.total_q;
  to.q = from.q;
  to.out = from.out;
  to.q_stride_batch = from.q_stride_batch;
  to.q_stride_token = from.q_stride_token;
  to.q_stride_head = from.q_stride_head;
  to.out_stride_batch = from.out_stride_batch;
  to.out_stride_token = from.out_stride_token;
  to.out_stride_head = from.out_stride_head;
  to.lse_stride_batch = from.lse_stride_batch;
  to.lse_stride_head = from.lse_stride_head;
  to.scale = from.scale;
  to.window_right = from.window_right;
  to.cache.k = from.cache.k;
  to.cache.v = from.cache.v;
  to.cache.num_pages = from.cache.num_pages;
  to.cache.k_descale_stride_batch = from.cache.k_descale_stride_batch;
  to.cache.k_descale_stride_head = from.cache.k_descale_stride_head;
  to.cache.v_descale_stride_batch = from.cache.v_descale_stride_batch;
  to.cache.v_descale_stride_head = from.cache.v_descale_stride_head;
}

template <typename T>
PD_FN void split_optional(const Optional<T>& from, T*& address, bool& given) {
  address = from.data;
  given = from.given;
}

inline BasicCall basic_call(const Problem& p, const Plan& plan) {
  BasicCall call;
  copy_basic_fields(call, p);
  call.cache_seqlens = p.cache_seqlens;
  call.cu_seqlens_q = p.cu_seqlens_q;
  call.cache.block_table = p.cache.block_table;
  split_optional(p.lse, call.lse, call.has_lse);
  split_optional(p.sinks, call.sinks, call.has_sinks);
  split_optional(p.cache.k_descale, call.cache.k_descale, call.has_k_descale);
  split_optional(p.cache.v_descale, call.cache.v_descale, call.has_v_descale);
  call.plan = plan;
  return call;
}

// Back to the problem and the plan, in a kernel for caches of `dtype`.
PD_DEVICE Problem basic_problem(const BasicCall& call, DType dtype, int head_dim, bool packed) {
  Problem p = {};
  copy_basic_fields(p, call);
  p.batch = call.plan.items;  // one item each
  p.q_heads = p.kv_heads * p.group;
  p.cache_seqlens = {call.cache_seqlens, true};
  p.cu_seqlens_q = {call.cu_seqlens_q, packed};
  p.cache.block_table = {call.cache.block_table, true};
  p.cache.block_table_stride = call.plan.table_stride;
  p.lse = {call.lse, call.has_lse};
  p.sinks = {call.sinks, call.has_sinks};
  if (dtype_bytes(dtype) == 1) {
    p.cache.k_descale = {call.cache.k_descale, call.has_k_descale};
    p.cache.v_descale = {call.cache.v_descale, call.has_v_descale};
  }
  p.cache.dtype = dtype;
  p.q_dtype = p.sinks_dtype = basic_dtype(dtype);
  p.head_dim = p.head_dim_v = head_dim;
  p.window_left = -1;
  return p;
}

PD_DEVICE Plan basic_plan(const BasicCall& call, int row_shift, int tile_shift, int head_dim) {
  Plan plan = {};
  static_cast<CommonPlan&>(plan) = call.plan;
  plan.row_shift = row_shift;
  plan.rows_per_tile = 1 << row_shift;
  plan.tile_shift = tile_shift;
  plan.partial_quads = head_dim / 4;
  plan.balanced = plan.basic = true;
  plan.direct_items = plan.items;
  plan.row_tiles.divisor = 1;
  return plan;
}

}  // namespace paged_attn
