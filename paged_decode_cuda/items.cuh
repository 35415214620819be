// The rows that are handled together, and the keys that they see, from the lengths on the device.
//
// An item is 2^row_shift rows of one request at most: consecutive pairs of a token and a head of a group, the same for
// every kv_head. Its keys are counted in tiles of 2^tile_shift.
//
//      token     0     1     2     3     4        group 3, 4 rows in an item
//      head    0 1 2 0 1 2 0 1 2 0 1 2 0 1 2
//      item    0.....| 1.....| 2.....| 3....|     the last one has 3 rows
#pragma once

#include "lanes.h"
#include "plan.h"
#include "spec/ranges.h"

namespace paged_attn {

// Where the tokens of request b begin. Never outside of q and out, whatever cu_seqlens_q holds.
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

// The row of the table, or of a contiguous cache, that a request reads. A row that does not exist is not looked up.
PD_DEVICE int table_row(const Problem& p, int b) {
  if (!p.cache.cache_batch_idx) return b;
  const int row = p.cache.cache_batch_idx[b];
  return p.cache.block_table ? min(max(row, 0), static_cast<int>(p.cache.table_rows) - 1) : row;
}

// Whether an entry of the block table names a page of the cache.
PD_DEVICE bool page_exists(const Problem& p, int page) {
  return static_cast<uint32_t>(page) < static_cast<uint32_t>(p.cache.num_pages);
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

// The keys that some row of the item sees, and those that every row sees. Both ends of what a row sees grow with its
// token, so the first and the last row bound them all.
PD_DEVICE void find_keys(const Problem& p, const Plan& plan, Item& item) {
  const KvRange first = row_keys(p, plan, item, plan.group.divide(item.first_row));
  const KvRange last = row_keys(p, plan, item, plan.group.divide(item.first_row + max(item.rows, 1) - 1));
  item.key_begin = first.begin;
  item.key_end = last.end;
  item.inner_begin = last.begin;
  item.inner_end = first.end;
}

// Bounded, so that no sum with a position overflows, whatever cache_leftpad holds.
PD_DEVICE int bounded_leftpad(const Problem& p, const Plan& plan, int b) {
  return p.cache_leftpad ? min(max(p.cache_leftpad[b], 0), plan.max_keys) : 0;
}

PD_DEVICE int basic_length(const Problem& p, const Plan& plan, int b) {
  return min(max(p.cache_seqlens[b] + plan.new_keys, 0), plan.max_keys);
}

// At least one, so that someone writes the rows.
PD_DEVICE int basic_tiles(const Plan& plan, int kv_len) {
  return max((kv_len + (1 << plan.tile_shift) - 1) >> plan.tile_shift, 1);
}

// Where the tiles of rows of a request begin among packed ones. The rows of all requests stand one behind the other,
// and b tiles more are counted before request b. As floor(x + y) + 1 >= floor(x) + ceil(y), no two requests share a
// tile.
PD_DEVICE int packed_begin(const Problem& p, const Plan& plan, int b) {
  return (query_begin(p, b) * static_cast<int>(p.group) >> plan.row_shift) + b;
}

// The request whose tiles hold the packed tile `index`: the last that begins at it or before it. find_request() would
// say the same, but with it two kernels of `decode` spill.
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

// Of a basic call without cu_seqlens_q: an item is a request, and all have the same number of tokens.
PD_DEVICE Item basic_item(const Problem& p, const Plan& plan, int index) {
  Item item = {};
  item.b = index;
  item.q_len = static_cast<int>(p.max_q_len);
  item.rows = item.q_len * static_cast<int>(p.group);
  item.kv_len = item.key_end = basic_length(p, plan, index);
  item.inner_end = max(item.kv_len - plan.hidden_keys, 0);
  item.tiles = basic_tiles(plan, item.kv_len);
  return item;
}

PD_DEVICE Item load_item(const Problem& p, const Plan& plan, int index) {
  if (plan.basic && !p.cu_seqlens_q) return basic_item(p, plan, index);
  Item item = {};
  int tile, first_tile = 0;
  if (index < plan.direct_items) {
    item.b = plan.basic ? index : plan.row_tiles.divide(index);
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
  item.kv_len =
      plan.basic ? basic_length(p, plan, item.b) : min(cached_length(p, item.b) + new_length(p, item.b), plan.max_keys);
  item.leftpad = bounded_leftpad(p, plan, item.b);
  const bool exists = tile >= first_tile && tile <= (rows - 1) >> plan.row_shift;
  item.first_row = exists ? tile << plan.row_shift : 0;
  item.rows = exists ? min(1 << plan.row_shift, rows - item.first_row) : 0;
  if (plan.basic) {
    // All keys, as where the number of tokens is known.
    item.key_end = item.kv_len;
    item.inner_end = static_cast<int>(row_keys(p, plan, item, 0).end);
    item.tiles = item.rows == 0 ? 0 : basic_tiles(plan, item.kv_len);
    return item;
  }
  find_keys(p, plan, item);
  item.first_tile = item.key_begin >> plan.tile_shift;
  const int end_tile = (item.key_end + (1 << plan.tile_shift) - 1) >> plan.tile_shift;
  item.tiles = item.rows == 0 ? 0 : max(1, end_tile - item.first_tile);
  return item;
}

}  // namespace paged_attn
