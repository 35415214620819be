// One call of the route mla or wide_heads on the host. tests/test_mla_host.py calls it through ctypes.
#include "mla/route.h"

#include "call.h"

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t clusters, cluster, cut, partial_count, box_rows, balanced, splits, items, rows;
};

// "" or why the route does not serve the call. Without `out` it is only planned.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  Launches launches({static_cast<int>(call->processors), 232448, 233472, 90});
  const char* const reason = mla_why_not(p, launches.limits());
  if (*reason != '\0' && *wide_heads_why_not(p, launches.limits()) != '\0') return reason;
  const MlaPlan plan = plan_mla(p, launches.limits());
  *numbers = {plan.clusters,
              plan.cluster,
              plan.cut,
              plan.partial_count,
              plan.box_rows,
              plan.work.balanced,
              plan.work.max_splits.divisor,
              plan.work.items,
              plan.rows};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  if (call->out == 0) return "";
  add_mla(p, plan, launches);
  return launches.run();
}

}  // extern "C"
