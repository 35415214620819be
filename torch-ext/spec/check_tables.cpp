#include "check_tables.h"

#include <cstdlib>
#include <cstring>
#include <limits>

#include "request.h"

namespace paged_attn {
namespace {

void check_cu_seqlens(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t total) {
  if (!cu_seqlens) return;
  if (cu_seqlens[0] != 0) bad_value(name, 0, cu_seqlens[0], "0");
  for (int64_t b = 0; b < batch; ++b)
    if (cu_seqlens[b + 1] < cu_seqlens[b])
      bad_value(name, b + 1, cu_seqlens[b + 1], "at least the entry before it, " + std::to_string(cu_seqlens[b]));
  if (cu_seqlens[batch] > total)
    bad_value(name, batch, cu_seqlens[batch], "at most the number of tokens, " + std::to_string(total));
}

// How many keys of request b the cache can hold.
int64_t room_of(const Cache& c, int64_t b) {
  if (c.block_table) return c.max_pages * c.page_size;
  if (c.cu_seqlens_k) return c.cu_seqlens_k[b + 1] - c.cu_seqlens_k[b];
  return c.page_size;
}

void check_request(const Problem& p, int64_t b) {
  const Cache& c = p.cache;
  const Request r = request_of(p, b);
  if (p.cu_seqlens_q && r.q_len > p.max_q_len)
    throw std::runtime_error("max_seqlen_q: expected at least the " + std::to_string(r.q_len) +
                             " tokens of batch entry " + std::to_string(b) + ", got " + std::to_string(p.max_q_len));
  if (r.old_len < 0) bad_value("cache_seqlens", b, r.old_len, "at least 0");
  if (r.leftpad < 0) bad_value("cache_leftpad", b, r.leftpad, "at least 0");

  // An entry without keys only pads the batch: its row of the cache and its rotary positions are never read.
  const bool idle = r.kv_len == 0;
  if (!idle && !c.cu_seqlens_k && !p.append.slot_mapping) {
    const int64_t rows = c.block_table ? c.table_rows : c.num_pages, row = cache_row(c, b);
    if (row < 0 || row >= rows)
      bad_value(c.cache_batch_idx ? "cache_batch_idx" : "batch", b, row, "a row in [0, " + std::to_string(rows) + ")");
  }
  if (!p.append.slot_mapping && r.kv_len > room_of(c, b)) {
    const std::string added = r.new_len ? " minus the " + std::to_string(r.new_len) + " new tokens" : "";
    bad_value("cache_seqlens", b, r.old_len,
              std::string("at most ") + (c.block_table ? "max_pages * page_size = " : "the cache's ") +
                  std::to_string(room_of(c, b)) + added);
  }
  if (!idle && p.rotary.cos) {
    if (p.rotary.seqlens && p.rotary.seqlens[b] < 0) bad_value("rotary_seqlens", b, p.rotary.seqlens[b], "at least 0");
    const int64_t first = p.rotary.seqlens ? p.rotary.seqlens[b] : r.old_len;
    const int64_t last = first + pd_max(r.new_len, is_local(p) ? r.q_len : pd_min(r.q_len, 1)) - 1;
    if (last >= p.rotary.rotary_len && last >= first)
      bad_value("rotary_cos", b, p.rotary.rotary_len,
                "at least " + std::to_string(last + 1) + " positions for this batch entry");
  }
}

// Pages that hold a key which some query row sees. Others are never read, so they may be anything.
void check_visible_pages(const Problem& p, int64_t b) {
  const Cache& c = p.cache;
  if (!c.block_table) return;
  const Request r = request_of(p, b);
  const KvRange keys = keys_of_tokens(p, r, 0, r.q_len);
  if (keys.begin == keys.end) return;
  const int32_t* pages = c.block_table + cache_row(c, b) * c.block_table_stride;
  const int64_t begin = keys.begin / c.page_size, end = pd_ceil_div(keys.end, c.page_size);
  // With pages of one slot there are millions of them, so the first loop has no branch and is vectorised: the highest
  // bit of page | (last - page) is set where page is negative or greater than last.
  const uint32_t last = static_cast<uint32_t>(pd_min(c.num_pages - 1, std::numeric_limits<int32_t>::max()));
  uint32_t bits = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t page = static_cast<uint32_t>(pages[i]);
    bits |= page | (last - page);
  }
  if (bits >> 31 == 0) return;
  for (int64_t i = begin; i < end; ++i) check_page(c, b, i, pages[i]);
}

}  // namespace

void check_values(const Problem& p) {
  check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.total_q);
  check_cu_seqlens("cu_seqlens_k", p.cache.cu_seqlens_k, p.batch, p.cache.page_size);
  check_cu_seqlens("cu_seqlens_k_new", p.append.cu_seqlens_k_new, p.batch, p.append.total_new);
  for (int64_t b = 0; b < p.batch; ++b) check_request(p, b);
  for (int64_t b = 0; b < p.batch; ++b) check_visible_pages(p, b);
}

void check_new_places(const Problem& p) {
  const Cache& c = p.cache;
  if (!p.append.k) return;
  const Optional<const int64_t>& slots = p.append.slot_mapping;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request r = request_of(p, b);
    for (int64_t t = 0; t < r.new_len; ++t) {
      if (slots) {
        const int64_t i = new_token_number(p, r, b, t);
        if (slots[i] >= c.num_pages * c.page_size)
          bad_value("slot_mapping", i, slots[i],
                    "less than num_pages * page_size = " + std::to_string(c.num_pages * c.page_size));
      } else {
        const int64_t key = r.old_len + t;
        check_page(c, b, key / c.page_size, slot_of_key(c, b, key).page);
      }
    }
  }
}

bool checks_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("PAGED_ATTN_CHECK");
    return value && strcmp(value, "") != 0 && strcmp(value, "0") != 0;
  }();
  return enabled;
}

}  // namespace paged_attn
