#include "runtime.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

// The header above declares them only where USE_CUDA is defined, which not every build does.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void** ret_ptr);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* ptr);
}

namespace paged_attn {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

const DeviceLimits& limits_of(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceLimits> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  DeviceLimits limits;
  limits.processors = attribute(cudaDevAttrMultiProcessorCount, device);
  limits.shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  limits.shared_per_processor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  limits.capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  // Two transfers in a cycle, of bits; the clock is in kHz. Not every device says.
  int clock = 0, width = 0;
  cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, device);
  cudaDeviceGetAttribute(&width, cudaDevAttrGlobalMemoryBusWidth, device);
  cudaGetLastError();
  const int64_t rate = int64_t{clock} * width * 2 / 8 / 1'000'000;
  if (rate > 0) limits.read_rate = static_cast<int>(rate);
  return known[device] = limits;
}

// What is known of a kernel on a device.
struct Kernel {
  bool waits;        // has the instruction that waits for its predecessor, so that it may be launched early
  int shared_bytes;  // that a launch may ask for
};

// Whether the kernel waits. Asks the driver for the first launch, and when a launch needs more shared memory than any
// before.
bool prepare_kernel(const void* kernel, int shared_bytes, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Kernel> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(kernel, device);
  auto found = known.find(key);
  if (found == known.end()) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    // Code for older devices, which a newer one may compile for itself, lacks the instruction.
    found = known.emplace(key, Kernel{attributes.ptxVersion >= 90, attributes.maxDynamicSharedSizeBytes}).first;
  }
  Kernel& k = found->second;
  if (shared_bytes > k.shared_bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
    k.shared_bytes = shared_bytes;
  }
  return k.waits;
}

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

Context current_context() {
  Context context;
  check_cuda(cudaGetDevice(&context.device), "cudaGetDevice");
  context.limits = limits_of(context.device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(context.device, &stream));
  context.stream = static_cast<cudaStream_t>(stream);
  return context;
}

Launches::~Launches() {
  while (workspaces_ > 0) aoti_torch_cuda_caching_allocator_raw_delete(memory_[--workspaces_]);
}

void* Launches::workspace(int64_t bytes) {
  if (bytes == 0) return nullptr;
  void*& memory = memory_.at(workspaces_);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &memory));
  ++workspaces_;
  return memory;
}

Launches::Launch& Launches::prepare(const void* kernel, const Grid& grid) {
  Launch& launch = launches_.at(kernels_);
  launch.kernel = kernel;
  launch.grid = grid;
  launch.waits = prepare_kernel(kernel, grid.shared_bytes, context_.device);
  ++kernels_;
  return launch;
}

void Launches::run() {
  for (int i = 0; i < kernels_; ++i) {
    Launch& launch = launches_[i];
    const Grid& grid = launch.grid;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks), grid.cluster);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = context_.stream;
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (launch.waits) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 1) {
      cudaLaunchAttribute& clusters = attributes[config.numAttrs++];
      clusters.id = cudaLaunchAttributeClusterDimension;
      clusters.val.clusterDim.x = clusters.val.clusterDim.z = 1;
      clusters.val.clusterDim.y = grid.cluster;
    }
    check_cuda(cudaLaunchKernelExC(&config, launch.kernel, launch.arguments), "launch");
  }
}

}  // namespace paged_attn
