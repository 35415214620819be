// The route "mla": multi-head latent attention on Hopper. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers mla_numbers(const MlaPlan& plan);
void launch_mla(const Problem& p, const MlaPlan& plan, const Context& context);

}  // namespace paged_attn
