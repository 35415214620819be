// One call of the route prefill_mma on the host. tests/test_prefill_mma_host.py calls it.
#include "call.h"
#include "prefill_mma/route.h"
#include "prefill_mma/table.cuh"

namespace paged_attn {

const void* prefill_mma_kernel_bf16(int head_dim, int keys) { return find_prefill_mma_kernel<Bf16>(head_dim, keys); }
const void* prefill_mma_kernel_fp16(int head_dim, int keys) { return find_prefill_mma_kernel<Fp16>(head_dim, keys); }
const void* prefill_mma_widening_bf16(int head_dim) { return find_prefill_mma_widening<Bf16>(head_dim); }
const void* prefill_mma_widening_fp16(int head_dim) { return find_prefill_mma_widening<Fp16>(head_dim); }

}  // namespace paged_attn

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t blocks, keys;
};

// With little shared memory, as compute capability 8.6 has, or with that of 8.0.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const bool little = call->little_shared != 0;
  Launches launches({static_cast<int>(call->processors), little ? 101376 : 166912, little ? 102400 : 167936, 80});
  const char* const reason = prefill_mma_why_not(p, launches.limits());
  if (*reason != '\0') return reason;
  const PrefillMmaPlan plan = plan_prefill_mma(p, launches.limits());
  *numbers = {plan.blocks, plan.instance.keys};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  add_prefill_mma(p, plan, launches);
  return launches.run();
}

}  // extern "C"
