// Which keys a query row may read, and which of them belong to one split. Positions count from the
// start of the request's keys. Plain integers only: this file is compiled for every device.
#pragma once

#include "qualifiers.h"

namespace paged_attn {

typedef PD_POSITION position_t;

struct KvRange {
  position_t begin, end;  // keys [begin, end); begin <= end
};

PD_FN int64_t pd_min(int64_t a, int64_t b) { return a < b ? a : b; }
PD_FN int64_t pd_max(int64_t a, int64_t b) { return a > b ? a : b; }
PD_FN int64_t pd_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

PD_FN position_t pd_later(position_t a, position_t b) { return a > b ? a : b; }
PD_FN position_t pd_earlier(position_t a, position_t b) { return a < b ? a : b; }

// Which chunk a position lies in: the quotient rounded down. A device that divides in a way of its own passes that.
struct ChunkOf {
  position_t attention_chunk;
  PD_METHOD position_t operator()(position_t x) const {
    return (x >= 0 ? x : x - attention_chunk + 1) / attention_chunk;
  }
};

// q_pos = kv_len - q_len + token: the bottom-right aligned position of the row. Chunks are counted from leftpad, the
// first key that exists; a row before it (chunk -1 or lower) shares its chunk with no key.
template <class Divide>
PD_FN KvRange visible_keys(position_t q_pos, position_t kv_len, position_t leftpad, position_t window_left,
                           position_t window_right, position_t attention_chunk, Divide chunk_of) {
  KvRange r = {leftpad, kv_len};
  if (window_left >= 0) r.begin = pd_later(r.begin, q_pos - window_left);
  if (window_right >= 0) r.end = pd_earlier(r.end, q_pos + window_right + 1);
  if (attention_chunk > 0) {
    const position_t chunk_begin = leftpad + chunk_of(q_pos - leftpad) * attention_chunk;
    r.begin = pd_later(r.begin, chunk_begin);
    r.end = pd_earlier(r.end, chunk_begin + attention_chunk);
  }
  r.begin = pd_later(r.begin, 0);
  r.end = pd_later(r.begin, r.end);
  return r;
}

PD_FN KvRange visible_keys(position_t q_pos, position_t kv_len, position_t leftpad, position_t window_left,
                           position_t window_right, position_t attention_chunk) {
  return visible_keys(q_pos, kv_len, leftpad, window_left, window_right, attention_chunk, ChunkOf{attention_chunk});
}

// The share of `r` that belongs to one split. Cuts fall on multiples of `align` keys, counted from
// the start of the request, so that no page is read by two splits. A split may be empty.
PD_FN KvRange split_keys(KvRange r, position_t split, position_t num_splits, position_t align) {
  position_t first = r.begin / align;
  position_t units = (r.end + align - 1) / align - first;
  position_t per_split = (units + num_splits - 1) / num_splits;
  position_t begin = (first + split * per_split) * align;
  KvRange s;
  s.begin = pd_earlier(r.end, pd_later(r.begin, begin));
  s.end = pd_later(s.begin, pd_earlier(r.end, begin + per_split * align));
  return s;
}

}  // namespace paged_attn
