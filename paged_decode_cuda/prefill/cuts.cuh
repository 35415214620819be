// How the keys of tiles of rows are cut into splits: not at all, all tiles of rows alike, or by their lengths. The
// lanes of one warp call everything together; each has a request, `own`.
#pragma once

#include "row_tiles.cuh"

namespace paged_attn {

constexpr float kFewRounds = 3;        // of splits: with more rounds it matters little whether the last one is full
constexpr float kMostOver = 0.125f;    // of a round: rather than take so little of one more, splits are longer
constexpr float kEvensOut = 4;         // n rounds of tiles even out one that is n * n / kEvensOut times the average
constexpr int kMostCounted = 1 << 20;  // tiles of keys: sums of them fit into 32 bits
constexpr int kEven = -1;              // in place of Totals::tiles: nothing is to be cut by length

// The totals of the requests that the lanes hold; each lane has one, `own`.
template <typename Call>
PD_DEVICE Totals totals_of(const RequestTiles& own) {
  Totals totals = {__reduce_max_sync(~0u, max(own.most, 1)), 0, 0};
  if constexpr (Call::kCutsKeys) {
    totals.rows = __reduce_add_sync(~0u, own.rows);
    totals.tiles = __reduce_add_sync(~0u, own.rows * min(own.most, kMostCounted));
  }
  return totals;
}

// Tiles of keys of a split, if the longest tile of rows has so many splits.
PD_DEVICE int tiles_of_split(float longest, float splits) {
  return static_cast<int>(ceilf(__fdividef(longest, splits) - 0.001f));
}

// Splits for each tile of keys, if a split has so many of them. A little less, so that rounding adds no split.
PD_DEVICE float split_rate(int tiles) { return __fdividef(0.99999f, static_cast<float>(tiles)); }

// Splits of every tile of rows where all have the same number, if the longest one sees so many tiles of keys.
template <typename Call>
PD_DEVICE float splits_alike(const Call& plan, int longest) {
  const float worth = floorf(static_cast<float>(longest) * plan.splits_per_tile);
  return fminf(fmaxf(worth, 1.f), static_cast<float>(plan.splits));
}

// Splits of so many tiles of keys.
template <typename Call>
PD_DEVICE int splits_of(const Call& plan, int tiles, float rate) {
  return max(1, min(static_cast<int>(ceilf(static_cast<float>(tiles) * rate)), plan.most_splits));
}

// Splits of all tiles of rows, as far as requests are remembered.
template <typename Call, typename Known>
PD_DEVICE float all_splits(const Problem& p, const Call& plan, const Known& known, const RequestTiles& own,
                           float rate) {
  int splits = 0;
  if (p.batch <= kWarp) {
    splits = own.rows * splits_of(plan, own.most, rate);
  } else {
#pragma unroll 1
    for (int b = threadIdx.x % kWarp; b < min(static_cast<int>(p.batch), Known::kMost); b += kWarp) {
      int rows, most;
      if (known.find(b, rows, most)) splits += rows * splits_of(plan, most, rate);
    }
  }
  return static_cast<float>(__reduce_add_sync(~0u, splits)) * static_cast<float>(p.kv_heads);
}

// Where lengths differ much: about as many splits as the host says, all of about the same length. `split_tiles`:
// tiles of keys of the longest one. `rate`: as Work::split_rate.
template <typename Call, typename Known>
PD_DEVICE void cut_by_length(const Problem& p, const Call& plan, const Known& known, const RequestTiles& own,
                             const Totals& totals, int& split_tiles, float& rate) {
  const float all = static_cast<float>(totals.tiles), rows = static_cast<float>(totals.rows);
  const float longest = static_cast<float>(totals.longest), heads = static_cast<float>(p.kv_heads);
  const float grid = static_cast<float>(plan.blocks_in_grid), tiles_of_rows = heads * rows;
  if (all >= 0.875f * longest * rows) return;  // lengths hardly differ
  // With several rounds of tiles short ones even out what a long one takes.
  if (kEvensOut * longest * rows * grid * grid <= all * tiles_of_rows * tiles_of_rows) return;
  // For each tile of keys, less half a split for each tile of rows, which rounding up adds.
  float more =
      fminf(__fdividef(fmaxf(plan.splits_wanted - 0.5f * tiles_of_rows, 0.f), heads * all), plan.most_split_rate);
  float splits = fminf(longest * more, static_cast<float>(plan.most_splits));  // of the longest
  const bool alike = splits < 1.25f * static_cast<float>(plan.splits);
  if (alike) {
    splits = -rate;
    if (splits * tiles_of_rows <= grid) return;
  }
  split_tiles = tiles_of_split(longest, splits);
  const bool few = plan.splits_wanted <= kFewRounds * grid;
  if (few) {
    // A few splits more than whole rounds of them would take a round of their own. Longer ones are fewer.
    const float rounds = __fdividef(all_splits(p, plan, known, own, split_rate(split_tiles)), grid),
                over = rounds - floorf(rounds);
    if (rounds > 1 && over > 0 && over <= kMostOver) ++split_tiles;
  }
  rate = few || alike ? split_rate(split_tiles) : more;
}

// Decides how keys are cut: work.split_rate, and known.longest for the buckets.
template <typename Call, typename Known>
PD_DEVICE void decide_cuts(const Problem& p, const Call& plan, Known& known, const RequestTiles& own,
                           const Totals& totals, Work& work) {
  int longest = totals.longest;  // tiles of keys: of a tile of rows, or of a split where lengths decide
  float rate = Work::kWhole;
  if constexpr (Call::kCutsKeys) {
    if (longest >= plan.cut_from_tiles) {
      if (plan.splits > 1) rate = -splits_alike(plan, longest);
      if (totals.tiles != kEven && plan.splits_wanted > 0.f) cut_by_length(p, plan, known, own, totals, longest, rate);
    }
  }
  if (threadIdx.x % kWarp == 0) {
    known.longest = longest;
    work.split_rate = rate;
  }
  __syncwarp();
}

// Splits of each of this lane's tiles of rows where lengths decide; 1 where they do not.
template <typename Call>
PD_DEVICE int splits_by_length(const Call& plan, const RequestTiles& own, const Work& work) {
  if constexpr (Call::kCutsKeys) {
    return splits_of(plan, own.most, work.split_rate);
  } else {
    return 1;
  }
}

// Splits of each of this lane's tiles of rows.
template <typename Call>
PD_DEVICE int splits(const Call& plan, const RequestTiles& own, const Work& work) {
  if constexpr (Call::kCutsKeys) {
    if (work.split_rate < 0.f) return static_cast<int>(-work.split_rate);
  }
  return splits_by_length(plan, own, work);
}

// Of the item's tiles of keys only those of one split remain. They may be none.
PD_DEVICE void take_split(Item& item, int split, int splits) {
  const int each = (item.tiles + splits - 1) / splits, first = min(split * each, item.tiles);
  item.first_tile += first;
  item.tiles = min(each, item.tiles - first);
}

// Takes one kv_head and split of a tile of rows.
template <typename Call>
PD_DEVICE void take_piece(const Call& plan, const RequestTiles& own, int piece, Work& work) {
  work.exists = true;
  work.head = piece;
  work.split = 0;
  work.cut = false;
  if (!Call::kCutsKeys || work.split_rate == Work::kWhole) return;
  work.splits = splits(plan, own, work);
  work.cut = work.splits > 1;
  work.head = piece / work.splits;
  work.split = piece - work.head * work.splits;
  take_split(work.item, work.split, work.splits);
}

}  // namespace paged_attn
