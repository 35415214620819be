// How the keys of all requests are dealt to thread blocks.
//
//   item      rows of one request that are handled together, rows_per_tile consecutive (token, head in group); the same
//             for every kv_head
//   unit      one tile of tile_keys keys of one (item, kv_head)
//   segment   a run of units of one (item, kv_head) inside one thread block
//
// Balanced: all units form one line (item by item, head by head, key by key), which is cut into stretches, one for a
// block. To end one (item, kv_head) and begin another takes the time of some units, which stand before it. The blocks
// compute the line from the lengths themselves, so nothing depends on what the host knows, and a replayed CUDA graph
// balances the lengths that it finds. Blocks go down the line: the one with the keys before a cut starts after the one
// with the keys behind it.
// Even: where the lengths hardly differ, all (item, kv_head) count as many units as the longest. With blocks for every
// one, each has as many of its own: fewer cuts, and no block serves two. With more of them than blocks, every block
// gets as many whole ones, and only the remainder is a line that is cut. That line comes first, so that parts are
// merged while the memory is busy, and then neighbouring blocks read the heads of the same keys at the same time.
// Fixed: one block per (item, kv_head, split), where the cuts of a request depend on its own length alone.
//
// When a segment is only a part of its (item, kv_head), its block leaves a partial; the block with the first keys
// merges all, where there are very many after some others merged a few each, in an order that does not depend on who is
// last.
#pragma once

#include "plan.h"
#include "ptx.cuh"

