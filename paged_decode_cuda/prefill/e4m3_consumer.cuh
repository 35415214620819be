// A consumer warpgroup of the prefill kernel whose operands are 8-bit; see transposer.cuh for the orders of keys and
// dimensions in the second product.
//
// The matrix unit adds 8-bit products with fewer bits than float32 has, and cuts off what it cannot hold: a sum over
// thousands of keys would come out too small. So it makes the sums of one tile of keys only, 64 dimensions at a time,
// and they are added in float32. The first 64 are made beside the search for the largest scores, the others beside the
// exponentials.
//
// In tall tiles three or four consumers have one product at a time, each beside the exponentials of the others. Then
// scores and the sums of a tile are never there together, and take the same registers.
#pragma once

#include "e4m3_products.cuh"
#include "partials.cuh"
#include "score_again.cuh"

namespace paged_attn {

// What PrefillRows needs to know of a step.
template <typename Shape>
struct E4m3Step {
  using Type = typename Shape::Type;
  static constexpr int kKeys = Shape::kStepKeys;
};

// Matrices in shared memory, by how many bytes behind its start they lie. Half a descriptor stays in a register: the
// compiler would find the start of shared memory again before each product, which takes longer than to wait for it.
class MatrixPlaces {
  uint32_t low;

 public:
  explicit PD_MEMBER MatrixPlaces(uint32_t shared) : low(static_cast<uint32_t>(matrix_descriptor(shared, kRowBytes))) {
    asm volatile("" : "+r"(low));
  }

  PD_MEMBER uint64_t descriptor(int at) const {
    return matrix_descriptor(0, kRowBytes) >> 32 << 32 | (low + (at >> 4));
  }

  PD_MEMBER uint32_t address(int at) const { return (low & 0x3fff) * 16 + at; }
};

template <typename Shape, bool kFull>
struct E4m3Consumer {
  static constexpr int kParts = Shape::kDimV / Shape::kPartDims;
  static constexpr int kKeys = Shape::kStepKeys;
  using Weights = uint32_t[kKeys / 8];

  using Scores = float[kKeys / 2];
  using Part = float[Shape::kPartDims / 2];

  float acc[Shape::kDimV / 2];
  PrefillRows<E4m3Step<Shape>, kFull> rows;
  bool have_bases;

  // Issues scores = q k^T.
  static PD_MEMBER void issue_scores(Scores& s, uint64_t queries, uint64_t keys) {
    settle(s);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kDim / 32; ++k) multiply_e4m3(s, advance(queries, k * 32), advance(keys, k * 32), k > 0);
    products_commit();
  }

