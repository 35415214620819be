// flash_attn_with_kvcache: checks, then the problem, then the backend (backend.h). The only place where the semantics
// of the arguments are decided; every device shares it. Each check_* function checks one group of arguments and fills
// its fields of the Problem (spec/problem.h); problem_of calls them in order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "backend.h"
#include "op_parts.h"
#include "ops.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr std::initializer_list<ScalarType> kQueryTypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                                           ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};

// The sizes of the queries besides Sizes: [batch, seqlen_q, ...], or [total_q, ...] with cu_seqlens_q.
struct QuerySizes {
  Dim seqlen_q{"seqlen_q"}, total_q{"total_q"};
};

// Strides of q, qv or out: tensors with a row for each token and head of q.
struct RowStrides {
  int64_t batch, token, head;
};

RowStrides check_rows(const Tensor& x, const char* name, std::initializer_list<ScalarType> types, Dim& dims,
                      const AttendArguments& a, const Like& q, Sizes& s, QuerySizes& n) {
  if (a.cu_seqlens_q) {
    check(x, name, types, {&n.total_q, &s.q_heads, &dims}, q);
    return {0, x.stride(0), x.stride(1)};
  }
  check(x, name, types, {&s.batch, &n.seqlen_q, &s.q_heads, &dims}, q);
  return {x.stride(0), x.stride(1), x.stride(2)};
}

void check_queries(const AttendArguments& a, const Like& q, Sizes& s, QuerySizes& n, Problem* p) {
  if (a.cu_seqlens_q) {
    if (a.cu_seqlens_q->dim() != 1 || a.cu_seqlens_q->size(0) < 1)
      fail("cu_seqlens_q: expected int32 [batch + 1], got " + shape_str(*a.cu_seqlens_q));
    s.batch = Dim("batch", a.cu_seqlens_q->size(0) - 1, "cu_seqlens_q");
  }
  const RowStrides strides = check_rows(*a.q, "q", kQueryTypes, s.head_dim, a, q, s, n);
  if (a.cu_seqlens_q) {
    Dim entries("batch + 1");
    check(*a.cu_seqlens_q, "cu_seqlens_q", kInt32, {&entries}, q);
    if (a.max_seqlen_q < 0) fail("max_seqlen_q: expected at least 0, got " + str(a.max_seqlen_q));
    p->total_q = n.total_q.size;
    p->max_q_len = pd_min(a.max_seqlen_q, p->total_q);  // no request has more than all tokens
    p->cu_seqlens_q = if_given<int32_t>(a.cu_seqlens_q);
  } else {
    p->total_q = s.batch.size * n.seqlen_q.size;
    p->max_q_len = n.seqlen_q.size;
  }
  p->q = address<const void>(*a.q);
  p->q_stride_batch = strides.batch;
  p->q_stride_token = strides.token;
  p->q_stride_head = strides.head;
  p->q_dtype = dtype_of(q.dtype);
}

void check_results(const AttendArguments& a, const Like& q, Sizes& s, QuerySizes& n, Problem* p) {
  const ScalarType type = is_8bit(q.dtype) ? ScalarType::BFloat16 : q.dtype;
  const RowStrides strides = check_rows(*a.out, "out", {type}, s.head_dim_v, a, q, s, n);
  p->out = address<void>(*a.out);
  p->out_stride_batch = strides.batch;
  p->out_stride_token = strides.token;
  p->out_stride_head = strides.head;
  if (!a.lse) return;
  p->lse = given<float>(*a.lse);
  if (a.cu_seqlens_q) {
    check(*a.lse, "softmax_lse", kFloat32, {&s.q_heads, &n.total_q}, q);
    p->lse_stride_head = a.lse->stride(0);
  } else {
    check(*a.lse, "softmax_lse", kFloat32, {&s.batch, &s.q_heads, &n.seqlen_q}, q);
    p->lse_stride_batch = a.lse->stride(0);
    p->lse_stride_head = a.lse->stride(1);
  }
}

// The queries of multi-head latent attention that meet the values.
void check_qv(const AttendArguments& a, const Like& q, Sizes& s, QuerySizes& n, Problem* p) {
  if (!a.qv) return;
  const RowStrides strides = check_rows(*a.qv, "qv", {q.dtype}, s.head_dim_v, a, q, s, n);
  p->qv = given<const void>(*a.qv);
  p->qv_stride_batch = strides.batch;
  p->qv_stride_token = strides.token;
  p->qv_stride_head = strides.head;
}

