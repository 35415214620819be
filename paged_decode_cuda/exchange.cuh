// How the partials of rows travel between thread blocks whose keys are those of one pair.
//
//     blocks     4        3        2        1        0      they start in this order: 0 first
//     keys    [ first ][       ][       ][       ][ last ]
//                 ^        |        |        |        |
//                 +--------+--------+--------+--------+     words in the workspace; block 4 adds them and writes
//
//     a word, 16 bytes    [ payload, 8 bytes: two sums, or (m, l) | tag, 8 bytes: the number of the launch ]
//     a row of a partial  [ sums 0, 1 of every quad | sums 2, 3 of every quad | (m, l) for every team of 16 quads ]
//
// A word is stored and loaded as one, so whoever finds the tag has the payload. There is no counter to clear before,
// and no fence between data and a flag. One team of lanes reads a word, and clears it once all of its lanes have found
// their words. So the replay of a graph, in the same workspace and with the same tag, finds nothing old.
//
// What this rests on:
// 1. A block waits only for blocks of a smaller index (partials_behind), and those have started: the blocks of a grid
//    start in the order of their index. CUDA documents no order. Yet single-pass scans (decoupled look-back in CUB)
//    took it for granted on every GPU before they drew tickets, and no GPU has broken it. If it were broken, or lengths
//    changed during a call, a block would wait for ever. It gives up after PD_MOST_LOOKS and ends the kernel with an
//    error.
// 2. ld and st .relaxed.gpu of .b128 are single accesses. PTX ISA, "Memory Consistency Model": a vector access is a set
//    of scalar ones in no order, but .b128 (PTX 8.3, sm_70 and later) is a scalar type of ld and st, to an address
//    aligned to 16 bytes. libcu++ builds its lock-free 128-bit atomics on the same two instructions.
// tests/cuda/exchange.cu tries both: torn words, a late partial beside a kernel that holds the multiprocessors, a lost
// one.
#pragma once

#include "balance.cuh"
#include "ptx.cuh"
#include "rows.cuh"

// What assert() calls; its header leaves it out where NDEBUG is set.
extern "C" __device__ __attribute__((noreturn)) void __assertfail(const char* message, const char* file, unsigned line,
                                                                  const char* function, size_t char_size);

namespace paged_attn {

PD_DEVICE void store_word(TaggedWord* word, float x, float y, unsigned long long number) {
  const unsigned long long payload = static_cast<unsigned long long>(__float_as_uint(y)) << 32 | __float_as_uint(x);
  asm volatile("{ .reg .b128 w; mov.b128 w, {%0, %1}; st.relaxed.gpu.global.b128 [%2], w; }" ::"l"(payload),
               "l"(number), "l"(word)
               : "memory");
}

PD_DEVICE void load_word(const TaggedWord* word, unsigned long long& payload, unsigned long long& number) {
  asm volatile("{ .reg .b128 w; ld.relaxed.gpu.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
               : "=l"(payload), "=l"(number)
               : "l"(word)
               : "memory");
}

PD_DEVICE float2 unpack(unsigned long long payload) {
  return make_float2(__uint_as_float(static_cast<uint32_t>(payload)),
                     __uint_as_float(static_cast<uint32_t>(payload >> 32)));
}

// Four neighbouring dimensions of a row: sums over some of its keys.
struct RowSum {
  float m = -INFINITY, l = 0.f, acc[4] = {};

  template <int kCount>
  PD_MEMBER void add(const float2 (&ml)[kCount], const float4 (&values)[kCount]) {
    float top = m;
#pragma unroll
    for (int j = 0; j < kCount; ++j) top = fmaxf(top, ml[j].x);
    const float base = top == -INFINITY ? 0.f : top;
    const float factor = fast_exp2(m - base);
    m = top;
    l *= factor;
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] *= factor;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float weight = fast_exp2(ml[j].x - base);
      l += ml[j].y * weight;
      acc[0] += values[j].x * weight;
      acc[1] += values[j].y * weight;
      acc[2] += values[j].z * weight;
      acc[3] += values[j].w * weight;
    }
  }
};

// Where a row of the partial of a block begins. A block leaves one partial at most, for the pair whose first
// keys are not its own.
PD_DEVICE TaggedWord* partial_row(const Plan& plan, int block, int row) {
  const uint32_t rows_before = static_cast<uint32_t>(block) * plan.rows_per_tile + row;
  return plan.partials + static_cast<uint64_t>(rows_before) * static_cast<uint32_t>(row_words(plan.partial_quads));
}

PD_DEVICE void write_partial(const Plan& plan, int row, int quad, const RowSum& sum) {
  const unsigned long long number = launch_number();
  TaggedWord* const words = partial_row(plan, blockIdx.x, row);
  if (quad % kTeam == 0) store_word(words + 2 * plan.partial_quads + quad / kTeam, sum.m, sum.l, number);
  store_word(words + quad, sum.acc[0], sum.acc[1], number);
  store_word(words + plan.partial_quads + quad, sum.acc[2], sum.acc[3], number);
}

// Ends the kernel with an error that the host finds: cudaErrorAssert and these words on stderr, or
// cudaErrorLaunchFailure where the kernel may call no function.
template <bool kCallsNothing>
PD_DEVICE void give_up() {
  if constexpr (kCallsNothing) {
    stop_with_error();
    return;
  }
  __assertfail("paged_attn: a block waited too long for the partial of another: were lengths changed during a call?",
               "exchange.cuh", __LINE__, "add_batch", sizeof(char));
}

