// The constants below decide how a call is cut; docs/cpu.md has the rules as a table. make_plan is at the end.
#include "plan.h"

#include <algorithm>
#include <limits>

#include "spec/request.h"

namespace paged_attn {
namespace {

// Up to so many rows of a request, its kv_heads share one walk over the pages (decode). With more, each kv_head walks
// alone, in items of some rows (prefill).
constexpr int64_t kSharedRows = 256;

// Bytes of K and V of one slot that one walk reads at most; the other kv_heads form further items.
constexpr int64_t kSlotBytes = int64_t(32) << 10;

// Keys and values of fewer bytes may lie in the processor's caches.
constexpr int64_t kCachedBytes = int64_t(32) << 20;

// Those of fewer than these probably do: a small call. The order of reads matters less there than the overhead: the
// kv_heads of a request are divided among the threads, which needs no merge, and a thread gets one task.
constexpr int64_t kResidentBytes = int64_t(8) << 20;

// What a task of a small call takes beside its keys, in 16-bit keys of one kv_head (a float32 key counts as two):
// kBeginKeys to begin, kHeadKeys for each kv_head (load its queries, write its result), kMergeKeys to wait for the
// other partials, kPartialKeys for each partial and kv_head read from the cache of another core.
constexpr int64_t kBeginKeys = 32, kHeadKeys = 16, kMergeKeys = 64, kPartialKeys = 8;
constexpr int64_t kFewestSmallKeys = 32;  // of a split

constexpr int64_t kSplitAlign = 16;            // keys; splits begin at multiples of it
constexpr int64_t kMinSplitKeys = 256;         // a shorter split costs more to merge than it saves
constexpr int64_t kDeterministicSplit = 1024;  // keys

// At most, where rows read keys in place: float32 sums of so many equal numbers are right to 0.2 %, of a million to 3.
constexpr int64_t kLongestSplit = int64_t(64) << 10;  // keys

// Floats of a request's partials, where its cuts do not depend on the threads: 32 MiB at most. Prompts would need
// gigabytes, and have items enough for all threads without splits.
constexpr int64_t kRequestPartials = int64_t(8) << 20;

// Bytes of a task that reads from memory, at least about: each task begins with keys that nothing has fetched.
constexpr int64_t kTaskBytes = int64_t(8) << 20;

// The more threads there are, the likelier one of them is late or slow. So where rows are few and memory bounds the
// call, splits get shorter and shorter (guided self-scheduling): each has 1 / (kTaskShares * threads) of what is left,
// down to kLastTaskBytes. The first tasks are long, so there are few; the last are short, so all threads end together.
constexpr int64_t kManyThreads = 3, kFewRows = 16;
constexpr int64_t kTaskShares = 2;
constexpr int64_t kLastTaskBytes = int64_t(512) << 10;
constexpr int64_t kLastTaskKeys = 64;

constexpr int64_t kMaxTasksPerThread = 3;
constexpr int64_t kMaxSplitsPerThread = 4;  // of one item

// Items of many rows are made smaller, down to Products::fewest_rows, for a thread to get kItemsPerThread of them: with
// one or two the slowest core holds up the call.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kDeterministicRows = 512;  // of an item, at most, where the threads may not decide

// Multiply-adds from which on a call is worth waking threads for (kTeamWork; more in tiles in place, which are faster),
// and those of each thread that takes part (kThreadWork, once more for the wait until all are there). What a row costs
// beside its keys counts as kRowKeys keys.
constexpr int64_t kTeamWork = int64_t(1) << 19, kTeamWorkInTiles = int64_t(1) << 20;
constexpr int64_t kThreadWork = int64_t(1) << 17;
constexpr int64_t kRowKeys = 16;

// How many keys rows of each request see, and of all together: a window, a chunk or padding hides the others, which
// then cost nothing.
struct SeenKeys {
  std::vector<int64_t> of_request;
  int64_t all = 0;

