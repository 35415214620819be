// The tile scheduler: which tile of rows a block takes next. Long ones come first; a counter that all blocks share
// deals them out.
//
// Tiles are in buckets by the number of their keys, longest first. Where lengths decide how many splits a tile has, the
// keys of a split count. In a bucket tiles are ordered by request, then by sections of kv_heads whose keys L2 can hold,
// then by row tile (latest first, whose keys are the most), then by kv_head. Nobody makes a list of them: a warp counts
// the tiles of 32 requests and walks on from where its last one was. Where each kv_head has few tiles of rows, all this
// is done for a section of the requests, then for the next one (end_section()). Where up to 32 requests have tiles of
// few keys, which take about equally long, all of these are in one bucket: so blocks begin sooner.
//
// More than 32 requests are in four groups, and the tiles of every bucket of every group, a cell, are counted once. The
// cells are in the order of the tiles, so a warp goes straight to that of its tile.
//
//      group            0        1         2         3
//      bucket 7         0..9     10..13    14..19    20..29     the longest tiles
//      bucket 6         30..33   34..50    -         51..52
//      ...
#pragma once

#include "cuts.cuh"

namespace paged_attn {

constexpr int kBucketBits = 3;                        // with more buckets a block takes longer to find its first tile
constexpr int kFirstBucket = (1 << kBucketBits) - 1;  // of the longest tiles
constexpr int kGroups = kWarp >> kBucketBits;         // of many requests: every lane has a cell
constexpr int kFewKeysOfTile = 384;                   // of a tile: their number matters little for its time
constexpr int kSectionTiles = 32;                     // of rows: with as many a kv_head has several in every bucket

// Walks through all tiles in their order. The lanes of one warp call everything together; each has a request. The lane
// that has the request of a tile writes the work where all see it. Call: what the kernel is told. Known: KnownRequests.
//
// With more than 32 requests survey() comes first. Then start() is asked for the tile that a block begins with; find(),
// where start() does not have it, and for every later one.
//
// What is done for every tile is short, for it shares the cache of instructions with the loops of the other warps: 256
// multiplications more cost 0.6 us of each tile (docs/cuda/prefill.md).
template <typename Shape>
struct Scheduler {
  int bucket, first;  // bucket and first request of the chunk that the lanes hold
  RequestTiles own;   // of this lane's request
  int pieces;         // of each of its tiles of rows: kv_heads times splits, those of a head being neighbours
  int ends;           // tiles up to and with this lane's request; once none is left, in all lanes how many there are
  bool left;          // up to 32 requests: whether there are tiles in buckets below this one

  // More than 32 requests: so many warps look at them together and count the tiles of every cell. `warp`: which of them
  // this is. Meet: they wait for each other.
  template <typename Call, typename Known, typename Meet>
  PD_MEMBER void survey(const Problem& p, const Call& plan, Known& known, Work& work, int warp, int warps,
                        const Meet& meet) {
    if (p.batch <= kWarp) return;
    const int lane = threadIdx.x % kWarp, batch = static_cast<int>(p.batch);
    if (lane == 0) known.totals[warp] = {};
    if (lane == 0 && warp == 0) known.group_size = (batch + kGroups * kWarp - 1) / (kGroups * kWarp) * kWarp;
    if (lane <= kFirstBucket) {
      for (int group = warp; group < kGroups; group += warps) known.cells[lane * kGroups + group] = 0;
    }
    __syncwarp();
    // Twice, as tiles are counted once it is known how keys are cut. By one loop, for what looks at lengths is long.
#pragma unroll 1
    for (bool counts = false;; counts = true) {
#pragma unroll 1
      for (int request = warp * kWarp; request < batch; request += warps * kWarp) {
        hold(p, plan, known, request, counts);
        if (!counts) {
          known.note(request + this_thread() % kWarp, own.rows, own.most);
          const Totals found = totals_of<Call>(own);
          if (lane == 0) known.totals[warp].add(found);
        } else {
          count_cells(p, plan, known, work, request);
        }
      }
      meet();
      if (counts) break;
      if (warp == 0) {
        Totals totals = known.totals[0];
        for (int other = 1; other < warps; ++other) totals.add(known.totals[other]);
        decide_cuts(p, plan, known, own, totals, work);
      }
      meet();
    }
    if (warp == 0) {
      int& cell = known.cells[this_thread() % kWarp];
      cell = inclusive_sum(cell);
    }
    meet();
  }

