// torch's parallel_for on threads of its own, in front of the one in torch's library: ThreadSanitizer follows pthreads,
// but not those of OpenMP, whose library is not instrumented, and would take each of its barriers for a race.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

constexpr int64_t kMostThreads = 8;

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*work)(int64_t, int64_t, void*),
                                      void* context) {
  const int64_t threads = std::clamp<int64_t>((end - begin) / std::max<int64_t>(grain, 1), 1, kMostThreads);
  const int64_t step = (end - begin + threads - 1) / threads;
  std::vector<std::thread> others;
  for (int64_t at = begin + step; at < end; at += step)
    others.emplace_back(work, at, std::min(end, at + step), context);
  if (begin < end) work(begin, std::min(end, begin + step), context);
  for (std::thread& other : others) other.join();
  return 0;
}
