#include "check.h"

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#import <Foundation/Foundation.h>

#include <new>
#include <vector>

#include "encode.h"
#include "spec/check_tables.h"
#include "spec/ranges.h"

namespace [[gnu::visibility("hidden")]] paged_attn {
namespace {

// Host copies of the tables, for as long as this lives.
class HostCopies {
 public:
  HostCopies() = default;
  HostCopies(const HostCopies&) = delete;
  ~HostCopies() {
    for (id<MTLBuffer> buffer : buffers_) [buffer release];
  }

  // Encodes a copy of `count` elements, to be read after the stream is synchronised.
  template <typename T>
  void fetch(id<MTLComputeCommandEncoder> encoder, Address<const T>& table, int64_t count) {
    if (!table || count <= 0) return;
    id<MTLBuffer> copy = [at::mps::MPSDevice::getInstance()->device() newBufferWithLength:count * sizeof(T)
                                                                                  options:MTLResourceStorageModeShared];
    if (!copy) throw std::bad_alloc();
    buffers_.push_back(copy);
    Call call;
    call.bind(kTableBuffer, table);
    call.bind(kCopyBuffer, Address<void>{copy, 0});
    const int64_t words = count * sizeof(T) / sizeof(int32_t);
    call.arguments.total_words = words;
    const Dispatch fetch = {"fetch", MTLSizeMake(pd_ceil_div(words, kSimdWidth), 1, 1), kSimdWidth, kSimdWidth};
    encode(encoder, pipeline_of(fetch, call), fetch, call);
    table = {copy.contents, 0};
  }

 private:
  std::vector<id<MTLBuffer>> buffers_;
};

}  // namespace

void check_values_on_device(const Problem& problem) {
  __block Problem p = problem;
  HostCopies copies;
  HostCopies* host = &copies;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      fetch_tables(p, [&](auto& table, int64_t count) { host->fetch(encoder, table, count); });
      stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
    }
  });
  check_values(p);
  check_new_places(p);
}

}  // namespace paged_attn
