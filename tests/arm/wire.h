// A call of the CPU backend as bytes, from a test process (host.cpp) to an Arm process without torch (guest.cpp) and
// back. Both have the layout of Problem in common: little-endian, 64-bit pointers.
//
//   call    Call, Problem, Range[ranges], the bytes of every range
//   answer  Answer, its text, then the bytes of every range that may have been written, if the call succeeded
#pragma once

#include <unistd.h>

#include <stdexcept>

#include "spec/check_tables.h"
#include "spec/problem.h"

namespace paged_attn {

enum class Request : int64_t { kAttend, kExplain, kWrite, kInstructionSet };

struct Call {
  Request request;
  int64_t problem_bytes;  // the size of Problem, for both must agree
  int64_t threads;        // that the plan is made for
  int64_t ranges;
};

// Memory of the sender that tensors lie in; tensors that overlap share one.
struct Range {
  char* begin;
  int64_t bytes;
  int64_t written;  // whether the call may write to it
};

struct Answer {
  int64_t failed;  // then the text is the error's
  int64_t text_bytes;
};

inline void move_bytes(int file, char* data, int64_t bytes, bool out) {
  while (bytes > 0) {
    const ssize_t moved = out ? write(file, data, bytes) : read(file, data, bytes);
    if (moved <= 0) throw std::runtime_error("the connection to the other process broke");
    data += moved;
    bytes -= moved;
  }
}
inline void send(int file, const void* data, int64_t bytes) {
  move_bytes(file, static_cast<char*>(const_cast<void*>(data)), bytes, true);
}
inline void receive(int file, void* data, int64_t bytes) { move_bytes(file, static_cast<char*>(data), bytes, false); }

struct Extent {
  int64_t size, stride;
};

// Elements from the first to the last one of a tensor whose rows have `row` elements.
inline int64_t span(std::initializer_list<Extent> extents, int64_t row) {
  int64_t elements = row;
  for (const Extent& e : extents) elements = e.size == 0 || elements == 0 ? 0 : elements + (e.size - 1) * e.stride;
  return elements;
}

// Calls visit(address, bytes, written) for every tensor that a problem names.
template <typename Visit>
void each_tensor(Problem& p, Visit visit) {
  const bool packed = p.cu_seqlens_q.given, packed_new = p.append.cu_seqlens_k_new.given;
  const int64_t tokens = packed ? p.total_q : p.max_q_len, requests = packed ? 1 : p.batch;
  Cache& c = p.cache;
  Append& a = p.append;
  const bool writes = a.k.given;

  const auto queries = [&](auto& data, int64_t batch, int64_t token, int64_t head, int64_t row, DType type, bool out) {
    if (data) visit(data, span({{requests, batch}, {tokens, token}, {p.q_heads, head}}, row) * dtype_bytes(type), out);
  };
  queries(p.q, p.q_stride_batch, p.q_stride_token, p.q_stride_head, p.head_dim, p.q_dtype, false);
  queries(p.qv.data, p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head, p.head_dim_v, p.q_dtype, false);
  queries(p.out, p.out_stride_batch, p.out_stride_token, p.out_stride_head, p.head_dim_v, out_dtype(p.q_dtype), true);
  queries(p.lse.data, p.lse_stride_batch, 1, p.lse_stride_head, 1, DType::kFloat32, true);

  const auto cache = [&](auto& data, int64_t page, int64_t slot, int64_t head, int64_t row) {
    const int64_t elements = span({{c.num_pages, page}, {c.page_size, slot}, {p.kv_heads, head}}, row);
    if (data) visit(data, elements * dtype_bytes(c.dtype), writes);
  };
  cache(c.k, c.k_stride_page, c.k_stride_slot, c.k_stride_head, p.head_dim);
  cache(c.v, c.v_stride_page, c.v_stride_slot, c.v_stride_head, p.head_dim_v);

  const auto added = [&](auto& data, int64_t batch, int64_t token, int64_t head, int64_t row) {
    const Extent all = {packed_new ? 1 : p.batch, batch}, each = {packed_new ? a.total_new : a.seqlen_new, token};
    if (data) visit(data, span({all, each, {p.kv_heads, head}}, row) * dtype_bytes(a.dtype), false);
  };
  added(a.k.data, a.k_stride_batch, a.k_stride_token, a.k_stride_head, p.head_dim);
  added(a.v.data, a.v_stride_batch, a.v_stride_token, a.v_stride_head, p.head_dim_v);

  const auto floats = [&](auto& data, Extent outer, Extent inner, DType type) {
    if (data) visit(data, span({outer, inner}, 1) * dtype_bytes(type), false);
  };
  const auto per_head = [&](auto& data, int64_t batch, int64_t head) {
    floats(data, {p.batch, batch}, {p.kv_heads, head}, DType::kFloat32);
  };
  per_head(c.k_descale.data, c.k_descale_stride_batch, c.k_descale_stride_head);
  per_head(c.v_descale.data, c.v_descale_stride_batch, c.v_descale_stride_head);
  per_head(p.q_descale.data, p.q_descale_stride_batch, p.q_descale_stride_head);
  floats(p.alibi_slopes.data, {p.alibi_stride_batch ? p.batch : 1, p.alibi_stride_batch}, {p.q_heads, 1},
         DType::kFloat32);
  floats(p.sinks.data, {1, 0}, {p.q_heads, 1}, p.sinks_dtype);
  floats(p.rotary.cos.data, {p.rotary.rotary_len, p.rotary.cos_stride}, {p.rotary.rotary_dim / 2, 1}, p.q_dtype);
  floats(p.rotary.sin.data, {p.rotary.rotary_len, p.rotary.sin_stride}, {p.rotary.rotary_dim / 2, 1}, p.q_dtype);

  fetch_tables(p, [&](auto& table, int64_t elements) {
    if (table) visit(table, elements * int64_t(sizeof *table), false);
  });
}

}  // namespace paged_attn
