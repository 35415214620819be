// Rows of a consumer warpgroup: from their scores of a tile of keys to weights, from sums to what is stored.
//
// This is online softmax, but for the running maximum. In its place a row has a reference score near its largest one,
// and weights are exp2(score - reference). It moves only where a later score is far above it, so sums are hardly ever
// multiplied (docs/cuda/prefill.md).
#pragma once

#include "../hopper.cuh"
#include "../rows.cuh"

namespace paged_attn {

// Of references: so large that their rounding counts. A product that one FMA takes a reference from is not rounded, so
// all weights of a row are off by the same factor, from there on by more than 2^(1/16), at last by infinity or 0.
constexpr float kFarOut = 0x1p20f;

// What the queries of a row were divided by, a power of two.
template <bool kDivided>
struct RowDivisors {};
template <>
struct RowDivisors<true> {
  float divisor[2];
};

template <typename Shape>
constexpr bool kDividesQueries = requires { requires Shape::kNarrow; };

// The rows of one consumer thread: two of them, g and g + 8 of its warp's 16, and in each the columns 8 j + 2 t and
// the next, where g = lane / 4 and t = lane % 4. Entry 4 j + 2 r + e of sums is row r, column 8 j + 2 t + e.
template <typename Shape, bool kFull>
struct PrefillRows : RowDivisors<kDividesQueries<Shape>> {
  static constexpr int kKeys = Shape::kKeys;
  // 8-bit weights have few small values: the largest of a row is 16 to 256, of 448 that there are. float16 is short of
  // bits below 2^-14, and the keys with such weights may be very many: the largest is 2^7 to 2^15.
  static constexpr bool k8Bit = __is_same(typename Shape::Type, E4m3), kBf16 = IsBf16<typename Shape::Type>::value;
  // In log2 units: how far a new reference is below the largest score, and how far above it a score must be to move it.
  // float16 that is guessed moves it sooner: a guess with too large weights costs much, a move little.
  static constexpr bool kGuessesHalf = !k8Bit && !kBf16 && requires { requires !Shape::kOverlaps; };
  static constexpr float kBelow = k8Bit ? 4.f : kBf16 ? 0.f : PD_HALF_BELOW;
  static constexpr float kFar = k8Bit ? 8.f : kGuessesHalf ? kBelow + 1.f : kBelow + 8.f;
  static constexpr uint32_t kByScore = 1;

  float base[2], l[2];   // reference score in log2 units, and this thread's part of the sum of weights
  int begin[2], end[2];  // keys that the row sees
  // From q.k to a score in log2 units, but for softcap and ALiBi, which kFull has. Its last bit, kByScore, tells who
  // multiplies: score(), or the FMA that takes a reference away. A number of its own for that would stay in a register
  // from tile to tile.
  float multiplier;
  float slope[2];  // kFull, in log2 units
  int q_pos[2];

  // Call, Work: of the kernel. by_score: score() multiplies, also where the FMA could.
  template <typename Call, typename Work>
  PD_MEMBER void start(const Problem& p, const Call& plan, const Work& work, int first_row, bool by_score = false) {
    const Item& item = work.item;
    // Others than positive ones change the order of scores, by which references are found.
    const float factor = score_scale(p, item.b, work.head) * PD_LOG2E;
    const uint32_t bits = __float_as_uint(factor) & ~kByScore;
    multiplier = __uint_as_float(!by_score && factor > 0.f ? bits : bits | kByScore);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = -INFINITY;
      l[r] = 0.f;
      if constexpr (kFull) {
        const QueryRow query = query_row(p, plan, item, work.head, row_of(item, first_row, r));
        q_pos[r] = item.kv_len - item.q_len + query.token;
        slope[r] = row_slope(p, item.b, query.q_head) * PD_LOG2E;
      }
    }
    find_ranges(p, plan, item, first_row);
  }

  // Row r of this thread, or the last one that exists; 0 where none does.
  static PD_MEMBER int row_of(const Item& item, int first_row, int r) {
    return min(first_row + r * 8, max(item.rows - 1, 0));
  }

