// Software prefetch at an even pace, between the products.
#pragma once

#include <cstdint>

namespace paged_attn {
namespace {

#ifndef PD_FEW_PIECE
#define PD_FEW_PIECE 256
#endif
#ifndef PD_FETCH_LOCALITY
#define PD_FETCH_LOCALITY 2  // of __builtin_prefetch, on x86: 2 fetches into L2 (prefetcht1), 3 into L1 (prefetcht0)
#endif
constexpr int64_t kLine = 64;  // bytes of a line of the processor's caches

// An address that the compiler takes as it is. It would otherwise keep each constant distance from it in a register of
// its own, and run out of them.
[[gnu::always_inline]] inline const char* one_register(const char* address) {
  asm("" : "+r"(address));
  return address;
}

// Bytes that lie side by side.
struct Run {
  const char *begin, *end;
};

inline void fetch_line(const char* at) { __builtin_prefetch(at, 0, PD_FETCH_LOCALITY); }

// Prefetches the next tile while this one is multiplied, piece by piece at an even pace: a pause would leave memory
// idle, and of a burst the processor drops what its queue of misses cannot take. It drops some anyway, so every line is
// asked for again shortly before it is read.
//
// The pace is kept inside the products of tile.h: each of their steps calls advance(), and start_fetch (fetch.h) has
// counted those steps beforehand. What a product computes does not depend on its Prefetcher.
struct Prefetcher {
  // Bytes that are asked for together: beside many rows, and beside few, where they are read sooner.
  static constexpr int kPiece = 256, kFewPiece = PD_FEW_PIECE;
  const char *at, *end;      // what is left of the current run
  const Run *next, *last;    // the runs after it
  uint32_t pace, due;        // in 2^-16 pieces: per step of the products; not fetched yet of the steps that were made
  const char* const* again;  // rows to ask for again, which are read after the current ones; or null
  int64_t again_offset;
  bool cached;  // keys and values lie in the processor's caches: nothing is fetched
  bool near;    // and no line asked for again

  void start(const Run* runs, int64_t n, uint32_t pieces_per_step) {
    at = end = nullptr;
    next = runs;
    last = runs + n;
    again = nullptr;
    due = 0;
    pace = pieces_per_step;
  }

  template <int kBytes = kPiece>
  [[gnu::always_inline]] void advance(uint32_t steps) {
    due += steps * pace;
    while (__builtin_expect(due >= 1u << 16, 0)) {
      due -= 1u << 16;
      if (at >= end) {
        if (next == last) {
          pace = due = 0;
          break;
        }
        at = next->begin;
        end = next->end;
        ++next;
      }
      for (int i = 0; i < kBytes; i += kLine) fetch_line(at + i);
      at += kBytes;
    }
  }

  template <int kRows>
  [[gnu::always_inline]] void ask_again(int64_t j, int64_t column, int64_t bytes) {
    if (!again) return;
    const char* rows[kRows];
#pragma GCC unroll 16
    for (int c = 0; c < kRows; ++c) rows[c] = one_register(again[j + c] + again_offset + column);
    for (int64_t b = 0; b < bytes; b += kLine)
#pragma GCC unroll 16
      for (int c = 0; c < kRows; ++c) fetch_line(rows[c] + b);
  }
};

}  // namespace
}  // namespace paged_attn
