// Merges the partials of rows whose keys were shared by several thread blocks, adds the sink, writes output and lse.
//
// The block with a row's first keys merges. It waits for the others, which are blocks before it, so this ends as long
// as blocks start in their order. A partial travels in words of 16 bytes, each stored and loaded as one: 8 bytes of
// payload and a number. So there is no counter to clear before and no fence between data and a flag: whoever finds the
// number has the data. A word has one reader, who clears it, so that the replay of a graph, in the same workspace and
// with the same number, finds nothing old.
#pragma once

#include "work.cuh"

namespace paged_attn {

// Of this launch, though the replays of a graph share it. Multiplied, so that no memory is likely to hold it.
PD_DEVICE unsigned long long launch_number() {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return (number + 1) * 0x9e3779b97f4a7c15ull;
}

PD_DEVICE void store_word(uint4* word, float x, float y, unsigned long long number) {
  const unsigned long long payload = static_cast<unsigned long long>(__float_as_uint(y)) << 32 | __float_as_uint(x);
  asm volatile("{ .reg .b128 w; mov.b128 w, {%0, %1}; st.relaxed.gpu.global.b128 [%2], w; }" ::"l"(payload),
               "l"(number), "l"(word)
               : "memory");
}

PD_DEVICE void load_word(const uint4* word, unsigned long long& payload, unsigned long long& number) {
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

constexpr int kWords = 3;  // of a quad of dimensions: (m, l) and two pairs of sums

// Where a quad of the partial of a block lies; its words are plan.partial_quads apart. A block leaves one partial at
// most, for the (item, kv_head) whose first keys are not its own.
PD_DEVICE uint4* partial_quad(const Plan& plan, int block, int row, int quad) {
  return plan.partials + static_cast<uint32_t>(block * plan.rows_per_tile + row) * (kWords * plan.partial_quads) + quad;
}

PD_DEVICE void write_partial(const Plan& plan, int row, int quad, const RowSum& sum) {
  const unsigned long long number = launch_number();
  uint4* word = partial_quad(plan, blockIdx.x, row, quad);
  store_word(word, sum.m, sum.l, number);
  store_word(word + plan.partial_quads, sum.acc[0], sum.acc[1], number);
  store_word(word + 2 * plan.partial_quads, sum.acc[2], sum.acc[3], number);
}

// Adds kBatch parts behind a segment to some of its sums: `first` and on in steps, as long as there are any.
template <int kBatch>
PD_DEVICE void add_batch(const Plan& plan, int first, int step, int count, int row, int quad, RowSum& sum) {
  const unsigned long long number = launch_number();
  unsigned long long payload[kBatch][kWords], found[kBatch][kWords], stale;
  uint4* const nearest = partial_quad(plan, static_cast<int>(blockIdx.x) - 1 - first, row, quad);
  const int stride = step * plan.rows_per_tile * kWords * plan.partial_quads;
  // The nearest stands in for those past the end.
  const int existing = min((count - first + step - 1) / step, kBatch);
  auto word_of = [&](int j, int w) { return nearest - (j < existing ? j * stride : 0) + w * plan.partial_quads; };
  do {
    // All loads before the first look at one.
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) load_word(word_of(j, w), payload[j][w], found[j][w]);
    stale = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) stale |= found[j][w] ^ number;
  } while (stale != 0);
  float2 ml[kBatch];
  float4 values[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const bool exists = j < existing;
    const float2 low = unpack(payload[j][1]), high = unpack(payload[j][2]);
    ml[j] = exists ? unpack(payload[j][0]) : make_float2(-INFINITY, 0.f);
    values[j] = exists ? make_float4(low.x, low.y, high.x, high.y) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWords; ++w) store_word(word_of(j, w), 0.f, 0.f, 0);
  }
  sum.add(ml, values);
}

// Adds every `step`-th of the `count` parts behind a segment, from `first` on, to some of its sums.
PD_DEVICE void add_partials(const Plan& plan, int first, int step, int count, int row, int quad, RowSum& sum) {
  constexpr int kBatch = 4;
#pragma unroll 1
  for (; first + step < count; first += step * kBatch) add_batch<kBatch>(plan, first, step, count, row, quad, sum);
  if (first < count) add_batch<1>(plan, first, step, count, row, quad, sum);
}

// Adds the sink, writes output and lse. kPacked: an output of 16 bits in aligned groups of four.
template <bool kPacked>
PD_DEVICE void write_output(const Problem& p, const Plan& plan, const Item& item, int head, int row, int quad,
                            const RowSum& sum) {
  const DType dtype = output_dtype(p);
  const RowTarget target = row_target(p, plan, item, head, row);
  const float factor = finish_row(p, target, item.b, head, sum.m, sum.l, quad == 0);
  const int64_t out = target.out + quad * 4;
  if constexpr (kPacked) {
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