  // Issues part = weights v, of part `kPart` of the dimensions, or adds it to what is there.
  template <int kPart, bool kKeep>
  static PD_MEMBER void issue_part(Part& part, Weights& weights, uint64_t values) {
    settle(part);
    settle(weights);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeys / 32; ++k) {
      multiply_e4m3(part, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                    advance(values, kPart * Shape::kPartDims * kRowBytes + k * 32), kKeep || k > 0);
    }
    products_commit();
  }

  // Adds the sums of a step, once they are there, to those of all steps.
  template <int kPart>
  PD_MEMBER void add_part(const Part& part) {
#pragma unroll
    for (int i = 0; i < Shape::kPartDims / 2; ++i) acc[kPart * Shape::kPartDims / 2 + i] += part[i];
  }

  // Whether every row sees all keys of a step.
  static PD_MEMBER bool sees_all(const Item& item, int first_key) {
    return first_key >= item.inner_begin && first_key + kKeys <= item.inner_end;
  }

  // Makes sums relative to references that have moved.
  template <int kCount>
  static PD_MEMBER void rescale(float (&sums)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] *= factor[i / 2 % 2];
  }

  // Weights as operands of the second product: of two blocks of 8 keys, two neighbours each.
  static PD_MEMBER void pack(const Scores& s, Weights& weights) {
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const int at = i / 2 * 8 + i % 2 * 2;
      weights[i] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
  }

  // ---- One product at a time ----

  // From queries and keys to weights; true where references move far out. Once all rows have a reference from keys that
  // they see, nobody looks for the largest score first: the sums of the weights tell when some are too large. Then this
  // warp computes its scores again.
  PD_MEMBER bool find_weights(const Problem& p, const PrefillCall& plan, const Item& item, const MatrixPlaces& places,
                              int queries_at, int keys_at, int first_row, int first_key, Weights& weights) {
    Scores s;
    issue_scores(s, places.descriptor(queries_at), places.descriptor(keys_at));
    const bool whole = sees_all(item, first_key), guess = have_bases && whole;
    products_wait<0>();
    settle(s);
    if (guess) {
      float sum[2];
      rows.guess(s, sum);
      pack(s, weights);
      if (!rows.too_large(sum)) {
        rows.add(sum);
        return false;
      }
      const int warp_at = threadIdx.x / kWarp % 4 * 16 * kRowBytes;
      score_again<Shape>(s, places.address(queries_at + warp_at), places.address(keys_at));
    }
    rows.score(p, s, first_key);
    if (!whole) {
      rows.find_ranges(p, plan, item, first_row);
      rows.mask(s, first_key);
    }
    float factor[2];
    const bool moved = rows.move_base(s, factor, guess ? rows.kBelow : rows.kFar);
    if (moved) rescale(acc, factor);
    have_bases = whole && rows.may_guess();
    rows.weigh(s);
    pack(s, weights);
    return moved && rows.is_far_out();
  }

  // Adds weights v, from part kPart on.
  template <int kPart>
  PD_MEMBER void add_values(Weights& weights, uint64_t values) {
    Part part;
    issue_part<kPart, false>(part, weights, values);
    products_wait<0>();
    settle(part);
    add_part<kPart>(part);
    if constexpr (kPart + 1 < kParts) add_values<kPart + 1>(weights, values);
  }

  // ---- What becomes of sums ----

  // Sums of dimensions 16 i + 4 t ... + 3 of row g + 8 r.
  PD_MEMBER float4 sums(int r, int i) const {
    return make_float4(acc[8 * i + 2 * r], acc[8 * i + 4 + 2 * r], acc[8 * i + 1 + 2 * r], acc[8 * i + 5 + 2 * r]);
  }

  // Writes the rows of a warp in bfloat16, or leaves them for the combine kernel.
  PD_MEMBER void store(const Problem& p, const PrefillCall& plan, const Work& work, int first_row) {
    const Item& item = work.item;
    const OwnRow own(rows, first_row);
    int64_t place = 0;  // in elements, of out or of PrefillCall::sums
    float normalizer = 0.f;
    if (own.row < item.rows) {
      if (work.cut) {
        place = begin_partial(p, plan, work, own) * p.head_dim_v;
      } else {
        const RowTarget target = row_target(p, plan, item, work.head, own.row);
        place = target.out;
        normalizer = finish_row(p, target, item.b, work.head, own.base, own.sum, own.speaks());
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t begin = OwnRow::told(place, r) + threadIdx.x % kQuad * 4;
      const float factor = OwnRow::told(normalizer, r);
      if (first_row + r * 8 >= item.rows) continue;
#pragma unroll
      for (int i = 0; i < Shape::kDimV / 16; ++i) {
        const int dim = i * 16 + threadIdx.x % kQuad * 4;
        if (dim >= p.head_dim_v) continue;
        const float4 x = sums(r, i);
        if (work.cut) {
          *reinterpret_cast<float4*>(plan.sums + begin + i * 16) = x;
        } else {
          const uint32_t low = pack_pair<true>(x.x * factor, x.y * factor);
          const uint32_t high = pack_pair<true>(x.z * factor, x.w * factor);
          *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + begin + i * 16) = make_uint2(low, high);
        }
      }
    }
  }
};

template <typename Shape, bool kFull>
PD_DEVICE void consume_e4m3(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control,
                            uint32_t shared) {
  const int consumer = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) - 1, lane = threadIdx.x % kWarp;
  const int first_row = consumer * 64 + threadIdx.x / kWarp % 4 * 16 + lane / 4;
  const MatrixPlaces places(shared);
  Ring<Shape::kKeyStages> keys;
  Ring<Shape::kTransposedStages> values;
  Ring<2> slot;
  Ring<Shape::kQueryStages> queries;
  using Consumer = E4m3Consumer<Shape, kFull>;
  Consumer own;
  typename Consumer::Weights weights;
  typename Consumer::Scores s;
  typename Consumer::Part part;
  constexpr int kLast = Consumer::kParts - 1, kStepKeys = Shape::kStepKeys;
  constexpr int kSteps = Shape::kKeys / kStepKeys;

  auto release = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const bool gathered = plan.box_rows == 0;
  auto await = [&](uint64_t& barrier, uint32_t phase) {
    barrier_wait(shared_address(&barrier), phase);
    if (gathered) fence_async_proxy();
  };
  auto release_keys = [&]() {
    release(control.keys_empty[keys.stage]);
    keys.advance();
  };
  auto release_values = [&]() {
    release(control.transposed_empty[values.stage]);
    values.advance();
  };

  while (true) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const Work& work = control.work[slot.stage];  // read again where it is needed: registers are scarce
    if (!work.exists) break;
    await(control.queries_full[queries.stage], queries.phase);
    const int last_tile = work.item.first_tile;
    int tile = last_tile + work.item.tiles - 1;
    if (consumer * 64 >= work.item.rows) {
      // No row for this warpgroup: it only lets the stages pass.
      release(control.queries_empty[queries.stage]);
      queries.advance();
#pragma unroll 1
      for (; tile >= last_tile; --tile) {
        await(control.keys_full[keys.stage], keys.phase);
        release_keys();
        await(control.transposed_full[values.stage], values.phase);
        release_values();
      }
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();
      continue;
    }
    auto queries_at = [&]() { return queries.stage * Shape::kQueryBytes + consumer * 64 * kRowBytes; };
    const uint64_t own_queries = places.descriptor(queries_at());
    own.rows.start(p, plan, work, first_row, work.care == Work::kRepeated);
