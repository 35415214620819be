// The Metal backend: picks the shaders, cuts the work, encodes into torch's own command encoder. Nothing here waits for
// the device, and the host reads none of its memory, except under PAGED_ATTN_CHECK.
#include <ATen/mps/MPSStream.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <optional>
#include <string>

#include "backend.h"
#include "check.h"
#include "encode.h"
#include "spec/check_tables.h"
#include "spec/ranges.h"

namespace paged_attn {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30;
constexpr int64_t kMaxSplits = 64;
// So many threadgroups keep every Apple GPU busy (8 for each of 32 cores, Metal does not tell their number); with fewer
// the keys are cut.
constexpr int64_t kBusyThreadgroups = 256;
// With fewer than these, shorter requests are cut too: 3 for each of 40 cores, as many as the registers of a core hold.
constexpr int64_t kWantedThreadgroups = 128;
// Simdgroups of a threadgroup, so that 3 of them can be in a core; more where there are too few threadgroups.
constexpr int64_t kUsualSimdgroups = 4;
constexpr int kAppendThreads = 128;

static_assert(kFloat32 == int(DType::kFloat32) && kFloat16 == int(DType::kFloat16) &&
              kBFloat16 == int(DType::kBFloat16) && kFloat8E4M3 == int(DType::kFloat8E4M3) &&
              kFloat8E5M2 == int(DType::kFloat8E5M2));

// Memory for the time of a call. The encoder keeps it until the device is done.
struct Workspace {
  torch::stable::Tensor tensor;

  explicit Workspace(int64_t bytes)
      : tensor(torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                    torch::stable::Device(torch::headeronly::DeviceType::MPS, 0))) {}
  Address<void> address() const { return {tensor.data_ptr(), 0}; }
};

// Keys that the cache can hold for one request.
int64_t capacity_of(const Problem& p) {
  return p.cache.block_table ? p.cache.max_pages * p.cache.page_size : p.cache.page_size;
}

bool is_aligned(int64_t offset_bytes, int64_t vector_bytes) { return offset_bytes % vector_bytes == 0; }

// Whether the rows of a cache, or of the new tokens, are whole vectors: loads of 16 bytes, of 8 from an 8-bit cache.
bool has_vectors(const Problem& p, Address<const void> k, Address<const void> v, const Strides& k_strides,
                 const Strides& v_strides, DType dtype) {
  const int64_t bytes = dtype_bytes(dtype), vector_bytes = pd_min(kVector * bytes, 16);
  bool all = p.head_dim % kVector == 0 && p.head_dim_v % kVector == 0;
  for (const Strides& s : {k_strides, v_strides})
    for (int64_t stride : {s.outer, s.middle, s.head}) all = all && is_aligned(stride * bytes, vector_bytes);
  return all && is_aligned(k.offset, vector_bytes) && is_aligned(v.offset, vector_bytes);
}

// Whether 32 bits hold every offset of an element in the cache.
bool is_wide(const Problem& p, const Strides& strides) {
  const int64_t last =
      (pd_max(p.cache.num_pages, 1) - 1) * strides.outer + (pd_max(p.cache.page_size, 1) - 1) * strides.middle;
  return last > INT32_MAX || strides.outer > INT32_MAX || strides.middle > INT32_MAX;
}