  // Adds the tiles of this lane's request to their cells. `request`: the first of the chunk.
  template <typename Call, typename Known>
  PD_MEMBER void count_cells(const Problem& p, const Call& plan, Known& known, const Work& work, int request) {
    count_pieces(p, plan, work);
    const int splits = splits_by_length(plan, own, work), group = request / known.group_size;
    int above = own.rows;
#pragma unroll 1
    for (int number = bucket_of(known.longest, own.most, splits); above > 0; --number) {
      const int below = tiles_below(p, plan, known, splits, number);
      if (above > below) atomicAdd(known.cells + (kFirstBucket - number) * kGroups + group, (above - below) * pieces);
      above = below;
    }
  }

  // Also writes the work of tile `index`, where up to 32 requests need no buckets: each has one tile of rows, and all
  // of them are in the first bucket; or no block has a second tile, so that the order does not matter. False: find() is
  // to be asked.
  template <typename Call, typename Known>
  PD_MEMBER bool start(const Problem& p, const Call& plan, Known& known, int index, Work& work) {
    if (p.batch > kWarp) return false;
    const int lane = threadIdx.x % kWarp;
    const Item item = look_at(p, plan, 0);
    Totals totals = totals_of<Call>(own);
    const bool in_first = lane >= p.batch || (own.rows == 1 && own.most >= bucket_bound(totals.longest, kFirstBucket));
    const bool one_bucket = __ballot_sync(~0u, in_first) == ~0u;
    if (one_bucket) totals.tiles = kEven;
    decide_cuts(p, plan, known, own, totals, work);
    count_pieces(p, plan, work);
    ends = one_bucket ? min(lane + 1, static_cast<int>(p.batch)) * pieces : inclusive_sum(own.rows * pieces);
    const int all = __shfl_sync(~0u, ends, kWarp - 1);
    if (one_bucket || all <= plan.blocks_in_grid) return take_in_order(p, plan, index, item, work);
    // As if all had been counted where tiles have few keys and hardly differ, or a block has several of them. Else as
    // if a bucket above the first one had been.
    first = 0;
    const bool alike = known.longest <= 2 || p.window_left >= 0 || all >= 2 * plan.blocks_in_grid;
    left = !alike || known.longest * Shape::kKeys > kFewKeysOfTile;
    bucket = left ? kFirstBucket + 1 : 0;
    own.in_bucket = own.rows;
    own.below = left ? own.rows : 0;
    if (left) ends = 0;
    return take_none(work);  // so far
  }

  // The work of tile `index`, those of all requests one behind the other. `item`: the last tile of this lane's request.
  template <typename Call>
  PD_MEMBER bool take_in_order(const Problem& p, const Call& plan, int index, const Item& item, Work& work) {
    own.in_bucket = own.rows;
    left = false;
    const int lane = threadIdx.x % kWarp, owner = __popc(__ballot_sync(~0u, ends <= index));
    if (owner == kWarp) return take_none(work);
    if (lane == owner) {
      const int piece = index - (ends - own.rows * pieces), tile = own.rows > 1 ? piece / pieces : 0;
      work.item = item;
      if (tile < own.rows - 1) take_rows<Shape>(p, plan, tile, work.item);
      take_piece(plan, own, piece - tile * pieces, work);
    }
    __syncwarp();
    return true;
  }

  static PD_MEMBER bool take_none(Work& work) {
    if (threadIdx.x % kWarp == 0) work.exists = false;
    __syncwarp();
    return false;
  }

