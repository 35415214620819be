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

// The most GPUs of one host whose parts are merged.
constexpr int64_t kMaxPeers = 16;

constexpr int64_t kPairBytes = 8;  // of a result in a pair of 8-byte words; the rest is the number of the call

// The result of this rank over its own keys (part, lse), where it goes on every rank, and where the union goes.
// memory_of_ranks are the exchange memories of all GPUs, mapped into this one's address space: [2, ranks, rows,
// row_pairs, 2] words each, of which rank r writes [:, r]. The first dimension alternates from call to call.
struct PeerMergeProblem {
  const void* part;            // [tokens, heads, head_dim]
  const float* lse;            // [tokens, heads]
  void* out;                   // [tokens, heads, head_dim], or [tokens, heads / ranks, head_dim]
  Optional<float> merged_lse;  // as out without head_dim
  void* memory_of_ranks[kMaxPeers];
  uint32_t* calls;  // [rows]: how many calls have used each row of the memory
  DType dtype;      // of part and out
  int32_t ranks, rank, rows, row_pairs;
  int32_t tokens, heads, own_heads, head_dim;  // own_heads: heads of out, all of them or those of this rank
  int64_t part_stride_token, part_stride_head;
  int64_t lse_stride_token, lse_stride_head;
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
