#include "route.h"

#include <cuda.h>

#include "../layout.h"
#include "instances.h"
#include "shape.cuh"

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

struct Strides {
  int64_t page, slot, head;  // elements
};

// Describes keys or values to the bulk copies. False where they cannot be described: copies go piece by piece then.
bool describe(const Problem& p, const void* base, int64_t head_dim, const Strides& strides, int box_rows,
              CUtensorMap& map) {
  const Cache& c = p.cache;
  const auto encode = encode_function();
  if (encode == nullptr) return false;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[4] = {size(head_dim), size(c.page_size), size(p.kv_heads), size(c.num_pages)};
  const cuuint64_t bytes[3] = {size(strides.slot * 2), size(strides.head * 2), size(strides.page * 2)};
  const cuuint32_t box[4] = {kColumn, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      c.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(&map, type, 4, const_cast<void*>(base), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

PrefillCall prefill_call(const Problem& p, const PrefillPlan& plan, unsigned long long* tickets) {
  const Cache& c = p.cache;
  PrefillCall call = {};
  call.page_size = FastDivisor(c.block_table ? c.page_size : 1);
  call.group = FastDivisor(p.group);
  call.kv_heads = FastDivisor(p.kv_heads);
  call.chunk = FastDivisor(pd_max(p.attention_chunk, 1));
  call.max_keys = static_cast<int32_t>(capacity_of(p));
  call.max_pages = c.block_table ? static_cast<int32_t>(c.max_pages) : 0;
  constexpr int64_t kPiece = 8;  // elements of 16 bytes
  call.k_page_pieces = static_cast<uint32_t>(c.k_stride_page / kPiece);
  call.k_slot_pieces = static_cast<uint32_t>(c.k_stride_slot / kPiece);
  call.k_head_pieces = static_cast<uint32_t>(c.k_stride_head / kPiece);
  call.v_page_pieces = static_cast<uint32_t>(c.v_stride_page / kPiece);
  call.v_slot_pieces = static_cast<uint32_t>(c.v_stride_slot / kPiece);
  call.v_head_pieces = static_cast<uint32_t>(c.v_stride_head / kPiece);
  const Strides k = {c.k_stride_page, c.k_stride_slot, c.k_stride_head};
  const Strides v = {c.v_stride_page, c.v_stride_slot, c.v_stride_head};
  const bool bulk = plan.box_rows > 0 && describe(p, c.k, p.head_dim, k, plan.box_rows, call.keys) &&
                    describe(p, c.v, p.head_dim_v, v, plan.box_rows, call.values);
  call.box_rows = bulk ? plan.box_rows : 0;
  call.blocks_in_grid = static_cast<int32_t>(plan.blocks);
  call.l2_keys = static_cast<int32_t>(plan.l2_keys);
  call.tickets = tickets;
  return call;
}

}  // namespace

Numbers prefill_numbers(const PrefillPlan& plan) {
  return {{"rows_per_tile", plan.instance.rows},
          {"tile_keys", plan.instance.keys},
          {"items", plan.items},
          {"splits", 1},
          {"all_scores", plan.all_scores},
          {"box_rows", plan.box_rows},
          {"blocks", plan.blocks},
          {"shared_bytes", plan.instance.shared_bytes}};
}

void launch_prefill(const Problem& p, const PrefillPlan& plan, const Context& context) {
  const Workspace workspace(sizeof(unsigned long long));
  const PrefillCall call = prefill_call(p, plan, static_cast<unsigned long long*>(workspace.data()));
  const int head_dim = plan.instance.head_dim;
  const void* const kernel = p.cache.dtype == DType::kBFloat16 ? prefill_kernel_bf16(head_dim, plan.all_scores)
                                                               : prefill_kernel_fp16(head_dim, plan.all_scores);
  const Grid grid = {plan.blocks, plan.instance.threads, plan.instance.shared_bytes};
  launch(kernel, grid, context, p, call);
}

}  // namespace paged_attn
