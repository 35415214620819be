// Implements runtime.h: fibers, barriers and buffers, and the checks for data races and overlapping buffers.
#include "runtime.h"

#include <setjmp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

// This file is never built with -fsanitize=thread, only told (MTL_THREAD_SANITIZER): kernel accesses alone are watched.
#ifdef MTL_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#define IF_TSAN(...) __VA_ARGS__
#else
#define IF_TSAN(...)
#endif
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define IF_ASAN(...) __VA_ARGS__
#else
#define IF_ASAN(...)
#endif

// Saves the registers that a call preserves, changes the stack.
extern "C" void mtl_switch(void** save_stack, void* load_stack);
#if defined(__x86_64__)
asm(R"(
.text
.globl mtl_switch
.type mtl_switch,@function
mtl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size mtl_switch,.-mtl_switch
)");
constexpr int kSavedRegisters = 6;
#else
#error "the emulator's fibers are written for x86-64"
#endif

namespace mtl {

FunctionConstantValue function_constants[kNumFunctionConstants];

namespace {

constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kPageBytes = 4096;

enum class State { kReady, kInSimd, kInBarrier, kDone };

struct Lane {
  void* stack_pointer = nullptr;
  unsigned char* stack = nullptr;
  State state = State::kDone;
  Ids ids;
  const char* operation = nullptr;  // what it waits in
  Site site;
  uint64_t num_operations = 0;
  bool returned = false;
  void* asan_fake_stack = nullptr;
  void* tsan_fiber = nullptr;
};

// The mailbox of a simdgroup. Two in turn: a fast lane may hand in its next value while a slow one still reads.
struct Mailbox {
  alignas(64) unsigned char values[2][kSimdWidth][Exchange::kMaxBytes];
  alignas(64) unsigned char result[2][Exchange::kMaxBytes];
  bool has_result[2];
  uint32_t active[2];
  int turn = 0;
};

struct Memory {  // of a threadgroup variable
  unsigned char* data;
  size_t size;
};

struct Bound {  // a buffer of the running dispatch; data may be a copy, see separate_overlaps
  const Buffer* described = nullptr;
  unsigned char *data = nullptr, *original = nullptr;
  size_t size = 0;
  std::vector<uint32_t> reader, writer;  // of each byte: threadgroup + 1; kMany readers
};
constexpr uint32_t kMany = ~0u;

struct Runtime {
  const Kernel* kernel = nullptr;
  const Arguments* arguments = nullptr;
  std::vector<Lane> lanes;
  std::vector<Mailbox> mailboxes;
  uint32_t num_threads = 0, num_simdgroups = 0, threadgroup = 0;
  Lane* current = nullptr;
  void *main_stack_pointer = nullptr, *main_asan_fake_stack = nullptr, *main_tsan_fiber = nullptr;
  const void* main_stack = nullptr;
  size_t main_stack_bytes = 0;
  std::map<const void*, Memory> static_memory;  // by the address of a key in the translated source
  std::map<int, Memory> dynamic_memory;         // by the index of [[threadgroup(i)]]
  size_t threadgroup_bytes = 0;
  Bound bound[kNumBuffers];
  char error[2048] = "";
  jmp_buf failed;
  bool shuffled = false;
  std::mt19937 random;
  char barrier_sync, simd_sync[kMaxThreads / kSimdWidth];  // addresses for TSan
  Counts counts = {};
  std::map<std::string, uint64_t> simd_counts;
};
Runtime r;
Kernel* kernels = nullptr;
std::vector<unsigned char> absent(4096, 0xff);  // behind a reference that is not bound: a compiler may read it early

void to_main() {
  Lane* lane = r.current;
  IF_ASAN(__sanitizer_start_switch_fiber(lane->state == State::kDone ? nullptr : &lane->asan_fake_stack, r.main_stack,
                                         r.main_stack_bytes);)
  IF_TSAN(__tsan_switch_to_fiber(r.main_tsan_fiber, __tsan_switch_to_fiber_no_sync);)
  mtl_switch(&lane->stack_pointer, r.main_stack_pointer);
  IF_ASAN(__sanitizer_finish_switch_fiber(lane->asan_fake_stack, &r.main_stack, &r.main_stack_bytes);)
}

void to_lane(Lane* lane) {
  r.current = lane;
  IF_ASAN(__sanitizer_start_switch_fiber(&r.main_asan_fake_stack, lane->stack, kStackBytes);)
  IF_TSAN(__tsan_switch_to_fiber(lane->tsan_fiber, __tsan_switch_to_fiber_no_sync);)
  mtl_switch(&r.main_stack_pointer, lane->stack_pointer);
  IF_ASAN(__sanitizer_finish_switch_fiber(r.main_asan_fake_stack, nullptr, nullptr);)
  r.current = nullptr;
}

void lane_main() {
  IF_ASAN(__sanitizer_finish_switch_fiber(nullptr, &r.main_stack, &r.main_stack_bytes);)
  IF_TSAN(__tsan_acquire(&r.arguments);)
  r.kernel->run();
  IF_TSAN(__tsan_release(&r.kernel);)
  r.current->state = State::kDone;
  r.current->returned = true;
  to_main();
  abort();
}

void wait(State state, const char* operation, const Site& site) {
  Lane& lane = *r.current;
  lane.operation = operation;
  lane.site = site;
  lane.num_operations++;
  lane.state = state;
  to_main();
}

bool same_place(const Lane& a, const Lane& b) {
  return a.site.line() == b.site.line() && a.site.column() == b.site.column() &&
         (a.site.file_name() == b.site.file_name() || !strcmp(a.site.file_name(), b.site.file_name()));
}

void require_same_place(const Lane& a, const Lane& b) {
  if (same_place(a, b) && a.num_operations == b.num_operations) return;
  fail("lanes part: thread %u waits in %s at %s:%u (its operation %lu), thread %u in %s at %s:%u (its operation %lu)",
       a.ids.thread_index_in_threadgroup, a.operation, a.site.file_name(), a.site.line(),
       (unsigned long)a.num_operations, b.ids.thread_index_in_threadgroup, b.operation, b.site.file_name(),
       b.site.line(), (unsigned long)b.num_operations);
}

// A simdgroup function is complete when every lane that has not returned waits in it.
void complete_simd(uint32_t group) {
  Mailbox& mailbox = r.mailboxes[group];
  const Lane* first = nullptr;
  uint32_t active = 0;
  for (uint32_t i = 0; i < kSimdWidth && group * kSimdWidth + i < r.num_threads; i++) {
    Lane& lane = r.lanes[group * kSimdWidth + i];
    if (lane.state != State::kInSimd) continue;
    active |= 1u << i;
    if (first)
      require_same_place(*first, lane);
    else
      first = &lane;
    lane.state = State::kReady;
  }
  mailbox.active[mailbox.turn] = active;
  mailbox.has_result[mailbox.turn] = false;
  mailbox.turn ^= 1;
  r.counts.simd_operations++;
#ifdef MTL_COUNT
  r.simd_counts[first->operation]++;
#endif
}

void complete_barrier() {
  const Lane* first = nullptr;
  for (uint32_t i = 0; i < r.num_threads; i++) {
    Lane& lane = r.lanes[i];
    if (lane.state == State::kInBarrier && !first) first = &lane;
  }
  for (uint32_t i = 0; i < r.num_threads; i++) {
    Lane& lane = r.lanes[i];
    if (lane.state == State::kDone)
      fail("threadgroup_barrier at %s:%u is not reached by thread %u, which returned", first->site.file_name(),
           first->site.line(), i);
    if (!same_place(*first, lane))
      fail("threads part: thread %u waits in threadgroup_barrier at %s:%u, thread %u at %s:%u",
           first->ids.thread_index_in_threadgroup, first->site.file_name(), first->site.line(), i,
           lane.site.file_name(), lane.site.line());
  }
  for (uint32_t i = 0; i < r.num_threads; i++) r.lanes[i].state = State::kReady;
  r.counts.barriers++;
}

// Of exact size, so that AddressSanitizer sees each byte past the end, and full of NaN.
unsigned char* allocate_threadgroup(size_t size, size_t alignment, const char* name) {
  void* data = nullptr;
  if (posix_memalign(&data, std::max<size_t>(alignment, 16), std::max<size_t>(size, 1))) abort();
  memset(data, 0xff, size);
  IF_TSAN(__tsan_release(&r.static_memory);)  // this happens before every lane's first access
  r.threadgroup_bytes += (size + 15) & ~size_t(15);
  r.counts.threadgroup_bytes = std::max<uint64_t>(r.counts.threadgroup_bytes, r.threadgroup_bytes);
  if (r.threadgroup_bytes > kMaxThreadgroupBytes)
    fail("threadgroup memory: %zu bytes with %s, at most %zu exist", r.threadgroup_bytes, name, kMaxThreadgroupBytes);
  return static_cast<unsigned char*>(data);
}

void free_threadgroup() {
  for (auto& [key, memory] : r.static_memory) free(memory.data);
  for (auto& [index, memory] : r.dynamic_memory) free(memory.data);
  r.static_memory.clear();
  r.dynamic_memory.clear();
  r.threadgroup_bytes = 0;
}

unsigned char* new_stack() {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) abort();
  mprotect(memory, kPageBytes, PROT_NONE);
  return static_cast<unsigned char*>(memory) + kPageBytes;
}

void start(Lane& lane, size_t index) {
  if (!lane.stack) lane.stack = new_stack();
  IF_ASAN(if (!lane.returned) __asan_unpoison_memory_region(lane.stack, kStackBytes);)
  lane.returned = false;
#ifdef MTL_THREAD_SANITIZER
  if (!lane.tsan_fiber) {
    lane.tsan_fiber = __tsan_create_fiber(0);
    __tsan_set_fiber_name(lane.tsan_fiber, ("lane " + std::to_string(index)).c_str());
  }
#endif
  const uintptr_t colour = index % 61 * 192;  // else the hot parts of all stacks share a few cache sets
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(lane.stack) + kStackBytes - colour) & ~15ull);
  *--top = nullptr;  // keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&lane_main);
  for (int i = 0; i < kSavedRegisters; i++) *--top = nullptr;
  lane.stack_pointer = top;
  lane.state = State::kReady;
  lane.num_operations = 0;
}

