// The warps that make weights of scores in the kernel for 8-bit caches. They stand between the two products, which are
// the consumers': these leave q.k of a tile in shared memory and find the weights there, one tile later.
//
// A thread has 32 of the keys of one row: pieces 2 i + h of 8 keys, where h = lane / 16. So what belongs to a row is in
// registers, and the two threads that have a row are in one warp.
#pragma once

#include "../prefill/weights.cuh"
#include "narrow_loader.cuh"

namespace paged_attn {

// Where q.k of a row and a key lies: a key has the 64 rows in 256 bytes. Groups of 8 rows stand in another order for
// each of 8 keys, so that neither those who store them nor those who load them meet in a bank.
PD_DEVICE uint32_t score_place(unsigned key, unsigned group) {
  return key * NarrowMlaSizes::kRows * 4 + (group ^ key % 8 ^ key / 8 % 2 * 2) * 32;
}

template <bool kFull>
struct NarrowWeigher {
  using Sizes = NarrowMlaSizes;
  static constexpr int kKeys = Sizes::kKeys, kOwnPieces = kKeys / 16;
  static constexpr int kAtOnce = kFull ? 1 : kOwnPieces;  // pieces; with every score there are no registers for more
  static constexpr float kMost = 4096.f;                  // what weights of a thread add up to; fp16 holds them

  const Problem& p;
  const MlaCall& call;
  NarrowControl& control;
  uint32_t shared;
  Ring<2> slot;
  uint32_t count;  // of tiles before this one
  // Of the row
  float base, l;   // reference score in log2 units, and this thread's part of the sum of weights
  bool multiples;  // scores are positive multiples of q.k
  float scale;     // from what is compared to log2 units

  static PD_MEMBER unsigned thread() { return static_cast<unsigned>(this_thread()) % kWarpgroup; }
  static PD_MEMBER unsigned row() { return thread() / kWarp * 16 + thread() % 16; }
  static PD_MEMBER unsigned half() { return thread() % kWarp / 16; }

  PD_MEMBER void start(uint32_t address) {
    shared = address;
    slot = {};
    count = 0;
  }

  // 8 scores of the row, in what is compared: positive multiples of them where that is possible.
  PD_MEMBER void load_scores(float (&s)[8], int i, int first_key, bool edge) const {
    const unsigned key = half() * 8;
    const uint32_t from = shared + Sizes::kScoresAt + i * 16 * Sizes::kRows * 4 + row() % 8 * 4;
#pragma unroll
    for (int k = 0; k < 8; ++k) s[k] = load_shared_float(from + score_place(key + k, row() / 8));
    if constexpr (kFull) {
      const int distance = control.position[row()] - first_key - i * 16 - static_cast<int>(key);
      const float slope = control.slope[row()];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        s[k] = pd_score(s[k], control.scale[row()], p.softcap, slope, fabsf(static_cast<float>(distance - k)));
    } else if (!multiples) {
#pragma unroll
      for (int k = 0; k < 8; ++k) s[k] *= control.scale[row()];
    }
    if (edge) {
      const int2 seen = control.seen[row()];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int own = first_key + i * 16 + static_cast<int>(key) + k;
        if (own < seen.x || own >= seen.y) s[k] = -INFINITY;
      }
    }
  }

  // Stores the weights of a tile; what this thread's add up to.
  PD_MEMBER float put_weights(int first_key, bool edge) const {
    const uint32_t target = shared + Sizes::kWeightsAt + count % Sizes::kWeightBuffers * Sizes::kWeightBytes;
    float sum = 0.f;
#pragma unroll kAtOnce
    for (int i = 0; i < kOwnPieces; ++i) {
      float s[8];
      load_scores(s, i, first_key, edge);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        s[k] = fast_exp2(fmaf(s[k], kFull ? PD_LOG2E : scale, -base));
        sum += s[k];
      }
      store_piece(target + row() * kRowBytes + ((2 * i + half()) ^ row() % 8) * 16, pack_pair<false>(s[0], s[1]),
                  pack_pair<false>(s[2], s[3]), pack_pair<false>(s[4], s[5]), pack_pair<false>(s[6], s[7]));
    }
    return sum;
  }

  // The reference of a row moves to its largest score so far, and its sum with it.
  PD_MEMBER void move_base(int first_key, bool edge) {
    float top = -INFINITY;
#pragma unroll 1
    for (int i = 0; i < kOwnPieces; ++i) {
      float s[8];
      load_scores(s, i, first_key, edge);
#pragma unroll
      for (int k = 0; k < 8; ++k) top = fmaxf(top, s[k] * scale);
    }
    const float moved = fmaxf(base, fmaxf(top, __shfl_xor_sync(~0u, top, 16)));
    const float factor = fast_rescale(base, moved);
    base = moved;
    l *= factor;
    if (half() == 0) control.factor[count % Sizes::kWeightBuffers][row()] = factor;
  }

  // A reference moves only when weights are so large that their sum says it. Then they are made again.
  PD_MEMBER void weigh_tile(int first_key, bool edge) {
    const uint32_t buffer = count % Sizes::kWeightBuffers, round = count / Sizes::kWeightBuffers;
    barrier_wait(shared_address(&control.weights_empty[buffer]), round % 2 ^ 1);
    barrier_wait(shared_address(&control.scores_full), count % 2);
    float sum = put_weights(first_key, edge);
    const bool moved = __any_sync(~0u, !(sum <= kMost));
    if (moved) {
      move_base(first_key, edge);
      sum = put_weights(first_key, edge);
    }
    barrier_arrive(shared_address(&control.scores_empty));
    l += sum;
    if (thread() % kWarp == 0) control.moved[buffer][thread() / kWarp] = moved;
    fence_async_proxy();
    barrier_arrive(shared_address(&control.ready[buffer]));
    ++count;
  }

  PD_MEMBER void weigh(const MlaWork& work) {
    barrier_meet(shared_address(&control.meet), 0);
    multiples = !kFull && control.scale[row()] > 0.f;
    scale = multiples ? control.scale[row()] * PD_LOG2E : PD_LOG2E;
    base = kNoBase;
    l = 0.f;
#pragma unroll 1
    for (int tile = work.tile; tile < work.tile_end; ++tile) {
      const int first_key = tile * kKeys;
      weigh_tile(first_key, first_key + kKeys > work.item.inner_end || first_key < work.item.inner_begin);
    }
    const float sum = l + __shfl_xor_sync(~0u, l, 16);
    if (half() == 0) control.ml[row()] = make_float2(base > kNoBase ? base : -INFINITY, sum);
    barrier_meet(shared_address(&control.meet), 1);
  }

  PD_MEMBER void run() {
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const MlaWork& work = control.work[slot.stage];
      if (!work.exists) return;
      if (static_cast<int>(blockIdx.y) * Sizes::kRows < work.item.rows) weigh(work);
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();
    }
  }
};

}  // namespace paged_attn
