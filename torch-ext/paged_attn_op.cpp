// The operators: checks, then the problem, then the backend. The only place where the semantics of
// the arguments are decided; every device shares it.
#include "paged_attn_op.h"

#ifdef CUDA_KERNEL
#include <torch/csrc/stable/accelerator.h>
#endif

#include <utility>

#include "backend.h"
#include "checks.h"

namespace paged_attn {
namespace {

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    case ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    default: return DType::kFloat32;
  }
}

constexpr std::initializer_list<ScalarType> kFloatTypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
constexpr std::initializer_list<ScalarType> kQueryTypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                                           ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
constexpr std::initializer_list<ScalarType> kInt32 = {ScalarType::Int};
constexpr std::initializer_list<ScalarType> kFloat32 = {ScalarType::Float};

template <typename T>
Address<T> address(const Tensor& t) {
#ifdef METAL_KERNEL
  // data_ptr() is the buffer plus the offset; an empty tensor has neither.
  char* data = static_cast<char*>(t.data_ptr());
  const int64_t offset = data ? t.storage_offset() * t.element_size() : 0;
  return {data - offset, offset};
#else
  return static_cast<T*>(t.data_ptr());
#endif
}

template <typename T>
Optional<T> given(const Tensor& t) {
  return {address<T>(t), true};
}

template <typename T>
Optional<const T> optional(const std::optional<Tensor>& t) {
  return t ? given<const T>(*t) : Optional<const T>{};
}

void check_optional_int32(const std::optional<Tensor>& t, const char* name, Dim& size, const Tensor& like) {
  if (t) check(*t, name, kInt32, {&size}, like);
}

// The cache, and how requests find their keys in it.
struct CacheArguments {
  const Tensor &k_cache, &v_cache;
  const std::optional<Tensor>&block_table, &cu_seqlens_k, &cache_batch_idx, &k_descale, &v_descale;
};

// A (batch, kv_heads) table of scales; either dimension may be broadcast with stride 0.
void check_descale(const std::optional<Tensor>& t, const char* name, Dim& batch, Dim& kv_heads, const Tensor& like,
                   Optional<const float>* table, int64_t* stride_batch, int64_t* stride_head) {
  *table = {};
  if (!t) return;
  const Tensor& d = *t;
  const bool fits =
      d.dim() == 2 && (d.size(0) == batch.size || d.size(0) == 1) && (d.size(1) == kv_heads.size || d.size(1) == 1);
  if (!fits || d.scalar_type() != ScalarType::Float)
    fail(std::string(name) + ": expected float32 [" + batch.describe() + ", " + kv_heads.describe() +
         "] or a 1 in place of either, got " + shape_str(d));
  if (d.device() != like.device())
    fail(std::string(name) + ": expected a tensor on the device of q, got one on another device");
  *table = given<const float>(d);
  *stride_batch = d.size(0) == 1 ? 0 : d.stride(0);
  *stride_head = d.size(1) == 1 ? 0 : d.stride(1);
}

