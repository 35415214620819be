// Three routes: prefill (many rows, by matrices), decode (a few rows at a time), wide (what decode does not take). The
// list is at the end.
#include "routes.h"

#include "spec/ranges.h"

namespace [[gnu::visibility("hidden")]] paged_attn {
namespace {

constexpr int64_t kMaxSplits = 64;
// So many threadgroups keep every Apple GPU busy (8 for each of 32 cores, Metal does not tell their number); with fewer
// the keys are cut.
constexpr int64_t kBusyThreadgroups = 256;
// With fewer than these, shorter requests are cut too: 3 for each of 40 cores, as many as the registers of a core hold.
constexpr int64_t kWantedThreadgroups = 128;
// Simdgroups of a threadgroup, so that 3 of them can be in a core; more where there are too few threadgroups.
constexpr int64_t kUsualSimdgroups = 4;
constexpr int64_t kPrefillDims = 128;  // the widest head_dim of prefill
constexpr int64_t kSimdgroupRows = 8;  // rows of a simdgroup of prefill

int64_t widest_dim(const Problem& p) { return pd_max(p.head_dim, p.head_dim_v); }

// Rows of a request and kv_head, at most; with cu_seqlens_q as max_seqlen_q promises.
int64_t rows_of(const Problem& p) { return pd_max(p.max_q_len * p.group, 1); }

// Tiles of rows of one kv_head, of all requests. With cu_seqlens_q at most: see FirstRowTile in item.h.
int64_t row_tiles_of(const Problem& p, int64_t rows) {
  return p.cu_seqlens_q ? p.total_q * p.group / rows + p.batch : pd_ceil_div(rows_of(p), rows) * p.batch;
}

// ---- How requests are cut. With `deterministic` that depends on nothing of the other requests.

void plan_splits(const Problem& p, int64_t items, Plan* plan) {
  plan->split_rows = pd_min(rows_of(p), kMaxSplitRows);
  plan->max_splits = plan->wanted_splits = 1;
  plan->split_keys = kSplitKeys;
  if (items == 0 || (!p.cu_seqlens_q && rows_of(p) > kMaxSplitRows)) return;
  const int64_t most_keys = p.max_kv_len;
  const bool busy = items >= kBusyThreadgroups;
  if (!p.deterministic) plan->wanted_splits = pd_ceil_div(kWantedThreadgroups, items);
  if (!p.deterministic && busy) plan->split_keys = kBusySplitKeys;
  const int64_t by_cores = pd_min(pd_ceil_div(most_keys, kMinSplitKeys), plan->wanted_splits);
  // A cache of no more than kSplitKeys is not worth a second dispatch.
  int64_t most = most_keys <= kSplitKeys ? 1 : pd_max(pd_ceil_div(most_keys, plan->split_keys), by_cores);
  // Threadgroups with nothing to do, where requests are shorter than the cache, are cheap but not free.
  if (!p.deterministic) most = pd_min(most, (busy ? 16 : 4) * kBusyThreadgroups / items);
  if (p.num_splits > 0) most = pd_min(p.num_splits, pd_ceil_div(most_keys, kSimdWidth));
  plan->max_splits = pd_max(1, pd_min(most, kMaxSplits));
}

void plan_simdgroups(const Problem& p, int64_t items, Plan* plan) {
  const int64_t keys = p.deterministic ? p.max_kv_len : pd_ceil_div(p.max_kv_len, plan->max_splits);
  const int64_t most =
      !p.deterministic && items * plan->max_splits >= kWantedThreadgroups ? kUsualSimdgroups : kMaxSimdgroups;
  plan->simdgroups = pd_max(1, pd_min(most, pd_ceil_div(keys, kSimdWidth)));
}

// ---- Dispatches

// Where a threadgroup of attend or prefill works: ItemIndex in item.h.
MTLSize grid_of(const Problem& p, const Plan& plan, int64_t rows, int64_t packed_row_tiles) {
  if (packed_row_tiles == 0) {
    const int64_t tiles = p.cu_seqlens_q ? 1 : pd_ceil_div(rows_of(p), rows);
    return MTLSizeMake(tiles * plan.max_splits, pd_max(p.kv_heads, 1), pd_max(p.batch, 1));
  }
  const int64_t cut_row_tiles = p.batch * pd_ceil_div(plan.split_rows, rows);
  return MTLSizeMake(packed_row_tiles + cut_row_tiles * (plan.max_splits - 1), pd_max(p.kv_heads, 1), 1);
}

Dispatch attend_dispatch(const Problem& p, const Plan& plan) {
  return {"attend_d" + std::to_string(plan.dims) + "_r" + std::to_string(plan.rows),
          grid_of(p, plan, plan.rows, plan.packed_row_tiles), plan.simdgroups * kSimdWidth, kSimdWidth};
}

Dispatch prefill_dispatch(const Problem& p, const Plan& plan) {
  const std::string type = p.q_dtype == DType::kFloat16 ? "f16" : "bf16";
  const int64_t threads = plan.prefill_rows / kSimdgroupRows * kSimdWidth;
  return {"prefill_" + type + (widest_dim(p) <= 64 ? "_d64_r" : "_d128_r") + std::to_string(plan.prefill_rows),
          grid_of(p, plan, plan.prefill_rows, p.cu_seqlens_q ? row_tiles_of(p, plan.prefill_rows) : 0), threads,
          threads};
}

void add_merge(const Problem& p, const Plan& plan, std::vector<Dispatch>* dispatches) {
  if (plan.max_splits == 1) return;
  const int64_t rows = pd_min(plan.split_rows, kMaxSimdgroups), threads = rows * kSimdWidth;
  dispatches->push_back(
      {"merge", MTLSizeMake(pd_ceil_div(plan.split_rows, rows), p.kv_heads, p.batch), threads, threads});
}

std::vector<Dispatch> attend_and_merge(const Problem& p, const Plan& plan) {
  std::vector<Dispatch> dispatches = {attend_dispatch(p, plan)};
  add_merge(p, plan, &dispatches);
  return dispatches;
}

// ---- prefill: matrices for requests of many rows. With cu_seqlens_q others may have few, and tokens past the last
// request are to be cleared: attend follows.

std::string why_not_prefill(const Problem& p) {
  const auto got = [](const std::string& expected, int64_t number) {
    return "expected " + expected + ", got " + std::to_string(number);
  };
  if (p.q_dtype == DType::kFloat32) return "expected q in 16 or 8 bits, got float32";
  if (p.qv) return "expected no qv, got one";
  if (widest_dim(p) > kPrefillDims)
    return got("head_dim and head_dim_v of at most " + std::to_string(kPrefillDims), widest_dim(p));
  if (rows_of(p) <= kVectorRows)
    return got("more than " + std::to_string(kVectorRows) + " rows (max_seqlen_q * group)", rows_of(p));
  return "";
}

Plan plan_prefill(const Problem& p) {
  Plan plan = {.rows = kVectorRows, .dims = widest_dim(p) <= 64 ? 64 : 128};
  // Deterministic results of a request may not depend on how many tokens the others have.
  plan.prefill_rows = rows_of(p) <= 16 && !(p.deterministic && p.cu_seqlens_q) ? 16 : 32;
  const int64_t items = pd_min(pd_ceil_div(pd_min(rows_of(p), kMaxSplitRows), plan.prefill_rows) * p.batch,
                               row_tiles_of(p, plan.prefill_rows)) *
                        p.kv_heads;
  plan_splits(p, items, &plan);
  plan_simdgroups(p, items, &plan);
  return plan;
}

std::vector<Dispatch> prefill_attend_and_merge(const Problem& p, const Plan& plan) {
  std::vector<Dispatch> dispatches = {prefill_dispatch(p, plan)};
  if (p.cu_seqlens_q) dispatches.push_back(attend_dispatch(p, plan));
  add_merge(p, plan, &dispatches);
  return dispatches;
}

// ---- decode, and wide: a few rows at a time, by simdgroups

Plan plan_attend(const Problem& p, int64_t rows, int64_t dims) {
  Plan plan = {.rows = rows, .dims = dims};
  const int64_t tiles = pd_min(pd_ceil_div(rows_of(p), rows) * p.batch, row_tiles_of(p, rows));
  if (p.cu_seqlens_q && rows_of(p) > rows) plan.packed_row_tiles = row_tiles_of(p, rows);
  plan_splits(p, tiles * p.kv_heads, &plan);
  plan_simdgroups(p, tiles * p.kv_heads, &plan);
  return plan;
}

std::string why_not_decode(const Problem& p) {
  if (p.qv) return "expected no qv, got one";
  if (widest_dim(p) > 256)
    return "expected head_dim and head_dim_v of at most 256, got " + std::to_string(widest_dim(p));
  return "";
}

Plan plan_decode(const Problem& p) {
  const int64_t dims = widest_dim(p);
  // Deterministic results of a request may not depend on how many tokens the others have.
  const int64_t rows = p.deterministic && p.cu_seqlens_q ? kVectorRows : rows_of(p);
  return plan_attend(p, rows <= 2 ? rows : rows <= 4 ? 4 : kVectorRows, dims <= 64 ? 64 : dims <= 128 ? 128 : 256);
}

std::string takes_all(const Problem&) { return ""; }

Plan plan_wide(const Problem& p) { return plan_attend(p, 4, p.qv || widest_dim(p) > 512 ? 768 : 512); }

}  // namespace

const std::vector<Route>& routes() {
  static const std::vector<Route> list = {
      {"prefill", why_not_prefill, plan_prefill, prefill_attend_and_merge},
      {"decode", why_not_decode, plan_decode, attend_and_merge},
      {"wide", takes_all, plan_wide, attend_and_merge},
  };
  return list;
}

}  // namespace paged_attn
