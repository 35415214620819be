// The emulated GPU as kernels and hosts see it. Every lane is a fiber; all fibers run on the OS thread that dispatches,
// one at a time, in an order that only the seed decides.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MTL_THREAD_SANITIZER
#endif
#endif

namespace mtl {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;          // per threadgroup, on Apple GPUs
constexpr size_t kMaxThreadgroupBytes = 32768;  // maxThreadgroupMemoryLength
constexpr int kNumBuffers = 31;
constexpr int kNumFunctionConstants = 512;

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

using Site = std::source_location;  // of a simdgroup function or a barrier

// ---- called by translated kernels, inside a lane

struct Ids {
  Dim3 thread_position_in_grid, threads_per_grid, thread_position_in_threadgroup, threads_per_threadgroup,
      dispatch_threads_per_threadgroup, threadgroup_position_in_grid, threadgroups_per_grid, grid_origin, grid_size;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};
const Ids& ids();

void threadgroup_barrier(int flags, const Site& site);
void simdgroup_barrier(int flags, const Site& site);

// Every live lane of the simdgroup hands in a value; then each sees all of them.
struct Exchange {
  static constexpr size_t kMaxBytes = 128;
  const unsigned char* values;  // kMaxBytes apart
  uint32_t active;              // mask of the lanes that take part
  uint32_t lane;
  unsigned char* result;  // room for a value that the first lane computes for all
  bool* has_result;
};
Exchange simd_exchange(const void* value, uint32_t bytes, const char* operation, const Site& site);

void* threadgroup_static(const void* key, size_t size, size_t alignment, const char* name);
void* threadgroup_dynamic(int index, size_t alignment);
void* buffer(int index);  // as bound for a parameter of the kernel
void* slot(int index);    // as the host set it, for kernels without a list of parameters

struct FunctionConstantValue {
  bool set;
  unsigned char value[16];
};
extern FunctionConstantValue function_constants[kNumFunctionConstants];

[[noreturn]] void fail(const char* format, ...);

// What the emulator itself reads and writes in a lane is not the kernel's.
#ifdef MTL_THREAD_SANITIZER
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
struct Unwatched {
  Unwatched() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unwatched() {
    AnnotateIgnoreReadsEnd("", 0);
    AnnotateIgnoreWritesEnd("", 0);
  }
};
#else
struct Unwatched {};
#endif

// ---- kernels, registered by the translated source

struct Buffer {
  int index;
  const char* name;
  bool writable;
  size_t fixed_size;  // of the type behind a reference; 0 for a pointer
  size_t alignment;
  bool (*bound)();  // [[function_constant(c)]] on the parameter: bound only when c is true; nullptr: always
};

struct Kernel {
  const char* name;
  void (*run)();
  const Buffer* buffers;
  int num_buffers;
  uint32_t max_threads;  // [[max_total_threads_per_threadgroup]]
  Kernel* next;
};
bool register_kernel(Kernel* kernel);

// ---- one dispatch, as the host set it up

struct Slot {
  bool set, bytes;  // bytes: setBytes
  void* data;
  size_t size;
};

struct Arguments {
  Slot buffers[kNumBuffers];
  size_t threadgroup_memory[kNumBuffers];
  FunctionConstantValue constants[kNumFunctionConstants];
};

// What a dispatch did. Bytes are summed over lanes; only a build with MTL_COUNT sees them.
struct Counts {
  uint64_t dispatches, threadgroups, threads, simd_operations, barriers, threadgroup_bytes;
  uint64_t loaded[kNumBuffers], stored[kNumBuffers];  // device memory, by buffer index
  uint64_t load_instructions[kNumBuffers], store_instructions[kNumBuffers];
  uint64_t threadgroup_loaded, threadgroup_stored;
};

}  // namespace mtl

// ---- called by hosts: emulator.py, fake_metal.mm

#define MTL_EXPORT extern "C" __attribute__((visibility("default")))

MTL_EXPORT const mtl::Kernel* mtl_find(const char* name);
MTL_EXPORT uint32_t mtl_max_threads(const mtl::Kernel* kernel);
MTL_EXPORT const char* mtl_names();  // one a line
MTL_EXPORT mtl::Arguments* mtl_arguments_new();
MTL_EXPORT void mtl_arguments_free(mtl::Arguments* arguments);
MTL_EXPORT void mtl_set_buffer(mtl::Arguments* arguments, int index, void* data, size_t size);
MTL_EXPORT void mtl_set_bytes(mtl::Arguments* arguments, int index, const void* data, size_t size);
MTL_EXPORT void mtl_set_threadgroup_memory(mtl::Arguments* arguments, int index, size_t size);
MTL_EXPORT void mtl_set_constant(mtl::Arguments* arguments, int index, const void* data, size_t size);
// grid counts threadgroups with whole_threadgroups, else threads. Returns 0, or 1 and a message.
MTL_EXPORT int mtl_dispatch(const mtl::Kernel* kernel, const mtl::Arguments* arguments, const uint32_t grid[3],
                            const uint32_t threadgroup[3], int whole_threadgroups, uint32_t seed, char* message,
                            size_t message_size);
MTL_EXPORT const mtl::Counts* mtl_counts();
MTL_EXPORT const char* mtl_simd_counts();  // "name count" a line
MTL_EXPORT void mtl_reset_counts();