  explicit SeenKeys(const Problem& p) {
    of_request.reserve(p.batch);
    for (int64_t b = 0; b < p.batch; ++b) {
      const Request r = request_of(p, b);
      const KvRange keys = keys_of_tokens(p, r, 0, r.q_len);
      of_request.push_back(keys.end - keys.begin);
      all += of_request.back();
    }
  }
};

// The most rows of an item: where the kv_heads share a walk, and where each walks alone.
struct ItemRows {
  int64_t shared, alone;
};

ItemRows rows_of_items(const Problem& p, const Products& products, int64_t threads) {
  const int64_t step = products.row_step, by_sums = products.most_sums / p.head_dim_v;
  const int64_t most = pd_min(products.most_rows, pd_ceil_div(by_sums, step) * step);
  const auto whole_steps = [step](int64_t rows) { return pd_max(step, rows / step * step); };
  int64_t alone = most;
  if (p.deterministic) {
    alone = kDeterministicRows;
  } else if (threads > 1) {
    int64_t rows = 0;
    for (int64_t b = 0; b < p.batch; ++b) rows += request_of(p, b).q_len * p.group * p.kv_heads;
    alone = pd_max(products.fewest_rows, rows / (threads * kItemsPerThread));
  }
  return {whole_steps(most), whole_steps(pd_min(most, alone))};
}

// Cuts the rows and kv_heads of request b into items. `like` has what all items of a call have in common.
void add_items(const Problem& p, const ItemRows& most, int64_t b, int64_t max_heads, const Item& like,
               std::vector<Work>& works) {
  const Request r = request_of(p, b);
  const int64_t rows = r.q_len * p.group;
  if (rows == 0) return;
  const bool shared = rows * p.kv_heads <= kSharedRows;
  const int64_t heads = shared ? pd_max(1, pd_min(max_heads, kSlotBytes / key_bytes(p, 1))) : 1;
  const int64_t item_rows = shared ? most.shared : most.alone;
  const size_t first = works.size(), items = pd_ceil_div(rows, item_rows);  // items: of the first kv_heads
  if (works.empty()) works.reserve(items * pd_ceil_div(p.kv_heads, heads));
  // The last rows of a causal problem see the most keys: they go first.
  for (int64_t end = rows; end > 0; end -= pd_min(end, item_rows)) {
    Work work = {};
    work.item = like;
    work.item.batch = b;
    work.item.kv_head_end = pd_min(p.kv_heads, heads);
    work.item.row_begin = pd_max(0, end - item_rows);
    work.item.row_end = end;
    work.item.keys = keys_of_tokens(p, r, work.item.row_begin / p.group, pd_ceil_div(end, p.group));
    works.push_back(work);
  }
  for (int64_t h = heads; h < p.kv_heads; h += heads)
    for (size_t item = 0; item < items; ++item) {
      Work work = works[first + item];
      work.item.kv_head_begin = h;
      work.item.kv_head_end = pd_min(p.kv_heads, h + heads);
      works.push_back(work);
    }
}

// How many of the threads are worth waking.
int64_t useful_threads(const Problem& p, const Products& products, const SeenKeys& seen, int64_t threads) {
  const int64_t rows = p.max_q_len * p.group;
  const bool in_tiles = rows >= products.min_tile_rows && rows <= products.most_tile_rows;
  const int64_t team_work = in_tiles ? kTeamWorkInTiles : kTeamWork;
  int64_t work = 0;
  for (int64_t b = 0; b < p.batch && work < team_work + threads * kThreadWork; ++b)
    work += (seen.of_request[b] + kRowKeys) * request_of(p, b).q_len * p.q_heads * (p.head_dim + p.head_dim_v);
  return work < team_work ? 1 : pd_min(threads, work / kThreadWork - 1);
}

// How a small call is cut: into items of `heads` kv_heads, and those into splits for so many threads (1: no splits).
struct SmallCut {
  int64_t heads, threads;
};

// The number of splits of an item of a small call, and what the task of one takes, in keys.
struct SmallSplits {
  int64_t splits, task_cost;
};

// The number of splits with the shortest task, up to the item's share of the threads. More splits have fewer keys each,
// but whoever merges reads more partials.
SmallSplits split_small(const Problem& p, const Kernel& kernel, const SeenKeys& seen, const SmallCut& cut,
                        int64_t keys) {
  const int64_t slot_bytes = key_bytes(p, p.kv_heads), items = pd_ceil_div(p.kv_heads, cut.heads);
  const int64_t key_cost = p.cache.dtype == DType::kFloat32 ? 2 : 1;
  const int64_t most = pd_min(keys / kFewestSmallKeys, cut.threads * keys / (pd_max(seen.all, 1) * items));
  SmallSplits best = {};
  for (int64_t splits = 1; splits <= pd_max(1, most); ++splits) {
    const int64_t part = splits == 1 ? keys : pd_ceil_div(keys, splits * kSplitAlign) * kSplitAlign;
    const int64_t percent = cut.heads < p.kv_heads ? kernel.part_of_slot.percent_of(part * slot_bytes) : 0;
    const int64_t head = part * key_cost * (100 + percent) / 100 + kHeadKeys;
    const int64_t merge = splits == 1 ? 0 : kMergeKeys + kPartialKeys * cut.heads * splits;
    const int64_t task_cost = kBeginKeys + cut.heads * head + merge;
    if (splits == 1 || task_cost < best.task_cost) best = {splits, task_cost};
  }
  return best;
}

// An estimate of when the last thread ends, in keys. `found` has room for every request.
int64_t end_of_small(const Problem& p, const Kernel& kernel, const SeenKeys& seen, const SmallCut& cut, int64_t threads,
                     std::vector<SmallSplits>& found) {
  const int64_t items = pd_ceil_div(p.kv_heads, cut.heads);
  int64_t longest = 0, all = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    found[b] = split_small(p, kernel, seen, cut, seen.of_request[b]);
    longest = pd_max(longest, found[b].task_cost);
    all += items * found[b].splits * found[b].task_cost;
  }
  // A thread that gets two of the longer tasks ends when both are done; tasks of less than half fill what is left.
  int64_t long_tasks = 0, shortest_long = longest;
  for (const SmallSplits& item : found) {
    if (2 * item.task_cost <= longest) continue;
    long_tasks += items * item.splits;
    shortest_long = pd_min(shortest_long, item.task_cost);
  }
  const int64_t rounds = pd_ceil_div(long_tasks, threads);
  return pd_max(pd_max(longest, rounds * shortest_long), pd_ceil_div(all, threads));
}

// The cut that ends first. Of equal ones that with the most heads, which reads longer pieces.
SmallCut cut_small(const Problem& p, const Kernel& kernel, const SeenKeys& seen, int64_t threads) {
  SmallCut best = {p.kv_heads, 1};
  if (threads == 1) return best;
  int64_t first_end = std::numeric_limits<int64_t>::max();
  std::vector<SmallSplits> found(p.batch);
  for (int64_t items = 1; items <= p.kv_heads; ++items) {
    const int64_t heads = pd_ceil_div(p.kv_heads, items);
    if (pd_ceil_div(p.kv_heads, heads) < items) continue;
    for (const SmallCut cut : {SmallCut{heads, 1}, SmallCut{heads, threads}}) {
      const int64_t end = end_of_small(p, kernel, seen, cut, threads, found);
      if (end < first_end) best = cut;
      first_end = pd_min(first_end, end);
    }
  }
  return best;
}

// kv_heads that share a walk: all of them, unless their keys cannot be cut into a task for every thread.
int64_t most_heads(const Problem& p, const SeenKeys& seen, int64_t threads) {
  if (p.deterministic || threads == 1) return p.kv_heads;
  int64_t splits = 0;
  for (int64_t b = 0; b < p.batch && splits < threads; ++b) splits += pd_max(1, seen.of_request[b] / kMinSplitKeys);
  return pd_max(1, p.kv_heads / pd_ceil_div(threads, pd_max(1, splits)));
}

// Splits of the keys of a request whose partial results fit into kRequestPartials. It sees nothing but the request.
int64_t most_splits(const Problem& p, int64_t b) {
  return pd_max(1, kRequestPartials / (request_of(p, b).q_len * p.q_heads * partial_floats(p.head_dim_v)));
}

int64_t fixed_splits(const Problem& p, const Item& item) {
  // Splits beyond one per kSplitAlign keys would be empty.
  const int64_t splits = p.num_splits > 0 ? pd_min(p.num_splits, pd_ceil_div(item.num_keys(), kSplitAlign))
                                          : pd_ceil_div(item.num_keys(), kDeterministicSplit);
  return pd_max(1, pd_min(splits, most_splits(p, item.batch)));
}

int64_t even_splits(const Item& item, const Products& products, int64_t task_cost, int64_t threads) {
  const int64_t most = pd_min(item.num_keys() / kMinSplitKeys, kMaxSplitsPerThread * threads);
  const bool in_place = item.rows() <= kFewRows || item.rows() < products.min_packed_rows;
  const int64_t least = in_place ? pd_ceil_div(item.num_keys(), kLongestSplit) : 1;
  return pd_max(pd_max(1, least), pd_min(pd_ceil_div(cost_of(item), pd_max(task_cost, 1)), most));
}

// Equal shares.
void split_evenly(const Item& item, int64_t num_splits, std::vector<KvRange>& splits) {
  for (int64_t split = 0; split < num_splits; ++split)
    splits.push_back(num_splits == 1 ? item.keys : split_keys(item.keys, split, num_splits, kSplitAlign));
}

// Keys of the shortest share, where `task_cost` is a thread's share of the call.
int64_t fewest_keys(const Problem& p, const Item& item, int64_t task_cost) {
  return pd_max(kLastTaskKeys, pd_min(kLastTaskBytes / key_bytes(p, item.heads()), task_cost / cost_of(item, {0, 1})));
}

// Shares of the work that is `left` of the call, this item included; the shortest has `fewest` keys or is the item's
// end.
void split_falling(const Item& item, int64_t fewest, int64_t threads, int64_t left, std::vector<KvRange>& splits) {
  const int64_t cost_per_key = cost_of(item, {0, 1});
  for (int64_t begin = item.keys.begin, end; begin < item.keys.end; begin = end) {
    const int64_t share = left / (kTaskShares * threads) / cost_per_key;
    const int64_t keys = pd_max(fewest, pd_min(share, kLongestSplit));
    end = pd_ceil_div(begin + keys, kSplitAlign) * kSplitAlign;
    if (end + fewest / 2 > item.keys.end) end = item.keys.end;
    splits.push_back({begin, end});
    left -= cost_of(item, {begin, end});
  }
}

// How the keys of items are cut. The table in cpu.md says the same in words.
enum class Cut {
  kFixed,    // num_splits or deterministic: by the request alone
  kSmall,    // keys that the processor's caches may hold: SmallCut
  kFalling,  // few rows and many threads: shorter and shorter
  kEven,     // the rest, and what of a small call is a prompt
};

Cut cut_of(const Problem& p, const std::vector<Work>& works, bool small, int64_t threads) {
  if (p.deterministic || p.num_splits > 0) return Cut::kFixed;
  if (small) return Cut::kSmall;
  const auto few_rows = [](const Work& work) { return work.item.rows() <= kFewRows; };
  return threads >= kManyThreads && std::all_of(works.begin(), works.end(), few_rows) ? Cut::kFalling : Cut::kEven;
}

int64_t groups_of_merge(int64_t num_splits) {
  int64_t groups = 0;
  while (num_splits > 1) groups += num_splits = pd_ceil_div(num_splits, kMergeGroup);
  return groups;
}

}  // namespace

