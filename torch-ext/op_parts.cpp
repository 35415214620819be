#include "op_parts.h"

namespace paged_attn {

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    case ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    default: return DType::kFloat32;
  }
}

DescaleTable check_descale(const Tensor* t, const char* name, const Sizes& sizes, const Like& like) {
  if (!t) return {};
  const Tensor& d = *t;
  const Dim &batch = sizes.batch, &kv_heads = sizes.kv_heads;
  const bool fits =
      d.dim() == 2 && (d.size(0) == batch.size || d.size(0) == 1) && (d.size(1) == kv_heads.size || d.size(1) == 1);
  if (!fits || d.scalar_type() != ScalarType::Float)
    fail(std::string(name) + ": expected float32 [" + batch.describe() + ", " + kv_heads.describe() +
         "] or a 1 in place of either, got " + shape_str(d));
  check_device(d, name, like);
  return {given<const float>(d), d.size(0) == 1 ? 0 : d.stride(0), d.size(1) == 1 ? 0 : d.stride(1)};
}

namespace {

void check_cache_dtype(ScalarType type, const Like& like) {
  const ScalarType wanted = like.dtype;
  if (type == wanted || is_8bit(type)) return;
  std::string message = std::string("k_cache: expected the dtype of ") + like.name + " (" + str(wanted) +
                        ") or float8_e4m3fn or float8_e5m2, got " + str(type);
  if (type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16)
    message += std::string("; ") + like.name + ".to(k_cache.dtype) would fit";
  fail(message);
}

// Keys and values of all requests one after the other: one page that holds them all.
void check_ragged(const CacheArguments& a, const Like& like, Sizes& s, Cache* c) {
  Dim total_k("total_k"), entries("batch + 1", s.batch.size + 1, s.batch.origin);
  const ScalarType type = a.k_cache.scalar_type();
  check(a.k_cache, "k_cache", {type}, {&total_k, &s.kv_heads, &s.head_dim}, like);
  check(a.v_cache, "v_cache", {type}, {&total_k, &s.kv_heads, &s.head_dim_v}, like);
  check(*a.cu_seqlens_k, "cu_seqlens_k", kInt32, {&entries}, like);
  c->num_pages = 1;
  c->page_size = total_k.size;
  c->cu_seqlens_k = if_given<int32_t>(a.cu_seqlens_k);
}

void check_pages(const CacheArguments& a, const Like& like, Sizes& s, Cache* c) {
  Dim num_pages(a.block_table ? "num_pages" : "batch_cache"), page_size(a.block_table ? "page_size" : "seqlen_cache");
  const ScalarType type = a.k_cache.scalar_type();
  check(a.k_cache, "k_cache", {type}, {&num_pages, &page_size, &s.kv_heads, &s.head_dim}, like);
  check(a.v_cache, "v_cache", {type}, {&num_pages, &page_size, &s.kv_heads, &s.head_dim_v}, like);
  c->num_pages = num_pages.size;
  c->page_size = page_size.size;
  c->k_stride_page = a.k_cache.stride(0);
  c->v_stride_page = a.v_cache.stride(0);
}

void check_table(const CacheArguments& a, const Like& like, Sizes& s, Cache* c) {
  Dim table_rows("table_rows"), max_pages("max_pages");
  check(*a.block_table, "block_table", kInt32, {a.cache_batch_idx ? &table_rows : &s.batch, &max_pages}, like);
  if (c->page_size == 0) fail("k_cache: expected page_size of at least 1, got 0");
  c->block_table = if_given<int32_t>(a.block_table);
  c->block_table_stride = a.block_table->stride(0);
  c->table_rows = a.block_table->size(0);
  c->max_pages = c->table_rows > 0 ? max_pages.size : 0;
}

}  // namespace

Cache check_cache(const CacheArguments& a, const Like& like, Sizes& s) {
  Cache c = {};
  check_cache_dtype(a.k_cache.scalar_type(), like);
  if (a.cu_seqlens_k) {
    check_ragged(a, like, s, &c);
  } else {
    check_pages(a, like, s, &c);
  }
  const int64_t slot = a.k_cache.dim() - 3;
  c.k = address<void>(a.k_cache);
  c.v = address<void>(a.v_cache);
  c.k_stride_slot = a.k_cache.stride(slot);
  c.k_stride_head = a.k_cache.stride(slot + 1);
  c.v_stride_slot = a.v_cache.stride(slot);
  c.v_stride_head = a.v_cache.stride(slot + 1);
  c.dtype = dtype_of(a.k_cache.scalar_type());
  if (a.block_table) check_table(a, like, s, &c);
  if (a.cache_batch_idx) check(*a.cache_batch_idx, "cache_batch_idx", kInt32, {&s.batch}, like);
  c.cache_batch_idx = if_given<int32_t>(a.cache_batch_idx);
  const DescaleTable k = check_descale(a.k_descale, "k_descale", s, like);
  c.k_descale = k.table;
  c.k_descale_stride_batch = k.stride_batch;
  c.k_descale_stride_head = k.stride_head;
  const DescaleTable v = check_descale(a.v_descale, "v_descale", s, like);
  c.v_descale = v.table;
  c.v_descale_stride_batch = v.stride_batch;
  c.v_descale_stride_head = v.stride_head;
  return c;
}

Append check_append(const Tensor& k, const Tensor& v, const Tensor* cu_seqlens_k_new, const Like& like, Sizes& s) {
  Append a = {};
  Dim seqlen_new("seqlen_new"), total_new("total_new");
  const ScalarType type = like.dtype;
  if (k.dim() == 3) {
    check(k, "k", {type}, {&total_new, &s.kv_heads, &s.head_dim}, like);
    check(v, "v", {type}, {&total_new, &s.kv_heads, &s.head_dim_v}, like);
    a.seqlen_new = a.total_new = total_new.size;
  } else {
    check(k, "k", {type}, {&s.batch, &seqlen_new, &s.kv_heads, &s.head_dim}, like);
    check(v, "v", {type}, {&s.batch, &seqlen_new, &s.kv_heads, &s.head_dim_v}, like);
    a.seqlen_new = seqlen_new.size;
    a.total_new = s.batch.size * seqlen_new.size;
    a.k_stride_batch = k.stride(0);
    a.v_stride_batch = v.stride(0);
  }
  if (cu_seqlens_k_new) {
    Dim entries("batch + 1", s.batch.size + 1, s.batch.origin);
    check(*cu_seqlens_k_new, "cu_seqlens_k_new", kInt32, {&entries}, like);
    a.cu_seqlens_k_new = if_given<int32_t>(cu_seqlens_k_new);
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

void check_head_dims(const Sizes& s, bool with_qv) {
  const int64_t head_dim = s.head_dim.size, head_dim_v = s.head_dim_v.size;
  const bool usual = head_dim >= 1 && head_dim <= 256 && head_dim_v >= 1 && head_dim_v <= 256;
  const bool latent = (head_dim == 64 && with_qv) || head_dim == 576 || head_dim == 512;
  if (!usual && !(latent && head_dim_v == 512))
    fail("head_dim and head_dim_v: expected 1 to 256 each, or (512, 512), or (576, 512), or (64, 512) with qv, got (" +
         str(head_dim) + ", " + str(head_dim_v) + ")" + (with_qv ? " with qv" : ""));
}

}  // namespace paged_attn
