// A model of how long a call takes, for the planner: it compares cuts of keys, and tiles of rows.
#pragma once

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"

namespace paged_attn {

// Of a call with so many tiles of rows of this instance.
class CallTimes {
 public:
  // may_read: whether tiles only read where requests have one each. Tall ones with rows for most of them compute.
  CallTimes(const Problem& p, int64_t tiles, const PrefillInstance& instance, const DeviceLimits& limits,
            bool may_read = true);

  // Tiles of rows do not compute for longer than they read.
  bool reads() const { return reads_; }

  // Rounds of tiles of rows. Where no two read the same keys, memory bounds: a round that is not full takes as long as
  // its tiles read, but no multiprocessor reads faster than it can.
  double rounds(int64_t splits) const;

  // How long a multiprocessor alone reads a key, in ns.
  double alone() const;

  // How long a key takes a tile in a round of its own, in ns: to be read, or for all rows of one that computes.
  double of_round() const;

  // From how many keys on splits gain 10 %, where they are all there at the same time and most of the GPU is idle
  // without.
  double least_keys_when_idle(int64_t splits) const;

  // From how many keys on splits pay: rounds(1) * keys against rounds(splits) * (keys / splits + partial) + combine.
  // With several rounds both are less by what unequal() says, but never less than the longest tile. Infinite: never.
  double least_keys(int64_t splits) const;

  // How long the call takes, in ns, where the longest tile of rows sees so many keys.
  double time(int64_t splits, double keys) const;

 private:
  // Tiles of a prompt see from no keys to all of them: over as many keys as it has queries their number falls. As long
  // ones come first, a block with several tiles has less to do than so many long ones, by this number of keys.
  double unequal(int64_t splits) const;

  // With so many keys or fewer the longest tile takes as long as those of a block with several.
  double longest_alone(int64_t splits) const;

  double tiles_, processors_, rate_;  // the last: GB/s for each of them while all read
  bool reads_, even_;
  double queries_;        // of a prompt, in whose tiles of rows the number of keys falls by so much
  double key_, cut_key_;  // ns; and how many times that of a split
  double key_bytes_, partial_bytes_, idle_key_;
};

}  // namespace paged_attn
