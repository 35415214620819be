// An aligned_alloc that finds no memory of the kind that the CPU's threads work in. test_append.py loads it before
// everything else (LD_PRELOAD).
#include <dlfcn.h>

#include <cstddef>
#include <thread>

namespace {

enum Refused { kNobody, kAll, kOthers };
int refused = kNobody;
std::thread::id asked_by;

}  // namespace

// From now on: nobody is refused, all threads are, or all but this one.
extern "C" void refuse_scratch(int who) {
  asked_by = std::this_thread::get_id();
  refused = who;
}

extern "C" void* aligned_alloc(size_t alignment, size_t bytes) {
  static const auto real = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(RTLD_NEXT, "aligned_alloc"));
  const bool scratch = alignment == 64 && bytes % 4096 == 0;
  if (scratch && (refused == kAll || (refused == kOthers && std::this_thread::get_id() != asked_by))) return nullptr;
  return real(alignment, bytes);
}
