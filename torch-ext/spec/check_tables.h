// Checks of what only the tensors' values tell: lengths and page numbers. On the CPU they cost next
// to nothing, so they always run, and before anything is written.
#pragma once

#include <stdexcept>
#include <string>

#include "problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

[[noreturn]] inline void bad_value(const char* name, int64_t index, int64_t value, const std::string& expected) {
  throw std::runtime_error(std::string(name) + "[" + std::to_string(index) + "]: expected " + expected + ", got " +
                           std::to_string(value));
}

// The page of entry `entry` of the block_table row of request b.
inline void check_page(const Cache& c, int64_t b, int64_t entry, int64_t page) {
  if (!c.block_table || (page >= 0 && page < c.num_pages)) return;
  throw std::runtime_error("block_table: expected page numbers in [0, num_pages = " + std::to_string(c.num_pages) +
                           "), got " + std::to_string(page) + " for batch entry " + std::to_string(b) + ", page " +
                           std::to_string(entry));
}

// Throws when a length, a row number or a page that will be read is out of range.
void check_values(const Problem& problem);

// Throws when a new token has no place in the cache.
void check_new_places(const Problem& problem);

// Whether PAGED_ATTN_CHECK asks for these checks on a device, where they cost a wait; read once.
bool checks_enabled();

// Calls fetch(table, elements) for every table that the checks read: a device copies it and lets it point to the copy.
template <typename Fetch>
void fetch_tables(Problem& p, Fetch fetch) {
  auto fetch_given = [&](auto& table, int64_t elements) {
    if (table) fetch(table.data, elements);
  };
  Cache& c = p.cache;
  fetch_given(p.cu_seqlens_q, p.batch + 1);
  fetch_given(p.cache_seqlens, p.batch);
  fetch_given(p.cache_leftpad, p.batch);
  fetch_given(c.block_table,
              c.table_rows > 0 && c.max_pages > 0 ? (c.table_rows - 1) * c.block_table_stride + c.max_pages : 0);
  fetch_given(c.cu_seqlens_k, p.batch + 1);
  fetch_given(c.cache_batch_idx, p.batch);
  fetch_given(p.append.cu_seqlens_k_new, p.batch + 1);
  fetch_given(p.append.slot_mapping, p.append.total_new);
  fetch_given(p.rotary.seqlens, p.batch);
}

}  // namespace paged_attn
