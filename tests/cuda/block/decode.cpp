// One call of the routes decode_basic and decode on the host. tests/test_decode_host.py calls it.
#include "call.h"
#include "decode/route.h"
#include "decode/table.cuh"

extern "C" void __assertfail(const char* message, const char*, unsigned, const char*, size_t) {
  block_on_host::fail(message);
}

using namespace paged_attn;

extern "C" {

struct PlanNumbers {
  int64_t basic, balanced, blocks, warps, splits, items, rows, each, whole_pairs, lines, surplus_rounds;
};

// "" or why it failed. With little shared memory, as compute capability 8.9 has, or with that of 9.0.
const char* attend(const Call* call, PlanNumbers* numbers) {
  const Problem p = problem_of(*call);
  const bool little = call->little_shared != 0;
  Launches launches(
      {static_cast<int>(call->processors), little ? 101376 : 232448, little ? 102400 : 233472, little ? 89 : 90});
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
              work.surplus_rounds};
  machine.dice.seed(static_cast<unsigned>(call->seed));
  add_decode(p, plan, launches);

  const Cache& c = p.cache;
  const auto bounds_of = [](const void* begin, int64_t bytes) {
    const auto* const first = static_cast<const uint8_t*>(begin);
    return Bounds{first, first + bytes};
  };
  const int64_t size = dtype_bytes(c.dtype);
  keys_in_memory = bounds_of(c.k, ((c.num_pages - 1) * c.k_stride_page + (c.page_size - 1) * c.k_stride_slot +
                                   (p.kv_heads - 1) * c.k_stride_head + p.head_dim) *
                                      size);
  values_in_memory = bounds_of(c.v, ((c.num_pages - 1) * c.v_stride_page + (c.page_size - 1) * c.v_stride_slot +
                                     (p.kv_heads - 1) * c.v_stride_head + p.head_dim_v) *
                                        size);
  words_in_memory = bounds_of(launches.workspace(), plan.workspace_bytes);
  own_shared_bytes = plan.shared_bytes;
  late_words.clear();
  for (Copies& own : own_copies) own = {};
  machine.when_block_ends = end_block;
  const char* const failure = launches.run();
  machine.when_block_ends = nullptr;
  if (*failure != '\0') return failure;
  // The replay of a graph has the same number and the same memory.
  const auto* const words = reinterpret_cast<const TaggedWord*>(words_in_memory.begin);
  for (int64_t i = 0; i < plan.workspace_bytes / static_cast<int64_t>(sizeof(TaggedWord)); ++i) {
    if (words[i].tag == launch_number()) return "a word of a partial has not been cleared";
  }
  return "";
}

}  // extern "C"
