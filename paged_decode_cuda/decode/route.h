// The two routes on the matrix unit: "decode_basic" for the calls that an engine makes nearly always, "decode" for all
// features. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers decode_numbers(const DecodePlan& plan);
void add_decode(const Problem& p, const DecodePlan& plan, Launches& launches);

}  // namespace paged_attn