  // The keys that each row sees. Called again where there are no registers to keep them.
  template <typename Call>
  PD_MEMBER void find_ranges(const Problem& p, const Call& plan, const Item& item, int first_row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KvRange seen = row_keys(p, plan, item, plan.group.divide(item.first_row + row_of(item, first_row, r)));
      begin[r] = static_cast<int>(seen.begin);
      end[r] = static_cast<int>(seen.end);
    }
  }

  // Whether score() multiplies.
  PD_MEMBER bool multiplies() const { return kFull || (__float_as_uint(multiplier) & kByScore) != 0; }

  PD_MEMBER void multiply_by_score() { multiplier = __uint_as_float(__float_as_uint(multiplier) | kByScore); }

  // From what score() gives to log2 units.
  PD_MEMBER float row_scale(int r) const {
    const float scale = multiplies() ? 1.f : multiplier;
    if constexpr (kDividesQueries<Shape> && !kFull) return this->divisor[r] * scale;
    return scale;
  }

  // Whether a reference is far out.
  PD_MEMBER bool is_far_out() const {
    return (fabsf(base[0]) > kFarOut && base[0] > -INFINITY) || (fabsf(base[1]) > kFarOut && base[1] > -INFINITY);
  }

  // Where that is so score() multiplies from now on, for all rows of this warp. True when that begins.
  PD_MEMBER bool starts_to_multiply() {
    if (!__any_sync(~0u, !multiplies() && is_far_out())) return false;
    multiply_by_score();
    return true;
  }

  // By what the FMA would: references found before stay true.
  PD_MEMBER void multiply(float (&s)[kKeys / 2]) const {
    const float factor = __uint_as_float(__float_as_uint(multiplier) & ~kByScore);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= factor;
  }

  // -inf where a row does not see a key.
  PD_MEMBER void mask(float (&s)[kKeys / 2], int first_key) const {
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int from = begin[r] - column;
      const unsigned count = static_cast<unsigned>(end[r] - begin[r]);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          if (static_cast<unsigned>(8 * j + e - from) >= count) x = -INFINITY;
        }
    }
  }

  // From q.k to what row_scale() takes to scores. kFull: by the steps of pd_score(), of some at a time. With one at a
  // time each would wait for the one before, with all of them registers spill.
  PD_MEMBER void score(const Problem& p, float (&s)[kKeys / 2], int first_key) const {
    if constexpr (kFull) {
      constexpr int kAtOnce = kKeys / 2 % 16 == 0 ? 16 : 8;
      static_assert(kKeys / 2 % kAtOnce == 0, "no scores are left");
      const int column = first_key + threadIdx.x % 4 * 2;
      float distance[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) distance[r] = static_cast<float>(q_pos[r] - column);
      const bool capped = p.softcap != 0.f;
      const float cap = p.softcap * PD_LOG2E;
      float factor = multiplier;
      if (capped) factor *= (p.softcap <= kMostFastCap ? kFastCapScale : 1.f) / cap;
#pragma unroll
      for (int first = 0; first < kKeys / 2; first += kAtOnce) {
#pragma unroll
        for (int i = first; i < first + kAtOnce; ++i) {
          if constexpr (kDividesQueries<Shape>) s[i] *= this->divisor[i / 2 % 2];
          s[i] *= factor;
        }
        if (capped && p.softcap <= kMostFastCap) {
#pragma unroll
          for (int i = first; i < first + kAtOnce; ++i) s[i] = fast_capped(s[i], cap);
        } else if (capped) {
#pragma unroll
          for (int i = first; i < first + kAtOnce; ++i) s[i] = pd_tanh(s[i]) * cap;
        }
        if (p.alibi_slopes) {
#pragma unroll
          for (int i = first; i < first + kAtOnce; ++i) {
            const int r = i / 2 % 2;
            s[i] -= fabsf(distance[r] - static_cast<float>(i / 4 * 8 + i % 2)) * slope[r];
          }
        }
      }
    } else if (multiplies()) {
      multiply(s);
    }
  }

  // Moves references where a score of the tile is far above one, so weights may exceed 1. True when that of a row of
  // this warp has moved; then `factor` takes earlier sums to the new one.
  PD_MEMBER bool move_base(const float (&s)[kKeys / 2], float (&factor)[2], float far_above = kFar) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(s[i], s[i + 1]));
    const bool far = top[0] * row_scale(0) > base[0] + far_above || top[1] * row_scale(1) > base[1] + far_above;
    const bool moved = __any_sync(~0u, far);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        // Rounded as multiply() rounds: an FMA here would differ from far scores by more than kBelow.
        const float moved_base = fmaxf(base[r], __fmul_rn(top[r], row_scale(r)) - kBelow);
        factor[r] = fast_rescale(base[r], moved_base);
        base[r] = moved_base;
        l[r] *= factor[r];
      }
    }
    return moved;
  }

  // The same once all rows have a reference, by the sums of the weights of the tile before. They may be as large as
  // they like, as long as sums of their products with values stay finite. `lost` becomes true when that is not sure.
  PD_MEMBER bool move_base_late(const float (&sum)[2], float (&factor)[2], bool& lost) {
    constexpr float kMost = 0x1p20f, kSure = 0x1p40f;
    const bool moved = __any_sync(~0u, fmaxf(sum[0], sum[1]) > kMost);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        lost |= top > kSure;
        const float power = top > kMost ? static_cast<float>(min(ilogbf(top), 126)) : 0.f;
        base[r] += power;
        factor[r] = fast_exp2(-power);
        l[r] *= factor[r];
      }
    }
    return moved;
  }

  // Whether guess() may follow.
  PD_MEMBER bool may_guess() const { return !multiplies() && have_bases(); }

  // Whether every row of this warp has a reference.
  PD_MEMBER bool have_bases() const { return !__any_sync(~0u, base[0] == -INFINITY || base[1] == -INFINITY); }

  // Whether weights of some row of this warp may be too large for their type (e4m3 ends at 448, float16 at 2^16), or
  // are no numbers.
  static PD_MEMBER bool too_large(const float (&sum)[2]) {
    constexpr float kMost = k8Bit ? 448.f : 32768.f;
    return __any_sync(~0u, !(sum[0] <= kMost && sum[1] <= kMost));
  }

  // From scores of the tile to weights.
  PD_MEMBER void weigh(float (&s)[kKeys / 2]) {
    float sum[2];
    weigh(s, sum);
    add(sum);
  }

  PD_MEMBER void add(const float (&sum)[2]) {
    l[0] += sum[0];
    l[1] += sum[1];
  }

  // From q.k to weights at once, by the references that there are, where may_guess() says so. too_large() has to be
  // asked before `sum` is added.
  PD_MEMBER void guess(float (&s)[kKeys / 2], float (&sum)[2]) const {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = fast_exp2(fmaf(s[i], row_scale(i / 2 % 2), -base[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // From scores to weights. `sum`: of this thread's weights, not yet added.
  PD_MEMBER void weigh(float (&s)[kKeys / 2], float (&sum)[2]) const {
    float shift[2];
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = base[r] == -INFINITY ? 0.f : -base[r];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 2 * r; i < kKeys / 2; i += 4) {
        s[i] = fmaf(s[i], row_scale(r), shift[r]);
        s[i + 1] = fmaf(s[i + 1], row_scale(r), shift[r]);
      }
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) {
      s[i] = fast_exp2(s[i]);
      s[i + 1] = fast_exp2(s[i + 1]);
      sum[i / 2 % 2] += s[i] + s[i + 1];
    }
  }
};

constexpr int kQuad = 4;  // lanes of a row

// The sum over the lanes of a row.
PD_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Weights as operands of the second product: pairs of neighbouring keys.
template <bool kBf16, int kCount>
PD_DEVICE void pack_weights(const float (&s)[kCount], uint32_t (&weights)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) weights[i] = pack_pair<kBf16>(s[2 * i], s[2 * i + 1]);
}

