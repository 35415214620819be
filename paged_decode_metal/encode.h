// One dispatch, into torch's command encoder.
#pragma once

#import <Metal/Metal.h>

#include <string>

#include "call.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

struct Dispatch {
  std::string kernel;
  MTLSize threadgroups;
  int64_t threads;        // of a threadgroup: so many, as far as the registers of the kernel allow, in whole simdgroups
  int64_t least_threads;  // that the kernel can work with
};

// What of a dispatch may fail: its kernel, compiled, and the threads that this allows it.
struct Pipeline {
  id<MTLComputePipelineState> state;
  int64_t threads;
};

// On the stream's queue only.
Pipeline pipeline_of(const Dispatch& dispatch, const Call& call);
void encode(id<MTLComputeCommandEncoder> encoder, const Pipeline& pipeline, const Dispatch& dispatch, const Call& call);

}  // namespace paged_attn
