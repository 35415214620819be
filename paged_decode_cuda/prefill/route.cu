#include "route.h"

#include "../layout.h"
#include "instances.h"
#include "shape.cuh"
#include "tensor_map.h"

namespace paged_attn {
namespace {

// The workspace: the word of tickets and whether keys were cut, then the number of splits of every row, then of all
// partials the reference scores and sums of weights, then the sums.
struct Layout {
  int64_t row_splits, ml, sums, end;  // bytes

  explicit Layout(const Problem& p, const PrefillPlan& plan) {
    const auto place_behind = [](int64_t place, int64_t count, size_t bytes) {
      return pd_ceil_div(place + count * static_cast<int64_t>(bytes), kLine) * kLine;
    };
    const int64_t all_rows = plan.most_splits > 1 ? p.total_q * p.q_heads : 0, rows = plan.most_splits * all_rows;
    row_splits = kLine;
    ml = place_behind(row_splits, all_rows, sizeof(int2));
    sums = place_behind(ml, rows, sizeof(float2));
    end = sums + rows * p.head_dim_v * static_cast<int64_t>(sizeof(float));
  }
};

PrefillCall prefill_call(const Problem& p, const PrefillPlan& plan, const Layout& layout, char* workspace) {
  const Cache& c = p.cache;
  PrefillCall call = {};
  plan_tables(p, 0, call);
  plan_pieces(p, call);
  const CacheStrides k = {c.k_stride_page, c.k_stride_slot, c.k_stride_head};
  const CacheStrides v = {c.v_stride_page, c.v_stride_slot, c.v_stride_head};
  const int row_values = kRowBytes / static_cast<int>(dtype_bytes(c.dtype));
  // Where TMA cannot describe the cache, keys and values come in pieces.
  const bool bulk = plan.box_rows > 0 && describe_cache(p, c.k, p.head_dim, k, plan.box_rows, row_values, call.keys) &&
                    describe_cache(p, c.v, p.head_dim_v, v, plan.box_rows, row_values, call.values);
  call.box_rows = bulk ? plan.box_rows : 0;
  // Queries come in boxes where they are multiplied as they are, and where they can be described. The box of a
  // request's last rows brings those of the next request too, whose scores may move the references of a warp.
  const int rows = plan.instance.tile_rows;
  const bool boxes = (dtype_bytes(p.q_dtype) == 2 || !plan.widens) && describe_queries(p, rows, call.queries);
  const int least_rows = hides_lengths(p) ? rows : 0;
  call.tile_rows = FastDivisor(rows);
  call.query_box_rows = boxes ? least_rows : rows + 1;
  call.blocks_in_grid = static_cast<int32_t>(plan.blocks);
  call.one_round = plan.one_round;
  call.l2_keys = static_cast<int32_t>(plan.l2_keys);
  call.tickets = reinterpret_cast<unsigned long long*>(workspace);
  call.copy_policy = plan.read_once ? kCopyReadOnce : kCopyAsUsual;
  call.splits = static_cast<int32_t>(plan.splits);
  call.most_splits = static_cast<int32_t>(plan.most_splits);
  call.splits_wanted = static_cast<float>(plan.splits_wanted);
  call.most_split_rate = static_cast<float>(plan.instance.keys) / static_cast<float>(plan.least_long_split_keys);
  call.cut_from_tiles = static_cast<int32_t>(pd_ceil_div(plan.cut_from_keys, plan.instance.keys));
  call.splits_per_tile = static_cast<float>(plan.instance.keys) / static_cast<float>(plan.least_split_keys);
  call.cut = call.tickets + 1;
  call.looks_early = plan.most_splits > 1 && !plan.few_tiles;
  call.combine_warps = static_cast<int32_t>(plan.combine_warps);
  call.row_splits = reinterpret_cast<int2*>(workspace + layout.row_splits);
  call.ml = reinterpret_cast<float2*>(workspace + layout.ml);
  call.sums = reinterpret_cast<float*>(workspace + layout.sums);
  return call;
}

}  // namespace

Numbers prefill_numbers(const PrefillPlan& plan) {
  return {{"rows_per_tile", plan.instance.tile_rows},
          {"tile_keys", plan.instance.keys},
          {"items", plan.items},
          {"splits", plan.splits},
          {"most_splits", plan.most_splits},
          {"split_keys", plan.cut_from_keys},
          {"widens", plan.widens},
          {"all_scores", plan.all_scores},
          {"box_rows", plan.box_rows},
          {"blocks", plan.blocks},
          {"shared_bytes", plan.instance.shared_bytes}};
}

void add_prefill(const Problem& p, const PrefillPlan& plan, Launches& launches) {
  const Layout layout(p, plan);
  char* const workspace = static_cast<char*>(launches.workspace(layout.end));
  const PrefillCall call = prefill_call(p, plan, layout, workspace);
  const auto kernel_of = plan.widens                           ? prefill_kernel_narrow
                         : p.cache.dtype == DType::kFloat8E4M3 ? prefill_kernel_e4m3
                         : p.cache.dtype == DType::kBFloat16   ? prefill_kernel_bf16
                                                               : prefill_kernel_fp16;
  const void* const kernel = kernel_of(plan.instance, plan.all_scores);
  launches.add(kernel, {plan.blocks, plan.instance.threads, plan.instance.shared_bytes}, p, call);
  if (plan.most_splits > 1) {
    launches.add(prefill_combine_kernel(), {plan.combine_blocks, kCombineThreads, plan.combine_bytes}, p, call);
  }
}

}  // namespace paged_attn
