// The producer warps of an 8-bit cache whose products are of 16 bits: they load keys and values into registers and
// store them as float16, which holds every e4m3 and e5m2 value exactly. Queries become float16 as well.
//
// Every page size is as fast as another: a lane looks up a key of its own, 32 rows ahead. What nobody sees becomes
// zero.
#pragma once

#include "places.cuh"
#include "shape.cuh"

namespace paged_attn {

constexpr int kPieceValues = 16;                     // 8-bit values of 16 bytes
constexpr int kWidenLanes = kColumn / kPieceValues;  // of a row of a column
constexpr int kRunRows = kWarp / kWidenLanes;        // that a warp widens at a time
static_assert(kRunRows == 8, "a block of the swizzle");

// 16 values become two pieces of a row; the second lies at the other place of the pair.
template <typename Stored>
PD_DEVICE void store_widened(uint32_t target, const uint32_t (&words)[4]) {
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = fp8_pair_to_fp16<Stored, false>(words[i]);
    pairs[2 * i + 1] = fp8_pair_to_fp16<Stored, true>(words[i]);
  }
  store_piece(target, pairs[0], pairs[1], pairs[2], pairs[3]);
  store_piece(target ^ 16, pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The keys, or the values, of 32 rows of a tile. Stored: the 8-bit type.
template <typename Shape, bool kValues, typename Stored>
struct WidenedRows {
  static constexpr int kColumns = kValues ? Shape::kColumnsV : Shape::kColumns;
  static constexpr int kBatchRuns = kColumns == 1 ? 2 : 1;  // whose loads are asked for together
  static constexpr int kBatches = kWarp / kRunRows / kBatchRuns;

  // Where a key lies, in pieces of 16 bytes.
  static PD_MEMBER uint32_t find(const Problem& p, const PrefillCall& plan, const KeyPlaces& places, int page, int key,
                                 int head) {
    if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(p.cache.num_pages)) return KeyPlaces::kNowhere;
    const int slot = places.slot_of(plan, key);
    return kValues ? page * plan.v_page_pieces + slot * plan.v_slot_pieces + head * plan.v_head_pieces
                   : page * plan.k_page_pieces + slot * plan.k_slot_pieces + head * plan.k_head_pieces;
  }

  template <int kCount>
  static PD_MEMBER void load_batch(const Problem& p, uint32_t from, int batch, uint32_t (&words)[kCount][4]) {
    const int piece = this_thread() % kWidenLanes;
    const int dims = static_cast<int>(kValues ? p.head_dim_v : p.head_dim) - piece * kPieceValues;
    const char* const first = static_cast<const char*>(kValues ? p.cache.v : p.cache.k) + piece * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = i % kColumns;
      const uint32_t place = __shfl_sync(~0u, from, batch * kBatchRuns + i / kColumns, kWidenLanes);
      const bool found = place != KeyPlaces::kNowhere && column * kColumn < dims;
      load_or_zero(first + static_cast<uint64_t>(found ? place : 0) * 16 + column * kColumn, found, words[i]);
    }
  }

  template <int kCount>
  static PD_MEMBER void store_batch(uint32_t target, int batch, const uint32_t (&words)[kCount][4]) {
    const int lane = this_thread() % kWarp, piece = lane % kWidenLanes, row = lane / kWidenLanes;
    target += (batch * kBatchRuns * kRunRows + row) * kRowBytes + ((piece * 2) ^ row) * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      store_widened<Stored>(target + (i % kColumns * Shape::kKeys + i / kColumns * kRunRows) * kRowBytes, words[i]);
  }

  // The first row is to stand at `target`. The first loads do not wait until the stage is free.
  static PD_MEMBER void widen(const Problem& p, uint32_t from, uint32_t target, uint32_t empty, uint32_t phase) {
    uint32_t one[kBatchRuns * kColumns][4], other[kBatchRuns * kColumns][4];
    load_batch(p, from, 0, one);
    barrier_wait(empty, phase);
#pragma unroll 1
    for (int batch = 0; batch < kBatches; batch += 2) {
      load_batch(p, from, batch + 1, other);
      store_batch(target, batch, one);
      if (batch + 2 < kBatches) load_batch(p, from, batch + 2, one);
      store_batch(target, batch + 1, other);
    }
  }

  // Of tile `tile` since the start.
  static PD_MEMBER void put(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared,
                            const KeyPlaces& places, int page, int key, int head, unsigned tile, int unit) {
    constexpr int kStages = kValues ? Shape::kValueStages : Shape::kKeyStages;
    constexpr int kBytes = kValues ? Shape::kValueBytes : Shape::kKeyBytes;
    const unsigned stage = tile % kStages;
    const uint32_t at = shared + (kValues ? Shape::kValuesAt : Shape::kKeysAt) + stage * kBytes;
    const uint32_t full = shared_address(kValues ? control.values_full : control.keys_full) + stage * 8;
    const uint32_t empty = shared_address(kValues ? control.values_empty : control.keys_empty) + stage * 8;
    widen(p, find(p, plan, places, page, key, head), at + unit * kWarp * kRowBytes, empty, tile / kStages % 2 ^ 1);
    fence_async_proxy();
    barrier_arrive(full);
  }
};

