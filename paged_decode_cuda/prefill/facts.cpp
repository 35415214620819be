#include "facts.h"

#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr int64_t kMostE4m3Dims = 128;
constexpr int64_t kShortWindow = 512;  // keys

// If every request is as long as the longest one is said to be.
int64_t expected_tiles(const Problem& p, int rows) {
  return p.batch * pd_ceil_div(longest_query(p) * p.group, rows) * p.kv_heads;
}

}  // namespace

bool in_8_bits(const Problem& p) {
  return p.q_dtype == DType::kFloat8E4M3 && p.cache.dtype == DType::kFloat8E4M3 &&
         pd_max(p.head_dim, p.head_dim_v) <= kMostE4m3Dims;
}

bool widens(const Problem& p) { return dtype_bytes(p.cache.dtype) == 1 && !in_8_bits(p); }

bool is_even(const Problem& p) { return !p.cu_seqlens_q || 10 * p.total_q >= 9 * p.batch * longest_query(p); }

bool is_mixed(const Problem& p) { return p.cu_seqlens_q && 2 * p.total_q <= p.batch * longest_query(p); }

bool has_prompts(const Problem& p) {
  const bool alone = p.cache.cu_seqlens_k && p.total_q == p.cache.page_size;
  const int64_t queries = longest_query(p), keys = alone ? queries : p.max_kv_len;
  return p.window_right == 0 && keys <= 2 * queries;
}

bool has_short_window(const Problem& p) {
  const int64_t window = p.window_left + p.window_right;
  return p.window_left >= 0 && p.window_right >= 0 && window <= kShortWindow && window < p.max_kv_len;
}

int64_t most_tiles(const Problem& p, int rows) {
  if (!p.cu_seqlens_q) return expected_tiles(p, rows);
  // The last tile of every request has a row at least.
  const int64_t unused = pd_min(p.batch, p.total_q) * (rows - 1);
  return (p.total_q * p.group + unused) / rows * p.kv_heads;
}

int64_t likely_tiles(const Problem& p, int rows) { return pd_min(most_tiles(p, rows), expected_tiles(p, rows)); }

int64_t usual_tiles(const Problem& p, int rows) {
  if (is_even(p)) return likely_tiles(p, rows);
  const int64_t tiles = (p.total_q * p.group + p.batch * rows / 2) / rows;
  return pd_max(tiles, pd_min(p.batch, p.total_q)) * p.kv_heads;
}

}  // namespace paged_attn
