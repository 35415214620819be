// Merges the partials of the rows whose keys were cut, in the order of their splits. One simdgroup per row.
#pragma once

#include "item.h"

namespace paged_attn {

// The partials of a row that a lane merges: its own split and every kSimdWidth-th after it.
struct SplitStates {
  const device float2* sums;

  State operator()(long i) const { return {sums[i * kSimdWidth].x, sums[i * kSimdWidth].y}; }
};

}  // namespace paged_attn

[[kernel]] void merge(constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS,
                      device void* out [[buffer(kOutBuffer)]],
                      device uint* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
                      const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],
                      const device void* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],
                      const device float* partial_acc [[buffer(kPartialAccBuffer)]],
                      const device float2* partial_sums [[buffer(kPartialSumsBuffer)]],
                      uint3 position [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const Tables tables = PD_TABLES;
  const Output output = {out, lse, sinks, v_descale};
  const int rows = group_size.x / kSimdWidth;
  const Item item = load_item(a, tables, {int(position.z), int(position.x), 0}, position.y, rows);
  if (int(simdgroup) >= item.rows || item.splits == 1) return;
  const long first = partial_of(a, item, simdgroup);

  const int own_splits = (item.splits - int(lane) + kSimdWidth - 1) / kSimdWidth;  // 0 for lanes past the last split
  const State own = pd_merge(own_splits, SplitStates{partial_sums + first + lane});
  const float m = simd_max(own.m), l = simd_sum(own.l * pd_rescale(own.m, m));

  const Row row = load_row(a, item, simdgroup);
  const float normalizer = finish_row(a, output, item, row, m, l, lane == 0);
  const long target = element_of(a.out, item, row);
  for (int dim = lane; dim < head_dim_v; dim += kSimdWidth) {
    float x = 0.f;
    for (int split = 0; split < item.splits; ++split) {
      x += partial_acc[(first + split) * head_dim_v + dim] * pd_rescale(partial_sums[first + split].x, m);
    }
    store_float(out, out_type, target + dim, x * normalizer);
  }
}
