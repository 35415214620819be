// Which tile of rows a block takes next: the long ones first, by a counter that all blocks share.
//
// Tiles are in buckets by the number of their keys, longest first; in a bucket by request, then by sections of
// kv_heads whose keys L2 can hold, then by row tile (latest first, whose keys are the most), then by kv_head. Nobody
// makes a list of them: a warp counts the tiles of 32 requests at a time and walks on from where its last one was.
// Where tiles of rows are few for each key, all this is done for some requests, then for the next ones.
#pragma once

#include "shape.cuh"

namespace paged_attn {

constexpr int kBuckets = 16;

// The word that is counted up must be zero before, and nobody clears it before a launch: the first block writes it
// together with a number of this launch, the one that takes the last ticket clears it.
PD_DEVICE unsigned ticket_tag() { return static_cast<unsigned>(launch_number() >> 32) | 1u; }

PD_DEVICE void open_tickets(unsigned long long* tickets) {
  const unsigned long long word = static_cast<unsigned long long>(ticket_tag()) << 32;
  store_relaxed(tickets, word);
}

PD_DEVICE void await_tickets(const unsigned long long* tickets) {
  unsigned long long word;
  do {
    word = load_relaxed(tickets);
  } while (static_cast<unsigned>(word >> 32) != ticket_tag());
}

// Once they are open.
PD_DEVICE unsigned next_ticket(unsigned long long* tickets) { return static_cast<unsigned>(atomicAdd(tickets, 1ull)); }

PD_DEVICE unsigned take_ticket(unsigned long long* tickets) {
  await_tickets(tickets);
  return next_ticket(tickets);
}

// Keys of a request, new ones included.
PD_DEVICE int key_count(const Problem& p, const Plan& plan, int b) {
  return min(max(cached_length(p, b) + new_length(p, b), 0), plan.max_keys);
}

// Rows [tile * Shape::kRows, ...) of a request.
template <typename Shape>
PD_DEVICE Item row_tile_item(const Problem& p, const Plan& plan, int b, int tile) {
  Item item = {};
  item.b = b;
  item.q_begin = query_begin(p, b);
  item.q_len = query_length(p, b);
  item.kv_len = key_count(p, plan, b);
  item.leftpad = p.cache_leftpad ? p.cache_leftpad[b] : 0;
  item.first_row = tile * Shape::kRows;
  item.rows = max(0, min(Shape::kRows, item.q_len * static_cast<int>(p.group) - item.first_row));
  find_keys(p, plan, item);
  item.first_tile = item.key_begin / Shape::kKeys;
  const int end_tile = (item.key_end + Shape::kKeys - 1) / Shape::kKeys;
  item.tiles = item.rows == 0 ? 0 : max(0, end_tile - item.first_tile);
  return item;
}

// Leaves one of the parts that the keys are cut into. It may have none.
PD_DEVICE void cut(Item& item, int part, int parts) {
  const int each = (item.tiles + parts - 1) / parts, first = min(part * each, item.tiles);
  item.first_tile += first;
  item.tiles = min(each, item.tiles - first);
}

struct RequestTiles {
  int rows;  // row tiles
  int most;  // tiles of keys of the last row tile
};

template <typename Shape>
PD_DEVICE RequestTiles request_tiles(const Problem& p, const Plan& plan, int b) {
  RequestTiles r;
  const int q_rows = query_length(p, b) * static_cast<int>(p.group);
  r.rows = max(0, (q_rows + Shape::kRows - 1) / Shape::kRows);
  r.most = r.rows == 0 ? 0 : row_tile_item<Shape>(p, plan, b, r.rows - 1).tiles;
  return r;
}

// Row tiles of a request that lie in buckets below `bucket`; its tiles have up to `most` tiles of keys.
template <typename Shape>
PD_DEVICE int tiles_below(const Problem& p, const RequestTiles& r, int longest, int bucket) {
  if (bucket >= kBuckets) return r.rows;
  if (bucket <= 0) return 0;
  // Tiles of keys from which on a row tile is in the bucket.
  const int bound = (longest * bucket + kBuckets - 1) / kBuckets;
  if (r.most < bound) return r.rows;
  if (p.window_right < 0 || p.window_left >= 0 || p.attention_chunk > 0) return 0;
  // Causal: the number of keys falls by kRows / group from one row tile to the one before.
  const int64_t keys = int64_t{r.most - bound} * Shape::kKeys;
  const int64_t above = keys * p.group / Shape::kRows + 1;
  return static_cast<int>(max(r.rows - above, int64_t{0}));
}

PD_DEVICE void close_tickets(unsigned long long* tickets) { store_relaxed(tickets, 0); }

// Walks through all tiles in their order. The lanes of one warp call everything together. Call: of the kernel.
template <typename Shape>
struct Scheduler {
  int longest;        // tiles of keys of the longest row tile
  int bucket, first;  // bucket and first request of the chunk that the lanes hold
  int before;         // tiles in front of that chunk
  RequestTiles own;   // this lane's request
  int ends;           // tiles up to it in this bucket, inclusive