// `like` is q, or the new k of a write. Without a table and without cu_seqlens_k the cache is contiguous.
Cache check_cache(const CacheArguments& a, const Tensor& like, Dim& batch, Dim& kv_heads, Dim& head_dim,
                  Dim& head_dim_v) {
  Dim num_pages(a.block_table ? "num_pages" : "batch_cache"), page_size(a.block_table ? "page_size" : "seqlen_cache");
  const ScalarType type = a.k_cache.scalar_type();
  if (type != like.scalar_type() && type != ScalarType::Float8_e4m3fn && type != ScalarType::Float8_e5m2)
    fail(std::string("k_cache: expected the dtype of q (") + str(like.scalar_type()) +
         ") or float8_e4m3fn or float8_e5m2, got " + str(type));
  Cache c = {};
  Tensor k = a.k_cache, v = a.v_cache;
  if (a.cu_seqlens_k) {
    Dim total_k("total_k");
    Dim entries("batch + 1", batch.size + 1, "q");
    check(k, "k", {type}, {&total_k, &kv_heads, &head_dim}, like);
    check(v, "v", {type}, {&total_k, &kv_heads, &head_dim_v}, like);
    check(*a.cu_seqlens_k, "cu_seqlens_k", kInt32, {&entries}, like);
    c.num_pages = 1;
    c.page_size = total_k.size;
  } else {
    check(k, "k_cache", {type}, {&num_pages, &page_size, &kv_heads, &head_dim}, like);
    check(v, "v_cache", {type}, {&num_pages, &page_size, &kv_heads, &head_dim_v}, like);
    c.num_pages = num_pages.size;
    c.page_size = page_size.size;
    c.k_stride_page = k.stride(0);
    c.v_stride_page = v.stride(0);
  }
  const int64_t slot = k.dim() - 3;
  c.k = address<void>(k);
  c.v = address<void>(v);
  c.k_stride_slot = k.stride(slot);
  c.k_stride_head = k.stride(slot + 1);
  c.v_stride_slot = v.stride(slot);
  c.v_stride_head = v.stride(slot + 1);
  c.dtype = dtype_of(type);
  if (a.block_table) {
    Dim table_rows("table_rows"), max_pages("max_pages");
    check(*a.block_table, "block_table", kInt32, {a.cache_batch_idx ? &table_rows : &batch, &max_pages}, like);
    if (c.page_size == 0) fail("k_cache: expected page_size of at least 1, got 0");
    c.block_table = optional<int32_t>(a.block_table);
    c.block_table_stride = a.block_table->stride(0);
    c.table_rows = a.block_table->size(0);
    c.max_pages = c.table_rows > 0 ? max_pages.size : 0;
  }
  check_optional_int32(a.cache_batch_idx, "cache_batch_idx", batch, like);
  c.cache_batch_idx = optional<int32_t>(a.cache_batch_idx);
  c.cu_seqlens_k = optional<int32_t>(a.cu_seqlens_k);
  check_descale(a.k_descale, "k_descale", batch, kv_heads, like, &c.k_descale, &c.k_descale_stride_batch,
                &c.k_descale_stride_head);
  check_descale(a.v_descale, "v_descale", batch, kv_heads, like, &c.v_descale, &c.v_descale_stride_batch,
                &c.v_descale_stride_head);
  return c;
}

// New keys and values: [batch, seqlen_new, kv_heads, .], or [total_new, kv_heads, .] with cu_seqlens_k_new.
Append check_append(const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens_k_new, const Tensor& like,
                    Dim& batch, Dim& kv_heads, Dim& head_dim, Dim& head_dim_v) {
  Append a = {};
  Dim seqlen_new("seqlen_new"), total_new("total_new");
  if (k.dim() == 3) {
    check(k, "k", {like.scalar_type()}, {&total_new, &kv_heads, &head_dim}, like);
    check(v, "v", {like.scalar_type()}, {&total_new, &kv_heads, &head_dim_v}, like);
    a.seqlen_new = a.total_new = total_new.size;
  } else {
    check(k, "k", {like.scalar_type()}, {&batch, &seqlen_new, &kv_heads, &head_dim}, like);
    check(v, "v", {like.scalar_type()}, {&batch, &seqlen_new, &kv_heads, &head_dim_v}, like);
    a.seqlen_new = seqlen_new.size;
    a.total_new = batch.size * seqlen_new.size;
    a.k_stride_batch = k.stride(0);
    a.v_stride_batch = v.stride(0);
  }
  if (cu_seqlens_k_new) {
    Dim entries("batch + 1", batch.size + 1, batch.origin);
    check(*cu_seqlens_k_new, "cu_seqlens_k_new", kInt32, {&entries}, like);
    a.cu_seqlens_k_new = optional<int32_t>(cu_seqlens_k_new);
  }
  a.k = given<const void>(k);
  a.v = given<const void>(v);
  a.dtype = dtype_of(k.scalar_type());
  const int64_t token = k.dim() - 3;
  a.k_stride_token = k.stride(token);
  a.k_stride_head = k.stride(token + 1);
  a.v_stride_token = v.stride(token);
  a.v_stride_head = v.stride(token + 1);
  return a;
}

void check_head_dims(int64_t head_dim, int64_t head_dim_v, bool with_qv) {
  const bool plain = head_dim >= 1 && head_dim <= 256 && head_dim_v >= 1 && head_dim_v <= 256;
  const bool mla = (head_dim == 64 && head_dim_v == 512 && with_qv) || (head_dim == 576 && head_dim_v == 512);
  if (!plain && !mla)
    fail("head_dim and head_dim_v: expected 1 to 256 each, or (576, 512), or (64, 512) with qv, got (" + str(head_dim) +
         ", " + str(head_dim_v) + ")" + (with_qv ? " with qv" : ""));
}

}  // namespace

