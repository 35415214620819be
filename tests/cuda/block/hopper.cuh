// The instructions of paged_decode_cuda/hopper.cuh on the host, as the PTX manual describes them. The swizzle
// of 128 bytes is that of addresses: bits 4 to 6 are those of the place xor bits 7 to 9, for bulk copies and products
// alike. A product or a copy of 16 bytes happens when it is asked for or when it is waited for, at random.
#pragma once

#include "hopper.h"
#include "ptx.cuh"

struct CUtensorMap {
  const uint8_t* base;
  int64_t sizes[5], bytes[5];  // dim, slot, head, page; of q: dim, head of the group, kv_head, token, batch
  int box_rows, values;
};

namespace paged_attn {

PD_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - own_block().arena.get());
}
// In rows of 64 bytes only bits 4 and 5 change.
PD_DEVICE uint32_t swizzled(uint32_t address, int64_t row_bytes = 128) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

// ---- Barriers ----

PD_DEVICE void settle_barrier(Barrier& barrier) {
  ++machine.events;
  if (barrier.pending < 0) fail("a barrier has more arrivals than it counts");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}
PD_DEVICE void barrier_init(uint32_t address, int arrivals) {
  own_block().barriers[address] = {arrivals, arrivals, 0, 0};
}
PD_DEVICE Barrier& barrier_of(uint32_t address, int rank) {
  const auto found = machine.blocks[rank].barriers.find(address);
  if (found == machine.blocks[rank].barriers.end()) fail("a barrier that was not set up");
  if (machine.blocks[rank].running == 0) fail("a barrier of a block that has ended");
  return found->second;
}
PD_DEVICE void barrier_arrive_at(uint32_t address, int rank) {
  Barrier& barrier = barrier_of(address, rank);
  --barrier.pending;
  settle_barrier(barrier);
}
PD_DEVICE void barrier_arrive(uint32_t address) { barrier_arrive_at(address, blockIdx.y); }
PD_DEVICE void barrier_arrive_expecting(uint32_t address, int bytes) {
  Barrier& barrier = barrier_of(address, blockIdx.y);
  barrier.bytes += bytes;
  --barrier.pending;
  settle_barrier(barrier);
}
PD_DEVICE bool barrier_passed(uint32_t address, uint32_t phase) {
  return barrier_of(address, blockIdx.y).phase != phase;
}
PD_DEVICE void barrier_wait(uint32_t address, uint32_t phase) {
  const Barrier& barrier = barrier_of(address, blockIdx.y);
  wait_until("a barrier in shared memory", [&] { return barrier.phase != phase; });
}
PD_DEVICE void barrier_meet(uint32_t address, uint32_t phase) {
  barrier_arrive(address);
  barrier_wait(address, phase);
}

// Row `row` of a box, whose first value is at these places of the tensor.
template <int kRank>
PD_DEVICE void place_row(const CUtensorMap& map, uint32_t target, int rank, int row, const int64_t (&first)[kRank]) {
  const int64_t each = map.bytes[0];
  for (int i = 0; i < map.values; ++i) {
    bool inside = true;
    int64_t offset = 0;
    for (int d = 0; d < kRank; ++d) {
      const int64_t at = first[d] + (d == 0 ? i : 0);
      inside &= at >= 0 && at < map.sizes[d];
      offset += at * map.bytes[d];
    }
    uint16_t value = 0;
    if (inside) memcpy(&value, map.base + offset, each);
    const uint32_t to = target + static_cast<uint32_t>((row * map.values + i) * each);
    memcpy(shared_at(swizzled(to, map.values * each), rank), &value, each);
  }
}
PD_DEVICE void place_box(const CUtensorMap& map, uint32_t target, int rank, int dim, int slot, int head, int page) {
  for (int row = 0; row < map.box_rows; ++row) place_row<4>(map, target, rank, row, {dim, slot + row, head, page});
}
PD_DEVICE void copy_box_to(uint16_t blocks, uint32_t target, const CUtensorMap& map, uint32_t barrier, int dim,
                           int slot, int head, int page, uint64_t) {
  if (target % (map.values * map.bytes[0] * 8) != 0) fail("a box that does not begin where it may");
  for (int rank = 0; rank < gridDim.y; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    machine.on_their_way.push_back([=] {
      place_box(map, target, rank, dim, slot, head, page);
      Barrier& full = barrier_of(barrier, rank);
      full.bytes -= map.box_rows * map.values * map.bytes[0];
      settle_barrier(full);
    });
  }
}
constexpr uint64_t kCopyAsUsual = 0, kCopyReadOnce = 1;
PD_DEVICE void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int dim, int slot, int head,
                        int page, uint64_t policy) {
  copy_box_to(static_cast<uint16_t>(1 << blockIdx.y), target, map, barrier, dim, slot, head, page, policy);
}

