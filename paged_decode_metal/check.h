// PAGED_ATTN_CHECK=1: everything that the CPU backend checks before it starts, checked here too.
#pragma once

#include "spec/problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// Throws when a length, a row, a slot or a page number is out of range. Copies the tables to the host and waits for it.
void check_values_on_device(const Problem& problem);

}  // namespace paged_attn