#pragma unroll
    for (int i = 0; i < Shape::kDimV / 2; ++i) own.acc[i] = 0.f;
    auto keys_at = [&](int step) {
      return Shape::kKeysAt + keys.stage * Shape::kKeyBytes + step * kStepKeys * kRowBytes;
    };
    auto values_of = [&](int step) {
      const int at = Shape::kTransposedAt + values.stage * Shape::kTransposedBytes + step * kStepKeys;
      return places.descriptor(at);
    };
    auto await_part = [&]() {
      products_wait<0>();
      settle(part);
    };
    auto do_again = [&]() {
      if (work.care != Work::kRepeated) control.again[slot.stage] = true;
    };
    // Where a reference moves, rescale() does the sums later.
    float factor[2];
    bool moved = false;
    auto find_base = [&](int step) {
      const int first_key = tile * Shape::kKeys + step * kStepKeys;
      own.rows.score(p, s, first_key);
      if (!own.sees_all(work.item, first_key)) own.rows.mask(s, first_key);
      moved = own.rows.move_base(s, factor);
      if (moved && own.rows.is_far_out()) do_again();
    };
    // From step kFrom of a tile, whose weights are there, to the one before it: kTo of this tile or of the next one.
    auto step = [&]<int kFrom, int kTo>() {
      const uint64_t step_keys = made_now(places.descriptor(keys_at(kTo)));
      if (kTo == kSteps - 1) await(control.keys_full[keys.stage], keys.phase);
      own.issue_scores(s, own_queries, step_keys);
      const uint64_t step_values = made_now(values_of(kFrom));
      if (kFrom == kSteps - 1) await(control.transposed_full[values.stage], values.phase);
      own.template issue_part<0, (kFrom < kSteps - 1)>(part, weights, step_values);
      products_wait<1>();
      settle(s);
      if (kTo == 0) release_keys();
      find_base(kTo);
      if constexpr (kLast > 0) {
        await_part();
        own.template add_part<0>(part);
        own.template issue_part<kLast, false>(part, weights, values_of(kFrom));
      }
      own.rows.weigh(s);
      await_value(own.rows.l[0] + own.rows.l[1]);
      await_part();
      settle(weights);
      if (kFrom == 0) {
        own.template add_part<kLast>(part);
        release_values();
      }
      if (moved) own.rescale(own.acc, factor);
      if (moved && kFrom > 0) own.rescale(part, factor);
      own.pack(s, weights);
    };
    if constexpr (!Shape::kOverlaps) {
      own.have_bases = false;
      // The first tile may end with a step of which no row sees a key.
      int at = tile * Shape::kKeys + kStepKeys < work.item.key_end ? kSteps - 1 : 0;
#pragma unroll 1
      for (; tile >= last_tile; --tile, at = kSteps - 1) {
        await(control.keys_full[keys.stage], keys.phase);
#pragma unroll 1
        for (; at >= 0; --at) {
          typename Consumer::Weights of_step;
          const int first_key = tile * Shape::kKeys + at * kStepKeys;
          if (own.find_weights(p, plan, work.item, places, queries_at(), keys_at(at), first_row, first_key, of_step))
            do_again();
          const uint64_t step_values = made_now(values_of(at));
          await(control.transposed_full[values.stage], values.phase);
          own.template add_values<0>(of_step, step_values);
        }
        release_keys();
        release_values();
      }
    } else if (tile >= last_tile) {
      await(control.keys_full[keys.stage], keys.phase);
      own.issue_scores(s, own_queries, places.descriptor(keys_at(kSteps - 1)));
      products_wait<0>();
      settle(s);
      if (kSteps == 1) release_keys();
      find_base(kSteps - 1);
      own.rows.weigh(s);
      own.pack(s, weights);
#pragma unroll 1
      while (true) {
        if constexpr (kSteps == 2) step.template operator()<1, 0>();
        if (--tile < last_tile) break;
        step.template operator()<0, kSteps - 1>();
      }
      if (kSteps == 1) await(control.transposed_full[values.stage], values.phase);
      own.template issue_part<0, (kSteps > 1)>(part, weights, values_of(0));
      await_part();
      own.template add_part<0>(part);
      if constexpr (kLast > 0) {
        own.template issue_part<kLast, false>(part, weights, values_of(0));
        await_part();
        own.template add_part<kLast>(part);
      }
      release_values();
    }
    release(control.queries_empty[queries.stage]);
    queries.advance();
    own.store(p, plan, work, first_row);
    if (work.says_whole()) leave_out(p, plan, work, first_row);
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
  }
}

}  // namespace paged_attn