// Everything that writing and attending have in common.
Call make_call(const Problem& p) {
  const Cache& c = p.cache;
  Call call;
  Arguments& a = call.arguments;
  a.q = {p.q_stride_batch, p.q_stride_token, p.q_stride_head};
  a.qv = {p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head};
  a.out = {p.out_stride_batch, p.out_stride_token, p.out_stride_head};
  a.k_cache = {c.k_stride_page, c.k_stride_slot, c.k_stride_head};
  a.v_cache = {c.v_stride_page, c.v_stride_slot, c.v_stride_head};
  a.new_k = {p.append.k_stride_batch, p.append.k_stride_token, p.append.k_stride_head};
  a.new_v = {p.append.v_stride_batch, p.append.v_stride_token, p.append.v_stride_head};
  a.lse_stride_batch = p.lse_stride_batch;
  a.lse_stride_head = p.lse_stride_head;
  a.block_table_stride = c.block_table_stride;
  a.q_descale_stride_batch = p.q_descale_stride_batch;
  a.q_descale_stride_head = p.q_descale_stride_head;
  a.k_descale_stride_batch = c.k_descale_stride_batch;
  a.k_descale_stride_head = c.k_descale_stride_head;
  a.v_descale_stride_batch = c.v_descale_stride_batch;
  a.v_descale_stride_head = c.v_descale_stride_head;
  a.slopes_stride_batch = p.alibi_stride_batch;
  a.cos_stride = p.rotary.cos_stride;
  a.sin_stride = p.rotary.sin_stride;
  a.cache_slots = c.page_size;
  a.batch = static_cast<int32_t>(p.batch);
  a.q_heads = static_cast<int32_t>(p.q_heads);
  a.kv_heads = static_cast<int32_t>(p.kv_heads);
  a.group = static_cast<int32_t>(p.group);
  a.max_q_len = static_cast<int32_t>(p.max_q_len);
  a.total_q = static_cast<int32_t>(p.total_q);
  a.seqlen_k = static_cast<int32_t>(pd_min(p.seqlen_k, kMaxKeys));
  a.capacity = static_cast<int32_t>(pd_min(capacity_of(p), kMaxKeys));
  a.num_pages = static_cast<int32_t>(c.num_pages);
  a.max_pages = static_cast<int32_t>(c.max_pages);
  a.table_rows = static_cast<int32_t>(c.table_rows);
  // Farther than any key, and sums of two still fit into 32 bits.
  a.window_left = static_cast<int32_t>(pd_min(p.window_left, kMaxKeys));
  a.window_right = static_cast<int32_t>(pd_min(p.window_right, kMaxKeys));
  a.attention_chunk = static_cast<int32_t>(pd_min(p.attention_chunk, kMaxKeys));
  a.max_splits = 1;
  a.seqlen_new = static_cast<int32_t>(p.append.seqlen_new);
  a.total_new = static_cast<int32_t>(p.append.total_new);
  a.rotary_dim = static_cast<int32_t>(p.rotary.rotary_dim);
  a.rotary_len = static_cast<int32_t>(pd_min(p.rotary.rotary_len, kMaxKeys));
  a.moving_queries = p.window_left >= 0 || p.window_right >= 0 || p.attention_chunk > 0;
  a.scale = p.scale;
  a.softcap = p.softcap;

  call.bind(kBlockTableBuffer, c.block_table, kHasBlockTable);
  call.bind(kBatchIdxBuffer, c.cache_batch_idx, kHasBatchIdx);
  call.bind(kSeqlensBuffer, p.cache_seqlens, kHasSeqlens);
  call.bind(kLeftpadBuffer, p.cache_leftpad, kHasLeftpad);
  call.bind(kCuSeqlensQBuffer, p.cu_seqlens_q, kHasCuSeqlensQ);
  call.bind(kCuSeqlensKBuffer, c.cu_seqlens_k, kHasCuSeqlensK);
  call.bind(kCuSeqlensNewBuffer, p.append.cu_seqlens_k_new, kHasCuSeqlensNew);
  call.bind(kQDescaleBuffer, p.q_descale, kHasQDescale);
  call.bind(kKDescaleBuffer, c.k_descale, kHasKDescale);
  call.bind(kVDescaleBuffer, c.v_descale, kHasVDescale);
  call.bind(kKeyCacheBuffer, c.k);
  call.bind(kValueCacheBuffer, c.v);
  Constants& constants = call.constants;
  constants[kHasNew] = p.append.k.given;
  constants[kWide] = is_wide(p, a.k_cache) || is_wide(p, a.v_cache);
  constants[kAligned] =
      has_vectors(p, {c.k.buffer, c.k.offset}, {c.v.buffer, c.v.offset}, a.k_cache, a.v_cache, c.dtype);
  constants[kHeadDim] = static_cast<int32_t>(p.head_dim);
  constants[kHeadDimV] = static_cast<int32_t>(p.head_dim_v);
  constants[kPageSize] = c.block_table ? static_cast<int32_t>(c.page_size) : 1;
  constants[kQueryType] = static_cast<int32_t>(p.q_dtype);
  constants[kCacheType] = static_cast<int32_t>(c.dtype);
  return call;
}

// Writes the new tokens; with a rotary table also puts the rotated queries into `rotated`.
void encode_append(id<MTLComputeCommandEncoder> encoder, const Problem& p, Call call, Optional<void> rotated) {
  const Append& append = p.append;
  const Arguments& a = call.arguments;
  call.bind(kQueryBuffer, p.q);
  call.bind(kNewKeysBuffer, append.k);
  call.bind(kNewValuesBuffer, append.v);
  call.bind(kRotatedBuffer, rotated);
  call.bind(kSinBuffer, p.rotary.sin);
  call.bind(kCosBuffer, p.rotary.cos, kHasRotary);
  call.bind(kRotarySeqlensBuffer, p.rotary.seqlens, kHasRotarySeqlens);
  call.bind(kSlotMappingBuffer, append.slot_mapping, kHasSlotMapping);
  call.constants[kInterleaved] = p.rotary.interleaved;
  call.constants[kNewType] = static_cast<int32_t>(append.dtype);
  call.constants[kAligned] =
      call.constants[kAligned] && has_vectors(p, append.k.data, append.v.data, a.new_k, a.new_v, append.dtype);
  const int64_t vectors_k = pd_ceil_div(p.head_dim, kVector), vectors_v = pd_ceil_div(p.head_dim_v, kVector);
  const int64_t vectors = pd_max(p.kv_heads * (vectors_k + vectors_v), rotated ? p.q_heads * vectors_k : 0);
  const int64_t tokens = append.total_new + (rotated ? p.total_q : 0);
  const int64_t threads = pd_min(pd_ceil_div(vectors, kSimdWidth) * kSimdWidth, kAppendThreads);
  encode(encoder, "append", call, MTLSizeMake(pd_ceil_div(vectors, threads), tokens, 1), threads, threads);
}

