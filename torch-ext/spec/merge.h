// Results of the same queries over disjoint sets of keys, and where their union goes. Strides count elements; the last
// dimension of parts and out is contiguous.
#pragma once

#include "problem.h"
#include "state.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

struct MergeProblem {
  Address<const void> parts;   // [num_parts, tokens, heads, head_dim]
  Address<const float> lse;    // [num_parts, tokens, heads]
  Address<void> out;           // [tokens, heads, head_dim]
  Optional<float> merged_lse;  // [tokens, heads]
  DType dtype;                 // of parts and out
  int64_t num_parts, tokens, heads, head_dim;
  int64_t part_stride, part_stride_token, part_stride_head;
  int64_t lse_stride, lse_stride_token, lse_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t merged_lse_stride_token;
};

// The parts of one token and head for pd_merge.
struct PartStates {
  const float* lse;
  int64_t stride;

  PD_METHOD State operator()(int64_t part) const {
    const float x = lse[part * stride];
    return pd_state_of_result(x, x == -INFINITY);
  }
};

}  // namespace paged_attn