void start_lanes(Dim3 position, Dim3 threadgroups, Dim3 size, Dim3 full_size, Dim3 grid) {
  auto simdgroups = [](uint32_t threads) { return (threads + kSimdWidth - 1) / kSimdWidth; };
  r.num_threads = size.x * size.y * size.z;
  r.num_simdgroups = simdgroups(r.num_threads);
  for (uint32_t i = 0; i < r.num_threads; i++) {
    Lane& lane = r.lanes[i];
    start(lane, i);
    const Dim3 local{i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    lane.ids = {.thread_position_in_grid = {position.x * full_size.x + local.x, position.y * full_size.y + local.y,
                                            position.z * full_size.z + local.z},
                .threads_per_grid = grid,
                .thread_position_in_threadgroup = local,
                .threads_per_threadgroup = size,
                .dispatch_threads_per_threadgroup = full_size,
                .threadgroup_position_in_grid = position,
                .threadgroups_per_grid = threadgroups,
                .grid_origin = {0, 0, 0},
                .grid_size = grid,
                .thread_index_in_threadgroup = i,
                .thread_index_in_simdgroup = i % kSimdWidth,
                .simdgroup_index_in_threadgroup = i / kSimdWidth,
                .simdgroups_per_threadgroup = r.num_simdgroups,
                .dispatch_simdgroups_per_threadgroup = simdgroups(full_size.x * full_size.y * full_size.z),
                .threads_per_simdgroup = kSimdWidth,
                .thread_execution_width = kSimdWidth};
  }
}

// Runs one simdgroup until all its lanes have returned or wait in a threadgroup_barrier.
bool run_simdgroup(uint32_t group) {
  const uint32_t begin = group * kSimdWidth, end = std::min(begin + kSimdWidth, r.num_threads), count = end - begin;
  const uint32_t rotation = r.shuffled ? r.random() % count : 0;
  bool progress = false, again = true;
  while (again) {
    again = false;
    for (uint32_t i = 0; i < count; i++) {
      Lane& lane = r.lanes[begin + (i + rotation) % count];
      if (lane.state != State::kReady) continue;
      progress = again = true;
      to_lane(&lane);
      if (r.error[0]) longjmp(r.failed, 1);
    }
    const Lane *in_simd = nullptr, *in_barrier = nullptr;
    for (uint32_t i = begin; i < end; i++) {
      if (r.lanes[i].state == State::kInSimd) in_simd = &r.lanes[i];
      if (r.lanes[i].state == State::kInBarrier) in_barrier = &r.lanes[i];
    }
    if (in_simd && in_barrier) require_same_place(*in_simd, *in_barrier);
    if (in_simd) {
      complete_simd(group);
      again = true;
    }
  }
  return progress;
}

void run_threadgroup() {
  std::vector<uint32_t> order(r.num_simdgroups);
  for (uint32_t g = 0; g < r.num_simdgroups; g++) order[g] = g;
  IF_TSAN(__tsan_release(&r.arguments);)
  for (;;) {
    if (r.shuffled) std::shuffle(order.begin(), order.end(), r.random);
    bool progress = false;
    for (uint32_t g : order) progress |= run_simdgroup(g);
    uint32_t live = 0, waiting = 0;
    for (uint32_t i = 0; i < r.num_threads; i++) {
      live += r.lanes[i].state != State::kDone;
      waiting += r.lanes[i].state == State::kInBarrier;
    }
    if (!live) break;
    if (waiting == live)
      complete_barrier();
    else if (!progress)
      fail("deadlock");
  }
  IF_TSAN(__tsan_acquire(&r.kernel);)
  free_threadgroup();
}

void bind_buffers() {
  for (int i = 0; i < r.kernel->num_buffers; i++) {
    const Buffer& described = r.kernel->buffers[i];
    const Slot& slot = r.arguments->buffers[described.index];
    Bound& bound = r.bound[described.index];
    auto refuse = [&](const char* format, size_t a = 0, size_t b = 0) {
      char text[256];
      snprintf(text, sizeof text, format, a, b);
      fail("buffer(%d), %s: %s", described.index, described.name, text);
    };
    if (described.bound && !described.bound()) {
      if (described.fixed_size) bound = {&described, absent.data(), absent.data(), 0, {}, {}};
      continue;
    }
    if (!slot.set) refuse("nothing is bound");
    if (reinterpret_cast<uintptr_t>(slot.data) % described.alignment) refuse("not aligned to %zu", described.alignment);
    if (slot.size < described.fixed_size) refuse("%zu bytes bound, its type has %zu", slot.size, described.fixed_size);
    if (slot.bytes && described.fixed_size && slot.size != described.fixed_size)
      refuse("setBytes of %zu bytes, its type has %zu", slot.size, described.fixed_size);
    bound = {&described, static_cast<unsigned char*>(slot.data), static_cast<unsigned char*>(slot.data), slot.size, {},
             {}};
  }
}

// Buffers are no-alias in Metal: what one pointer writes, another must not touch. Bindings that overlap without being
// equal (two parts of one allocation) each get a copy, so that a kernel never sees through one what it wrote through
// the other, and a byte written through two of them is an error.
void separate_overlaps() {
  for (Bound& a : r.bound)
    for (Bound& b : r.bound) {
      if (&a >= &b || !a.size || !b.size) continue;
      auto overlaps = [](const Bound& x, const Bound& y) {
        return x.original < y.original + y.size && y.original < x.original + x.size;
      };
      if (!overlaps(a, b) || (!a.described->writable && !b.described->writable)) continue;
      if (a.original == b.original)
        fail("buffer(%d), %s, and buffer(%d), %s, are the same memory, and one is written: buffers must not alias",
             a.described->index, a.described->name, b.described->index, b.described->name);
      for (Bound* bound : {&a, &b})
        if (bound->data == bound->original) {
          void* copy = nullptr;
          if (posix_memalign(&copy, 256, bound->size)) abort();
          memcpy(copy, bound->original, bound->size);
          bound->data = static_cast<unsigned char*>(copy);
        }
    }
}

void join_overlaps() {
  std::map<unsigned char*, std::pair<unsigned char, int>> written;
  for (Bound& bound : r.bound) {
    if (bound.data == bound.original) continue;
    for (size_t i = 0; bound.described->writable && i < bound.size; i++) {
      if (bound.data[i] == bound.original[i]) continue;
      auto [at, fresh] = written.emplace(bound.original + i, std::pair(bound.data[i], bound.described->index));
      if (!fresh)
        fail("one byte is written through buffer(%d) and buffer(%d): buffers must not alias", at->second.second,
             bound.described->index);
    }
  }
  for (auto& [at, value] : written) *at = value.first;
}

#ifdef MTL_COUNT
// Bytes of device memory that one threadgroup writes and another touches in the same dispatch: nothing orders them.
void watch_device(Bound& bound, size_t offset, size_t size, bool store) {
  if (bound.writer.empty()) {
    bound.reader.resize(bound.size);
    bound.writer.resize(bound.size);
  }
  for (size_t i = offset; i < offset + size; i++) {
    uint32_t &reader = bound.reader[i], &writer = bound.writer[i];
    const uint32_t other = writer && writer != r.threadgroup            ? writer
                           : store && reader && reader != r.threadgroup ? reader
                                                                        : 0;
    if (other)
      fail("byte %zu of buffer(%d), %s: %s by this threadgroup, %s by %s in the same dispatch", i,
           bound.described->index, bound.described->name, store ? "written" : "read",
           other == writer ? "written" : "read",
           other == kMany ? "several" : ("threadgroup " + std::to_string(other)).c_str());
    if (store)
      writer = r.threadgroup;
    else
      reader = reader && reader != r.threadgroup ? kMany : r.threadgroup;
  }
}

// Called by the instrumented kernels at each load and store.
void count_access(const void* address, size_t size, bool store) {
  if (!r.current) return;
  const auto* at = static_cast<const unsigned char*>(address);
  for (Bound& bound : r.bound) {
    if (at < bound.data || at >= bound.data + bound.size) continue;
    const int index = bound.described->index;
    (store ? r.counts.stored : r.counts.loaded)[index] += size;
    (store ? r.counts.store_instructions : r.counts.load_instructions)[index]++;
    if (at + size > bound.data + bound.size)
      fail("buffer(%d), %s: %zu bytes at %zu, it has %zu", index, bound.described->name, size, size_t(at - bound.data),
           bound.size);
    if (!r.arguments->buffers[index].bytes) watch_device(bound, at - bound.data, size, store);
    return;
  }
  auto count = [&](const Memory& memory) {
    if (at >= memory.data && at < memory.data + memory.size)
      (store ? r.counts.threadgroup_stored : r.counts.threadgroup_loaded) += size;
  };
  for (auto& [key, memory] : r.static_memory) count(memory);
  for (auto& [index, memory] : r.dynamic_memory) count(memory);
}
#endif

void release_buffers() {
  for (Bound& bound : r.bound) {
    if (bound.data != bound.original) free(bound.data);
    bound = {};
  }
}

void run_grid(Dim3 grid, Dim3 size) {
  auto ceil_div = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
  const Dim3 count{ceil_div(grid.x, size.x), ceil_div(grid.y, size.y), ceil_div(grid.z, size.z)};
  std::vector<Dim3> order;
  for (uint32_t z = 0; z < count.z; z++)
    for (uint32_t y = 0; y < count.y; y++)
      for (uint32_t x = 0; x < count.x; x++) order.push_back({x, y, z});
  if (r.shuffled) std::shuffle(order.begin(), order.end(), r.random);
  for (const Dim3& at : order) {
    const Dim3 part{std::min(size.x, grid.x - at.x * size.x), std::min(size.y, grid.y - at.y * size.y),
                    std::min(size.z, grid.z - at.z * size.z)};
    r.threadgroup = 1 + at.x + count.x * (at.y + count.y * at.z);
    start_lanes(at, count, part, size, grid);
    run_threadgroup();
    r.counts.threadgroups++;
    r.counts.threads += r.num_threads;
  }
}

}  // namespace

