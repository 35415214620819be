// What the dispatches of a call need beside their kernels: sizes, function constants, tensors.
#pragma once

#import <Metal/Metal.h>

#include <array>

#include "arguments.h"
#include "spec/merge.h"
#include "spec/problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

using Constants = std::array<int32_t, kNumConstants>;

// A tensor that is not given stays unbound: the shader has no such argument then. An empty one that is given has no
// buffer, yet it is bound.
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

  // With the constant that tells the shader whether the tensor is given.
  template <typename T>
  void bind(int index, Optional<T> tensor, int constant) {
    constants[constant] = tensor.given;
    bind(index, tensor);
  }
};

// Everything that writing and attending have in common.
Call shared_call(const Problem& problem);

// The write of the new tokens. With a rotary table the queries are rotated too, into `rotated`.
Call append_call(const Problem& problem, Optional<void> rotated);

// Attention; `rotated` holds the queries where they are rotated.
Call attend_call(const Problem& problem, Optional<void> rotated);

// merge_parts.
Call merge_call(const MergeProblem& problem);

}  // namespace paged_attn
