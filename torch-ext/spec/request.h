// The sizes of one request, read from the tensors of the problem, and where its keys lie.
#pragma once

#include "problem.h"
#include "ranges.h"

namespace paged_attn {
namespace {

struct Request {
  int64_t q_begin, q_len;  // tokens [q_begin, q_begin + q_len) of q (q_begin is 0 without cu_seqlens_q)
  int64_t old_len;         // keys before the append
  int64_t new_begin, new_len;
  int64_t kv_len;  // keys after the append
  int64_t leftpad;
};

inline Request request_of(const Problem& p, int64_t b) {
  Request r;
  r.q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
  r.q_len = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - r.q_begin : p.max_q_len;
  r.old_len = p.cache_seqlens        ? p.cache_seqlens[b]
              : p.cache.cu_seqlens_k ? p.cache.cu_seqlens_k[b + 1] - p.cache.cu_seqlens_k[b]
                                     : p.seqlen_k;
  r.new_begin = 0;
  r.new_len = 0;
  if (p.append.k) {
    r.new_begin = p.append.cu_seqlens_k_new ? p.append.cu_seqlens_k_new[b] : 0;
    r.new_len = p.append.cu_seqlens_k_new ? p.append.cu_seqlens_k_new[b + 1] - r.new_begin : p.append.seqlen_new;
  }
  // A padded entry of a captured batch: its length after the append is 0, and nothing is written.
  if (r.old_len < 0 && r.old_len + r.new_len == 0) r.old_len = r.new_len = 0;
  r.kv_len = r.old_len + r.new_len;
  r.leftpad = p.cache_leftpad ? p.cache_leftpad[b] : 0;
  return r;
}

inline KvRange keys_of_token(const Problem& p, const Request& r, int64_t token) {
  return visible_keys(r.kv_len - r.q_len + token, r.kv_len, r.leftpad, p.window_left, p.window_right,
                      p.attention_chunk);
}

// Position of a new key: the place where it is written, unless rotary_seqlens says otherwise.
inline int64_t rotary_key_position(const Problem& p, const Request& r, int64_t b, int64_t token) {
  return (p.rotary.seqlens ? p.rotary.seqlens[b] : r.old_len) + token;
}

// flash-attn's rule: each query has its own position only where positions matter; else all have that of the first.
inline int64_t rotary_query_position(const Problem& p, const Request& r, int64_t b, int64_t token) {
  return rotary_key_position(p, r, b, is_local(p) ? token : 0);
}

// All keys that any of the tokens [begin, end) sees. The later a token, the later the first and the last key that it
// sees; single tokens may see none.
inline KvRange keys_of_tokens(const Problem& p, const Request& r, int64_t begin, int64_t end) {
  const auto sees_none = [&](int64_t token) {
    const KvRange keys = keys_of_token(p, r, token);
    return keys.begin == keys.end;
  };
  while (begin < end && sees_none(begin)) ++begin;
  while (begin < end && sees_none(end - 1)) --end;
  if (begin >= end) return {0, 0};
  return {keys_of_token(p, r, begin).begin, keys_of_token(p, r, end - 1).end};
}

inline int64_t cache_row(const Cache& c, int64_t b) { return c.cache_batch_idx ? c.cache_batch_idx[b] : b; }

struct Slot {
  int64_t page, slot;
};

inline Slot slot_of_key(const Cache& c, int64_t b, int64_t key) {
  if (c.block_table)
    return {c.block_table[cache_row(c, b) * c.block_table_stride + key / c.page_size], key % c.page_size};
  if (c.cu_seqlens_k) return {0, c.cu_seqlens_k[b] + key};
  return {cache_row(c, b), key};
}

// Which of all new tokens token t of request b is.
inline int64_t new_token_number(const Problem& p, const Request& r, int64_t b, int64_t t) {
  return (p.append.cu_seqlens_k_new ? 0 : b * p.append.seqlen_new) + r.new_begin + t;
}

// The slot that the new token is written to. Page -1: none, as its slot_mapping is negative.
inline Slot slot_of_new_token(const Problem& p, const Request& r, int64_t b, int64_t t) {
  if (!p.append.slot_mapping) return slot_of_key(p.cache, b, r.old_len + t);
  const int64_t slot = p.append.slot_mapping[new_token_number(p, r, b, t)];
  if (slot < 0) return {-1, 0};
  return {slot / p.cache.page_size, slot % p.cache.page_size};
}

// descale of a (batch, kv_heads) table that may be absent
inline float descale_at(const Optional<const float>& table, int64_t stride_batch, int64_t stride_head, int64_t b,
                        int64_t kv_head) {
  return table ? table[b * stride_batch + kv_head * stride_head] : 1.f;
}

}  // namespace
}  // namespace paged_attn
