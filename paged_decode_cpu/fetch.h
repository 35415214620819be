// What the Prefetcher fetches of the next tile (list_runs), and at which pace (start_fetch).
#pragma once

#include <time.h>

#include "scratch.h"

namespace paged_attn {
namespace {

constexpr int64_t kMemoryPage = 4096;  // bytes of the smallest page of memory that has an address translation

// As how many steps of the products the softmax of kLanes scores counts in the pace of the fetch.
constexpr int64_t kSoftmaxSteps = 2;

inline int64_t nanoseconds() {
#ifdef __APPLE__
  return clock_gettime_nsec_np(CLOCK_UPTIME_RAW);  // CLOCK_MONOTONIC counts microseconds there
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
#endif
}

// Whether keys lie in the processor's caches, told by how long a few lines take: 90 to 200 ns from there, 300 to 1200
// from memory.
inline bool lie_in_caches(const Problem& p, const Item& item, KvRange keys) {
  constexpr int kLines = 8, kLongest = 250;  // ns
  const Cache& c = p.cache;
  const int64_t start = nanoseconds();
  for (int i = 0; i < kLines; ++i) {
    const Slot s = slot_of_key(c, item.batch, keys.begin + (keys.end - keys.begin) * i / kLines);
    const int64_t offset = s.page * c.k_stride_page + s.slot * c.k_stride_slot + item.kv_head_begin * c.k_stride_head;
    static_cast<void>(static_cast<const volatile char*>(c.k)[offset * dtype_bytes(c.dtype)]);
  }
  return nanoseconds() - start < kLongest;
}

// Lists the bytes of a tile in runs, keys first; returns how many. Where the heads of a slot lie side by side, whole
// slots are taken in the order of memory, else the rows of one head after the other. One line of every page of memory
// is prefetched at once: so the address translations (TLB misses) overlap, and no later prefetch waits for one.
template <class Ops>
int64_t list_runs(const Problem& p, const Item& item, const TileRows& tile, Run* runs) {
  const Cache& c = p.cache;
  Run* run = runs;
  const auto list = [&](const char* const* rows, int64_t head_stride, int64_t width) {
    const bool together = head_stride == width;
    const int64_t row_bytes = (together ? item.heads() : 1) * width * Ops::kBytes;
    for (int64_t h = 0; h < (together ? 1 : item.heads()); ++h) {
      const int64_t offset = (item.kv_head_begin + h) * head_stride * Ops::kBytes;
      for (int64_t j = 0; j < tile.n; ++run) {
        run->begin = run->end = rows[j] + offset;
        do run->end += row_bytes;
        while (++j < tile.n && rows[j] + offset == run->end);
        for (const char* at = run->begin; at < run->end; at += kMemoryPage) fetch_line(at);
      }
    }
  };
  list(tile.k, c.k_stride_head, p.head_dim);
  list(tile.v, c.v_stride_head, p.head_dim_v);
  return run - runs;
}

// Starts to fetch the next tile, at a pace that ends when this tile is done.
template <class Ops>
void start_fetch(const Problem& p, const Item& item, const Scratch<Ops>& s, const TileRows& tile, const TileRows& next,
                 Prefetcher& fetch) {
  const int64_t heads = item.heads(), rows = item.rows();
  const bool packed = rows >= Ops::kMinPackedRows;
  int64_t steps;
  if (packed) {
    const int64_t panels = pd_ceil_div(tile.n, kPanel) * s.depth + pd_ceil_div(s.width, kPanel) * tile.n;
    steps = heads * pd_ceil_div(rows, Ops::kStepRows) * panels / Ops::kDepth;
  } else {
    steps = heads * (pd_ceil_div(rows, Ops::kMaxDotRows) * tile.n * (s.depth + s.width) / Ops::kChunk +
                     rows * pd_ceil_div(tile.n, kLanes) * kSoftmaxSteps);
  }
  const int64_t bytes = next.n * key_bytes(p, heads);
  const int64_t pieces = pd_ceil_div(bytes, packed ? Prefetcher::kPiece : Prefetcher::kFewPiece);
  fetch.start(s.runs, list_runs<Ops>(p, item, next, s.runs), static_cast<uint32_t>(pd_ceil_div(pieces << 16, steps)));
}

}  // namespace
}  // namespace paged_attn
