// merge_parts and merge_with_peers: checks, then the problem, then the backend.
#include "backend.h"
#include "op_parts.h"
#include "ops.h"
#include "spec/merge.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

// Where the union goes: of MergeProblem and PeerMergeProblem.
template <typename AnyProblem>
void set_union(AnyProblem& p, const Tensor& out, const Tensor* lse) {
  p.out = address<void>(out);
  p.out_stride_token = out.stride(0);
  p.out_stride_head = out.stride(1);
  if (!lse) return;
  p.merged_lse = given<float>(*lse);
  p.merged_lse_stride_token = lse->stride(0);
}

}  // namespace

void merge_parts(const MergeArguments& a) {
  const OnDeviceOf guard(*a.parts);
  const Like like(*a.parts, "parts");
  Dim num_parts("num_parts"), tokens("tokens"), heads("heads"), head_dim("head_dim"), one("1", 1, "part_lse");
  check(*a.parts, "parts", kFloatTypes, {&num_parts, &tokens, &heads, &head_dim}, like);
  check(*a.part_lse, "part_lse", kFloat32, {&num_parts, &tokens, &heads, &one}, like);
  check(*a.out, "out", {like.dtype}, {&tokens, &heads, &head_dim}, like);
  if (a.lse) check(*a.lse, "lse", kFloat32, {&tokens, &heads}, like);
  MergeProblem p = {};
  p.parts = address<const void>(*a.parts);
  p.lse = address<const float>(*a.part_lse);
  set_union(p, *a.out, a.lse);
  p.dtype = dtype_of(like.dtype);
  p.num_parts = num_parts.size;
  p.tokens = tokens.size;
  p.heads = heads.size;
  p.head_dim = head_dim.size;
  p.part_stride = a.parts->stride(0);
  p.part_stride_token = a.parts->stride(1);
  p.part_stride_head = a.parts->stride(2);
  p.lse_stride = a.part_lse->stride(0);
  p.lse_stride_token = a.part_lse->stride(1);
  p.lse_stride_head = a.part_lse->stride(2);
  if (p.tokens > 0 && p.heads > 0) run_merge(p);
}

#ifdef CUDA_KERNEL
void merge_with_peers(const PeerMergeArguments& a) {
  const OnDeviceOf guard(*a.part);
  const Like like(*a.part, "part");
  Dim tokens("tokens"), heads("heads"), own_heads("heads or heads / ranks"), head_dim("head_dim"), rows("rows");
  Dim one("1", 1, "part_lse"), two("2", 2, "memory_of_ranks"), row_pairs("row_pairs");
  const int64_t num_ranks = static_cast<int64_t>(a.memory_of_ranks.size());
  Dim ranks("ranks", num_ranks, "memory_of_ranks");
  check(*a.part, "part", kFloatTypes, {&tokens, &heads, &head_dim}, like);
  check(*a.part_lse, "part_lse", kFloat32, {&tokens, &heads, &one}, like);
  check(*a.calls, "calls", kInt32, {&rows}, like);
  check(*a.out, "out", {like.dtype}, {&tokens, &own_heads, &head_dim}, like);
  if (a.lse) check(*a.lse, "lse", kFloat32, {&tokens, &own_heads}, like);
  const int64_t pairs = pd_ceil_div(head_dim.size * dtype_bytes(dtype_of(like.dtype)), kPairBytes) + 1;
  if (tokens.size * heads.size > rows.size)
    fail("calls: expected a row for each of " + str(tokens.size) + " tokens and " + str(heads.size) + " heads, got " +
         str(rows.size));
  if (num_ranks < 1 || num_ranks > kMaxPeers)
    fail("memory_of_ranks: expected 1 to " + str(kMaxPeers) + " ranks, got " + str(num_ranks));
  for (const Tensor& memory : a.memory_of_ranks) {
    check(memory, "memory_of_ranks", {ScalarType::Long}, {&two, &ranks, &rows, &row_pairs, &two}, like);
    if (!memory.is_contiguous()) fail("memory_of_ranks: expected contiguous tensors, got one that is not");
  }
  if (a.rank < 0 || a.rank >= num_ranks) fail("rank: expected 0 to " + str(num_ranks - 1) + ", got " + str(a.rank));
  if (own_heads.size != heads.size && own_heads.size * num_ranks != heads.size)
    fail("out: expected " + str(heads.size) + " heads or an equal share of them, got " + shape_str(*a.out));
  if (row_pairs.size < pairs)
    fail("memory_of_ranks: expected row_pairs of " + str(pairs) + " or more, got " + str(row_pairs.size));
  PeerMergeProblem p = {};
  p.part = address<const void>(*a.part);
  p.lse = address<const float>(*a.part_lse);
  set_union(p, *a.out, a.lse);
  for (int64_t r = 0; r < num_ranks; ++r) p.memory_of_ranks[r] = address<void>(a.memory_of_ranks[r]);
  p.calls = address<uint32_t>(*a.calls);
  p.dtype = dtype_of(like.dtype);
  p.ranks = static_cast<int32_t>(num_ranks);
  p.rank = static_cast<int32_t>(a.rank);
  p.rows = static_cast<int32_t>(rows.size);
  p.row_pairs = static_cast<int32_t>(row_pairs.size);
  p.tokens = static_cast<int32_t>(tokens.size);
  p.heads = static_cast<int32_t>(heads.size);
  p.own_heads = static_cast<int32_t>(own_heads.size);
  p.head_dim = static_cast<int32_t>(head_dim.size);
  p.part_stride_token = a.part->stride(0);
  p.part_stride_head = a.part->stride(1);
  p.lse_stride_token = a.part_lse->stride(0);
  p.lse_stride_head = a.part_lse->stride(1);
  if (p.tokens > 0 && p.heads > 0) run_merge_with_peers(p);
}
#endif

}  // namespace paged_attn
