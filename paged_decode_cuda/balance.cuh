// How the keys of all requests are dealt to thread blocks.
//
//   item      rows of one request that are handled together, see items.cuh
//   pair      an item and a kv_head
//   unit      a tile of keys of one pair
//   stretch   the units of one thread block
//   segment   those of them that are of one pair: what a block does at a time
//
// Line: all units form one line, pair by pair and key by key, which is cut into equal stretches. To end one pair and
// begin another takes the time of some units ($), which stand before it.
//
//     units    $$AAAAAAAAAAAA$$BBB$$CCCCCCC$$DDDDDDDDDDDDDDDDDDDD
//     blocks   [    3     ][    2     ][    1     ][    0     ]      block 0 takes the end
//
// Every warp computes the line from the lengths themselves, so nothing depends on what the host knows, and a replayed
// CUDA graph balances the lengths that it finds. The block with the keys before a cut starts after the one with the
// keys behind it.
//
// Lines: where some of the kv_heads divide the blocks, each has a line of its own, and neighbouring blocks belong to
// neighbouring lines. So they read the heads of the same keys at the same time, which lie side by side in memory.
//
//     head 0   AAAAAAAAAAAABBBBBBBBB        blocks   [  4  ][  2  ][  0  ]
//     head 1   AAAAAAAAAAAABBBBBBBBB                 [  5  ][  3  ][  1  ]
//
// Even: where the lengths hardly differ, or none is worth a cut, every pair counts as many units as the longest one. If
// there are at least as many blocks as pairs, each pair gets the same number of blocks: fewer cuts, and no block serves
// two pairs. If there are more pairs than blocks, every block gets the same number of whole pairs, and only the
// remainder is a line that is cut. That line comes first, so that partials are added while the memory is busy.
// Neighbouring blocks then read the heads of the same keys at the same time.
//
//     pairs    AAAA BBBB                           AAAA BBBB CCCC DDDD EEEE FFFF GGGG HHHH
//     blocks   3322 1100    blocks for each        3333 2222 1111 0000|3333 2222 1111 0000    whole ones
//
// Fixed: a block for every pair and split, where the cuts of a request depend on its own keys and rows alone. Packed
// requests of many rows have fewer blocks for each pair, see packed_begin_block().
//
// When a segment is only a part of its pair, its block leaves a partial, and the block with the first keys adds them
// all. Where there are very many, some other blocks add a few each before. In which order they are added does not
// depend on which block is done last.
#pragma once

#include "decode/sizes.h"
#include "items.cuh"
#include "spec/search.h"

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

// Fixed cuts: how many splits an item of `tiles` tiles of keys has. `most`: what the rows of its request allow.
PD_DEVICE int item_splits(const Plan& plan, int most, int tiles) {
  const int splits = plan.num_splits > 0 ? plan.num_splits : (tiles - 1) / plan.split_tiles + 1;
  return max(1, min(min(splits, most), tiles));
}

// Fixed cuts of packed requests: where the blocks of request b begin, for one kv_head.
//
// A request of T tiles of rows has T pairs, and of each a block for every split: max_splits of them, or as many as
// leave it request_blocks in all, or one. Both terms grow from request to request by at least that, so the lesser one
// does too. The first is less where requests are short; with the second a long prompt takes no memory for cuts that it
// has not.
PD_DEVICE int packed_begin_block(const Problem& p, const Plan& plan, int b) {
  const int64_t tiles = packed_begin(p, plan, b), splits = plan.max_splits.divisor;
  return static_cast<int>(min(tiles * splits, static_cast<int64_t>(plan.request_blocks) * b + tiles));
}

PD_DEVICE int packed_splits(const Plan& plan, int tiles) {
  return max(1, min(static_cast<int>(plan.max_splits.divisor), plan.request_blocks / max(tiles, 1)));
}

// Tiles of rows of a packed request.
PD_DEVICE int request_tiles(const Problem& p, const Plan& plan, int b) {
  return (query_length(p, b) * static_cast<int>(p.group) + (1 << plan.row_shift) - 1) >> plan.row_shift;
}

