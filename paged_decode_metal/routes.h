// The ways to run attention, best first. The first that takes a problem runs it.
#pragma once

#include <string>
#include <vector>

#include "encode.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// How a call is cut. A row is a token and a head of the group; rows of one request and kv_head form tiles.
struct Plan {
  // attend: rows of a tile, dimensions that its kernel covers, simdgroups of a threadgroup
  int64_t rows, dims, simdgroups;
  // prefill: rows of a tile; 0: everything is left to attend
  int64_t prefill_rows;
  // Splits of the keys of a request of up to split_rows rows, at most; others are not cut. The rest as in Arguments.
  int64_t max_splits, split_rows, split_keys, wanted_splits;
  // Tiles of all requests in the grid of attend; 0: the first tile of each request has its place there.
  int64_t packed_row_tiles;
};

struct Route {
  const char* name;
  std::string (*why_not)(const Problem&);  // "": it takes the problem
  Plan (*plan)(const Problem&);
  std::vector<Dispatch> (*dispatches)(const Problem&, const Plan&);
};

const std::vector<Route>& routes();

}  // namespace paged_attn
