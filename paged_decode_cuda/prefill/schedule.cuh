// Which tile of rows a block takes next: the long ones first, by a counter that all blocks share.
//
// Tiles are in buckets by the number of their keys, longest first. Where lengths decide into how many parts keys are
// cut, it is by those of a part. In a bucket tiles are ordered by request, then by sections of kv_heads whose keys L2
// can hold, then by row tile (latest first, whose keys are the most), then by kv_head. Nobody makes a list of them: a
// warp counts the tiles of 32 requests at a time and walks on from where its last one was. Where tiles of rows are few
// for each key, all this is done for some requests, then for the next ones.
#pragma once

#include "shape.cuh"

namespace paged_attn {

constexpr int kBucketBits = 3;         // with more buckets a block takes longer to find its first tile
constexpr float kFewRounds = 3;        // of parts: with more of them it matters little whether the last one is full
constexpr float kMostOver = 0.125f;    // of a round
constexpr int kSectionTiles = 32;      // of rows: with as many a kv_head has several in every bucket
constexpr int kMostCounted = 1 << 20;  // tiles of keys: sums of them fit into 32 bits

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

PD_DEVICE void close_tickets(unsigned long long* tickets) { store_relaxed(tickets, 0); }

// Keys of a request, new ones included.
PD_DEVICE int key_count(const Problem& p, const Plan& plan, int b) {
  return min(max(cached_length(p, b) + new_length(p, b), 0), plan.max_keys);
}

// A request: its lengths. take_rows() says which of its rows.
PD_DEVICE Item request_item(const Problem& p, const Plan& plan, int b) {
  Item item = {};
  item.b = b;
  item.q_begin = query_begin(p, b);
  item.q_len = query_length(p, b);
  item.kv_len = key_count(p, plan, b);
  item.leftpad = bounded_leftpad(p, plan, b);
  return item;
}

// Rows [tile * Shape::kRows, ...) of the item's request.
template <typename Shape>
PD_DEVICE void take_rows(const Problem& p, const Plan& plan, int tile, Item& item) {
  item.first_row = tile * Shape::kRows;
  item.rows = max(0, min(Shape::kRows, item.q_len * static_cast<int>(p.group) - item.first_row));
  find_keys(p, plan, item);
  item.first_tile = item.key_begin / Shape::kKeys;
  const int end_tile = (item.key_end + Shape::kKeys - 1) / Shape::kKeys;
  item.tiles = item.rows == 0 ? 0 : max(0, end_tile - item.first_tile);
}

// Leaves one of the parts that the keys are cut into. It may have none.
PD_DEVICE void take_part(Item& item, int part, int parts) {
  const int each = (item.tiles + parts - 1) / parts, first = min(part * each, item.tiles);
  item.first_tile += first;
  item.tiles = min(each, item.tiles - first);
}

// Walks through all tiles in their order. The lanes of one warp call everything together; each has a request. Whoever
// has the request of a tile writes what it is where all of them see it. Call: of the kernel.
//
// What is done for every tile is short, for it shares the cache of instructions with the loops of the other warps: 256
// multiplications more cost 0.6 us of each tile (docs/cuda.md).
template <typename Shape>
struct Scheduler {
  int bucket, first;  // bucket and first request of the chunk that the lanes hold
  RequestTiles own;   // of this lane's request
  int pieces;         // of each of its tiles of rows: kv_heads times parts of keys, a head's parts being neighbours
  int ends;           // tiles up to it, inclusive; of all lanes how many there are, once none is left
  bool left;          // whether there are tiles in buckets below this one, as far as all chunks of it were held

