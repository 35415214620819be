// The producer warps of an 8-bit cache whose products are of 16 bits. Each copies pieces of keys and values as they are
// into slots of its own. One unit of 32 rows later it widens them, from its slots to the tile: to float16, which holds
// every e4m3 and e5m2 value exactly. Queries become float16 as well.
//
// Every page size is as fast as another: a lane looks up a key of its own, two units ahead. What nobody sees becomes
// zero.
#pragma once

#include "../key_places.cuh"
#include "pieces.cuh"
#include "shape.cuh"

namespace paged_attn {

constexpr int kPieceValues = 16;                     // 8-bit values of 16 bytes
constexpr int kWidenLanes = kColumn / kPieceValues;  // of a row of a column
constexpr int kRunRows = kWarp / kWidenLanes;        // that a warp widens at a time
static_assert(kRunRows == 8, "a block of the swizzle");

// Stores 16 values as float16: two pieces of a row, the lower 8 values at `target`.
template <typename Stored>
PD_DEVICE void store_widened(uint32_t target, uint32_t other, const uint32_t (&words)[4]) {
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = fp8_pair_to_fp16<Stored, false>(words[i]);
    pairs[2 * i + 1] = fp8_pair_to_fp16<Stored, true>(words[i]);
  }
  store_piece(target, pairs[0], pairs[1], pairs[2], pairs[3]);
  store_piece(other, pairs[4], pairs[5], pairs[6], pairs[7]);
}

// Warps take units of 32 rows in turns: of every tile first those of the keys, then those of the values. A run is 8 of
// these rows, whose pieces all lanes copy together. Only the lane that has copied a piece reads it, so nobody waits for
// another one. Stored: the 8-bit type.
template <typename Shape, typename Stored>
struct Widener {
  static constexpr unsigned kWarps = Shape::kWideners;
  static constexpr unsigned kUnits = Shape::kKeys / kWarp, kOfTile = 2 * kUnits;  // of keys or values, and of both
  static constexpr int kRuns = kWarp / kRunRows, kStagedRuns = Shape::kStagedRuns;
  static constexpr int kColumns = Shape::kMostColumns;
  static constexpr int kLeastColumns = Shape::kColumns + Shape::kColumnsV - kColumns;
  static constexpr int kPieceBytes = kWarp * 16;  // from one piece of a lane to its next one
  static_assert(kRuns % kStagedRuns == 0, "a run has the same slots in every unit");
  static_assert(Shape::kKeyStages + 2 <= 2 * Shape::kValueStages && Shape::kValueStages <= 2 * Shape::kKeyStages &&
                    kWarps < kOfTile,
                "see widen_work()");

  // The number of this warp among the wideners, the same for all its lanes.
  static PD_MEMBER unsigned widener() {
    const unsigned warp = __shfl_sync(~0u, static_cast<unsigned>(this_thread()) / kWarp, 0);
    return warp < Shape::kFirstWideners ? warp : warp - Shape::kConsumerWarps - 1;
  }
  static PD_MEMBER bool of_values(unsigned unit) { return unit % kOfTile >= kUnits; }

  // The key that this lane looks up in the first unit of a work, whose last tile comes first: that of its 4 lanes in
  // run lane % 4.
  static PD_MEMBER int first_key(const Item& item, unsigned lane) {
    return (item.first_tile + item.tiles - 1) * Shape::kKeys + lane % kWidenLanes * kRunRows + lane / kWidenLanes;
  }

  // Page and slot of this lane's key of a unit; page -1: nobody sees it. Nothing here waits for the table.
  static PD_MEMBER int2 look_up(const Problem& p, const PrefillCall& plan, const KeyPlaces& places, int first,
                                unsigned units, unsigned unit) {
    const int key = first - static_cast<int>(unit / kOfTile * Shape::kKeys - unit % kUnits * kWarp);
    return unit < units ? places.look_up(p, plan, key) : make_int2(-1, 0);
  }

  // Where it lies, in pieces of 16 bytes.
  static PD_MEMBER uint32_t find(const Problem& p, const PrefillCall& plan, int2 place, int head, unsigned unit) {
    if (!page_exists(p, place.x)) return KeyPlaces::kNowhere;
    const bool values = of_values(unit);
    return place.x * (values ? plan.v_page_pieces : plan.k_page_pieces) +
           place.y * (values ? plan.v_slot_pieces : plan.k_slot_pieces) +
           head * (values ? plan.v_head_pieces : plan.k_head_pieces);
  }

