#include "check.h"

#include <memory>
#include <vector>

#include "runtime.h"
#include "spec/check_tables.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

// Host copies of device arrays, for as long as this lives.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  template <typename T>
  void fetch(const T*& array, int64_t count) {
    copies_.emplace_back(new char[(count > 0 ? count : 1) * sizeof(T)]);
    cudaError_t error =
        cudaMemcpyAsync(copies_.back().get(), array, pd_max(count, 0) * sizeof(T), cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    check_cuda(error, "PAGED_ATTN_CHECK");
    array = reinterpret_cast<const T*>(copies_.back().get());
  }

 private:
  cudaStream_t stream_;
  std::vector<std::unique_ptr<char[]>> copies_;
};

}  // namespace

void check_values_on_device(const Problem& problem, cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // or torch's next check would raise it
    return;
  }
  if (status != cudaStreamCaptureStatusNone) return;
  Problem p = problem;
  HostCopies host(stream);
  fetch_tables(p, [&](auto& table, int64_t count) { host.fetch(table, count); });
  check_values(p);
  check_new_places(p);
}

}  // namespace paged_attn
