// The CPU backend: runs the tasks of a plan on all threads, with the kernel of this processor. Read plan.h next (how a
// problem is cut into tasks), then attend.h (what a task does).
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "backend.h"
#include "explanation.h"
#include "isa.h"
#include "kv_write.h"
#include "plan.h"
#include "spec/check_tables.h"

namespace paged_attn {
namespace {

int64_t max_splits_of(const Plan& plan) {
  int64_t splits = 0;
  for (const Work& work : plan.works) splits = pd_max(splits, work.num_splits);
  return splits;
}

// 64-byte aligned memory that a thread keeps from call to call: page faults of fresh memory would cost more than the
// work of a short call. Null where there is none.
char* thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    size = pd_ceil_div(bytes, 4096) * 4096;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, size)));
    if (!memory) size = 0;
  }
  return memory.get();
}

// Merges the partials of one item as a tree. The thread that brings the last partial of a group merges the group into
// its first partial, and goes on with that one at the next level. Partials are merged in the order of their splits, so
// the bits do not depend on the threads.
struct Merge {
  const Problem& p;
  const Kernel& kernel;
  const Work& work;
  float* partials;
  std::atomic<int64_t>* arrived;  // partials of each group that are there; groups of the first level come first

  void add(int64_t split) const {
    const int64_t floats = partial_floats(work.item, p.head_dim_v);
    std::atomic<int64_t>* groups = arrived;
    // n partials at this level, `stride` floats apart. Whoever counts the last of a group sees all partials of the
    // group, as the increment acquires and releases.
    for (int64_t n = work.num_splits, index = split, stride = floats; n > 1; stride *= kMergeGroup) {
      const int64_t group = index / kMergeGroup, count = pd_min(kMergeGroup, n - group * kMergeGroup);
      if (++groups[group] < count) return;
      float* first = partials + group * kMergeGroup * stride;
      const bool last = n <= kMergeGroup;
      if (last || count > 1) kernel.merge(p, work.item, count, first, stride, !last);
      index = group;
      n = pd_ceil_div(n, kMergeGroup);
      groups += n;
    }
  }
};

// What the threads of a call share.
struct Shared {
  std::unique_ptr<float[]> partials;
  std::unique_ptr<std::atomic<int64_t>[]> arrived;  // partials of each group that is merged
  std::unique_ptr<std::atomic<bool>[]> taken;       // whether a thread has this task

  explicit Shared(const Plan& plan)
      : partials(new float[plan.partial_floats]),
        arrived(new std::atomic<int64_t>[plan.merge_groups]()),
        taken(new std::atomic<bool>[plan.tasks.size()]()) {}
};

void run_plan(const Problem& p, const Kernel& kernel, const Plan& plan, const Shared& shared) {
  std::atomic<size_t> next_task{0};
  const int64_t workers = pd_min(plan.threads, static_cast<int64_t>(plan.tasks.size()));
  torch::stable::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    char* scratch = thread_scratch(plan.scratch_bytes);
    if (!scratch) return;  // the others do its tasks: the calling thread has memory
    // A worker begins with the task of its own number: when a short call is repeated, its keys are in the cache of this
    // core. Then it takes tasks from a counter. (Where torch runs several workers on one thread, the first one does all
    // that is left.)
    for (size_t i = worker; i < plan.tasks.size(); i = next_task++) {
      if (shared.taken[i].exchange(true)) continue;
      const Task& task = plan.tasks[i];
      const Work& work = plan.works[task.work];
      const KvRange keys = plan.splits[work.first_split + task.split];
      if (work.num_splits == 1) {
        kernel.attend(p, work.item, keys, scratch, nullptr);
        continue;
      }
      float* first = shared.partials.get() + work.partial_offset;
      kernel.attend(p, work.item, keys, scratch, first + task.split * partial_floats(work.item, p.head_dim_v));
      Merge{p, kernel, work, first, shared.arrived.get() + work.first_group}.add(task.split);
    }
  });
}

// Tokens of q that belong to no request (past cu_seqlens_q[batch]) attend to nothing: out 0, lse -inf.
void clear_unclaimed(const Problem& p) {
  if (!p.cu_seqlens_q) return;
  const int64_t bytes = dtype_bytes(out_dtype(p.q_dtype));
  for (int64_t token = p.cu_seqlens_q[p.batch]; token < p.total_q; ++token)
    for (int64_t head = 0; head < p.q_heads; ++head) {
      char* out = static_cast<char*>(p.out) + (token * p.out_stride_token + head * p.out_stride_head) * bytes;
      std::memset(out, 0, p.head_dim_v * bytes);
      if (p.lse) p.lse[head * p.lse_stride_head + token] = -std::numeric_limits<float>::infinity();
    }
}

// How much of a call is multiplied in which way (Products in kernel.h), for explain.
struct Tally {
  int64_t packed_items = 0, few_items = 0, read_ahead_items = 0;
  int64_t packed_cost = 0, tiles_cost = 0, few_cost = 0, cost = 0;
  int64_t most_rows = 0, most_keys = 0;
};

