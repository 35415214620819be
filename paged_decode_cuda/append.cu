#include "append.h"

#include "append.cuh"
#include "layout.h"

namespace paged_attn {
namespace {

// Whether rows move in 16-byte pieces, with no arithmetic but the conversion to fp8.
bool fits_copy_kernel(const Problem& p) {
  const Append& a = p.append;
  const Cache& c = p.cache;
  const int64_t from = dtype_bytes(a.dtype), to = dtype_bytes(c.dtype);
  if (p.rotary.cos || (a.dtype != c.dtype && from != 2)) return false;
  if (p.head_dim * from % 16 != 0 || p.head_dim_v * from % 16 != 0) return false;
  if (!aligned(a.k) || !aligned(a.v) || !aligned(c.k) || !aligned(c.v)) return false;
  const Dimension new_dimensions[] = {{p.batch, a.k_stride_batch},      {a.seqlen_new, a.k_stride_token},
                                      {p.kv_heads, a.k_stride_head},    {p.batch, a.v_stride_batch},
                                      {a.seqlen_new, a.v_stride_token}, {p.kv_heads, a.v_stride_head}};
  for (const Dimension& d : new_dimensions) {
    if (!aligned(d, from)) return false;
  }
  for (const Dimension& d : cache_dimensions(p)) {
    if (!aligned(d, a.dtype == c.dtype ? to : 2)) return false;  // converted to 8 bits, they are stored 8 at a time
  }
  return true;
}

// New tokens have the dtype of the queries.
const void* append_kernel_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return reinterpret_cast<const void*>(&append_kernel<float>);
    case DType::kFloat16: return reinterpret_cast<const void*>(&append_kernel<__half>);
    case DType::kBFloat16: return reinterpret_cast<const void*>(&append_kernel<__nv_bfloat16>);
    default: return reinterpret_cast<const void*>(&append_kernel<uint8_t>);
  }
}

template <int kTokens>
const void* copy_kernel_of(bool fp8) {
  return fp8 ? reinterpret_cast<const void*>(&copy_kernel<kTokens, true>)
             : reinterpret_cast<const void*>(&copy_kernel<kTokens, false>);
}

}  // namespace

void add_append(const Problem& p, bool rotates, void* rotated_q, Launches& launches) {
  AppendPlan plan = {};
  plan.page_size = FastDivisor(pd_max(p.cache.page_size, 1));
  plan.seqlen_new = FastDivisor(pd_max(p.append.seqlen_new, 1));
  plan.total_new = p.append.total_new;
  plan.rotated_q = rotated_q;
  plan.moving_queries = is_local(p);
  const int64_t tokens = p.append.total_new + (rotates ? p.total_q : 0);
  if (tokens == 0 || p.batch == 0) return;  // tokens of no request
  if (rotates || !fits_copy_kernel(p)) {
    const int64_t pairs_k = pd_ceil_div(p.head_dim, 2), pairs_v = pd_ceil_div(p.head_dim_v, 2);
    plan.pairs_k = FastDivisor(pd_max(pairs_k, 1));
    plan.pairs_v = FastDivisor(pd_max(pairs_v, 1));
    const int64_t pairs = pd_max(p.kv_heads * (pairs_k + pairs_v), rotates ? p.q_heads * pairs_k : 0);
    plan.token_blocks = FastDivisor(pd_max(pd_ceil_div(pairs, kAppendThreads), 1));
    const int64_t blocks = tokens * plan.token_blocks.divisor;
    plan.early_successor = blocks <= launches.limits().processors;
    launches.add(append_kernel_of(p.append.dtype), {blocks, kAppendThreads, 0}, p, plan);
    return;
  }
  const int64_t bytes = dtype_bytes(p.append.dtype);
  plan.vectors_k = FastDivisor(p.head_dim * bytes / 16);
  plan.vectors_v = FastDivisor(p.head_dim_v * bytes / 16);
  const int64_t pieces = p.kv_heads * (p.head_dim + p.head_dim_v) * bytes / 16;
  plan.width = FastDivisor(pd_max(pd_min(pieces, kAppendThreads), 1));
  plan.rows = static_cast<int32_t>(kAppendThreads / plan.width.divisor);
  // Several pieces per thread keep more of the memory busy, once there are tokens for every multiprocessor.
  const bool many = tokens > 8 * int64_t{launches.limits().processors};
  const bool fp8 = p.append.dtype != p.cache.dtype;
  const void* kernel = many ? copy_kernel_of<kManyTokens>(fp8) : copy_kernel_of<1>(fp8);
  launches.add(kernel, {pd_ceil_div(tokens, many ? kManyTokens : 1), kAppendThreads, 0}, p, plan);
}

}  // namespace paged_attn
