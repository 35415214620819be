// The tiles of rows of a request, and the tiles of keys that each of them sees.
#pragma once

#include "shape.cuh"

namespace paged_attn {

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

// Tile number `tile` of the rows of the item's request.
template <typename Shape, typename Call>
PD_DEVICE void take_rows(const Problem& p, const Call& plan, int tile, Item& item) {
  const int rows = static_cast<int>(plan.tile_rows.divisor);
  item.first_row = tile * rows;
  item.rows = max(0, min(rows, item.q_len * static_cast<int>(p.group) - item.first_row));
  find_keys(p, plan, item);
  item.first_tile = item.key_begin / Shape::kKeys;
  const int end_tile = (item.key_end + Shape::kKeys - 1) / Shape::kKeys;
  item.tiles = item.rows == 0 ? 0 : max(0, end_tile - item.first_tile);
}

}  // namespace paged_attn
