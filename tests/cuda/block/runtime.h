// What host code needs of the CUDA runtime, with kernels that run on the host.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lanes.h"
#include "limits.h"

namespace paged_attn {

struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
  int cluster = 1;
};

// "" or what `function` did that cannot be done here.
template <typename Function>
const char* failure_of(Function function) {
  static std::string failure;
  try {
    function();
    return "";
  } catch (const std::runtime_error& error) {
    failure = error.what();
    return failure.c_str();
  }
}

class Launches {
 public:
  explicit Launches(const DeviceLimits& limits) : limits_(limits) {}

  const DeviceLimits& limits() const { return limits_; }

  // Nothing of it is set: large numbers, of whole ones and in float32.
  void* workspace(int64_t bytes) {
    const auto& memory = memory_.emplace_back(new uint8_t[bytes]);
    return memset(memory.get(), 0x7f, bytes);
  }

  template <typename... Arguments>
  void add(const void* kernel, const Grid& grid, const Arguments&... arguments) {
    const auto function = reinterpret_cast<void (*)(Arguments...)>(const_cast<void*>(kernel));
    kernels_.push_back(
        [=] { run_grid(static_cast<int>(grid.blocks), grid.cluster, grid.threads, [=] { function(arguments...); }); });
  }

  // The first one.
  const void* workspace() const { return memory_.front().get(); }

  // "" or what a kernel did that a GPU would not do. An address that is no memory at all ends the call, too.
  const char* run() {
    static sigjmp_buf before;
    struct sigaction stray = {}, usual;
    stray.sa_handler = [](int) { siglongjmp(before, 1); };
    sigaction(SIGSEGV, &stray, &usual);
    sigsetjmp(before, 1);
    const char* const failure = failure_of([&] {
      if (std::exchange(machine.current, nullptr)) fail("an address outside of all memory");
      for (const auto& kernel : kernels_) kernel();
    });
    sigaction(SIGSEGV, &usual, nullptr);
    return failure;
  }

 private:
  DeviceLimits limits_;
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
  std::vector<std::function<void()>> kernels_;
};

}  // namespace paged_attn