const Ids& ids() { return r.current->ids; }

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(r.error, sizeof r.error, format, list);
  va_end(list);
  if (!r.current) longjmp(r.failed, 1);
  r.current->state = State::kDone;  // this lane never resumes; run_simdgroup sees the message
  to_main();
  abort();
}

bool register_kernel(Kernel* kernel) {
  kernel->next = kernels;
  kernels = kernel;
  return true;
}

Exchange simd_exchange(const void* value, uint32_t bytes, const char* operation, const Site& site) {
  if (bytes > Exchange::kMaxBytes) fail("%s of %u bytes", operation, bytes);
  const uint32_t lane = r.current->ids.thread_index_in_simdgroup;
  Mailbox& mailbox = r.mailboxes[r.current->ids.simdgroup_index_in_threadgroup];
  const int turn = mailbox.turn;
  {
    Unwatched unwatched;
    memcpy(mailbox.values[turn][lane], value, bytes);
  }
  wait(State::kInSimd, operation, site);
  return {&mailbox.values[turn][0][0], mailbox.active[turn], lane, mailbox.result[turn], &mailbox.has_result[turn]};
}

void simdgroup_barrier([[maybe_unused]] int flags, const Site& site) {
  const char nothing = 0;
  IF_TSAN(char* sync = &r.simd_sync[r.current->ids.simdgroup_index_in_threadgroup]; if (flags) __tsan_release(sync);)
  simd_exchange(&nothing, 1, "simdgroup_barrier", site);
  IF_TSAN(if (flags) __tsan_acquire(sync);)
}

