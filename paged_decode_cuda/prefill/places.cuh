// Where the keys of a request lie, and copies of 16 bytes from there into shared memory.
#pragma once

#include "../items.cuh"
#include "products.cuh"

namespace paged_attn {

// The copies of this warp are there, also for the matrix unit. All lanes arrive, or one for all.
template <bool kAll>
PD_DEVICE void arrive_after_copies(uint32_t barrier) {
  await_pieces();
  fence_async_proxy();
  if (!kAll) __syncwarp();
  if (kAll || threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// Two 8-bit values in the low or high half of a word, as a pair of bf16 or fp16, which hold every one exactly.
template <bool kBf16, typename Kv, bool kHigh>
PD_DEVICE uint32_t widen_pair(uint32_t word) {
  const uint32_t pair = fp8_pair_to_fp16<Kv, kHigh>(word);
  return kBf16 ? fp16_pair_to_bf16(pair) : pair;
}

constexpr int kCopyLanes = 8;  // of 128 bytes of a row
constexpr int kCopyRows = kWarp / kCopyLanes;

// Where the keys of a request lie.
struct KeyPlaces {
  static constexpr uint32_t kNowhere = ~0u;

  const int32_t* pages;  // of the request; nullptr: all keys in one page
  int base_page, base_slot;
  int key_begin, key_end;  // keys that are seen

  PD_MEMBER void start(const Problem& p, const Item& item) {
    const Cache& cache = p.cache;
    const int b = item.b;
    key_begin = item.key_begin;
    key_end = item.key_end;
    pages = nullptr;
    base_page = base_slot = 0;
    if (cache.block_table) {
      pages = cache.block_table + table_row(p, b) * cache.block_table_stride;
    } else if (cache.cu_seqlens_k) {
      base_slot = cache.cu_seqlens_k[b];
    } else {
      base_page = table_row(p, b);
    }
  }

  // The page of a key as the table has it; -1 where nobody sees the key or the table ends before.
  PD_MEMBER int page_of(const Problem& p, const Plan& plan, int key) const {
    if (key < key_begin || key >= key_end) return -1;
    if (!pages) return base_slot + key >= 0 && base_slot + key < p.cache.page_size ? base_page : -1;
    const int index = plan.page_size.divide(key);
    return index < plan.max_pages ? pages[index] : -1;
  }

  PD_MEMBER int slot_of(const Plan& plan, int key) const {
    if (!pages) return base_slot + key;
    return key - static_cast<int>(plan.page_size.divide(key)) * static_cast<int>(plan.page_size.divisor);
  }

  // Page and slot of a key; page -1 where there is none.
  PD_MEMBER int2 find(const Problem& p, const Plan& plan, int key) const {
    int page = -1, slot;
    if (pages) {
      const int index = plan.page_size.divide(key);
      slot = key - index * static_cast<int>(plan.page_size.divisor);
      if (index < plan.max_pages) page = pages[index];
    } else {
      slot = base_slot + key;
      if (slot >= 0 && slot < p.cache.page_size) page = base_page;
    }
    return make_int2(page_exists(p, page) ? page : -1, slot);
  }

  // The same of a box that begins at `key`; page -1 where none of its keys is seen.
  PD_MEMBER int2 find_box(const Problem& p, const Plan& plan, int key, int box_rows) const {
    const bool seen = key < key_end && key + box_rows > key_begin;
    return seen ? find(p, plan, key) : make_int2(-1, 0);
  }
};

}  // namespace paged_attn
