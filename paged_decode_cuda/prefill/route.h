// The route "prefill": many rows on Hopper. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers prefill_numbers(const PrefillPlan& plan);
void add_prefill(const Problem& p, const PrefillPlan& plan, Launches& launches);

}  // namespace paged_attn