PD_DEVICE void copy_query_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int dim, int head, int token,
                              int b) {
  if (target % kBlockBytes != 0) fail("a box that does not begin where it may");
  machine.on_their_way.push_back([=, rank = static_cast<int>(blockIdx.y)] {
    const int group = static_cast<int>(map.sizes[1]);
    for (int row = 0; row < map.box_rows; ++row)
      place_row<5>(map, target, rank, row, {dim, row % group, head, token + row / group, b});
    Barrier& full = barrier_of(barrier, rank);
    full.bytes -= map.box_rows * map.values * map.bytes[0];
    settle_barrier(full);
  });
}

PD_DEVICE void prefetch_description(const CUtensorMap&) {}
PD_DEVICE void prefetch_box(const CUtensorMap&, int, int, int, int) {}

PD_DEVICE void fence_async_proxy() {}
PD_DEVICE void publish_barriers() {}
PD_DEVICE void cluster_sync() { meet(machine.cluster, blockDim.x * gridDim.y, "its cluster"); }
PD_DEVICE void named_barrier_sync(int id, int threads) {
  static const char* const names[] = {"named barrier 0", "named barrier 1", "named barrier 2", "named barrier 3"};
  meet(own_block().named[id], threads, names[id % 4]);
}
// Who has read the votes of a meeting may come to the next one while others have not, but not to the one after it.
PD_DEVICE bool named_barrier_any(int id, int threads, bool mine) {
  NamedBarrier& barrier = own_block().named[id];
  bool& any = barrier.any[barrier.generation % 2];
  any = mine || (barrier.arrived > 0 && any);
  named_barrier_sync(id, threads);
  return any;
}
PD_DEVICE void named_barrier_arrive(int id, int threads) { arrive(own_block().named[id], threads); }
template <int kCount>
PD_DEVICE void give_registers() {}
template <int kCount>
PD_DEVICE void take_registers() {}

// ---- Words that blocks share ----

PD_DEVICE void store_relaxed(unsigned long long* word, unsigned long long value) { *word = value; }
PD_DEVICE unsigned long long load_relaxed(const unsigned long long* word) { return *word; }
PD_DEVICE void publish_word(unsigned long long* word, unsigned long long value) { *word = value; }
// Clusters run one after the other: what is not there will never be.
PD_DEVICE void await_word(const unsigned long long* word, unsigned long long value) {
  if (*word != value) fail("a word of another cluster is not there");
}
template <typename T>
T load_shared_by_blocks(const T* place) {
  return *place;
}
PD_DEVICE void atomicAdd(int* place, int value) { *place += value; }
PD_DEVICE unsigned long long atomicAdd(unsigned long long* word, unsigned long long n) {
  const unsigned long long before = *word;
  *word += n;
  return before;
}

// ---- Pieces of 16 bytes ----

using Actions = std::vector<std::function<void()>>;
struct Batches {
  std::vector<Actions> batches;
  Actions open;
};
struct Products {
  std::vector<Actions> groups;
  Actions open;
};
inline std::unordered_map<int, Batches> own_pieces;  // by thread
inline std::unordered_map<int, Products> own_products;
PD_DEVICE int own_number() { return blockIdx.y * kMostThreads + threadIdx.x; }

