// One dispatch: its arguments, and how it gets into torch's command encoder.
#pragma once

#import <Metal/Metal.h>

#include <array>
#include <string>

#include "arguments.h"
#include "spec/problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

using Constants = std::array<int32_t, kNumConstants>;

// What a dispatch needs beside its kernel. A tensor that is not given stays unbound: the shader has no such argument
// then. An empty one that is given has no buffer, yet it is bound.
struct Call {
  Arguments arguments = {};
  Constants constants = {};
  std::array<Optional<const void>, kNumBuffers> buffers = {};

  template <typename T>
  void bind(int index, Address<T> address) {
    buffers[index] = {{address.buffer, address.offset}, true};
  }

  template <typename T>
  void bind(int index, Optional<T> tensor) {
    if (tensor) bind(index, tensor.data);
  }

  template <typename T>
  void bind(int index, Optional<T> tensor, int constant) {
    constants[constant] = tensor.given;
    bind(index, tensor);
  }
};

// Threads of a threadgroup: as many as asked for, as far as the registers of the kernel allow, in whole simdgroups.
void encode(id<MTLComputeCommandEncoder> encoder, const std::string& name, const Call& call, MTLSize groups,
            int64_t threads, int64_t least_threads);

}  // namespace paged_attn
