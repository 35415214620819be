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

#include "decode/sizes.h"
#include "items.cuh"

namespace paged_attn {

// n / d and the rest, for quotients far below 2^20: the approximation is off by one at most.
PD_DEVICE void divide_small(int n, int d, int& quotient, int& rest) {
  quotient = static_cast<int>(__fdividef(static_cast<float>(n), static_cast<float>(d)));
  rest = n - quotient * d;
  if (rest < 0) {
    --quotient;
    rest += d;
  } else if (rest >= d) {
    ++quotient;
    rest -= d;
  }
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

}  // namespace paged_attn