PD_DEVICE void copy_piece(uint32_t target, const void* global, bool valid) {
  uint8_t* const to = shared_at(target);
  const auto copy = [=] { valid ? (void)memcpy(to, global, 16) : (void)memset(to, 0, 16); };
  if (chance()) return copy();
  own_pieces[own_number()].open.push_back(copy);
}
PD_DEVICE void commit_pieces() {
  Batches& own = own_pieces[own_number()];
  own.batches.push_back(std::move(own.open));
  own.open.clear();
}
template <int kPending>
PD_DEVICE void await_batches() {
  Batches& own = own_pieces[own_number()];
  while (own.batches.size() > kPending) {
    for (const auto& copy : own.batches.front()) copy();
    own.batches.erase(own.batches.begin());
  }
}
PD_DEVICE void await_pieces() {
  commit_pieces();
  await_batches<0>();
}
PD_DEVICE void arrive_with_pieces(uint32_t barrier) {
  commit_pieces();
  Batches& own = own_pieces[own_number()];
  const auto arrive = [batches = std::move(own.batches), barrier, rank = static_cast<int>(blockIdx.y)] {
    for (const Actions& batch : batches) {
      for (const auto& copy : batch) copy();
    }
    barrier_arrive_at(barrier, rank);
  };
  own.batches.clear();
  machine.on_their_way.push_back(arrive);
}
PD_DEVICE void store_piece(uint32_t target, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t words[4] = {x, y, z, w};
  memcpy(shared_at(target), words, 16);
}
PD_DEVICE void load_shared_floats(uint32_t from, float& x, float& y) {
  float pair[2];
  memcpy(pair, shared_at(from), 8);
  x = pair[0], y = pair[1];
}
PD_DEVICE void store_shared_floats(uint32_t target, float x, float y) {
  const float pair[2] = {x, y};
  memcpy(shared_at(target), pair, 8);
}
PD_DEVICE void load_piece(uint32_t target, uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w) {
  uint32_t words[4];
  memcpy(words, shared_at(target), 16);
  x = words[0], y = words[1], z = words[2], w = words[3];
}
// Of each matrix a lane has two values of a row, which go to two columns.
template <int kMatrices>
PD_DEVICE void store_transposed(uint32_t target, const uint32_t (&w)[kMatrices]) {
  if (lane() < 8 * kMatrices && target % 16 != 0) fail("a column of a matrix at a place that is not aligned");
  const int64_t* const columns = exchange(target);
  for (int i = 0; i < 2 * kMatrices; ++i) {
    const uint16_t value = static_cast<uint16_t>(w[i / 2] >> i % 2 * 16);
    const int column = lane() % 4 * 2 + i % 2;
    memcpy(shared_at(static_cast<uint32_t>(columns[i / 2 * 8 + column]) + lane() / 4 * 2), &value, 2);
  }
}
PD_DEVICE void load_or_zero(const void* global, bool valid, uint32_t (&words)[4]) {
  memset(words, 0, 16);
  if (valid) memcpy(words, global, 16);
}

// ---- Products ----

PD_DEVICE uint64_t matrix_descriptor(uint32_t address, int column_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(kBlockBytes >> 4) << 32 | static_cast<uint64_t>(column_bytes >> 4) << 16 |
         static_cast<uint64_t>((address & 0x3ffff) >> 4);
}
PD_DEVICE uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + static_cast<uint64_t>(bytes >> 4); }

struct Matrix {
  uint32_t address, leading, stride;  // bytes; stride: from 8 rows to the next 8
  explicit Matrix(uint64_t descriptor)
      : address(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes");
  }
  // Row r and value i of a matrix whose rows are 128 bytes; columns of 64 values are `leading` apart.
  uint32_t at(int row, int i) const {
    return swizzled(address + row / 8 * stride + row % 8 * kRowBytes + i / kColumn * leading + i % kColumn * 2);
  }
  // The same of 8-bit values in one column.
  uint32_t byte_at(int row, int i) const { return swizzled(address + row / 8 * stride + row % 8 * kRowBytes + i); }
};

