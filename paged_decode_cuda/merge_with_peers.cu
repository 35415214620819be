// Exchanging and merging the results of several GPUs in one kernel: a warp for each token and head.
//
//     a word, 8 bytes   [ payload, 4 bytes | the number of the call, 4 bytes ]
//     a row of a part   [ pairs of words with the values | lse, nothing ]
//
// A warp writes its row into the memory of the other GPUs, then looks into its own until the rows of the others are
// there. A word is stored and loaded as one, so whoever finds the number of the call has the payload: there is no fence
// between data and a flag, and nothing to clear. (PTX ISA, "Memory Consistency Model": a vector access is a set of
// scalar ones in no order, and these are 64 bits wide.)
//
// A row's place is used in turns with a second one. So nothing is overwritten that somebody still reads: a GPU writes
// for call n + 2 when its kernel of call n + 1 has ended, for which it needed words of call n + 1 from every other GPU,
// which sends them after its kernel of call n.
//
// The number of the call is counted for each row in the memory of the device, so that the replay of a graph goes on
// counting. All GPUs make the same calls in the same order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend.h"
#include "ptx.cuh"
#include "runtime.h"
#include "spec/merge.h"
#include "spec/ranges.h"

// What assert() calls; its header leaves it out where NDEBUG is set.
extern "C" __device__ __attribute__((noreturn)) void __assertfail(const char* message, const char* file, unsigned line,
                                                                  const char* function, size_t char_size);

namespace paged_attn {
namespace {

constexpr int kMergeWarps = 4;
constexpr int kPartsAtOnce = 2;            // whose words are awaited together
constexpr uint32_t kMostLooks = 1u << 30;  // for a word that is not there yet; ten minutes at least

struct alignas(16) PairOfWords {
  unsigned long long words[2];
};

PD_DEVICE void store_pair(PairOfWords* pair, uint2 payload, uint32_t call) {
  const unsigned long long tag = static_cast<unsigned long long>(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(pair), "l"(tag | payload.x), "l"(tag | payload.y)
               : "memory");
}

// Whether the pair is that of the call.
PD_DEVICE bool load_pair(const PairOfWords* pair, uint2& payload, uint32_t call) {
  unsigned long long x, y;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(x), "=l"(y) : "l"(pair) : "memory");
  payload = make_uint2(static_cast<uint32_t>(x), static_cast<uint32_t>(y));
  return static_cast<uint32_t>(x >> 32) == call && static_cast<uint32_t>(y >> 32) == call;
}

// Ends the kernel with an error that the host finds (cudaErrorAssert) and these words on stderr.
PD_DEVICE void give_up() {
  __assertfail("paged_attn: a GPU waited too long for another: did all ranks make the same calls in the same order?",
               "merge_with_peers.cu", __LINE__, "merge_with_peers", sizeof(char));
}

// The union so far of four or two values of a row.
template <int kValues>
struct Union {
  float m = -INFINITY, l = 0.f, values[kValues] = {};

  // A part without keys has lse -inf, and two of them no difference. The values of one without weight may be anything.
  template <typename T>
  PD_MEMBER void add(float lse, uint2 payload) {
    const float top = fmaxf(m, lse);
    const float old_share = m == top ? 1.f : __expf(m - top), share = lse == top ? 1.f : __expf(lse - top);
    const bool counts = lse != -INFINITY && share != 0;
    T part[kValues];
    memcpy(part, &payload, sizeof(part));
    m = top;
    l = l * old_share + share;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values[i] = values[i] * old_share + share * (counts ? static_cast<float>(part[i]) : 0);
  }
};

// One token and head.
template <typename T>
struct Row {
  static constexpr int kValues = kPairBytes / sizeof(T);

  const PeerMergeProblem& p;
  int index, token, head;
  uint32_t call;

  PD_MEMBER PairOfWords* place(int reader, int writer) const {
    PairOfWords* const memory = static_cast<PairOfWords*>(p.memory_of_ranks[reader]);
    return memory + (static_cast<int64_t>((call & 1) * p.ranks + writer) * p.rows + index) * p.row_pairs;
  }
  PD_MEMBER int value_pairs() const { return (p.head_dim + kValues - 1) / kValues; }
  PD_MEMBER float own_lse() const { return p.lse[token * p.lse_stride_token + head * p.lse_stride_head]; }
  PD_MEMBER uint2 own_values(int pair) const {
    const T* part = static_cast<const T*>(p.part) + token * p.part_stride_token + head * p.part_stride_head;
    T values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int d = pair * kValues + i;
      values[i] = d < p.head_dim ? part[d] : static_cast<T>(0.f);
    }
    uint2 payload;
    memcpy(&payload, values, sizeof(values));
    return payload;
  }

