// How the keys of all requests are dealt to thread blocks.
//
//   item      the rows of one request that are handled together: rows_per_tile consecutive (token, head in group)
//   pairs,
//             the same for every kv_head
//   unit      one tile of tile_keys keys of one (item, kv_head)
//   segment   a run of units of one (item, kv_head) inside one thread block
//
// Balanced: all units form one line (item by item, head by head, key by key) and every block gets a stretch of it. The
// blocks compute the line from the lengths themselves, so nothing depends on what the host knows, and a replayed CUDA
// graph balances the lengths that it finds. Fixed: one block per (item, kv_head, split), where the cuts of a request
// depend on its own length alone.
//
// When a segment is only a part of its (item, kv_head), its block leaves a partial; the last of them to arrive merges
// all, in the order of the keys, so that the sum does not depend on who is last.
#pragma once

#include "device.cuh"

namespace paged_attn {

struct Plan {
  FastDivisor page_size, group, row_tiles, max_splits, kv_heads;
  FastDivisor blocks;  // of the grid
  int32_t rows_per_tile, items;
  int32_t tile_shift;  // log2 of the keys of a unit
  int32_t min_units;   // balanced: a shorter stretch is not worth a block
  int32_t num_splits;  // fixed: parts asked for; 0: one for every split_tiles, at most max_splits
  int32_t split_tiles;
  uint32_t k_page_pieces, k_slot_pieces;  // strides of the cache in pieces of 16 bytes
  uint32_t v_page_pieces, v_slot_pieces;
  bool balanced;
  // Workspace; nothing of it is set before the launch. nullptr when nothing is ever cut.
  float* partial_acc;         // [slots, rows_per_tile, partial_stride]
  float2* partial_ml;         // [slots, rows_per_tile]
  int32_t partial_stride;     // head_dim_v, rounded up to whole float4
  int32_t* arrivals;          // [blocks]: parts that are written, at the block of the first part
  unsigned long long* ready;  // the number of this launch, once arrivals are 0
};

// Never outside of q and out, whatever the entry.
PD_DEVICE int query_begin(const Problem& p, int b) {
  return p.cu_seqlens_q ? min(max(p.cu_seqlens_q[b], 0), static_cast<int>(p.total_q)) : 0;
}

PD_DEVICE int query_length(const Problem& p, int b) {
  return p.cu_seqlens_q ? query_begin(p, b + 1) - query_begin(p, b) : static_cast<int>(p.max_q_len);
}

PD_DEVICE int new_length(const Problem& p, int b) {
  if (!p.append.k) return 0;
  const int32_t* cu = p.append.cu_seqlens_k_new;
  return cu ? cu[b + 1] - cu[b] : static_cast<int>(p.append.seqlen_new);
}

// Keys before the append.
PD_DEVICE int cached_length(const Problem& p, int b) {
  if (p.cache_seqlens) return p.cache_seqlens[b];
  const int32_t* cu = p.cache.cu_seqlens_k;
  return cu ? cu[b + 1] - cu[b] : static_cast<int>(p.seqlen_k);
}

// The row of the table, or of a contiguous cache, that a request reads. A row that does not exist is not looked up.
PD_DEVICE int table_row(const Problem& p, int b) {
  if (!p.cache.cache_batch_idx) return b;
  const int row = p.cache.cache_batch_idx[b];
  return p.cache.block_table ? min(max(row, 0), static_cast<int>(p.cache.table_rows) - 1) : row;
}

struct Item {
  int b;
  int first_row, rows;  // rows in the request's order, and how many of the tile exist
  int q_begin, q_len, kv_len, leftpad;
  int key_begin, key_end;      // keys that some row sees
  int inner_begin, inner_end;  // keys that every row sees
  int first_tile, tiles;       // tiles of the former; at least one when there are rows, so that someone writes
};

PD_DEVICE KvRange row_keys(const Problem& p, const Item& item, int token) {
  return visible_keys(item.kv_len - item.q_len + token, item.kv_len, item.leftpad, static_cast<int>(p.window_left),
                      static_cast<int>(p.window_right), static_cast<int>(p.attention_chunk));
}

PD_DEVICE Item load_item(const Problem& p, const Plan& plan, int index) {
  Item item;
  item.b = plan.row_tiles.divide(index);
  const int tile = index - item.b * static_cast<int>(plan.row_tiles.divisor);
  item.q_begin = query_begin(p, item.b);
  item.q_len = query_length(p, item.b);
  item.kv_len = cached_length(p, item.b) + new_length(p, item.b);
  item.leftpad = p.cache_leftpad ? p.cache_leftpad[item.b] : 0;
  item.first_row = tile * plan.rows_per_tile;
  item.rows = max(0, min(plan.rows_per_tile, item.q_len * static_cast<int>(p.group) - item.first_row));
  // Both ends of what a row sees grow with its token, so the first and the last row bound them all.
  const KvRange first = row_keys(p, item, plan.group.divide(item.first_row));
  const KvRange last = row_keys(p, item, plan.group.divide(item.first_row + max(item.rows, 1) - 1));
  item.key_begin = first.begin;
  item.key_end = last.end;
  item.inner_begin = last.begin;
  item.inner_end = first.end;
  item.first_tile = item.key_begin >> plan.tile_shift;
  const int end_tile = (item.key_end + (1 << plan.tile_shift) - 1) >> plan.tile_shift;
  item.tiles = item.rows == 0 ? 0 : max(1, end_tile - item.first_tile);
  return item;
}

PD_DEVICE int item_splits(const Plan& plan, int tiles) {
  int splits = plan.num_splits > 0 ? plan.num_splits : (tiles - 1) / plan.split_tiles + 1;
  return max(1, min(min(splits, static_cast<int>(plan.max_splits.divisor)), tiles));
}

struct Segment {
  int head;
  int tile, tile_end;  // tiles of keys, counted from the start of the request
  bool first, last;    // of the tiles of (item, head)
};

// Steps through the segments of one thread block. Every warp holds copies, so stepping needs no barrier.
struct Walker {
  int index;                 // of the item
  int item_start, item_end;  // the item's stretch of the line
  int position, end;         // this block's stretch
  Item item;

