#include "check.h"

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#import <Foundation/Foundation.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "encode.h"
#include "ranges.h"
#include "values.h"

namespace paged_attn {
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
    buffers_.push_back(copy);
    Call call;
    call.bind(kTableBuffer, table);
    call.bind(kCopyBuffer, Address<void>{copy, 0});
    const int64_t words = count * sizeof(T) / sizeof(int32_t);
    call.arguments.total_words = words;
    encode(encoder, "fetch", call, MTLSizeMake(pd_ceil_div(words, kSimdWidth), 1, 1), kSimdWidth, kSimdWidth);
    table = {copy.contents, 0};
  }

 private:
  std::vector<id<MTLBuffer>> buffers_;
};

}  // namespace

bool checks_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("PAGED_ATTN_CHECK");
    return value && strcmp(value, "") != 0 && strcmp(value, "0") != 0;
  }();
  return enabled;
}

void check_values_on_device(const Problem& problem) {
  __block Problem p = problem;
  HostCopies copies;
  HostCopies* host = &copies;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      const Cache& c = p.cache;
      host->fetch(encoder, p.cu_seqlens_q, p.batch + 1);
      host->fetch(encoder, p.cache_seqlens, p.batch);
      host->fetch(encoder, p.cache_leftpad, p.batch);
      host->fetch(encoder, p.cache.block_table,
                  c.table_rows > 0 ? (c.table_rows - 1) * c.block_table_stride + c.max_pages : 0);
      host->fetch(encoder, p.cache.cu_seqlens_k, p.batch + 1);
      host->fetch(encoder, p.cache.cache_batch_idx, p.batch);
      host->fetch(encoder, p.append.cu_seqlens_k_new, p.batch + 1);
      host->fetch(encoder, p.append.slot_mapping, p.append.total_new);
      host->fetch(encoder, p.rotary.seqlens, p.batch);
      stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
    }
  });
  check_values(p);
  check_new_places(p);
}

}  // namespace paged_attn
