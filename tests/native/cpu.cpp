// The CPU's plan for Python, with an instruction set that does nothing; part_of_slot is its percentage. The file of the
// planner is compiled here, for its constants.
#include "module.h"

#include "../../paged_decode_cpu/plan.cpp"

using namespace paged_attn;

namespace {

Products no_products(const Problem&) { return {"packed_f32", "in_place_f32", 16, 1, 240}; }
int64_t scratch_of(const Problem& p, const Item& item) { return item.rows() * item.heads() * p.head_dim_v * 4; }
const Kernel kNoKernel = {"none", no_products, scratch_of, nullptr, nullptr, nullptr};

}  // namespace

void bind_cpu(py::module_& m) {
  m.attr("split_align") = kSplitAlign;
  m.attr("many_threads") = kManyThreads;
  m.attr("task_shares") = kTaskShares;
  m.attr("begin_keys") = kBeginKeys;
  m.attr("head_keys") = kHeadKeys;
  m.attr("merge_keys") = kMergeKeys;
  m.attr("partial_keys") = kPartialKeys;
  m.attr("last_task_keys") = kLastTaskKeys;
  m.attr("last_task_bytes") = kLastTaskBytes;
  m.attr("min_split_keys") = kMinSplitKeys;
  m.def("plan", [](const py::dict& d, int64_t threads) {
    Made made;
    fill(made, d);
    Kernel kernel = kNoKernel;
    kernel.part_of_slot.percent = number(d, "part_of_slot", 0);
    const Plan plan = make_plan(made.p, kernel, threads);
    py::list works;
    for (const Work& work : plan.works) {
      py::list splits;
      for (int64_t s = work.first_split; s < work.first_split + work.num_splits; ++s)
        splits.append(py::make_tuple(plan.splits[s].begin, plan.splits[s].end));
      py::dict w;
      w["batch"] = work.item.batch;
      w["heads"] = py::make_tuple(work.item.kv_head_begin, work.item.kv_head_end);
      w["rows"] = py::make_tuple(work.item.row_begin, work.item.row_end);
      w["splits"] = splits;
      w["partial"] = py::make_tuple(
          work.partial_offset,
          work.partial_offset +
              (work.num_splits > 1 ? work.num_splits * partial_floats(work.item, made.p.head_dim_v) : 0));
      works.append(w);
    }
    py::list tasks;
    for (const Task& task : plan.tasks) tasks.append(py::make_tuple(task.work, task.split, task.cost));
    py::dict result;
    result["works"] = works;
    result["tasks"] = tasks;
    result["partial_floats"] = plan.partial_floats;
    result["threads"] = plan.threads;
    result["scratch_bytes"] = plan.scratch_bytes;
    return result;
  });
}
