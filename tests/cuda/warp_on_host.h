// A warp on the host, for paged_decode_cuda/balance.cuh: 32 lanes that take turns. Whoever exchanges a value leaves his
// own and lets the others go first; when his turn comes again all have left theirs.
#pragma once

#include <stdint.h>
#include <ucontext.h>

#include <functional>
#include <memory>

namespace warp_on_host {

constexpr int kLanes = 32, kStack = 64 << 10;

struct Warp {
  ucontext_t caller, lanes[kLanes];
  std::unique_ptr<char[]> stacks{new char[kLanes * kStack]};
  bool done[kLanes];
  int64_t left[2][kLanes];  // of an exchange and of the one before it
  int turn[kLanes];
  int lane;
  std::function<void()> work;
};

inline Warp warp;
struct Place {
  int x;
};
inline Place threadIdx, blockIdx, blockDim, gridDim;

inline int this_thread() { return threadIdx.x; }

inline void pass_on() {
  const int from = warp.lane;
  int to = from;
  do to = (to + 1) % kLanes;
  while (warp.done[to] && to != from);
  if (to == from && warp.done[from]) {
    setcontext(&warp.caller);
  } else if (to != from) {
    warp.lane = threadIdx.x = to;
    warp.done[from] ? setcontext(&warp.lanes[to]) : swapcontext(&warp.lanes[from], &warp.lanes[to]);
  }
}

inline void run_lane() {
  warp.work();
  warp.done[warp.lane] = true;
  pass_on();
}

// Runs `work` on every lane of a warp of block `block`.
inline void run(int block, std::function<void()> work) {
  warp.work = std::move(work);
  blockIdx.x = block;
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.done[lane] = false;
    warp.turn[lane] = 0;
    getcontext(&warp.lanes[lane]);
    warp.lanes[lane].uc_stack = {warp.stacks.get() + lane * kStack, 0, kStack};
    warp.lanes[lane].uc_link = nullptr;
    makecontext(&warp.lanes[lane], run_lane, 0);
  }
  warp.lane = threadIdx.x = 0;
  swapcontext(&warp.caller, &warp.lanes[0]);
}

// What all lanes have left.
inline const int64_t* exchange(int64_t value) {
  const int lane = warp.lane;
  int64_t* left = warp.left[warp.turn[lane]++ % 2];
  left[lane] = value;
  pass_on();
  return left;
}

inline void atomicAdd(int* place, int value) { *place += value; }
inline void __syncwarp() { exchange(0); }
inline int __shfl_sync(unsigned, int value, int lane) { return static_cast<int>(exchange(value)[lane]); }
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = warp.lane;
  const int64_t* all = exchange(value);
  return static_cast<int>(all[lane >= step ? lane - step : lane]);
}
template <typename Combine>
int combine(int value, Combine with) {
  const int64_t* all = exchange(value);
  int64_t result = all[0];
  for (int lane = 1; lane < kLanes; ++lane) result = with(result, all[lane]);
  return static_cast<int>(result);
}
inline int __reduce_add_sync(unsigned, int value) {
  return combine(value, [](int64_t a, int64_t b) { return a + b; });
}
inline int __reduce_max_sync(unsigned, int value) {
  return combine(value, [](int64_t a, int64_t b) { return a > b ? a : b; });
}
inline bool __any_sync(unsigned, bool value) {
  return combine(value, [](int64_t a, int64_t b) { return a | b; }) != 0;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const int64_t* all = exchange(value);
  unsigned bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<unsigned>(all[lane] != 0) << lane;
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace warp_on_host

namespace paged_attn {
using namespace warp_on_host;
}