  // Asks for a run of a unit. `from`: where the key of this lane lies.
  static PD_MEMBER void copy(const Problem& p, uint32_t from, unsigned unit, int run, uint32_t slots, unsigned lane) {
    const int piece = lane % kWidenLanes;
    const bool values = of_values(unit);
    const int dims = static_cast<int>(values ? p.head_dim_v : p.head_dim) - piece * kPieceValues;
    const char* const first = static_cast<const char*>(values ? p.cache.v : p.cache.k) + piece * 16;
    const uint32_t place = __shfl_sync(~0u, from, run, kWidenLanes);
    const bool found = place != KeyPlaces::kNowhere;
    const char* const source = first + static_cast<uint64_t>(found ? place : 0) * 16;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t slot = slots + (run % kStagedRuns * kColumns + c) * kPieceBytes;
      copy_piece(slot, source + c * kColumn, found && c * kColumn < dims);
    }
    commit_pieces();
  }

  // Widens the oldest run that was asked for. `target`, `other`: where the two pieces of this lane belong in a unit's
  // first run.
  static PD_MEMBER void widen(bool values, int run, uint32_t slots, uint32_t target, uint32_t other) {
    await_batches<kStagedRuns - 1>();
    uint32_t words[kColumns][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      uint32_t (&piece)[4] = words[c];
      load_piece(slots + (run % kStagedRuns * kColumns + c) * kPieceBytes, piece[0], piece[1], piece[2], piece[3]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int offset = (c * Shape::kKeys + run * kRunRows) * kRowBytes;
      const bool exists = c < kLeastColumns || c < (values ? Shape::kColumnsV : Shape::kColumns);
      if (exists) store_widened<Stored>(target + offset, other + offset, words[c]);
    }
  }

  // Widens the units of this warp in one work. `unit`: the first of them, then the first of the next work. `before`:
  // tiles of the works before. A wait tells two rounds of a stage apart (parity), not more. So no warp may come to a
  // stage two rounds early. None does: its unit before, which is kWarps units back also across works, has waited for
  // the consumers to be near enough.
  static PD_MEMBER void widen_work(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control,
                                   uint32_t shared, const Work& work, unsigned before, unsigned& unit) {
    const unsigned lane = static_cast<unsigned>(this_thread()) % kWarp;
    const uint32_t slots = shared + Shape::kSlotsAt + widener() * Shape::kWidenerBytes + lane * 16;
    const unsigned units = work.item.tiles * kOfTile;
    const int first = first_key(work.item, lane), head = work.head;
    KeyPlaces places;
    places.start(p, work.item);
    uint32_t from = find(p, plan, look_up(p, plan, places, first, units, unit), head, unit);
    int2 place = look_up(p, plan, places, first, units, unit + kWarps);
#pragma unroll
    for (int run = 0; run < kStagedRuns; ++run) copy(p, from, unit, run, slots, lane);
#pragma unroll 1
    for (; unit < units; unit += kWarps) {
      const uint32_t next = find(p, plan, place, head, unit + kWarps);
      place = look_up(p, plan, places, first, units, unit + 2 * kWarps);
      const bool values = of_values(unit);
      const unsigned tile = before + unit / kOfTile;
      const unsigned stage = values ? tile % Shape::kValueStages : tile % Shape::kKeyStages;
      const unsigned round = values ? tile / Shape::kValueStages : tile / Shape::kKeyStages;
      barrier_wait(shared_address(values ? control.values_empty : control.keys_empty) + stage * 8, round % 2 ^ 1);
      const unsigned piece = lane % kWidenLanes, row = lane / kWidenLanes;
      const uint32_t at =
          values ? Shape::kValuesAt + stage * Shape::kValueBytes : Shape::kKeysAt + stage * Shape::kKeyBytes;
      const uint32_t target = shared + at + (unit % kUnits * kWarp + row) * kRowBytes + ((piece * 2) ^ row) * 16,
                     other = target ^ 16;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        widen(values, run, slots, target, other);
        const bool ahead = run + kStagedRuns >= kRuns;
        copy(p, ahead ? next : from, ahead ? unit + kWarps : unit, (run + kStagedRuns) % kRuns, slots, lane);
      }
      fence_async_proxy();
      barrier_arrive(shared_address(values ? control.values_full : control.keys_full) + stage * 8);
      from = next;
    }
    unit -= units;
    await_pieces();  // zeros for the unit behind the last one
  }

  static PD_MEMBER void run(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control,
                            uint32_t shared) {
    unsigned before = 0, unit = widener();
    Ring<2> slot;
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const Work& work = control.work[slot.stage];
      if (!work.exists) break;
      if (widener() == 0 && this_thread() % kWarp == 0 && work.item.tiles > 0) want_next(control);
      widen_work(p, plan, control, shared, work, before, unit);
      before += work.item.tiles;
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();
    }
  }
};

