// PAGED_ATTN_CHECK=1: lengths and page numbers are read on the device before anything else runs, and the first wrong one
// becomes an error. This waits for the device; while a graph is being captured it cannot, and does nothing.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "append.cuh"

namespace paged_attn {

enum class Fault : int { kNone, kLength, kTable, kRow, kPage, kSlot };

struct FaultRecord {
  int lock;
  Fault fault;
  int64_t where, index, value;
};

PD_DEVICE void report(FaultRecord* record, Fault fault, int64_t where, int64_t index, int64_t value) {
  if (atomicCAS(&record->lock, 0, 1) != 0) return;
  record->fault = fault;
  record->where = where;
  record->index = index;
  record->value = value;
}

// Grid: requests, then new tokens when they have slots of their own.
__global__ void check_kernel(const __grid_constant__ Problem p, FaultRecord* record) {
  const Cache& cache = p.cache;
  if (p.append.slot_mapping) {
    int64_t slots = cache.num_pages * cache.page_size;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.append.total_new; i += gridDim.x * blockDim.x) {
      if (p.append.slot_mapping[i] >= slots) report(record, Fault::kSlot, i, 0, p.append.slot_mapping[i]);
    }
    return;
  }
  const int b = blockIdx.x;
  const int64_t cached = cached_length(p, b), length = cached + new_length(p, b);
  const int64_t limit = cache.block_table ? cache.max_pages * cache.page_size : cache.page_size;
  if (length < 0 || length > limit || (cached < 0 && length != 0)) {
    if (threadIdx.x == 0) report(record, Fault::kLength, b, limit, cached);
    return;
  }
  const int64_t row = table_row(p, b);
  const int64_t rows = cache.block_table ? cache.table_rows : cache.cu_seqlens_k ? p.batch : cache.num_pages;
  if (row < 0 || row >= rows) {
    if (threadIdx.x == 0) report(record, Fault::kRow, b, rows, row);
    return;
  }
  if (!cache.block_table) return;
  for (int64_t i = threadIdx.x; i * cache.page_size < length; i += blockDim.x) {
    int64_t page = cache.block_table[row * cache.block_table_stride + i];
    if (page < 0 || page >= cache.num_pages) report(record, Fault::kPage, b, i, page);
  }
}

static bool checks_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("PAGED_ATTN_CHECK");
    return value && std::string(value) != "" && std::string(value) != "0";
  }();
  return enabled;
}

static void check_on_device(const Problem& p, cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone || p.batch == 0) return;
  FaultRecord *device = nullptr, host = {};
  if (cudaMallocAsync(&device, sizeof(host), stream) != cudaSuccess) throw std::runtime_error("PAGED_ATTN_CHECK: out of memory");
  cudaMemsetAsync(device, 0, sizeof(host), stream);
  check_kernel<<<static_cast<unsigned>(p.batch), 128, 0, stream>>>(p, device);
  cudaMemcpyAsync(&host, device, sizeof(host), cudaMemcpyDeviceToHost, stream);
  cudaFreeAsync(device, stream);
  cudaError_t error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) throw std::runtime_error(std::string("PAGED_ATTN_CHECK: ") + cudaGetErrorString(error));
  const std::string where = std::to_string(host.where), value = std::to_string(host.value), limit = std::to_string(host.index);
  switch (host.fault) {
    case Fault::kLength:
      throw std::runtime_error("cache_seqlens[" + where + "]: expected a length that fits into " + limit +
                               " keys with the new tokens, got " + value);
    case Fault::kRow:
      throw std::runtime_error("cache_batch_idx[" + where + "]: expected 0 to " + std::to_string(host.index - 1) + ", got " + value);
    case Fault::kPage:
      throw std::runtime_error("block_table[" + where + ", " + limit + "]: expected a page from 0 to " +
                               std::to_string(p.cache.num_pages - 1) + ", got " + value);
    case Fault::kSlot:
      throw std::runtime_error("slot_mapping[" + where + "]: expected less than " +
                               std::to_string(p.cache.num_pages * p.cache.page_size) + ", got " + value);
    default:
      return;
  }
}

}  // namespace paged_attn
