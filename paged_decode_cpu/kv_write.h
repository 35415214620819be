// Writes new keys and values into the cache: rotation, conversion to the cache's type, placement.
#pragma once

#include <vector>

#include "problem.h"

namespace paged_attn {

// One new token and where it goes.
struct TokenWrite {
  int64_t batch;
  int64_t source_k, source_v;  // element offsets of the token in append.k and append.v
  int64_t page, slot;
  int64_t rotary_position;
};

// Places every new token. Throws, naming batch entry and value, when one would fall outside the cache.
std::vector<TokenWrite> place_tokens(const Problem& problem);

void write_tokens(const Problem& problem, const std::vector<TokenWrite>& writes);

}  // namespace paged_attn
