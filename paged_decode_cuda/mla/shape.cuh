// What the warps of a block tell each other, and what the kernel is told.
#pragma once

#include "../balance.cuh"
#include "../hopper.cuh"
#include "../prefill/ring.cuh"
#include "sizes.h"

namespace paged_attn {

// Type_: of q and of the cache.
template <typename Type_>
struct MlaShape : MlaSizes {
  using Type = Type_;
};

// What a cluster leaves: the item and kv_head of which it has the first keys, the others being in the clusters before
// it. behind: how many of those there are; 0: there is nothing to add.
struct alignas(32) MlaRecord {
  int32_t behind, head;
  int32_t b, first_row, rows, q_begin;  // of the item
  int32_t even;                         // whether every pair has the same clusters, see even_record()
};

// What the kernels read beside the problem, which is split as split_latents() does.
struct MlaCall : Plan {
  CUtensorMap rope, latents;      // of the cache: [page, kv_head, slot, dim] from the slowest to the fastest
  int32_t box_rows;               // slots of a box; 0: no bulk copies
  uint64_t copy_policy;           // of L2, for keys that come in boxes
  int32_t cluster;                // blocks of a cluster
  int32_t slots;                  // partials that a block may leave; 0: nothing is ever cut
  bool adds_two;                  // where a row has two partials, the cluster with the first keys adds the other one
  bool expects;                   // see MlaExpected
  MlaRecord* records;             // [clusters]
  float* sums;                    // [partials, half, 32, 128, 4]: see mla_sums()
  float2* ml;                     // [partials, 64]
  unsigned long long* published;  // [partials, half]: the number of the launch when the sums of that half are there
  int64_t partial_count;
  uint32_t combine_shares;  // these two: see MlaPlan
  int32_t combine_shift;
};

PD_DEVICE unsigned long long* mla_published(const MlaCall& call, int64_t partial, int half) {
  return call.published + partial * 2 + half;
}

// The sums of half of the latents of a partial. The 16 bytes at [j, t] are the columns 8 j + 2 (t % 4), and the next,
// of rows t / 32 * 16 + t % 32 / 4 and 8 below: what a thread of the kernel holds.
PD_DEVICE float4* mla_sums(const MlaCall& call, int64_t partial, int half) {
  return reinterpret_cast<float4*>(call.sums) + (partial * 2 + half) * (MlaSizes::kDimV / 8 * kWarpgroup);
}

// The number of a partial. A block leaves one for an item whose first keys another block has, and one for an item whose
// last keys others have (`first`).
PD_DEVICE int mla_partial(const MlaCall& call, int cluster, int rank, bool first) {
  return (cluster * call.cluster + rank) * call.slots + (first && call.slots > 1 ? 1 : 0);
}

// What a cluster works on: some tiles of keys of an item and kv_head.
struct MlaWork {
  Item item;
  int head;
  int tile, tile_end;  // counted from the start of the request
  int behind;          // clusters that have the keys behind them
  // Bits, for the director's registers
  bool first : 1;         // it has the first keys
  bool two_partials : 1;  // this one and another are all: they are added in this kernel
  bool asked : 1;         // it has the queries that are asked for before there is work
  bool exists : 1;
};

// Barriers and messages, outside of the dynamic part.
struct MlaControl {
  using Barriers = uint64_t[MlaSizes::kStages][MlaSizes::kHalves];
  Barriers keys_full, keys_empty, edge;
  uint64_t ready[MlaSizes::kConsumers];  // by whose weights
  uint64_t work_full[2], work_empty[2];
  uint64_t meet;  // of all consumers, twice for each work with rows: its queries are there, its sums are
  MlaWork work[2];
  int2 expected, asked;  // see MlaExpected: request and kv_head; whose queries work still finds asked for
  // What the consumer that has weighed a tile tells the other one
  bool moved[kWarpgroup / 32];    // reference scores, in which 16 rows
  float factor[MlaSizes::kRows];  // of sums, where one has moved
  float base[MlaSizes::kRows];    // the reference scores
  float sum[2][MlaSizes::kRows];  // of the weights that either has made, of a finished row
};

}  // namespace paged_attn