// Fixed cuts: the last block of a pair, which has the first keys. -1: no request has this pair.
PD_DEVICE int first_keys_block(const Problem& p, const Plan& plan, int pair) {
  if (plan.request_blocks == 0) return (pair + 1) * static_cast<int>(plan.max_splits.divisor) - 1;
  const int heads = static_cast<int>(p.kv_heads), index = plan.kv_heads.divide(pair), b = find_packed(p, plan, index);
  const int begin = packed_begin(p, plan, b), tiles = request_tiles(p, plan, b);
  if (index - begin >= tiles) return -1;
  return packed_begin_block(p, plan, b) * heads + (pair - begin * heads + 1) * packed_splits(plan, tiles) - 1;
}

struct Segment {
  int pair, head;
  int tile, tile_end;  // tiles of keys, counted from the start of the request
  bool first;          // it has the first tile of its pair
};

// The same for all segments of a thread block.
struct Dealing {
  int length;          // of every stretch
  int lines;           // from a block to the next one of its line
  int most;            // units that every pair counts, those past its end being empty; 0: its own, and its cost
  int surplus_rounds;  // see Plan; 0 where no request has more rows than it was given tiles for
};

// Steps through the segments of one thread block: those of its stretch, then whole pairs, then surplus items. Every
// warp has a copy of its own, so stepping needs no barrier.
struct Walker {
  int pair, unit;   // the next unit, counted from the first of its pair
  int left;         // units of the stretch
  int whole_pairs;  // to come after it; below 0, surplus items that are done

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
      segment.pair = pair;
      segment.head = pair - index * heads;
      item = load_item(p, plan, index);
      int cost = dealing.most > 0 ? 0 : plan.pair_cost;
      int units = dealing.most > 0 ? dealing.most : item.tiles + cost;
      if (plan.surplus_rounds > 0 && index >= plan.items) {
        // A surplus item is not cut.
        cost = 0;
        units = left = item.tiles;
      }
      const int count = min(units - unit, left), begin = max(unit - cost, 0);
      const int tile_end = min(unit + count - cost, item.tiles);
      unit += count;
      left -= count;
      if (unit == units) {
        unit = 0;
        pair += dealing.lines;
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
      int lengths[kBatch], tokens[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        lengths[j] = begin + j < end ? basic_length(p, plan, begin + j) : 0;
        if (p.cu_seqlens_q) tokens[j] = begin + j < end ? query_length(p, begin + j) : 0;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (begin + j >= end || (p.cu_seqlens_q && tokens[j] <= 0)) continue;
        count.add(basic_tiles(plan, lengths[j]));
        if (p.cu_seqlens_q) count.surplus |= tokens[j] * static_cast<int>(p.group) > plan.rows_per_tile;
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

// The pair at a place of this block's line.
PD_DEVICE int pair_of_line(const Plan& plan, int place) {
  const int lines = static_cast<int>(plan.lines.divisor), block = static_cast<int>(blockIdx.x);
  return place * lines + block - plan.lines.divide(block) * lines;
}

// Cuts a line of `total` units from its end, that of all pairs or one of several, into stretches of `least` units or
// more. Returns where the stretch of this block begins.
PD_DEVICE int deal_line(const Plan& plan, int total, int least, bool several, Walker& walker, Dealing& dealing) {
  const int blocks = static_cast<int>(several ? plan.line_blocks.divisor : plan.blocks.divisor);
  const int block = static_cast<int>(blockIdx.x), own = several ? plan.lines.divide(block) : block;
  const int up = total + blocks - 1;
  dealing.length = max(least, several ? plan.line_blocks.divide(up) : plan.blocks.divide(up));
  dealing.lines = several ? static_cast<int>(plan.lines.divisor) : 1;
  const int end = total - own * dealing.length, position = max(0, end - dealing.length);
  walker.left = max(0, end - position);
  return position;
}

// The part of even dealing that does not depend on lengths. walker.pair becomes the pair of this block, or a negative
// number if it has none; walker.unit, until deal_evenly(), this block's place among the blocks of its pair, counted
// from the first keys.
PD_DEVICE void expect_even_stretch(const Problem& p, const Plan& plan, Walker& walker) {
  const int each = static_cast<int>(plan.blocks_each.divisor), block = static_cast<int>(blockIdx.x);
  const int place = plan.blocks_each.divide(block);
  walker.pair = plan.items * static_cast<int>(p.kv_heads) - 1 - place;
  walker.unit = (place + 1) * each - 1 - block;
}

// Whether even pairs of a line had better stay whole: where they are hardly fewer than blocks, or short, some blocks
// are idle for less time than all would need to end one part more.
PD_DEVICE bool stay_whole(const Plan& plan, int most) {
  const int blocks = static_cast<int>(plan.blocks.divisor), idle = blocks - plan.line_pairs;
  return most > 0 && idle >= 0 && int64_t{idle} * most <= plan.pair_cost * blocks;
}

// `most`: tiles of the longest item.
template <bool kLines>
PD_DEVICE void deal_evenly(const Plan& plan, int most, Walker& walker, Dealing& dealing) {
  const int each = static_cast<int>(plan.blocks_each.divisor);
  dealing.most = most;
  dealing.lines = 1;
  if (each > 0) {
    dealing.length = max(plan.min_units, plan.blocks_each.divide(most + each - 1));
    // Rows that a block merges in several rounds: no more splits than two levels take with one look each, five times
    // six of other blocks and its own, if that makes a stretch no longer than two that are worth a block. Where there
    // is one line (`mla`) another kernel merges.
    constexpr int kMostSplits = 31;
    if (kLines && plan.rows_per_tile * plan.partial_quads > static_cast<int>(blockDim.x))
      dealing.length = max(dealing.length, min((most + kMostSplits - 1) / kMostSplits, 2 * plan.min_units));
    walker.unit *= dealing.length;
    walker.left = walker.pair < 0 ? 0 : max(0, min(most - walker.unit, dealing.length));
    return;
  }
  const int pairs = kLines ? plan.lines.divide(plan.line_pairs) : 0;
  const bool several = kLines && pairs * static_cast<int>(plan.lines.divisor) == plan.line_pairs;
  walker.whole_pairs = plan.whole_pairs;
  // A whole pair is worth a block, however short.
  const int least = kLines && stay_whole(plan, most) ? most : min(plan.min_units, most);
  const int total = (several ? pairs : plan.line_pairs) * most;
  const int position = deal_line(plan, total, least, several, walker, dealing);
  divide_small(position, most, walker.pair, walker.unit);
  if (several) walker.pair = pair_of_line(plan, walker.pair);
}

// Finds this block's stretch. Every warp does so by itself, without a barrier, in two levels. First every lane counts a
// run of items, and the run is found in which the stretch begins. Then every lane counts one item of that run. kLines:
// there may be several lines.
template <bool kLines = false>
PD_DEVICE void find_stretch(const Problem& p, const Plan& plan, Walker& walker, Dealing& dealing) {
  static_assert(kMaxBalancedItems <= kWarp * kWarp, "a run has an item per lane at most");
  const int lane = threadIdx.x % kWarp, all_heads = static_cast<int>(p.kv_heads);
  const int heads = kLines ? plan.lines.divide(all_heads) : all_heads;  // of a line
  int first_item = 0, units_before = 0;                                 // of what the lanes share out at this level
  int items_of_lane = (plan.items + kWarp - 1) / kWarp;                 // 1 at the last level
  int position = 0;                                                     // where the stretch begins in the line
  int units, owner;  // of one kv_head of this lane's items; the lane that has it
#pragma unroll 1
  while (true) {
    const int begin = first_item + lane * items_of_lane, end = min(plan.items, begin + items_of_lane);
    const TileCount count = count_tiles(p, plan, begin, end);
    if (plan.surplus_rounds > 0 && __any_sync(~0u, count.surplus)) dealing.surplus_rounds = plan.surplus_rounds;
    if (dealing.length == 0) {
      const int most = __reduce_max_sync(~0u, count.most), all = __reduce_add_sync(~0u, count.sum);
      const bool even = plan.blocks_each.divisor > 0 || plan.whole_pairs > 0 || (kLines && stay_whole(plan, most));
      const bool short_pairs = 0 < most && most <= plan.min_units;
      if (short_pairs || (even && most * plan.items - all <= all / 16)) {
        deal_evenly<kLines>(plan, most, walker, dealing);
        return;
      }
    }
    units = count.sum + plan.pair_cost * max(end - begin, 0);
    const int units_through = inclusive_sum(units * heads);  // of this lane's items and those before them
    if (dealing.length == 0) {
      const int total = __shfl_sync(~0u, units_through, kWarp - 1);
      position = deal_line(plan, total, plan.min_units, kLines, walker, dealing);
      if (walker.left == 0) return;
    }
    owner = __popc(__ballot_sync(~0u, units_before + units_through <= position));
    units_before += __shfl_sync(~0u, units_through - units * heads, owner);
    first_item += owner * items_of_lane;
    if (items_of_lane == 1) break;
    items_of_lane = 1;
  }
  int head;
  divide_small(position - units_before, __shfl_sync(~0u, units, owner), head, walker.unit);
  walker.pair = first_item * heads + head;
  if (kLines) walker.pair = pair_of_line(plan, walker.pair);
}

// The pair of a block, how many blocks that has, and which of them this is.
struct FixedPlace {
  int pair, splits, block;
};

PD_DEVICE FixedPlace fixed_place(const Plan& plan, int block) {
  const int splits = static_cast<int>(plan.max_splits.divisor), pair = plan.max_splits.divide(block);
  return {pair, splits, block - pair * splits};
}

// The same for packed requests; no splits: no request has this block.
PD_DEVICE FixedPlace packed_place(const Problem& p, const Plan& plan, int block) {
  const int heads = static_cast<int>(p.kv_heads);
  const auto begin_of = [&](int b) { return packed_begin_block(p, plan, b) * heads; };
  const int b = find_request(static_cast<int>(p.batch), block, begin_of);
  const int tiles = request_tiles(p, plan, b), splits = packed_splits(plan, tiles);
  const int before = block - begin_of(b), pair = before / splits;
  if (before < 0 || pair >= tiles * heads) return {};
  // Where cu_seqlens_q falls, blocks of a pair may find other requests, if the first or the last one does. Then nobody
  // has the pair, so that nobody waits for a partial.
  const auto finds = [&](int other) { return find_request(static_cast<int>(p.batch), other, begin_of) == b; };
  const int first = begin_of(b) + pair * splits;
  if (splits > 1 && !(finds(first) && finds(first + splits - 1))) return {};
  return {packed_begin(p, plan, b) * heads + pair, splits, before - pair * splits};
}

// This block's pair and split when the cuts are fixed. kLastFirst: the last pair first. Either way the last block of a
// pair has the first keys.
template <bool kLastFirst = false>
PD_DEVICE void find_split(const Problem& p, const Plan& plan, Walker& walker, Dealing& dealing) {
  if (plan.items == 0) return;
  const int block = static_cast<int>(kLastFirst ? plan.blocks.divisor - 1 - blockIdx.x : blockIdx.x);
  const FixedPlace place = plan.request_blocks > 0 ? packed_place(p, plan, block) : fixed_place(plan, block);
  if (place.splits == 0) return;
  const int split = kLastFirst ? place.block : place.splits - 1 - place.block;
  walker.pair = place.pair;
  const int index = plan.kv_heads.divide(walker.pair), tiles = count_tiles(p, plan, index, index + 1).sum;
  if (tiles == 0) return;
  const int splits = item_splits(plan, place.splits, tiles);
  dealing.most = tiles;
  dealing.lines = 1;
  dealing.length = (tiles + splits - 1) / splits;
  walker.unit = min(tiles, split * dealing.length);
  walker.left = min(tiles - walker.unit, dealing.length);
}

// How many partials are behind a segment: one of each block before this one that has a stretch of the rest of its pair.
PD_DEVICE int partials_behind(const Item& item, const Segment& segment, const Dealing& dealing) {
  const int rest = item.first_tile + item.tiles - segment.tile_end;
  return rest == 0 ? 0 : (rest - 1) / dealing.length + 1;
}

}  // namespace paged_attn
