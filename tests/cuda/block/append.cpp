// One call of the kernels that write new tokens and rotate, on the host. tests/test_append_host.py calls it.
#include "append.h"

#include "layout.h"
#include "spec/problem.h"

using namespace paged_attn;

extern "C" {

// Fields are given by name from Python. An address of 0 leaves a tensor out; strides are in elements.
struct AppendCall {
  int64_t q, rotated_q, k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, slot_mapping;
  int64_t block_table, cache_batch_idx, k_descale, v_descale, rotary_cos, rotary_sin, rotary_seqlens;
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v, total_q, max_q_len, seqlen_new, total_new, dtype, kv_dtype;
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t k_stride_batch, k_stride_token, k_stride_head, v_stride_batch, v_stride_token, v_stride_head;
  int64_t k_cache_stride_page, k_cache_stride_slot, k_cache_stride_head;
  int64_t v_cache_stride_page, v_cache_stride_slot, v_cache_stride_head;
  int64_t k_descale_stride_batch, k_descale_stride_head, v_descale_stride_batch, v_descale_stride_head;
  int64_t num_pages, page_size, max_pages, table_rows, block_table_stride;
  int64_t rotary_cos_stride, rotary_sin_stride, rotary_len, rotary_dim, rotary_interleaved;
  int64_t window_left, window_right, chunk, processors, seed;
};

struct AppendNumbers {
  int64_t copies, released;  // whether rows are copied as they are; whether the next kernel may start early
};

const char* append(const AppendCall* call, AppendNumbers* numbers) {
  const AppendCall& c = *call;
  const auto ints = [](int64_t address) { return Optional<const int32_t>{(const int32_t*)address, address != 0}; };
  const auto floats = [](int64_t address) { return Optional<const float>{(const float*)address, address != 0}; };
  const auto any = [](int64_t address) { return Optional<const void>{(const void*)address, address != 0}; };
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                               DType::kFloat8E5M2};
  Problem p = {};
  p.batch = c.batch;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.total_q = c.total_q;
  p.max_q_len = c.max_q_len;
  p.q_dtype = p.append.dtype = kDTypes[c.dtype];
  p.q = any(c.q).data;
  p.q_stride_batch = c.q_stride_batch;
  p.q_stride_token = c.q_stride_token;
  p.q_stride_head = c.q_stride_head;
  p.cu_seqlens_q = ints(c.cu_seqlens_q);
  p.cache_seqlens = ints(c.cache_seqlens);
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.attention_chunk = c.chunk;
  p.cache = {(void*)c.k_cache,
             (void*)c.v_cache,
             c.k_cache_stride_page,
             c.k_cache_stride_slot,
             c.k_cache_stride_head,
             c.v_cache_stride_page,
             c.v_cache_stride_slot,
             c.v_cache_stride_head,
             c.num_pages,
             c.page_size,
             kDTypes[c.kv_dtype],
             ints(c.block_table),
             c.block_table_stride,
             c.table_rows,
             c.max_pages,
             {},
             ints(c.cache_batch_idx),
             floats(c.k_descale),
             floats(c.v_descale),
             c.k_descale_stride_batch,
             c.k_descale_stride_head,
             c.v_descale_stride_batch,
             c.v_descale_stride_head};
  p.append.k = any(c.k);
  p.append.v = any(c.v);
  p.append.k_stride_batch = c.k_stride_batch;
  p.append.k_stride_token = c.k_stride_token;
  p.append.k_stride_head = c.k_stride_head;
  p.append.v_stride_batch = c.v_stride_batch;
  p.append.v_stride_token = c.v_stride_token;
  p.append.v_stride_head = c.v_stride_head;
  p.append.seqlen_new = c.seqlen_new;
  p.append.total_new = c.total_new;
  p.append.cu_seqlens_k_new = ints(c.cu_seqlens_k_new);
  p.append.slot_mapping = {(const int64_t*)c.slot_mapping, c.slot_mapping != 0};
  p.rotary = {any(c.rotary_cos), any(c.rotary_sin), c.rotary_cos_stride,       c.rotary_sin_stride,
              c.rotary_len,      c.rotary_dim,      c.rotary_interleaved != 0, ints(c.rotary_seqlens)};
  const bool rotates = c.rotary_cos != 0;
  *numbers = {!rotates && fits_copy_kernel(p), 0};
  machine.dice.seed(static_cast<unsigned>(c.seed));
  // From the first number of the first row to the last one of the last row.
  const auto add_streamed = [](const void* begin, DType dtype, std::initializer_list<Dimension> dimensions) {
    int64_t elements = 1;
    for (const Dimension& d : dimensions) elements += (d.size - 1) * d.stride;
    streamed.push_back({begin, elements * dtype_bytes(dtype)});
  };
  const Append& a = p.append;
  const bool packed = c.cu_seqlens_k_new != 0;
  const Dimension requests = {packed ? 1 : p.batch, a.k_stride_batch};
  const int64_t tokens = packed ? a.total_new : a.seqlen_new;
  streamed.clear();
  add_streamed(a.k, a.dtype, {requests, {tokens, a.k_stride_token}, {p.kv_heads, a.k_stride_head}, {p.head_dim, 1}});
  add_streamed(a.v, a.dtype,
               {{requests.size, a.v_stride_batch},
                {tokens, a.v_stride_token},
                {p.kv_heads, a.v_stride_head},
                {p.head_dim_v, 1}});
  const auto& [pages, slots, heads, v_pages, v_slots, v_heads] = cache_dimensions(p);
  add_streamed(p.cache.k, p.cache.dtype, {pages, slots, heads, {p.head_dim, 1}});
  add_streamed(p.cache.v, p.cache.dtype, {v_pages, v_slots, v_heads, {p.head_dim_v, 1}});
  machine.when_released = [numbers] { numbers->released = 1; };
  Launches launches({static_cast<int>(c.processors), 232448, 233472, 90});
  add_append(p, rotates, (void*)c.rotated_q, launches);
  const char* const failure = launches.run();
  machine.when_released = nullptr;
  return failure;
}

}  // extern "C"