// Warps take units of 32 rows of every tile in turns: of keys, of values, or of both, first those of the keys.
template <typename Shape, bool kOfKeys, bool kOfValues, typename Stored>
PD_DEVICE void widen_stored(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control,
                            uint32_t shared) {
  constexpr int kUnits = Shape::kKeys / kWarp, kOfTile = kUnits * (kOfKeys + kOfValues);
  constexpr int kWarps = kOfKeys ? Shape::kKeyWideners : Shape::kValueWideners;
  // The key whose place this lane looks up: that of its 4 lanes in run lane % 4. Units begin with the last tile.
  const auto key_of = [](const Item& item, int unit) {
    const int lane = this_thread() % kWarp, tile = item.first_tile + item.tiles - 1 - unit / kOfTile;
    return tile * Shape::kKeys + unit % kUnits * kWarp + lane % kWidenLanes * kRunRows + lane / kWidenLanes;
  };
  // Its page; -1: nobody sees it. Nothing here waits for the table. Ranges are read again, as registers are scarce.
  const auto look_up = [&](KeyPlaces& places, const Item& item, int unit) {
    places.key_begin = item.key_begin;
    places.key_end = item.key_end;
    return places.page_of(p, plan, key_of(item, unit));
  };
  unsigned before = 0;  // tiles of the works before
#pragma unroll 1
  for (int works = 0;; ++works) {
    const int slot = works % 2;
    barrier_wait(shared_address(&control.work_full[slot]), works / 2 % 2);
    const Work& work = control.work[slot];
    if (!work.exists) break;
    KeyPlaces places;
    places.start(p, work.item);
    int unit = this_thread() / kWarp % (kWarpgroup / kWarp), next = look_up(places, work.item, unit);
#pragma unroll 1
    for (; unit < work.item.tiles * kOfTile; unit += kWarps) {
      const int page = next, key = key_of(work.item, unit);
      next = look_up(places, work.item, unit + kWarps);
      const unsigned tile = before + unit / kOfTile;
      if (kOfKeys && (!kOfValues || unit % kOfTile < kUnits)) {
        WidenedRows<Shape, false, Stored>::put(p, plan, control, shared, places, page, key, work.head, tile,
                                               unit % kUnits);
      } else {
        WidenedRows<Shape, true, Stored>::put(p, plan, control, shared, places, page, key, work.head, tile,
                                              unit % kUnits);
      }
    }
    before += work.item.tiles;
    __syncwarp();
    if (this_thread() % kWarp == 0) barrier_arrive(shared_address(&control.work_empty[slot]));
  }
}

template <typename Shape, bool kOfKeys, bool kOfValues>
PD_DEVICE void widen_tiles(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared) {
  if (p.cache.dtype == DType::kFloat8E4M3) {
    widen_stored<Shape, kOfKeys, kOfValues, E4m3>(p, plan, control, shared);
  } else {
    widen_stored<Shape, kOfKeys, kOfValues, E5m2>(p, plan, control, shared);
  }
}

// Copies a tile of 8-bit queries and widens it, one warp.
template <typename Shape, typename Stored>
PD_DEVICE void widen_queries(const Problem& p, const PrefillCall& plan, const Work& work, uint32_t queries) {
  const int lane = threadIdx.x % kWarp, piece = lane % kWidenLanes;
  const Item& item = work.item;
  const int dims = static_cast<int>(p.head_dim) - piece * kPieceValues, group = static_cast<int>(p.group);
#pragma unroll 2
  for (int row = lane / kWidenLanes; row < Shape::kRows; row += kRunRows) {
    const bool exists = row < item.rows;
    const int token = plan.group.divide(item.first_row + row);
    const int q_head = work.head * group + item.first_row + row - token * group;
    const int64_t offset =
        item.b * p.q_stride_batch + (item.q_begin + token) * p.q_stride_token + q_head * p.q_stride_head;
    const char* const source = static_cast<const char*>(p.q) + (exists ? offset : 0) + piece * 16;
    const uint32_t target = queries + row * kRowBytes + ((piece * 2) ^ (row % 8)) * 16;
    uint32_t words[Shape::kColumns][4];
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c)
      load_or_zero(source + c * kColumn, exists && c * kColumn < dims, words[c]);
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) store_widened<Stored>(target + c * Shape::kRows * kRowBytes, words[c]);
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
