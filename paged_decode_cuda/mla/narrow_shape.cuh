// What the warps of a block tell each other in the kernel for 8-bit caches.
#pragma once

#include "shape.cuh"

namespace paged_attn {

// Of a row that has seen no key: far below every score, and finite, so that differences are numbers.
constexpr float kNoBase = -1.7e38f;

// Barriers and messages, outside of the dynamic part.
template <typename Sizes>
struct NarrowControl {
  static constexpr int kRows = Sizes::kRows, kConsumers = Sizes::kConsumers;
  static constexpr int kBuffers = Sizes::kWeightBuffers, kWarps = 4;
  uint64_t keys_full[Sizes::kStages], keys_empty[Sizes::kStages], edge[Sizes::kStages];
  uint64_t scores_full, scores_empty, ready[kBuffers], weights_empty[kBuffers];
  uint64_t work_full[2], work_empty[2];
  uint64_t meet;  // as in MlaControl, with the weigher
  MlaWork work[2];
  int2 expected, asked;  // as in MlaControl
  // Of the rows
  int2 seen[kRows];    // keys: the first, and behind the last
  float scale[kRows];  // from q.k to a score
  float slope[kRows];  // of ALiBi; with it the place of the token
  int position[kRows];
  float2 ml[kRows];  // of a finished row: reference score, sum of weights
  // With the weights of a tile
  alignas(4) bool moved[kBuffers][kWarps];   // reference scores, in the rows of which warp
  alignas(8) float factor[kBuffers][kRows];  // of sums, where one has moved; read in pairs
  // Of the end of a row, by half of the latents
  float own_factor[kConsumers][kRows], other_factor[kConsumers][kRows];  // of partials that are added
  float last_factor[kConsumers][kRows];                                  // from its sums to its output
  int64_t target[kConsumers][kRows];                                     // where its output begins; -1: nowhere
};

}  // namespace paged_attn
