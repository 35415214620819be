// Writes new keys and values into the cache, and rotates them and the queries.
#pragma once

#include "runtime.h"
#include "spec/problem.h"

namespace paged_attn {

// Writes the new tokens. `rotated_q` is where rotated queries go, [total_q, q_heads, head_dim]; without `rotates` it is
// not used.
void append_tokens(const Problem& p, bool rotates, void* rotated_q, const Context& context);

}  // namespace paged_attn
