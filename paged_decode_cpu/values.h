// Checks of what only the tensors' values tell: lengths and page numbers. On the CPU they cost next
// to nothing, so they always run, and before anything is written.
#pragma once

#include <stdexcept>
#include <string>

#include "problem.h"

namespace paged_attn {

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

// Throws when a new token has no place in the cache. (The CPU finds it when it places the tokens.)
void check_new_places(const Problem& problem);

}  // namespace paged_attn
