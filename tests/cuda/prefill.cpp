// The planners of the routes for long queries and their order of tiles, compiled for the host. test_cuda_plans.py makes
// prefill_host.h from the files themselves, without what only a GPU has.
#include "prefill/plan.h"

#include "prefill/plan_cuts.h"
#include "prefill_host.h"
#include "prefill_mma/plan.h"

using namespace paged_attn;

extern "C" {

// Fields are given by name from Python, all of 64 bits. An address of 0 leaves a tensor out.
struct PrefillCase {
  int64_t capability, processors, shared_per_block, shared_per_processor, read_rate;
  int64_t batch, kv_heads, group, head_dim, head_dim_v, q_bytes, kv_bytes, total_q, max_q_len;
  int64_t page_size, paged, packed, qv;
  int64_t window_left, window_right, chunk, softcap, num_splits, deterministic, max_seqlen_k;
  int64_t l2_keys, tile_rows, splits, most_splits, splits_wanted, cut_from_tiles, least_split_keys,
      least_long_split_keys, one_round;
  int64_t cu_seqlens_q, cache_seqlens, leftpad;
};

struct PrefillNumbers {
  int64_t rows, tile_rows, keys, threads, shared_bytes, all_scores, box_rows, items, blocks, l2_keys;
  int64_t splits, most_splits, splits_wanted, cut_from_keys, least_split_keys, least_long_split_keys, one_round;
  int64_t combine_warps, combine_blocks, combine_bytes;
};

struct Tile {
  int64_t b, head, first_row, rows, key_begin, key_end, split, first_tile, tiles;
};

// Of so many bytes; -1: the other one of 8 bits.
static DType dtype_of(int64_t bytes) {
  if (bytes == -1) return DType::kFloat8E5M2;
  return bytes == 4 ? DType::kFloat32 : bytes == 2 ? DType::kBFloat16 : DType::kFloat8E4M3;
}

static Problem problem_of(const PrefillCase& call) {
  alignas(16) static char somewhere[16];
  Problem p = {};
  p.batch = call.batch;
  p.kv_heads = call.kv_heads;
  p.group = call.group;
  p.q_heads = call.kv_heads * call.group;
  p.head_dim = call.head_dim;
  p.head_dim_v = call.head_dim_v;
  p.total_q = call.total_q;
  p.max_q_len = call.max_q_len;
  p.q_dtype = dtype_of(call.q_bytes);
  p.q = p.out = somewhere;
  p.q_stride_head = call.head_dim;
  p.out_stride_head = call.head_dim_v;
  if (call.qv) p.qv = {somewhere, true};
  p.cu_seqlens_q = {reinterpret_cast<const int32_t*>(call.cu_seqlens_q), call.cu_seqlens_q != 0};
  p.cache_seqlens = {reinterpret_cast<const int32_t*>(call.cache_seqlens), call.cache_seqlens != 0};
  p.cache_leftpad = {reinterpret_cast<const int32_t*>(call.leftpad), call.leftpad != 0};
  Cache& c = p.cache;
  c.k = c.v = somewhere;
  c.dtype = dtype_of(call.kv_bytes);
  c.page_size = call.page_size;
  c.num_pages = call.batch;
  c.max_pages = 1 << 12;
  c.table_rows = call.batch;
  c.k_stride_head = call.head_dim;
  c.v_stride_head = call.head_dim_v;
  c.k_stride_slot = call.kv_heads * call.head_dim;
  c.v_stride_slot = call.kv_heads * call.head_dim_v;
  c.k_stride_page = call.page_size * c.k_stride_slot;
  c.v_stride_page = call.page_size * c.v_stride_slot;
  if (call.paged) c.block_table = {nullptr, true};
  if (call.packed) c.cu_seqlens_k = {nullptr, true};
  c.block_table_stride = 1;
  p.seqlen_k = call.page_size;
  p.window_left = call.window_left;
  p.window_right = call.window_right;
  p.attention_chunk = call.chunk;
  p.softcap = static_cast<float>(call.softcap);
  p.num_splits = call.num_splits;
  p.deterministic = call.deterministic != 0;
  p.max_kv_len = max_kv_len_of(p, call.max_seqlen_k > 0 ? call.max_seqlen_k : -1);
  return p;
}

static DeviceLimits limits_of(const PrefillCase& call) {
  return {static_cast<int>(call.processors), static_cast<int>(call.shared_per_block),
          static_cast<int>(call.shared_per_processor), static_cast<int>(call.capability),
          static_cast<int>(call.read_rate)};
}

const char* prefill_refusal(const PrefillCase* call) { return prefill_why_not(problem_of(*call), limits_of(*call)); }

void prefill_numbers(const PrefillCase* call, PrefillNumbers* numbers) {
  const PrefillPlan plan = plan_prefill(problem_of(*call), limits_of(*call));
  const PrefillInstance& i = plan.instance;
  *numbers = {i.rows,
              i.tile_rows,
              i.keys,
              i.threads,
              i.shared_bytes,
              plan.all_scores,
              plan.box_rows,
              plan.items,
              plan.blocks,
              plan.l2_keys,
              plan.splits,
              plan.most_splits,
              plan.splits_wanted,
              plan.cut_from_keys,
              plan.least_split_keys,
              plan.least_long_split_keys,
              plan.one_round,
              plan.combine_warps,
              plan.combine_blocks,
              plan.combine_bytes};
}

struct PrefillMmaNumbers {
  int64_t head_dim, keys, widens, rows, threads, shared_bytes, items, blocks, blocks_per_processor, l2_keys;
};

const char* prefill_mma_refusal(const PrefillCase* call) {
  return prefill_mma_why_not(problem_of(*call), limits_of(*call));
}

void prefill_mma_numbers(const PrefillCase* call, PrefillMmaNumbers* numbers) {
  const PrefillMmaPlan plan = plan_prefill_mma(problem_of(*call), limits_of(*call));
  const PrefillMmaInstance& i = plan.instance;
  *numbers = {i.head_dim,  i.keys,      i.widens,
              i.rows,      i.threads,   i.shared_bytes,
              plan.items,  plan.blocks, plan.blocks_per_processor,
              plan.l2_keys};
}

// All tiles in their order: those that blocks begin with, as each of them finds it, and those behind, as the warp of
// one block would find them that takes every ticket. How many there are.
int64_t prefill_order(const PrefillCase* call, Tile* tiles, int64_t most) {
  using Shape = PrefillSizes128;
  const Problem p = problem_of(*call);
  PrefillCall plan = {};
  plan_tables(p, 0, plan);
  plan.tile_rows = FastDivisor(call->tile_rows > 0 ? call->tile_rows : Shape::kRows);
  plan.l2_keys = static_cast<int32_t>(call->l2_keys);
  plan.splits = static_cast<int32_t>(call->splits);
  plan.most_splits = static_cast<int32_t>(pd_max(call->most_splits, call->splits));
  plan.splits_wanted = static_cast<float>(call->splits_wanted);
  plan.splits_per_tile = static_cast<float>(Shape::kKeys) / static_cast<float>(pd_max(call->least_split_keys, 1));
  const int64_t least_long = call->least_long_split_keys > 0 ? call->least_long_split_keys : kSplitKeys;
  plan.most_split_rate = static_cast<float>(Shape::kKeys) / static_cast<float>(least_long);
  plan.cut_from_tiles = static_cast<int32_t>(call->cut_from_tiles);
  plan.blocks_in_grid = static_cast<int32_t>(call->processors);
  plan.one_round = call->one_round != 0;
  int64_t count = 0;
  Work work = {};  // of all lanes
  KnownRequests<352> known, of_other;
  run(0, [&] {
    Scheduler<Shape> scheduler, other;
    scheduler.survey(p, plan, known, work, 0, 1, [] { __syncwarp(); });
    scheduler.start(p, plan, known, 0, work);
    for (int index = 0;; ++index) {
      bool found = false;
      if (index < plan.blocks_in_grid) {
        other.survey(p, plan, of_other, work, 0, 1, [] { __syncwarp(); });
        found = other.start(p, plan, of_other, index, work);
        if (!found && !plan.one_round) found = other.find(p, plan, of_other, index, work);
      } else {
        found = !plan.one_round && scheduler.find(p, plan, known, index, work);
      }
      if (!found) break;
      if (threadIdx.x != 0) continue;
      const Item& item = work.item;
      if (count < most) {
        tiles[count] = {item.b,       work.head,  item.first_row,  item.rows, item.key_begin,
                        item.key_end, work.split, item.first_tile, item.tiles};
      }
      ++count;
    }
  });
  return count;
}

}  // extern "C"
