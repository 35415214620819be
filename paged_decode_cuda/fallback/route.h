// The route that runs every problem. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers fallback_numbers(const FallbackPlan& plan);
void add_fallback(const Problem& p, const FallbackPlan& plan, Launches& launches);

}  // namespace paged_attn