// The kernels that paged_decode.metal has for attention: rows of an item, and dimensions that they cover.
struct Kernel {
  int64_t rows, dims;
};

Kernel kernel_for(const Problem& p) {
  const int64_t dims = pd_max(p.head_dim, p.head_dim_v);
  if (p.qv || dims > 256) return {4, 768};
  // Deterministic results of a request may not depend on how many tokens the others have.
  const int64_t rows = p.deterministic && p.cu_seqlens_q ? kVectorRows : p.max_q_len * p.group;
  return {rows <= 2 ? pd_max(rows, 1) : rows <= 4 ? 4 : kVectorRows, dims <= 64 ? 64 : dims <= 128 ? 128 : 256};
}

std::string attend_name(const Kernel& kernel) {
  return "attend_d" + std::to_string(kernel.dims) + "_r" + std::to_string(kernel.rows);
}

// Rows of a threadgroup of prefill.
int64_t prefill_rows_for(const Problem& p) {
  return p.max_q_len * p.group <= 16 && !(p.deterministic && p.cu_seqlens_q) ? 16 : 32;
}

std::string prefill_name(const Problem& p) {
  return std::string("prefill_") + (p.q_dtype == DType::kFloat16 ? "f16" : "bf16") +
         (pd_max(p.head_dim, p.head_dim_v) <= 64 ? "_d64_r" : "_d128_r") + std::to_string(prefill_rows_for(p));
}

// Whether requests with many rows go to the kernel on matrices.
bool has_prefill(const Problem& p) {
  return p.max_q_len * p.group > kVectorRows && dtype_bytes(p.q_dtype) == 2 && !p.qv &&
         pd_max(p.head_dim, p.head_dim_v) <= 128;
}

// How requests are cut. With `deterministic` that depends on nothing but the cache.
struct Cuts {
  int64_t split_keys, wanted;  // as in Arguments
  int64_t most;                // of the longest request
};

Cuts plan_cuts(const Problem& p, int64_t items) {
  Cuts cuts = {kSplitKeys, 1, 1};
  if (items == 0 || (!p.cu_seqlens_q && p.max_q_len * p.group > kMaxSplitRows)) return cuts;
  const int64_t capacity = capacity_of(p);
  const bool busy = items >= kBusyThreadgroups;
  if (!p.deterministic) cuts.wanted = pd_ceil_div(kWantedThreadgroups, items);
  if (!p.deterministic && busy) cuts.split_keys = kBusySplitKeys;
  const int64_t by_cores = pd_min(pd_ceil_div(capacity, kMinSplitKeys), cuts.wanted);
  // A cache of no more than kSplitKeys is not worth a second dispatch.
  int64_t most = capacity <= kSplitKeys ? 1 : pd_max(pd_ceil_div(capacity, cuts.split_keys), by_cores);
  // Threadgroups with nothing to do, where requests are shorter than the cache, are cheap but not free.
  if (!p.deterministic) most = pd_min(most, (busy ? 16 : 4) * kBusyThreadgroups / items);
  if (p.num_splits > 0) most = pd_min(p.num_splits, pd_ceil_div(capacity, kSimdWidth));
  cuts.most = pd_max(1, pd_min(most, kMaxSplits));
  return cuts;
}

}  // namespace

std::string unsupported_reason(const Problem& p) {
  if (dtype_bytes(p.q_dtype) == 1)
    return "q: the Metal backend takes float32, float16 or bfloat16 (with caches of the same type or 8-bit ones), got "
           "an 8-bit q";
  if (p.batch > INT32_MAX || p.total_q * p.group > INT32_MAX || capacity_of(p) >= kMaxKeys)
    return "metal: expected sizes below 2^31 (batch, total_q * group) and of 2^30 (keys of one request), got " +
           std::to_string(p.batch) + ", " + std::to_string(p.total_q * p.group) + ", " + std::to_string(capacity_of(p));
  return "";
}