  // After decide_cuts().
  template <typename Call>
  PD_MEMBER void count_pieces(const Problem& p, const Call& plan, const Work& work) {
    pieces = static_cast<int>(p.kv_heads) * splits(plan, own, work);
  }

  // A section is what is walked through from the longest tiles to the shortest: as a rule, all requests. But where a
  // kv_head has few tiles of rows, every round of tiles would read all keys from memory. Then a section is as many
  // requests from the first one on as have their keys in L2, if each of them has tiles for half of the blocks. They may
  // fill L2, twice what l2_keys says: with smaller sections blocks wait for each other's keys. end_section() forgets
  // the requests of later sections.
  template <typename Call>
  PD_MEMBER void end_section(const Problem& p, const Call& plan) {
    const int lane = threadIdx.x % kWarp;
    const int tiles = own.rows * pieces;
    const bool exists = first + lane < p.batch, suits = own.rows < kSectionTiles && 2 * tiles >= plan.blocks_in_grid;
    if (p.batch > kWarp || __ballot_sync(~0u, exists && !suits)) return;
    const int most_keys = 2 * plan.l2_keys / static_cast<int>(p.kv_heads);
    const int keys = inclusive_sum(exists ? min(key_count(p, plan, first + lane), most_keys + 1) : 0);
    if (lane > 0 && keys > most_keys) own = {};
  }

  // The first request of the next section; without one, a request that does not exist.
  PD_MEMBER int next_section(const Problem& p) const {
    const int next = first + kWarp - __clz(__ballot_sync(~0u, own.rows > 0));
    return p.batch > kWarp || next == first ? static_cast<int>(p.batch) : next;
  }

  // Holds the chunk of requests that begins with this one, and looks at their lengths. Of this lane's: its last tile of
  // rows.
  template <typename Call>
  PD_MEMBER Item look_at(const Problem& p, const Call& plan, int request) {
    first = request;
    const int b = first + threadIdx.x % kWarp;
    Item last = {};
    own = {};
    if (b >= p.batch) return last;
    // No branch for a request without rows, so that all lengths are asked for together. Without rows it has no tiles.
    last = request_item(p, plan, b);
    const int rows = last.q_len * static_cast<int>(p.group) + static_cast<int>(plan.tile_rows.divisor) - 1;
    own.rows = plan.tile_rows.divide(max(0, rows));
    take_rows<Shape>(p, plan, max(own.rows - 1, 0), last);
    own.most = last.tiles;
    return last;
  }

  // The same from what a survey has remembered, as far as it has (`knows`: it has been there).
  template <typename Call, typename Known>
  PD_MEMBER void hold(const Problem& p, const Call& plan, const Known& known, int request, bool knows = true) {
    own = {};
    const int b = request + threadIdx.x % kWarp;
    if (b < p.batch && !(knows && p.batch > kWarp && known.find(b, own.rows, own.most))) look_at(p, plan, request);
    first = request;
  }

  // From how many tiles of keys on a row tile is in a bucket.
  PD_MEMBER static int bucket_bound(int longest, int number) {
    return (longest * number + (1 << kBucketBits) - 1) >> kBucketBits;
  }

  // The bucket of a row tile of so many tiles of keys.
  PD_MEMBER static int bucket_of(int longest, int tiles, int splits) {
    int number = min(static_cast<int>(__fdividef(tiles << kBucketBits, longest * splits)), kFirstBucket);
#pragma unroll 1
    while (number < kFirstBucket && tiles >= bucket_bound(longest, number + 1) * splits) ++number;
    return number;
  }

  // Row tiles of this lane's request that lie in buckets below this one.
  template <typename Call, typename Known>
  PD_MEMBER int tiles_below(const Problem& p, const Call& plan, const Known& known, int splits, int number) const {
    if (number > kFirstBucket) return own.rows;
    const int bound = bucket_bound(known.longest, number) * splits;
    if (own.most < bound) return own.rows;
    if (own.rows <= 1 || bound <= 1 || p.window_right < 0 || p.window_left >= 0 || p.attention_chunk > 0) return 0;
    // Causal: the number of keys falls by the tokens of a row tile from one to the one before.
    const int64_t rows = int64_t{own.most - bound} * Shape::kKeys * p.group;
    return max(own.rows - plan.tile_rows.divide(static_cast<int>(min(rows, int64_t{INT32_MAX}))) - 1, 0);
  }

