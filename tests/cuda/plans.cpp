// The plans of the CUDA routes and the dealing of work to thread blocks, compiled for the host: what every block of a
// grid would do. tests/test_cuda_plans.py calls it through ctypes.
#include <string.h>

#include "balance.cuh"
#include "decode/plan.h"
#include "fallback/plan.h"
#include "float32/plan.h"
#include "limits.h"
#include "prefill/sizes.h"

using namespace paged_attn;

extern "C" {

// Fields are given by name from Python, all of 64 bits. An address of 0 leaves a tensor out.
struct Call {
  int64_t processors, shared_per_block, shared_per_processor;
  int64_t batch, kv_heads, group, head_dim, kv_bytes, total_q, max_q_len;
  int64_t page_size, max_pages, window_left, window_right, chunk, num_splits, deterministic, append, max_seqlen_k;
  int64_t cu_seqlens_q, cache_seqlens, leftpad;
  int64_t capability;  // 90: warpgroups multiply
};

struct PlanNumbers {
  int64_t route;  // 0 decode_basic, 1 decode, 2 fallback, 3 float32
  int64_t blocks, warps, blocks_per_processor, shared_bytes, workspace_bytes, balanced, rows_per_tile, tile_keys,
      splits, halves, wgmma;
};

// A segment: what a block does at a time.
struct Share {
  int64_t block, b, head, first_row, rows, tile, tile_end, first, partials, lines, key_begin, key_end;
};

struct Sizes {
  int64_t rows, tile_keys, stages, warps, blocks, most_warps, stage_bytes, warp_bytes, block_bytes;
};

struct PrefillNumbers {
  int64_t rows, keys, threads, consumers, key_stages, value_stages, query_stages;
  int64_t producer_registers, consumer_registers, shared_bytes;
};

static Problem problem_of(const Call& call) {
  alignas(16) static char somewhere[16];
  Problem p = {};
  p.batch = call.batch;
  p.kv_heads = call.kv_heads;
  p.group = call.group;
  p.q_heads = call.kv_heads * call.group;
  p.head_dim = p.head_dim_v = call.head_dim;
  p.total_q = call.total_q;
  p.max_q_len = call.max_q_len;
  p.q_dtype = call.kv_bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
  p.q = p.out = somewhere;
  p.cu_seqlens_q = {reinterpret_cast<const int32_t*>(call.cu_seqlens_q), call.cu_seqlens_q != 0};
  p.cache_seqlens = {reinterpret_cast<const int32_t*>(call.cache_seqlens), call.cache_seqlens != 0};
  p.cache_leftpad = {reinterpret_cast<const int32_t*>(call.leftpad), call.leftpad != 0};
  Cache& c = p.cache;
  c.k = c.v = somewhere;
  c.dtype = call.kv_bytes == 4 ? DType::kFloat32 : call.kv_bytes == 2 ? DType::kBFloat16 : DType::kFloat8E4M3;
  c.num_pages = call.batch * call.max_pages;
  c.page_size = call.page_size;
  c.k_stride_head = c.v_stride_head = call.head_dim;
  c.k_stride_slot = c.v_stride_slot = call.kv_heads * call.head_dim;
  c.k_stride_page = c.v_stride_page = call.page_size * c.k_stride_slot;
  c.block_table = {nullptr, true};
  c.block_table_stride = c.max_pages = call.max_pages;
  c.table_rows = call.batch;
  if (call.append > 0) {
    p.append.k = p.append.v = {somewhere, true};
    p.append.seqlen_new = call.append;
    p.append.total_new = call.append * call.batch;
  }
  p.window_left = call.window_left;
  p.window_right = call.window_right;
  p.attention_chunk = call.chunk;
  p.num_splits = call.num_splits;
  p.deterministic = call.deterministic != 0;
  p.max_kv_len = max_kv_len_of(p, call.max_seqlen_k > 0 ? call.max_seqlen_k : -1);
  return p;
}

// Follows every block; returns how many shares there are, of which `most` are stored.
static int64_t follow(const Problem& p, const Plan& plan, int64_t blocks, bool last_first, Share* shares,
                      int64_t most) {
  int64_t count = 0;
  gridDim.x = static_cast<int>(blocks);
  for (int block = 0; block < blocks; ++block) {
    run(block, [&] {
      Walker walker = {};
      Dealing dealing = {};
      if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, walker);
      if (plan.balanced) {
        find_stretch<true>(p, plan, walker, dealing);
      } else if (last_first) {
        find_split<true>(p, plan, walker, dealing);
      } else {
        find_split(p, plan, walker, dealing);
      }
      Segment segment;
      Item item;
      while (walker.next(p, plan, dealing, segment, item)) {
        if (threadIdx.x != 0) continue;
        if (count < most) {
          shares[count] = {block,
                           item.b,
                           segment.head,
                           item.first_row,
                           item.rows,
                           segment.tile,
                           segment.tile_end,
                           segment.first,
                           partials_behind(item, segment, dealing),
                           dealing.lines,
                           item.key_begin,
                           item.key_end};
        }
        ++count;
      }
    });
  }
  return count;
}

