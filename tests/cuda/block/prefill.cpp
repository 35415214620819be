// One call of the route prefill on the host, of bf16 and head_dim 64 or 96 (tall tiles), 128 (both), 192 or 256, of
// e4m3 and 128, or of an 8-bit cache that is widened and 128 or 256. tests/test_prefill_host.py calls it.
#include "call.h"
#include "prefill/e4m3_sizes.h"
#include "prefill/instances.h"
#include "prefill/narrow_sizes.h"
#include "prefill/route.h"
#include "prefill/table.cuh"

namespace paged_attn {

static const void* existing(const void* kernel) {
  if (kernel == nullptr) fail("no such instance");
  return kernel;
}

const void* prefill_kernel_bf16(const PrefillInstance& instance, bool all_scores) {
  if (all_scores) fail("no instance of bf16 with softcap and ALiBi");
  return existing(kernel_among<Bf16, false, PrefillSizes128, PrefillSizes192, PrefillSizes256, TallPrefillSizes64,
                               TallPrefillSizes96, TallPrefillSizes128>(instance));
}

const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores) {
  if (all_scores) fail("no instance of e4m3 with softcap and ALiBi");
  return existing(
      kernel_among<E4m3, false, PrefillE4m3Sizes128, TallPrefillE4m3Sizes64, TallPrefillE4m3Sizes128>(instance));
}

const void* prefill_kernel_narrow(const PrefillInstance& instance, bool all_scores) {
  using Sizes128 = PrefillNarrowSizes<PrefillSizes128>;
  return existing(all_scores ? kernel_among<Fp16, true, Sizes128>(instance)
                             : kernel_among<Fp16, false, Sizes128, PrefillNarrowSizes<PrefillSizes256>>(instance));
}

const void* prefill_kernel_fp16(const PrefillInstance&, bool) { fail("no instance of fp16"); }

}  // namespace paged_attn

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t blocks, box_rows, splits, most_splits, rows, tile_rows;
};

const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const int processors = static_cast<int>(call->processors);
  Launches launches({processors, 232448, 233472, 90, processors * 3352 / 132});  // so much of an H100
  const PrefillPlan plan = plan_prefill(p, launches.limits());
  *numbers = {plan.blocks, plan.box_rows, plan.splits, plan.most_splits, plan.instance.rows, plan.instance.tile_rows};
  machine.fill = static_cast<uint8_t>(call->fill);
  machine.dice.seed(static_cast<unsigned>(call->seed));
  const char* const failure = failure_of([&] { add_prefill(p, plan, launches); });
  if (*failure != '\0') return failure;
  machine.when_released = nullptr;
  if (plan.most_splits > 1 && !plan.few_tiles) {
    // The next kernel may then read the word behind the tickets, where an earlier call has left something.
    const auto* const cut = static_cast<const unsigned long long*>(launches.workspace()) + 1;
    machine.when_released = [cut] {
      if (*cut != PrefillCall::kNotYetKnown) fail("the next kernel may start, and would find the word of another call");
    };
  }
  return launches.run();
}

}  // extern "C"
