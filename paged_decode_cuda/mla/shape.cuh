// What the warps of a block tell each other, and what the kernel is told.
#pragma once

#include "../balance.cuh"
#include "../prefill/products.cuh"
#include "../prefill/ring.cuh"
#include "sizes.h"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_>
struct MlaShape : MlaSizes {
  using Type = Type_;
};

// Where the parts of an item begin: its first keys are those of cluster `first`, what follows is in the clusters
// first - 1, ..., first - behind.
struct MlaRecord {
  int32_t first, behind;
};

// What the kernels read beside the problem, which is split as split_latents() does.
struct MlaCall : Plan {
  CUtensorMap rope, latents;  // of the cache: [page, kv_head, slot, dim] from the slowest to the fastest
  int32_t box_rows;           // slots of a box; 0: no bulk copies
  int32_t cluster;            // blocks of a cluster
  int32_t slots;              // parts that a block may leave; 0: nothing is ever cut
  int32_t combine_rows;
  MlaRecord* records;  // of every (item, kv_head)
  float* sums;         // [parts, 64, 512]
  float2* ml;          // [parts, 64]
};

// A block leaves a part for an item whose first keys are another's, and one for an item that others end.
PD_DEVICE int mla_part(const MlaCall& call, int cluster, int rank, bool first) {
  return (cluster * call.cluster + rank) * call.slots + (first && call.slots > 1 ? 1 : 0);
}

// What a cluster works on: some tiles of keys of an item and kv_head.
struct MlaWork {
  Item item;
  int head;
  int tile, tile_end;  // counted from the start of the request
  int behind;          // clusters that have the keys behind them
  bool first;          // it has the first keys
  bool exists;
};

// Barriers and messages, outside of the dynamic part.
struct MlaControl {
  uint64_t keys_full[MlaSizes::kStages], keys_empty[MlaSizes::kStages], edge[MlaSizes::kStages];
  uint64_t work_full[2], work_empty[2];
  MlaWork work[2];
  float factor[MlaSizes::kRows];                      // of sums, where a reference score has moved
  bool moved[kWarpgroup / 32];                        // in which 16 rows
  float base[MlaSizes::kRows], sum[MlaSizes::kRows];  // of a finished row
};

}  // namespace paged_attn
