// What one instruction set offers to the host side: plan.cpp cuts a problem into work items, and
// paged_decode_cpu.cpp calls these from several threads. Each kernel_*.cpp is the same source (attend.h),
// compiled with its own flags.
#pragma once

#include "spec/problem.h"
#include "spec/ranges.h"

namespace paged_attn {

// How few rows walk over keys that come from memory. It depends on the processor's own prefetchers.
struct Walk {
  // From so many bytes of the keys of a slot on, and up to so many rows of a kv_head, nothing is fetched ahead: the
  // processor does it better by itself. Tiles in place may be fetched ahead all the same.
  int64_t reads_ahead_from = INT64_MAX, reads_ahead_rows = INT64_MAX;
  int64_t reads_ahead_page = 0;  // and from so many bytes of keys in a page on: no prefetcher finds the next page
  bool tiles_read_ahead = true;
  bool long_tiles = false;  // tiles of keys for which nothing is fetched ahead are as long as there are any
  int64_t tile_bytes = 0;   // keys and values of the others; 0: by L2 and the rows
  // If they lie in the processor's caches: the keys and values of an item are not asked for at all up to so many bytes,
  // nor those of up to so many rows of a kv_head.
  int64_t near_bytes = 0, near_rows = 0;
};

// Query rows that read the same keys. Row r of a kv_head is token r / group, head r % group of the group.
struct Item {
  int64_t batch;
  int64_t kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;
  KvRange keys;       // all keys that any of the rows may see
  bool small;         // cut as keys are that lie in the processor's caches
  bool maybe_cached;  // the keys and values of the whole call may lie there: who attends finds out
  Walk walk;

  // Inlined always: a copy compiled for AVX-512 must not serve the other files.
  [[gnu::always_inline]] int64_t heads() const { return kv_head_end - kv_head_begin; }
  [[gnu::always_inline]] int64_t rows() const { return row_end - row_begin; }
  [[gnu::always_inline]] int64_t num_keys() const { return keys.end - keys.begin; }

  // Whether its few rows leave it to the processor to fetch the next keys: its prefetchers follow such addresses within
  // every page of memory, and our fetches would hold the few places that requests of the first cache have.
  [[gnu::always_inline]] bool reads_ahead(const Problem& p, bool in_tiles) const {
    const int64_t bytes = dtype_bytes(p.cache.dtype);
    return (in_tiles ? walk.tiles_read_ahead : rows() <= walk.reads_ahead_rows) &&
           p.cache.k_stride_head == p.head_dim && heads() * p.head_dim * bytes >= walk.reads_ahead_from &&
           p.cache.page_size * p.cache.k_stride_slot * bytes >= walk.reads_ahead_page;
  }
};

// Of a key and its value, of so many kv_heads.
static inline int64_t key_bytes(const Problem& p, int64_t heads) {
  return heads * (p.head_dim + p.head_dim_v) * dtype_bytes(p.cache.dtype);
}

// A partial result of a row: acc[width], m, l (spec/state.h). Of every row of an item: heads outermost.
static inline int64_t partial_floats(int64_t width) { return width + 2; }
static inline int64_t partial_floats(const Item& item, int64_t width) {
  return item.heads() * item.rows() * partial_floats(width);
}

// One new token and where it goes.
struct TokenWrite {
  int64_t batch;
  int64_t source_k, source_v;  // element offsets of the token in append.k and append.v
  int64_t page, slot;
  int64_t rotary_position;
};

// How the products of a problem are made: the names of the ways with many rows of a kv_head, on keys and values laid
// out for it, and with few, on keys and values in place.
struct Products {
  const char *packed, *in_place;
  int64_t min_packed_rows;  // many begin here
  int64_t row_step;         // rows that multiply together; items are cut into multiples of it,
  int64_t most_rows;        // of so many rows at most,

  int64_t most_sums = int64_t(64) << 10;  // which have about so many sums of values at most (a quarter of L2),
  int64_t fewest_rows = 128;              // and of no fewer where that is for more items

  // In tiles some few rows have a way of their own, if there are keys enough.
  const char* tiles_in_place = nullptr;
  int64_t min_tile_rows = 1, most_tile_rows = 0, min_tile_keys = 0;

  // In place, up to so many rows may be multiplied in another way still.
  const char* in_place_few = nullptr;
  int64_t most_few_rows = 0;

  [[gnu::always_inline]] bool in_tiles_in_place(const Item& item) const {
    return item.rows() >= min_tile_rows && item.rows() <= most_tile_rows && item.num_keys() >= min_tile_keys;
  }
};

// How much longer, in percent, a key of a kv_head takes where a walk reads a part of each slot only: half of each slot
// lies in half of the sets of the second cache, which then holds half as much. Keys whose whole slots have
// `crowded_from` bytes would not fit it at all.
struct PartOfSlot {
  int64_t percent = 0, crowded_percent = 0, crowded_from = INT64_MAX;

  [[gnu::always_inline]] int64_t percent_of(int64_t slot_bytes) const {
    return slot_bytes < crowded_from ? percent : crowded_percent;
  }
};

struct Kernel {
  const char* name;
  Products (*products)(const Problem& problem);
  // Bytes of scratch memory that attend() wants for an item; 64-byte aligned.
  int64_t (*scratch_bytes)(const Problem& problem, const Item& item);
  // Attends the rows of `item` to `keys`. With `partial` the result goes there, else it is final.
  void (*attend)(const Problem& problem, const Item& item, KvRange keys, char* scratch, float* partial);
  // Merges `count` partial results that lie `stride` floats apart: into the first, or, where that is not to be a
  // partial result again, into the final one.
  void (*merge)(const Problem& problem, const Item& item, int64_t count, float* partials, int64_t stride,
                bool to_partial);
  // Writes the keys and values of one new token.
  void (*write_token)(const Problem& problem, const TokenWrite& write);
  PartOfSlot part_of_slot = {};
  Walk walk = {};
};

#if defined(__x86_64__)
extern const Kernel kAvx512AmxFp16Kernel, kAvx512AmxKernel, kAvx512IntelKernel, kAvx512Bf16Kernel, kAvx512Kernel;
extern const Kernel kAvx512Zen5Kernel;                              // kAvx512Bf16Kernel on Zen 5
extern const Kernel kGraniteRapidsAmxKernel, kGraniteRapidsKernel;  // kAvx512AmxKernel and kAvx512IntelKernel there
extern const Kernel kAvx2Kernel;
#elif defined(__aarch64__)
extern const Kernel kNeonBf16Kernel, kNeonFp16Kernel, kNeonKernel;
#endif
extern const Kernel kPortableKernel;

}  // namespace paged_attn
