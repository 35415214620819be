// Thread blocks and clusters on the host: every thread is a fiber, and whoever waits lets the others go on. In the
// place of ../warp_on_host.h, which has one warp.
//
// Threads take turns warp by warp in a random order, and now and then a warp sleeps for long. Bulk copies arrive some
// turns later, in a random order. When nobody can go on and nothing is on its way, the run ends with who waits for
// what.
#pragma once

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH_FEAT_SM90_ALL 1

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace block_on_host {

constexpr int kLanes = 32, kStack = 256 << 10, kMostThreads = 1024;
constexpr int kGuard = 64 << 10;                                 // a page or more
constexpr int kArena = 256 << 10, kRawAt = 8 << 10, kSkew = 48;  // dynamic shared memory begins off the alignment

struct Place {
  int x, y;
};
inline Place threadIdx, blockIdx, blockDim, gridDim;

// Ends the call.
[[noreturn]] void fail(const std::string& what);

// An mbarrier.
struct Barrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;  // expected and not yet there
  uint32_t phase = 0;
};

struct Meeting {  // of a named barrier, a block, a cluster
  int arrived = 0;
  uint64_t generation = 0;
};

struct NamedBarrier : Meeting {
  bool any[2];  // of those who have voted, in turns
};

struct Team {
  int64_t left[2][kLanes];
  Meeting meeting;
};
struct Operands {  // of a lane, in a product of its warp
  uint32_t a[4], b[2];
};
struct Warp : Team {
  Team halves[2];
  Operands operands[2][kLanes];
};

// The shared memory of a block. Behind it is none: who reads there has a fault.
struct Unmap {
  void operator()(uint8_t* arena) const { munmap(arena, kArena + kGuard); }
};
inline uint8_t* map_arena() {
  void* const arena = mmap(nullptr, kArena + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arena == MAP_FAILED) throw std::runtime_error("no memory for the shared memory of a block");
  mprotect(static_cast<uint8_t*>(arena) + kArena, kGuard, PROT_NONE);
  return static_cast<uint8_t*>(arena);
}

struct Block {
  std::unique_ptr<uint8_t[], Unmap> arena{map_arena()};
  std::unordered_map<uint32_t, Barrier> barriers;
  NamedBarrier named[16];
  Meeting all;
  int running = 0;  // threads
  std::vector<Warp> warps;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done;
  Place thread, block;
  const char* waits_for;
  std::function<bool()> may_go_on;  // empty: it does not wait
};

struct Machine {
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Thread> threads;
  std::vector<std::function<void()>> on_their_way;
  Meeting cluster;
  ucontext_t scheduler;
  Thread* current = nullptr;  // that runs; none: the scheduler does
  std::string failure;
  std::function<void()> kernel;
  std::function<void()> when_released;  // once the first thread of block 0 lets the next kernel start
  std::function<void()> when_block_ends;
  uint64_t events = 0;  // anything that might let somebody go on
  std::mt19937 dice{1};
  uint8_t fill = 0xff;  // what shared memory holds before a block begins: NaN
};
inline Machine machine;

inline Block& own_block() { return machine.blocks[blockIdx.y]; }
inline bool chance() { return machine.dice() & 1; }

inline void yield() { swapcontext(&machine.current->context, &machine.scheduler); }

// What a thread says is thrown by the scheduler: no exception leaves the stack of a thread.
inline void fail(const std::string& what) {
  const auto place = [](int x, int y) { return "(" + std::to_string(x) + ", " + std::to_string(y) + ")"; };
  machine.failure = "block " + place(blockIdx.x, blockIdx.y) + ", thread " + std::to_string(threadIdx.x) + ": " + what;
  while (machine.current) yield();
  throw std::runtime_error(machine.failure);
}

// The scheduler asks, in the place of the thread: to change stacks takes longer.
template <typename Condition>
void wait_until(const char* what, Condition condition) {
  if (!condition()) {
    machine.current->waits_for = what;
    machine.current->may_go_on = std::ref(condition);
    yield();
    machine.current->may_go_on = nullptr;
    machine.current->waits_for = "";
  }
  ++machine.events;
}

inline void run_thread() {
  machine.kernel();
  machine.current->done = true;
  --own_block().running;
  ++machine.events;
  yield();
}

