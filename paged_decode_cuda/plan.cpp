#include "plan.h"

#include <numeric>

#include "layout.h"

namespace paged_attn {

namespace {

constexpr int kMaxSplits = 256;
constexpr int kCutRows = 16384;  // of a request and kv_head, counted once for each split: bounds their partials

// Places of keys count pieces of 16 bytes in 32 bits.
bool fits_32_bits(const Problem& p) {
  const Cache& c = p.cache;
  const int64_t pages = pd_max(c.num_pages, 1) - 1, slots = pd_max(c.page_size, 1) - 1, heads = p.kv_heads - 1;
  const int64_t last = pd_max(pages * c.k_stride_page + slots * c.k_stride_slot + heads * c.k_stride_head,
                              pages * c.v_stride_page + slots * c.v_stride_slot + heads * c.v_stride_head);
  return last * dtype_bytes(c.dtype) / 16 < int64_t{UINT32_MAX};
}

// Of all requests, see packed_begin_block() for packed ones.
int64_t fixed_blocks(const Problem& p, const Plan& plan, int64_t splits) {
  int64_t blocks = plan.items * splits;
  if (plan.request_blocks > 0) blocks = pd_min(blocks, plan.request_blocks * p.batch + plan.items);
  return blocks * p.kv_heads;
}

}  // namespace

int64_t said_query(const Problem& p) {
  return p.cu_seqlens_q ? pd_min(pd_max(p.max_q_len, 1), p.total_q) : p.max_q_len;
}

// With cu_seqlens_q max_q_len is a hint, and may be no more than total_q, the sum of all. Then it says nothing of the
// longest one, and the average stands in.
int64_t longest_query(const Problem& p) {
  const int64_t said = said_query(p);
  const bool says_nothing = p.cu_seqlens_q && said == p.total_q && p.batch > 1;
  return says_nothing ? pd_ceil_div(p.total_q, p.batch) : said;
}

int64_t most_keys(const Problem& p, int64_t rows) {
  if (p.window_left < 0 || p.window_right < 0) return p.max_kv_len;
  return pd_min(p.max_kv_len, p.window_left + p.window_right + pd_ceil_div(rows, p.group));
}

bool hides_lengths(const Problem& p) { return p.deterministic && p.cu_seqlens_q; }

bool has_few_rows(const Problem& p, int64_t most) { return !hides_lengths(p) && longest_query(p) * p.group <= most; }

void plan_tables(const Problem& p, int tile_shift, Plan& plan) {
  plan.tile_shift = tile_shift;
  plan.page_size = FastDivisor(p.cache.block_table ? p.cache.page_size : 1);
  plan.group = FastDivisor(p.group);
  plan.kv_heads = FastDivisor(p.kv_heads);
  plan.chunk = FastDivisor(pd_max(p.attention_chunk, 1));
  plan.blocks_each.divisor = 0;
  plan.partial_quads = static_cast<int32_t>(output_quads(p));
  plan.max_keys = static_cast<int32_t>(capacity_of(p));
  plan.max_pages = p.cache.block_table ? static_cast<int32_t>(p.cache.max_pages) : 0;
  plan.whole_runs = p.cache.block_table && p.cache.page_size % kRunKeys == 0;
}

void plan_pieces(const Problem& p, Plan& plan) {
  const Cache& c = p.cache;
  const int64_t elements = 16 / dtype_bytes(c.dtype);
  plan.k_page_pieces = static_cast<uint32_t>(c.k_stride_page / elements);
  plan.k_slot_pieces = static_cast<uint32_t>(c.k_stride_slot / elements);
  plan.k_head_pieces = static_cast<uint32_t>(c.k_stride_head / elements);
  plan.v_page_pieces = static_cast<uint32_t>(c.v_stride_page / elements);
  plan.v_slot_pieces = static_cast<uint32_t>(c.v_stride_slot / elements);
  plan.v_head_pieces = static_cast<uint32_t>(c.v_stride_head / elements);
}

void plan_direct_rows(const Problem& p, int row_shift, int64_t row_tiles, Plan& plan) {
  plan.row_shift = row_shift;
  plan.rows_per_tile = 1 << row_shift;
  plan.row_tiles = FastDivisor(row_tiles);
  plan.items = plan.direct_items = static_cast<int32_t>(p.batch * row_tiles);
}

void plan_packed_rows(const Problem& p, int row_shift, Plan& plan) {
  plan_direct_rows(p, row_shift, 0, plan);
  plan.items = static_cast<int32_t>(packed_tiles(p, row_shift));
}

void plan_all_rows(const Problem& p, int row_shift, Plan& plan) {
  if (p.cu_seqlens_q) {
    plan_packed_rows(p, row_shift, plan);
  } else {
    plan_direct_rows(p, row_shift, pd_ceil_div(p.max_q_len * p.group, int64_t{1} << row_shift), plan);
  }
}

int64_t packed_tiles(const Problem& p, int row_shift) {
  return p.batch == 0 ? 0 : ((p.total_q * p.group) >> row_shift) + p.batch;
}

int64_t most_given_tiles(const Problem& p, int64_t processors, int row_shift) {
  return pd_max(processors, 2 * packed_tiles(p, row_shift));
}

void plan_fixed_splits(const Problem& p, int split_keys, int64_t limit, Plan& plan) {
  const int64_t keys = pd_max(capacity_of(p), 1);
  const int64_t pairs = plan.items * p.kv_heads;
  int64_t splits = pd_min(pd_ceil_div(keys, split_keys), limit);
  if (p.num_splits > 0) splits = pd_min(p.num_splits, pd_ceil_div(keys, int64_t{1} << plan.tile_shift));
  splits = pd_min(splits, kMaxSplits);
  // Each cut of many rows takes memory, and nothing else bounds what the caller asks for. Packed requests find out for
  // themselves how many rows they have.
  const bool unbounded = p.num_splits > 0 || p.deterministic;
  const int64_t most_blocks = kCutRows >> plan.row_shift, tiles = plan.row_tiles.divisor;
  if (unbounded && !p.cu_seqlens_q) splits = pd_min(splits, most_blocks / pd_max(tiles, 1));
  splits = pd_max(splits, 1);
  if (unbounded && p.cu_seqlens_q && splits > 1) plan.request_blocks = static_cast<int32_t>(most_blocks);
  int64_t blocks = fixed_blocks(p, plan, splits);
  if (blocks > INT32_MAX) {
    // A grid has fewer than 2^31 blocks. So many partials fit into no memory, so this decides nothing else.
    splits = pd_max(INT32_MAX / pairs, 1);
    blocks = fixed_blocks(p, plan, splits);
  }
  if (p.num_splits > 0) plan.num_splits = static_cast<int32_t>(splits);
  plan.split_tiles = split_keys >> plan.tile_shift;
  plan.max_splits = FastDivisor(splits);
  plan.blocks = FastDivisor(blocks);
}

bool may_balance(const Problem& p, int64_t items, int tile_shift, int pair_cost) {
  const int64_t most = (capacity_of(p) >> tile_shift) + 2 + pair_cost;
  return p.num_splits == 0 && !p.deterministic && items <= kMaxBalancedItems && items * p.kv_heads * most <= INT32_MAX;
}

void plan_balanced_cuts(const Problem& p, int64_t blocks, int pair_cost, int min_units, Plan& plan) {
  plan.blocks = plan.line_blocks = FastDivisor(blocks);
  plan.lines = FastDivisor(1);
  plan.balanced = true;
  plan.max_splits = FastDivisor(1);
  plan.pair_cost = pair_cost;
  plan.min_units = min_units;
  // Should the lengths hardly differ
  const int64_t pairs = plan.items * p.kv_heads, each = blocks / pd_max(pairs, 1);
  plan.whole_pairs = static_cast<int32_t>(pairs / blocks);
  plan.line_pairs = static_cast<int32_t>(pairs % blocks);
  // Hardly a block idle, or the line is better.
  if (10 * each * pairs >= 9 * blocks) plan.blocks_each = FastDivisor(each);
}

void plan_lines(const Problem& p, int64_t blocks, Plan& plan) {
  const int64_t lines = std::gcd(blocks, p.kv_heads);
  plan.lines = FastDivisor(lines);
  plan.line_blocks = FastDivisor(blocks / lines);
}

void plan_basic(const Problem& p, Plan& plan) {
  plan.basic = true;
  plan.table_stride = static_cast<int32_t>(p.cache.block_table_stride);
  plan.new_keys = p.append.k ? static_cast<int32_t>(p.append.seqlen_new) : 0;
  plan.hidden_keys = p.window_right < 0 ? 0 : static_cast<int32_t>(pd_max(p.max_q_len - 1 - p.window_right, 0));
}

const char* pieces_why_not(const Problem& p) {
  const Cache& c = p.cache;
  const int64_t bytes = dtype_bytes(c.dtype), q_bytes = dtype_bytes(p.q_dtype);
  const int64_t piece = 16 / bytes;
  if (p.head_dim % piece != 0 || p.head_dim_v % piece != 0) return "rows of the cache are not whole pieces of 16 bytes";
  if (!aligned(c.k) || !aligned(c.v)) return "k_cache or v_cache does not begin at a multiple of 16 bytes";
  if (!aligned(p.q) || !aligned(p.out)) return "q or out does not begin at a multiple of 16 bytes";
  for (const Dimension& d : cache_dimensions(p)) {
    if (!aligned(d, bytes)) return "a stride of k_cache or v_cache is no multiple of 16 bytes";
    if (d.stride < 0) return "a stride of k_cache or v_cache is negative";
  }
  const QueryDimensions q(p, p.q_stride_batch, p.q_stride_token, p.q_stride_head);
  const QueryDimensions out(p, p.out_stride_batch, p.out_stride_token, p.out_stride_head);
  if (!q.aligned_by(q_bytes)) return "a stride of q is no multiple of 16 bytes";
  if (!out.aligned_by(dtype_bytes(out_dtype(p.q_dtype)))) return "a stride of out is no multiple of 16 bytes";
  return fits_32_bits(p) ? "" : "the cache has 64 GiB or more";
}

int64_t partial_bytes(const Plan& plan, int64_t blocks) {
  return blocks * plan.rows_per_tile * row_words(plan.partial_quads) * static_cast<int64_t>(sizeof(TaggedWord));
}

}  // namespace paged_attn
