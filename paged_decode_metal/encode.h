// One dispatch: its arguments, and how it gets into torch's command encoder.
#pragma once

#import <Metal/Metal.h>

#include <array>
#include <string>

#include "arguments.h"
#include "spec/problem.h"

namespace paged_attn {

using Constants = std::array<int32_t, kNumConstants>;

// What a dispatch needs beside its kernel. A place without a buffer stays unbound: the shader has no such argument
// then.
struct Call {
  Arguments arguments = {};
  Constants constants = {};
  std::array<Address<const void>, kNumBuffers> buffers = {};

  template <typename T>
  void bind(int index, Address<T> address) {
    buffers[index] = {address.buffer, address.offset};
  }

  template <typename T>
  void bind_optional(int index, Address<T> address, int constant) {
    constants[constant] = address.buffer != nullptr;
    bind(index, address);
  }
};

// Threads of a threadgroup: as many as asked for, as far as the registers of the kernel allow, in whole simdgroups.
void encode(id<MTLComputeCommandEncoder> encoder, const std::string& name, const Call& call, MTLSize groups,
            int64_t threads, int64_t least_threads);

}  // namespace paged_attn
