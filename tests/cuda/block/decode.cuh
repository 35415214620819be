// The instructions of the route decode on the host that ptx.cuh has not, as the PTX manual describes them:
// copies of 16 bytes in groups, products of tf32, the transposition of a matrix, and words of 16 bytes that blocks
// leave for each other.
#pragma once

#define PD_MOST_LOOKS 50  // blocks run one after the other: what does not come soon never comes

#include "decode/shape.cuh"

namespace paged_attn {

// From where the kernel may copy, and where its partials lie. decode.cpp sets them.
struct Bounds {
  const uint8_t *begin, *end;
  bool hold(const void* address, int64_t bytes) const {
    const auto* const first = static_cast<const uint8_t*>(address);
    return first >= begin && first + bytes <= end;
  }
};
inline Bounds keys_in_memory, values_in_memory, words_in_memory;
inline int own_shared_bytes;  // that the launch asked for

// ---- Shared memory ----

// As aligned as the kernel asks for.
PD_DEVICE char* own_queues() { return reinterpret_cast<char*>(block_raw() + 128 - kSkew); }
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

// ---- Words of 16 bytes ----

// Nobody sees a word before its time: so many looks find what was there before.
struct LateWord {
  TaggedWord before;
  int looks;
};
inline std::unordered_map<const TaggedWord*, LateWord> late_words;

PD_DEVICE void store_whole(TaggedWord* word, uint64_t payload, uint64_t number) {
  if (!words_in_memory.hold(word, sizeof(TaggedWord))) fail("a word outside of the workspace");
  if (number != 0 && chance()) late_words[word] = {*word, static_cast<int>(machine.dice() % 8)};
  *word = {payload, number};
}
PD_DEVICE void load_whole(const TaggedWord* word, unsigned long long& payload, unsigned long long& number) {
  if (!words_in_memory.hold(word, sizeof(TaggedWord))) fail("a word outside of the workspace");
  const auto late = late_words.find(word);
  const bool is_late = late != late_words.end() && late->second.looks-- > 0;
  const TaggedWord found = is_late ? late->second.before : *word;
  payload = found.payload;
  number = found.tag;
}

// ---- Matrices ----

// A lane (g, t) has values 2t and 2t + 1 of row g, and gets rows 2t and 2t + 1 of column g.
PD_DEVICE uint32_t transpose_8x8(uint32_t x) {
  const int g = lane() / 4, t = lane() % 4;
  const int64_t* const all = exchange(x);
  const auto value = [&](int row) { return static_cast<uint32_t>(all[row * 4 + g / 2]) >> g % 2 * 16 & 0xffff; };
  return value(2 * t) | value(2 * t + 1) << 16;
}

// d += a * b on a 16x8 tile with 8 terms. A lane (g, t) has of a term t of rows g and g + 8, then term t + 4 of both;
// of b terms t and t + 4 of column g; of d columns 2t and 2t + 1 of both rows. The low 13 bits are not read.
PD_DEVICE void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int g = lane() / 4, t = lane() % 4;
  const Operands* const all = exchange_operands({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto read = [](uint32_t word) { return double(__uint_as_float(word & 0xffffe000u)); };
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int term = 0; term < 8; ++term) {
      const int from = term % 4, high = term / 4;
      sum += read(all[g * 4 + from].a[high * 2 + i / 2]) * read(all[(2 * t + i % 2) * 4 + from].b[high]);
    }
    d[i] = static_cast<float>(sum);
  }
}

// Selectors of __byte_perm
constexpr unsigned kLowHalves = 0x5410, kHighHalves = 0x7632;
constexpr unsigned kLowBytesInTurns = 0x5140, kHighBytesInTurns = 0x7362;

}  // namespace paged_attn
