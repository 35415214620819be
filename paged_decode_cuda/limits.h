// What a plan needs to know of a GPU. A value, so that plans can be made for GPUs that are not here.
#pragma once

namespace paged_attn {

struct DeviceLimits {
  int processors;            // multiprocessors
  int shared_per_block;      // bytes that one block may have
  int shared_per_processor;  // bytes that all blocks on a multiprocessor share, with what each block costs besides
  int capability;            // 90 is compute capability 9.0
  int read_rate = 3352;      // GB/s of memory, by its clock and width; of an H100 unless said otherwise
};

// The only capability whose matrix unit has wgmma.
constexpr int kHopper = 90;
inline const char* hopper_why_not(const DeviceLimits& limits) {
  return limits.capability == kHopper ? "" : "a device of another compute capability than 9.0";
}

constexpr int kSharedCostOfBlock = 1024;  // bytes that the system takes for every block

// Blocks that a multiprocessor has shared memory for.
inline int blocks_beside(int shared_bytes, const DeviceLimits& limits) {
  return limits.shared_per_processor / (shared_bytes + kSharedCostOfBlock);
}

}  // namespace paged_attn
