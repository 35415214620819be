// When the kernel for multi-head latent attention serves a call, and how it is launched. Arithmetic only, no CUDA.
#pragma once

#include <stdint.h>

#include "../limits.h"
#include "../plan.h"
#include "sizes.h"
#include "spec/problem.h"

namespace paged_attn {

// kUsual: over 16-bit caches, in blocks of 64 rows; kFewRows: in blocks of 16 or 32. The others are for 8-bit caches,
// in blocks of 64 and 32 rows.
enum class MlaKernel { kUsual, kFewRows, kNarrow, kNarrowFewRows };

struct MlaPlan {
  MlaKernel kernel;
  Plan work;         // an item is the rows of a cluster
  bool all_scores;   // with softcap and ALiBi
  bool latents;      // of kFewRows: else keys and values are 512 numbers each
  bool basic;        // of kFewRows: no more than plan_basic() is for, with balanced cuts and no packed keys
  int rows;          // of a block
  int shared_bytes;  // of a block
  int threads;
  int32_t box_rows;       // slots of a page that one bulk copy takes; 0: pages are too small for that
  int64_t clusters;       // of the grid
  int cluster;            // blocks of each, with rows of the same keys
  bool read_once;         // no two clusters copy the same keys, as far as the host can tell
  bool cut;               // some rows may have their keys in several clusters
  int64_t partial_count;  // partials that all clusters may leave, with room for 64 rows each
  bool adds_two;          // where a row has two partials, the cluster with the first keys adds the other one
  bool expects;           // a cluster knows its first request before it knows any length, if these hardly differ
  // The kernel that adds the other partials: shares (see combine.cu), log2 of those of an item.
  int combine_threads;
  bool combine_together;  // the warps of a block add a share together; else each has shares of its own
  int32_t combine_shift;
  int64_t combine_shares, combine_blocks;
};

// "" or why the kernels do not serve this: latents; keys and values of 512 numbers each.
const char* mla_why_not(const Problem& p, const DeviceLimits& limits);
const char* wide_heads_why_not(const Problem& p, const DeviceLimits& limits);

// For problems that fit.
MlaPlan plan_mla(const Problem& p, const DeviceLimits& limits);

// The same call with the latents as values and as `qv`, the rest as keys and as q.
Problem split_latents(const Problem& p);

}  // namespace paged_attn
