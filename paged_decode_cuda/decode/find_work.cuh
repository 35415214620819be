// How a block of the decode kernels finds its work.
#pragma once

#include "../balance.cuh"
#include "../ptx.cuh"

namespace paged_attn {

// While the lengths are read, every thread fetches a line of a tensor into L2; most of that tensor will be needed.
PD_DEVICE void prefetch_line(const void* tensor, int lines) {
  const int line = threadIdx.x * gridDim.x + blockIdx.x;
  if (line < lines) prefetch_l2(static_cast<const char*>(tensor) + static_cast<int64_t>(line) * kLine);
}

// Waits until the kernel before this one is done, then finds what this block shall do from the lengths. kLines: there
// may be several lines.
template <bool kLines = true>
PD_DEVICE void find_work(const Problem& p, const Plan& plan, Walker& walker, Dealing& dealing) {
  wait_for_predecessor();
  let_successor_start();
  prefetch_line(p.cache.block_table, plan.table_lines);
  prefetch_line(p.q, plan.q_lines);
  if (plan.balanced) {
    find_stretch<kLines>(p, plan, walker, dealing);
  } else {
    find_split(p, plan, walker, dealing);
  }
}

}  // namespace paged_attn
