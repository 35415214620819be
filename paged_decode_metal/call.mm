#include "call.h"

#include "spec/ranges.h"

namespace [[gnu::visibility("hidden")]] paged_attn {
namespace {

static_assert(kFloat32 == int(DType::kFloat32) && kFloat16 == int(DType::kFloat16) &&
              kBFloat16 == int(DType::kBFloat16) && kFloat8E4M3 == int(DType::kFloat8E4M3) &&
              kFloat8E5M2 == int(DType::kFloat8E5M2));

int32_t int32(int64_t x) { return static_cast<int32_t>(x); }

// Farther than any key is as good as unlimited.
int32_t position(int64_t x) { return int32(pd_min(x, kMaxKeys)); }

bool is_aligned(int64_t offset_bytes, int64_t vector_bytes) { return offset_bytes % vector_bytes == 0; }

// Whether the rows of a cache, or of the new tokens, are whole vectors: loads of 16 bytes, of 8 from an 8-bit cache.
// outer, middle: sizes of the first two dimensions. The stride of a single entry says nothing: views leave there what
// they like.
template <typename T>
bool has_vectors(const Problem& p, Address<T> k, Address<T> v, const Strides& k_strides, const Strides& v_strides,
                 int64_t outer, int64_t middle, DType dtype) {
  const int64_t bytes = dtype_bytes(dtype), vector_bytes = pd_min(kVector * bytes, 16);
  bool all = p.head_dim % kVector == 0 && p.head_dim_v % kVector == 0;
  for (const Strides& s : {k_strides, v_strides}) {
    for (auto [size, stride] : {std::pair{outer, s.outer}, {middle, s.middle}, {p.kv_heads, s.head}})
      all = all && (size <= 1 || is_aligned(stride * bytes, vector_bytes));
  }
  return all && is_aligned(k.offset, vector_bytes) && is_aligned(v.offset, vector_bytes);
}

// Whether offsets of elements in the cache need more than 31 bits.
bool is_wide(const Problem& p, const Strides& strides) {
  const int64_t last =
      (pd_max(p.cache.num_pages, 1) - 1) * strides.outer + (pd_max(p.cache.page_size, 1) - 1) * strides.middle;
  return last > INT32_MAX || strides.outer > INT32_MAX || strides.middle > INT32_MAX;
}

Arguments arguments_of(const Problem& p) {
  const Cache& c = p.cache;
  const Append& n = p.append;
  return {
      .q = {p.q_stride_batch, p.q_stride_token, p.q_stride_head},
      .qv = {p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head},
      .out = {p.out_stride_batch, p.out_stride_token, p.out_stride_head},
      .k_cache = {c.k_stride_page, c.k_stride_slot, c.k_stride_head},
      .v_cache = {c.v_stride_page, c.v_stride_slot, c.v_stride_head},
      .new_k = {n.k_stride_batch, n.k_stride_token, n.k_stride_head},
      .new_v = {n.v_stride_batch, n.v_stride_token, n.v_stride_head},
      .lse_stride_batch = p.lse_stride_batch,
      .lse_stride_head = p.lse_stride_head,
      .block_table_stride = c.block_table_stride,
      .q_descale = {p.q_descale_stride_batch, p.q_descale_stride_head},
      .k_descale = {c.k_descale_stride_batch, c.k_descale_stride_head},
      .v_descale = {c.v_descale_stride_batch, c.v_descale_stride_head},
      .slopes_stride_batch = p.alibi_stride_batch,
      .cos_stride = p.rotary.cos_stride,
      .sin_stride = p.rotary.sin_stride,
      .cache_slots = c.page_size,
      .batch = int32(p.batch),
      .q_heads = int32(p.q_heads),
      .kv_heads = int32(p.kv_heads),
      .group = int32(p.group),
      .q_len = p.cu_seqlens_q ? 0 : int32(p.max_q_len),
      .total_q = int32(p.total_q),
      .seqlen_k = position(p.seqlen_k),
      .capacity = position(capacity_of(p)),
      .num_pages = int32(c.num_pages),
      .max_pages = int32(c.max_pages),
      .table_rows = int32(c.table_rows),
      .window_left = position(p.window_left),
      .window_right = position(p.window_right),
      .attention_chunk = position(p.attention_chunk),
      .max_splits = 1,
      .seqlen_new = int32(n.seqlen_new),
      .total_new = int32(n.total_new),
      .rotary_dim = int32(p.rotary.rotary_dim),
      .rotary_len = position(p.rotary.rotary_len),
      .moving_queries = is_local(p),
      .scale = p.scale,
      .softcap = p.softcap,
  };
}

}  // namespace

Call shared_call(const Problem& p) {
  const Cache& c = p.cache;
  Call call;
  const Arguments& a = call.arguments = arguments_of(p);
  call.bind(kBlockTableBuffer, c.block_table, kHasBlockTable);
  call.bind(kBatchIdxBuffer, c.cache_batch_idx, kHasBatchIdx);
  call.bind(kSeqlensBuffer, p.cache_seqlens, kHasSeqlens);
  call.bind(kLeftpadBuffer, p.cache_leftpad, kHasLeftpad);
  call.bind(kCuSeqlensQBuffer, p.cu_seqlens_q, kHasCuSeqlensQ);
  call.bind(kCuSeqlensKBuffer, c.cu_seqlens_k, kHasCuSeqlensK);
  call.bind(kCuSeqlensNewBuffer, p.append.cu_seqlens_k_new, kHasCuSeqlensNew);
  call.bind(kQDescaleBuffer, p.q_descale, kHasQDescale);
  call.bind(kKDescaleBuffer, c.k_descale, kHasKDescale);
  call.bind(kVDescaleBuffer, c.v_descale, kHasVDescale);
  call.bind(kKeyCacheBuffer, c.k);
  call.bind(kValueCacheBuffer, c.v);
  Constants& constants = call.constants;
  constants[kHasNew] = p.append.k.given;
  constants[kWide] = is_wide(p, a.k_cache) || is_wide(p, a.v_cache);
  constants[kAligned] = has_vectors(p, c.k, c.v, a.k_cache, a.v_cache, c.num_pages, c.page_size, c.dtype);
  constants[kHeadDim] = int32(p.head_dim);
  constants[kHeadDimV] = int32(p.head_dim_v);
  constants[kPageSize] = c.block_table ? int32(c.page_size) : 1;
  constants[kQueryType] = static_cast<int32_t>(p.q_dtype);
  constants[kOutType] = static_cast<int32_t>(out_dtype(p.q_dtype));
  constants[kCacheType] = static_cast<int32_t>(c.dtype);
  return call;
}

Call append_call(const Problem& p, Optional<void> rotated) {
  Call call = shared_call(p);
  const Arguments& a = call.arguments;
  call.bind(kQueryBuffer, p.q);
  call.bind(kNewKeysBuffer, p.append.k);
  call.bind(kNewValuesBuffer, p.append.v);
  call.bind(kRotatedBuffer, rotated, kRotatesQueries);
  call.constants[kWritesTokens] = p.append.total_new > 0;
  call.bind(kSinBuffer, p.rotary.sin);
  call.bind(kCosBuffer, p.rotary.cos, kHasRotary);
  call.bind(kRotarySeqlensBuffer, p.rotary.seqlens, kHasRotarySeqlens);
  call.bind(kSlotMappingBuffer, p.append.slot_mapping, kHasSlotMapping);
  call.constants[kInterleaved] = p.rotary.interleaved;
  call.constants[kNewType] = static_cast<int32_t>(p.append.dtype);
  call.constants[kAligned] =
      call.constants[kAligned] &&
      has_vectors(p, p.append.k.data, p.append.v.data, a.new_k, a.new_v, p.batch, p.append.seqlen_new, p.append.dtype);
  return call;
}

Call attend_call(const Problem& p, Optional<void> rotated) {
  Call call = shared_call(p);
  call.bind(kQueryBuffer, p.q);
  if (rotated) {
    const int64_t stride_token = p.q_heads * p.head_dim;
    call.arguments.q = {p.cu_seqlens_q ? 0 : p.max_q_len * stride_token, stride_token, p.head_dim};
    call.bind(kQueryBuffer, rotated);
    call.constants[kQueryType] = call.constants[kOutType];
  }
  call.bind(kOutBuffer, p.out);
  call.bind(kLseBuffer, p.lse, kHasLse);
  call.bind(kQvBuffer, p.qv, kHasQv);
  call.bind(kSlopesBuffer, p.alibi_slopes, kHasSlopes);
  call.bind(kSinksBuffer, p.sinks, kHasSinks);
  call.constants[kQvType] = static_cast<int32_t>(p.q_dtype);
  call.constants[kSinksType] = static_cast<int32_t>(p.sinks_dtype);
  call.constants[kHasSoftcap] = p.softcap != 0.f;
  return call;
}

Call merge_call(const MergeProblem& p) {
  Call call;
  call.arguments.parts = {
      .values = {p.part_stride, p.part_stride_token, p.part_stride_head},
      .lse = {p.lse_stride, p.lse_stride_token, p.lse_stride_head},
      .merged_lse_stride_token = p.merged_lse_stride_token,
      .rows = p.tokens * p.heads,
      .count = int32(p.num_parts),
      .heads = int32(p.heads),
  };
  call.arguments.out = {0, p.out_stride_token, p.out_stride_head};
  call.bind(kPartialAccBuffer, p.parts);
  call.bind(kPartialSumsBuffer, p.lse);
  call.bind(kOutBuffer, p.out);
  call.bind(kLseBuffer, p.merged_lse, kHasLse);
  call.constants[kOutType] = static_cast<int32_t>(p.dtype);
  call.constants[kHeadDimV] = int32(p.head_dim);
  return call;
}

}  // namespace paged_attn
