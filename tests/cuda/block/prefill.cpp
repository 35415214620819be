// One call of the route prefill on the host, of bf16 and head_dim 64 or 96 (tall tiles), 128 (both), 192 or 256, of
// e4m3 and 128, or of an 8-bit cache that is widened and 128 or 256. tests/test_prefill_host.py calls it.
#include "call.h"
#include "prefill/e4m3_sizes.h"
#include "prefill/instances.h"
#include "prefill/kernel.cuh"
#include "prefill/narrow_sizes.h"
#include "prefill/route.h"

namespace paged_attn {

template <typename Sizes>
const void* bf16_kernel() {
  return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<Bf16, Sizes>, false>);
}

const void* prefill_kernel_bf16(const PrefillInstance& instance, bool all_scores) {
  if (all_scores) fail("no instance of bf16 with softcap and ALiBi");
  if (has_sizes<TallPrefillSizes64>(instance)) return bf16_kernel<TallPrefillSizes64>();
  if (has_sizes<TallPrefillSizes96>(instance)) return bf16_kernel<TallPrefillSizes96>();
  if (has_sizes<TallPrefillSizes128>(instance)) return bf16_kernel<TallPrefillSizes128>();
  if (has_sizes<PrefillSizes128>(instance)) return bf16_kernel<PrefillSizes128>();
  if (has_sizes<PrefillSizes192>(instance)) return bf16_kernel<PrefillSizes192>();
  if (has_sizes<PrefillSizes256>(instance)) return bf16_kernel<PrefillSizes256>();
  fail("no such instance of bf16");
}
template <typename Sizes>
const void* e4m3_kernel() {
  return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<E4m3, Sizes>, false>);
}

const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores) {
  if (all_scores) fail("no instance of e4m3 with softcap and ALiBi");
  if (instance.head_dim == 64 && instance.rows == 256) return e4m3_kernel<TallPrefillE4m3Sizes64>();
  if (instance.head_dim == 128 && instance.rows == 192) return e4m3_kernel<TallPrefillE4m3Sizes128>();
  if (instance.head_dim == 128) return e4m3_kernel<PrefillE4m3Sizes128>();
  fail("no such instance of e4m3");
}
const void* prefill_kernel_narrow(const PrefillInstance& instance, bool all_scores) {
  using Wide = PrefillShape<Fp16, PrefillNarrowSizes<PrefillSizes256>>;
  using Shape = PrefillShape<Fp16, PrefillNarrowSizes<PrefillSizes128>>;
  if (instance.head_dim == 256 && all_scores) fail("no instance of 256 with softcap and ALiBi");
  if (instance.head_dim == 256) return reinterpret_cast<const void*>(&prefill_kernel<Wide, false>);
  return all_scores ? reinterpret_cast<const void*>(&prefill_kernel<Shape, true>)
                    : reinterpret_cast<const void*>(&prefill_kernel<Shape, false>);
}
const void* prefill_kernel_fp16(const PrefillInstance&, bool) { fail("no instance of fp16"); }

}  // namespace paged_attn

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t blocks, box_rows, splits, most_splits, rows;
};

const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const int processors = static_cast<int>(call->processors);
  Launches launches({processors, 232448, 233472, 90, processors * 3352 / 132});  // so much of an H100
  const PrefillPlan plan = plan_prefill(p, launches.limits());
  *numbers = {plan.blocks, plan.box_rows, plan.splits, plan.most_splits, plan.instance.rows};
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
