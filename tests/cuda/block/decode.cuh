// The instructions of the route decode on the host that no other file here has, as the PTX manual describes them:
// copies of 16 bytes in groups, and the transposition of a matrix.
#pragma once

#include "decode/shape.cuh"
#include "partials.cuh"

namespace paged_attn {

// From where the kernel may copy. decode.cpp sets them.
inline Bounds keys_in_memory, values_in_memory;
inline int own_shared_bytes;  // that the launch asked for

// ---- Shared memory ----

PD_DEVICE uint64_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<uint64_t>(static_cast<const uint8_t*>(pointer) - own_block().arena.get());
}

// ---- Copies ----

struct Copy {
  uint8_t* to;
  const void* from;
  bool valid;
  void run() const { valid ? memcpy(to, from, 16) : memset(to, 0, 16); }
};
struct Copies {
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
inline Copies own_copies[kMostThreads];  // by thread

PD_DEVICE uint64_t read_once_policy() { return 0; }
// It happens when it is asked for or when it is awaited, at random.
PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid, uint64_t) {
  if (shared % 16 != 0) fail("a copy to a place that is not aligned");
  if (valid && !keys_in_memory.hold(global, 16) && !values_in_memory.hold(global, 16))
    fail("a copy from outside of the cache");
  shared_at(shared + 15);
  const Copy copy = {shared_at(shared), global, valid};
  if (chance()) return copy.run();
  own_copies[threadIdx.x].open.push_back(copy);
}
PD_DEVICE void copy_commit() {
  Copies& own = own_copies[threadIdx.x];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
// Until no more than kPending groups are on their way.
template <int kPending>
PD_DEVICE void copy_wait() {
  auto& groups = own_copies[threadIdx.x].groups;
  while (groups.size() > kPending) {
    for (const Copy& copy : groups.front()) copy.run();
    groups.erase(groups.begin());
  }
}

// When all threads of a block have ended.
inline void end_block() {
  for (Copies& own : own_copies) {
    for (const auto& group : own.groups) {
      if (!group.empty()) fail("a copy that nobody has awaited");
    }
    own.groups.clear();
    if (!own.open.empty()) fail("a copy that is in no group");
  }
  const uint8_t* const arena = machine.blocks.front().arena.get();
  if (std::any_of(arena + kRawAt + 128 + own_shared_bytes, arena + kArena, [](uint8_t x) { return x != 0xff; }))
    fail("a block has written behind its shared memory");
}

// ---- Matrices ----

// A lane (g, t) has values 2t and 2t + 1 of row g, and gets rows 2t and 2t + 1 of column g.
PD_DEVICE uint32_t transpose_8x8(uint32_t x) {
  const int g = lane() / 4, t = lane() % 4;
  const int64_t* const all = exchange(x);
  const auto value = [&](int row) { return static_cast<uint32_t>(all[row * 4 + g / 2]) >> g % 2 * 16 & 0xffff; };
  return value(2 * t) | value(2 * t + 1) << 16;
}

// Selectors of __byte_perm
constexpr unsigned kLowBytesInTurns = 0x5140, kHighBytesInTurns = 0x7362;

}  // namespace paged_attn
