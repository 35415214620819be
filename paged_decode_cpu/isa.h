// The instruction set of this process: the first of the list that the processor has, or the one
// that PAGED_ATTN_CPU_ISA names. Chosen once, at the first call.
#pragma once

#include "kernel.h"

namespace paged_attn {

// Throws when PAGED_ATTN_CPU_ISA names none that this processor can run.
const Kernel& kernel_of_this_cpu();

// Why the matrix unit that this processor has may not be used; empty where it may, or where there is none.
const char* amx_refusal();

}  // namespace paged_attn
