// How the keys of tiles of rows are cut, as far as the host decides; cuts.cuh has the rest.
#pragma once

#include "call_times.h"

namespace paged_attn {

constexpr int64_t kSplitKeys = 512;    // fewer are not worth a split, where multiprocessors are busy without
constexpr int64_t kIdle = 3;           // times as many multiprocessors as tiles of rows: most are idle without splits
constexpr int64_t kMostRounds = 4;     // of tiles: with more of them a long tile hardly takes longer than all rounds
constexpr int64_t kPartialTiles = 5;   // of rows, for each multiprocessor: their partials have memory
constexpr double kChoiceSaves = 0.02;  // of the time, at least, what is chosen by its cost: the model is not exact

// How the keys of tiles of rows are cut: into so many splits, where the longest tile sees so many keys; and, where
// lengths differ, into how many in all (`wanted`) and of one tile at most (`most`). The device, which knows the
// lengths, takes fewer splits where they would have fewer keys than `least` each, and `least_long` where lengths
// differ.
struct Cuts {
  int64_t splits, keys, wanted, most;
  int64_t least = 1, least_long = kSplitKeys;
};

// As asked for, else what pays. The kernel compares that with the lengths that it finds, as the table may be much
// wider. Where a result must not depend on the other requests, neither may the cuts. tiles: of rows, at most.
Cuts cuts_of(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits);

// What a call with these cuts costs, to compare it with others: its time in ns, as the sum of four likely numbers of
// keys. `keys` is the most: twice likely if it is not much more than there are queries, else prompts are.
double cost_of(const Problem& p, const CallTimes& times, const Cuts& cuts, int64_t keys);

}  // namespace paged_attn
