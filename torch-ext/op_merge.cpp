// merge_parts: checks, then the problem, then the backend.
#include "backend.h"
#include "op_parts.h"
#include "ops.h"
#include "spec/merge.h"

namespace paged_attn {

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
  p.out = address<void>(*a.out);
  if (a.lse) p.merged_lse = given<float>(*a.lse);
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
  p.out_stride_token = a.out->stride(0);
  p.out_stride_head = a.out->stride(1);
  p.merged_lse_stride_token = a.lse ? a.lse->stride(0) : 0;
  if (p.tokens > 0 && p.heads > 0) run_merge(p);
}

}  // namespace paged_attn
