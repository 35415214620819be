// kv_paged_write: checks, then the problem, then the backend.
#include "backend.h"
#include "op_parts.h"
#include "ops.h"

namespace paged_attn {
namespace {

// How the new tokens are grouped: [batch, seqlen_new, ...], by cu_seqlens_k_new, or only by slot_mapping.
void check_grouping(const WriteArguments& a, Sizes& s) {
  const Tensor& k = *a.k;
  if (k.dim() != 3 && k.dim() != 4)
    fail("k: expected [batch, seqlen_new, kv_heads, head_dim] or [total_new, kv_heads, head_dim], got " + shape_str(k));
  if (a.cu_seqlens_k_new) {
    if (k.dim() != 3) fail("k: expected [total_new, kv_heads, head_dim] with cu_seqlens_k_new, got " + shape_str(k));
    if (a.cu_seqlens_k_new->dim() != 1 || a.cu_seqlens_k_new->size(0) < 1)
      fail("cu_seqlens_k_new: expected int32 [batch + 1], got " + shape_str(*a.cu_seqlens_k_new));
    s.batch = Dim("batch", a.cu_seqlens_k_new->size(0) - 1, "cu_seqlens_k_new");
  } else if (k.dim() == 3) {
    if (!a.slot_mapping)
      fail("cu_seqlens_k_new: expected int32 [batch + 1] for k of [total_new, kv_heads, head_dim], got None");
    s.batch = Dim("batch", 1, "k");
  }
}

// k and v may be longer than slot_mapping (padded batches): the tokens past its end are not written.
void check_slots(const WriteArguments& a, const Like& like, Problem* p) {
  if (p->cache.page_size == 0) fail("k_cache: expected page_size of at least 1, got 0");
  Append& append = p->append;
  const Tensor& slots = *a.slot_mapping;
  const bool flat = a.k->dim() == 3 && !a.cu_seqlens_k_new;
  if (flat && slots.dim() == 1 && slots.size(0) < append.total_new)
    append.seqlen_new = append.total_new = slots.size(0);
  Dim total_new("total_new", append.total_new, "k");
  check(slots, "slot_mapping", {ScalarType::Long}, {&total_new}, like);
  append.slot_mapping = if_given<int64_t>(a.slot_mapping);
}

void check_positions(const WriteArguments& a, const Like& like, Sizes& s, Problem* p) {
  if (!a.block_table) fail("block_table: expected int32 [batch, max_pages], or slot_mapping in its place, got None");
  if (!a.cache_seqlens) fail("cache_seqlens: expected int32 [batch], or slot_mapping in its place, got None");
  check(*a.cache_seqlens, "cache_seqlens", kInt32, {&s.batch}, like);
  p->cache_seqlens = if_given<int32_t>(a.cache_seqlens);
}

}  // namespace

void kv_paged_write(WriteArguments& a) {
  const OnDeviceOf guard(*a.k);
  const ContiguousVectors vectors({&a.cache_seqlens, &a.cu_seqlens_k_new, &a.slot_mapping});
  const Like like(*a.k, "k");
  Sizes s;
  Problem p = {};
  check_grouping(a, s);
  const ScalarType type = like.dtype;
  if (type != ScalarType::Float && type != ScalarType::Half && type != ScalarType::BFloat16)
    fail(std::string("k: expected float32, float16 or bfloat16, got ") + str(type));
  p.append = check_append(*a.k, *a.v, a.cu_seqlens_k_new, like, s);
  p.cache = check_cache({*a.k_cache, *a.v_cache, /*in_pages=*/true, a.slot_mapping ? nullptr : a.block_table, nullptr,
                         nullptr, a.k_descale, a.v_descale},
                        like, s);
  if (a.slot_mapping) {
    check_slots(a, like, &p);
  } else {
    check_positions(a, like, s, &p);
  }
  p.batch = s.batch.size;
  p.kv_heads = s.kv_heads.size;
  p.head_dim = s.head_dim.size;
  p.head_dim_v = s.head_dim_v.size;
  p.q_dtype = p.append.dtype;
  check_head_dims(s, /*with_qv=*/true);
  check_memory(p);
  if (const std::string reason = unsupported_reason(p); !reason.empty()) fail(reason);
  run_kv_write(p);
}

}  // namespace paged_attn
