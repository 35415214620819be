// The Metal backend: a route, its plan, and the dispatches into torch's own command encoder. Nothing here waits for the
// device, and the host reads none of its memory, except under PAGED_ATTN_CHECK. Read routes.mm next, then item.h and
// attend.h for the shaders.
#include <ATen/mps/MPSStream.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "check.h"
#include "encode.h"
#include "explanation.h"
#include "routes.h"
#include "spec/check_tables.h"
#include "spec/ranges.h"

namespace [[gnu::visibility("hidden")]] paged_attn {
namespace {

constexpr int kAppendThreads = 128;

// Memory for the time of a call. The encoder keeps it until the device is done.
struct Workspace {
  torch::stable::Tensor tensor;

  explicit Workspace(int64_t bytes)
      : tensor(torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                    torch::stable::Device(torch::headeronly::DeviceType::MPS, 0))) {}
  Optional<void> given() const { return {{tensor.data_ptr(), 0}, true}; }
};

struct Step {
  Dispatch dispatch;
  Call call;
};

// Encodes the steps in order; each sees what those before it wrote. All that may fail comes first, so that an error
// leaves nothing encoded.
void encode_all(const std::vector<Step>& steps) {
  const std::vector<Step>* all = &steps;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      std::vector<Pipeline> pipelines;
      for (const Step& step : *all) pipelines.push_back(pipeline_of(step.dispatch, step.call));
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      for (size_t i = 0; i < all->size(); ++i) encode(encoder, pipelines[i], (*all)[i].dispatch, (*all)[i].call);
    }
  });
}

bool attends(const Problem& p) { return p.total_q > 0 && p.q_heads > 0; }

// Adds the step that writes the new tokens and rotates queries. None for a call with neither, nor for tokens that
// belong to no request.
void add_append(const Problem& p, Optional<void> rotated, std::vector<Step>* steps) {
  const int64_t tokens = p.append.total_new + (rotated ? p.total_q : 0);
  if (!p.append.k || p.kv_heads == 0 || p.batch == 0 || tokens == 0) return;
  const int64_t vectors_k = pd_ceil_div(p.head_dim, kVector), vectors_v = pd_ceil_div(p.head_dim_v, kVector);
  const int64_t vectors = pd_max(p.kv_heads * (vectors_k + vectors_v), rotated ? p.q_heads * vectors_k : 0);
  const int64_t threads = pd_min(pd_ceil_div(vectors, kSimdWidth) * kSimdWidth, kAppendThreads);
  steps->push_back(
      {{"append", MTLSizeMake(pd_ceil_div(vectors, threads), tokens, 1), threads, threads}, append_call(p, rotated)});
}

const Route& route_of(const Problem& p) {
  for (const Route& route : routes())
    if (route.why_not(p).empty()) return route;
  return routes().back();  // takes everything
}

void use_plan(const Problem& p, const Plan& plan, Call* call) {
  Arguments& a = call->arguments;
  a.num_splits = static_cast<int32_t>(pd_min(p.num_splits, INT32_MAX));
  a.max_splits = static_cast<int32_t>(plan.max_splits);
  a.split_keys = static_cast<int32_t>(plan.split_keys);
  a.wanted_splits = static_cast<int32_t>(plan.wanted_splits);
  a.split_rows = static_cast<int32_t>(plan.split_rows);
  a.packed_row_tiles = static_cast<int32_t>(plan.packed_row_tiles);
  call->constants[kHasSplits] = plan.max_splits > 1;
  call->constants[kHasPrefill] = plan.prefill_rows > 0;
}

}  // namespace

std::string unsupported_reason(const Problem& p) {
  const int64_t rows = p.total_q * p.group, tokens = p.append.total_new + p.total_q;
  // A write by slots looks at no lengths.
  const int64_t keys = p.append.slot_mapping ? 0 : capacity_of(p);
  const Cache& c = p.cache;
  if (std::max({p.batch, rows, tokens, c.num_pages, c.table_rows, c.page_size}) <= INT32_MAX && keys < kMaxKeys)
    return "";
  return "metal: expected sizes below 2^31 (batch, total_q * group, tokens to append and to rotate, pages, rows of "
         "block_table, page_size) and of 2^30 (keys of one request), got " +
         std::to_string(p.batch) + ", " + std::to_string(rows) + ", " + std::to_string(tokens) + ", " +
         std::to_string(c.num_pages) + ", " + std::to_string(c.table_rows) + ", " + std::to_string(c.page_size) + ", " +
         std::to_string(keys);
}

void run_attention(const Problem& p) {
  if (checks_enabled()) check_values_on_device(p);
  std::vector<Step> steps;
  // The append rotates the queries too, into a workspace that attention reads; also where k holds no token.
  std::optional<Workspace> rotated, acc, sums;
  if (p.rotary.cos && p.append.k && p.batch > 0 && attends(p))
    rotated.emplace(p.total_q * p.q_heads * p.head_dim * dtype_bytes(out_dtype(p.q_dtype)));
  const Optional<void> queries = rotated ? rotated->given() : Optional<void>{};
  add_append(p, queries, &steps);
  if (attends(p)) {
    const Route& route = route_of(p);
    const Plan plan = route.plan(p);
    Call call = attend_call(p, queries);
    use_plan(p, plan, &call);
    if (plan.max_splits > 1) {
      const int64_t partials = p.batch * p.kv_heads * plan.split_rows * plan.max_splits;
      acc.emplace(partials * p.head_dim_v * sizeof(float));
      sums.emplace(partials * 2 * sizeof(float));
      call.bind(kPartialAccBuffer, acc->given());
      call.bind(kPartialSumsBuffer, sums->given());
    }
    for (const Dispatch& dispatch : route.dispatches(p, plan)) steps.push_back({dispatch, call});
  }
  if (!steps.empty()) encode_all(steps);
}

std::string explain_attention(const Problem& p) {
  if (checks_enabled()) check_values_on_device(p);
  Explanation e;
  if (!attends(p)) {
    e.route = "none";
    return e.json();
  }
  const Route& chosen = route_of(p);
  for (const Route& route : routes()) {
    if (&route == &chosen) break;
    e.why_not.emplace_back(route.name, route.why_not(p));
  }
  const Plan plan = chosen.plan(p);
  const std::vector<Dispatch> dispatches = chosen.dispatches(p, plan);
  int64_t threadgroups = 0;
  for (const Dispatch& d : dispatches)
    threadgroups += d.threadgroups.width * d.threadgroups.height * d.threadgroups.depth;
  e.route = chosen.name;
  e.plan = {{"rows", plan.prefill_rows ? plan.prefill_rows : plan.rows},
            {"splits", plan.max_splits},
            {"simdgroups", dispatches[0].threads / kSimdWidth},
            {"dispatches", static_cast<int64_t>(dispatches.size())},
            {"threadgroups", threadgroups}};
  return e.json();
}

void run_kv_write(const Problem& p) {
  if (checks_enabled()) check_values_on_device(p);
  std::vector<Step> steps;
  add_append(p, {}, &steps);
  if (!steps.empty()) encode_all(steps);
}

void run_merge(const MergeProblem& p) {
  const int64_t threads = kMaxSimdgroups * kSimdWidth, groups = pd_ceil_div(p.tokens * p.heads, kMaxSimdgroups);
  encode_all({{{"merge_parts", MTLSizeMake(groups, 1, 1), threads, threads}, merge_call(p)}});
}

std::string instruction_set() { return ""; }

}  // namespace paged_attn
