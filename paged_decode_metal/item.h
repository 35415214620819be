// How the work is cut.
//
//   item   a tile of rows and one split of its keys: what a threadgroup works on
//   rows   (token, head in group) of one request and kv_head, in this order; a tile of them shares the keys
//   split  a share of the keys; a request has as many for all of its rows
//   tile   of keys: 32 of them, one step of a simdgroup
#pragma once

#include "tables.h"

namespace paged_attn {

// One thread of a threadgroup.
struct Worker {
  int index, threads, simdgroup, simdgroups, lane;
};

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

// Where a threadgroup works. The grid is (row tiles times splits, kv_heads, requests), or with packed_row_tiles
//
//   | row tiles of all requests, first split | request 0: row tiles x further splits | request 1 | ...
//     packed_row_tiles                         cut_row_tiles * (max_splits - 1)         the same
//
// so that it grows with the tokens and the requests, but not with their product.
struct ItemIndex {
  int b, row_tile, split;
};

// With cu_seqlens_q the row tiles of request b begin at floor(tokens before it * group / rows) + b: there is always
// room for those of the requests before it, and at most one of each request stays empty.
struct FirstRowTile {
  const device int* cu_seqlens_q;
  int total_q, group, rows;

  int operator()(int b) const { return clamp(cu_seqlens_q[b], 0, total_q) * group / rows + b; }
};

PD_FN ItemIndex find_item(constant Arguments& a, Tables tables, uint3 position, int rows, int packed_row_tiles) {
  const int max_splits = has_splits ? a.max_splits : 1;
  const int x = position.x;
  if (!has_cu_seqlens_q || packed_row_tiles == 0) return {int(position.z), x / max_splits, x % max_splits};
  if (x < packed_row_tiles) {
    const FirstRowTile first = {tables.cu_seqlens_q, a.total_q, a.group, rows};
    const int b = find_request(a.batch, x, first);
    return {b, x - first(b), 0};
  }
  const int index = (x - packed_row_tiles) / (max_splits - 1), split = 1 + (x - packed_row_tiles) % (max_splits - 1);
  const int cut_row_tiles = (a.split_rows + rows - 1) / rows;
  return {index / cut_row_tiles, index % cut_row_tiles, split};
}

PD_FN Item load_item(constant Arguments& a, Tables tables, ItemIndex index, int kv_head, int tile_rows) {
  Item item;
  item.b = index.b;
  item.kv_head = kv_head;
  item.request = load_request(a, tables, index.b);
  item.first_row = index.row_tile * tile_rows;
  // Wrong entries of cu_seqlens_q may place a tile before its request.
  item.rows = index.row_tile < 0 ? 0 : clamp(item.request.q_len * a.group - item.first_row, 0, tile_rows);
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

// ---- What goes into scores and comes out of rows

// Where results go, and what they need beyond their sums.
struct Output {
  device void* out;
  device uint* lse;
  const device void* sinks;
  const device float* v_descale;
};

// The buffers of attention; those that may be left out are to be read only where given.
struct Operands {
  const device void* q;
  const device void* qv;
  const device void* k_cache;
  const device void* v_cache;
  const device float* q_descale;
  const device float* k_descale;
  const device float* slopes;
  device float* partial_acc;
  device float2* partial_sums;
  Output output;
};

// clang-format off
#define PD_OPERAND_BUFFERS                                                                                    \
  const device void* q [[buffer(kQueryBuffer)]],                                                              \
  const device void* qv [[buffer(kQvBuffer), function_constant(has_qv)]],                                     \
  const device void* k_cache [[buffer(kKeyCacheBuffer)]],                                                     \
  const device void* v_cache [[buffer(kValueCacheBuffer)]],                                                   \
  const device float* q_descale [[buffer(kQDescaleBuffer), function_constant(has_q_descale)]],                \
  const device float* k_descale [[buffer(kKDescaleBuffer), function_constant(has_k_descale)]],                \
  const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],                \
  const device float* slopes [[buffer(kSlopesBuffer), function_constant(has_slopes)]],                        \
  const device void* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],                            \
  device float* partial_acc [[buffer(kPartialAccBuffer), function_constant(has_splits)]],                     \
  device float2* partial_sums [[buffer(kPartialSumsBuffer), function_constant(has_splits)]],                  \
  device void* out [[buffer(kOutBuffer)]],                                                                    \
  device uint* lse [[buffer(kLseBuffer), function_constant(has_lse)]]
// clang-format on

#define PD_OPERANDS                                                                                                  \
  {                                                                                                                  \
    q, qv, k_cache, v_cache, q_descale, k_descale, slopes, partial_acc, partial_sums, { out, lse, sinks, v_descale } \
  }

