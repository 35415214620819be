// The route for many rows in float32. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers float32_numbers(const Float32Plan& plan);
void add_float32(const Problem& p, const Float32Plan& plan, Launches& launches);

}  // namespace paged_attn
