#include "route.h"

#include "basic_call.cuh"
#include "instances.h"

namespace paged_attn {
namespace {

const void* kernel_of(const Problem& p, const DecodePlan& plan) {
  const int head_dim = plan.instance.head_dim, row_tiles = plan.instance.row_tiles;
  const DecodeKind kind = !plan.basic      ? DecodeKind::kFull
                          : p.cu_seqlens_q ? DecodeKind::kBasicPacked
                                           : DecodeKind::kBasic;
  if (plan.instance.wgmma) {
    return p.cache.dtype == DType::kBFloat16 ? wgmma_decode_kernel_bf16(head_dim, row_tiles, kind)
                                             : wgmma_decode_kernel_fp16(head_dim, row_tiles, kind);
  }
  switch (p.cache.dtype) {
    case DType::kFloat32: return decode_kernel_fp32(head_dim, row_tiles, kind);
    case DType::kFloat16: return decode_kernel_fp16(head_dim, row_tiles, kind);
    case DType::kBFloat16: return decode_kernel_bf16(head_dim, row_tiles, kind);
    case DType::kFloat8E4M3: return decode_kernel_e4m3(head_dim, row_tiles, kind);
    default: return decode_kernel_e5m2(head_dim, row_tiles, kind);
  }
}

void add_items(const Problem& p, const DecodePlan& plan, Launches& launches) {
  Plan work = plan.work;
  work.partials = static_cast<TaggedWord*>(launches.workspace(plan.workspace_bytes));
  const Grid grid = {plan.blocks, plan.warps * kWarp, plan.shared_bytes};
  if (plan.basic) {
    launches.add(kernel_of(p, plan), grid, basic_call(p, work));
  } else {
    launches.add(kernel_of(p, plan), grid, p, work);
  }
}

}  // namespace

Numbers decode_numbers(const DecodePlan& plan) {
  return {{"rows_per_tile", plan.instance.rows},
          {"tile_keys", int64_t{1} << plan.instance.tile_shift},
          {"items", plan.work.items},
          {"halves", plan.halves()},
          {"wgmma", plan.instance.wgmma},
          {"balanced", plan.work.balanced},
          {"splits", plan.work.max_splits.divisor},
          {"blocks", plan.blocks},
          {"blocks_per_processor", plan.blocks_per_processor},
          {"warps", plan.warps},
          {"shared_bytes", plan.shared_bytes + plan.instance.block_bytes},
          {"workspace_bytes", plan.workspace_bytes}};
}

void add_decode(const Problem& p, const DecodePlan& plan, Launches& launches) {
  if (plan.halves()) {
    add_items(in_halves(p), plan, launches);
  } else {
    add_items(p, plan, launches);
  }
}

}  // namespace paged_attn