void check_new_tokens(const AttendArguments& a, const Like& q, Sizes& s, Problem* p) {
  if (!a.k != !a.v) fail("k and v: expected both or neither, got only one of them");
  if (!a.k) return;
  if (a.cu_seqlens_k) fail("cu_seqlens_k: expected None with new keys (k and v), got a tensor");
  if (a.cu_seqlens_k_new && a.k->dim() != 3)
    fail("k: expected [total_new, kv_heads, head_dim] with cu_seqlens_k_new, got " + shape_str(*a.k));
  if (!a.cu_seqlens_k_new && a.k->dim() != 4)
    fail("k: expected [batch, seqlen_new, kv_heads, head_dim] (or cu_seqlens_k_new with it), got " + shape_str(*a.k));
  if (!a.cache_seqlens) fail("cache_seqlens: expected where to append k and v, got None");
  const ScalarType type = q.dtype, cache_type = a.k_cache->scalar_type();
  if (is_8bit(type) && type != cache_type) {
    if (a.k->scalar_type() == cache_type)
      fail(std::string("q: expected the dtype of k and k_cache (") + str(cache_type) +
           "), for new tokens have that of an 8-bit q; got " + str(type));
    fail(std::string("k: expected the dtype of k_cache (") + str(cache_type) +
         ") with an 8-bit q, for its numbers are stored as they are; got " + str(a.k->scalar_type()));
  }
  p->append = check_append(*a.k, *a.v, a.cu_seqlens_k_new, q, s);
}

void check_heads(const AttendArguments& a, const Sizes& s, Problem* p) {
  const int64_t q_heads = s.q_heads.size, kv_heads = s.kv_heads.size;
  if (kv_heads == 0 ? q_heads != 0 : q_heads % kv_heads != 0)
    fail("q_heads: expected a multiple of kv_heads = " + str(kv_heads) + " (from " + s.kv_heads.origin + "), got " +
         str(q_heads));
  p->batch = s.batch.size;
  p->q_heads = q_heads;
  p->kv_heads = kv_heads;
  p->group = kv_heads ? q_heads / kv_heads : 1;
  p->head_dim = s.head_dim.size;
  p->head_dim_v = s.head_dim_v.size;
  check_head_dims(s, a.qv != nullptr);
}

void check_lengths(const AttendArguments& a, const Like& q, Sizes& s, Problem* p) {
  if (a.cache_seqlens) check(*a.cache_seqlens, "cache_seqlens", kInt32, {&s.batch}, q);
  if (a.cache_leftpad) check(*a.cache_leftpad, "cache_leftpad", kInt32, {&s.batch}, q);
  p->cache_seqlens = if_given<int32_t>(a.cache_seqlens);
  p->cache_leftpad = if_given<int32_t>(a.cache_leftpad);
  if (a.block_table && !a.cache_seqlens)
    fail("cache_seqlens: expected int32 [batch] or an int with block_table, got None");
  if (!a.block_table && !a.cu_seqlens_k && !a.cache_batch_idx && a.k_cache->size(0) < s.batch.size)
    fail("k_cache: expected at least " + s.batch.describe() + " rows, got " + shape_str(*a.k_cache));
  p->seqlen_k = p->cache.page_size;
}

void check_rotary(const AttendArguments& a, const Like& q, Sizes& s, Problem* p) {
  if (!a.rotary_cos && !a.rotary_sin) return;
  if (!a.rotary_cos || !a.rotary_sin) fail("rotary_cos and rotary_sin: expected both or neither, got only one of them");
  if (!a.k) fail("rotary_cos: expected new keys (k and v) to rotate, got k = None");
  const ScalarType type = q.dtype;
  if (is_8bit(type)) fail(std::string("rotary_cos: expected None with an 8-bit q (") + str(type) + "), got a tensor");
  Dim rotary_len("rotary_len"), half("rotary_dim / 2");
  check(*a.rotary_cos, "rotary_cos", {type}, {&rotary_len, &half}, q);
  check(*a.rotary_sin, "rotary_sin", {type}, {&rotary_len, &half}, q);
  Rotary& r = p->rotary;
  r.rotary_len = rotary_len.size;
  r.rotary_dim = 2 * half.size;
  if (r.rotary_dim > p->head_dim)
    fail("rotary_cos: expected rotary_dim of at most head_dim = " + str(p->head_dim) + ", got " + str(r.rotary_dim));
  r.cos = given<const void>(*a.rotary_cos);
  r.sin = given<const void>(*a.rotary_sin);
  r.cos_stride = a.rotary_cos->stride(0);
  r.sin_stride = a.rotary_sin->stride(0);
  r.interleaved = a.rotary_interleaved;
  if (a.rotary_seqlens) check(*a.rotary_seqlens, "rotary_seqlens", kInt32, {&s.batch}, q);
  r.seqlens = if_given<int32_t>(a.rotary_seqlens);
}

// Windows and chunks may be of any size, sys.maxsize too. They are cut to this one: no two keys are so far apart, and
// sums of a few such numbers and positions do not overflow 64 bits.
constexpr int64_t kBeyondAllKeys = int64_t(1) << 60;

// Caps beyond what float32 can hold, or whose inverse it cannot hold, would give NaN. From kLargestSoftcap on a cap
// bends no score, so it is off. Below kLeastSoftcap it leaves only scores that count as 0.
constexpr double kLeastSoftcap = 1e-30, kLargestSoftcap = 1e30;