// Issues scores = q k^T for 64 rows.
template <typename Shape>
PD_DEVICE void issue_scores(float (&s)[Shape::kKeys / 2], uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < Shape::kDim / 16; ++k) {
    const int column = k * 16 / kColumn, bytes = k * 16 % kColumn * 2;
    multiply_scores(typename Shape::Type{}, s, advance(queries, column * Shape::kRows * kRowBytes + bytes),
                    advance(keys, column * Shape::kKeys * kRowBytes + bytes), k > 0);
  }
}

// Issues acc += weights v.
template <typename Shape>
PD_DEVICE void issue_values(float (&acc)[Shape::kDimV / 2], const uint32_t (&weights)[Shape::kKeys / 4],
                            uint64_t values) {
#pragma unroll
  for (int k = 0; k < Shape::kKeys / 16; ++k) {
    multiply_values(typename Shape::Type{}, acc, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                    weights[4 * k + 3], advance(values, k * 16 * kRowBytes));
  }
}

// Writes row g + 8 r of a warp: `dims` of its sums times `factor`. The four lanes of a row exchange their pairs, so
// that each stores 16 bytes.
template <bool kBf16, int kCount>
PD_DEVICE void store_row(const float (&acc)[kCount], int r, float factor, uint16_t* out, bool exists,
                         const int64_t& dims) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 4) {
    uint32_t words[4], turned[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack_pair<kBf16>(acc[4 * (j + i) + 2 * r] * factor, acc[4 * (j + i) + 2 * r + 1] * factor);
    // Word i of lane t becomes word t of lane i: by 1, then by 2.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? words[i] : words[i + 1], 1);
      turned[i] = t & 1 ? other : words[i];
      turned[i + 1] = t & 1 ? words[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = __shfl_xor_sync(~0u, t & 2 ? turned[i] : turned[i + 2], 2);
      words[i] = t & 2 ? other : turned[i];
      words[i + 2] = t & 2 ? turned[i + 2] : other;
    }
    const int dim = (j + t) * 8;
    if (exists && dim < dims) *reinterpret_cast<uint4*>(out + dim) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace paged_attn
