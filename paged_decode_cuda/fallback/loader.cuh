// From memory to registers: pieces of keys and of values, which one warp each reads. And queries, into shared memory.
#pragma once

#include "../key_places.cuh"
#include "../rows.cuh"
#include "plan.h"
#include "shape.cuh"

namespace paged_attn {

// Where a key and its value begin in the cache, in numbers.
struct FallbackPlace {
  static constexpr int64_t kNowhere = INT64_MIN;
  int64_t key, value;
};

// place: page and slot, as the block table has them
PD_DEVICE FallbackPlace find_place(const Problem& p, int head, const int2& place) {
  if (!page_exists(p, place.x)) return {FallbackPlace::kNowhere, FallbackPlace::kNowhere};
  const Cache& c = p.cache;
  return {place.x * c.k_stride_page + place.y * c.k_stride_slot + head * c.k_stride_head,
          place.x * c.v_stride_page + place.y * c.v_stride_slot + head * c.v_stride_head};
}

// Where such a row is; nowhere: nullptr.
template <typename Kv>
PD_DEVICE const uint8_t* row_at(const void* cache, int64_t place) {
  return place == FallbackPlace::kNowhere ? nullptr : static_cast<const uint8_t*>(cache) + place * Kv::kBytes;
}

// Words of a row of `bytes` bytes from byte `at` on; zeros past its end, and where there is none. kGrain: see
// FallbackWork; the row has a whole number of them.
template <int kGrain, int kWords>
PD_DEVICE void load_words(const uint8_t* row, int bytes, int at, uint32_t (&words)[kWords]) {
  const uint8_t* const from = row + at;
  const int left = row ? bytes - at : 0;
  if constexpr (kGrain == 16 && kWords % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 x = 4 * w < left ? *reinterpret_cast<const uint4*>(from + 4 * w) : make_uint4(0, 0, 0, 0);
      words[w] = x.x;
      words[w + 1] = x.y;
      words[w + 2] = x.z;
      words[w + 3] = x.w;
    }
  } else if constexpr (kGrain >= 8 && kWords % 2 == 0) {
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {
      const uint2 x = 4 * w < left ? *reinterpret_cast<const uint2*>(from + 4 * w) : make_uint2(0, 0);
      words[w] = x.x;
      words[w + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = 0;
#pragma unroll
      for (int byte = 0; byte < 4; byte += kGrain < 4 ? kGrain : 4) {
        if (4 * w + byte >= left) continue;
        const uint8_t* const number = from + 4 * w + byte;
        if constexpr (kGrain >= 4) words[w] = *reinterpret_cast<const uint32_t*>(number);
        if constexpr (kGrain == 2) words[w] |= uint32_t{*reinterpret_cast<const uint16_t*>(number)} << 8 * byte;
        if constexpr (kGrain == 1) words[w] |= uint32_t{*number} << 8 * byte;
      }
    }
  }
}

template <int kGrain>
using Grain = std::integral_constant<int, kGrain>;

// One branch for many loads, which then do not wait for each other. kNumber: bytes of a number.
template <int kNumber, typename Function>
PD_DEVICE void with_grain(int grain, const Function& function) {
  if (grain == 16) {
    function(Grain<16>());
  } else if (grain == 8) {
    function(Grain<8>());
  } else {
    function(Grain<kNumber>());
  }
}

// Queries, or qv, as words of products; zeros for rows that do not exist and behind the dimensions. The words of a
// chunk that a lane needs stand in groups of four, those of four lanes beside each other.
template <typename Shape>
PD_DEVICE void load_queries(const Problem& p, const FallbackWork& plan, const Item& item, int head, bool qv,
                            uint32_t* target) {
  constexpr int kGroupDims = 4 * Shape::Products::kWordNumbers;
  const int dims = static_cast<int>(qv ? p.head_dim_v : p.head_dim), stride = Shape::query_stride(dims);
  const int groups = (dims + Shape::kChunkDims - 1) / Shape::kChunkDims * (Shape::kChunkDims / kGroupDims);
  const uint8_t* const data = static_cast<const uint8_t*>(qv ? p.qv.data : p.q);
  const bool as_they_are = p.q_dtype == Shape::Q::kDType && plan.query_grain == 16;
#pragma unroll 1
  for (int first = threadIdx.x; first < Shape::kRows * groups; first += 4 * Shape::kThreads) {
    uint4 words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = first + n * Shape::kThreads, row = i / groups, dim = i % groups * kGroupDims;
      words[n] = make_uint4(0, 0, 0, 0);
      if (row >= item.rows || dim >= dims) continue;
      const QueryRow query = query_row(p, plan, item, head, row);
      const int64_t offset = (qv ? qv_offset(p, item, query) : q_offset(p, item, query)) + dim;
      if (as_they_are) {
        words[n] = *reinterpret_cast<const uint4*>(data + offset * Shape::Q::kBytes);
        continue;
      }
      float x[kGroupDims];
#pragma unroll
      for (int e = 0; e < kGroupDims; ++e) x[e] = dim + e < dims ? load_float(data, p.q_dtype, offset + e) : 0.f;
      uint32_t own[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (Shape::kPairs) {
          own[w] = Shape::Products::word(x[2 * w], x[2 * w + 1]);
        } else {
          own[w] = __float_as_uint(x[w]);
        }
      }
      words[n] = make_uint4(own[0], own[1], own[2], own[3]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = first + n * Shape::kThreads, row = i / groups, group = i % groups;
      if (row >= Shape::kRows) continue;
      constexpr int kLaneGroups = Shape::kGroups, kChunkGroups = 4 * kLaneGroups;
      const int lane = group % kChunkGroups / kLaneGroups, of_lane = group % kLaneGroups;
      const int place = group / kChunkGroups * kChunkGroups + of_lane * 4 + lane;
      *reinterpret_cast<uint4*>(target + row * stride + place * 4) = words[n];
    }
  }
}

}  // namespace paged_attn
