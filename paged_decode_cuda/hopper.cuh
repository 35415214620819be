// Hopper's instructions that the kernels of prefill, mla, decode and float32 need: barriers in shared memory
// (mbarrier), bulk copies (TMA), clusters, and products of a warpgroup (wgmma).
#pragma once

#include <cuda.h>

#include "hopper.h"
#include "ptx.cuh"

namespace paged_attn {

PD_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers ----

PD_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

PD_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when so many bytes of bulk copies have come.
PD_DEVICE void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase whose number has this parity.
PD_DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// Threads of a block meet here: each arrives, and waits for the others.
PD_DEVICE void barrier_meet(uint32_t barrier, uint32_t phase) {
  barrier_arrive(barrier);
  barrier_wait(barrier, phase);
}

// Whether barrier_wait() would return at once.
PD_DEVICE bool barrier_passed(uint32_t barrier, uint32_t phase) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(phase)
      : "memory");
  return passed != 0;
}

// How L2 shall treat what is copied, as createpolicy encodes it: evict_normal, or evict_first.
constexpr uint64_t kCopyAsUsual = 0x1000000000000000, kCopyReadOnce = 0x12f0000000000000;

// Copies a box of a tensor; what lies outside of the tensor is zero. The barrier counts the bytes.
PD_DEVICE void copy_box(uint32_t shared, const CUtensorMap& tensor, uint32_t barrier, int dim, int slot, int head,
                        int page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&tensor), "r"(barrier), "r"(dim), "r"(slot), "r"(head), "r"(page), "l"(policy)
      : "memory");
}

// The same of queries: [batch, token, kv_head, head of its group, dim].
PD_DEVICE void copy_query_box(uint32_t shared, const CUtensorMap& tensor, uint32_t barrier, int dim, int head,
                              int token, int b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(&tensor), "r"(barrier), "r"(dim), "r"(0), "r"(head), "r"(token), "r"(b)
      : "memory");
}

// Fetches a description that will be used soon.
PD_DEVICE void prefetch_description(const CUtensorMap& tensor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor) : "memory");
}

// Asks for a box that will be copied soon: it comes into L2.
PD_DEVICE void prefetch_box(const CUtensorMap& tensor, int dim, int slot, int head, int page) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&tensor), "r"(dim),
               "r"(slot), "r"(head), "r"(page)
               : "memory");
}

// What ordinary stores or cp.async have put into shared memory becomes visible to wgmma.
PD_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

