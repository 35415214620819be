// Merges the partials of rows whose keys were shared by several thread blocks, adds the sink, writes output and lse.
// Runs in the block that is the last to leave its part.
//
// The counters of arrivals lie in a workspace that nobody clears before the launch: an extra launch would cost more
// than the merge. Block 0 clears them and then publishes %gridid, the number of this launch, which also differs between
// the replays of a graph; nobody counts before it is there. Block 0 waits for nobody, so this always ends.
#pragma once

#include "work.cuh"

namespace paged_attn {

PD_DEVICE unsigned long long launch_number() {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return number;
}

// To be called by all threads of every block, early.
PD_DEVICE void clear_arrivals(const Plan& plan) {
  if (blockIdx.x != 0 || !plan.arrivals) return;
  for (int i = threadIdx.x; i < static_cast<int>(plan.blocks.divisor); i += blockDim.x) plan.arrivals[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(plan.ready), "l"(launch_number()) : "memory");
  }
}

// Tells that this block's partial is written. True in the block that finds all others written.
PD_DEVICE bool arrive_last(const Plan& plan, const Parts& parts, int* shared_flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned long long number;
    do {
      asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(number) : "l"(plan.ready) : "memory");
    } while (number != launch_number());
    __threadfence();
    *shared_flag = atomicAdd(&plan.arrivals[parts.first_block], 1) == parts.count - 1;
    __threadfence();
  }
  __syncthreads();
  return *shared_flag != 0;
}

// All threads of the block take part; a thread takes four dimensions of a row at a time.
PD_DEVICE void merge_parts(const Problem& p, const Plan& plan, const Item& item, int head, const Parts& parts) {
  constexpr int kBatch = 8;  // partials in flight
  const DType out_dtype = output_dtype(p);
  const int quads = plan.partial_stride / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < item.rows * quads; i += blockDim.x) {
    const int row = i / quads, quad = i - row * quads;
    float m = -INFINITY, l = 0.f, acc[4] = {};
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kBatch) {
      float2 ml[kBatch];
      float4 other[kBatch];
      float top = m;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int index = first + j;
        const int slot = index == 0 ? parts.first_slot : parts.first_block + index;
        const int64_t place = static_cast<int64_t>(slot) * plan.rows_per_tile + row;
        ml[j] = make_float2(-INFINITY, 0.f);
        other[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (index < parts.count) {
          // Through L2: another multiprocessor wrote this during the launch.
          ml[j] = __ldcg(&plan.partial_ml[place]);
          other[j] = __ldcg(reinterpret_cast<const float4*>(plan.partial_acc + place * plan.partial_stride) + quad);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) top = fmaxf(top, ml[j].x);
      const float factor = fast_rescale(m, top);
      m = top;
      l *= factor;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] *= factor;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float weight = fast_rescale(ml[j].x, top);
        l += ml[j].y * weight;
        acc[0] += other[j].x * weight;
        acc[1] += other[j].y * weight;
        acc[2] += other[j].z * weight;
        acc[3] += other[j].w * weight;
      }
    }
    const RowTarget target = row_target(p, plan, item, head, row);
    const float factor = finish_row(p, target, item.b, head, m, l, quad == 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (quad * 4 + e < p.head_dim_v) store_float(p.out, out_dtype, target.out + quad * 4 + e, acc[e] * factor);
    }
  }
}

}  // namespace paged_attn
