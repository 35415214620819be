// Writing new keys and values: where each token goes (place_tokens), then the writes, on all threads (write_tokens).
#pragma once

#include <vector>

#include "kernel.h"

namespace paged_attn {

// The place of every new token that is written. Throws when one would fall outside of the cache.
std::vector<TokenWrite> place_tokens(const Problem& problem);

void write_tokens(const Problem& problem, const Kernel& kernel, const std::vector<TokenWrite>& writes);

}  // namespace paged_attn
