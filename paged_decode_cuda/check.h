// PAGED_ATTN_CHECK=1: everything that the CPU backend checks before it starts, checked here too.
#pragma once

#include <cuda_runtime.h>

#include "spec/problem.h"

namespace paged_attn {

// Throws when a length, a row, a slot or a page number is out of range. Copies the tables to the host and waits for it;
// while a graph is being captured it cannot, and does nothing.
void check_values_on_device(const Problem& problem, cudaStream_t stream);

}  // namespace paged_attn