PD_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; whether `mine` is true for any of the threads.
PD_DEVICE bool named_barrier_any(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(mine)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

PD_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between the warpgroups of a block: each thread has kCount from then on.
template <int kCount>
PD_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
PD_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- Words that blocks share ----

PD_DEVICE void store_relaxed(unsigned long long* word, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

PD_DEVICE unsigned long long load_relaxed(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// What this thread has seen, its block's barriers included, comes before `value` for whoever awaits that.
PD_DEVICE void publish_word(unsigned long long* word, unsigned long long value) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  store_relaxed(word, value);
}

// Until another block has published `value`. It is late by the time that it needs for its keys at most; after 20 s the
// kernel ends with an error that the host finds (cudaErrorLaunchFailure). Not by a function as in exchange.cuh: in a
// kernel that calls one, the compiler lets no product run beside anything.
PD_DEVICE void await_word(const unsigned long long* word, unsigned long long value) {
  constexpr int kMostLooks = 1 << 25;
  int looks = 0;
  while (load_relaxed(word) != value) {
    if (++looks == kMostLooks) stop_with_error();
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// What another block has written during this launch.
PD_DEVICE float4 load_shared_by_blocks(const float4* place) { return __ldcg(place); }
PD_DEVICE float2 load_shared_by_blocks(const float2* place) { return __ldcg(place); }

// ---- Pieces of 16 bytes ----

// Asynchronous copy of 16 bytes; writes zeros and reads nothing when `valid` is false.
PD_DEVICE void copy_piece(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Pieces in batches, of which at most kPending may be on their way.
PD_DEVICE void commit_pieces() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
PD_DEVICE void await_batches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives for this thread when all its pieces so far are there. wgmma sees them after a fence_async_proxy() of whoever
// waits for them.
PD_DEVICE void arrive_with_pieces(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

PD_DEVICE void await_pieces() { asm volatile("cp.async.wait_all;" ::: "memory"); }

PD_DEVICE void store_piece(uint32_t shared, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

PD_DEVICE void load_piece(uint32_t shared, uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(shared)
               : "memory");
}

PD_DEVICE void load_shared_floats(uint32_t shared, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(shared) : "memory");
}

PD_DEVICE void store_shared_floats(uint32_t shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

// Loads 16 bytes that are read once by this block, or gives zeros.
PD_DEVICE void load_or_zero(const void* global, bool valid, uint32_t (&words)[4]) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(global), "r"(static_cast<int>(valid)));
}

// Transposes matrices of 8 x 8 16-bit values of a warp into shared memory, in order: lane i has values 2 (i % 4), + 1
// of row i / 4 of each, and lane 8 m + j says where column j of matrix m shall be, 16 bytes.
PD_DEVICE void store_transposed(uint32_t shared, const uint32_t (&w)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(w[0]), "r"(w[1])
               : "memory");
}
PD_DEVICE void store_transposed(uint32_t shared, const uint32_t (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// ---- Clusters ----

PD_DEVICE void cluster_sync() {
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Before cluster_sync(): barriers that were set up are there for the other blocks.
PD_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives at the barrier that stands at this address in the block of another rank. What this thread has written need
// not be there for that block: a release for the whole cluster would wait for all of its stores, on every tile.
PD_DEVICE void barrier_arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// copy_box() into the same place of every block of a mask; each block's own barrier counts the bytes.
PD_DEVICE void copy_box_to(uint16_t blocks, uint32_t shared, const CUtensorMap& tensor, uint32_t barrier, int dim,
                           int slot, int head, int page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_"
      "hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(shared),
      "l"(&tensor), "r"(barrier), "r"(dim), "r"(slot), "r"(head), "r"(page), "h"(blocks), "l"(policy)
      : "memory");
}

// ---- Code ----

// Instructions for a branch that nobody takes. They move the code behind them, see PrefillShape::kCodeGap.
template <int kInstructions>
PD_DEVICE void leave_gap() {
#pragma unroll
  for (int i = 0; i < kInstructions; ++i) asm volatile("nanosleep.u32 1;");
}

// ---- Products ----
//
// Matrices lie in shared memory as columns of 64 16-bit values: rows of 128 bytes one below the other, 8 rows (1 KiB,
// aligned) a block of the 128-byte swizzle, in which piece i of 16 bytes of row r is stored at place i ^ (r % 8).

// The shared memory descriptor of wgmma, its addresses and distances in units of 16 bytes. `column_bytes`: from one
// column to the next, where a product goes across columns (values, whose rows are keys).
PD_DEVICE uint64_t matrix_descriptor(uint32_t address, int column_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(kBlockBytes >> 4) << 32 | static_cast<uint64_t>(column_bytes >> 4) << 16 |
         static_cast<uint64_t>((address & 0x3ffff) >> 4);
}

// The descriptor of what lies `bytes` behind.
PD_DEVICE uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + static_cast<uint64_t>(bytes >> 4); }

// A descriptor is made here, not where the compiler likes to: for products of a stage that is awaited after this.
// Behind the wait, a dozen instructions one after the other would hold these products up.
PD_DEVICE uint64_t made_now(uint64_t descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Before the first product of a group: what was written to registers is visible to it.
PD_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PD_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are on their way.
template <int kPending>
PD_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not know that a product goes on after its instruction. These say that the registers count as read
// and written here, as warpgroup_fence_operand() does in CUTLASS.
template <int kCount>
PD_DEVICE void settle(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
PD_DEVICE void settle(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Without these the compiler adds an address up again wherever it is used, or keeps a number in a register for long.
PD_DEVICE void settle(int& number) { asm volatile("" : "+r"(number)); }
PD_DEVICE void settle(const char*& address) { asm volatile("" : "+l"(address)); }

// Ends when `sum`, which is never negative, is known. Without this the compiler moves a wait for products before
// arithmetic that could run beside them.
PD_DEVICE void await_value(float sum) {
  asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never nanosleep.u32 0;\n}\n" ::"f"(sum)
               : "memory");
}

#define PD_LIST_4 "%0, %1, %2, %3"
#define PD_LIST_8 PD_LIST_4 ", %4, %5, %6, %7"
#define PD_LIST_16 PD_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PD_LIST_32 PD_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PD_LIST_48 PD_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PD_LIST_64 PD_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PD_LIST_96                                                                                              \
  PD_LIST_64                                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PD_LIST_128                                                                                            \
  PD_LIST_96                                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define PD_OPERANDS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PD_OPERANDS_8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PD_OPERANDS_16(d, i) PD_OPERANDS_8(d, i), PD_OPERANDS_8(d, i + 8)
#define PD_OPERANDS_32(d, i) PD_OPERANDS_16(d, i), PD_OPERANDS_16(d, i + 16)
#define PD_OPERANDS_48(d, i) PD_OPERANDS_32(d, i), PD_OPERANDS_16(d, i + 32)
#define PD_OPERANDS_64(d, i) PD_OPERANDS_32(d, i), PD_OPERANDS_32(d, i + 32)
#define PD_OPERANDS_96(d, i) PD_OPERANDS_64(d, i), PD_OPERANDS_32(d, i + 64)
#define PD_OPERANDS_128(d, i) PD_OPERANDS_64(d, i), PD_OPERANDS_64(d, i + 64)

// The two products for kCount = columns / 2 sums per thread; A, B, C, D, E are the numbers of the operands behind them.
// scores: 64 rows of q, all in shared memory; `keep`: adds to d, else replaces it.
// values: weights in registers, d += weights * v, whose rows are the terms of the product.
#define PD_PRODUCTS(COLUMNS, COUNT, TYPE, A, B, C, D, E)                                                          \
  PD_DEVICE void multiply_scores(TYPE, float (&d)[COUNT], uint64_t q, uint64_t k, int keep) {                     \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                 "k16.f32." PD_NAME_##TYPE "." PD_NAME_##TYPE " {" PD_LIST_##COUNT "}, %" #A ", %" #B             \
                                                                                   ", keep, 1, 1, 0, 0;\n}\n"     \
                 : PD_OPERANDS_##COUNT(d, 0)                                                                      \
                 : "l"(q), "l"(k), "r"(keep)                                                                      \
                 : "memory");                                                                                     \
  }                                                                                                               \
  PD_DEVICE void multiply_values(TYPE, float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,     \
                                 uint64_t v) {                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." PD_NAME_##TYPE "." PD_NAME_##TYPE        \
                 " {" PD_LIST_##COUNT "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", 1, 1, 1, 1;\n"           \
                 : PD_OPERANDS_##COUNT(d, 0)                                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(v)                                                     \
                 : "memory");                                                                                     \
  }

#define PD_NAME_Bf16 "bf16"
#define PD_NAME_Fp16 "f16"
#define PD_PRODUCTS_OF(TYPE)                      \
  PD_PRODUCTS(64, 32, TYPE, 32, 33, 34, 35, 36)   \
  PD_PRODUCTS(96, 48, TYPE, 48, 49, 50, 51, 52)   \
  PD_PRODUCTS(128, 64, TYPE, 64, 65, 66, 67, 68)  \
  PD_PRODUCTS(192, 96, TYPE, 96, 97, 98, 99, 100) \
  PD_PRODUCTS(256, 128, TYPE, 128, 129, 130, 131, 132)

PD_PRODUCTS_OF(Bf16)
PD_PRODUCTS_OF(Fp16)

// d = or += 64 rows in registers times as many rows of shared memory as d has columns. TERMS: the instruction's name
// behind the columns; LAYOUT: what it says of the right operand. A to F are the numbers of the operands behind the
// sums.
#define PD_LEFT_IN_REGISTERS(NAME, TERMS, LAYOUT, COLUMNS, COUNT, A, B, C, D, E, F)                                  \
  PD_DEVICE void NAME(float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int keep) { \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #F                                                       \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS TERMS " {" PD_LIST_##COUNT                       \
                 "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", keep, 1, 1" LAYOUT ";\n}\n"                      \
                 : PD_OPERANDS_##COUNT(d, 0)                                                                         \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep)                                             \
                 : "memory");                                                                                        \
  }

// Keys, or latents, in fp16 meet rows of q, or of weights.
PD_LEFT_IN_REGISTERS(multiply_keys, "k16.f32.f16.f16", ", 0", 64, 32, 32, 33, 34, 35, 36, 37)
PD_LEFT_IN_REGISTERS(multiply_keys, "k16.f32.f16.f16", ", 0", 32, 16, 16, 17, 18, 19, 20, 21)

// d = or += 64 rows of `left` times the few rows of `right`, all in shared memory, for kCount = rows / 2 sums per
// thread. kTransposed: the terms of the product are rows of `left`, as keys are where dimensions are its columns. The
// high halves of all descriptors are alike, so only the low ones take registers.
#define PD_FEW_ROWS(ROWS, COUNT, TYPE, A, B, C, D, E)                                                         \
  template <bool kTransposed>                                                                                 \
  PD_DEVICE void multiply_few(TYPE, float (&d)[COUNT], uint64_t left, uint64_t right, int keep) {             \
    constexpr uint32_t kHigh = uint32_t{1} << 30 | kBlockBytes >> 4;                                          \
    asm volatile("{\n.reg .pred keep;\n.reg .b64 left, right;\nmov.b64 left, {%" #A ", %" #E                  \
                 "};\nmov.b64 right, {%" #B ", %" #E "};\nsetp.ne.b32 keep, %" #C                             \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." PD_NAME_##TYPE "." PD_NAME_##TYPE \
                 " {" PD_LIST_##COUNT "}, left, right, keep, 1, 1, %" #D ", 0;\n}\n"                          \
                 : PD_OPERANDS_##COUNT(d, 0)                                                                  \
                 : "r"(static_cast<uint32_t>(left)), "r"(static_cast<uint32_t>(right)), "r"(keep),            \
                   "n"(kTransposed ? 1 : 0), "n"(kHigh)                                                       \
                 : "memory");                                                                                 \
  }

#define PD_FEW_ROWS_OF(TYPE)                 \
  PD_FEW_ROWS(8, 4, TYPE, 4, 5, 6, 7, 8)     \
  PD_FEW_ROWS(16, 8, TYPE, 8, 9, 10, 11, 12) \
  PD_FEW_ROWS(32, 16, TYPE, 16, 17, 18, 19, 20)

PD_FEW_ROWS_OF(Bf16)
PD_FEW_ROWS_OF(Fp16)

#undef PD_FEW_ROWS_OF
#undef PD_PRODUCTS_OF
#undef PD_PRODUCTS

}  // namespace paged_attn
