// Where the keys of a request lie, in any of the three forms of a cache.
#pragma once

#include "items.cuh"

namespace paged_attn {

struct KeyPlaces {
  static constexpr uint32_t kNowhere = ~0u;  // in place of an offset

  int key_begin, key_end;  // keys that some row of the item sees
  union {
    const int32_t* pages;  // of the request, with a block table
    struct {
      int page, slot;
    } base;  // of its first key, without: packed keys are one page
  };

  PD_MEMBER void start(const Problem& p, const Item& item) {
    const Cache& cache = p.cache;
    key_begin = item.key_begin;
    key_end = item.key_end;
    if (cache.block_table) {
      pages = cache.block_table + table_row(p, item.b) * cache.block_table_stride;
    } else {
      base.page = cache.cu_seqlens_k ? 0 : table_row(p, item.b);
      base.slot = cache.cu_seqlens_k ? cache.cu_seqlens_k[item.b] : 0;
    }
  }

  PD_MEMBER bool sees(int key) const { return key >= key_begin && key < key_end; }
  // Of a run of keys
  PD_MEMBER bool sees_some(int key, int keys) const { return key + keys > key_begin && key < key_end; }
  PD_MEMBER bool sees_all(int key, int keys) const { return key >= key_begin && key + keys <= key_end; }

  // The page of a key as the block table has it: only page_exists() knows whether there is one. -1 where the table or
  // the cache ends before.
  PD_MEMBER int page_of(const Problem& p, const CommonPlan& plan, int key) const {
    if (p.cache.block_table) {
      const int index = plan.page_size.divide(key);
      return index < plan.max_pages ? pages[index] : -1;
    }
    const int slot = base.slot + key;
    return slot >= 0 && slot < p.cache.page_size ? base.page : -1;
  }

  PD_MEMBER int slot_of(const Problem& p, const CommonPlan& plan, int key) const {
    if (!p.cache.block_table) return base.slot + key;
    return key - plan.page_size.divide(key) * static_cast<int>(plan.page_size.divisor);
  }

  // Page and slot of a key that is seen. For other keys the page is -1.
  PD_MEMBER int2 look_up(const Problem& p, const CommonPlan& plan, int key) const {
    return make_int2(sees(key) ? page_of(p, plan, key) : -1, slot_of(p, plan, key));
  }

  // Page and slot of the first key of a box; page -1 where there is none, or none of its keys is seen.
  PD_MEMBER int2 find_box(const Problem& p, const CommonPlan& plan, int key, int box_rows) const {
    const int page = sees_some(key, box_rows) ? page_of(p, plan, key) : -1;
    return make_int2(page_exists(p, page) ? page : -1, slot_of(p, plan, key));
  }
};

}  // namespace paged_attn
