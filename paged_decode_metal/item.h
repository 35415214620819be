// How the work is cut.
//
//   item   consecutive rows (token, head in group) of one request and kv_head, handled together; they share the keys
//   split  the share of an item's keys that one threadgroup walks over; a request has as many for all of its rows
//   tile   32 keys, one step of a simdgroup
#pragma once

#include "tables.h"

namespace paged_attn {

struct Item {
  int b, kv_head;
  int first_row, rows;  // in the request's order; how many exist
  Request request;
  KvRange keys;  // that some row sees
  int splits;
};

// Into how many parts the keys of each item of a request are cut. Depends on nothing of the other requests but, without
// `deterministic`, on how many items there are.
PD_FN int splits_of(constant Arguments& a, Request request) {
  if (!has_splits || request.q_len == 0 || request.q_len * a.group > a.split_rows) return 1;
  const int begin = min(token_keys(a, request, 0).begin, a.capacity);
  const int end = min(token_keys(a, request, request.q_len - 1).end, a.capacity);
  const int tiles = (end + kSimdWidth - 1) / kSimdWidth - begin / kSimdWidth;
  const int by_length = (end - begin + a.split_keys - 1) / a.split_keys;
  const int by_cores = min((end - begin + kMinSplitKeys - 1) / kMinSplitKeys, a.wanted_splits);
  return clamp(min(a.num_splits > 0 ? a.num_splits : max(by_length, by_cores), tiles), 1, a.max_splits);
}

// Grid: (tiles of rows, times splits), kv_heads, batch
PD_FN Item load_item(constant Arguments& a, Tables tables, int row_tile, int kv_head, int b, int rows_per_item) {
  Item item;
  item.b = b;
  item.kv_head = kv_head;
  item.request = load_request(a, tables, b);
  item.first_row = row_tile * rows_per_item;
  item.rows = clamp(item.request.q_len * a.group - item.first_row, 0, rows_per_item);
  item.keys = {0, 0};
  item.splits = splits_of(a, item.request);
  if (item.rows == 0) return item;
  // Both ends of what a row sees grow with its token.
  const KvRange first = token_keys(a, item.request, item.first_row / a.group);
  const KvRange last = token_keys(a, item.request, (item.first_row + item.rows - 1) / a.group);
  // No length makes a threadgroup walk beyond the cache.
  item.keys = {min(first.begin, a.capacity), min(last.end, a.capacity)};
  return item;
}

// Number of the partial of a row's first split; those of the others follow.
PD_FN long partial_of(constant Arguments& a, Item item, int row) {
  return ((long(item.b) * a.kv_heads + item.kv_head) * a.split_rows + item.first_row + row) * a.max_splits;
}

struct Row {
  int token, q_head;  // token of the request
  KvRange keys;
};

PD_FN Row load_row(constant Arguments& a, Item item, int row) {
  Row r;
  const int index = item.first_row + row;
  r.token = index / a.group;
  r.q_head = item.kv_head * a.group + index - r.token * a.group;
  r.keys = {0, 0};
  if (row < item.rows) r.keys = token_keys(a, item.request, r.token);
  return r;
}

PD_FN long element_of(constant Strides& strides, Item item, Row row) {
  return item.b * strides.outer + (item.request.q_begin + row.token) * strides.middle + row.q_head * strides.head;
}

// Results of rows. What a row needs beyond its sum.
struct Output {
  device void* out;
  device uint* lse;
  const device void* sinks;
  const device float* v_descale;
};

// Adds the sink, writes the lse, and gives the factor from acc to the output.
PD_FN float finish_row(constant Arguments& a, Output output, Item item, Row row, float m, float l, bool write_lse) {
  float factor = 1.f;
  if (has_sinks) {
    // Compared as bits: fast math knows no infinity.
    const float sink = load_float(output.sinks, sinks_type, row.q_head);
    if (as_type<uint>(sink) != kMinusInfinity) pd_add_sink(sink, &m, &l, &factor);
  }
  if (has_lse && write_lse) {
    const long index = item.b * a.lse_stride_batch + row.q_head * a.lse_stride_head + item.request.q_begin + row.token;
    output.lse[index] = l == 0.f ? kMinusInfinity : as_type<uint>(pd_lse(m, l));
  }
  if (has_v_descale)
    factor *= descale_at(output.v_descale, a.v_descale_stride_batch, a.v_descale_stride_head, item.b, item.kv_head);
  return factor * pd_normalizer(l);
}

// Tokens of q past cu_seqlens_q[batch] belong to no request: out 0, lse -inf.
PD_FN void clear_unclaimed(constant Arguments& a, Tables tables, Output output, int group, int groups, int thread_index,
                           int threads) {
  if (!has_cu_seqlens_q) return;
  for (int token = max(tables.cu_seqlens_q[a.batch], 0) + group; token < a.total_q; token += groups) {
    for (int i = thread_index; i < a.q_heads * head_dim_v; i += threads) {
      const int head = i / head_dim_v;
      const long row = token * a.out.middle + head * a.out.head;
      store_float(output.out, query_type, row + i - head * head_dim_v, 0.f);
      if (has_lse && i == head * head_dim_v) output.lse[head * a.lse_stride_head + token] = kMinusInfinity;
    }
  }
}

}  // namespace paged_attn
