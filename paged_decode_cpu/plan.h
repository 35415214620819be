// How a problem is cut into tasks for threads.
#pragma once

#include <vector>

#include "kernel.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// Partials of an item are merged in groups of this many, and the results in groups again. So little is left to do when
// the last one arrives.
constexpr int64_t kMergeGroup = 8;

// Pairs of a key and a row: of some keys of an item, and of all its keys.
inline int64_t cost_of(const Item& item, KvRange keys) { return (keys.end - keys.begin) * item.rows() * item.heads(); }
inline int64_t cost_of(const Item& item) { return cost_of(item, item.keys); }

// An item of rows with the way its keys are split.
struct Work {
  Item item;
  int64_t first_split, num_splits;  // in Plan::splits
  int64_t partial_offset;           // floats
  int64_t first_group;              // of the groups of all works in which partials are merged
};

struct Task {
  int64_t work, split;
  int64_t cost;
};

struct Plan {
  std::vector<Work> works;
  std::vector<KvRange> splits;
  std::vector<Task> tasks;
  int64_t threads = 1;
  int64_t partial_floats = 0;
  int64_t merge_groups = 0;
  int64_t scratch_bytes = 0;
};

// With `threads` threads at most. Reads lengths only, which an append leaves as they are.
Plan make_plan(const Problem& p, const Kernel& kernel, int64_t threads);

}  // namespace paged_attn
