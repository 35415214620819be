// The kernel of merge_with_peers.cu on the host: a rank is 32 threads, the lanes of a warp that does all rows in turn.
// tests/test_merge_with_peers.py puts the kernel in the place of KERNEL and calls it through ctypes.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <barrier>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "spec/merge.h"
#include "spec/ranges.h"

#define PD_DEVICE static inline
#define PD_MEMBER inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  unsigned x, y;
};
struct Place {
  unsigned x;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float __expf(float x) { return expf(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

thread_local Place threadIdx, blockIdx;
thread_local std::barrier<>* warp;  // of a rank beside others
inline void __syncwarp() {
  if (warp != nullptr) warp->arrive_and_wait();
}
[[noreturn]] inline void __assertfail(const char* message, const char*, unsigned, const char*, size_t) {
  fprintf(stderr, "%s\n", message);
  exit(3);
}

inline void store_word(unsigned long long* word, unsigned long long value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
// Others get the processor where a word may not be there yet, and now and then for long: they may be far ahead.
inline unsigned long long load_word(const unsigned long long* word) {
  thread_local std::minstd_rand dice(static_cast<unsigned>(reinterpret_cast<uintptr_t>(&dice) >> 12));
  if (warp != nullptr) {
    dice() % 200 == 0 ? std::this_thread::sleep_for(std::chrono::microseconds(500)) : std::this_thread::yield();
  }
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

namespace paged_attn {
inline void wait_for_predecessor() {}
inline void let_successor_start() {}
}  // namespace paged_attn

#include KERNEL

namespace paged_attn {
namespace {

constexpr int kLanes = 32;

template <typename T>
void run_row(const PeerMergeProblem& p, int row, int lane) {
  blockIdx.x = row / kMergeWarps;
  threadIdx.x = row % kMergeWarps * kLanes + lane;
  merge_with_peers_kernel<T>(p);
}

void run_row(const PeerMergeProblem& p, int row, int lane) {
  p.dtype == DType::kFloat32 ? run_row<float>(p, row, lane) : run_row<_Float16>(p, row, lane);
}

}  // namespace
}  // namespace paged_attn

// A call that finds all that it waits for. Lane 0 counts the call, when the others have seen the number.
extern "C" void run_alone(const void* problem) {
  using namespace paged_attn;
  const PeerMergeProblem& p = *static_cast<const PeerMergeProblem*>(problem);
  for (int row = 0; row < p.tokens * p.heads; ++row) {
    for (int lane = kLanes - 1; lane >= 0; --lane) run_row(p, row, lane);
  }
}

// The calls of every rank, PeerMergeProblem[rank * count + i], all ranks side by side. Every second call goes through
// its rows backwards: what one call reads last, the next one writes first.
extern "C" void run_ranks(const void* problems, int ranks, int count) {
  using namespace paged_attn;
  const PeerMergeProblem* const calls = static_cast<const PeerMergeProblem*>(problems);
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    warps.push_back(std::make_unique<std::barrier<>>(kLanes));
    for (int lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([=, own = warps.back().get()] {
        warp = own;
        for (int i = 0; i < count; ++i) {
          const PeerMergeProblem& p = calls[rank * count + i];
          const int rows = p.tokens * p.heads;
          for (int row = 0; row < rows; ++row) run_row(p, i % 2 ? rows - 1 - row : row, lane);
          __syncwarp();
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}
