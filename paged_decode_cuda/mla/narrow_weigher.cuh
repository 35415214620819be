// The warps that make weights of scores in the kernel for 8-bit caches. They stand between the two products, which are
// the consumers': these leave q.k of a tile in shared memory and find the weights there, one tile later.
//
// A thread has two rows next to each other and two pieces of 8 keys, or one piece where the block has 32 rows. The
// threads that have a row are in one warp. Consumers wait for this code, and theirs takes its place in the caches of
// instructions between two tiles: so it is short, and what few tiles need (keys that nobody sees, scores that are no
// multiples of q.k) has a loop of its own.
#pragma once

#include "../prefill/weights.cuh"
#include "narrow_loader.cuh"

namespace paged_attn {

// Where q.k of 8 rows and a key lies. Keys and groups of keys stand apart, so that neither those who store scores nor
// those who load them meet in a bank.
template <typename Sizes>
PD_DEVICE uint32_t score_place(unsigned key, unsigned group) {
  return key % 8 * Sizes::kScoreRow + key / 8 * Sizes::kScoreGroup + group * 32;
}

template <typename Sizes, bool kFull>
struct NarrowWeigher {
  static constexpr int kKeys = Sizes::kKeys, kOwnRows = 2, kGroups = Sizes::kGroups;
  static constexpr int kPiece = 8, kPieces = kGroups;      // keys of a piece, pieces of a thread
  static constexpr int kOther = kKeys / kPiece / kPieces;  // pieces from one of them to the other
  static constexpr float kMost = 32768.f;  // what weights that a thread has of a row add up to; fp16 holds them

  const Problem& p;
  const MlaCall& call;
  NarrowControl<Sizes>& control;
  uint32_t shared;
  uint32_t count, works;  // tiles and works before this one; a Ring of works would take a register more, and spill
  // Of the rows
  float base[kOwnRows], l[kOwnRows];  // reference score in log2 units, and this thread's part of the sum of weights
  float scale[kOwnRows];              // from what finish_scores() gives to log2 units, see PrefillRows

  // Bits 0 and 1 of the lane, and 3 with 64 rows, say which rows, the others which keys: so no two meet in a bank.
  static PD_MEMBER unsigned thread() { return static_cast<unsigned>(this_thread()) % kWarpgroup; }
  static PD_MEMBER unsigned piece() {  // the first one
    return kGroups == 1 ? thread() / 4 % 8 : thread() / 4 % 2 + thread() / 16 % 2 * 2;
  }
  static PD_MEMBER unsigned group() {  // of 8 rows
    return thread() / kWarp * kGroups + (kGroups == 1 ? 0 : thread() / 8 % 2);
  }
  static PD_MEMBER unsigned pair() { return thread() % 4; }  // in the group
  static PD_MEMBER unsigned row() { return group() * 8 + pair() * 2; }

  // Whether finish_scores() multiplies q.k.
  PD_MEMBER bool multiplies() const { return kFull || scale[0] == 1.f || scale[1] == 1.f; }

  PD_MEMBER void start(uint32_t address) {
    shared = address;
    count = works = 0;
  }

  // Where the scores of this thread's key `k` of piece `h` are.
  PD_MEMBER uint32_t scores() const {
    return shared + Sizes::kScoresAt + score_place<Sizes>(piece() * kPiece, group()) + pair() * 8;
  }
  static PD_MEMBER uint32_t scores_of(uint32_t from, int h, int k) {
    return from + score_place<Sizes>(h * kOther * kPiece + k, 0);
  }

  // From q.k to what `scale` takes to scores; -inf for keys that a row does not see.
  PD_MEMBER void finish_scores(int first_key) const {
#pragma unroll 1
    for (int i = 0; i < kPieces * kPiece; ++i) {
      const int h = i / kPiece, k = i % kPiece;
      const uint32_t place = scores_of(scores(), h, k);
      const int key = first_key + (static_cast<int>(piece()) + h * kOther) * kPiece + k;
      float s[kOwnRows];
      load_shared_floats(place, s[0], s[1]);
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const unsigned own = row() + r;
        if constexpr (kFull) {
          const float distance = fabsf(static_cast<float>(control.position[own] - key));
          s[r] = pd_score(s[r], control.scale[own], p.softcap, control.slope[own], distance) * PD_LOG2E;
        } else if (scale[r] == 1.f) {
          s[r] *= control.scale[own] * PD_LOG2E;
        }
        const int2 seen = control.seen[own];
        if (key < seen.x || key >= seen.y) s[r] = -INFINITY;
      }
      store_shared_floats(place, s[0], s[1]);
    }
  }