  template <typename Call>
  PD_MEMBER void start(const Problem& p, const Call& plan) {
    const int lane = threadIdx.x % kWarp;
    int most = 1;
    for (int b = lane; b < p.batch; b += kWarp) most = max(most, request_tiles<Shape>(p, plan, b).most);
    longest = __reduce_max_sync(~0u, most);
    before = 0;
    open_section(p, plan, 0);
    count(p, plan);
  }

  // A section is what is walked through from the longest tiles to the shortest: all requests. But where a kv_head has
  // fewer than two tiles of rows in a bucket, every round of tiles would read all keys from memory. Then a section is
  // as many requests from this one on as have their keys in L2, if each of them has tiles for half of the blocks. They
  // may fill it, twice what l2_keys says: with smaller ones blocks wait for each other's keys.
  template <typename Call>
  PD_MEMBER void open_section(const Problem& p, const Call& plan, int request) {
    hold(p, plan, request);
    bucket = kBuckets - 1;
    if constexpr (Call::kHasSections) end_section(p, plan);
  }

  // Forgets the requests that belong to later sections.
  template <typename Call>
  PD_MEMBER void end_section(const Problem& p, const Call& plan) {
    const int lane = threadIdx.x % kWarp;
    const int tiles = own.rows * static_cast<int>(p.kv_heads) * plan.parts;
    const bool exists = first + lane < p.batch, suits = own.rows < 2 * kBuckets && 2 * tiles >= plan.blocks_in_grid;
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

  // Looks at the chunk of requests that begins with this one.
  template <typename Call>
  PD_MEMBER void hold(const Problem& p, const Call& plan, int request) {
    first = request;
    const int b = first + threadIdx.x % kWarp;
    own = b < p.batch ? request_tiles<Shape>(p, plan, b) : RequestTiles{};
  }

  // Row tiles of this lane's request in this bucket.
  PD_MEMBER int own_rows(const Problem& p) const {
    return tiles_below<Shape>(p, own, longest, bucket + 1) - tiles_below<Shape>(p, own, longest, bucket);
  }

  template <typename Call>
  PD_MEMBER void count(const Problem& p, const Call& plan) {
    ends = inclusive_sum(own_rows(p) * static_cast<int>(p.kv_heads) * plan.parts);
  }

  // The work of tile `index`, which never falls from call to call; false past the end.
  template <typename Call>
  PD_MEMBER bool find(const Problem& p, const Call& plan, int index, Work& work) {
    while (index >= before + __shfl_sync(~0u, ends, kWarp - 1)) {
      before += __shfl_sync(~0u, ends, kWarp - 1);
      const bool through = first + kWarp >= p.batch;
      if (through && bucket == 0) {
        const int next = Call::kHasSections ? next_section(p) : static_cast<int>(p.batch);
        if (next >= p.batch) {
          ends = 0;
          return false;
        }
        open_section(p, plan, next);
      } else {
        if (p.batch > kWarp) hold(p, plan, through ? 0 : first + kWarp);
        if (through) --bucket;
      }
      count(p, plan);
    }
    const int owner = __popc(__ballot_sync(~0u, before + ends <= index));
    const int rows = __shfl_sync(~0u, own_rows(p), owner);
    const int below = __shfl_sync(~0u, tiles_below<Shape>(p, own, longest, bucket), owner);
    const int heads = static_cast<int>(p.kv_heads) * plan.parts;  // a head's parts are neighbours
    int place = index - (before + __shfl_sync(~0u, ends, owner) - rows * heads);
    const int together = min(heads, max(1, plan.l2_keys / max(key_count(p, plan, first + owner), 1)) * plan.parts);
    const int section = place / (together * rows);
    place -= section * together * rows;
    const int in_section = min(together, heads - section * together);
    const int up = place / in_section;
    work.item = row_tile_item<Shape>(p, plan, first + owner, below + rows - 1 - up);
    const int piece = section * together + place - up * in_section;
    work.head = piece / plan.parts;
    work.part = piece - work.head * plan.parts;
    cut(work.item, work.part, plan.parts);
    return true;
  }
};

}  // namespace paged_attn