  // Also writes the work of tile `index`, where up to 32 requests need no buckets: each has one tile of rows, and all
  // of them are in the first bucket; or no block has a second tile, so that the order does not matter. False: find() is
  // to be asked.
  template <typename Call, typename Known>
  PD_MEMBER bool start(const Problem& p, const Call& plan, Known& known, int index, Work& work) {
    const int lane = threadIdx.x % kWarp;
    left = false;
    bucket = first_bucket(p);
    int most = 1, rows = 0, tiles = 0;
    Item item = {};
    // The first requests come last: they stay.
#pragma unroll 1
    for (int request = (static_cast<int>(p.batch) - 1) / kWarp * kWarp; request >= 0; request -= kWarp) {
      item = look_at(p, plan, request);
      if (p.batch > kWarp) known.note(request + lane, own.rows, own.most);
      most = max(most, own.most);
      if constexpr (Call::kCutsKeys) {
        rows += own.rows;
        tiles += own.rows * min(own.most, kMostCounted);
      }
    }
    const int longest = __reduce_max_sync(~0u, most);
    if (lane == 0) {
      known.longest = longest;
      if constexpr (Call::kCutsKeys)
        work.part_rate = plan.parts > 1 && longest >= plan.part_tiles ? -parts_alike(plan, longest) : Work::kWhole;
    }
    __syncwarp();
    const bool in_first = lane >= p.batch || (own.rows == 1 && own.most >= bucket_bound(p, longest, bucket));
    const bool one_bucket = p.batch <= kWarp && __ballot_sync(~0u, in_first) == ~0u;
    if constexpr (Call::kCutsKeys) {
      if (!one_bucket && plan.most_parts > plan.parts && longest >= plan.part_tiles)
        cut_by_length(p, plan, known, longest, rows, tiles, work);
    }
    count_pieces(p, plan, work);
    if (p.batch <= kWarp) {
      ends = one_bucket ? min(lane + 1, static_cast<int>(p.batch)) * pieces : inclusive_sum(own.rows * pieces);
      if (one_bucket || __shfl_sync(~0u, ends, kWarp - 1) <= plan.blocks_in_grid)
        return take_in_order(p, plan, index, item, work);
    } else if constexpr (Call::kCutsKeys) {
      const bool alike = work.part_rate <= 0.f;
      if (alike && __reduce_add_sync(~0u, rows) * pieces <= plan.blocks_in_grid) put_into_one_bucket(known);
    }
    // As if a bucket above the first one had been counted.
    ++bucket;
    first = (static_cast<int>(p.batch) - 1) / kWarp * kWarp;
    own.below = own.rows;
    ends = 0;
    left = true;
    return false;
  }

  // The work of tile `index`, those of all requests one behind the other. `item`: the last tile of this lane's request.
  template <typename Call>
  PD_MEMBER bool take_in_order(const Problem& p, const Call& plan, int index, const Item& item, Work& work) {
    bucket = 0;  // nothing is left in the others
    own.in_bucket = own.rows;
    const int lane = threadIdx.x % kWarp, owner = __popc(__ballot_sync(~0u, ends <= index));
    if (owner == kWarp) return take_none(work);
    if (lane == owner) {
      const int piece = index - (ends - own.rows * pieces), tile = own.rows > 1 ? piece / pieces : 0;
      work.item = item;
      if (tile < own.rows - 1) take_rows<Shape>(p, plan, tile, work.item);
      take_piece(plan, piece - tile * pieces, work);
    }
    __syncwarp();
    return true;
  }

  // Where no block has a second one their order does not matter either: all tiles are in the lowest bucket.
  template <typename Known>
  PD_MEMBER void put_into_one_bucket(Known& known) {
    bucket = 0;
    if (threadIdx.x % kWarp == 0) known.longest = Known::kOneBucket;
    __syncwarp();
  }

  static PD_MEMBER bool take_none(Work& work) {
    if (threadIdx.x % kWarp == 0) work.exists = false;
    __syncwarp();
    return false;
  }

