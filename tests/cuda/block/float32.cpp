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
  const auto bounds_of = [](const void* begin, int64_t elements) {
    const auto* const first = static_cast<const uint8_t*>(begin);
    return Bounds{first, first + elements * 4};
  };
  const Cache& c = p.cache;
  copied_from = {bounds_of(p.q, p.total_q * p.q_stride_token),
                 bounds_of(c.k, (c.num_pages - 1) * c.k_stride_page + (c.page_size - 1) * c.k_stride_slot +
                                    (p.kv_heads - 1) * c.k_stride_head + p.head_dim),
                 bounds_of(c.v, (c.num_pages - 1) * c.v_stride_page + (c.page_size - 1) * c.v_stride_slot +
                                    (p.kv_heads - 1) * c.v_stride_head + p.head_dim_v)};
  words_in_memory = bounds_of(launches.workspace(), plan.workspace_bytes / 4);
  late_words.clear();
  own_pieces.clear();
  for (Half& half : halves) half = {};
  const char* const failure = launches.run();
  if (*failure != '\0') return failure;
  for (const auto& [thread, pieces] : own_pieces) {
    const auto some = [](const Actions& batch) { return !batch.empty(); };
    if (!pieces.open.empty() || std::any_of(pieces.batches.begin(), pieces.batches.end(), some))
      return "a copy that nobody has awaited";
  }
  // The replay of a graph has the same number and the same memory.
  const auto* const words = reinterpret_cast<const TaggedWord*>(words_in_memory.begin);
  const auto* const end = reinterpret_cast<const TaggedWord*>(words_in_memory.end);
  if (std::any_of(words, end, [](const TaggedWord& word) { return word.tag == launch_number(); }))
    return "a word of a partial has not been cleared";
  return "";
}

}  // extern "C"
