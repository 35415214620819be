// One call of the route float32 on the host. tests/test_float32_host.py calls it.
#include "call.h"
#include "float32/route.h"

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t blocks, head_dim, rows, groups, splits, items;
};

// With little shared memory, as compute capability 8.6 has, or with that of 9.0.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const bool little = call->little_shared != 0;
  Launches launches({static_cast<int>(call->processors), little ? 101376 : 232448, little ? 102400 : 233472, 90});
  const char* const reason = float32_why_not(p, launches.limits());
  if (*reason != '\0') return reason;
  const Float32Plan plan = plan_float32(p, launches.limits());
  *numbers = {plan.blocks,          plan.instance.head_dim,       plan.instance.rows,
              plan.instance.groups, plan.work.max_splits.divisor, plan.work.items};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  add_float32(p, plan, launches);
  const Bounds q = bounds_of(p.q, p.total_q * p.q_stride_token * 4);
  return run_within({q, bounds_of_keys(p), bounds_of_values(p)}, launches, plan.workspace_bytes,
                    plan.instance.shared_bytes);
}

}  // extern "C"
