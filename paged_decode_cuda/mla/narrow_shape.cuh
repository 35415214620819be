// What the warps of a block tell each other in the kernel for 8-bit caches.
#pragma once

#include "shape.cuh"

namespace paged_attn {

// Rows 2 i and 2 i + 1, which lie in neighbouring registers. Scores in log2 units are q.k * scale.
struct alignas(16) RowPair {
  float scale[2], base[2];  // base: the reference scores
};

// Of a row that has seen no key: far below every score, and finite, so that differences are numbers.
constexpr float kNoBase = -1.7e38f;

// Barriers and messages, outside of the dynamic part.
struct NarrowControl {
  static constexpr int kRows = NarrowMlaSizes::kRows, kConsumers = NarrowMlaSizes::kConsumers, kWarps = 4;
  uint64_t keys_full[NarrowMlaSizes::kStages], keys_empty[NarrowMlaSizes::kStages], edge[NarrowMlaSizes::kStages];
  uint64_t ready[kConsumers];  // by whose weights
  uint64_t work_full[2], work_empty[2];
  MlaWork work[2];
  // Of the rows
  RowPair pairs[kRows / 2];
  int2 seen[kRows];  // keys: the first, and behind the last
  // Where a score is no positive multiple of q.k: the factor, ALiBi's slope, the place of the token
  bool multiples;  // they are positive multiples
  float score_scale[kRows], slope[kRows];
  int position[kRows];
  bool moved[kConsumers];                      // reference scores, with the last tile of a consumer
  alignas(8) float factor[kConsumers][kRows];  // of sums, where one has moved; read in pairs
  float top[kWarps][kRows];                    // the largest score of a tile, of the keys of a warp
  float sum[kConsumers][kWarps][kRows];        // of the weights of a finished row
  float last_factor[kConsumers][kRows];        // from its sums to its output
  float other_factor[kConsumers][kRows];       // of the part of another cluster
  int64_t target[kConsumers][kRows];           // where its output begins; -1: nowhere
};

}  // namespace paged_attn
