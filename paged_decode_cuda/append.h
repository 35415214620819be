// Writes new keys and values into the cache, and rotates them and the queries.
#pragma once

#include "runtime.h"
#include "spec/problem.h"

namespace paged_attn {

// The kernel that writes the new tokens. `rotated_q` is where rotated queries go, [total_q, q_heads, head_dim];
// without `rotates` it is not used.
void add_append(const Problem& p, bool rotates, void* rotated_q, Launches& launches);

}  // namespace paged_attn
