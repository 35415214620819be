// The route that runs every problem. See fallback_plan.h for why_not and plan.
#pragma once

#include "fallback_plan.h"
#include "routes.h"

namespace paged_attn {

Numbers fallback_numbers(const FallbackPlan& plan);
void add_fallback(const Problem& p, const FallbackPlan& plan, Launches& launches);

}  // namespace paged_attn