namespace paged_attn {

// Never outside of q and out, whatever the entry.
PD_DEVICE int query_begin(const Problem& p, int b) {
  return p.cu_seqlens_q ? min(max(p.cu_seqlens_q[b], 0), static_cast<int>(p.total_q)) : 0;
}

PD_DEVICE int query_length(const Problem& p, int b) {
  return p.cu_seqlens_q ? query_begin(p, b + 1) - query_begin(p, b) : static_cast<int>(p.max_q_len);
}

PD_DEVICE int new_length(const Problem& p, int b) {
  if (!p.append.k) return 0;
  const Optional<const int32_t>& cu = p.append.cu_seqlens_k_new;
  return cu ? cu[b + 1] - cu[b] : static_cast<int>(p.append.seqlen_new);
}

// Keys before the append.
PD_DEVICE int cached_length(const Problem& p, int b) {
  if (p.cache_seqlens) return p.cache_seqlens[b];
  const Optional<const int32_t>& cu = p.cache.cu_seqlens_k;
  return cu ? cu[b + 1] - cu[b] : static_cast<int>(p.seqlen_k);
}

// What a thread sends on its way into L2 while the lengths are read: a line of a tensor most of which is needed.
PD_DEVICE void prefetch_line(const void* tensor, int lines) {
  const int line = threadIdx.x * gridDim.x + blockIdx.x;
  if (line < lines) prefetch_l2(static_cast<const char*>(tensor) + static_cast<int64_t>(line) * kLine);
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
  const auto chunk_of = [&](int x) { return x < 0 ? -1 : static_cast<int>(plan.chunk.divide(x)); };
  return visible_keys(item.kv_len - item.q_len + token, item.kv_len, item.leftpad, static_cast<int>(p.window_left),
                      static_cast<int>(p.window_right), static_cast<int>(p.attention_chunk), chunk_of);
}

PD_DEVICE int basic_length(const Problem& p, const Plan& plan, int b) {
  return min(max(p.cache_seqlens[b] + plan.new_keys, 0), plan.max_keys);
}

// At least one, so that someone writes the rows.
PD_DEVICE int basic_tiles(const Plan& plan, int kv_len) {
  return max((kv_len + (1 << plan.tile_shift) - 1) >> plan.tile_shift, 1);
}

// Where the tiles of rows of a request begin among packed ones. The rows of all requests stand one behind the other,
// and each request ends with a tile of its own: floor(x + y) + 1 >= floor(x) + ceil(y), so the tiles of none overlap
// those of the next.
PD_DEVICE int packed_begin(const Problem& p, const Plan& plan, int b) {
  return (query_begin(p, b) * static_cast<int>(p.group) >> plan.row_shift) + b;
}

// The request whose tiles hold the packed tile `index`: the last that begins at it or before it.
PD_DEVICE int find_packed(const Problem& p, const Plan& plan, int index) {
  int low = 0, high = static_cast<int>(p.batch);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (packed_begin(p, plan, middle) <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

PD_DEVICE Item load_item(const Problem& p, const Plan& plan, int index) {
  Item item = {};
  if (plan.basic) {
    item.b = index;
    item.q_len = static_cast<int>(p.max_q_len);
    item.rows = item.q_len * static_cast<int>(p.group);
    item.kv_len = item.key_end = basic_length(p, plan, index);
    item.inner_end = max(item.kv_len - plan.hidden_keys, 0);
    item.tiles = basic_tiles(plan, item.kv_len);
    return item;
  }
  int tile, first_tile = 0;
  if (index < plan.direct_items) {
    item.b = plan.row_tiles.divide(index);
    tile = index - item.b * static_cast<int>(plan.row_tiles.divisor);
  } else {
    item.b = find_packed(p, plan, index - plan.direct_items);
    tile = index - plan.direct_items - packed_begin(p, plan, item.b);
    first_tile = static_cast<int>(plan.row_tiles.divisor);  // those before it are direct
  }
  item.q_begin = query_begin(p, item.b);
  item.q_len = query_length(p, item.b);
  const int rows = item.q_len * static_cast<int>(p.group);
  // Bounded, so that the units of all items can be counted whatever the lengths.
  item.kv_len = min(cached_length(p, item.b) + new_length(p, item.b), plan.max_keys);
  item.leftpad = p.cache_leftpad ? p.cache_leftpad[item.b] : 0;
  const bool exists = tile >= first_tile && tile <= (rows - 1) >> plan.row_shift;
  item.first_row = exists ? tile << plan.row_shift : 0;
  item.rows = exists ? min(1 << plan.row_shift, rows - item.first_row) : 0;
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
  bool first;          // of the tiles of (item, head)
};

// The same for all segments of a thread block.
struct Dealing {
  int length;  // of every stretch
  int most;    // units that every (item, kv_head) counts, those past its end being empty; 0: its own, and its cost
  int surplus_rounds;  // see Plan; 0 where no request has more rows than it was given tiles for
};

// Steps through the segments of one thread block. Every warp holds copies, so stepping needs no barrier.
struct Walker {
  int pair, unit;   // the next unit, counted from the first of its (item, kv_head)
  int left;         // units of the stretch
  int whole_pairs;  // to come after it; below 0, rounds of surplus tiles that are done

  // False at the end.
  PD_MEMBER bool next(const Problem& p, const Plan& plan, const Dealing& dealing, Segment& segment, Item& item) {
    const int heads = static_cast<int>(p.kv_heads);
    while (true) {
      if (left == 0) {
        if (whole_pairs == -dealing.surplus_rounds) return false;
        pair = plan.items * heads - whole_pairs * static_cast<int>(plan.blocks.divisor) + static_cast<int>(blockIdx.x);
        unit = 0;
        left = dealing.most;
        --whole_pairs;
      }
      const int index = plan.kv_heads.divide(pair);
      segment.head = pair - index * heads;
      item = load_item(p, plan, index);
      int cost = dealing.most > 0 ? 0 : plan.pair_cost;
      int units = dealing.most > 0 ? dealing.most : item.tiles + cost;
      if (plan.surplus_rounds > 0 && index >= plan.items) {
        // A surplus tile of rows is not cut.
        cost = 0;
        units = left = item.tiles;
      }
      const int count = min(units - unit, left), begin = max(unit - cost, 0);
      const int tile_end = min(unit + count - cost, item.tiles);
      unit += count;
      left -= count;
      if (unit == units) {
        unit = 0;
        ++pair;
      }
      if (begin >= tile_end) continue;
      segment.tile = item.first_tile + begin;
      segment.tile_end = item.first_tile + tile_end;
      segment.first = begin == 0;
      return true;
    }
  }
};

// Tiles of all items of a range, and the most of one.
struct TileCount {
  int sum = 0, most = 0;
  bool surplus = false;  // some request has more rows than it was given tiles for

  PD_MEMBER void add(int tiles) {
    sum += tiles;
    most = max(most, tiles);
  }
};

PD_DEVICE TileCount count_tiles(const Problem& p, const Plan& plan, int begin, int end) {
  TileCount count;
  if (plan.basic) {
    constexpr int kBatch = 4;
#pragma unroll 1
    for (; begin < end; begin += kBatch) {
      int lengths[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) lengths[j] = begin + j < end ? basic_length(p, plan, begin + j) : 0;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (begin + j < end) count.add(basic_tiles(plan, lengths[j]));
      }
    }
  } else {
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
      const Item item = load_item(p, plan, index);
      count.add(item.tiles);
      const int given = static_cast<int>(plan.row_tiles.divisor) << plan.row_shift;
      if (plan.surplus_rounds > 0) count.surplus |= item.q_len * static_cast<int>(p.group) > given;
    }
  }
  return count;
}

// Cuts a line of `total` units from its end. Returns where the stretch of this block begins.
PD_DEVICE int deal_line(const Plan& plan, int total, Walker& walker, Dealing& dealing) {
  dealing.length = max(plan.min_units, plan.blocks.divide(total + static_cast<int>(plan.blocks.divisor) - 1));
  const int end = total - static_cast<int>(blockIdx.x) * dealing.length, position = max(0, end - dealing.length);
  walker.left = max(0, end - position);
  return position;
}

// What of even dealing does not depend on lengths: which (item, kv_head) this block serves, a negative one for none,
// and in walker.unit, as which of its blocks, counted from the first keys.
PD_DEVICE void expect_even_stretch(const Problem& p, const Plan& plan, Walker& walker) {
  const int each = static_cast<int>(plan.blocks_each.divisor), block = static_cast<int>(blockIdx.x);
  const int place = plan.blocks_each.divide(block);
  walker.pair = plan.items * static_cast<int>(p.kv_heads) - 1 - place;
  walker.unit = (place + 1) * each - 1 - block;
}

// `most`: tiles of the longest item.
PD_DEVICE void deal_evenly(const Plan& plan, int most, Walker& walker, Dealing& dealing) {
  const int each = static_cast<int>(plan.blocks_each.divisor);
  dealing.most = most;
  if (each > 0) {
    dealing.length = max(plan.min_units, plan.blocks_each.divide(most + each - 1));
    walker.unit *= dealing.length;
    walker.left = walker.pair < 0 ? 0 : max(0, min(most - walker.unit, dealing.length));
    return;
  }
  const int total = plan.line_pairs * most;
  walker.whole_pairs = plan.whole_pairs;
  const int position = deal_line(plan, total, walker, dealing);
  divide_small(position, most, walker.pair, walker.unit);
}

// Finds this block's stretch. Every warp does so by itself, without a barrier: the lanes share the items out in runs
// and find the run in which the stretch begins, then the item in it.
PD_DEVICE void find_stretch(const Problem& p, const Plan& plan, Walker& walker, Dealing& dealing) {
  static_assert(kMaxBalancedItems <= kWarp * kWarp, "a run has an item per lane at most");
  const int lane = threadIdx.x % kWarp, heads = static_cast<int>(p.kv_heads);
  int first = 0, before = 0;  // first item of the runs, units before it
  int owner, units, position = 0, run = (plan.items + kWarp - 1) / kWarp;
#pragma unroll 1
  while (true) {
    const int run_begin = first + lane * run, run_end = min(plan.items, run_begin + run);
    const TileCount count = count_tiles(p, plan, run_begin, run_end);
    if (plan.surplus_rounds > 0 && __any_sync(~0u, count.surplus)) dealing.surplus_rounds = plan.surplus_rounds;
    if (dealing.length == 0 && (plan.blocks_each.divisor > 0 || plan.whole_pairs > 0)) {
      const int most = __reduce_max_sync(~0u, count.most), all = __reduce_add_sync(~0u, count.sum);
      if (most * plan.items - all <= all / 16) {
        deal_evenly(plan, most, walker, dealing);
        return;
      }
    }
    units = count.sum + plan.pair_cost * max(run_end - run_begin, 0);
    int sum = units * heads;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (dealing.length == 0) {
      position = deal_line(plan, __shfl_sync(~0u, sum, kWarp - 1), walker, dealing);
      if (walker.left == 0) return;
    }
    owner = __popc(__ballot_sync(~0u, before + sum <= position));
    before += __shfl_sync(~0u, sum - units * heads, owner);
    first += owner * run;
    if (run == 1) break;
    run = 1;
  }
  int head;
  divide_small(position - before, __shfl_sync(~0u, units, owner), head, walker.unit);
  walker.pair = first * heads + head;
}

// This block's (item, head, split) when the cuts are fixed.
PD_DEVICE void find_split(const Problem& p, const Plan& plan, Walker& walker, Dealing& dealing) {
  if (plan.items == 0) return;
  walker.pair = plan.max_splits.divide(blockIdx.x);
  const int split = (walker.pair + 1) * static_cast<int>(plan.max_splits.divisor) - 1 - static_cast<int>(blockIdx.x);
  const int index = plan.kv_heads.divide(walker.pair), tiles = count_tiles(p, plan, index, index + 1).sum;
  if (tiles == 0) return;
  const int splits = item_splits(plan, tiles);
  dealing.most = tiles;
  dealing.length = (tiles + splits - 1) / splits;
  walker.unit = min(tiles, split * dealing.length);
  walker.left = min(tiles - walker.unit, dealing.length);
}

// How many parts of its (item, kv_head) are behind a segment: the stretches of the blocks before this one, which cover
// the rest.
PD_DEVICE int parts_behind(const Item& item, const Segment& segment, const Dealing& dealing) {
  const int rest = item.first_tile + item.tiles - segment.tile_end;
  return rest == 0 ? 0 : (rest - 1) / dealing.length + 1;
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

// Of a (batch, kv_heads) table that may be absent.
PD_DEVICE float descale_of(const Optional<const float>& table, int64_t stride_batch, int64_t stride_head, int b,
                           int head) {
  return table ? table[b * stride_batch + head * stride_head] : 1.f;
}

PD_DEVICE float k_descale_of(const Cache& c, int b, int head) {
  return descale_of(c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head, b, head);
}

PD_DEVICE float v_descale_of(const Cache& c, int b, int head) {
  return descale_of(c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head, b, head);
}

// Adds the sink and gives the factor from acc to the output; writes the lse when `write_lse`.
PD_DEVICE float finish_row(const Problem& p, const RowTarget& target, int b, int head, float m, float l,
                           bool write_lse) {
  float factor = 1.f;
  if (p.sinks) pd_add_sink(load_float(p.sinks, p.sinks_dtype, target.q_head), &m, &l, &factor);
  if (write_lse && p.lse) p.lse[target.lse] = pd_lse(m, l);
  return factor * pd_normalizer(l) * v_descale_of(p.cache, b, head);
}

// The factor of q: softmax scale and the scale of quantised q.
PD_DEVICE float query_scale(const Problem& p, int b, int head) {
  return p.scale * descale_of(p.q_descale, p.q_descale_stride_batch, p.q_descale_stride_head, b, head);
}

// The factor of q.k.
PD_DEVICE float score_scale(const Problem& p, int b, int head) {
  return query_scale(p, b, head) * k_descale_of(p.cache, b, head);
}

PD_DEVICE float row_slope(const Problem& p, int b, int q_head) {
  return p.alibi_slopes ? p.alibi_slopes[b * p.alibi_stride_batch + q_head] : 0.f;
}

}  // namespace paged_attn