  // Where lengths differ much: about as many parts as the host says, all of about the same length. Lanes have counted
  // `rows` tiles of rows and their `tiles` of keys.
  template <typename Call, typename Known>
  PD_MEMBER void cut_by_length(const Problem& p, const Call& plan, Known& known, int longest, int rows, int tiles,
                               Work& work) {
    const int all_rows = __reduce_add_sync(~0u, rows);
    const float all = static_cast<float>(__reduce_add_sync(~0u, tiles));
    if (all >= 0.875f * static_cast<float>(longest) * static_cast<float>(all_rows)) return;
    const float heads = static_cast<float>(p.kv_heads), lost = 0.5f * heads * static_cast<float>(all_rows);
    float rate = fminf(fmaxf(plan.parts_wanted - lost, 0.f) / (heads * all), plan.most_part_rate);
    const float made = fminf(static_cast<float>(longest) * rate, static_cast<float>(plan.most_parts));
    if (made < 1.25f * static_cast<float>(plan.parts)) return;
    int part = static_cast<int>(ceilf(static_cast<float>(longest) / made));
    const float grid = static_cast<float>(plan.blocks_in_grid);
    bool one_round = false;
    if (plan.parts_wanted <= kFewRounds * grid) {
      // A few parts more than whole rounds of them would take a round of their own. Longer ones are fewer.
      const float rounds = all_parts(p, plan, known, part_rate(part)) / grid, over = rounds - floorf(rounds);
      if (rounds > 1 && over > 0 && over <= kMostOver) ++part;
      rate = part_rate(part);
      one_round = rounds <= 1 + kMostOver;
    }
    if (threadIdx.x % kWarp == 0) {
      known.longest = part;
      work.part_rate = rate;
    }
    __syncwarp();
    if (one_round) put_into_one_bucket(known);
  }

  // Parts of a tile of keys, if no part has more than so many; whole parts stay so where this is rounded.
  PD_MEMBER static float part_rate(int tiles) { return 0.99999f / static_cast<float>(tiles); }

  // Parts of all tiles of rows, as far as requests are remembered.
  template <typename Call, typename Known>
  PD_MEMBER float all_parts(const Problem& p, const Call& plan, const Known& known, float rate) const {
    int parts = own.rows * parts_of(plan, own.most, rate);
#pragma unroll 1
    for (int b = kWarp + threadIdx.x % kWarp; b < min(static_cast<int>(p.batch), Known::kMost); b += kWarp) {
      int rows, most;
      if (known.find(b, rows, most)) parts += rows * parts_of(plan, most, rate);
    }
    return static_cast<float>(__reduce_add_sync(~0u, parts)) * static_cast<float>(p.kv_heads);
  }

  // Into how many parts every tile of rows is cut, if the longest one sees so many tiles of keys.
  template <typename Call>
  PD_MEMBER static float parts_alike(const Call& plan, int longest) {
    const float worth = floorf(static_cast<float>(longest) * plan.parts_of_tile);
    return fminf(fmaxf(worth, 1.f), static_cast<float>(plan.parts));
  }

  // Into how many parts so many tiles of keys are cut.
  template <typename Call>
  PD_MEMBER static int parts_of(const Call& plan, int tiles, float rate) {
    return max(1, min(static_cast<int>(ceilf(static_cast<float>(tiles) * rate)), plan.most_parts));
  }

  // Into how many parts lengths cut the keys of this lane's tiles; 1 where they do not decide.
  template <typename Call>
  PD_MEMBER int parts_by_length(const Call& plan, const Work& work) const {
    if constexpr (Call::kCutsKeys) {
      return parts_of(plan, own.most, work.part_rate);
    } else {
      return 1;
    }
  }

  // Into how many parts they are cut.
  template <typename Call>
  PD_MEMBER int parts(const Call& plan, const Work& work) const {
    if constexpr (Call::kCutsKeys) {
      if (work.part_rate < 0.f) return static_cast<int>(-work.part_rate);
    }
    return parts_by_length(plan, work);
  }

  // Once it is known how keys are cut.
  template <typename Call>
  PD_MEMBER void count_pieces(const Problem& p, const Call& plan, const Work& work) {
    pieces = static_cast<int>(p.kv_heads) * parts(plan, work);
  }

  // Of a tile of rows: one of its kv_heads and parts.
  template <typename Call>
  PD_MEMBER void take_piece(const Call& plan, int piece, Work& work) const {
    work.exists = true;
    work.head = piece;
    work.part = 0;
    work.cut = Call::kCutsKeys && work.part_rate != Work::kWhole;
    if (!work.cut) return;
    work.parts = parts(plan, work);
    work.head = piece / work.parts;
    work.part = piece - work.head * work.parts;
    take_part(work.item, work.part, work.parts);
  }

