// The queries of the kernel for 8-bit caches: in float16, in the order in which a product takes them.
//
// Each row is multiplied by the power of two that brings its largest number to 2^14 or above, and the inverse goes into
// the scale of its scores. What is lost is below 2^-28 of the largest number of the row.
#pragma once

#include "director.cuh"
#include "narrow_shape.cuh"

namespace paged_attn {

constexpr int kNarrowConsumers = NarrowMlaSizes::kConsumers * kWarpgroup;

// 16 values each; the last are those of the rotary part.
constexpr int kNarrowOwn = NarrowMlaSizes::kLatents / 16 / kCopyLanes + 1;
using QueryWords = uint32_t[kNarrowOwn][8];

// A row of this block, or the last one that exists in its place.
struct NarrowRow {
  QueryRow query;
  bool exists;
};

template <typename Sizes>
PD_DEVICE NarrowRow narrow_row(const Problem& p, const MlaCall& call, const Item& item, int head, int row) {
  const int own = static_cast<int>(blockIdx.y) * Sizes::kRows + row;
  return {query_row(p, call, item, head, min(own, item.rows - 1)), own < item.rows};
}

// This lane's part of a row of queries.
template <typename Sizes>
PD_DEVICE void load_narrow_query(const Problem& p, const MlaCall& call, const Item& item, int head, int row,
                                 QueryWords& words) {
  const int place = this_thread() % kCopyLanes;
  const NarrowRow own = narrow_row<Sizes>(p, call, item, head, row);
  const int64_t rope = q_offset(p, item, own.query), latents = qv_offset(p, item, own.query);
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
    const bool last = i == kNarrowOwn - 1;
    const char* const from = last ? static_cast<const char*>(p.q) + rope * 2
                                  : static_cast<const char*>(p.qv.data) + latents * 2 + i * kCopyLanes * 32;
    const bool has = own.exists && (!last || place < Sizes::kRope / 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 piece = has ? reinterpret_cast<const uint4*>(from + place * 32)[h] : make_uint4(0, 0, 0, 0);
      words[i][4 * h] = piece.x;
      words[i][4 * h + 1] = piece.y;
      words[i][4 * h + 2] = piece.z;
      words[i][4 * h + 3] = piece.w;
    }
  }
}

// Stores it as fp16, multiplied by 2^up; up is returned. A product takes keys in the order in which a thread has them:
// of 16 dims these are 0, 1, 4, 5, 8, 9, 12, 13, then the others. So q is stored in that order.
template <typename Sizes, bool kBf16>
PD_DEVICE int store_narrow_query(const QueryWords& words, int row, uint32_t queries) {
  constexpr int kTop = 127 + 14;  // exponent of what the largest value becomes
  const unsigned place = this_thread() % kCopyLanes;
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      const float2 values = pair_values<kBf16>(words[i][w]);
      top = fmaxf(top, fmaxf(fabsf(values.x), fabsf(values.y)));
    }
  }
#pragma unroll
  for (int step = 1; step < kCopyLanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  // Both 127 + up and 127 - up are exponents of a normal number: up is at least 141 - 255.
  const int up = min(max(kTop - static_cast<int>(__float_as_uint(top) >> 23), -126), 100);
  const float factor = __uint_as_float(static_cast<uint32_t>(127 + up) << 23);
  const auto scaled = [factor](uint32_t word) {
    const float2 values = pair_values<kBf16>(word);
    return pack_pair<false>(values.x * factor, values.y * factor);
  };
#pragma unroll
  for (int i = 0; i < kNarrowOwn; ++i) {
    if (i == kNarrowOwn - 1 && place >= Sizes::kRope / 16) continue;
    const unsigned unit = i * kCopyLanes + place, piece = unit % 4 * 2;  // 4 of them in a column
    const uint32_t target = queries + unit / 4 * Sizes::kRows * kRowBytes + row * kRowBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_piece(target + ((piece + h) ^ row % 8) * 16, scaled(words[i][h]), scaled(words[i][h + 2]),
                  scaled(words[i][h + 4]), scaled(words[i][h + 6]));
    }
  }
  return up;
}

// Both consumers bring the queries of this block's rows of an item.
template <typename Sizes, bool kBf16>
PD_DEVICE void copy_narrow_queries(const Problem& p, const MlaCall& call, const Item& item, int head,
                                   NarrowControl<Sizes>& control, uint32_t queries) {
  constexpr int kAtOnce = kNarrowConsumers / kCopyLanes, kOwnRows = Sizes::kRows / kAtOnce;
  const unsigned thread = this_thread() - kWarpgroup;
  const float natural = score_scale(p, item.b, head);
  QueryWords words[kOwnRows];
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r)
    load_narrow_query<Sizes>(p, call, item, head, thread / kCopyLanes + r * kAtOnce, words[r]);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const unsigned row = thread / kCopyLanes + r * kAtOnce;
    const int up = store_narrow_query<Sizes, kBf16>(words[r], row, queries);
    if (thread % kCopyLanes == 0) control.scale[row] = natural * __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
  }
  fence_async_proxy();
}

// Tells the weigher what it has to know of the rows. Each thread describes one row.
template <typename Sizes, bool kFull>
PD_DEVICE void describe_rows(const Problem& p, const MlaCall& call, const MlaWork& work,
                             NarrowControl<Sizes>& control) {
  const int row = this_thread() - kWarpgroup;
  if (row >= Sizes::kRows) return;
  const Item& item = work.item;
  const NarrowRow own = narrow_row<Sizes>(p, call, item, work.head, row);
  const KvRange seen = row_keys(p, call, item, own.query.token);
  control.seen[row] = make_int2(static_cast<int>(seen.begin), static_cast<int>(seen.end));
  if constexpr (kFull) {
    control.slope[row] = row_slope(p, item.b, own.query.q_head);
    control.position[row] = item.kv_len - item.q_len + own.query.token;
  }
}

}  // namespace paged_attn