Tally tally_of(const Problem& p, const Plan& plan, const Products& products) {
  Tally t;
  for (const Work& work : plan.works) {
    const bool tiles = products.in_tiles_in_place(work.item);
    const bool packed = !tiles && work.item.rows() >= products.min_packed_rows;
    const bool few = !tiles && work.item.rows() <= products.most_few_rows;
    t.packed_items += packed;
    t.few_items += few;
    t.packed_cost += packed ? cost_of(work.item) : 0;
    t.tiles_cost += tiles ? cost_of(work.item) : 0;
    t.few_cost += few ? cost_of(work.item) : 0;
    t.cost += cost_of(work.item);
    t.read_ahead_items += !packed && work.item.reads_ahead(p, tiles);
    t.most_rows = pd_max(t.most_rows, work.item.rows());
    t.most_keys = pd_max(t.most_keys, work.item.num_keys());
  }
  return t;
}

// The route that explain names: the way in which most of the work is multiplied. Items of few rows in a batch with long
// prompts are multiplied in another one.
const char* route_of(const Products& products, const Tally& t) {
  if (t.packed_items > 0 && 2 * t.packed_cost >= t.cost) return products.packed;
  if (t.tiles_cost > 0 && 2 * t.tiles_cost >= t.cost) return products.tiles_in_place;
  const bool mostly_few = t.few_items > 0 && 2 * t.few_cost >= t.cost - t.packed_cost - t.tiles_cost;
  return mostly_few ? products.in_place_few : products.in_place;
}

// Why the call does not take the ways before `route`, best first, of those that exist for this dtype.
void add_reasons(const Problem& p, const Products& products, const Tally& t, const char* route, Explanation& e) {
  if (const char* refusal = amx_refusal(); *refusal && p.q_dtype != DType::kFloat32)
    e.why_not.emplace_back(p.q_dtype == DType::kFloat16 ? "tiles_fp16" : "tiles_bf16", refusal);
  if (route == products.packed) return;
  if (route == products.tiles_in_place) {
    e.why_not.emplace_back(products.packed, "few rows read keys and values where they lie");
    return;
  }
  if (products.tiles_in_place)
    e.why_not.emplace_back(
        products.tiles_in_place,
        "expected " + std::to_string(products.min_tile_rows) + " to " + std::to_string(products.most_tile_rows) +
            " rows (q_len * group) of a kv_head in an item and at least " + std::to_string(products.min_tile_keys) +
            " keys, got " + std::to_string(t.most_rows) + " rows and " + std::to_string(t.most_keys) + " keys");
  e.why_not.emplace_back(products.packed, t.packed_items > 0
                                              ? "most of the work is in items of fewer rows than it pays for"
                                              : "expected at least " + std::to_string(products.min_packed_rows) +
                                                    " rows (q_len * group) of a kv_head in an item, got " +
                                                    std::to_string(t.most_rows));
}

}  // namespace

std::string unsupported_reason(const Problem&) { return ""; }

void run_attention(const Problem& p) {
  const Kernel& kernel = kernel_of_this_cpu();
  check_values(p);
  // A call that fails changes nothing: all places are checked, and all memory that the call needs is allocated, before
  // the first write. The plan reads only lengths, which the append does not change.
  const std::vector<TokenWrite> new_tokens = place_tokens(p);
  const Plan plan = make_plan(p, kernel, torch::stable::get_num_threads());
  const Shared shared(plan);
  if (!plan.tasks.empty() && !thread_scratch(plan.scratch_bytes)) throw std::bad_alloc();
  if (p.append.k) write_tokens(p, kernel, new_tokens);
  clear_unclaimed(p);
  run_plan(p, kernel, plan, shared);
}

std::string explain_attention(const Problem& p) {
  const Kernel& kernel = kernel_of_this_cpu();
  check_values(p);
  check_new_places(p);
  Explanation e;
  e.route = "none";  // no queries, or no heads
  if (p.total_q == 0 || p.q_heads == 0) return e.json();
  const Plan plan = make_plan(p, kernel, torch::stable::get_num_threads());
  const Products products = kernel.products(p);
  const Tally tally = tally_of(p, plan, products);
  const char* const route = route_of(products, tally);
  e.route = route;
  add_reasons(p, products, tally, route, e);
  e.plan = {{"threads", plan.threads},
            {"items", static_cast<int64_t>(plan.works.size())},
            {"packed_items", tally.packed_items},
            {"read_ahead_items", tally.read_ahead_items},
            {"tasks", static_cast<int64_t>(plan.tasks.size())},
            {"splits", max_splits_of(plan)},
            {"heads_per_walk", plan.works.empty() ? 0 : plan.works[0].item.heads()},
            {"scratch_bytes", plan.scratch_bytes},
            {"partial_bytes", plan.partial_floats * int64_t(sizeof(float))}};
  return e.json();
}

void run_kv_write(const Problem& p) {
  const Kernel& kernel = kernel_of_this_cpu();
  check_values(p);
  write_tokens(p, kernel, place_tokens(p));
}

std::string instruction_set() {
  const std::string name = kernel_of_this_cpu().name, refusal = amx_refusal();
  return refusal.empty() ? name : name + " (no AMX: " + refusal + ")";
}

}  // namespace paged_attn
