#include "route.h"

#include "../prefill/tensor_map.h"
#include "instances.h"
#include "shape.cuh"

namespace paged_attn {
namespace {

// The workspace: sums of all partials, then (m, l) of their rows, then the record of every cluster, then what is
// published of either half of every partial.
struct Layout {
  int64_t ml, records, published, end;  // bytes

  explicit Layout(const MlaPlan& plan) {
    const int64_t rows = plan.partial_count * MlaSizes::kRows;
    ml = rows * MlaSizes::kLatents * static_cast<int64_t>(sizeof(float));
    records = pd_ceil_div(ml + rows * static_cast<int64_t>(sizeof(float2)), 32) * 32;
    const int64_t bytes = plan.clusters * static_cast<int64_t>(sizeof(MlaRecord));
    published = pd_ceil_div(records + bytes, 8) * 8;
    end = published + plan.partial_count * 2 * 8;
  }
};

// `p` is split. The rest of the call is the workspace's.
MlaCall mla_call(const Problem& p, const MlaPlan& plan) {
  const Cache& c = p.cache;
  MlaCall call = {};
  static_cast<Plan&>(call) = plan.work;
  const CacheStrides k = {c.k_stride_page, c.k_stride_slot, c.k_stride_head};
  const CacheStrides v = {c.v_stride_page, c.v_stride_slot, c.v_stride_head};
  // Where they cannot be described, copies go piece by piece.
  const bool bulk = plan.box_rows > 0 && describe_cache(p, c.k, p.head_dim, k, plan.box_rows, kColumn, call.rope) &&
                    describe_cache(p, c.v, p.head_dim_v, v, plan.box_rows, kColumn, call.latents);
  call.box_rows = bulk ? plan.box_rows : 0;
  call.copy_policy = plan.read_once ? kCopyReadOnce : kCopyAsUsual;
  call.cluster = plan.cluster;
  call.adds_two = plan.adds_two;
  call.expects = plan.expects;
  return call;
}

const void* find_kernel(const Problem& p, const MlaPlan& plan) {
  const bool bf16 = p.q_dtype == DType::kBFloat16, all_scores = plan.all_scores;
  switch (plan.kernel) {
    case MlaKernel::kUsual: return bf16 ? mla_kernel_bf16(all_scores) : mla_kernel_fp16(all_scores);
    case MlaKernel::kFewRows:
      return bf16 ? few_rows_mla_kernel_bf16(plan.rows, plan.latents, plan.basic)
                  : few_rows_mla_kernel_fp16(plan.rows, plan.latents, plan.basic);
    default: {
      const bool few_rows = plan.kernel == MlaKernel::kNarrowFewRows;
      return p.cache.dtype == DType::kFloat8E4M3 ? mla_kernel_e4m3(few_rows, all_scores)
                                                 : mla_kernel_e5m2(few_rows, all_scores);
    }
  }
}

}  // namespace

Numbers mla_numbers(const MlaPlan& plan) {
  return {{"rows_per_tile", plan.rows * plan.cluster},
          {"tile_keys", MlaSizes::kKeys},
          {"items", plan.work.items},
          {"splits", plan.work.max_splits.divisor},
          {"balanced", plan.work.balanced},
          {"all_scores", plan.all_scores},
          {"box_rows", plan.box_rows},
          {"cluster", plan.cluster},
          {"blocks", plan.clusters * plan.cluster},
          {"shared_bytes", plan.shared_bytes},
          {"partials", plan.partial_count}};
}

void add_mla(const Problem& p, const MlaPlan& plan, Launches& launches) {
  const Problem split = split_latents(p);
  MlaCall call = mla_call(split, plan);
  if (plan.cut) {
    const Layout layout(plan);
    char* const data = static_cast<char*>(launches.workspace(layout.end));
    call.slots = plan.work.balanced ? 2 : 1;
    call.sums = reinterpret_cast<float*>(data);
    call.ml = reinterpret_cast<float2*>(data + layout.ml);
    call.records = reinterpret_cast<MlaRecord*>(data + layout.records);
    call.published = reinterpret_cast<unsigned long long*>(data + layout.published);
    call.partial_count = plan.partial_count;
    call.combine_shares = static_cast<uint32_t>(plan.combine_shares);
    call.combine_shift = plan.combine_shift;
  }
  launches.add(find_kernel(p, plan), {plan.clusters, plan.threads, plan.shared_bytes, plan.cluster}, split, call);
  if (plan.cut) {
    const void* const kernel = mla_combine_kernel(plan.combine_threads, plan.combine_together);
    launches.add(kernel, {plan.combine_blocks, plan.combine_threads, 0}, split, call);
  }
}

}  // namespace paged_attn
