// The exchange of partials between thread blocks, alone: what paged_decode_cuda/exchange.cuh assumes of the GPU, and
// what it does when an assumption fails. tests/test_cuda.py builds it and runs it once for every test below.
//
//   exchange torn    words of 16 bytes are never seen half written
//   exchange slow    a partial that comes very late, while another kernel holds nearly all multiprocessors, is added
//   exchange lost    a partial that never comes ends the kernel with an error
#include <stdio.h>
#include <string.h>

#define PD_MOST_LOOKS most_looks
static __device__ int most_looks;

#include "exchange.cuh"

using namespace paged_attn;

namespace {

constexpr int kRows = 8, kQuads = 32;  // of a partial: head_dim 128
constexpr int kThreads = 256;          // a quad of a row each

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  printf("%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

__device__ unsigned long long payload_of(unsigned long long tag) { return tag * 0x9e3779b97f4a7c15ull ^ ~tag; }

// Even blocks store words, odd ones look at those of the block before them. All words of a pair lie side by side, so
// the lines are written and read all the time.
__global__ void store_and_look(TaggedWord* words, int rounds, unsigned long long* torn, unsigned long long* fresh) {
  TaggedWord* word = words + blockIdx.x / 2 * blockDim.x + threadIdx.x;
  unsigned long long last = 0, changes = 0;
  for (int i = 1; i <= rounds; ++i) {
    if (blockIdx.x % 2 == 0) {
      const unsigned long long payload = payload_of(i);
      store_word(word, __uint_as_float(static_cast<unsigned>(payload)),
                 __uint_as_float(static_cast<unsigned>(payload >> 32)), i);
    } else {
      unsigned long long payload, tag;
      load_word(word, payload, tag);
      if (tag != 0 && payload != payload_of(tag)) atomicAdd(torn, 1);
      changes += tag != last;
      last = tag;
    }
  }
  if (changes > 1) atomicAdd(fresh, changes);
}

__global__ void hold(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// Block 0 leaves its partial `cycles` late or, below 0, never; the last block adds those of all before it.
__global__ void leave_and_add(const __grid_constant__ Plan plan, long long cycles, float* result) {
  const int row = threadIdx.x / kQuads, quad = threadIdx.x % kQuads;
  if (blockIdx.x == 0) {
    if (cycles < 0) return;
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
  }
  RowSum sum;
  sum.m = static_cast<float>(blockIdx.x % 5);
  sum.l = 1.f;
  for (int e = 0; e < 4; ++e) sum.acc[e] = static_cast<float>(row * 128 + quad * 4 + e);
  if (blockIdx.x + 1 < gridDim.x) {
    write_partial(plan, row, quad, sum);
    return;
  }
  const Partials partials = {static_cast<int>(gridDim.x) - 1, 1, 1};
  add_partials(plan, 0, 1, partials, row, quad, sum);
  for (int e = 0; e < 4; ++e) result[(row * kQuads + quad) * 4 + e] = sum.acc[e] / sum.l;
}

int run_torn(int processors) {
  constexpr int kRounds = 20000;
  const int blocks = 2 * processors, threads = 256;
  TaggedWord* words;
  unsigned long long* counts;
  check(cudaMalloc(&words, blocks / 2 * threads * sizeof(TaggedWord)), "cudaMalloc");
  check(cudaMalloc(&counts, 2 * sizeof(*counts)), "cudaMalloc");
  check(cudaMemset(words, 0, blocks / 2 * threads * sizeof(TaggedWord)), "cudaMemset");
  check(cudaMemset(counts, 0, 2 * sizeof(*counts)), "cudaMemset");
  store_and_look<<<blocks, threads>>>(words, kRounds, counts, counts + 1);
  unsigned long long result[2];
  check(cudaMemcpy(result, counts, sizeof(result), cudaMemcpyDeviceToHost), "torn");
  printf("%llu torn of %llu changes seen\n", result[0], result[1]);
  return result[0] == 0 && result[1] > 1000 ? 0 : 1;
}

int run_exchange(int processors, bool lost) {
  const int looks = lost ? 1 << 12 : 1 << 25, blocks = 5 * processors;
  check(cudaMemcpyToSymbol(most_looks, &looks, sizeof(looks)), "most_looks");
  Plan plan = {};
  plan.rows_per_tile = kRows;
  plan.partial_quads = kQuads;
  const size_t bytes = static_cast<size_t>(blocks) * kRows * row_words(kQuads) * sizeof(TaggedWord);
  float* result;
  check(cudaMalloc(&plan.partials, bytes), "cudaMalloc");
  check(cudaMalloc(&result, kRows * kQuads * 4 * sizeof(float)), "cudaMalloc");
  cudaStream_t other;
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  for (int launch = 0; launch < (lost ? 1 : 5); ++launch) {
    // Nonsense in the workspace, as an allocator hands it out.
    check(cudaMemset(plan.partials, 0x5a + launch, bytes), "cudaMemset");
    // The other kernel leaves room on one multiprocessor; the blocks of ours get to the rest when it ends.
    hold<<<2 * processors - 2, 1024, 0, other>>>(100'000'000);
    leave_and_add<<<blocks, kThreads>>>(plan, lost ? -1 : 50'000'000, result);
    const cudaError_t error = cudaDeviceSynchronize();
    if (lost) {
      printf("%s\n", cudaGetErrorString(error));
      return error == cudaErrorAssert ? 0 : 1;
    }
    check(error, "exchange");
    float values[kRows * kQuads * 4];
    check(cudaMemcpy(values, result, sizeof(values), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int i = 0; i < kRows * kQuads * 4; ++i) {
      if (fabsf(values[i] - i) <= 1e-3f * i) continue;
      printf("launch %d: value %d is %f\n", launch, i, values[i]);
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const char* test = count > 1 ? arguments[1] : "";
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const int processors = properties.multiProcessorCount;
  if (strcmp(test, "torn") == 0) return run_torn(processors);
  if (strcmp(test, "slow") == 0) return run_exchange(processors, false);
  if (strcmp(test, "lost") == 0) return run_exchange(processors, true);
  printf("exchange torn | slow | lost\n");
  return 2;
}