void threadgroup_barrier([[maybe_unused]] int flags, const Site& site) {
  IF_TSAN(if (flags) __tsan_release(&r.barrier_sync);)
  wait(State::kInBarrier, "threadgroup_barrier", site);
  IF_TSAN(if (flags) __tsan_acquire(&r.barrier_sync);)
}

void* threadgroup_static(const void* key, size_t size, size_t alignment, const char* name) {
  auto at = r.static_memory.find(key);
  if (at == r.static_memory.end())
    at = r.static_memory.emplace(key, Memory{allocate_threadgroup(size, alignment, name), size}).first;
  IF_TSAN(__tsan_acquire(&r.static_memory);)
  return at->second.data;
}

void* threadgroup_dynamic(int index, size_t alignment) {
  auto at = r.dynamic_memory.find(index);
  if (at == r.dynamic_memory.end()) {
    const size_t size = r.arguments->threadgroup_memory[index];
    if (!size) fail("[[threadgroup(%d)]]: setThreadgroupMemoryLength was not called for it", index);
    if (size % 16) fail("setThreadgroupMemoryLength of %zu bytes at %d: no multiple of 16", size, index);
    at = r.dynamic_memory.emplace(index, Memory{allocate_threadgroup(size, alignment, "dynamic memory"), size}).first;
  }
  IF_TSAN(__tsan_acquire(&r.static_memory);)
  return at->second.data;
}

