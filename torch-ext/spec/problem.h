// What was asked: sizes, strides, scalars and addresses of one call. Filled once, by name, in
// op_attend.cpp, op_write.cpp and op_parts.cpp; every backend reads it. How the work is cut (splits, tiles, threads) is
// the backend's private plan and never appears here.
//
// Strides count elements. The last dimension of every tensor is contiguous. A tensor that may be left out is an
// Optional, and every scalar has a neutral value, so "off" is no special path.
#pragma once

#include "qualifiers.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// The widest head_dim and head_dim_v of any supported pair (576 for MLA's joined keys).
constexpr int64_t kMaxHeadDim = 576;
constexpr int64_t kMaxHeadDimV = 512;
constexpr int64_t kMaxKeys = int64_t{1} << 30;  // of one request on a GPU: sums of two positions still fit into 32 bits

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

PD_FN constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

// 8-bit queries have a bfloat16 result.
PD_FN constexpr DType out_dtype(DType q_dtype) { return dtype_bytes(q_dtype) == 1 ? DType::kBFloat16 : q_dtype; }

// Where a tensor begins. A pointer, but on Metal the host knows no addresses: a place in an MTLBuffer.
#ifdef METAL_KERNEL
template <typename T>
struct Address {
  void* buffer;
  int64_t offset;  // in bytes

  // To read through it, the buffer must be plain memory: a copy on the host.
  operator T*() const { return static_cast<T*>(buffer); }
};
#else
template <typename T>
using Address = T*;
#endif

// A tensor that a caller may leave out. Only `given` tells whether it is there: an empty tensor has no address.
template <typename T>
struct Optional {
  Address<T> data;
  bool given;

  PD_METHOD explicit operator bool() const { return given; }
  PD_METHOD operator T*() const { return data; }
};

// Where the keys of a request live. Three forms, told apart by what is given:
//   paged       block_table given: key j is slot j % page_size of page block_table[table_row][j / page_size]
//   contiguous  neither: the cache row of a request is one page that holds all its keys
//   ragged      cu_seqlens_k given: all keys in one page, a request starts at slot cu_seqlens_k[b]
struct Cache {
  Address<void> k;  // [num_pages, page_size, kv_heads, head_dim]
  Address<void> v;  // [num_pages, page_size, kv_heads, head_dim_v]
  int64_t k_stride_page, k_stride_slot, k_stride_head;
  int64_t v_stride_page, v_stride_slot, v_stride_head;
  int64_t num_pages, page_size;
  DType dtype;
  Optional<const int32_t> block_table;  // [table_rows, max_pages]
  int64_t block_table_stride;
  int64_t table_rows, max_pages;
  Optional<const int32_t> cu_seqlens_k;     // [batch + 1]
  Optional<const int32_t> cache_batch_idx;  // [batch] row of block_table, or of the contiguous cache
  Optional<const float> k_descale;          // [batch, kv_heads], value = stored * descale
  Optional<const float> v_descale;
  int64_t k_descale_stride_batch, k_descale_stride_head;
  int64_t v_descale_stride_batch, v_descale_stride_head;
};

// New keys and values, written at cache_seqlens (or at slot_mapping), before any key is read.
struct Append {
  Optional<const void> k;  // [batch, seqlen_new, kv_heads, head_dim], or [total_new, ...] with cu_seqlens_k_new
  Optional<const void> v;  // the same with head_dim_v
  DType dtype;
  int64_t k_stride_batch, k_stride_token, k_stride_head;  // stride_batch is 0 with cu_seqlens_k_new
  int64_t v_stride_batch, v_stride_token, v_stride_head;
  int64_t seqlen_new;                        // tokens per request; without meaning with cu_seqlens_k_new
  int64_t total_new;                         // tokens of all requests
  Optional<const int32_t> cu_seqlens_k_new;  // [batch + 1]
  Optional<const int64_t> slot_mapping;      // [total_new]; a negative slot skips its token
};

// Rotary embedding of the new keys and of the queries; tables in the dtype of q.
struct Rotary {
  Optional<const void> cos;  // [rotary_len, rotary_dim / 2]
  Optional<const void> sin;
  int64_t cos_stride, sin_stride;
  int64_t rotary_len, rotary_dim;
  bool interleaved;
  Optional<const int32_t> seqlens;  // [batch]: position of the first new token instead of cache_seqlens
};

struct Problem {
  int64_t batch;
  int64_t q_heads, kv_heads, group;  // group == q_heads / kv_heads
  int64_t head_dim, head_dim_v;
  int64_t total_q, max_q_len;  // max_q_len: q_len of every request without cu_seqlens_q
  DType q_dtype;

  Address<const void> q;    // [batch, seqlen_q, q_heads, head_dim], or [total_q, ...] with cu_seqlens_q
  Optional<const void> qv;  // like q with head_dim_v
  Address<void> out;        // like q with head_dim_v, in out_dtype(q_dtype)
  Optional<float> lse;      // [batch, q_heads, seqlen_q], or [q_heads, total_q]
  int64_t q_stride_batch, q_stride_token, q_stride_head;  // stride_batch is 0 with cu_seqlens_q
  int64_t qv_stride_batch, qv_stride_token, qv_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;

  Optional<const int32_t> cu_seqlens_q;   // [batch + 1]
  Optional<const int32_t> cache_seqlens;  // [batch]: kv_len before the append, or the full one without it
  int64_t seqlen_k;  // kv_len of every request when neither cache_seqlens nor cu_seqlens_k is given
  Optional<const int32_t> cache_leftpad;  // [batch]

  Cache cache;
  Append append;  // without append.k nothing is written
  Rotary rotary;  // without rotary.cos nothing is rotated

  float scale;
  float softcap;                       // 0 is off
  int64_t window_left, window_right;   // -1 is unlimited; causal arrives as window_right == 0
  int64_t attention_chunk;             // 0 is off
  Optional<const float> alibi_slopes;  // [batch, q_heads]
  int64_t alibi_stride_batch;          // 0 when one row serves every request
  Optional<const void> sinks;          // [q_heads]
  DType sinks_dtype;
  Optional<const float> q_descale;  // [batch, kv_heads]
  int64_t q_descale_stride_batch, q_descale_stride_head;

  int64_t num_splits;  // 0: the plan chooses
  bool deterministic;
  int32_t max_kv_len;  // of the longest request, as far as the caller says: see max_kv_len_of()
};

// Keys that the cache can hold for one request, at most.
PD_FN int64_t capacity_of(const Problem& p) {
  return p.cache.block_table ? p.cache.max_pages * p.cache.page_size : p.cache.page_size;
}

// For the plan alone, which takes what the cache can hold where nothing is said (-1). So it does with `deterministic`
// and num_splits: the longest request may be another one, and must not change the cuts.
PD_FN int32_t max_kv_len_of(const Problem& p, int64_t said) {
  const int64_t capacity = capacity_of(p), most = capacity < kMaxKeys ? capacity : kMaxKeys;
  const bool is_fixed = p.deterministic || p.num_splits > 0;
  return static_cast<int32_t>(said < 0 || said > most || is_fixed ? most : said);
}

// Whether a position matters to what a query sees: causal, windowed or chunked.
PD_FN bool is_local(const Problem& p) { return p.window_left >= 0 || p.window_right >= 0 || p.attention_chunk > 0; }

}  // namespace paged_attn
