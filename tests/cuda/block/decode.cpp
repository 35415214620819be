// One call of the routes decode_basic and decode on the host. tests/test_decode_host.py calls it.
#include "call.h"
#include "decode/route.h"
#include "decode/table.cuh"

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t basic, balanced, blocks, warps, splits, items, rows, each, whole_pairs, lines, surplus_rounds, halves, wgmma;
};

// "" or why it failed. With little shared memory, as compute capability 8.9 has, or with that of 9.0, which 10.0 has
// too.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const bool little = call->little_shared != 0;
  Launches launches({static_cast<int>(call->processors), little ? 101376 : 232448, little ? 102400 : 233472,
                     little            ? 89
                     : call->blackwell ? 100
                                       : 90});
  const char* const reason = decode_why_not(p, launches.limits());
  if (*reason != '\0') return reason;
  const bool basic = *decode_basic_why_not(p, launches.limits()) == '\0';
  const DecodePlan plan = basic ? plan_decode_basic(p, launches.limits()) : plan_decode(p, launches.limits());
  const Plan& work = plan.work;
  *numbers = {plan.basic,
              work.balanced,
              plan.blocks,
              plan.warps,
              work.max_splits.divisor,
              work.items,
              plan.instance.rows,
              work.blocks_each.divisor,
              work.whole_pairs,
              work.lines.divisor,
              work.surplus_rounds,
              plan.halves(),
              plan.instance.wgmma};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  add_decode(p, plan, launches);
  return run_within({bounds_of_keys(p), bounds_of_values(p), bounds_of_queries(p)}, launches, plan.workspace_bytes,
                    plan.shared_bytes);
}

}  // extern "C"
