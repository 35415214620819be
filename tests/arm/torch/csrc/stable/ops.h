// What the CPU backend takes from torch, for a program without it: plans are made for the threads of the caller, and
// one thread does the work of all.
#pragma once

#include <cstdint>

namespace torch::stable {

uint32_t get_num_threads();

template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t, const Work& work) {
  if (begin < end) work(begin, end);
}

}  // namespace torch::stable
