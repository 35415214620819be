// What one instruction set offers: a Kernel. plan.cpp cuts a problem into items, and paged_decode_cpu.cpp calls the
// functions of a Kernel from several threads. Each kernel_*.cpp is the same source (attend.h), compiled with its own
// flags.
#pragma once

#include "spec/problem.h"
#include "spec/ranges.h"

namespace paged_attn {

// How few rows walk over keys, on this processor. Its hardware prefetchers may read ahead; where they do not, the next
// tile is fetched ahead by software (prefetcher.h).
struct Walk {
  // The hardware reads ahead from so many bytes of the keys of a slot on, and up to so many rows of a kv_head. Then
  // software fetches nothing ahead.
  int64_t reads_ahead_from = INT64_MAX, reads_ahead_rows = INT64_MAX;
  int64_t reads_ahead_page = 0;  // and from so many bytes of keys in a page on: no prefetcher finds the next page
  bool tiles_read_ahead = true;  // whether that holds for tiles in place too
  bool long_tiles = false;       // where the hardware reads ahead, a tile has kMaxTile keys
  int64_t tile_bytes = 0;        // keys and values of other tiles; 0: by L2 and the rows (tile_keys in scratch.h)
  // For keys in the processor's caches: software fetches no line of an item of up to so many bytes of keys and values,
  // nor of one of up to so many rows of a kv_head.
  int64_t near_bytes = 0, near_rows = 0;
};

// Query rows that read the same keys. Row r of a kv_head is token r / group, head r % group of the group.
struct Item {
  int64_t batch;
  int64_t kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;
  KvRange keys;       // all keys that any of the rows may see
  bool small;         // of a small call (plan.cpp), whose keys probably lie in the processor's caches
  bool maybe_cached;  // the keys and values of the whole call may lie there: lie_in_caches (fetch.h) finds out
  Walk walk;

  // Inlined always: a copy compiled for AVX-512 must not serve the other files.
  [[gnu::always_inline]] int64_t heads() const { return kv_head_end - kv_head_begin; }
  [[gnu::always_inline]] int64_t rows() const { return row_end - row_begin; }
  [[gnu::always_inline]] int64_t num_keys() const { return keys.end - keys.begin; }

  // Whether few rows leave the next keys to the hardware prefetchers: those follow such addresses within a page of
  // memory, and software fetches would occupy the few miss buffers of L1.
  [[gnu::always_inline]] bool reads_ahead(const Problem& p, bool in_tiles) const {
    const int64_t bytes = dtype_bytes(p.cache.dtype);
    return (in_tiles ? walk.tiles_read_ahead : rows() <= walk.reads_ahead_rows) &&
           p.cache.k_stride_head == p.head_dim && heads() * p.head_dim * bytes >= walk.reads_ahead_from &&
           p.cache.page_size * p.cache.k_stride_slot * bytes >= walk.reads_ahead_page;
  }
};

// Bytes of a key and its value, of so many kv_heads.
static inline int64_t key_bytes(const Problem& p, int64_t heads) {
  return heads * (p.head_dim + p.head_dim_v) * dtype_bytes(p.cache.dtype);
}

// Floats of the partial of a row, acc[width], m, l (spec/state.h), and of every row of an item: [heads, rows, partial].
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

// The ways in which a kernel multiplies for a problem, by the names that explain gives them. The rows of a kv_head in
// an item decide: many multiply keys and values that are packed first (laid out in panels), few multiply them in place.
struct Products {
  const char *packed, *in_place;
  int64_t min_packed_rows;  // from so many rows on they are packed
  int64_t row_step;         // rows that multiply together: an item of a prompt has a multiple of them,
  int64_t most_rows;        // and at most so many

  int64_t most_sums = int64_t(64) << 10;  // rows * head_dim_v of an item, at most about (a quarter of L2)
  int64_t fewest_rows = 128;              // no item gets fewer only for every thread to have several items

  // With AMX, items of few rows and enough keys may multiply in tiles of the matrix unit, keys in place.
  const char* tiles_in_place = nullptr;
  int64_t min_tile_rows = 1, most_tile_rows = 0, min_tile_keys = 0;

  // Up to most_few_rows rows in place may be multiplied by other instructions.
  const char* in_place_few = nullptr;
  int64_t most_few_rows = 0;

  [[gnu::always_inline]] bool in_tiles_in_place(const Item& item) const {
    return item.rows() >= min_tile_rows && item.rows() <= most_tile_rows && item.num_keys() >= min_tile_keys;
  }
};

// How much longer, in percent, a key of a kv_head takes where a walk reads only a part of each slot: half of each slot
// maps to half of the sets of L2, which then holds half as much. Keys whose whole slots have `crowded_from` bytes would
// not fit into L2 at all.
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
  // Merges `count` partials that lie `stride` floats apart: into the first one (to_partial), or into the final result.
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