  // The tiles of this bucket, behind so many others; own.below is still of the one above.
  template <typename Call, typename Known>
  PD_MEMBER void count(const Problem& p, const Call& plan, const Known& known, const Work& work, int before) {
    const int above = own.below;
    own.below = tiles_below(p, plan, known, splits_by_length(plan, own, work), bucket);
    own.in_bucket = above - own.below;
    left = __any_sync(~0u, own.below > 0);
    ends = before;
    if (__any_sync(~0u, own.in_bucket > 0)) ends += inclusive_sum(own.in_bucket * pieces);
  }

  // To the cell of tile `index`, as if all before it had been counted. False: there is no such tile.
  template <typename Known>
  PD_MEMBER bool go_to_cell(const Known& known, int index) {
    const int end = known.cells[this_thread() % kWarp], cell = __popc(__ballot_sync(~0u, end <= index));
    ends = cell == 0 ? 0 : __shfl_sync(~0u, end, cell - 1);
    bucket = kFirstBucket - cell / kGroups;
    first = cell % kGroups * known.group_size - kWarp;
    left = false;
    return cell < kWarp;
  }

  // The work of tile `index`, which never falls from call to call. False past the end, where none exists.
  template <typename Call, typename Known>
  PD_MEMBER bool find(const Problem& p, const Call& plan, Known& known, int index, Work& work) {
    const int lane = threadIdx.x % kWarp;
    if (p.batch > kWarp && !go_to_cell(known, index)) return take_none(work);
    while (true) {
      const int before = __shfl_sync(~0u, ends, kWarp - 1);  // tiles up to the end of this chunk
      if (index < before) break;
      int request = first + kWarp;  // the next chunk of the cell
      if (p.batch <= kWarp) {
        request = -1;  // the same one, and the next bucket
        --bucket;
        if (!left) {
          request = Call::kHasSections ? next_section(p) : static_cast<int>(p.batch);
          bucket = kFirstBucket;
        }
      }
      if (request >= p.batch) {
        ends = before;
        return take_none(work);
      }
      if (request >= 0) {
        hold(p, plan, known, request);
        count_pieces(p, plan, work);
        own.below = tiles_below(p, plan, known, splits_by_length(plan, own, work), bucket + 1);
      }
      if constexpr (Call::kHasSections) {
        if (bucket == kFirstBucket) end_section(p, plan);
      }
      count(p, plan, known, work, before);
    }
    if (lane == __popc(__ballot_sync(~0u, ends <= index))) take(p, plan, index, work);
    __syncwarp();
    return true;
  }

  // This lane's request has the tile.
  template <typename Call>
  PD_MEMBER void take(const Problem& p, const Call& plan, int index, Work& work) const {
    work.item = request_item(p, plan, first + threadIdx.x % kWarp);
    int tile = 0, piece = index - (ends - own.in_bucket * pieces);
    if (own.rows > 1) {
      const int together = max(1, plan.l2_keys / max(work.item.kv_len, 1)) * splits(plan, own, work);
      int section_pieces = pieces, section_begin = 0;
      if (together < pieces) {
        const int section = piece / (together * own.in_bucket);
        section_begin = section * together;
        section_pieces = min(together, pieces - section_begin);
        piece -= section_begin * own.in_bucket;
      }
      const int up = piece / section_pieces;
      tile = own.below + own.in_bucket - 1 - up;
      piece += section_begin - up * section_pieces;
    }
    take_rows<Shape>(p, plan, tile, work.item);
    take_piece(plan, own, piece, work);
  }
};

}  // namespace paged_attn