PD_FN float q_descale_of(constant Arguments& a, Operands operands, Item item) {
  return has_q_descale ? descale_at(operands.q_descale, a.q_descale, item.b, item.kv_head) : 1.f;
}

PD_FN float k_descale_of(constant Arguments& a, Operands operands, Item item) {
  return has_k_descale ? descale_at(operands.k_descale, a.k_descale, item.b, item.kv_head) : 1.f;
}

PD_FN float v_descale_of(constant Arguments& a, Output output, Item item) {
  return has_v_descale ? descale_at(output.v_descale, a.v_descale, item.b, item.kv_head) : 1.f;
}

PD_FN float slope_of(constant Arguments& a, Operands operands, Item item, Row row) {
  return has_slopes ? operands.slopes[item.b * a.slopes_stride_batch + row.q_head] : 0.f;
}

// Of a product of q and k, in log2 units.
PD_FN float log2_score(constant Arguments& a, float qk, float scale, float slope, int q_pos, int key) {
  const float distance = has_slopes ? fabs(float(q_pos - key)) : 0.f;
  return pd_score(qk, scale, has_softcap ? a.softcap : 0.f, slope, distance) * PD_LOG2E;
}

// The test is of the score itself: where no key was seen yet, score - top is 0 too.
PD_FN float probability_of(float score, float top) { return score == PD_EMPTY ? 0.f : metal::exp2(score - top); }

// Where one key of a tile lies in both caches; -1 for a key that is not in the range or has no place.
PD_FN void locate_key(constant Arguments& a, Tables tables, Item item, KvRange keys, int key,
                      threadgroup long* k_offset, threadgroup long* v_offset) {
  Place place = {-1, 0};
  if (key >= keys.begin && key < keys.end) place = find_place(a, tables, item.b, key);
  *k_offset = place.page < 0 ? -1 : cache_offset(a.k_cache, place) + item.kv_head * a.k_cache.head;
  *v_offset = place.page < 0 ? -1 : cache_offset(a.v_cache, place) + item.kv_head * a.v_cache.head;
}

// ---- Results of rows

// Adds the sink, writes the lse, and gives the factor from acc to the output. Infinite sinks are known by their bits,
// as fast math knows no infinity: one of -inf is none, one of +inf leaves nothing for the keys.
PD_FN float finish_row(constant Arguments& a, Output output, Item item, Row row, float m, float l, bool write_lse) {
  float factor = 1.f;
  uint sink_bits = kMinusInfinity;
  if (has_sinks) {
    const float sink = load_float(output.sinks, sinks_type, row.q_head);
    sink_bits = as_type<uint>(sink);
    if ((sink_bits & 0x7fffffffu) != kInfinity) pd_add_sink(sink, &m, &l, &factor);
  }
  if (has_lse && write_lse) {
    const long index = item.b * a.lse_stride_batch + row.q_head * a.lse_stride_head + item.request.q_begin + row.token;
    output.lse[index] = sink_bits == kInfinity ? kInfinity : l == 0.f ? kMinusInfinity : as_type<uint>(pd_lse(m, l));
  }
  const float normalizer = sink_bits == kInfinity ? 0.f : factor * pd_normalizer(l);
  return pd_with_v_descale(normalizer, v_descale_of(a, output, item));
}

// One element of the sum of a row over one split.
PD_FN void store_partial(constant Arguments& a, Operands operands, Item item, int split, int row, int dim, float m,
                         float l, float acc) {
  const long partial = partial_of(a, item, row) + split;
  if (dim == 0) operands.partial_sums[partial] = float2(m, l);
  operands.partial_acc[partial * head_dim_v + dim] = acc;
}

// Tokens of q past cu_seqlens_q[batch] belong to no request: out 0, lse -inf.
PD_FN void clear_unclaimed(constant Arguments& a, Tables tables, Output output, int group, int groups, Worker worker) {
  if (!has_cu_seqlens_q) return;
  for (int token = clamp(tables.cu_seqlens_q[a.batch], 0, a.total_q) + group; token < a.total_q; token += groups) {
    for (int i = worker.index; i < a.q_heads * head_dim_v; i += worker.threads) {
      const int head = i / head_dim_v;
      const long row = token * a.out.middle + head * a.out.head;
      store_float(output.out, out_type, row + i - head * head_dim_v, 0.f);
      if (has_lse && i == head * head_dim_v) output.lse[head * a.lse_stride_head + token] = kMinusInfinity;
    }
  }
}

}  // namespace paged_attn
