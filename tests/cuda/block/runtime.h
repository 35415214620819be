// What host code needs of the CUDA runtime, with kernels that run on the host.
#pragma once

#include <stdint.h>

#include "lanes.h"
#include "limits.h"

namespace paged_attn {

struct Context {
  DeviceLimits limits;
};

struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
};

template <typename... Arguments>
void launch_in_clusters(const void* kernel, const Grid& grid, int cluster, const Context&, Arguments... arguments) {
  const auto function = reinterpret_cast<void (*)(Arguments...)>(const_cast<void*>(kernel));
  run_grid(static_cast<int>(grid.blocks), cluster, grid.threads, [=] { function(arguments...); });
}

template <typename... Arguments>
void launch(const void* kernel, const Grid& grid, const Context& context, Arguments... arguments) {
  launch_in_clusters(kernel, grid, 1, context, arguments...);
}

// Nothing of it is set.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : data_(new uint8_t[bytes]) { memset(data_.get(), 0xff, bytes); }
  void* data() const { return data_.get(); }

 private:
  std::unique_ptr<uint8_t[]> data_;
};

}  // namespace paged_attn
