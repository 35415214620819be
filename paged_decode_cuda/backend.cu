// The CUDA backend: writes the new tokens, then attends by the first route that fits. Everything runs on the current
// stream; nothing reads device memory or waits for the device, except under PAGED_ATTN_CHECK.
#include "backend.h"

#include <string>

#include "append.h"
#include "check.h"
#include "decode/plan.h"
#include "explanation.h"
#include "layout.h"
#include "routes.h"
#include "spec/check_tables.h"

namespace paged_attn {
namespace {

// Farther than any key, and sums of two still fit into 32 bits.
void bound_positions(Problem& p) {
  p.window_left = pd_min(p.window_left, kMaxKeys);
  p.window_right = pd_min(p.window_right, kMaxKeys);
  p.attention_chunk = pd_min(p.attention_chunk, kMaxKeys);
}

bool appends(const Problem& p) { return p.append.k && p.kv_heads > 0; }
bool rotates(const Problem& p) { return appends(p) && p.rotary.cos; }
bool attends(const Problem& p) { return p.total_q > 0 && p.q_heads > 0; }

// The queries are those that the append has rotated, at `rotated_q`.
void use_rotated_queries(Problem& p, void* rotated_q) {
  p.q = rotated_q;
  p.q_stride_head = p.head_dim;
  p.q_stride_token = p.q_heads * p.head_dim;
  p.q_stride_batch = p.cu_seqlens_q ? 0 : p.max_q_len * p.q_stride_token;
}

}  // namespace

std::string unsupported_reason(const Problem& p) {
  // Rows, the most tiles of rows that a route cuts them into, and tokens are counted in 32 bits.
  const int64_t rows = p.total_q * p.group, tiles = (rows / kItemRows + p.batch) * p.kv_heads;
  const int64_t tokens = p.append.total_new + p.total_q;
  const int64_t keys = attends(p) ? capacity_of(p) : 0;
  if (pd_max(pd_max(p.batch, rows), pd_max(tiles, tokens)) <= INT32_MAX - 64 && keys < kMaxKeys) return "";
  return "cuda: expected sizes below 2^31 (batch, total_q * group, total_q * q_heads / 8 + batch * kv_heads, tokens to "
         "append and to rotate) and of 2^30 (keys of one request), got " +
         std::to_string(p.batch) + ", " + std::to_string(rows) + ", " + std::to_string(tiles) + ", " +
         std::to_string(tokens) + ", " + std::to_string(keys);
}

void run_attention(const Problem& problem) {
  Problem p = problem;
  bound_positions(p);
  const Context context = current_context();
  if (checks_enabled()) check_values_on_device(p, context.stream);

  Launches launches(context);
  if (appends(p)) {
    const int64_t bytes = rotates(p) ? p.total_q * p.q_heads * p.head_dim * dtype_bytes(p.q_dtype) : 0;
    void* const rotated_q = launches.workspace(bytes);
    add_append(p, rotates(p), rotated_q, launches);
    if (rotates(p)) use_rotated_queries(p, rotated_q);
  }
  if (attends(p)) find_route(p, context.limits).add(p, launches);
  launches.run();
}

std::string explain_attention(const Problem& problem) {
  Problem p = problem;
  bound_positions(p);
  const Context context = current_context();
  if (checks_enabled()) check_values_on_device(p, context.stream);
  const DeviceLimits& limits = context.limits;
  if (rotates(p)) use_rotated_queries(p, nullptr);
  Explanation explanation;
  explanation.route = "none";  // no queries
  if (!attends(p)) return explanation.json();
  const Route& taken = find_route(p, limits);
  explanation.route = taken.name;
  for (const Route* route = kRoutes; route != &taken; ++route) {
    explanation.why_not.emplace_back(route->name, route->why_not(p, limits));
  }
  for (const auto& [name, number] : taken.numbers(p, limits)) explanation.plan.emplace_back(name, number);
  return explanation.json();
}

void run_kv_write(const Problem& p) {
  const Context context = current_context();
  if (checks_enabled()) check_values_on_device(p, context.stream);
  Launches launches(context);
  add_append(p, /*rotates=*/false, nullptr, launches);
  launches.run();
}

std::string instruction_set() { return ""; }

}  // namespace paged_attn