int64_t make_plan(const Call* call, PlanNumbers* numbers, Share* shares, int64_t most) {
  Problem p = problem_of(*call);
  const DeviceLimits limits = {static_cast<int>(call->processors), static_cast<int>(call->shared_per_block),
                               static_cast<int>(call->shared_per_processor), static_cast<int>(call->capability)};
  memset(numbers, 0, sizeof(*numbers));
  Plan work;
  const bool float32 = *float32_why_not(p, limits) == '\0';
  if (float32) {
    const Float32Plan plan = plan_float32(p, limits);
    work = plan.work;
    *numbers = {3,
                plan.blocks,
                plan.instance.threads / 32,
                plan.blocks_per_processor,
                plan.instance.shared_bytes,
                plan.workspace_bytes,
                0,
                work.rows_per_tile,
                int64_t{1} << work.tile_shift,
                work.max_splits.divisor};
  } else if (*decode_why_not(p, limits) == '\0') {
    const bool basic = *decode_basic_why_not(p, limits) == '\0';
    const DecodePlan plan = basic ? plan_decode_basic(p, limits) : plan_decode(p, limits);
    work = plan.work;
    *numbers = {basic ? 0 : 1,
                plan.blocks,
                plan.warps,
                plan.blocks_per_processor,
                plan.shared_bytes + plan.instance.block_bytes,
                plan.workspace_bytes,
                work.balanced,
                work.rows_per_tile,
                int64_t{1} << work.tile_shift,
                work.max_splits.divisor,
                plan.halves(),
                plan.instance.wgmma};
    if (plan.halves()) p = in_halves(p);
  } else {
    const FallbackPlan plan = plan_fallback(p, limits);
    work = plan.work;
    *numbers = {2,
                plan.blocks,
                plan.instance.warps,
                plan.blocks_per_processor,
                plan.instance.shared_bytes,
                plan.workspace_bytes,
                work.balanced,
                work.rows_per_tile,
                int64_t{1} << work.tile_shift,
                work.max_splits.divisor};
  }
  blockDim.x = static_cast<int>(numbers->warps) * 32;
  return most > 0 ? follow(p, work, numbers->blocks, float32, shares, most) : 0;
}

// Of an instance of the decode kernel, for the pictures.
void decode_sizes(int kv_bytes, int head_dim, int row_tiles, Sizes* sizes) {
  auto take = [&](auto of) {
    using Of = decltype(of);
    *sizes = {Of::kRows,      Of::kTileKeys,   Of::kStages,    Of::kWarps,     Of::kBlocks,
              Of::kMostWarps, Of::kStageBytes, Of::kWarpBytes, Of::kBlockBytes};
  };
  const bool one = row_tiles == 1;
  if (kv_bytes == 1) {
    if (head_dim == 64) return one ? take(DecodeSizes<1, 64, 1>()) : take(DecodeSizes<1, 64, 2>());
    if (head_dim == 128) return one ? take(DecodeSizes<1, 128, 1>()) : take(DecodeSizes<1, 128, 2>());
    return take(DecodeSizes<1, 256, 1>());
  }
  if (head_dim == 64) return one ? take(DecodeSizes<2, 64, 1>()) : take(DecodeSizes<2, 64, 2>());
  if (head_dim == 128) return one ? take(DecodeSizes<2, 128, 1>()) : take(DecodeSizes<2, 128, 2>());
  take(DecodeSizes<2, 256, 1>());
}

void prefill_sizes(int head_dim, int head_dim_v, PrefillNumbers* sizes) {
  auto take = [&](auto of) {
    using Of = decltype(of);
    *sizes = {Of::kRows,        Of::kKeys,        Of::kThreads,           Of::kConsumers,         Of::kKeyStages,
              Of::kValueStages, Of::kQueryStages, Of::kProducerRegisters, Of::kConsumerRegisters, Of::kSharedBytes};
  };
  if (head_dim == 64) return take(PrefillSizes64());
  if (head_dim == 96) return take(PrefillSizes96());
  if (head_dim == 128) return take(PrefillSizes128());
  if (head_dim == 192 && head_dim_v == 128) return take(PrefillSizes192x128());
  if (head_dim == 192) return take(PrefillSizes192());
  take(PrefillSizes256());
}

}  // extern "C"