Plan make_plan(const Problem& p, const Kernel& kernel, int64_t threads) {
  Plan plan;
  const Products products = kernel.products(p);
  const SeenKeys seen(p);
  plan.threads = threads = useful_threads(p, products, seen, threads);
  const int64_t bytes = seen.all * key_bytes(p, p.kv_heads);
  Item like = {};
  like.small = !p.deterministic && bytes < kResidentBytes;
  like.maybe_cached = bytes < kCachedBytes;
  like.walk = kernel.walk;
  const SmallCut small = like.small ? cut_small(p, kernel, seen, threads) : SmallCut{};
  const int64_t max_heads = like.small ? small.heads : most_heads(p, seen, threads);
  const ItemRows most = rows_of_items(p, products, threads);
  for (int64_t b = 0; b < p.batch; ++b) add_items(p, most, b, max_heads, like, plan.works);
  int64_t left = 0, whole_heads = 0;
  for (const Work& work : plan.works) left += cost_of(work.item);
  plan.splits.reserve(plan.works.size());
  plan.tasks.reserve(plan.works.size());
  const Cut cut = cut_of(p, plan.works, like.small, threads);
  const int64_t tasks_per_thread =
      cut == Cut::kFalling ? 1 : pd_max(1, pd_min(kMaxTasksPerThread, bytes / (threads * kTaskBytes)));
  const int64_t task_cost = threads > 1 ? pd_ceil_div(left, threads * tasks_per_thread) : left;
  for (size_t w = 0; w < plan.works.size(); ++w) {
    Work& work = plan.works[w];
    const Item& item = work.item;
    work.first_split = static_cast<int64_t>(plan.splits.size());
    if (cut == Cut::kFixed) {
      split_evenly(item, fixed_splits(p, item), plan.splits);
    } else if (cut == Cut::kSmall && item.rows() * p.kv_heads <= kSharedRows) {
      split_evenly(item, split_small(p, kernel, seen, small, item.num_keys()).splits, plan.splits);
    } else if (cut == Cut::kFalling && item.num_keys() > 0) {
      split_falling(item, fewest_keys(p, item, task_cost), threads, left, plan.splits);
    } else {
      split_evenly(item, even_splits(item, products, task_cost, threads), plan.splits);
    }
    left -= cost_of(work.item);
    work.num_splits = static_cast<int64_t>(plan.splits.size()) - work.first_split;
    work.partial_offset = plan.partial_floats;
    work.first_group = plan.merge_groups;
    plan.merge_groups += groups_of_merge(work.num_splits);
    if (work.num_splits > 1) plan.partial_floats += work.num_splits * partial_floats(work.item, p.head_dim_v);
    // Items of the same rows need the same scratch memory if they have as many kv_heads: one of them is enough to ask.
    if (work.item.kv_head_begin == 0) whole_heads = work.item.heads();
    if (work.item.kv_head_begin == 0 || work.item.heads() != whole_heads)
      plan.scratch_bytes = pd_max(plan.scratch_bytes, kernel.scratch_bytes(p, work.item));
    for (int64_t split = 0; split < work.num_splits; ++split)
      plan.tasks.push_back({static_cast<int64_t>(w), split, cost_of(work.item, plan.splits[work.first_split + split])});
  }
  // Longest first, so that no thread starts a long task when the others are done.
  const auto longer = [](const Task& a, const Task& b) { return a.cost > b.cost; };
  if (!std::is_sorted(plan.tasks.begin(), plan.tasks.end(), longer))
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(), longer);
  return plan;
}

}  // namespace paged_attn