  // A section is what is walked through from the longest tiles to the shortest: all requests. But where a kv_head has
  // few tiles of rows, every round of tiles would read all keys from memory. Then a section is as many requests from
  // this one on as have their keys in L2, if each of them has tiles for half of the blocks. They may fill it, twice
  // what l2_keys says: with smaller ones blocks wait for each other's keys. This forgets the requests that belong to
  // later ones.
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
    own.rows = max(0, (last.q_len * static_cast<int>(p.group) + Shape::kRows - 1) / Shape::kRows);
    take_rows<Shape>(p, plan, max(own.rows - 1, 0), last);
    own.most = last.tiles;
    return last;
  }

  // The same, once all of them have been looked at.
  template <typename Call, typename Known>
  PD_MEMBER void hold(const Problem& p, const Call& plan, const Known& known, int request) {
    own = {};
    const int b = request + threadIdx.x % kWarp;
    if (b < p.batch && (p.batch <= kWarp || !known.find(b, own.rows, own.most))) look_at(p, plan, request);
    first = request;
  }

  // Of how many buckets there are. With more requests than the lanes hold every bucket is a walk over all of them.
  PD_MEMBER static int bucket_bits(const Problem& p) { return p.batch > kWarp ? kBucketBits - 1 : kBucketBits; }

  // That of the longest tiles.
  PD_MEMBER static int first_bucket(const Problem& p) { return (1 << bucket_bits(p)) - 1; }

  // Tiles of keys from which on a row tile is in a bucket.
  PD_MEMBER static int bucket_bound(const Problem& p, int longest, int number) {
    return (longest * number + (1 << bucket_bits(p)) - 1) >> bucket_bits(p);
  }

  // Row tiles of this lane's request that lie in buckets below this one.
  template <typename Known>
  PD_MEMBER int tiles_below(const Problem& p, const Known& known, int parts, int number) const {
    if (number > (known.longest == Known::kOneBucket ? 0 : first_bucket(p))) return own.rows;
    const int bound = bucket_bound(p, known.longest, number) * parts;
    if (own.most < bound) return own.rows;
    if (own.rows <= 1 || number == 0 || p.window_right < 0 || p.window_left >= 0 || p.attention_chunk > 0) return 0;
    // Causal: the number of keys falls by kRows / group from one row tile to the one before.
    const int64_t keys = int64_t{own.most - bound} * Shape::kKeys;
    const int64_t above = keys * p.group / Shape::kRows + 1;
    return static_cast<int>(max(own.rows - above, int64_t{0}));
  }

  // The tiles of this bucket, behind so many others; own.below is still of the one above.
  template <typename Call, typename Known>
  PD_MEMBER void count(const Problem& p, const Call& plan, const Known& known, const Work& work, int before) {
    const int above = own.below;
    own.below = tiles_below(p, known, parts_by_length(plan, work), bucket);
    own.in_bucket = above - own.below;
    left = left || __any_sync(~0u, own.below > 0);
    ends = before;
    if (__any_sync(~0u, own.in_bucket > 0)) ends += inclusive_sum(own.in_bucket * pieces);
  }

  // The work of tile `index`, which never falls from call to call. False past the end, where none exists.
  template <typename Call, typename Known>
  PD_MEMBER bool find(const Problem& p, const Call& plan, Known& known, int index, Work& work) {
    const int lane = threadIdx.x % kWarp;
    while (true) {
      const int before = __shfl_sync(~0u, ends, kWarp - 1);  // tiles up to the end of this chunk
      if (index < before) break;
      int request = first + kWarp < p.batch ? first + kWarp : 0;
      const bool all_buckets = request == 0 && !left;
      if (request == 0) {
        --bucket;
        left = false;
      }
      if (all_buckets) {
        request = Call::kHasSections ? next_section(p) : static_cast<int>(p.batch);
        bucket = request < p.batch ? first_bucket(p) : 0;
        if (request >= p.batch) {
          ends = before;
          return take_none(work);
        }
      }
      if (all_buckets || p.batch > kWarp) {
        hold(p, plan, known, request);
        count_pieces(p, plan, work);
        own.below = tiles_below(p, known, parts_by_length(plan, work), bucket + 1);
      }
      if constexpr (Call::kHasSections) {
        if (bucket == first_bucket(p)) end_section(p, plan);
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
      const int together = max(1, plan.l2_keys / max(work.item.kv_len, 1)) * parts(plan, work);
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
    take_piece(plan, piece, work);
  }
};

}  // namespace paged_attn
