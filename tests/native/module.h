// A problem made in Python, for the tests of spec/ and of every device's planner: plain numbers and tables by name.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "spec/problem.h"

namespace py = pybind11;

namespace paged_attn {

// Owns the tables that the problem points to.
struct Made {
  Problem p = {};
  std::deque<std::vector<int32_t>> tables;
  std::deque<std::vector<int64_t>> slots;
};

inline int64_t number(const py::dict& d, const char* name, int64_t otherwise) {
  return d.contains(name) ? d[name].cast<int64_t>() : otherwise;
}

inline Optional<const int32_t> table(Made& made, const py::dict& d, const char* name) {
  if (!d.contains(name) || d[name].is_none()) return {};
  made.tables.push_back(d[name].cast<std::vector<int32_t>>());
  return {made.tables.back().data(), true};
}

inline DType dtype(const py::dict& d, const char* name, const char* otherwise) {
  const std::string text = d.contains(name) ? d[name].cast<std::string>() : otherwise;
  return text == "float32"         ? DType::kFloat32
         : text == "float16"       ? DType::kFloat16
         : text == "float8_e4m3fn" ? DType::kFloat8E4M3
         : text == "float8_e5m2"   ? DType::kFloat8E5M2
                                   : DType::kBFloat16;
}

// Strides are those of contiguous tensors. A tensor that no planner reads stands at an aligned address of no memory.
inline void fill(Made& made, const py::dict& d) {
  Problem& p = made.p;
  Cache& c = p.cache;
  static char nowhere[16] __attribute__((aligned(16)));
  p.batch = number(d, "batch", 1);
  p.kv_heads = number(d, "kv_heads", 1);
  p.group = number(d, "group", 1);
  p.q_heads = p.kv_heads * p.group;
  p.head_dim = number(d, "head_dim", 64);
  p.head_dim_v = number(d, "head_dim_v", p.head_dim);
  p.max_q_len = number(d, "max_q_len", 1);
  p.total_q = number(d, "total_q", p.batch * p.max_q_len);
  p.q_dtype = dtype(d, "q_dtype", "bfloat16");
  p.cu_seqlens_q = table(made, d, "cu_seqlens_q");
  p.cache_seqlens = table(made, d, "cache_seqlens");
  p.cache_leftpad = table(made, d, "cache_leftpad");
  p.window_left = number(d, "window_left", -1);
  p.window_right = number(d, "window_right", -1);
  p.attention_chunk = number(d, "attention_chunk", 0);
  p.num_splits = number(d, "num_splits", 0);
  p.deterministic = number(d, "deterministic", 0) != 0;
  p.scale = 1.f;
  p.q = p.out = nowhere;
  if (d.contains("qv")) p.qv = {nowhere, true};
  p.q_stride_head = p.out_stride_head = p.head_dim;
  p.out_stride_head = p.head_dim_v;
  p.q_stride_token = p.q_heads * p.head_dim;
  p.out_stride_token = p.q_heads * p.head_dim_v;
  p.q_stride_batch = p.cu_seqlens_q ? 0 : p.max_q_len * p.q_stride_token;
  p.out_stride_batch = p.cu_seqlens_q ? 0 : p.max_q_len * p.out_stride_token;

  c.dtype = dtype(d, "cache_dtype", "bfloat16");
  c.k = c.v = nowhere;
  c.page_size = number(d, "page_size", 16);
  c.num_pages = number(d, "num_pages", 1);
  c.max_pages = number(d, "max_pages", 1);
  c.table_rows = number(d, "table_rows", p.batch);
  c.block_table_stride = number(d, "block_table_stride", c.max_pages);
  c.k_stride_head = p.head_dim;
  c.v_stride_head = p.head_dim_v;
  c.k_stride_slot = p.kv_heads * p.head_dim;
  c.v_stride_slot = p.kv_heads * p.head_dim_v;
  c.k_stride_page = c.page_size * c.k_stride_slot;
  c.v_stride_page = c.page_size * c.v_stride_slot;
  c.block_table = table(made, d, "block_table");
  if (number(d, "paged", 0) && !c.block_table) c.block_table = {reinterpret_cast<const int32_t*>(nowhere), true};
  c.cu_seqlens_k = table(made, d, "cu_seqlens_k");
  c.cache_batch_idx = table(made, d, "cache_batch_idx");
  p.seqlen_k = c.page_size;
  p.max_kv_len = max_kv_len_of(p, number(d, "max_seqlen_k", -1));

  p.append.cu_seqlens_k_new = table(made, d, "cu_seqlens_k_new");
  p.append.seqlen_new = number(d, "seqlen_new", 0);
  p.append.total_new = number(d, "total_new", p.batch * p.append.seqlen_new);
  if (d.contains("seqlen_new") || p.append.cu_seqlens_k_new) p.append.k = p.append.v = {nowhere, true};
  if (d.contains("slot_mapping")) {
    made.slots.push_back(d["slot_mapping"].cast<std::vector<int64_t>>());
    p.append.slot_mapping = {made.slots.back().data(), true};
  }
  if (d.contains("rotary_len")) {
    p.rotary.cos = p.rotary.sin = {nowhere, true};
    p.rotary.rotary_len = number(d, "rotary_len", 0);
    p.rotary.seqlens = table(made, d, "rotary_seqlens");
  }
}

}  // namespace paged_attn

void bind_spec(py::module_& m);
void bind_cpu(py::module_& m);
void bind_scratch(py::module_& m);
void bind_metal(py::module_& m);
