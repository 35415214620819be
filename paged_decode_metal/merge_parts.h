// merge_parts: merges results of the same queries over disjoint keys. One simdgroup per row, a token and head.
#pragma once

#include "device.h"

namespace paged_attn {

constant float kHuge = 1e38f;  // m of a part whose lse is infinite: nothing stands beside it

// The parts that a lane merges: its own and every kSimdWidth-th after it.
struct PartStates {
  const device uint* lse;  // as bits, since fast math knows no infinity
  long stride;

  State operator()(long i) const {
    const uint bits = lse[i * stride];
    if (bits == kInfinity) return {kHuge, 1.f};
    return pd_state_of_result(as_type<float>(bits), bits == kMinusInfinity);
  }
};

}  // namespace paged_attn

[[kernel]] void merge_parts(constant Arguments& a [[buffer(kArgumentsBuffer)]], device void* out [[buffer(kOutBuffer)]],
                            device uint* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
                            const device void* values [[buffer(kPartialAccBuffer)]],
                            const device uint* part_lse [[buffer(kPartialSumsBuffer)]],
                            uint position [[threadgroup_position_in_grid]], uint group_size [[threads_per_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  constant Parts& p = a.parts;
  const long row = long(position) * (group_size / kSimdWidth) + simdgroup;
  if (row >= p.rows) return;
  const long token = row / p.heads, head = row % p.heads;
  const PartStates state_of = {part_lse + token * p.lse.middle + head * p.lse.head, p.lse.outer};

  const int own_parts = (p.count - int(lane) + kSimdWidth - 1) / kSimdWidth;  // 0 for lanes past the last part
  const State own =
      pd_merge(own_parts, PartStates{state_of.lse + lane * state_of.stride, kSimdWidth * state_of.stride});
  const float m = simd_max(own.m), l = simd_sum(own.l * pd_rescale(own.m, m));

  const float normalizer = pd_normalizer(l);
  const long source = token * p.values.middle + head * p.values.head, target = token * a.out.middle + head * a.out.head;
  for (int dim = lane; dim < head_dim_v; dim += kSimdWidth) {
    float x = 0.f;
    for (int part = 0; part < p.count; ++part) {
      const State state = state_of(part);
      const float weight = state.l * pd_rescale(state.m, m);
      if (weight == 0.f) continue;  // its values may be anything
      x += load_float(values, out_type, source + part * p.values.outer + dim) * weight;
    }
    store_float(out, out_type, target + dim, x * normalizer);
  }
  if (has_lse && lane == 0) {
    const uint bits = l == 0.f ? kMinusInfinity : m == kHuge ? kInfinity : as_type<uint>(pd_lse(m, l));
    lse[token * p.merged_lse_stride_token + head] = bits;
  }
}
