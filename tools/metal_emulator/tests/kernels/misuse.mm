// Host code that Metal's validation or torch's stream would not survive, one mistake a function; and one without.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#import <Metal/Metal.h>

#include <exception>
#include <string>

using at::mps::dispatch_sync_with_rethrow;

static id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }
static at::mps::MPSStream* stream() { return at::mps::getCurrentMPSStream(); }

static id<MTLComputePipelineState> pipeline(const char* libraries, NSString* name) {
  const std::string text = std::string("EMULATED:") + libraries;
  id<MTLLibrary> library = [device() newLibraryWithData:dispatch_data_create(text.data(), text.size(), nullptr, nullptr)
                                                  error:nullptr];
  id<MTLFunction> function = [library newFunctionWithName:name];
  return [device() newComputePipelineStateWithFunction:function error:nullptr];
}

static void run(const std::string& mistake, const char* libraries) {
  id<MTLBuffer> buffer = [[device() newBufferWithLength:64 * 4 options:MTLResourceStorageModeShared] autorelease];
  auto encode = [&](id<MTLComputeCommandEncoder> encoder) {
    [encoder setComputePipelineState:pipeline(libraries, mistake == "no function" ? @"nobody" : @"small_threadgroups")];
    if (mistake == "buffer index") [encoder setBuffer:buffer offset:0 atIndex:31];
    if (mistake == "offset") [encoder setBuffer:buffer offset:257 atIndex:0];
    if (mistake == "long bytes") [encoder setBytes:libraries length:5000 atIndex:0];
    if (mistake == "threadgroup memory") [encoder setThreadgroupMemoryLength:24 atIndex:0];
    if (mistake != "unset buffer") [encoder setBuffer:buffer offset:0 atIndex:0];
    const NSUInteger threads = mistake == "threads" ? 96 : 64;
    [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
    if (mistake == "ended twice") {
      [encoder endEncoding];
      [encoder endEncoding];
    }
    if (mistake == "after the end") {
      [encoder endEncoding];
      [encoder setBuffer:buffer offset:0 atIndex:0];
    }
  };
  if (mistake == "off the queue") return encode(stream()->commandEncoder());
  dispatch_sync_with_rethrow(stream()->queue(), ^() {
    @autoreleasepool {
      if (mistake == "own encoder") {  // while torch's is open
        stream()->commandEncoder();
        encode([stream()->commandBuffer() computeCommandEncoder]);
      } else if (mistake == "blit") {
        stream()->endKernelCoalescing();
        id<MTLBlitCommandEncoder> blit = [stream()->commandBuffer() blitCommandEncoder];
        [blit copyFromBuffer:buffer sourceOffset:0 toBuffer:buffer destinationOffset:4 size:16];
      } else {
        encode(stream()->commandEncoder());
      }
    }
  });
}

// Whether something was refused.
extern "C" bool try_mistake(const char* mistake, const char* libraries) {
  try {
    run(mistake, libraries);
    dispatch_sync_with_rethrow(stream()->queue(), ^() {
      @autoreleasepool {
        stream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
      }
    });
  } catch (const std::exception&) {
    return true;
  }
  return false;
}
