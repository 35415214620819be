#include "encode.h"

#include <ATen/mps/MPSDevice.h>
#import <Foundation/Foundation.h>

#include <map>
#include <mutex>
#include <stdexcept>

#include "spec/ranges.h"
#include EMBEDDED_METALLIB_HEADER

namespace [[gnu::visibility("hidden")]] paged_attn {
namespace {

[[noreturn]] void fail(const std::string& what, NSError* error) {
  throw std::runtime_error("metal: " + what + ": " + (error ? error.localizedDescription.UTF8String : "unknown error"));
}

// Compiled once for every kernel and combination of constants. From torch 2.14 on threads may have streams of their
// own, each with a queue.
id<MTLComputePipelineState> pipeline_for(const std::string& name, const Constants& constants) {
  static std::map<std::string, id<MTLComputePipelineState>> known;
  static id<MTLLibrary> library = nil;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const std::string key =
      name + std::string(reinterpret_cast<const char*>(constants.data()), sizeof(int32_t) * constants.size());
  const auto found = known.find(key);
  if (found != known.end()) return found->second;

  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  if (!library) library = EMBEDDED_METALLIB_NAMESPACE::createLibrary(device, &error);
  if (!library) fail("the library of shaders does not load", error);
  MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
  for (int i = 0; i < kNumConstants; ++i) {
    const bool flag = constants[i] != 0;
    if (i < kFirstInt) {
      [values setConstantValue:&flag type:MTLDataTypeBool atIndex:i];
    } else {
      [values setConstantValue:&constants[i] type:MTLDataTypeInt atIndex:i];
    }
  }
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]
                                            constantValues:values
                                                     error:&error] autorelease];
  if (!function) fail("no function " + name, error);
  id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
  if (!pipeline) fail("no pipeline for " + name, error);
  return known[key] = pipeline;
}

int64_t threads_of(id<MTLComputePipelineState> pipeline, const Dispatch& dispatch) {
  const int64_t limit = static_cast<int64_t>(pipeline.maxTotalThreadsPerThreadgroup) / kSimdWidth * kSimdWidth;
  if (limit < dispatch.least_threads)
    throw std::runtime_error("metal: " + dispatch.kernel + ": expected a device with threadgroups of at least " +
                             std::to_string(dispatch.least_threads) + " threads for it, got " + std::to_string(limit));
  return pd_min(dispatch.threads, limit);
}

}  // namespace

Pipeline pipeline_of(const Dispatch& dispatch, const Call& call) {
  id<MTLComputePipelineState> state = pipeline_for(dispatch.kernel, call.constants);
  return {state, threads_of(state, dispatch)};
}

void encode(id<MTLComputeCommandEncoder> encoder, const Pipeline& pipeline, const Dispatch& dispatch,
            const Call& call) {
  [encoder setComputePipelineState:pipeline.state];
  [encoder setBytes:&call.arguments length:sizeof(Arguments) atIndex:kArgumentsBuffer];
  for (int i = 0; i < kNumBuffers; ++i) {
    const Optional<const void>& tensor = call.buffers[i];
    if (!tensor) continue;
    [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, tensor.data.buffer) offset:tensor.data.offset atIndex:i];
  }
  [encoder dispatchThreadgroups:dispatch.threadgroups threadsPerThreadgroup:MTLSizeMake(pipeline.threads, 1, 1)];
}

}  // namespace paged_attn