PD_DEVICE void products_begin() {}
PD_DEVICE void products_commit() {
  Products& own = own_products[own_number()];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
template <int kPending>
PD_DEVICE void products_wait() {
  Products& own = own_products[own_number()];
  if (!own.open.empty()) fail("a product that was not committed");
  while (own.groups.size() > kPending) {
    for (const auto& product : own.groups.front()) product();
    own.groups.erase(own.groups.begin());
  }
}
template <int kCount>
PD_DEVICE void settle(float (&)[kCount]) {}
template <int kCount>
PD_DEVICE void settle(uint32_t (&)[kCount]) {}
PD_DEVICE void settle(const char*&) {}
PD_DEVICE uint64_t made_now(uint64_t descriptor) { return descriptor; }
PD_DEVICE void settle(int&) {}
PD_DEVICE void await_value(float) {}

PD_DEVICE void issue_product(std::function<void()> product) {
  Products& own = own_products[own_number()];
  if (own.open.empty() && own.groups.empty() && chance()) return product();
  own.open.push_back(std::move(product));
}

// d[4 j + 2 r + e]: row 16 * warp + lane / 4 + 8 r, column 8 j + lane % 4 * 2 + e.
template <typename Type, int kCount>
PD_DEVICE void multiply_scores(Type, float (&d)[kCount], uint64_t q, uint64_t k, int keep) {
  const int row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4, column = threadIdx.x % 4 * 2;
  float* const sums = d;
  uint8_t* const memory = shared_at(0);
  issue_product([=] {
    const Matrix a(q), b(k);
    for (int i = 0; i < kCount; ++i) {
      const int m = row + i / 2 % 2 * 8, n = i / 4 * 8 + column + i % 2;
      double sum = keep ? sums[i] : 0.;
      for (int t = 0; t < 16; ++t) {
        sum += double(value_at<Type>(memory + a.at(m, t))) * value_at<Type>(memory + b.at(n, t));
      }
      sums[i] = static_cast<float>(sum);
    }
  });
}

// Both operands in shared memory. The instruction takes the high half of both descriptors for granted.
template <bool kTransposed, typename Type, int kCount>
PD_DEVICE void multiply_few(Type, float (&d)[kCount], uint64_t left, uint64_t right, int keep) {
  constexpr uint64_t kHigh = uint64_t{1} << 30 | kBlockBytes >> 4;
  if (left >> 32 != kHigh || right >> 32 != kHigh) fail("a descriptor of another swizzle or of other distances");
  const int row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4, column = threadIdx.x % 4 * 2;
  float* const sums = d;
  uint8_t* const memory = shared_at(0);
  issue_product([=] {
    const Matrix a(left), b(right);
    double x[2][16], y[kCount / 2][16];  // of the rows of both operands that meet in these sums
    for (int t = 0; t < 16; ++t) {
      for (int i = 0; i < 2; ++i) {
        const int m = row + i * 8;
        x[i][t] = value_at<Type>(memory + (kTransposed ? a.at(t, m) : a.at(m, t)));
      }
      for (int i = 0; i < kCount / 2; ++i) y[i][t] = value_at<Type>(memory + b.at(i / 2 * 8 + column + i % 2, t));
    }
    for (int i = 0; i < kCount; ++i) {
      double sum = keep ? sums[i] : 0.;
      for (int t = 0; t < 16; ++t) sum += x[i / 2 % 2][t] * y[i / 4 * 2 + i % 2][t];
      sums[i] = static_cast<float>(sum);
    }
  });
}

// Terms 2 (lane % 4), + 1 of rows g and g + 8 are in a0 and a1; those 8 further in a2 and a3. The four lanes of a row
// have its terms between them.
struct Terms {
  float x[2][16];
};
template <typename Type>
PD_DEVICE Terms left_terms(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
  const uint32_t own[4] = {a0, a1, a2, a3};
  Terms terms;
  for (int i = 0; i < 4; ++i) {
    for (int t = 0; t < 4; ++t) {
      const uint32_t word = __shfl_sync(~0u, own[i], lane() / 4 * 4 + t);
      const uint16_t halves[2] = {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
      for (int e = 0; e < 2; ++e) terms.x[i % 2][i / 2 * 8 + t * 2 + e] = value_at<Type>(&halves[e]);
    }
  }
  return terms;
}

// at(b, term, column): where a value of the right operand is.
template <typename Type, int kCount, typename Place>
PD_DEVICE void multiply_terms(float (&d)[kCount], const Terms& left, uint64_t right, int keep, Place at) {
  const int column = threadIdx.x % 4 * 2;
  float* const sums = d;
  uint8_t* const memory = shared_at(0);
  issue_product([=] {
    const Matrix b(right);
    for (int i = 0; i < kCount; ++i) {
      double sum = keep ? sums[i] : 0.;
      for (int t = 0; t < 16; ++t) {
        sum += double(left.x[i / 2 % 2][t]) * value_at<Type>(memory + at(b, t, i / 4 * 8 + column + i % 2));
      }
      sums[i] = static_cast<float>(sum);
    }
  });
}

template <typename Type, int kCount>
PD_DEVICE void multiply_values(Type, float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                               uint64_t v) {
  multiply_terms<Type>(d, left_terms<Type>(a0, a1, a2, a3), v, 1,
                       [](const Matrix& b, int term, int column) { return b.at(term, column); });
}
template <int kCount>
PD_DEVICE void multiply_keys(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t q,
                             int keep) {
  multiply_terms<Fp16>(d, left_terms<Fp16>(a0, a1, a2, a3), q, keep,
                       [](const Matrix& b, int term, int column) { return b.at(column, term); });
}

// ---- Code ----

template <int kInstructions>
PD_DEVICE void leave_gap() {}

}  // namespace paged_attn