template <typename Shape>
PD_DEVICE void widen_tiles(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared) {
  if (p.cache.dtype == DType::kFloat8E4M3) {
    Widener<Shape, E4m3>::run(p, plan, control, shared);
  } else {
    Widener<Shape, E5m2>::run(p, plan, control, shared);
  }
}

// Copies a tile of 8-bit queries and widens it, one warp.
template <typename Shape, typename Stored>
PD_DEVICE void widen_queries(const Problem& p, const PrefillCall& plan, const Work& work, uint32_t queries) {
  const int lane = threadIdx.x % kWarp, piece = lane % kWidenLanes;
  const Item& item = work.item;
  const int dims = static_cast<int>(p.head_dim) - piece * kPieceValues;
#pragma unroll 2
  for (int row = lane / kWidenLanes; row < Shape::kRows; row += kRunRows) {
    const bool exists = row < item.rows;
    const int64_t offset = q_offset(p, item, query_row(p, plan, item, work.head, row));
    const char* const source = static_cast<const char*>(p.q) + (exists ? offset : 0) + piece * 16;
    const uint32_t target = queries + row * kRowBytes + ((piece * 2) ^ (row % 8)) * 16;
    uint32_t words[Shape::kColumns][4];
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c)
      load_or_zero(source + c * kColumn, exists && c * kColumn < dims, words[c]);
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) {
      const int offset = c * Shape::kRows * kRowBytes;
      store_widened<Stored>(target + offset, (target ^ 16) + offset, words[c]);
    }
  }
}

// Makes float16 of a warp's 16 rows of queries, where they lie. float16 has more bits than bfloat16 and fewer powers of
// two, so a row is divided by the power of two below its largest value. factor[r] takes scores of row g + 8 r back.
template <typename Shape>
PD_DEVICE void narrow_queries(const Problem& p, uint32_t queries, int first_row, float (&factor)[2]) {
  constexpr int kPieces = 4;  // of a row and column; two lanes have a row
  factor[0] = factor[1] = 1.f;
  if (p.q_dtype != DType::kBFloat16) return;
  const int lane = threadIdx.x % kWarp, row = lane / 2, swizzle = row % 8;
  const uint32_t own = queries + (first_row + row) * kRowBytes;
  uint32_t words[Shape::kColumns][kPieces][4];
  float largest = 0.f;
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32_t (&piece)[4] = words[c][i];
      load_piece(own + c * Shape::kRows * kRowBytes + ((lane % 2 * kPieces + i) ^ swizzle) * 16, piece[0], piece[1],
                 piece[2], piece[3]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float low = __uint_as_float(piece[w] << 16), high = __uint_as_float(piece[w] & 0xffff0000u);
        largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
      }
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  const int exponent = largest > 0.f && largest < INFINITY ? ilogbf(largest) : 0;
  // Two factors: a single one would overflow for a row of subnormals.
  const float down = ldexpf(1.f, -(exponent / 2)), rest = ldexpf(1.f, -(exponent - exponent / 2));
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32_t (&piece)[4] = words[c][i];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float low = __uint_as_float(piece[w] << 16), high = __uint_as_float(piece[w] & 0xffff0000u);
        piece[w] = pack_pair<false>(low * down * rest, high * down * rest);
      }
      store_piece(own + c * Shape::kRows * kRowBytes + ((lane % 2 * kPieces + i) ^ swizzle) * 16, piece[0], piece[1],
                  piece[2], piece[3]);
    }
  }
  const float up = ldexpf(1.f, exponent);
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = __shfl_sync(~0u, up, (lane / 4 + 8 * r) * 2);
}

}  // namespace paged_attn
