#include "op_parts.h"

#include <algorithm>

#include "overlap.h"

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

DescaleTable check_descale(const Tensor* t, const char* name, ScalarType scaled, const Sizes& sizes, const Like& like) {
  if (!t || !is_8bit(scaled)) return {};
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

// Ragged: keys and values of all requests one after the other, in one page.
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
  Dim num_pages(a.in_pages ? "num_pages" : "batch_cache"), page_size(a.in_pages ? "page_size" : "seqlen_cache");
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
  const DescaleTable k = check_descale(a.k_descale, "k_descale", a.k_cache.scalar_type(), s, like);
  c.k_descale = k.table;
  c.k_descale_stride_batch = k.stride_batch;
  c.k_descale_stride_head = k.stride_head;
  const DescaleTable v = check_descale(a.v_descale, "v_descale", a.v_cache.scalar_type(), s, like);
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

namespace {

// Rows that overlap, as those of an expanded tensor do, would overwrite each other. Rows are apart if each stride, from
// the smallest to the largest, is at least the extent of all dimensions with smaller strides.
void check_rows_apart(const char* name, const Rows& rows) {
  if (rows.empty()) return;
  int order[] = {0, 1, 2};
  std::sort(order, order + 3, [&](int a, int b) { return rows.stride[a] < rows.stride[b]; });
  int64_t bytes = rows.row_bytes;
  for (const int d : order) {
    if (rows.size[d] == 1) continue;
    if (rows.stride[d] < bytes)
      fail(std::string(name) + ": expected rows that share no memory, got rows of " + str(bytes) +
           " bytes that begin " + str(rows.stride[d]) + " bytes apart");
    bytes += (rows.size[d] - 1) * rows.stride[d];
  }
}

Rows new_rows(const Problem& p, const Optional<const void>& data, int64_t width, int64_t batch, int64_t token,
              int64_t head) {
  const Append& n = p.append;
  return rows_at(data.data, n.dtype, width, {n.cu_seqlens_k_new ? 1 : p.batch, n.seqlen_new, p.kv_heads},
                 {batch, token, head});
}

Rows new_keys(const Problem& p) {
  const Append& n = p.append;
  return new_rows(p, n.k, p.head_dim, n.k_stride_batch, n.k_stride_token, n.k_stride_head);
}

Rows new_values(const Problem& p) {
  const Append& n = p.append;
  return new_rows(p, n.v, p.head_dim_v, n.v_stride_batch, n.v_stride_token, n.v_stride_head);
}

// Whether each row of `piece` lies inside the same row of `whole`.
bool lies_within(const Rows& whole, const Rows& piece) {
  const int64_t place = piece.begin - whole.begin;
  return piece.buffer == whole.buffer && place >= 0 && place + piece.row_bytes <= whole.row_bytes &&
         same_strides(whole, piece);
}

// Whether v_cache is a view of the rows of k_cache: in multi-head latent attention the values are the first dimensions
// of the keys. The caller then gives the same numbers in k and v, so the second write changes nothing. Where whole rows
// coincide, that is believed only of a v that is k.
bool values_are_keys(const Rows& k_cache, const Rows& v_cache, const Rows& k, const Rows& v) {
  return lies_within(k_cache, v_cache) && (v_cache.row_bytes < k_cache.row_bytes || lies_within(k, v));
}

// The rows of the first slot; those of other slots lie the same way.
Rows first_token(Rows rows) {
  if (!rows.empty()) rows.size[0] = rows.size[1] = 1;
  return rows;
}

// Calls read(name, rows) for every tensor of a call that is given, but for the caches. tokens: the sizes of q.
template <typename Read>
void each_input(const Problem& p, const int64_t (&tokens)[3], const Read& read) {
  read("q", rows_at(p.q, p.q_dtype, p.head_dim, tokens, {p.q_stride_batch, p.q_stride_token, p.q_stride_head}));
  if (p.qv)
    read("qv",
         rows_at(p.qv.data, p.q_dtype, p.head_dim_v, tokens, {p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head}));
  if (p.append.k) {
    read("k", new_keys(p));
    read("v", new_values(p));
  }
  // Tables of 4-byte numbers (one of slot_mapping has 8 bytes and counts as two), and cos and sin in q's dtype.
  const auto read_table = [&](const char* name, const auto& table, int64_t rows, int64_t stride, int64_t width,
                              DType dtype = DType::kFloat32) {
    if (table) read(name, rows_at(table.data, dtype, width, {1, 1, rows}, {0, 0, stride}));
  };
  const auto read_scales = [&](const char* name, const auto& scales, int64_t stride_batch, int64_t stride_head) {
    if (scales)
      read(name, rows_at(scales.data, DType::kFloat32, 1, {1, p.batch, p.kv_heads}, {0, stride_batch, stride_head}));
  };
  const Cache& c = p.cache;
  const Rotary& r = p.rotary;
  read_table("block_table", c.block_table, c.table_rows, c.block_table_stride, c.max_pages);
  read_table("cache_seqlens", p.cache_seqlens, 1, 0, p.batch);
  read_table("cu_seqlens_q", p.cu_seqlens_q, 1, 0, p.batch + 1);
  read_table("cu_seqlens_k", c.cu_seqlens_k, 1, 0, p.batch + 1);
  read_table("cu_seqlens_k_new", p.append.cu_seqlens_k_new, 1, 0, p.batch + 1);
  read_table("slot_mapping", p.append.slot_mapping, 1, 0, 2 * p.append.total_new);
  read_table("cache_batch_idx", c.cache_batch_idx, 1, 0, p.batch);
  read_table("cache_leftpad", p.cache_leftpad, 1, 0, p.batch);
  read_table("rotary_cos", r.cos, r.rotary_len, r.cos_stride, r.rotary_dim / 2, p.q_dtype);
  read_table("rotary_sin", r.sin, r.rotary_len, r.sin_stride, r.rotary_dim / 2, p.q_dtype);
  read_table("rotary_seqlens", r.seqlens, 1, 0, p.batch);
  read_table("alibi_slopes", p.alibi_slopes, p.alibi_stride_batch ? p.batch : 1, p.alibi_stride_batch, p.q_heads);
  read_table("s_aux", p.sinks, 1, 0, p.q_heads, p.sinks_dtype);
  read_scales("q_descale", p.q_descale, p.q_descale_stride_batch, p.q_descale_stride_head);
  read_scales("k_descale", c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head);
  read_scales("v_descale", c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head);
}

}  // namespace

void check_memory(const Problem& p) {
  const bool packed = static_cast<bool>(p.cu_seqlens_q), writes = static_cast<bool>(p.append.k);
  const int64_t tokens[] = {packed ? 1 : p.batch, packed ? p.total_q : p.max_q_len, p.q_heads};
  const Rows out = rows_at(p.out, out_dtype(p.q_dtype), p.head_dim_v, tokens,
                           {p.out_stride_batch, p.out_stride_token, p.out_stride_head});
  const Cache& c = p.cache;
  const Rotary& r = p.rotary;
  const int64_t slots[] = {c.num_pages, c.page_size, p.kv_heads};
  const Rows k_cache = rows_at(c.k, c.dtype, p.head_dim, slots, {c.k_stride_page, c.k_stride_slot, c.k_stride_head});
  const Rows v_cache = rows_at(c.v, c.dtype, p.head_dim_v, slots, {c.v_stride_page, c.v_stride_slot, c.v_stride_head});
  check_rows_apart("out", out);
  if (p.lse)
    check_rows_apart("softmax_lse", rows_at(p.lse.data, DType::kFloat32, tokens[1], {tokens[0], p.q_heads, 1},
                                            {p.lse_stride_batch, p.lse_stride_head, 0}));
  if (writes) {
    check_rows_apart("k_cache", k_cache);
    check_rows_apart("v_cache", v_cache);
  }
  const auto refuse_shared = [](const char* written, const Rows& target, const char* name, const Rows& input) {
    if (share_memory(target, input)) fail(std::string(written) + ": expected memory of its own, got memory of " + name);
  };
  each_input(p, tokens, [&](const char* name, const Rows& input) {
    refuse_shared("out", out, name, input);
    if (!writes) return;
    refuse_shared("k_cache", k_cache, name, input);
    refuse_shared("v_cache", v_cache, name, input);
  });
  // k_cache and v_cache may overlap in one pool if block_table never gives one page to both: transformers' continuous
  // batching keeps keys and values in alternate pages. The key and the value of one token may not overlap.
  if (writes && !values_are_keys(k_cache, v_cache, new_keys(p), new_values(p)))
    refuse_shared("v_cache", first_token(v_cache), "k_cache", first_token(k_cache));
  // Values inside the rows of the keys are written unrotated. So they may not begin among the rotated dimensions.
  const int64_t values_begin = (v_cache.begin - k_cache.begin) / dtype_bytes(c.dtype);
  const bool rotates = writes && r.cos && !new_keys(p).empty() && !v_cache.empty();
  if (rotates && r.rotary_dim > values_begin && lies_within(k_cache, v_cache))
    fail("rotary_cos: expected rotary_dim of at most " + str(values_begin) +
         ", where the values begin in the keys (v_cache is a part of k_cache), got " + str(r.rotary_dim));
  refuse_shared("out", out, "k_cache", k_cache);
  refuse_shared("out", out, "v_cache", v_cache);
}

}  // namespace paged_attn
