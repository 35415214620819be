// The CUDA backend: picks the kernel, cuts the work, launches on the current stream. Nothing here reads device memory
// or waits for the device, except under PAGED_ATTN_CHECK.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "append.cuh"
#include "backend.h"
#include "check.h"
#include "instances.h"
#include "plain.cuh"
#include "simt.cuh"
#include "spec/check_tables.h"

// The header above declares them only where USE_CUDA is defined, which not every build does.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void** ret_ptr);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* ptr);
}

namespace paged_attn {
namespace {

constexpr int kMaxSplits = 256;
constexpr int kSimtSplits = 32;
// Tiles that a multiprocessor reads while one of its blocks ends one (item, kv_head) and begins another.
constexpr int kPairCost = 12;
constexpr int64_t kMaxKeys = int64_t{1} << 30;

[[noreturn]] void fail_cuda(cudaError_t error, const char* what) {
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail_cuda(error, what);
}

int current_device() {
  int device;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

struct Device {
  int processors, shared_per_block;
};

// Asked for once: it never changes.
const Device& device_properties(int device) {
  static std::mutex mutex;
  static std::map<int, Device> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  Device d;
  check_cuda(cudaDeviceGetAttribute(&d.processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return known[device] = d;
}

struct Kernel {
  int blocks_per_processor;
  bool waits;  // has the instruction that waits for its predecessor, so it may be launched early
};

// What a kernel is on this device, asked for once. Also allows it all the shared memory that any launch of it may use.
const Kernel& kernel_properties(const void* function, int device, int threads, int shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, Kernel> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(function, device, threads);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
  if (shared_bytes > attributes.maxDynamicSharedSizeBytes) {
    check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
  }
  Kernel kernel;
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&kernel.blocks_per_processor, function, threads, shared_bytes),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  // Code for older devices, which a newer one may compile for itself, lacks the instruction.
  kernel.waits = attributes.ptxVersion >= 90;
  if (kernel.blocks_per_processor == 0) throw std::runtime_error("cuda: the kernel does not fit on this device");
  return known[key] = kernel;
}

// Where and on what a call runs.
struct Context {
  int index;
  const Device& device;
  cudaStream_t stream;
};

Context current_context() {
  const int index = current_device();
  return {index, device_properties(index), current_stream(index)};
}

// Launches with programmatic dependent launch where the kernel can wait.
template <typename... Arguments>
void launch(const void* function, int64_t blocks, int threads, int shared_bytes, const Context& context,
            Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = kernel_properties(function, context.index, threads, shared_bytes).waits ? 1 : 0;
  void* pointers[] = {&arguments...};
  check_cuda(cudaLaunchKernelExC(&config, function, pointers), "launch");
}

// Temporary memory on the current device, from torch's allocator: given back at the end, when what was launched on the
// current stream may still use it, and then handed out on that stream only. A tensor would take several times as long.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data_));
  }
  ~Workspace() { aoti_torch_cuda_caching_allocator_raw_delete(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool aligned(int64_t stride, int64_t bytes) { return stride * bytes % 16 == 0; }

// Keys that the cache can hold for one request.
int64_t capacity(const Problem& p) {
  return p.cache.block_table ? p.cache.max_pages * p.cache.page_size : p.cache.page_size;
}

// Whether the kernel on the matrix unit can run this: 16-byte pieces everywhere, 32-bit places of keys.
bool fits_decode_kernel(const Problem& p) {
  const Cache& c = p.cache;
  const int64_t bytes = dtype_bytes(c.dtype), q_bytes = dtype_bytes(p.q_dtype);
  const bool fp8 = bytes == 1;
  if (bytes == 4 || q_bytes == 4 || (q_bytes == 1 && !fp8) || p.qv) return false;
  if (p.head_dim > 256 || p.head_dim_v > 256) return false;
  const int64_t piece = 16 / bytes;
  if (p.head_dim % piece != 0 || p.head_dim_v % piece != 0) return false;
  if (!aligned(c.k) || !aligned(c.v) || !aligned(p.q) || !aligned(p.out)) return false;
  for (int64_t stride :
       {c.k_stride_page, c.k_stride_slot, c.k_stride_head, c.v_stride_page, c.v_stride_slot, c.v_stride_head}) {
    if (!aligned(stride, bytes) || stride < 0) return false;
  }
  for (int64_t stride : {p.q_stride_batch, p.q_stride_token, p.q_stride_head}) {
    if (!aligned(stride, q_bytes)) return false;
  }
  for (int64_t stride : {p.out_stride_batch, p.out_stride_token, p.out_stride_head}) {
    if (!aligned(stride, 2)) return false;
  }
  const int64_t pages = pd_max(c.num_pages, 1) - 1, slots = pd_max(c.page_size, 1) - 1, heads = p.kv_heads - 1;
  const int64_t last = pd_max(pages * c.k_stride_page + slots * c.k_stride_slot + heads * c.k_stride_head,
                              pages * c.v_stride_page + slots * c.v_stride_slot + heads * c.v_stride_head);
  return last * bytes / 16 < int64_t{UINT32_MAX};
}

DecodeKernel decode_kernel_for(const Problem& p) {
  const int head_dim = static_cast<int>(pd_max(p.head_dim, p.head_dim_v));
  const int row_tiles = p.max_q_len * p.group <= 8 ? 1 : 2;
  switch (p.cache.dtype) {
    case DType::kFloat16: return decode_kernel_fp16(head_dim, row_tiles);
    case DType::kBFloat16: return decode_kernel_bf16(head_dim, row_tiles);
    case DType::kFloat8E4M3: return decode_kernel_e4m3(head_dim, row_tiles);
    case DType::kFloat8E5M2: return decode_kernel_e5m2(head_dim, row_tiles);
    default: return {};
  }
}

// Sets how requests are cut when the cuts must not depend on the batch.
void plan_fixed_splits(const Problem& p, int split_keys, int limit, Plan& plan) {
  const int64_t keys = pd_max(capacity(p), 1);
  int64_t splits;
  if (p.num_splits > 0) {
    splits = pd_min(pd_min(p.num_splits, kMaxSplits), pd_ceil_div(keys, int64_t{1} << plan.tile_shift));
    plan.num_splits = static_cast<int32_t>(splits);
  } else {
    splits = pd_min(pd_ceil_div(keys, split_keys), limit);
    plan.num_splits = 0;
  }
  plan.split_tiles = split_keys >> plan.tile_shift;
  plan.balanced = false;
  plan.max_splits = FastDivisor(splits);
  plan.blocks = FastDivisor(plan.items * p.kv_heads * splits);
}

// What is fetched before it is known which part of it a block needs. Of a large table most may be unused.
void plan_prefetch(const Problem& p, Plan& plan) {
  constexpr int64_t kMostBytes = 1 << 20;
  const Cache& c = p.cache;
  auto lines = [](int64_t bytes) { return bytes > kMostBytes ? 0 : static_cast<int32_t>(bytes / kLine); };
  const int64_t q_token = p.q_heads * p.head_dim;
  const bool contiguous = p.q_stride_head == p.head_dim && p.q_stride_token == q_token &&
                          (p.cu_seqlens_q || p.q_stride_batch == p.max_q_len * q_token);
  if (contiguous) plan.q_lines = lines(p.total_q * q_token * dtype_bytes(p.q_dtype));
  if (c.block_table && c.table_rows > 0) {
    plan.table_lines = lines(((c.table_rows - 1) * c.block_table_stride + c.max_pages) * sizeof(int32_t));
  }
}

// How the kernel of plain calls finds the keys of an item.
void plan_plain(const Problem& p, Plan& plan) {
  plan.plain = true;
  plan.table_stride = static_cast<int32_t>(p.cache.block_table_stride);
  plan.new_keys = p.append.k ? static_cast<int32_t>(p.append.seqlen_new) : 0;
  plan.hidden_keys = p.window_right < 0 ? 0 : static_cast<int32_t>(pd_max(p.max_q_len - 1 - p.window_right, 0));
}

// How (item, kv_head) are dealt to blocks should the lengths hardly differ.
void plan_even_dealing(int64_t pairs, Plan& plan) {
  const int64_t blocks = plan.blocks.divisor, each = blocks / pd_max(pairs, 1);
  plan.whole_pairs = static_cast<int32_t>(pairs / blocks);
  plan.line_pairs = static_cast<int32_t>(pairs % blocks);
  // Hardly a block idle, or the line is better.
  if (10 * each * pairs >= 9 * blocks) plan.blocks_each = FastDivisor(each);
}

// Attention alone: the new tokens are in the cache, the queries rotated.
void attend(const Problem& p, const Context& context) {
  Plan plan = {};
  plan.blocks_each.divisor = 0;
  const bool matrix = fits_decode_kernel(p);
  const DecodeKernel decode = matrix ? decode_kernel_for(p) : DecodeKernel{};
  const void* kernel = matrix ? decode.function : simt_kernel_for(p);
  plan.rows_per_tile = matrix ? decode.rows : kSimtWarps;
  plan.tile_shift = matrix ? decode.tile_shift : kSimtTileShift;
  plan.page_size = FastDivisor(p.cache.block_table ? p.cache.page_size : 1);
  plan.group = FastDivisor(p.group);
  plan.kv_heads = FastDivisor(p.kv_heads);
  plan.chunk = FastDivisor(pd_max(p.attention_chunk, 1));
  const int64_t row_tiles = pd_ceil_div(p.max_q_len * p.group, plan.rows_per_tile);
  const int64_t items = p.batch * row_tiles;
  plan.row_tiles = FastDivisor(row_tiles);
  plan.items = static_cast<int32_t>(items);
  plan.partial_quads = static_cast<int32_t>(pd_ceil_div(p.head_dim_v, 4));
  plan.max_keys = static_cast<int32_t>(capacity(p));
  plan.max_pages = p.cache.block_table ? static_cast<int32_t>(p.cache.max_pages) : 0;
  plan.whole_runs = p.cache.block_table && p.cache.page_size % kRunKeys == 0;
  plan_prefetch(p, plan);

  int threads = kSimtWarps * kWarp, shared_bytes = 0;
  if (matrix) {
    const Cache& c = p.cache;
    const int64_t pieces = 16 / dtype_bytes(c.dtype);
    plan.k_page_pieces = static_cast<uint32_t>(c.k_stride_page / pieces);
    plan.k_slot_pieces = static_cast<uint32_t>(c.k_stride_slot / pieces);
    plan.v_page_pieces = static_cast<uint32_t>(c.v_stride_page / pieces);
    plan.v_slot_pieces = static_cast<uint32_t>(c.v_stride_slot / pieces);
    plan.k_head_pieces = static_cast<uint32_t>(c.k_stride_head / pieces);
    plan.v_head_pieces = static_cast<uint32_t>(c.v_stride_head / pieces);
    const int64_t most_units = items * p.kv_heads * ((capacity(p) >> plan.tile_shift) + 2 + kPairCost);
    plan.balanced = p.num_splits == 0 && !p.deterministic && items <= kMaxBalancedItems && most_units <= INT32_MAX;
    // No more (item, kv_head) than multiprocessors: most are cut, and big blocks make fewer parts; where there is
    // hardly a tile for every warp, blocks between the two sizes. With more of them, all warps of a big block would
    // meet too often. Only where results may depend on the batch, as the number of warps decides the order of sums.
    const int64_t pairs = items * p.kv_heads, tiles = pd_ceil_div(capacity(p), int64_t{1} << plan.tile_shift);
    const int processors = context.device.processors;
    const bool few = plan.balanced && pairs <= processors &&
                     decode.most_warps * decode.shared_bytes_per_warp + 2048 <= context.device.shared_per_block;
    const int warps = !few ? decode.warps
                           : pd_min(pairs * tiles <= decode.warps * processors ? 2 * decode.warps : decode.most_warps,
                                    decode.most_warps);
    threads = warps * kWarp;
    shared_bytes = warps * decode.shared_bytes_per_warp;
    if (plan.balanced && row_tiles == 1 && is_plain(p, decode.head_dim)) {
      plan_plain(p, plan);
      kernel = decode.plain_function;
    }
    if (plan.balanced) {
      const Kernel& properties = kernel_properties(kernel, context.index, threads, shared_bytes);
      plan.blocks = FastDivisor(int64_t{processors} * properties.blocks_per_processor);
      plan.pair_cost = kPairCost / properties.blocks_per_processor;
      plan_even_dealing(pairs, plan);
      plan.min_units = (few ? 1 : 2) * warps;
      plan.max_splits = FastDivisor(1);
    } else {
      plan_fixed_splits(p, 2048, p.deterministic ? 16 : 1, plan);
    }
  } else {
    // No more splits than the multiprocessors can use, so that long prompts do not fill the memory with partials.
    const int64_t enough = pd_ceil_div(int64_t{32} * context.device.processors, pd_max(items * p.kv_heads, 1));
    plan_fixed_splits(p, 512, p.deterministic ? kSimtSplits : static_cast<int>(pd_min(enough, kSimtSplits)), plan);
  }

  const int64_t blocks = plan.blocks.divisor;
  std::optional<Workspace> space;
  if (plan.balanced || plan.max_splits.divisor > 1) {
    const int64_t bytes = blocks * plan.rows_per_tile * row_words(plan.partial_quads) * sizeof(uint4);
    space.emplace(bytes);
    plan.partials = static_cast<uint4*>(space->data());
    // Only for compute-sanitizer's initcheck: words are polled before they are written.
    if (checks_enabled()) check_cuda(cudaMemsetAsync(plan.partials, 0, bytes, context.stream), "cudaMemsetAsync");
  }

  if (plan.plain) {
    launch(kernel, blocks, threads, shared_bytes, context, plain_call(p, plan));
  } else {
    launch(kernel, blocks, threads, shared_bytes, context, p, plan);
  }
}

// Whether rows move in 16-byte pieces, with no arithmetic but the conversion to fp8.
bool fits_copy_kernel(const Problem& p) {
  const Append& a = p.append;
  const Cache& c = p.cache;
  const int64_t from = dtype_bytes(a.dtype), to = dtype_bytes(c.dtype);
  if (p.rotary.cos || (a.dtype != c.dtype && from != 2)) return false;
  if (p.head_dim * from % 16 != 0 || p.head_dim_v * from % 16 != 0) return false;
  if (!aligned(a.k) || !aligned(a.v) || !aligned(c.k) || !aligned(c.v)) return false;
  for (int64_t stride :
       {a.k_stride_batch, a.k_stride_token, a.k_stride_head, a.v_stride_batch, a.v_stride_token, a.v_stride_head}) {
    if (!aligned(stride, from)) return false;
  }
  for (int64_t stride :
       {c.k_stride_page, c.k_stride_slot, c.k_stride_head, c.v_stride_page, c.v_stride_slot, c.v_stride_head}) {
    if (stride * to % (to == 1 ? 8 : 16) != 0) return false;
  }
  return true;
}

// Writes the new tokens; with a rotary table also puts the rotated queries into rotated_q.
void append_tokens(const Problem& p, void* rotated_q, const Context& context) {
  AppendPlan plan = {};
  plan.page_size = FastDivisor(pd_max(p.cache.page_size, 1));
  plan.seqlen_new = FastDivisor(pd_max(p.append.seqlen_new, 1));
  plan.total_new = p.append.total_new;
  plan.rotated_q = rotated_q;
  plan.moving_queries = p.window_left >= 0 || p.window_right >= 0 || p.attention_chunk > 0;
  const int64_t tokens = p.append.total_new + (rotated_q ? p.total_q : 0);
  if (tokens == 0) return;
  if (rotated_q || !fits_copy_kernel(p)) {
    launch(reinterpret_cast<const void*>(&append_kernel), tokens, kAppendThreads, 0, context, p, plan);
    return;
  }
  const int64_t bytes = dtype_bytes(p.append.dtype);
  plan.vectors_k = FastDivisor(p.head_dim * bytes / 16);
  plan.vectors_v = FastDivisor(p.head_dim_v * bytes / 16);
  const int64_t pieces = p.kv_heads * (p.head_dim + p.head_dim_v) * bytes / 16;
  plan.width = FastDivisor(pd_max(pd_min(pieces, kAppendThreads), 1));
  plan.rows = static_cast<int32_t>(kAppendThreads / plan.width.divisor);
  // Several pieces per thread keep more of the memory busy, once there are tokens for every multiprocessor.
  const bool many = tokens > 8 * int64_t{context.device.processors};
  const bool fp8 = p.append.dtype != p.cache.dtype;
  const void* kernel = fp8    ? many ? reinterpret_cast<const void*>(&copy_kernel<kManyTokens, true>)
                                     : reinterpret_cast<const void*>(&copy_kernel<1, true>)
                       : many ? reinterpret_cast<const void*>(&copy_kernel<kManyTokens, false>)
                              : reinterpret_cast<const void*>(&copy_kernel<1, false>);
  launch(kernel, pd_ceil_div(tokens, many ? kManyTokens : 1), kAppendThreads, 0, context, p, plan);
}

}  // namespace

std::string unsupported_reason(const Problem& p) {
  if (p.batch > INT32_MAX || p.total_q * p.group > INT32_MAX || capacity(p) >= kMaxKeys) {
    return "cuda: expected sizes below 2^31 (batch, total_q * group) and of 2^30 (keys of one request), got " +
           std::to_string(p.batch) + ", " + std::to_string(p.total_q * p.group) + ", " + std::to_string(capacity(p));
  }
  return "";
}

void run_attention(const Problem& problem) {
  Problem p = problem;
  // Farther than any key, and sums of two still fit into 32 bits.
  p.window_left = pd_min(p.window_left, kMaxKeys);
  p.window_right = pd_min(p.window_right, kMaxKeys);
  p.attention_chunk = pd_min(p.attention_chunk, kMaxKeys);
  const Context context = current_context();
  if (checks_enabled()) check_values_on_device(p, context.stream);

  std::optional<Workspace> rotated;
  if (p.append.k && p.kv_heads > 0) {
    if (p.rotary.cos) rotated.emplace(p.total_q * p.q_heads * p.head_dim * dtype_bytes(p.q_dtype));
    append_tokens(p, rotated ? rotated->data() : nullptr, context);
    if (rotated) {
      p.q = rotated->data();
      p.q_stride_head = p.head_dim;
      p.q_stride_token = p.q_heads * p.head_dim;
      p.q_stride_batch = p.cu_seqlens_q ? 0 : p.max_q_len * p.q_stride_token;
    }
  }
  if (p.total_q == 0 || p.q_heads == 0) return;
  attend(p, context);
}

void run_kv_write(const Problem& p) {
  const Context context = current_context();
  if (checks_enabled()) check_values_on_device(p, context.stream);
  append_tokens(p, nullptr, context);
}

std::string instruction_set() { return ""; }

}  // namespace paged_attn
