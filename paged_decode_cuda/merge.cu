// Merging the parts of a result: a warp for each token and head.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend.h"
#include "ptx.cuh"
#include "runtime.h"
#include "spec/merge.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr int kMergeWarps = 4;

// The share of a part in the union. Two parts without keys have the same lse, -inf, and no difference.
__device__ float weight_of(float lse, float largest) { return lse == largest ? 1.0f : __expf(lse - largest); }

template <typename T>
__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const MergeProblem p) {
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32;
  if (row >= p.tokens * p.heads) return;
  const int64_t token = row / p.heads, head = row % p.heads;
  const float* lse = p.lse + token * p.lse_stride_token + head * p.lse_stride_head;
  float largest = -INFINITY, total = 0;
  for (int64_t part = 0; part < p.num_parts; ++part) largest = fmaxf(largest, lse[part * p.lse_stride]);
  for (int64_t part = 0; part < p.num_parts; ++part) total += weight_of(lse[part * p.lse_stride], largest);
  const T* parts = static_cast<const T*>(p.parts) + token * p.part_stride_token + head * p.part_stride_head;
  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const float scale = total > 0 ? 1.0f / total : 0.0f;  // no part at all: zeros, as no keys
  for (int64_t d = lane; d < p.head_dim; d += 32) {
    float sum = 0;
    for (int64_t part = 0; part < p.num_parts; ++part)
      sum += weight_of(lse[part * p.lse_stride], largest) * static_cast<float>(parts[part * p.part_stride + d]);
    out[d] = static_cast<T>(sum * scale);
  }
  if (p.merged_lse && lane == 0) p.merged_lse.data[token * p.merged_lse_stride_token + head] = largest + logf(total);
}

const void* merge_kernel_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return reinterpret_cast<const void*>(&merge_kernel<__half>);
    case DType::kBFloat16: return reinterpret_cast<const void*>(&merge_kernel<__nv_bfloat16>);
    default: return reinterpret_cast<const void*>(&merge_kernel<float>);
  }
}

}  // namespace

void run_merge(const MergeProblem& p) {
  const int64_t blocks = pd_ceil_div(p.tokens * p.heads, int64_t{kMergeWarps});
  launch(merge_kernel_of(p.dtype), {blocks, 32 * kMergeWarps, 0}, current_context(), p);
}

}  // namespace paged_attn