inline void start_cluster(int cluster, int threads, int x) {
  machine.failure.clear();
  machine.blocks.clear();
  machine.blocks.resize(cluster);
  machine.threads.resize(static_cast<size_t>(cluster) * threads);
  machine.on_their_way.clear();
  machine.cluster = {};
  for (int y = 0; y < cluster; ++y) {
    machine.blocks[y].warps.resize(threads / kLanes);
    machine.blocks[y].running = threads;
    memset(machine.blocks[y].arena.get(), machine.fill, kArena);
    for (int t = 0; t < threads; ++t) {
      Thread& thread = machine.threads[y * threads + t];
      thread.done = false;
      thread.thread = {t, 0};
      thread.block = {x, y};
      thread.waits_for = "its turn";
      thread.may_go_on = nullptr;  // a call that failed may have left one
      getcontext(&thread.context);
      thread.context.uc_stack = {thread.stack.get(), 0, kStack};
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, run_thread, 0);
    }
  }
}

inline void report_deadlock() {
  std::unordered_map<std::string, int> waiting;
  for (const Thread& t : machine.threads) {
    if (!t.done) {
      ++waiting["block " + std::to_string(t.block.y) + " warp " + std::to_string(t.thread.x / kLanes) + " waits for " +
                t.waits_for];
    }
  }
  std::string all;
  for (const auto& [what, count] : waiting) all += "\n" + std::to_string(count) + " threads of " + what;
  fail("nobody can go on" + all);
}

inline void run_cluster() {
  const size_t warps = machine.threads.size() / kLanes;
  std::vector<size_t> order(warps);
  std::vector<int> asleep(warps, 0);
  for (size_t i = 0; i < warps; ++i) order[i] = i;
  int idle = 0;
  while (true) {
    const uint64_t before = machine.events;
    bool all_done = true;
    std::shuffle(order.begin(), order.end(), machine.dice);
    for (size_t w : order) {
      const auto first = machine.threads.begin() + w * kLanes;
      if (std::all_of(first, first + kLanes, [](const Thread& t) { return t.done; })) continue;
      all_done = false;
      if (asleep[w] > 0) {
        --asleep[w];
      } else if (machine.dice() % 512 == 0) {
        asleep[w] = static_cast<int>(machine.dice() % 400);
      }
      if (asleep[w] > 0 || machine.dice() % 4 == 0) {  // it is slow this time
        continue;
      }
      for (size_t t = w * kLanes; t < (w + 1) * kLanes; ++t) {
        Thread& thread = machine.threads[t];
        if (thread.done) continue;
        threadIdx = thread.thread;
        blockIdx = thread.block;
        if (thread.may_go_on && !thread.may_go_on()) continue;
        machine.current = &thread;
        swapcontext(&machine.scheduler, &thread.context);
        machine.current = nullptr;
        if (!machine.failure.empty()) throw std::runtime_error(machine.failure);
      }
    }
    auto& way = machine.on_their_way;
    std::shuffle(way.begin(), way.end(), machine.dice);
    for (size_t n = way.empty() ? 0 : machine.dice() % (way.size() + 1); n > 0; --n) {
      way.back()();
      way.pop_back();
      ++machine.events;
    }
    if (all_done) break;
    // Longer than any warp sleeps.
    idle = machine.events == before && way.empty() ? idle + 1 : 0;
    if (idle > 1000) report_deadlock();
  }
  while (!machine.on_their_way.empty()) fail("a copy arrives after its block has ended");
}

// One cluster after the other; a kernel whose clusters wait for each other would not end.
inline void run_grid(int clusters, int cluster, int threads, std::function<void()> kernel) {
  machine.kernel = std::move(kernel);
  blockDim = {threads, 1};
  gridDim = {clusters, cluster};
  for (int x = 0; x < clusters; ++x) {
    start_cluster(cluster, threads, x);
    run_cluster();
    if (machine.when_block_ends) machine.when_block_ends();
  }
}

// ---- What a warp exchanges ----

inline bool arrive(Meeting& meeting, int count) {
  ++machine.events;
  if (++meeting.arrived < count) return false;
  meeting.arrived = 0;
  ++meeting.generation;
  return true;
}

inline void meet(Meeting& meeting, int count, const char* what) {
  const uint64_t generation = meeting.generation;
  if (!arrive(meeting, count)) wait_until(what, [&] { return meeting.generation != generation; });
}

