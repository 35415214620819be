// One call of the route fallback on the host. tests/test_fallback_host.py calls it.
#include "call.h"
#include "fallback/route.h"

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t blocks, rows, balanced, splits, items, key_grain, value_grain, query_grain;
};

// With as much shared memory as compute capability 8.6 has.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  Launches launches({static_cast<int>(call->processors), 101376, 102400, 86});
  const FallbackPlan plan = plan_fallback(p, launches.limits());
  const FallbackWork& work = plan.work;
  *numbers = {plan.blocks, work.rows_per_tile, work.balanced,    work.max_splits.divisor,
              work.items,  work.key_grain,     work.value_grain, work.query_grain};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  add_fallback(p, plan, launches);
  return run_within({}, launches, plan.workspace_bytes, plan.instance.shared_bytes);
}

}  // extern "C"
