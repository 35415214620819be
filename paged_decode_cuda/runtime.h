// What the host code needs of the CUDA runtime and of torch: the device's limits, launches, temporary memory.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <array>
#include <new>
#include <tuple>
#include <type_traits>

#include "limits.h"

namespace paged_attn {

// Throws with what was tried. The runtime forgets the error, or torch's next check would raise it again.
void check_cuda(cudaError_t error, const char* what);

// Where and on what a call runs.
struct Context {
  int device;
  DeviceLimits limits;
  cudaStream_t stream;
};

// The current device and torch's current stream on it. The limits of a device are asked for once.
Context current_context();

// How a kernel is started: in clusters of `cluster` blocks, `blocks` of them. blockIdx.y is a block's place in its
// cluster.
struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
  int cluster = 1;
};

// The kernels of a call and their temporary memory. What may fail comes before run(), so that an error leaves nothing
// written.
class Launches {
 public:
  explicit Launches(const Context& context) : context_(context) {}
  ~Launches();
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  const DeviceLimits& limits() const { return context_.limits; }

  // Memory on the current device, from torch's allocator: given back when this ends, while what was launched on the
  // current stream may still use it, and then handed out on that stream only. A tensor would take several times as
  // long. Of 0 bytes: nowhere.
  void* workspace(int64_t bytes);

  // Keeps copies of the arguments.
  template <typename... Arguments>
  void add(const void* kernel, const Grid& grid, const Arguments&... arguments) {
    using Copies = std::tuple<Arguments...>;
    static_assert(sizeof(Copies) <= kArgumentBytes && alignof(Copies) <= kArgumentAlign);
    static_assert(sizeof...(Arguments) <= kMostArguments && (std::is_trivially_copyable_v<Arguments> && ...));
    Launch& launch = prepare(kernel, grid);
    const auto keep = [&](auto&... copies) {
      int i = 0;
      ((launch.arguments[i++] = &copies), ...);
    };
    std::apply(keep, *new (launch.copies) Copies(arguments...));
  }

  // Launches them in their order, with programmatic dependent launch where they can wait.
  void run();

 private:
  static constexpr int kMostKernels = 3;  // append, attention, and the one that combines its partials
  static constexpr int kMostArguments = 2, kArgumentBytes = 4096, kArgumentAlign = 128;

  struct Launch {
    const void* kernel;
    Grid grid;
    bool waits;
    void* arguments[kMostArguments];
    alignas(kArgumentAlign) char copies[kArgumentBytes];
  };

  Launch& prepare(const void* kernel, const Grid& grid);

  Context context_;
  int kernels_ = 0, workspaces_ = 0;
  std::array<Launch, kMostKernels> launches_;  // nothing of it is set before its time
  std::array<void*, 2> memory_;                // of the rotated queries, and of the route
};

}  // namespace paged_attn
