// The lengths of a request and the places of its keys, read on the device: the host never waits for them.
#pragma once

#include "device.h"

namespace paged_attn {

// The buffers that tell lengths and places; to be read only where given.
struct Tables {
  const device int* block_table;
  const device int* batch_idx;
  const device int* seqlens;
  const device int* leftpad;
  const device int* cu_seqlens_q;
  const device int* cu_seqlens_k;
  const device int* cu_seqlens_new;
};

// clang-format off
#define PD_TABLE_BUFFERS                                                                                      \
  const device int* block_table [[buffer(kBlockTableBuffer), function_constant(has_block_table)]],            \
  const device int* batch_idx [[buffer(kBatchIdxBuffer), function_constant(has_batch_idx)]],                  \
  const device int* seqlens [[buffer(kSeqlensBuffer), function_constant(has_seqlens)]],                       \
  const device int* leftpad [[buffer(kLeftpadBuffer), function_constant(has_leftpad)]],                       \
  const device int* cu_seqlens_q [[buffer(kCuSeqlensQBuffer), function_constant(has_cu_seqlens_q)]],          \
  const device int* cu_seqlens_k [[buffer(kCuSeqlensKBuffer), function_constant(has_cu_seqlens_k)]],          \
  const device int* cu_seqlens_new [[buffer(kCuSeqlensNewBuffer), function_constant(has_cu_seqlens_new)]]
// clang-format on

#define PD_TABLES {block_table, batch_idx, seqlens, leftpad, cu_seqlens_q, cu_seqlens_k, cu_seqlens_new}

struct Request {
  int q_begin, q_len;  // tokens [q_begin, q_begin + q_len) of q (q_begin is 0 without cu_seqlens_q)
  int old_len;         // keys before the append
  int new_len, kv_len;
  int leftpad;
};

// The host refuses capacities from 2^30 on. Wrong entries may not overflow what is computed of them.
PD_FN int bounded(long length) { return int(clamp(length, long(1 - (1 << 30)), long((1 << 30) - 1))); }

PD_FN int length_of(const device int* cu_seqlens, int b) { return bounded(long(cu_seqlens[b + 1]) - cu_seqlens[b]); }

PD_FN Request load_request(constant Arguments& a, Tables tables, int b) {
  Request r;
  r.q_begin = 0;
  r.q_len = a.q_len;
  if (has_cu_seqlens_q) {
    // Wrong entries may not lead out of q and out.
    r.q_begin = clamp(tables.cu_seqlens_q[b], 0, a.total_q);
    r.q_len = clamp(tables.cu_seqlens_q[b + 1], r.q_begin, a.total_q) - r.q_begin;
  }
  r.old_len = has_seqlens        ? bounded(tables.seqlens[b])
              : has_cu_seqlens_k ? length_of(tables.cu_seqlens_k, b)
                                 : a.seqlen_k;
  r.new_len = !has_new ? 0 : has_cu_seqlens_new ? length_of(tables.cu_seqlens_new, b) : a.seqlen_new;
  // A padded entry of a batch: its length after the append is 0, and nothing is written.
  if (r.old_len < 0 && r.old_len + r.new_len == 0) r.old_len = r.new_len = 0;
  r.kv_len = max(bounded(r.old_len + r.new_len), 0);
  r.leftpad = has_leftpad ? max(bounded(tables.leftpad[b]), 0) : 0;
  return r;
}

PD_FN KvRange token_keys(constant Arguments& a, Request r, int token) {
  return visible_keys(r.kv_len - r.q_len + token, r.kv_len, r.leftpad, a.window_left, a.window_right,
                      a.attention_chunk);
}

struct Place {
  int page;  // -1: outside the cache, neither read nor written
  long slot;
};

PD_FN Place find_place(constant Arguments& a, Tables tables, int b, int key) {
  const Place nowhere = {-1, 0};
  if (has_cu_seqlens_k) {
    const long slot = long(tables.cu_seqlens_k[b]) + key;
    return key < 0 || slot < 0 || slot >= a.cache_slots ? nowhere : Place{0, slot};
  }
  const int row = has_batch_idx ? tables.batch_idx[b] : b;
  Place place = {row, key};
  if (key < 0) return nowhere;
  if (has_block_table) {
    const int entry = key / page_size;
    if (entry >= a.max_pages || row < 0 || row >= a.table_rows) return nowhere;
    place.page = tables.block_table[row * a.block_table_stride + entry];
    place.slot = key - entry * page_size;
  }
  return place.page < 0 || place.page >= a.num_pages || place.slot >= a.cache_slots ? nowhere : place;
}

// Offset in elements; 64-bit products are slow, and few caches need them.
PD_FN long cache_offset(constant Strides& strides, Place place) {
  if (wide) return place.page * strides.outer + place.slot * strides.middle;
  return uint(place.page) * uint(strides.outer) + uint(place.slot) * uint(strides.middle);
}

// Of a table that is given.
PD_FN float descale_at(const device float* table, constant DescaleStrides& strides, int b, int kv_head) {
  return table[b * strides.batch + kv_head * strides.head];
}

}  // namespace paged_attn
