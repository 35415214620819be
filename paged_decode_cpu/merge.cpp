// Merging the parts of a result: a row of out for each token and head.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "backend.h"
#include "spec/merge.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

template <typename T>
void merge_row(const MergeProblem& p, int64_t token, int64_t head, std::vector<float>& sums) {
  const PartStates state_of = {p.lse + token * p.lse_stride_token + head * p.lse_stride_head, p.lse_stride};
  const State all = pd_merge(p.num_parts, state_of);
  sums.assign(p.head_dim, 0.0f);
  const T* values = static_cast<const T*>(p.parts) + token * p.part_stride_token + head * p.part_stride_head;
  for (int64_t part = 0; part < p.num_parts; ++part) {
    const State state = state_of(part);
    const float weight = state.l * pd_rescale(state.m, all.m);
    if (weight == 0.0f) continue;  // its values may be anything
    for (int64_t d = 0; d < p.head_dim; ++d) sums[d] += weight * static_cast<float>(values[part * p.part_stride + d]);
  }
  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const float normalizer = pd_normalizer(all.l);
  for (int64_t d = 0; d < p.head_dim; ++d) out[d] = static_cast<T>(sums[d] * normalizer);
  if (p.merged_lse) p.merged_lse.data[token * p.merged_lse_stride_token + head] = pd_lse(all.m, all.l);
}

template <typename T>
void merge_rows(const MergeProblem& p) {
  // A thread takes at least 64 KiB of parts: waking one costs about as much.
  const int64_t row_bytes = p.num_parts * p.head_dim * static_cast<int64_t>(sizeof(T));
  const int64_t grain = pd_max(1, (int64_t{64} << 10) / pd_max(row_bytes, 1));
  torch::stable::parallel_for(0, p.tokens * p.heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sums;
    for (int64_t row = begin; row < end; ++row) merge_row<T>(p, row / p.heads, row % p.heads, sums);
  });
}

}  // namespace

void run_merge(const MergeProblem& p) {
  switch (p.dtype) {
    case DType::kFloat16: return merge_rows<torch::headeronly::Half>(p);
    case DType::kBFloat16: return merge_rows<torch::headeronly::BFloat16>(p);
    default: return merge_rows<float>(p);
  }
}

}  // namespace paged_attn
