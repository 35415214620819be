#include "check.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ranges.h"
#include "values.h"

namespace paged_attn {
namespace {

// Host copies of device arrays, for as long as this lives.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  template <typename T>
  void fetch(const T*& array, int64_t count) {
    if (!array) return;
    copies_.emplace_back(new char[(count > 0 ? count : 1) * sizeof(T)]);
    cudaError_t error =
        cudaMemcpyAsync(copies_.back().get(), array, pd_max(count, 0) * sizeof(T), cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    if (error != cudaSuccess) throw std::runtime_error(std::string("PAGED_ATTN_CHECK: ") + cudaGetErrorString(error));
    array = reinterpret_cast<const T*>(copies_.back().get());
  }

 private:
  cudaStream_t stream_;
  std::vector<std::unique_ptr<char[]>> copies_;
};

}  // namespace

bool checks_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("PAGED_ATTN_CHECK");
    return value && strcmp(value, "") != 0 && strcmp(value, "0") != 0;
  }();
  return enabled;
}

void check_values_on_device(const Problem& problem, cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return;
  Problem p = problem;
  HostCopies host(stream);
  host.fetch(p.cu_seqlens_q, p.batch + 1);
  host.fetch(p.cache_seqlens, p.batch);
  host.fetch(p.cache_leftpad, p.batch);
  host.fetch(p.cache.block_table,
             p.cache.table_rows > 0 ? (p.cache.table_rows - 1) * p.cache.block_table_stride + p.cache.max_pages : 0);
  host.fetch(p.cache.cu_seqlens_k, p.batch + 1);
  host.fetch(p.cache.cache_batch_idx, p.batch);
  host.fetch(p.append.cu_seqlens_k_new, p.batch + 1);
  host.fetch(p.append.slot_mapping, p.append.total_new);
  host.fetch(p.rotary.seqlens, p.batch);
  check_values(p);
  check_new_places(p);
}

}  // namespace paged_attn
