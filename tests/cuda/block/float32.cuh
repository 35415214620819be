// The instructions of the route float32 on the host that no other file here has, as the PTX manual describes them:
// products of tf32, votes of a block, words of 16 bytes that blocks leave for each other. Its copies are those of
// products.cuh, within bounds.
#pragma once

#define PD_MOST_LOOKS 50  // blocks run one after the other: what is not there soon never comes

#include "prefill/products.cuh"

extern "C" void __assertfail(const char* message, const char*, unsigned, const char*, size_t) {
  block_on_host::fail(message);
}

namespace paged_attn {

// What a kernel may read or write in memory besides the tables; float32.cpp sets it.
struct Bounds {
  const uint8_t *begin, *end;
};
inline std::vector<Bounds> copied_from;
inline Bounds words_in_memory;
inline bool holds(const Bounds& bounds, const void* place, int64_t bytes) {
  const auto* const first = static_cast<const uint8_t*>(place);
  return first >= bounds.begin && first + bytes <= bounds.end;
}

// ---- Shared memory ----

// As aligned as the kernel asks for.
PD_DEVICE char* own_shared() { return reinterpret_cast<char*>(block_raw() + 128 - kSkew); }
PD_DEVICE uint64_t __cvta_generic_to_shared(const void* pointer) { return shared_address(pointer); }

PD_DEVICE void copy_async(uint32_t shared, const void* global, bool valid) {
  if (shared % 16 != 0) fail("a copy to a place that is not aligned");
  const auto held = [&](const Bounds& bounds) { return holds(bounds, global, 16); };
  if (valid && std::none_of(copied_from.begin(), copied_from.end(), held)) fail("a copy from outside of the tensors");
  copy_piece(shared, global, valid);
}
PD_DEVICE void copy_commit() { commit_pieces(); }
template <int kPending>
PD_DEVICE void copy_wait() {
  await_batches<kPending>();
}

// How many threads of the block say yes. The first one that votes clears what was counted two votes ago.
inline int votes[2];
PD_DEVICE int count_votes(bool yes) {
  const Meeting& all = own_block().all;
  int& count = votes[all.generation % 2];
  count = (all.arrived == 0 ? 0 : count) + yes;
  __syncthreads();
  return count;
}
PD_DEVICE bool __syncthreads_and(bool yes) { return count_votes(yes) == blockDim.x; }
PD_DEVICE bool __syncthreads_or(bool yes) { return count_votes(yes) > 0; }

// ---- Words of 16 bytes ----

// A word may be late: so many looks find nothing.
inline std::unordered_map<const TaggedWord*, int> late_words;

PD_DEVICE void store_whole(TaggedWord* word, uint64_t payload, uint64_t number) {
  if (!holds(words_in_memory, word, sizeof(TaggedWord))) fail("a word outside of the workspace");
  late_words[word] = number == 0 || chance() ? 0 : static_cast<int>(machine.dice() % 8);
  *word = {payload, number};
}
PD_DEVICE void load_whole(const TaggedWord* word, unsigned long long& payload, unsigned long long& number) {
  if (!holds(words_in_memory, word, sizeof(TaggedWord))) fail("a word outside of the workspace");
  const bool late = late_words[word]-- > 0;
  payload = late ? 0 : word->payload;
  number = late ? 0 : word->tag;
}

// What a lane exchanges with others of its half of a warp, whose mask it names.
struct Half {
  Meeting meeting;
  uint32_t left[2][16];
};
inline Half halves[kMostThreads / 16];
PD_DEVICE const uint32_t* exchange_in_half(unsigned mask, uint32_t word) {
  if (mask != 0xffffu << lane() / 16 * 16) fail("a mask of other lanes than one half of the warp");
  Half& half = halves[threadIdx.x / 16];
  uint32_t* const left = half.left[half.meeting.generation % 2];
  left[threadIdx.x % 16] = word;
  meet(half.meeting, 16, "half of its warp");
  return left;
}
PD_DEVICE bool any_of_half(unsigned mask, bool value) {
  const uint32_t* const all = exchange_in_half(mask, value);
  return std::any_of(all, all + 16, [](uint32_t x) { return x != 0; });
}
PD_DEVICE float value_of_half(unsigned mask, float value, int from, int) {
  return __uint_as_float(exchange_in_half(mask, __float_as_uint(value))[from % 16]);
}

// ---- Products ----

struct Tf32Operands {
  uint32_t a[4], b[2];
  // The low bits are not read.
  static double read(uint32_t word) { return __uint_as_float(word & 0xffffe000u); }
};
inline Tf32Operands operands[2][kMostThreads];

// d += a * b on a 16x8 tile with 8 terms. A lane (g, t) has of a term t of rows g and g + 8, then term t + 4 of both;
// of b terms t and t + 4 of column g; of d columns 2t and 2t + 1 of row g, then of row g + 8.
PD_DEVICE void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int g = lane() / 4, t = lane() % 4, first = threadIdx.x / kLanes * kLanes;
  Meeting& meeting = own_block().warps[threadIdx.x / kLanes].meeting;
  Tf32Operands* const all = operands[meeting.generation % 2] + first;
  all[lane()] = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  meet(meeting, kLanes, "its warp");
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int term = 0; term < 8; ++term) {
      const uint32_t left = all[g * 4 + term % 4].a[term / 4 * 2 + i / 2];
      const uint32_t right = all[(2 * t + i % 2) * 4 + term % 4].b[term / 4];
      sum += Tf32Operands::read(left) * Tf32Operands::read(right);
    }
    d[i] = static_cast<float>(sum);
  }
}

// For tf32.cuh to compile.
constexpr unsigned kLowHalves = 0x5410, kHighHalves = 0x7632;
PD_DEVICE uint32_t transpose_8x8(uint32_t) { fail("a matrix is transposed in no kernel of this route"); }

}  // namespace paged_attn
