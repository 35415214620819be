// Asks for memory at an even pace, between the products.
#pragma once

#include <cstdint>

namespace paged_attn {
namespace {

#ifndef PD_FEW_PIECE
#define PD_FEW_PIECE 256
#endif
#ifndef PD_FETCH_LOCALITY
#define PD_FETCH_LOCALITY 2
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

// Fetches the next tile while this one is worked on, piece by piece at an even pace: a pause would leave memory idle,
// and in a burst the processor drops what its queue of misses cannot take. It drops some anyway, so every line is asked
// for again shortly before its turn.
//
// Every product of tile.h takes one (`next`), for the pace is even only if it is kept inside of them: each of their
// steps calls advance(), and start_fetch (fetch.h) has counted those steps beforehand. What a product computes does not
// depend on it.
struct Prefetcher {
  // Bytes that are asked for together: beside many rows, and beside few, where they are read sooner.
  static constexpr int kPiece = 256, kFewPiece = PD_FEW_PIECE;
  const char *at, *end;  // of the run at hand
  const Run *next, *last;
  uint32_t pace, due;        // in 2^-16 pieces; pace is per step of the products
  const char* const* again;  // rows to ask for again: those that are read after the ones at hand; or null
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
