// What the routes decode and float32 have in common on the host, as the PTX manual describes it: words of 16 bytes that
// blocks leave for each other, products of tf32, and the copies of hopper.cuh within bounds.
#pragma once

#define PD_MOST_LOOKS 50  // blocks run one after the other: what does not come soon never comes

#include "prefill/../hopper.cuh"  // not the file beside this one, of which it is a copy
#include "rows.cuh"

extern "C" void __assertfail(const char* message, const char*, unsigned, const char*, size_t) {
  block_on_host::fail(message);
}

namespace paged_attn {

// Memory that a kernel may use.
struct Bounds {
  const uint8_t *begin, *end;
  bool hold(const void* address, int64_t bytes) const {
    const auto* const first = static_cast<const uint8_t*>(address);
    return first >= begin && first + bytes <= end;
  }
};
inline Bounds bounds_of(const void* begin, int64_t bytes) {
  const auto* const first = static_cast<const uint8_t*>(begin);
  return {first, first + bytes};
}
inline Bounds bounds_of_keys(const Problem& p) {
  const Cache& c = p.cache;
  const int64_t last =
      (c.num_pages - 1) * c.k_stride_page + (c.page_size - 1) * c.k_stride_slot + (p.kv_heads - 1) * c.k_stride_head;
  return bounds_of(c.k, (last + p.head_dim) * dtype_bytes(c.dtype));
}
// Of packed tokens, or of as many for every request.
inline Bounds bounds_of_queries(const Problem& p) {
  return bounds_of(p.q, p.total_q * p.q_heads * p.head_dim * dtype_bytes(p.q_dtype));
}
inline Bounds bounds_of_values(const Problem& p) {
  const Cache& c = p.cache;
  const int64_t last =
      (c.num_pages - 1) * c.v_stride_page + (c.page_size - 1) * c.v_stride_slot + (p.kv_heads - 1) * c.v_stride_head;
  return bounds_of(c.v, (last + p.head_dim_v) * dtype_bytes(c.dtype));
}

// ---- Shared memory and copies into it ----

inline int own_shared_begin, own_shared_bytes;  // that the launch asked for
inline std::vector<Bounds> copied_from;         // from where the kernel may copy

// Where it begins, as aligned as the kernel needs. It ends with the arena, as far as that allows.
template <int kAlignment = 128>
PD_DEVICE char* own_shared() {
  own_shared_begin = (kArena - own_shared_bytes) / kAlignment * kAlignment;
  return reinterpret_cast<char*>(shared_at(own_shared_begin));
}
PD_DEVICE uint64_t __cvta_generic_to_shared(const void* pointer) { return shared_address(pointer); }

PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid, uint64_t = 0) {
  if (shared % 16 != 0) fail("a copy to a place that is not aligned");
  const auto held = [&](const Bounds& bounds) { return bounds.hold(global, 16); };
  if (valid && std::none_of(copied_from.begin(), copied_from.end(), held)) fail("a copy from outside of the tensors");
  shared_at(shared + 15);
  copy_piece(shared, global, valid);
}
PD_DEVICE void copy_commit() { commit_pieces(); }
template <int kPending>
PD_DEVICE void copy_wait() {
  await_batches<kPending>();
}

// When all threads of a block have ended.
inline void end_block() {
  for (const auto& [thread, pieces] : own_pieces) {
    for (const Actions& batch : pieces.batches) {
      if (!batch.empty()) fail("a copy that nobody has awaited");
    }
    if (!pieces.open.empty()) fail("a copy that is in no group");
  }
  own_pieces.clear();
  for (const auto& [thread, products] : own_products) {
    if (!products.groups.empty() || !products.open.empty()) fail("a product that nobody has awaited");
  }
  const uint8_t* const arena = machine.blocks.front().arena.get();
  if (std::any_of(arena + own_shared_begin + own_shared_bytes, arena + kArena,
                  [](uint8_t x) { return x != machine.fill; }))
    fail("a block has written behind its shared memory");
}

// ---- Words of 16 bytes ----

inline Bounds words_in_memory;

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

// Whether one is left for the replay of a graph, which has the same number and the same memory.
inline bool words_are_left() {
  const auto* const first = reinterpret_cast<const TaggedWord*>(words_in_memory.begin);
  const auto* const last = first + (words_in_memory.end - words_in_memory.begin) / sizeof(TaggedWord);
  return std::any_of(first, last, [](const TaggedWord& word) { return word.tag == launch_number(); });
}

// Runs launches that may copy from there. "" or what went wrong, also in what they leave.
template <typename Launches>
const char* run_within(const std::vector<Bounds>& from, Launches& launches, int64_t workspace_bytes, int shared_bytes) {
  copied_from = from;
  words_in_memory = bounds_of(launches.workspace(), workspace_bytes);
  own_shared_bytes = shared_bytes;
  late_words.clear();
  own_pieces.clear();
  own_products.clear();
  machine.when_block_ends = end_block;
  const char* const failure = launches.run();
  machine.when_block_ends = nullptr;
  return *failure == '\0' && words_are_left() ? "a word of a partial has not been cleared" : failure;
}

// ---- Products ----

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
