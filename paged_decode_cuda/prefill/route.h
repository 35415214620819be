// The route "prefill": many rows on Hopper. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers prefill_numbers(const PrefillPlan& plan);
void launch_prefill(const Problem& p, const PrefillPlan& plan, const Context& context);

}  // namespace paged_attn