void flash_attn_with_kvcache(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Tensor& out, std::optional<Tensor> lse,
    std::optional<Tensor> cache_seqlens, std::optional<Tensor> block_table, double softmax_scale, int64_t window_right,
    std::optional<Tensor> k, std::optional<Tensor> v, int64_t window_left, int64_t max_seqlen_q,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> cu_seqlens_k_new,
    double softcap, int64_t num_splits, bool deterministic, std::optional<Tensor> cache_batch_idx,
    std::optional<Tensor> cache_leftpad, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
    int64_t attention_chunk, std::optional<Tensor> qv, std::optional<Tensor> q_descale, std::optional<Tensor> k_descale,
    std::optional<Tensor> v_descale, std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin,
    bool rotary_interleaved, std::optional<Tensor> rotary_seqlens) {
#ifdef CUDA_KERNEL
  const torch::stable::accelerator::DeviceGuard on_device(q.get_device_index());
#endif
  Dim batch("batch"), seqlen_q("seqlen_q"), total_q("total_q"), q_heads("q_heads"), kv_heads("kv_heads"),
      head_dim("head_dim"), head_dim_v("head_dim_v");
  Problem p = {};

  // Queries and output
  const ScalarType q_type = q.scalar_type();
  const ScalarType out_type =
      q_type == ScalarType::Float8_e4m3fn || q_type == ScalarType::Float8_e5m2 ? ScalarType::BFloat16 : q_type;
  const int64_t token = cu_seqlens_q ? 0 : 1;
  if (cu_seqlens_q) {
    if (cu_seqlens_q->dim() != 1 || cu_seqlens_q->size(0) < 1)
      fail("cu_seqlens_q: expected int32 [batch + 1], got " + shape_str(*cu_seqlens_q));
    batch = Dim("batch", cu_seqlens_q->size(0) - 1, "cu_seqlens_q");
    Dim entries("batch + 1");
    check(q, "q", kQueryTypes, {&total_q, &q_heads, &head_dim}, q);
    check(*cu_seqlens_q, "cu_seqlens_q", kInt32, {&entries}, q);
    check(out, "out", {out_type}, {&total_q, &q_heads, &head_dim_v}, q);
    if (lse) check(*lse, "softmax_lse", kFloat32, {&q_heads, &total_q}, q);
    p.max_q_len = max_seqlen_q;
    p.total_q = total_q.size;
  } else {
    check(q, "q", kQueryTypes, {&batch, &seqlen_q, &q_heads, &head_dim}, q);
    check(out, "out", {out_type}, {&batch, &seqlen_q, &q_heads, &head_dim_v}, q);
    if (lse) check(*lse, "softmax_lse", kFloat32, {&batch, &q_heads, &seqlen_q}, q);
    p.max_q_len = seqlen_q.size;
    p.total_q = batch.size * seqlen_q.size;
    p.q_stride_batch = q.stride(0);
    p.out_stride_batch = out.stride(0);
    p.lse_stride_batch = lse ? lse->stride(0) : 0;
  }
  p.q = address<const void>(q);
  p.out = address<void>(out);
  if (lse) p.lse = given<float>(*lse);
  p.q_stride_token = q.stride(token);
  p.q_stride_head = q.stride(token + 1);
  p.out_stride_token = out.stride(token);
  p.out_stride_head = out.stride(token + 1);
  p.lse_stride_head = lse ? lse->stride(token) : 0;
  p.q_dtype = dtype_of(q_type);

  // Cache and new tokens
  p.cache = check_cache({k_cache, v_cache, block_table, cu_seqlens_k, cache_batch_idx, k_descale, v_descale}, q, batch,
                        kv_heads, head_dim, head_dim_v);
  if (!block_table && !cu_seqlens_k && !cache_batch_idx && k_cache.size(0) < batch.size)
    fail("k_cache: expected at least " + batch.describe() + " rows, got " + shape_str(k_cache));
  if (k.has_value() != v.has_value()) fail("k and v: expected both or neither, got only one of them");
  if (k) {
    if (cu_seqlens_k_new && k->dim() != 3)
      fail("k: expected [total_new, kv_heads, head_dim] with cu_seqlens_k_new, got " + shape_str(*k));
    if (!cu_seqlens_k_new && k->dim() != 4)
      fail("k: expected [batch, seqlen_new, kv_heads, head_dim] (or cu_seqlens_k_new with it), got " + shape_str(*k));
    if (!cache_seqlens) fail("cache_seqlens: expected where to append k and v, got None");
    p.append = check_append(*k, *v, cu_seqlens_k_new, q, batch, kv_heads, head_dim, head_dim_v);
  } else if (cu_seqlens_k_new) {
    fail("cu_seqlens_k_new: expected None without k and v, got a tensor");
  }

  // Sizes
  p.batch = batch.size;
  p.q_heads = q_heads.size;
  p.kv_heads = kv_heads.size;
  if (kv_heads.size == 0 ? q_heads.size != 0 : q_heads.size % kv_heads.size != 0)
    fail("q_heads: expected a multiple of kv_heads = " + str(kv_heads.size) + " (from k_cache), got " +
         str(q_heads.size));
  p.group = kv_heads.size ? q_heads.size / kv_heads.size : 1;
  p.head_dim = head_dim.size;
  p.head_dim_v = head_dim_v.size;
  check_head_dims(p.head_dim, p.head_dim_v, qv.has_value());

  // Lengths
  check_optional_int32(cache_seqlens, "cache_seqlens", batch, q);
  check_optional_int32(cache_leftpad, "cache_leftpad", batch, q);
  p.cu_seqlens_q = optional<int32_t>(cu_seqlens_q);
  p.cache_seqlens = optional<int32_t>(cache_seqlens);
  p.cache_leftpad = optional<int32_t>(cache_leftpad);
  if (block_table && !cache_seqlens) fail("cache_seqlens: expected int32 [batch] or an int with block_table, got None");
  p.seqlen_k = p.cache.page_size;

  // Rotary
  if (rotary_cos || rotary_sin) {
    if (!rotary_cos || !rotary_sin) fail("rotary_cos and rotary_sin: expected both or neither, got only one of them");
    if (!k) fail("rotary_cos: expected new keys (k and v) to rotate, got k = None");
    Dim rotary_len("rotary_len"), half("rotary_dim / 2");
    check(*rotary_cos, "rotary_cos", {q_type}, {&rotary_len, &half}, q);
    check(*rotary_sin, "rotary_sin", {q_type}, {&rotary_len, &half}, q);
    if (2 * half.size > p.head_dim)
      fail("rotary_cos: expected rotary_dim of at most head_dim = " + str(p.head_dim) + ", got " + str(2 * half.size));
    p.rotary.cos = given<const void>(*rotary_cos);
    p.rotary.sin = given<const void>(*rotary_sin);
    p.rotary.cos_stride = rotary_cos->stride(0);
    p.rotary.sin_stride = rotary_sin->stride(0);
    p.rotary.rotary_len = rotary_len.size;
    p.rotary.rotary_dim = 2 * half.size;
    p.rotary.interleaved = rotary_interleaved;
    check_optional_int32(rotary_seqlens, "rotary_seqlens", batch, q);
    p.rotary.seqlens = optional<int32_t>(rotary_seqlens);
  } else if (rotary_seqlens) {
    fail("rotary_seqlens: expected None without rotary_cos and rotary_sin, got a tensor");
  }

  // MLA
  if (qv) {
    if (cu_seqlens_q) {
      check(*qv, "qv", {q_type}, {&total_q, &q_heads, &head_dim_v}, q);
    } else {
      check(*qv, "qv", {q_type}, {&batch, &seqlen_q, &q_heads, &head_dim_v}, q);
      p.qv_stride_batch = qv->stride(0);
    }
    p.qv = given<const void>(*qv);
    p.qv_stride_token = qv->stride(token);
    p.qv_stride_head = qv->stride(token + 1);
  }

  // Scores
  p.scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  if (!(softcap >= 0.0)) fail("softcap: expected at least 0 (0 is off), got " + std::to_string(softcap));
  if (window_left < -1 || window_right < -1)
    fail("window_size: expected -1 (unlimited) or at least 0, got (" + str(window_left) + ", " + str(window_right) +
         ")");
  if (attention_chunk < 0) fail("attention_chunk: expected at least 0 (0 is off), got " + str(attention_chunk));
  p.window_left = window_left;
  p.window_right = window_right;
  p.attention_chunk = attention_chunk;
  if (alibi_slopes) {
    if (alibi_slopes->dim() == 1) {
      check(*alibi_slopes, "alibi_slopes", kFloat32, {&q_heads}, q);
    } else {
      check(*alibi_slopes, "alibi_slopes", kFloat32, {&batch, &q_heads}, q);
      p.alibi_stride_batch = alibi_slopes->stride(0);
    }
    p.alibi_slopes = optional<float>(alibi_slopes);
  }
  if (sinks) {
    check(*sinks, "s_aux", kFloatTypes, {&q_heads}, q);
    p.sinks = given<const void>(*sinks);
    p.sinks_dtype = dtype_of(sinks->scalar_type());
  }
  check_descale(q_descale, "q_descale", batch, kv_heads, q, &p.q_descale, &p.q_descale_stride_batch,
                &p.q_descale_stride_head);

  // How
  if (num_splits < 0) fail("num_splits: expected at least 0 (0 chooses), got " + str(num_splits));
  p.num_splits = num_splits;
  p.deterministic = deterministic;

  const std::string reason = unsupported_reason(p);
  if (!reason.empty()) fail(reason);
  run_attention(p);
}