  // Stores the weights of a tile. `sum`: of those that this thread has of each row.
  PD_MEMBER void put_weights(float (&sum)[kOwnRows]) const {
    const uint32_t from = scores();
    const uint32_t target = shared + Sizes::kWeightsAt + count % Sizes::kWeightBuffers * Sizes::kWeightBytes +
                            row() * kRowBytes + (piece() ^ pair() * 2) * 16;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] = 0.f;
#pragma unroll 1
    for (int h = 0; h < kPieces; ++h) {
      uint32_t words[kOwnRows][kPiece / 2];
#pragma unroll
      for (int k = 0; k < kPiece; k += 2) {
        float s[2][kOwnRows];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_shared_floats(scores_of(from, h, k + i), s[i][0], s[i][1]);
#pragma unroll
        for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            s[i][r] = fast_exp2(fmaf(s[i][r], scale[r], -base[r]));
            sum[r] += s[i][r];
          }
          words[r][k / 2] = pack_pair<false>(s[0][r], s[1][r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r)
        store_piece((target ^ (h * kOther + r) * 16) + r * kRowBytes, words[r][0], words[r][1], words[r][2],
                    words[r][3]);
    }
  }

  // The values of the threads that have a row, joined.
  template <typename Join>
  static PD_MEMBER float of_row(float x, Join join) {
#pragma unroll
    for (int step = 4; step <= 16; step *= 2 * kGroups) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }

  // Multiplies the scores of a tile, and those to come: where references are far out, see PrefillRows.
  PD_MEMBER void start_to_multiply() {
#pragma unroll 1
    for (int i = 0; i < kPieces * kPiece; ++i) {
      const uint32_t place = scores_of(scores(), i / kPiece, i % kPiece);
      float s[kOwnRows];
      load_shared_floats(place, s[0], s[1]);
      store_shared_floats(place, s[0] * scale[0], s[1] * scale[1]);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) scale[r] = 1.f;
  }

  // References of rows follow their largest scores so far, and their sums with them.
  PD_MEMBER void move_base() {
    float top[kOwnRows];
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) top[r] = -INFINITY;
#pragma unroll 1
    for (int i = 0; i < kPieces * kPiece; ++i) {
      float s[kOwnRows];
      load_shared_floats(scores_of(scores(), i / kPiece, i % kPiece), s[0], s[1]);
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) top[r] = fmaxf(top[r], s[r] * scale[r]);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float most = of_row(top[r], [](float x, float y) { return fmaxf(x, y); });
      const float moved = fmaxf(base[r], most - PD_HALF_BELOW);
      const float factor = fast_rescale(base[r], moved);
      base[r] = moved;
      l[r] *= factor;
      if (piece() == 0) control.factor[count % Sizes::kWeightBuffers][row() + r] = factor;
    }
    const auto is_far_out = [&](int r) { return fabsf(base[r]) > kFarOut && base[r] > kNoBase; };
    if (!kFull && (is_far_out(0) || is_far_out(1))) start_to_multiply();
  }

  // References move only when weights are so large that their sums say it. Then they are made again.
  PD_MEMBER void weigh_tile(int first_key, bool edge) {
    const uint32_t buffer = count % Sizes::kWeightBuffers, round = count / Sizes::kWeightBuffers;
    barrier_wait(shared_address(&control.weights_empty[buffer]), round % 2 ^ 1);
    const bool special = edge || multiplies();
    barrier_wait(shared_address(&control.scores_full), count % 2);
    if (special) finish_scores(first_key);
    float sum[kOwnRows];
    put_weights(sum);
    const bool fit = sum[0] <= kMost && sum[1] <= kMost;
    const bool moved = __any_sync(~0u, !fit);
    if (moved) {
      move_base();
      put_weights(sum);
    }
    barrier_arrive(shared_address(&control.scores_empty));
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) l[r] += sum[r];
    if (thread() % kWarp == 0) control.moved[buffer][thread() / kWarp] = moved;
    fence_async_proxy();
    barrier_arrive(shared_address(&control.ready[buffer]));
    ++count;
  }

  PD_MEMBER void weigh(const MlaWork& work) {
    barrier_meet(shared_address(&control.meet), 0);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      scale[r] = !kFull && control.scale[row() + r] > 0.f ? control.scale[row() + r] * PD_LOG2E : 1.f;
      base[r] = kNoBase;
      l[r] = 0.f;
    }
#pragma unroll 1
    for (int tile = work.tile; tile < work.tile_end; ++tile) {
      const int first_key = tile * kKeys;
      weigh_tile(first_key, first_key + kKeys > work.item.inner_end || first_key < work.item.inner_begin);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float sum = of_row(l[r], [](float x, float y) { return x + y; });
      if (piece() == 0) control.ml[row() + r] = make_float2(base[r] > kNoBase ? base[r] : -INFINITY, sum);
    }
    barrier_meet(shared_address(&control.meet), 1);
  }

  PD_MEMBER void run() {
    while (true) {
      const uint32_t place = works % 2;
      barrier_wait(shared_address(&control.work_full[place]), works / 2 % 2);
      const MlaWork& work = control.work[place];
      if (!work.exists) return;
      if (static_cast<int>(blockIdx.y) * Sizes::kRows < work.item.rows) weigh(work);
      barrier_arrive(shared_address(&control.work_empty[place]));
      ++works;
    }
  }
};

}  // namespace paged_attn