  PD_MEMBER void enter(const Problem& p, const Plan& plan) {
    item = load_item(p, plan, index);
    item_end = item_start + item.tiles * static_cast<int>(p.kv_heads);
  }

  PD_MEMBER bool next(const Problem& p, const Plan& plan, Segment& segment) {
    if (position >= end) return false;
    while (position >= item_end) {
      item_start = item_end;
      ++index;
      enter(p, plan);
    }
    const int offset = position - item_start;
    segment.head = offset / item.tiles;
    const int tile = offset - segment.head * item.tiles;
    const int count = min(item.tiles - tile, end - position);
    segment.tile = item.first_tile + tile;
    segment.tile_end = segment.tile + count;
    segment.first = tile == 0;
    segment.last = tile + count == item.tiles;
    position += count;
    return true;
  }
};

// Sum over the threads of a block of the values before this thread's; `total` is the sum of all. `scratch` has one
// entry per warp.
PD_DEVICE int exclusive_sum(int value, int* scratch, int& total) {
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarp - 1) scratch[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  return before + sum - value;
}

constexpr int kMaxWarps = 16;

struct ScanScratch {
  int sums[2][kMaxWarps];
  int item_start, index;
  Item item;
};

// Finds this block's stretch and returns the length of all. All threads take part; one round covers the usual batch.
PD_DEVICE int find_stretch(const Problem& p, const Plan& plan, ScanScratch& scratch, Walker& walker) {
  const int threads = blockDim.x;
  Item item;
  int mine, before, round_total, round = 0;
  auto scan_round = [&](int first) {
    const int index = first + threadIdx.x;
    mine = 0;
    if (index < plan.items) {
      item = load_item(p, plan, index);
      mine = item.tiles * static_cast<int>(p.kv_heads);
    }
    // Two sets of sums, so that one barrier a round is enough.
    before = exclusive_sum(mine, scratch.sums[round++ % 2], round_total);
  };

  int total = 0;
#pragma unroll 1
  for (int first = 0; first < plan.items; first += threads) {
    scan_round(first);
    total += round_total;
  }
  const int length = max(plan.min_units, plan.blocks.divide(total + static_cast<int>(plan.blocks.divisor) - 1));
  walker.position = min(total, static_cast<int>(blockIdx.x) * length);
  walker.end = min(total, walker.position + length);
  if (walker.position >= walker.end) return length;

  int base = 0;
#pragma unroll 1
  for (int first = 0;; first += threads) {
    if (plan.items > threads) scan_round(first);
    if (base + before <= walker.position && walker.position < base + before + mine) {
      scratch.index = first + threadIdx.x;
      scratch.item_start = base + before;
      scratch.item = item;
    }
    base += round_total;
    if (base > walker.position) break;
  }
  __syncthreads();
  walker.index = scratch.index;
  walker.item_start = scratch.item_start;
  walker.item = scratch.item;
  walker.item_end = walker.item_start + walker.item.tiles * static_cast<int>(p.kv_heads);
  return length;
}

// This block's (item, head, split) when the cuts are fixed.
PD_DEVICE void find_split(const Problem& p, const Plan& plan, Walker& walker) {
  int unit = plan.max_splits.divide(blockIdx.x);
  int split = blockIdx.x - unit * static_cast<int>(plan.max_splits.divisor);
  walker.index = plan.kv_heads.divide(unit);
  int head = unit - walker.index * static_cast<int>(p.kv_heads);
  walker.item_start = 0;
  walker.position = walker.end = 0;
  walker.enter(p, plan);
  if (walker.item.tiles == 0) return;
  int splits = item_splits(plan, walker.item.tiles);
  int per_split = (walker.item.tiles + splits - 1) / splits;
  const int base = head * walker.item.tiles;
  walker.position = base + min(walker.item.tiles, split * per_split);
  walker.end = base + min(walker.item.tiles, (split + 1) * per_split);
}

// The parts of the (item, kv_head) of a segment.
struct Parts {
  int first_block, count;
  int slot;        // of the partial of this segment
  int first_slot;  // of the partial with the first keys; those of the next blocks are at first_block + 1 and on
};

PD_DEVICE Parts find_parts(const Plan& plan, int length, const Walker& walker, const Segment& segment) {
  Parts parts;
  const int block = blockIdx.x;
  if (plan.balanced) {
    // A block cuts at most two: one that goes on in it and one that goes on after it. The latter has slots of its own.
    const int first_unit = walker.item_start + segment.head * walker.item.tiles;
    parts.first_block = segment.first ? block : first_unit / length;
    parts.count = (first_unit + walker.item.tiles - 1) / length - parts.first_block + 1;
    parts.first_slot = static_cast<int>(plan.blocks.divisor) + parts.first_block;
  } else {
    const int splits = item_splits(plan, walker.item.tiles);
    const int per_split = (walker.item.tiles + splits - 1) / splits;
    parts.first_block = plan.max_splits.divide(block) * static_cast<int>(plan.max_splits.divisor);
    parts.count = (walker.item.tiles + per_split - 1) / per_split;
    parts.first_slot = parts.first_block;
  }
  parts.slot = segment.first ? parts.first_slot : block;
  return parts;
}

// fp8 queries give a bf16 output.
PD_DEVICE DType output_dtype(const Problem& p) {
  return p.q_dtype == DType::kFloat8E4M3 || p.q_dtype == DType::kFloat8E5M2 ? DType::kBFloat16 : p.q_dtype;
}

// Tokens of q past cu_seqlens_q[batch] belong to no request: out 0, lse -inf.
PD_DEVICE void clear_unclaimed(const Problem& p) {
  if (!p.cu_seqlens_q) return;
  for (int64_t token = query_begin(p, static_cast<int>(p.batch)) + blockIdx.x; token < p.total_q; token += gridDim.x) {
    for (int h = 0; h < p.q_heads; ++h) {
      int64_t out = token * p.out_stride_token + h * p.out_stride_head;
      for (int dim = threadIdx.x; dim < p.head_dim_v; dim += blockDim.x)
        store_float(p.out, output_dtype(p), out + dim, 0.f);
      if (p.lse && threadIdx.x == 0) p.lse[h * p.lse_stride_head + token] = -INFINITY;
    }
  }
}

// Place of one row's result.
struct RowTarget {
  int64_t out, lse;  // element offsets
  int q_head;
};

PD_DEVICE RowTarget row_target(const Problem& p, const Plan& plan, const Item& item, int head, int row) {
  int token = plan.group.divide(item.first_row + row);
  RowTarget target;
  target.q_head = head * static_cast<int>(p.group) + item.first_row + row - token * static_cast<int>(p.group);
  const int64_t b = item.b;
  target.out = b * p.out_stride_batch + (item.q_begin + token) * p.out_stride_token + target.q_head * p.out_stride_head;
  target.lse = b * p.lse_stride_batch + target.q_head * p.lse_stride_head + item.q_begin + token;
  return target;
}

// Adds the sink and gives the factor from acc to the output; writes the lse when `write_lse`.
PD_DEVICE float finish_row(const Problem& p, const RowTarget& target, int b, int head, float m, float l,
                           bool write_lse) {
  float factor = 1.f;
  if (p.sinks) pd_add_sink(load_float(p.sinks, p.sinks_dtype, target.q_head), &m, &l, &factor);
  if (write_lse && p.lse) p.lse[target.lse] = pd_lse(m, l);
  const Cache& cache = p.cache;
  float v_descale =
      cache.v_descale ? cache.v_descale[b * cache.v_descale_stride_batch + head * cache.v_descale_stride_head] : 1.f;
  return factor * pd_normalizer(l) * v_descale;
}

// The factor of q.k: softmax scale and the scales of quantised q and k.
PD_DEVICE float score_scale(const Problem& p, int b, int head) {
  const Cache& cache = p.cache;
  float scale = p.scale;
  if (cache.k_descale) scale *= cache.k_descale[b * cache.k_descale_stride_batch + head * cache.k_descale_stride_head];
  if (p.q_descale) scale *= p.q_descale[b * p.q_descale_stride_batch + head * p.q_descale_stride_head];
  return scale;
}

PD_DEVICE float row_slope(const Problem& p, int b, int q_head) {
  return p.alibi_slopes ? p.alibi_slopes[b * p.alibi_stride_batch + q_head] : 0.f;
}

}  // namespace paged_attn
