// How the keys of all requests are dealt to thread blocks.
//
//   item      the rows of one request that are handled together: rows_per_tile consecutive (token, head in group)
//   pairs,
//             the same for every kv_head
//   unit      one tile of tile_keys keys of one (item, kv_head)
//   segment   a run of units of one (item, kv_head) inside one thread block
//
// Balanced: all units form one line (item by item, head by head, key by key), which is cut into stretches, one for a
// block. The blocks compute the line from the lengths themselves, so nothing depends on what the host knows, and a
// replayed CUDA graph balances the lengths that it finds. Blocks go down the line: the one with the keys before a cut
// starts after the one with the keys behind it.
// Even: the same where there are blocks for every (item, kv_head) and the lengths hardly differ, but each has as many
// blocks of its own: fewer cuts, and no block serves two.
// Fixed: one block per (item, kv_head, split), where the cuts of a request depend on its own length alone.
//
// When a segment is only a part of its (item, kv_head), its block leaves a partial; the block with the first keys
// merges all, in the order of the keys, so that the sum does not depend on who is last.
#pragma once

#include "device.cuh"

namespace paged_attn {

struct Plan {
  FastDivisor page_size, group, row_tiles, max_splits, kv_heads, chunk;
  FastDivisor blocks;       // of the grid
  FastDivisor blocks_each;  // of an (item, kv_head) when dealt evenly; divisor 0: not enough for all
  int32_t rows_per_tile, items;
  int32_t tile_shift;  // log2 of the keys of a unit
  int32_t min_units;   // balanced: a shorter stretch is not worth a block
  int32_t num_splits;  // fixed: parts asked for; 0: one for every split_tiles, at most max_splits
  int32_t split_tiles;
  uint32_t k_page_pieces, k_slot_pieces, k_head_pieces;  // strides of the cache in pieces of 16 bytes
  uint32_t v_page_pieces, v_slot_pieces, v_head_pieces;
  int32_t max_pages, table_stride;  // of the block table
  bool balanced;
  // The common case, in which an item is a request and its length says which keys it sees: pages, no table rows, left
  // padding, windows, chunks or lists of positions.
  bool plain;
  int32_t new_keys, hidden_keys;  // plain: keys that an append has added; keys that the first token does not see
  // Workspace; nothing of it is set before the launch. nullptr when nothing is ever cut.
  uint4* partials;        // [blocks, rows_per_tile, 3, partial_quads]
  int32_t partial_quads;  // of head_dim_v, rounded up
};

constexpr int kMaxBalancedItems = 1024;

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

// The line of the block table that this thread sends on its way into L2 while the lengths are read; nullptr when there
// is none, or when most of the table may be unused.
PD_DEVICE const char* table_line(const Cache& cache) {
  constexpr int64_t kLine = 128, kMostBytes = 1 << 20;
  if (!cache.block_table) return nullptr;
  const int64_t bytes = ((cache.table_rows - 1) * cache.block_table_stride + cache.max_pages) * sizeof(int32_t);
  const int64_t offset = (static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x) * kLine;
  if (bytes > kMostBytes || offset >= bytes) return nullptr;
  return reinterpret_cast<const char*>(cache.block_table) + offset;
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

PD_DEVICE KvRange row_keys(const Problem& p, const Plan& plan, const Item& item, int token) {
  const int q_pos = item.kv_len - item.q_len + token, chunk = static_cast<int>(p.attention_chunk);
  // Before the first key there are only chunks without keys.
  const int chunk_begin = q_pos < 0 ? -chunk : plan.chunk.divide(q_pos) * chunk;
  return visible_keys(q_pos, item.kv_len, item.leftpad, static_cast<int>(p.window_left),
                      static_cast<int>(p.window_right), chunk, chunk_begin);
}

PD_DEVICE int plain_length(const Problem& p, const Plan& plan, int b) {
  return max(p.cache_seqlens[b] + plan.new_keys, 0);
}

// At least one, so that someone writes the rows.
PD_DEVICE int plain_tiles(const Plan& plan, int kv_len) {
  return max((kv_len + (1 << plan.tile_shift) - 1) >> plan.tile_shift, 1);
}

PD_DEVICE Item load_item(const Problem& p, const Plan& plan, int index) {
  Item item = {};
  if (plan.plain) {
    item.b = index;
    item.q_len = static_cast<int>(p.max_q_len);
    item.rows = item.q_len * static_cast<int>(p.group);
    item.kv_len = item.key_end = plain_length(p, plan, index);
    item.inner_end = max(item.kv_len - plan.hidden_keys, 0);
    item.tiles = plain_tiles(plan, item.kv_len);
    return item;
  }
  item.b = plan.row_tiles.divide(index);
  const int tile = index - item.b * static_cast<int>(plan.row_tiles.divisor);
  item.q_begin = query_begin(p, item.b);
  item.q_len = query_length(p, item.b);
  item.kv_len = cached_length(p, item.b) + new_length(p, item.b);
  item.leftpad = p.cache_leftpad ? p.cache_leftpad[item.b] : 0;
  item.first_row = tile * plan.rows_per_tile;
  item.rows = max(0, min(plan.rows_per_tile, item.q_len * static_cast<int>(p.group) - item.first_row));
  // Both ends of what a row sees grow with its token, so the first and the last row bound them all.
  const KvRange first = row_keys(p, plan, item, plan.group.divide(item.first_row));
  const KvRange last = row_keys(p, plan, item, plan.group.divide(item.first_row + max(item.rows, 1) - 1));
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
  int index;          // of the item
  int head, tile;     // next unit, tile counted from the item's first
  int position, end;  // the same on the line, and the end of this block's stretch
  int length;         // of every stretch
  bool loaded;        // item is that of index
  bool even;          // the stretch, counted from the item's first tile, is all there is, even when it is empty
  Item item;

  PD_MEMBER bool next(const Problem& p, const Plan& plan, Segment& segment) {
    if (position >= end) return false;
    while (true) {
      if (!loaded) item = load_item(p, plan, index);
      loaded = true;
      if (tile < item.tiles) break;
      if (even) return false;
      tile = 0;
      if (++head < p.kv_heads) continue;
      head = 0;
      ++index;
      loaded = false;
    }
    const int count = min(item.tiles - tile, end - position);
    segment.head = head;
    segment.tile = item.first_tile + tile;
    segment.tile_end = segment.tile + count;
    segment.first = tile == 0;
    segment.last = tile + count == item.tiles;
    tile += count;
    position += count;
    return true;
  }
};

// Tiles of all items of a range, and the most of one.
struct TileCount {
  int sum = 0, most = 0;

  PD_MEMBER void add(int tiles) {
    sum += tiles;
    most = max(most, tiles);
  }
};

PD_DEVICE TileCount count_tiles(const Problem& p, const Plan& plan, int begin, int end) {
  TileCount count;
  if (plan.plain) {
    constexpr int kBatch = 4;
#pragma unroll 1
    for (; begin < end; begin += kBatch) {
      int lengths[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) lengths[j] = begin + j < end ? plain_length(p, plan, begin + j) : 0;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (begin + j < end) count.add(plain_tiles(plan, lengths[j]));
      }
    }
  } else {
#pragma unroll 1
    for (int index = begin; index < end; ++index) count.add(load_item(p, plan, index).tiles);
  }
  return count;
}

// What of even dealing does not depend on lengths: which (item, kv_head) this block serves and, in walker.tile, as
// which of its blocks, counted from the first keys.
PD_DEVICE void expect_even_stretch(const Problem& p, const Plan& plan, Walker& walker) {
  const int each = static_cast<int>(plan.blocks_each.divisor), heads = static_cast<int>(p.kv_heads);
  const int place = plan.blocks_each.divide(static_cast<int>(blockIdx.x)), unit = plan.items * heads - 1 - place;
  walker.tile = (place + 1) * each - 1 - static_cast<int>(blockIdx.x);
  walker.index = plan.kv_heads.divide(max(unit, 0));
  walker.head = unit - walker.index * heads;
}

// `most`: tiles of the longest item. An item with fewer has shorter stretches at its end.
PD_DEVICE void deal_evenly(const Plan& plan, int most, Walker& walker) {
  const int each = static_cast<int>(plan.blocks_each.divisor);
  walker.even = true;
  walker.length = max(plan.min_units, plan.blocks_each.divide(most + each - 1));
  walker.tile = walker.position = walker.tile * walker.length;
  walker.end = walker.head < 0 ? 0 : min(most, walker.position + walker.length);
}

// Finds this block's stretch. Every warp does so by itself, without a barrier: the lanes share the items out in runs
// and find the run in which the stretch begins, then the item in it.
PD_DEVICE void find_stretch(const Problem& p, const Plan& plan, Walker& walker) {
  static_assert(kMaxBalancedItems <= kWarp * kWarp, "a run has an item per lane at most");
  const int lane = threadIdx.x % kWarp, heads = static_cast<int>(p.kv_heads);
  int first = 0, before = 0;  // first item of the runs, units before it
  int owner, tiles, run = (plan.items + kWarp - 1) / kWarp;
  walker.length = 0;
  walker.loaded = walker.even = false;
#pragma unroll 1
  while (true) {
    const int run_begin = first + lane * run;
    const TileCount count = count_tiles(p, plan, run_begin, min(plan.items, run_begin + run));
    tiles = count.sum;
    if (walker.length == 0 && plan.blocks_each.divisor > 0) {
      const int most = __reduce_max_sync(~0u, count.most), all = __reduce_add_sync(~0u, tiles);
      if (most * plan.items - all <= all / 16) {
        deal_evenly(plan, most, walker);
        return;
      }
    }
    int sum = tiles * heads;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (walker.length == 0) {
      const int total = __shfl_sync(~0u, sum, kWarp - 1), blocks = static_cast<int>(plan.blocks.divisor);
      walker.length = max(plan.min_units, plan.blocks.divide(total + blocks - 1));
      walker.end = total - static_cast<int>(blockIdx.x) * walker.length;
      walker.position = max(0, walker.end - walker.length);
      if (walker.position >= walker.end) return;
    }
    owner = __popc(__ballot_sync(~0u, before + sum <= walker.position));
    before += __shfl_sync(~0u, sum - tiles * heads, owner);
    first += owner * run;
    if (run == 1) break;
    run = 1;
  }
  walker.index = first;
  divide_small(walker.position - before, __shfl_sync(~0u, tiles, owner), walker.head, walker.tile);
}

// This block's (item, head, split) when the cuts are fixed.
PD_DEVICE void find_split(const Problem& p, const Plan& plan, Walker& walker) {
  const int unit = plan.max_splits.divide(blockIdx.x);
  const int split = (unit + 1) * static_cast<int>(plan.max_splits.divisor) - 1 - static_cast<int>(blockIdx.x);
  walker.index = plan.kv_heads.divide(unit);
  walker.head = unit - walker.index * static_cast<int>(p.kv_heads);
  walker.loaded = walker.even = false;
  walker.tile = walker.position = walker.end = 0;
  const int tiles = count_tiles(p, plan, walker.index, walker.index + 1).sum;
  if (tiles == 0) return;
  const int splits = item_splits(plan, tiles);
  walker.length = (tiles + splits - 1) / splits;
  walker.tile = walker.position = min(tiles, split * walker.length);
  walker.end = min(tiles, walker.position + walker.length);
}

// How many parts of its (item, kv_head) are behind a segment: the stretches of the blocks before this one, which cover
// the rest. The walker has just stepped over the segment.
PD_DEVICE int parts_behind(const Walker& walker, const Segment& segment) {
  return segment.last ? 0 : (walker.item.tiles - walker.tile + walker.length - 1) / walker.length;
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
