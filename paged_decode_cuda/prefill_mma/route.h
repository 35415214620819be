// The route "prefill_mma": many rows on GPUs without wgmma. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers prefill_mma_numbers(const PrefillMmaPlan& plan);
void add_prefill_mma(const Problem& p, const PrefillMmaPlan& plan, Launches& launches);

}  // namespace paged_attn
