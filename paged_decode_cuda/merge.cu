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
constexpr int kPartsAtOnce = 4, kValues = 4;  // of a row, that a lane loads before it adds them

// The share of a part in the union. Two parts without keys have the same lse, -inf, and no difference.
__device__ float weight_of(float lse, float largest) { return lse == largest ? 1.0f : __expf(lse - largest); }

// Whether the values of a part count. Where they do not, they may be anything.
__device__ bool counts(float lse, float largest) { return lse != -INFINITY && weight_of(lse, largest) != 0; }

template <typename T>
__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const MergeProblem p) {
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32;
  if (row >= p.tokens * p.heads) return;
  const int64_t token = row / p.heads, head = row % p.heads;
  const float* lse = p.lse + token * p.lse_stride_token + head * p.lse_stride_head;
  float largest = -INFINITY, total = 0;
  for (int64_t part = lane; part < p.num_parts; part += 32) largest = fmaxf(largest, lse[part * p.lse_stride]);
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  for (int64_t part = lane; part < p.num_parts; part += 32) total += weight_of(lse[part * p.lse_stride], largest);
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  const T* parts = static_cast<const T*>(p.parts) + token * p.part_stride_token + head * p.part_stride_head;
  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const float scale = total > 0 ? 1.0f / total : 0.0f;  // no part at all: zeros, as no keys
  for (int64_t d = lane; d < p.head_dim; d += 32 * kValues) {
    float sums[kValues] = {};
    for (int64_t first = 0; first < p.num_parts; first += kPartsAtOnce) {
      float values[kPartsAtOnce][kValues], lses[kPartsAtOnce];
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
        if (first + j >= p.num_parts) continue;
        lses[j] = lse[(first + j) * p.lse_stride];
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          values[j][i] =
              d + 32 * i < p.head_dim ? static_cast<float>(parts[(first + j) * p.part_stride + d + 32 * i]) : 0;
      }
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
        if (first + j >= p.num_parts) continue;
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          sums[i] += weight_of(lses[j], largest) * (counts(lses[j], largest) ? values[j][i] : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (d + 32 * i < p.head_dim) out[d + 32 * i] = static_cast<T>(sums[i] * scale);
    }
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
  Launches launches(current_context());
  launches.add(merge_kernel_of(p.dtype), {blocks, 32 * kMergeWarps, 0}, p);
  launches.run();
}

}  // namespace paged_attn
