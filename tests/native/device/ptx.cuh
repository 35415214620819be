// What balance.cuh takes from a GPU, on the host: the words of the language, and a warp whose lanes are fibers. Lanes
// run one after the other up to the next exchange, where each gives a value and sees those of all.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "paged_decode_cuda/decode/sizes.h"
#include "spec/ranges.h"
#include "spec/state.h"

#define PD_DEVICE static inline
#define PD_MEMBER inline

namespace paged_attn {

using std::max;
using std::min;

inline thread_local struct Index {
  int x;
} threadIdx, blockIdx, gridDim, blockDim;

namespace warp {

constexpr int kStack = 64 << 10;

struct Warp {
  ucontext_t back, lanes[kWarp];
  std::unique_ptr<char[]> stacks{new char[kWarp * kStack]};
  int64_t values[2][kWarp];
  int lane, turn[kWarp];
  bool done[kWarp];
  const std::function<void(int)>* code;
};

inline Warp& current() {
  static Warp warp;
  return warp;
}

inline void enter() {
  Warp& w = current();
  (*w.code)(w.lane);
  w.done[w.lane] = true;
  swapcontext(&w.lanes[w.lane], &w.back);
}

// Runs code(lane) for the lanes of one warp.
inline void run(int block, int blocks, const std::function<void(int)>& code) {
  Warp& w = current();
  w.code = &code;
  blockIdx.x = block;
  gridDim.x = blocks;
  blockDim.x = kWarp;
  for (int lane = 0; lane < kWarp; ++lane) {
    getcontext(&w.lanes[lane]);
    w.lanes[lane].uc_stack.ss_sp = w.stacks.get() + lane * kStack;
    w.lanes[lane].uc_stack.ss_size = kStack;
    w.lanes[lane].uc_link = nullptr;
    makecontext(&w.lanes[lane], enter, 0);
    w.done[lane] = false;
    w.turn[lane] = 0;
  }
  for (bool left = true; left;) {
    left = false;
    for (w.lane = 0; w.lane < kWarp; ++w.lane) {
      if (w.done[w.lane]) continue;
      threadIdx.x = w.lane;
      swapcontext(&w.back, &w.lanes[w.lane]);
      left = left || !w.done[w.lane];
    }
  }
}

// Gives a value; afterwards those of all lanes are there, until the exchange after the next one.
inline const int64_t* exchange(int64_t value) {
  Warp& w = current();
  const int lane = w.lane, turn = w.turn[lane]++ % 2;
  w.values[turn][lane] = value;
  swapcontext(&w.lanes[lane], &w.back);
  threadIdx.x = lane;
  return w.values[turn];
}

}  // namespace warp

inline int __shfl_sync(unsigned, int value, int from) { return static_cast<int>(warp::exchange(value)[from % kWarp]); }

inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x;
  const int64_t* all = warp::exchange(value);
  return static_cast<int>(lane >= step ? all[lane - step] : value);
}

inline unsigned __ballot_sync(unsigned, bool value) {
  const int64_t* all = warp::exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}

inline int __reduce_max_sync(unsigned, int value) {
  const int64_t* all = warp::exchange(value);
  return static_cast<int>(*std::max_element(all, all + kWarp));
}

inline int __reduce_add_sync(unsigned, int value) {
  const int64_t* all = warp::exchange(value);
  int64_t sum = 0;
  for (int lane = 0; lane < kWarp; ++lane) sum += all[lane];
  return static_cast<int>(sum);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

// On a GPU the quotient is an approximation that is corrected; here it is exact.
inline void divide_small(int n, int d, int& quotient, int& rest) {
  quotient = n / d;
  rest = n % d;
}

// Only lengths are dealt here: no tensor is read or written.
inline void prefetch_l2(const void*) {}
inline void store_float(void*, DType, int64_t, float) {}
inline float load_float(const void*, DType, int64_t) { return 0.f; }

}  // namespace paged_attn
