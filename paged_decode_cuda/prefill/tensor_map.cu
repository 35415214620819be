#include "tensor_map.h"

#include <cuda_runtime.h>

#include "sizes.h"

namespace paged_attn {
namespace {

// The driver's function, found through the runtime, so that nothing is linked to the driver; nullptr: it is older.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  constexpr unsigned kSince = 12000;
  static void* const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();  // or torch's next check would raise it
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

cuuint64_t size(int64_t n) { return static_cast<cuuint64_t>(n); }

// Rank sizes and boxes, and the bytes from one to the next of all dimensions but the fastest. False: not possible.
template <int kRank>
bool describe(const void* base, DType dtype, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&given)[kRank - 1],
              const cuuint32_t (&box)[kRank], CUtensorMap& map) {
  const auto encode = encode_function();
  if (encode == nullptr) return false;
  cuuint64_t bytes[kRank - 1];
  for (int i = 0; i < kRank - 1; ++i)
    bytes[i] = sizes[i + 1] > 1 ? given[i] : kRowBytes;  // of one entry: see Dimension
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUtensorMapDataType of_16_bits =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUtensorMapDataType type = dtype_bytes(dtype) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : of_16_bits;
  const bool narrow = static_cast<int64_t>(box[0]) * dtype_bytes(dtype) <= kRowBytes / 2;
  const CUtensorMapSwizzle swizzle = narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode(&map, type, kRank, const_cast<void*>(base), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                    int row_values, CUtensorMap& map) {
  const Cache& c = p.cache;
  const int64_t each = dtype_bytes(c.dtype);
  const cuuint64_t sizes[4] = {size(dims), size(c.page_size), size(p.kv_heads), size(c.num_pages)};
  const cuuint64_t bytes[3] = {size(strides.slot * each), size(strides.head * each), size(strides.page * each)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(row_values), static_cast<cuuint32_t>(box_rows), 1, 1};
  return describe(base, c.dtype, sizes, bytes, box, map);
}

bool describe_queries(const Problem& p, int rows, CUtensorMap& map) {
  if (rows % p.group != 0) return false;
  const int64_t each = dtype_bytes(p.q_dtype), tokens = p.cu_seqlens_q ? p.total_q : p.max_q_len;
  const int64_t batch = p.cu_seqlens_q ? 1 : p.batch, head = p.q_stride_head * each, token = p.q_stride_token * each;
  const cuuint64_t sizes[5] = {size(p.head_dim), size(p.group), size(p.kv_heads), size(tokens), size(batch)};
  const cuuint64_t bytes[4] = {size(head), size(head * p.group), size(token),
                               size(p.cu_seqlens_q ? token : p.q_stride_batch * each)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(kRowBytes / each), static_cast<cuuint32_t>(p.group), 1,
                             static_cast<cuuint32_t>(rows / p.group), 1};
  return describe(p.q, p.q_dtype, sizes, bytes, box, map);
}

}  // namespace paged_attn
