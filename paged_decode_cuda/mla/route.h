// The route "mla": multi-head latent attention on Hopper. See plan.h for why_not and plan.
#pragma once

#include "../routes.h"
#include "plan.h"

namespace paged_attn {

Numbers mla_numbers(const MlaPlan& plan);
void add_mla(const Problem& p, const MlaPlan& plan, Launches& launches);

}  // namespace paged_attn
