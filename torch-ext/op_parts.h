// The checks that attention and kv_paged_write share: the cache, the new tokens, and who may share memory.
#pragma once

#ifdef CUDA_KERNEL
#include <torch/csrc/stable/accelerator.h>
#endif

#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "checks.h"
#include "spec/problem.h"

namespace paged_attn {

constexpr std::initializer_list<ScalarType> kFloatTypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
constexpr std::initializer_list<ScalarType> kInt32 = {ScalarType::Int};
constexpr std::initializer_list<ScalarType> kFloat32 = {ScalarType::Float};

// While it lives, the device of a tensor is the current one.
#ifdef CUDA_KERNEL
struct OnDeviceOf {
  torch::stable::accelerator::DeviceGuard guard;
  explicit OnDeviceOf(const Tensor& t) : guard(t.get_device_index()) {}
};
#else
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
};
#endif

inline bool is_8bit(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2; }

DType dtype_of(ScalarType type);

template <typename T>
Address<T> address(const Tensor& t) {
#ifdef METAL_KERNEL
  // data_ptr() is the buffer plus the offset; an empty tensor has neither.
  char* data = static_cast<char*>(t.data_ptr());
  const int64_t offset = data ? t.storage_offset() * t.element_size() : 0;
  return {data - offset, offset};
#else
  return static_cast<T*>(t.data_ptr());
#endif
}

template <typename T>
Optional<T> given(const Tensor& t) {
  return {address<T>(t), true};
}

template <typename T>
Optional<const T> if_given(const Tensor* t) {
  return t ? given<const T>(*t) : Optional<const T>{};
}

// Replaces small vectors with gaps (a slice, or one number expanded, which flash-attn takes too) by contiguous copies,
// and owns the copies as long as the call lasts.
class ContiguousVectors {
  std::vector<Tensor> copies_;

 public:
  explicit ContiguousVectors(std::initializer_list<const Tensor**> vectors) {
    for (const Tensor** vector : vectors) {
      if (!*vector || !has_gaps(**vector)) continue;
      if (copies_.empty()) copies_.reserve(vectors.size());  // so that none of them moves
      copies_.push_back(torch::stable::contiguous(**vector));
      *vector = &copies_.back();
    }
  }
};

// The sizes that several tensors share.
struct Sizes {
  Dim batch{"batch"}, q_heads{"q_heads"}, kv_heads{"kv_heads"}, head_dim{"head_dim"}, head_dim_v{"head_dim_v"};
};

// A (batch, kv_heads) table of scales; a size of 1, or a stride of 0, serves all. Only 8-bit tensors have one: a scale
// given for another tensor is ignored, as in FlashAttention 3.
struct DescaleTable {
  Optional<const float> table = {};
  int64_t stride_batch = 0, stride_head = 0;
};
DescaleTable check_descale(const Tensor* t, const char* name, ScalarType scaled, const Sizes& sizes, const Like& like);

// The cache, and how requests find their keys in it. A write by slots has pages without a table. What is neither in
// pages nor cut by cu_seqlens_k is contiguous.
struct CacheArguments {
  const Tensor &k_cache, &v_cache;
  bool in_pages;
  const Tensor *block_table, *cu_seqlens_k, *cache_batch_idx, *k_descale, *v_descale;
};
Cache check_cache(const CacheArguments& arguments, const Like& like, Sizes& sizes);

// New keys and values: [batch, seqlen_new, kv_heads, .], or [total_new, kv_heads, .] with cu_seqlens_k_new.
Append check_append(const Tensor& k, const Tensor& v, const Tensor* cu_seqlens_k_new, const Like& like, Sizes& sizes);

void check_head_dims(const Sizes& sizes, bool with_qv);

// Throws where an output (out, or a cache that tokens are appended to) shares memory with an input: inputs are read
// while outputs are written, lengths and page numbers again after they were checked.
void check_memory(const Problem& problem);

}  // namespace paged_attn