inline const int64_t* exchange_in(Team& team, int lanes, int64_t value) {
  int64_t* const left = team.left[team.meeting.generation % 2];
  left[threadIdx.x % kLanes] = value;
  meet(team.meeting, lanes, "its warp");
  return left;
}
inline const int64_t* exchange(int64_t value) {
  return exchange_in(own_block().warps[threadIdx.x / kLanes], kLanes, value);
}
// Among the lanes of the mask: all, or those of one half.
inline const int64_t* exchange(unsigned mask, int64_t value) {
  if (mask == ~0u) return exchange(value);
  const int half = threadIdx.x % kLanes / 16;
  if (mask != 0xffffu << half * 16) fail("a mask of other lanes than one half of its own warp");
  return exchange_in(own_block().warps[threadIdx.x / kLanes].halves[half], 16, value);
}
inline const Operands* exchange_operands(const Operands& own) {
  Warp& warp = own_block().warps[threadIdx.x / kLanes];
  Operands* const left = warp.operands[warp.meeting.generation % 2];
  left[threadIdx.x % kLanes] = own;
  meet(warp.meeting, kLanes, "its warp");
  return left;
}

inline int lane() { return threadIdx.x % kLanes; }
inline void __syncwarp() { exchange(0); }
inline void __threadfence() {}
inline int __shfl_sync(unsigned, int value, int from) { return static_cast<int>(exchange(value)[from % kLanes]); }
inline uint32_t __shfl_sync(unsigned, uint32_t value, int from) {
  return static_cast<uint32_t>(exchange(value)[from % kLanes]);
}
inline int64_t __shfl_sync(unsigned, int64_t value, int from) { return exchange(value)[from % kLanes]; }
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int own = lane();
  const int64_t* all = exchange(value);
  return static_cast<int>(all[own >= step ? own - step : own]);
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
  const int own = lane();
  return static_cast<uint32_t>(exchange(value)[own ^ mask]);
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = __shfl_xor_sync(~0u, bits, mask);
  memcpy(&value, &bits, 4);
  return value;
}
inline float __shfl_sync(unsigned, float value, int from) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = __shfl_sync(~0u, bits, from);
  memcpy(&value, &bits, 4);
  return value;
}
// Among the lanes of a team.
inline uint32_t __shfl_sync(unsigned, uint32_t value, int from, int team) {
  const int own = lane();
  return static_cast<uint32_t>(exchange(value)[own / team * team + from % team]);
}
inline int64_t __shfl_sync(unsigned, int64_t value, int from, int team) {
  const int own = lane();
  return exchange(value)[own / team * team + from % team];
}
inline float __shfl_sync(unsigned mask, float value, int from, int team) {
  const int own = lane();
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = static_cast<uint32_t>(exchange(mask, bits)[own / team * team + from % team]);
  memcpy(&value, &bits, 4);
  return value;
}
template <typename Combine>
int64_t combine(int64_t value, Combine with) {
  const int64_t* all = exchange(value);
  int64_t result = all[0];
  for (int i = 1; i < kLanes; ++i) result = with(result, all[i]);
  return result;
}
inline int __reduce_add_sync(unsigned, int value) {
  return static_cast<int>(combine(value, [](int64_t a, int64_t b) { return a + b; }));
}
inline int __reduce_max_sync(unsigned, int value) {
  return static_cast<int>(combine(value, [](int64_t a, int64_t b) { return a > b ? a : b; }));
}
inline bool __any_sync(unsigned mask, bool value) {
  const int64_t* all = exchange(mask, value);
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= (mask >> i & 1) && all[i] != 0;
  return any;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const int64_t* all = exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(all[i] != 0) << i;
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t x) {
  float value;
  memcpy(&value, &x, 4);
  return value;
}
inline void __syncthreads() { meet(own_block().all, blockDim.x, "its block"); }

// ---- Shared memory ----

template <typename T>
T& block_control() {
  static_assert(sizeof(T) <= kRawAt, "there is room");
  return *reinterpret_cast<T*>(own_block().arena.get());
}
inline uint8_t* block_raw() { return own_block().arena.get() + kRawAt + kSkew; }
inline uint8_t* shared_at(uint32_t address, int rank) {
  if (address >= kArena) fail("an address outside of shared memory");
  return machine.blocks[rank].arena.get() + address;
}
inline uint8_t* shared_at(uint32_t address) { return shared_at(address, blockIdx.y); }

}  // namespace block_on_host

namespace paged_attn {
using namespace block_on_host;
}