float softcap_of(double softcap) {
  const bool off = softcap == 0.0 || softcap >= kLargestSoftcap;
  return off ? 0.f : static_cast<float>(std::max(softcap, kLeastSoftcap));
}

void check_scores(const AttendArguments& a, const Like& q, Sizes& s, Problem* p) {
  if (!(a.softcap >= 0.0)) fail("softcap: expected at least 0 (0 is off), got " + std::to_string(a.softcap));
  if (a.window_left < -1 || a.window_right < -1)
    fail("window_size: expected -1 (unlimited) or at least 0, got (" + str(a.window_left) + ", " + str(a.window_right) +
         ")");
  if (a.attention_chunk < 0) fail("attention_chunk: expected at least 0 (0 is off), got " + str(a.attention_chunk));
  if (!(std::abs(a.softmax_scale) <= std::numeric_limits<float>::max())) {
    std::ostringstream given;
    given << a.softmax_scale;
    fail("softmax_scale: expected a number that float32 holds, got " + given.str());
  }
  p->scale = static_cast<float>(a.softmax_scale);
  p->softcap = softcap_of(a.softcap);
  p->window_left = pd_min(a.window_left, kBeyondAllKeys);
  p->window_right = pd_min(a.window_right, kBeyondAllKeys);
  // A window as wide as the cache hides nothing. With an end on the right alone: rotary asks whether there is a window.
  if (p->window_right >= 0 && p->window_left + 1 >= capacity_of(*p)) p->window_left = -1;
  p->attention_chunk = pd_min(a.attention_chunk, kBeyondAllKeys);
  if (a.alibi_slopes) {
    if (a.alibi_slopes->dim() == 1) {
      check(*a.alibi_slopes, "alibi_slopes", kFloat32, {&s.q_heads}, q);
    } else {
      check(*a.alibi_slopes, "alibi_slopes", kFloat32, {&s.batch, &s.q_heads}, q);
      p->alibi_stride_batch = a.alibi_slopes->stride(0);
    }
    p->alibi_slopes = if_given<float>(a.alibi_slopes);
  }
  if (a.sinks) {
    check(*a.sinks, "s_aux", kFloatTypes, {&s.q_heads}, q);
    p->sinks = given<const void>(*a.sinks);
    p->sinks_dtype = dtype_of(a.sinks->scalar_type());
  }
  const DescaleTable descale = check_descale(a.q_descale, "q_descale", q.dtype, s, q);
  p->q_descale = descale.table;
  p->q_descale_stride_batch = descale.stride_batch;
  p->q_descale_stride_head = descale.stride_head;
}

// Checks everything but values in tensors: lengths and page numbers (spec/check_tables.h).
Problem problem_of(const AttendArguments& a) {
  const Like q(*a.q, "q");
  Sizes sizes;
  QuerySizes queries;
  Problem p = {};
  check_queries(a, q, sizes, queries, &p);
  p.cache = check_cache({*a.k_cache, *a.v_cache, /*in_pages=*/a.block_table != nullptr, a.block_table, a.cu_seqlens_k,
                         a.cache_batch_idx, a.k_descale, a.v_descale},
                        q, sizes);
  check_results(a, q, sizes, queries, &p);
  check_new_tokens(a, q, sizes, &p);
  check_heads(a, sizes, &p);
  check_lengths(a, q, sizes, &p);
  check_rotary(a, q, sizes, &p);
  check_qv(a, q, sizes, queries, &p);
  check_scores(a, q, sizes, &p);
  check_memory(p);
  if (a.num_splits < 0) fail("num_splits: expected at least 0 (0 chooses), got " + str(a.num_splits));
  if (a.max_seqlen_k < -1) fail("max_seqlen_k: expected at least 0, or -1 for none, got " + str(a.max_seqlen_k));
  p.num_splits = a.num_splits;
  p.deterministic = a.deterministic;
  p.max_kv_len = max_kv_len_of(p, a.max_seqlen_k);
  if (const std::string reason = unsupported_reason(p); !reason.empty()) fail(reason);
  return p;
}

ContiguousVectors contiguous_vectors(AttendArguments& a) {
  return ContiguousVectors({&a.cache_seqlens, &a.cu_seqlens_q, &a.cu_seqlens_k, &a.cu_seqlens_k_new, &a.cache_batch_idx,
                            &a.cache_leftpad, &a.alibi_slopes, &a.sinks, &a.rotary_seqlens});
}

}  // namespace

void flash_attn_with_kvcache(AttendArguments& a) {
  const OnDeviceOf guard(*a.q);
  const ContiguousVectors vectors = contiguous_vectors(a);
  const Problem p = problem_of(a);
  if (p.q_heads > 0) {
    run_attention(p);
  } else {
    run_kv_write(p);  // without q_heads nothing attends; values are checked and new tokens written all the same
  }
}

std::string explain_flash_attn_with_kvcache(AttendArguments& a) {
  const OnDeviceOf guard(*a.q);
  const ContiguousVectors vectors = contiguous_vectors(a);
  return explain_attention(problem_of(a));
}

}  // namespace paged_attn