void* buffer(int index) {
  // An address that faults: a parameter whose function constant is false, or a nil buffer, must not be touched.
  if (!r.bound[index].data) return reinterpret_cast<void*>(0xdead000000000000ull + (uint64_t(index) << 32));
  return r.bound[index].data;
}

void* slot(int index) {
  const Slot& slot = r.arguments->buffers[index];
  return slot.set ? slot.data : absent.data();
}

}  // namespace mtl

using namespace mtl;

const Kernel* mtl_find(const char* name) {
  for (Kernel* kernel = kernels; kernel; kernel = kernel->next)
    if (!strcmp(kernel->name, name)) return kernel;
  return nullptr;
}

uint32_t mtl_max_threads(const Kernel* kernel) { return kernel->max_threads; }

const char* mtl_names() {
  static std::string names;
  names.clear();
  for (Kernel* kernel = kernels; kernel; kernel = kernel->next) names += std::string(kernel->name) + "\n";
  return names.c_str();
}

Arguments* mtl_arguments_new() { return new Arguments(); }

void mtl_arguments_free(Arguments* arguments) {
  for (Slot& slot : arguments->buffers)
    if (slot.bytes) free(slot.data);
  delete arguments;
}

void mtl_set_buffer(Arguments* arguments, int index, void* data, size_t size) {
  arguments->buffers[index] = {true, false, data, size};
}

