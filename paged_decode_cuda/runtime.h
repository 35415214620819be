// What the host code needs of the CUDA runtime and of torch: the device's limits, launches, temporary memory.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "limits.h"

namespace paged_attn {

// Throws with what was tried.
void check_cuda(cudaError_t error, const char* what);

// Where and on what a call runs.
struct Context {
  int device;
  DeviceLimits limits;
  cudaStream_t stream;
};

// The current device and torch's current stream on it. The limits of a device are asked for once.
Context current_context();

// How a kernel is started.
struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
};

// Launches a kernel with pointers to its arguments, with programmatic dependent launch where it can wait.
void launch_kernel(const void* kernel, const Grid& grid, const Context& context, void** arguments);

template <typename... Arguments>
void launch(const void* kernel, const Grid& grid, const Context& context, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  launch_kernel(kernel, grid, context, pointers);
}

// The same in clusters: the grid is grid.blocks of them, and blockIdx.y is a block's place in its cluster.
void launch_kernel_in_clusters(const void* kernel, const Grid& grid, int cluster, const Context& context,
                               void** arguments);

template <typename... Arguments>
void launch_in_clusters(const void* kernel, const Grid& grid, int cluster, const Context& context,
                        Arguments... arguments) {
  void* pointers[] = {&arguments...};
  launch_kernel_in_clusters(kernel, grid, cluster, context, pointers);
}

// Temporary memory on the current device, from torch's allocator: given back at the end, when what was launched on the
// current stream may still use it, and then handed out on that stream only. A tensor would take several times as long.
// Of 0 bytes: nowhere.
class Workspace {
 public:
  explicit Workspace(int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace paged_attn