void run_attention(const Problem& p) {
  if (checks_enabled()) check_values_on_device(p);
  Call call = make_call(p);
  const Call append_call = call;
  Arguments& a = call.arguments;
  const bool appends = p.append.k && p.kv_heads > 0;
  const bool attends = p.total_q > 0 && p.q_heads > 0;

  // Queries are rotated on the way of the append, and read from there.
  std::optional<Workspace> rotated;
  call.bind(kQueryBuffer, p.q);
  if (appends && p.rotary.cos && attends) {
    rotated.emplace(p.total_q * p.q_heads * p.head_dim * dtype_bytes(p.q_dtype));
    const int64_t stride_token = p.q_heads * p.head_dim;
    a.q = {p.cu_seqlens_q ? 0 : p.max_q_len * stride_token, stride_token, p.head_dim};
    call.bind(kQueryBuffer, rotated->address());
  }

  // Plan
  const bool prefills = attends && has_prefill(p);
  const Kernel kernel = kernel_for(p);
  const int64_t rows = pd_max(p.max_q_len * p.group, 1);
  // A request with more tokens than max_q_len says is not cut.
  const int64_t split_rows = pd_min(rows, kMaxSplitRows);
  const int64_t row_tiles = pd_ceil_div(prefills ? kVectorRows : rows, kernel.rows);
  const int64_t prefill_rows = prefill_rows_for(p);
  const int64_t prefill_tiles = pd_ceil_div(split_rows, prefill_rows);  // of a request that may be cut
  const int64_t items = (prefills ? prefill_tiles : row_tiles) * p.kv_heads * p.batch;
  const Cuts cuts = plan_cuts(p, items);
  const int64_t max_splits = cuts.most;
  const int64_t keys = p.deterministic ? capacity_of(p) : pd_ceil_div(capacity_of(p), max_splits);
  const int64_t most_simdgroups =
      !p.deterministic && items * max_splits >= kWantedThreadgroups ? kUsualSimdgroups : kMaxSimdgroups;
  const int64_t simdgroups = pd_max(1, pd_min(most_simdgroups, pd_ceil_div(keys, kSimdWidth)));
  a.num_splits = static_cast<int32_t>(pd_min(p.num_splits, INT32_MAX));
  a.max_splits = static_cast<int32_t>(max_splits);
  a.split_keys = static_cast<int32_t>(cuts.split_keys);
  a.wanted_splits = static_cast<int32_t>(cuts.wanted);
  a.split_rows = static_cast<int32_t>(split_rows);
  std::optional<Workspace> acc, sums;
  if (max_splits > 1) {
    const int64_t partials = p.batch * p.kv_heads * split_rows * max_splits;
    acc.emplace(partials * p.head_dim_v * sizeof(float));
    sums.emplace(partials * 2 * sizeof(float));
    call.bind(kPartialAccBuffer, acc->address());
    call.bind(kPartialSumsBuffer, sums->address());
  }
  call.constants[kHasSplits] = max_splits > 1;
  call.constants[kHasPrefill] = prefills;
  call.constants[kHasSoftcap] = p.softcap != 0.f;
  call.constants[kSinksType] = static_cast<int32_t>(p.sinks_dtype);
  call.bind(kOutBuffer, p.out);
  call.bind(kLseBuffer, p.lse, kHasLse);
  call.bind(kQvBuffer, p.qv, kHasQv);
  call.bind(kSlopesBuffer, p.alibi_slopes, kHasSlopes);
  call.bind(kSinksBuffer, p.sinks, kHasSinks);

  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      if (appends)
        encode_append(encoder, p, append_call, rotated ? Optional<void>{rotated->address(), true} : Optional<void>{});
      if (!attends) return;
      if (prefills) {
        const int64_t threads = prefill_rows / 8 * kSimdWidth;
        const int64_t tiles = pd_max(prefill_tiles * max_splits, pd_ceil_div(rows, prefill_rows));
        encode(encoder, prefill_name(p), call, MTLSizeMake(tiles, p.kv_heads, p.batch), threads, threads);
      }
      // Without cu_seqlens_q all requests have as many rows. Without a request there may still be tokens to clear.
      if (!prefills || p.cu_seqlens_q) {
        encode(encoder, attend_name(kernel), call,
               MTLSizeMake(row_tiles * max_splits, pd_max(p.kv_heads, 1), pd_max(p.batch, 1)), simdgroups * kSimdWidth,
               kSimdWidth);
      }
      if (max_splits > 1) {
        const int64_t rows_at_once = pd_min(split_rows, kMaxSimdgroups), threads = rows_at_once * kSimdWidth;
        encode(encoder, "merge", call, MTLSizeMake(pd_ceil_div(split_rows, rows_at_once), p.kv_heads, p.batch), threads,
               threads);
      }
    }
  });
}

void run_kv_write(const Problem& p) {
  if (checks_enabled()) check_values_on_device(p);
  if (!p.append.k || p.kv_heads == 0) return;
  const Call call = make_call(p);
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      encode_append(stream->commandEncoder(), p, call, {});
    }
  });
}

std::string instruction_set() { return ""; }

}  // namespace paged_attn