void flash_attn_with_kvcache_plain(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Tensor& out,
                                   std::optional<Tensor> lse, std::optional<Tensor> cache_seqlens,
                                   std::optional<Tensor> block_table, double softmax_scale, int64_t window_right) {
  const std::optional<Tensor> none;
  flash_attn_with_kvcache(q, k_cache, v_cache, out, std::move(lse), std::move(cache_seqlens), std::move(block_table),
                          softmax_scale, window_right, none, none, /*window_left=*/-1, /*max_seqlen_q=*/0, none, none,
                          none, /*softcap=*/0.0, /*num_splits=*/0, /*deterministic=*/false, none, none, none, none,
                          /*attention_chunk=*/0, none, none, none, none, none, none, /*rotary_interleaved=*/true, none);
}

void kv_paged_write(const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                    std::optional<Tensor> block_table, std::optional<Tensor> cache_seqlens,
                    std::optional<Tensor> cu_seqlens_k_new, std::optional<Tensor> slot_mapping,
                    std::optional<Tensor> k_descale, std::optional<Tensor> v_descale) {
#ifdef CUDA_KERNEL
  const torch::stable::accelerator::DeviceGuard on_device(k.get_device_index());
#endif
  Dim batch("batch"), kv_heads("kv_heads"), head_dim("head_dim"), head_dim_v("head_dim_v");
  Problem p = {};
  const std::optional<Tensor> none;

  // How the new tokens are grouped: [batch, seqlen_new, ...], by cu_seqlens_k_new, or only by slot_mapping
  if (k.dim() != 3 && k.dim() != 4)
    fail("k: expected [batch, seqlen_new, kv_heads, head_dim] or [total_new, kv_heads, head_dim], got " + shape_str(k));
  if (cu_seqlens_k_new) {
    if (k.dim() != 3) fail("k: expected [total_new, kv_heads, head_dim] with cu_seqlens_k_new, got " + shape_str(k));
    if (cu_seqlens_k_new->dim() != 1 || cu_seqlens_k_new->size(0) < 1)
      fail("cu_seqlens_k_new: expected int32 [batch + 1], got " + shape_str(*cu_seqlens_k_new));
    batch = Dim("batch", cu_seqlens_k_new->size(0) - 1, "cu_seqlens_k_new");
  } else if (k.dim() == 3) {
    if (!slot_mapping)
      fail("cu_seqlens_k_new: expected int32 [batch + 1] for k of [total_new, kv_heads, head_dim], got None");
    batch = Dim("batch", 1, "k");
  }
  if (k.scalar_type() != ScalarType::Float && k.scalar_type() != ScalarType::Half &&
      k.scalar_type() != ScalarType::BFloat16)
    fail(std::string("k: expected float32, float16 or bfloat16, got ") + str(k.scalar_type()));
  p.append = check_append(k, v, cu_seqlens_k_new, k, batch, kv_heads, head_dim, head_dim_v);

  // Where they go
  p.cache = check_cache({k_cache, v_cache, slot_mapping ? none : block_table, none, none, k_descale, v_descale}, k,
                        batch, kv_heads, head_dim, head_dim_v);
  if (slot_mapping) {
    if (p.cache.page_size == 0) fail("k_cache: expected page_size of at least 1, got 0");
    Dim total_new("total_new", p.append.total_new, "k");
    check(*slot_mapping, "slot_mapping", {ScalarType::Long}, {&total_new}, k);
    p.append.slot_mapping = optional<int64_t>(slot_mapping);
  } else {
    if (!block_table) fail("block_table: expected int32 [batch, max_pages], or slot_mapping in its place, got None");
    if (!cache_seqlens) fail("cache_seqlens: expected int32 [batch], or slot_mapping in its place, got None");
    check(*cache_seqlens, "cache_seqlens", kInt32, {&batch}, k);
    p.cache_seqlens = optional<int32_t>(cache_seqlens);
  }

  p.batch = batch.size;
  p.kv_heads = kv_heads.size;
  p.head_dim = head_dim.size;
  p.head_dim_v = head_dim_v.size;
  p.q_dtype = p.append.dtype;
  check_head_dims(p.head_dim, p.head_dim_v, /*with_qv=*/true);
  run_kv_write(p);
}

}  // namespace paged_attn