void mtl_set_bytes(Arguments* arguments, int index, const void* data, size_t size) {
  void* copy = nullptr;
  if (posix_memalign(&copy, 256, size)) abort();
  memcpy(copy, data, size);
  arguments->buffers[index] = {true, true, copy, size};
}

void mtl_set_threadgroup_memory(Arguments* arguments, int index, size_t size) {
  arguments->threadgroup_memory[index] = size;
}

void mtl_set_constant(Arguments* arguments, int index, const void* data, size_t size) {
  arguments->constants[index].set = true;
  memcpy(arguments->constants[index].value, data, size);
}

int mtl_dispatch(const Kernel* kernel, const Arguments* arguments, const uint32_t grid[3],
                 const uint32_t threadgroup[3], int whole_threadgroups, uint32_t seed, char* message,
                 size_t message_size) {
  if (r.lanes.empty()) {  // never moved: suspended lanes hold addresses
    r.lanes.resize(kMaxThreads);
    r.mailboxes.resize(kMaxThreads / kSimdWidth);
  }
  r.kernel = kernel;
  r.arguments = arguments;
  r.error[0] = 0;
  r.shuffled = seed != 0;
  r.random.seed(seed);
  memcpy(function_constants, arguments->constants, sizeof function_constants);
  IF_TSAN(r.main_tsan_fiber = __tsan_get_current_fiber();)
  bool ok = false;
  if (!setjmp(r.failed)) {
    const Dim3 size{threadgroup[0], threadgroup[1], threadgroup[2]};
    const uint64_t threads = uint64_t(size.x) * size.y * size.z;
    if (!threads || !grid[0] || !grid[1] || !grid[2]) fail("an empty grid or threadgroup");
    if (threads > kernel->max_threads)
      fail("a threadgroup of %lu threads, the kernel's limit is %u", (unsigned long)threads, kernel->max_threads);
    const uint32_t whole = whole_threadgroups ? 1 : 0;
    bind_buffers();
    separate_overlaps();
    run_grid({grid[0] * (whole ? size.x : 1), grid[1] * (whole ? size.y : 1), grid[2] * (whole ? size.z : 1)}, size);
    join_overlaps();
    r.counts.dispatches++;
    ok = true;
  }
  if (!ok) snprintf(message, message_size, "kernel %s, threadgroup %u: %s", kernel->name, r.threadgroup, r.error);
  free_threadgroup();
  release_buffers();
  return ok ? 0 : 1;
}

const Counts* mtl_counts() { return &r.counts; }

const char* mtl_simd_counts() {
  static std::string text;
  text.clear();
  for (auto& [name, count] : r.simd_counts) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}

void mtl_reset_counts() {
  r.counts = {};
  r.simd_counts.clear();
}

#ifdef MTL_COUNT
#define MTL_TRACE(bytes)                                                                              \
  MTL_EXPORT void __sanitizer_cov_load##bytes(void* address) { count_access(address, bytes, false); } \
  MTL_EXPORT void __sanitizer_cov_store##bytes(void* address) { count_access(address, bytes, true); } \
  static_assert(true)
MTL_TRACE(1);
MTL_TRACE(2);
MTL_TRACE(4);
MTL_TRACE(8);
MTL_TRACE(16);
// Clang traces accesses only together with something else.
MTL_EXPORT void __sanitizer_cov_trace_pc_guard(uint32_t*) {}
MTL_EXPORT void __sanitizer_cov_trace_pc_guard_init(uint32_t*, uint32_t*) {}
#endif