  PD_MEMBER void send(int reader, int lane) const {
    PairOfWords* const there = place(reader, p.rank);
    for (int pair = lane; pair < value_pairs(); pair += 32) store_pair(there + pair, own_values(pair), call);
    if (lane == 0) store_pair(there + value_pairs(), make_uint2(__float_as_uint(own_lse()), 0), call);
  }

  // The parts of all ranks in the order of their ranks, so that everybody gets the same bits.
  PD_MEMBER Union<kValues> receive(int pair) const {
    Union<kValues> sum;
    const uint2 mine = own_values(pair), my_lse = make_uint2(__float_as_uint(own_lse()), 0);
    for (int first = 0; first < p.ranks; first += kPartsAtOnce) {
      uint2 values[kPartsAtOnce] = {}, lse[kPartsAtOnce] = {};
      uint32_t looks = 0;
      bool all;
      do {
        all = true;
#pragma unroll
        for (int j = 0; j < kPartsAtOnce; ++j) {
          const int writer = first + j;
          if (writer >= p.ranks || writer == p.rank) continue;
          const PairOfWords* const here = place(p.rank, writer);
          const bool found = load_pair(here + pair, values[j], call);
          all = load_pair(here + value_pairs(), lse[j], call) && found && all;
        }
        if (++looks == kMostLooks) give_up();
      } while (!all);
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
        const bool own = first + j == p.rank;
        if (first + j < p.ranks)
          sum.template add<T>(__uint_as_float(own ? my_lse.x : lse[j].x), own ? mine : values[j]);
      }
    }
    return sum;
  }
};

template <typename T>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_with_peers_kernel(const __grid_constant__ PeerMergeProblem p) {
  let_successor_start();
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int index = static_cast<int>(blockIdx.x) * kMergeWarps + threadIdx.x / 32;
  if (index >= p.tokens * p.heads) return;
  const Row<T> row = {p, index, index / p.heads, index % p.heads, p.calls[index] + 1};
  const bool all_heads = p.own_heads == p.heads;
  const int reader = row.head / p.own_heads;  // where each rank has heads of its own
  for (int i = 1; i < p.ranks; ++i) {
    const int other = (p.rank + i) % p.ranks;
    if (all_heads || other == reader) row.send(other, lane);
  }
  __syncwarp();
  if (lane == 0) p.calls[index] = row.call;
  if (!all_heads && reader != p.rank) return;
  const int head = row.head - (all_heads ? 0 : p.rank * p.own_heads);
  T* const out = static_cast<T*>(p.out) + row.token * p.out_stride_token + head * p.out_stride_head;
  constexpr int kValues = Row<T>::kValues;
  for (int pair = lane; pair < row.value_pairs(); pair += 32) {
    const Union<kValues> sum = row.receive(pair);
    const float scale = 1.f / sum.l;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int d = pair * kValues + i;
      if (d < p.head_dim) out[d] = static_cast<T>(sum.values[i] * scale);
    }
    if (p.merged_lse && pair == 0)
      p.merged_lse.data[row.token * p.merged_lse_stride_token + head] = sum.m + logf(sum.l);
  }
}

const void* kernel_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return reinterpret_cast<const void*>(&merge_with_peers_kernel<__half>);
    case DType::kBFloat16: return reinterpret_cast<const void*>(&merge_with_peers_kernel<__nv_bfloat16>);
    default: return reinterpret_cast<const void*>(&merge_with_peers_kernel<float>);
  }
}

}  // namespace

void run_merge_with_peers(const PeerMergeProblem& p) {
  const int64_t blocks = pd_ceil_div(int64_t{p.tokens} * p.heads, int64_t{kMergeWarps});
  Launches launches(current_context());
  launches.add(kernel_of(p.dtype), {blocks, 32 * kMergeWarps, 0}, p);
  launches.run();
}

}  // namespace paged_attn
