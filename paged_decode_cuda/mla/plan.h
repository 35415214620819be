// When the kernel for multi-head latent attention serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

struct MlaPlan {
  Plan work;         // an item is the rows of a cluster
  bool all_scores;   // with softcap and ALiBi
  int shared_bytes;  // of a block
  int32_t box_rows;  // slots of a page that one bulk copy takes; 0: pages are too small for that
  int64_t clusters;  // of the grid
  int cluster;       // blocks of each: 64 rows of the same keys in each block
  bool cut;          // some rows may have their keys in several clusters
  int64_t parts;     // that all clusters may leave, 64 rows each
  // The kernel that adds parts. A place is half of two rows. Where there are few, each has a block with four teams of
  // threads; where there are many, as many blocks as the device holds take them in turns.
  bool by_cluster;  // it looks for them cluster by cluster, not pair by pair
  bool few_rows;
  int64_t combine_places, combine_blocks;
};

// "" or why the kernel does not serve this.
const char* mla_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
MlaPlan plan_mla(const Problem& p, const DeviceLimits& limits);

// The same call with the latents as values and as `qv`, the rest as keys and as q.
Problem split_latents(const Problem& p);

}  // namespace paged_attn
