#include "plan.h"

#include "layout.h"

namespace paged_attn {

constexpr int kMaxSplits = 256;

void plan_tables(const Problem& p, int tile_shift, Plan& plan) {
  plan.tile_shift = tile_shift;
  plan.page_size = FastDivisor(p.cache.block_table ? p.cache.page_size : 1);
  plan.group = FastDivisor(p.group);
  plan.kv_heads = FastDivisor(p.kv_heads);
  plan.chunk = FastDivisor(pd_max(p.attention_chunk, 1));
  plan.blocks_each.divisor = 0;
  plan.partial_quads = static_cast<int32_t>(output_quads(p));
  plan.max_keys = static_cast<int32_t>(capacity_of(p));
  plan.max_pages = p.cache.block_table ? static_cast<int32_t>(p.cache.max_pages) : 0;
  plan.whole_runs = p.cache.block_table && p.cache.page_size % kRunKeys == 0;
}

void plan_direct_rows(const Problem& p, int row_shift, int64_t row_tiles, Plan& plan) {
  plan.row_shift = row_shift;
  plan.rows_per_tile = 1 << row_shift;
  plan.row_tiles = FastDivisor(row_tiles);
  plan.items = plan.direct_items = static_cast<int32_t>(p.batch * row_tiles);
}

void plan_packed_rows(const Problem& p, int row_shift, Plan& plan) {
  plan_direct_rows(p, row_shift, 0, plan);
  plan.items = static_cast<int32_t>(packed_tiles(p, row_shift));
}

int64_t packed_tiles(const Problem& p, int row_shift) {
  return p.batch == 0 ? 0 : ((p.total_q * p.group) >> row_shift) + p.batch;
}

void plan_fixed_splits(const Problem& p, int split_keys, int64_t limit, Plan& plan) {
  const int64_t keys = pd_max(capacity_of(p), 1);
  const int64_t pairs = plan.items * p.kv_heads;
  int64_t splits = pd_min(pd_ceil_div(keys, split_keys), limit);
  if (p.num_splits > 0) splits = pd_min(p.num_splits, pd_ceil_div(keys, int64_t{1} << plan.tile_shift));
  // A grid has fewer than 2^31 blocks. So many partials fit into no memory, so the limit decides nothing else.
  splits = pd_max(pd_min(pd_min(splits, kMaxSplits), INT32_MAX / pd_max(pairs, 1)), 1);
  if (p.num_splits > 0) plan.num_splits = static_cast<int32_t>(splits);
  plan.split_tiles = split_keys >> plan.tile_shift;
  plan.max_splits = FastDivisor(splits);
  plan.blocks = FastDivisor(pairs * splits);
}

int64_t partial_bytes(const Plan& plan, int64_t blocks) {
  return blocks * plan.rows_per_tile * row_words(plan.partial_quads) * static_cast<int64_t>(sizeof(TaggedWord));
}

}  // namespace paged_attn
