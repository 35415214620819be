// Which keys a query row may read, and which of them belong to one split. Positions count from the
// start of the request's keys. Plain integers only: this file is compiled for every device.
#pragma once

#include <stdint.h>

#ifndef PD_FN
#define PD_FN static inline
#endif

namespace paged_attn {

struct KvRange {
  int64_t begin, end;  // keys [begin, end); begin <= end
};

PD_FN int64_t pd_min(int64_t a, int64_t b) { return a < b ? a : b; }
PD_FN int64_t pd_max(int64_t a, int64_t b) { return a > b ? a : b; }
PD_FN int64_t pd_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Largest multiple of `step` that is not above `x`; x may be negative (a query before the first key).
PD_FN int64_t pd_round_down(int64_t x, int64_t step) { return (x >= 0 ? x : x - step + 1) / step * step; }

// q_pos = kv_len - q_len + token: the bottom-right aligned position of the row.
PD_FN KvRange visible_keys(int64_t q_pos, int64_t kv_len, int64_t leftpad, int64_t window_left, int64_t window_right,
                           int64_t attention_chunk) {
  KvRange r = {leftpad, kv_len};
  if (window_left >= 0) r.begin = pd_max(r.begin, q_pos - window_left);
  if (window_right >= 0) r.end = pd_min(r.end, q_pos + window_right + 1);
  if (attention_chunk > 0) {
    int64_t chunk_begin = pd_round_down(q_pos, attention_chunk);
    r.begin = pd_max(r.begin, chunk_begin);
    r.end = pd_min(r.end, chunk_begin + attention_chunk);
  }
  r.begin = pd_max(r.begin, 0);
  r.end = pd_max(r.begin, r.end);
  return r;
}

// The share of `r` that belongs to one split. Cuts fall on multiples of `align` keys, counted from
// the start of the request, so that no page is read by two splits. A split may be empty.
PD_FN KvRange split_keys(KvRange r, int64_t split, int64_t num_splits, int64_t align) {
  int64_t first = r.begin / align;
  int64_t units = pd_ceil_div(r.end, align) - first;
  int64_t per_split = pd_ceil_div(units, num_splits);
  int64_t begin = (first + split * per_split) * align;
  KvRange s;
  s.begin = pd_min(r.end, pd_max(r.begin, begin));
  s.end = pd_max(s.begin, pd_min(r.end, begin + per_split * align));
  return s;
}

}  // namespace paged_attn
