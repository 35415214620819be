// Tiles (AMX) on a processor without them, for tests: included before every source of a build (tests/amx/build.py),
// it takes the place of the intrinsics and of the questions to the processor and to Linux. A tile is kept as memory;
// products are rounded as the processor rounds them.
//
// PAGED_ATTN_EMULATED_AMX=refused: Linux refuses the permission. =bf16: the processor multiplies bfloat16 only.
#pragma once

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <cpuid.h>
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace emulated_tiles {
namespace {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct State {
  Config config;  // palette 0: released, every instruction but ldtilecfg faults
  alignas(64) uint8_t tile[8][16][64];
};

inline State& state() {
  static thread_local State s = {};
  return s;
}

inline void check(bool good) {
  if (!good) __builtin_trap();
}

inline void load_config(const void* config) {
  State& s = state();
  memcpy(&s.config, config, sizeof s.config);
  check(s.config.palette == 1 && s.config.start_row == 0);
  for (uint8_t x : s.config.reserved) check(x == 0);
  for (int t = 0; t < 16; ++t) {
    check(t < 8 ? s.config.row_bytes[t] <= 64 && s.config.rows[t] <= 16 : !s.config.row_bytes[t] && !s.config.rows[t]);
    check(!s.config.row_bytes[t] == !s.config.rows[t]);
  }
  memset(s.tile, 0, sizeof s.tile);
}

inline void release() {
  check(state().config.palette == 1);
  memset(&state(), 0, sizeof(State));
}

inline void zero(int t) {
  check(state().config.rows[t] > 0);
  memset(state().tile[t], 0, sizeof state().tile[t]);
}

inline void load(int t, const void* base, int64_t stride) {
  zero(t);
  State& s = state();
  for (int r = 0; r < s.config.rows[t]; ++r)
    memcpy(s.tile[t][r], static_cast<const char*>(base) + r * stride, s.config.row_bytes[t]);
}

inline void store(int t, void* base, int64_t stride) {
  State& s = state();
  check(s.config.rows[t] > 0);
  for (int r = 0; r < s.config.rows[t]; ++r)
    memcpy(static_cast<char*>(base) + r * stride, s.tile[t][r], s.config.row_bytes[t]);
}

inline float widened_bfloat(uint16_t bfloat) {
  uint32_t bits = uint32_t(bfloat) << 16;
  if (!(bits & 0x7f800000)) bits &= 0x80000000;  // denormal numbers count as 0
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widened_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 0    ? __builtin_ldexpf(mantissa, -24)
                          : exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
                                           : __builtin_ldexpf(1024 + mantissa, exponent - 25);
  return half >> 15 ? -magnitude : magnitude;
}

// c += a x b: even and odd elements are summed apart, then added to c.
template <float (*widened)(uint16_t)>
void dot(int c, int a, int b) {
  State& s = state();
  const int rows = s.config.rows[a], pairs = s.config.row_bytes[a] / 4, columns = s.config.row_bytes[b] / 4;
  check(rows > 0 && pairs == s.config.rows[b] && rows == s.config.rows[c] && columns == s.config.row_bytes[c] / 4);
  uint16_t right[16][32], left[32];
  memcpy(right, s.tile[b], sizeof right);
  for (int r = 0; r < rows; ++r) {
    float sum[16], even[16] = {}, odd[16] = {};
    memcpy(left, s.tile[a][r], sizeof left);
    memcpy(sum, s.tile[c][r], sizeof sum);
    for (int k = 0; k < pairs; ++k) {
      const float first = widened(left[2 * k]), second = widened(left[2 * k + 1]);
      for (int n = 0; n < 16; ++n) {
        even[n] = __builtin_fmaf(first, widened(right[k][2 * n]), even[n]);
        odd[n] = __builtin_fmaf(second, widened(right[k][2 * n + 1]), odd[n]);
      }
    }
    for (int n = 0; n < columns; ++n) sum[n] += even[n] + odd[n];
    memcpy(s.tile[c][r], sum, columns * sizeof(float));
  }
}

inline bool says(const char* word) {
  const char* wanted = getenv("PAGED_ATTN_EMULATED_AMX");
  return wanted && !strcmp(wanted, word);
}

inline int cpuid_count(unsigned leaf, unsigned subleaf, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  const int known = __get_cpuid_count(leaf, subleaf, a, b, c, d);
  if (leaf == 7 && subleaf == 0) *d |= 1u << 24 | 1u << 22;
  if (leaf == 7 && subleaf == 1) {  // AMX-FP16, PREFETCHIT0
    *a = says("bf16") ? *a & ~(1u << 21) : *a | 1u << 21;
    *d = says("bf16") ? *d & ~(1u << 14) : *d | 1u << 14;
  }
  return known;
}

inline unsigned long long xgetbv() { return 7u | 0xe0u | 1u << 17 | 1u << 18; }

// Linux; what is not about tiles goes to the real one (the standard library asks it too).
template <typename... Arguments>
long system_call(long number, Arguments... arguments) {
  if (number != SYS_arch_prctl) return ::syscall(number, arguments...);
  return says("refused") ? -1 : 0;
}

}  // namespace
}  // namespace emulated_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_release emulated_tiles::release
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_zero emulated_tiles::zero
#define _tile_dpbf16ps emulated_tiles::dot<emulated_tiles::widened_bfloat>
#define PD_TILE_DPFP16PS emulated_tiles::dot<emulated_tiles::widened_half>
#define __get_cpuid_count emulated_tiles::cpuid_count
#define _xgetbv(register) emulated_tiles::xgetbv()
#define syscall(number, ...) emulated_tiles::system_call(number, __VA_ARGS__)
#endif
