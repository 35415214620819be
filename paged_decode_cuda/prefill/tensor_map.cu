#include "tensor_map.h"

#include <cuda_runtime.h>

#include "../layout.h"
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
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

bool describe_cache(const Problem& p, const void* base, int64_t dims, const CacheStrides& strides, int box_rows,
                    bool swizzled, CUtensorMap& map) {
  const Cache& c = p.cache;
  const auto encode = encode_function();
  if (encode == nullptr) return false;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[4] = {size(dims), size(c.page_size), size(p.kv_heads), size(c.num_pages)};
  const int64_t each = dtype_bytes(c.dtype);
  const cuuint64_t bytes[3] = {size(strides.slot * each), size(strides.head * each), size(strides.page * each)};
  const cuuint32_t values = swizzled ? static_cast<cuuint32_t>(kRowBytes / each) : kColumn;
  const cuuint32_t box[4] = {values, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType of_16_bits =
      c.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUtensorMapDataType type = each == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : of_16_bits;
  const CUtensorMapSwizzle swizzle = swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  return encode(&map, type, 4, const_cast<void*>(base), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace paged_attn