// How often a team looks for words that are not there yet, 20 s at least. A partial is late by the time that a block
// needs for its keys at most.
#ifndef PD_MOST_LOOKS
#define PD_MOST_LOOKS (1 << 25)
#endif

// Which partials a block adds to a sum: `count` in all, of the block `nearest` before it and those at distances of
// `spacing` further.
struct Partials {
  int count, spacing, nearest;
};

constexpr int kPartialsAtOnce = 5;  // whose words a thread holds

// Adds kBatch partials to a quad of a sum: number `first` and then every step-th, as long as there are any. A team
// calls it together. Each of its lanes also looks for (m, l) of one partial; lanes past the last quad do only that.
template <int kBatch, bool kCallsNothing>
PD_DEVICE void add_batch(const Plan& plan, int first, int step, const Partials& partials, int row, int quad,
                         RowSum& sum) {
  static_assert(kBatch <= kTeam, "there is a lane for every partial");
  const unsigned team = ((1u << kTeam) - 1) << (threadIdx.x % kWarp / kTeam * kTeam);
  const int lane = threadIdx.x % kTeam;
  const unsigned long long number = launch_number();
  unsigned long long payload[kBatch][2], found[kBatch][2], ml_payload, ml_found;
  TaggedWord* const nearest =
      partial_row(plan, static_cast<int>(blockIdx.x) - partials.nearest - first * partials.spacing, row);
  const int stride = step * partials.spacing * plan.rows_per_tile * row_words(plan.partial_quads);
  // The nearest stands in for those past the end.
  const int existing = min((partials.count - first + step - 1) / step, kBatch);
  const bool own = quad < plan.partial_quads;
  TaggedWord* const sums = nearest + min(quad, plan.partial_quads - 1);
  TaggedWord* const ml_word = nearest - min(lane, existing - 1) * stride + 2 * plan.partial_quads + quad / kTeam;
  auto word_of = [&](int j, int w) { return sums - (j < existing ? j * stride : 0) + w * plan.partial_quads; };
  unsigned long long stale;
  int looks = 0;
  do {
    if (++looks == PD_MOST_LOOKS) give_up<kCallsNothing>();
    // All loads before the first look at one.
    load_word(ml_word, ml_payload, ml_found);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) load_word(word_of(j, w), payload[j][w], found[j][w]);
    stale = ml_found ^ number;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) stale |= found[j][w] ^ number;
  } while (__any_sync(team, stale != 0));
  const float2 my_ml = unpack(ml_payload);
  float2 ml[kBatch];
  float4 values[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const bool exists = j < existing;
    const float m = __shfl_sync(team, my_ml.x, j, kTeam), l = __shfl_sync(team, my_ml.y, j, kTeam);
    const float2 low = unpack(payload[j][0]), high = unpack(payload[j][1]);
    ml[j] = exists ? make_float2(m, l) : make_float2(-INFINITY, 0.f);
    values[j] = exists ? make_float4(low.x, low.y, high.x, high.y) : make_float4(0.f, 0.f, 0.f, 0.f);
    if (own) {
#pragma unroll
      for (int w = 0; w < 2; ++w) store_word(word_of(j, w), 0.f, 0.f, 0);
    }
  }
  if (lane < existing) store_word(ml_word, 0.f, 0.f, 0);
  sum.add(ml, values);
}

// Adds every `step`-th of the partials, from `first` on, to a quad of a sum. kCallsNothing: see give_up().
template <bool kCallsNothing = false>
PD_DEVICE void add_partials(const Plan& plan, int first, int step, const Partials& partials, int row, int quad,
                            RowSum& sum) {
  if (quad / kTeam * kTeam >= plan.partial_quads) return;  // no lane of the team has a quad
#pragma unroll 1
  for (; first + step < partials.count; first += step * kPartialsAtOnce) {
    add_batch<kPartialsAtOnce, kCallsNothing>(plan, first, step, partials, row, quad, sum);
  }
  if (first < partials.count) add_batch<1, kCallsNothing>(plan, first, step, partials, row, quad, sum);
}

// Adds the sink, writes output and lse. kBytes: of an element of an output in aligned groups of four; 0: any.
template <int kBytes>
PD_DEVICE void write_output(const Problem& p, const Plan& plan, const Item& item, int head, int row, int quad,
                            const RowSum& sum) {
  const DType dtype = out_dtype(p.q_dtype);
  const RowTarget target = row_target(p, plan, item, head, row);
  const float factor = finish_row(p, target, item.b, head, sum.m, sum.l, quad == 0);
  const int64_t out = target.out + quad * 4;
  if constexpr (kBytes == 4) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + out) =
        make_float4(sum.acc[0] * factor, sum.acc[1] * factor, sum.acc[2] * factor, sum.acc[3] * factor);
  } else if constexpr (kBytes == 2) {
    const float x = sum.acc[0] * factor, y = sum.acc[1] * factor, z = sum.acc[2] * factor, w = sum.acc[3] * factor;
    const bool bf16 = dtype == DType::kBFloat16;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + out) =
        bf16 ? make_uint2(pack_pair<true>(x, y), pack_pair<true>(z, w))
             : make_uint2(pack_pair<false>(x, y), pack_pair<false>(z, w));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (quad * 4 + e < p.head_dim_v) store_float(p.out, dtype, out + e, sum.acc[e] * factor);
    }
  }
}

}  // namespace paged_attn
