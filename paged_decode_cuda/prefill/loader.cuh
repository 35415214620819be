// The producer warps: one or two copy keys into shared memory, as many or more copy values. Where pages hold no box,
// all gather keys and values. The director finds the next work and copies its queries.
//
// Where a page holds whole boxes, keys come in bulk copies (TMA), and so does a tile of values each of which some row
// sees. Masking replaces the score of an unseen key, whatever it holds, but 0 times an unseen value may be NaN. So all
// else comes in pieces (cp.async): 8 lanes copy 128 bytes of a row at a time, whatever the page size, and put zeros
// where there is nothing to see.
#pragma once

#include "../key_places.cuh"
#include "pieces.cuh"
#include "schedule.cuh"
#include "tickets.cuh"
#include "widener.cuh"

namespace paged_attn {

// Copies tile after tile of keys or of values, by one warp or two.
template <typename Shape, bool kValues>
struct PrefillLoader {
  static constexpr int kKeys = Shape::kKeys, kColumns = kValues ? Shape::kColumnsV : Shape::kColumns;
  static constexpr int kBytes = kValues ? Shape::kValueBytes : Shape::kKeyBytes;
  static constexpr int kPieceDims = 16 / Shape::kElementBytes;
  // Values that the transposer reads: every lane arrives for its own copies.
  static constexpr bool kAllArrive = kValues && Shape::kTransposedStages > 0;

  // Up to 32 rows, piece by piece. `place`: of the key of this lane, in pieces of 16 bytes.
  static PD_MEMBER void copy_rows(const Problem& p, uint32_t first_row, int rows, uint32_t place) {
    const int lane = this_thread() % kWarp, row = lane / kCopyLanes, piece = lane % kCopyLanes;
    const int head_dim = static_cast<int>(kValues ? p.head_dim_v : p.head_dim);
    const char* const first = static_cast<const char*>(kValues ? p.cache.v : p.cache.k) + piece * 16;
#pragma unroll(kColumns == 2 ? 4 : 2)
    for (int i = 0; i < rows; i += kCopyRows) {
      const uint32_t offset = __shfl_sync(~0u, place, i + row);
      const bool found = offset != KeyPlaces::kNowhere;
      const char* const source = first + static_cast<uint64_t>(found ? offset : 0) * 16;
      const uint32_t target = first_row + (i + row) * kRowBytes + (piece ^ ((i + row) % 8)) * 16;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        copy_piece(target + c * kKeys * kRowBytes, source + c * kRowBytes,
                   found && c * Shape::kColumnDims + piece * kPieceDims < head_dim);
      }
    }
  }

  // The place of a key in pieces of 16 bytes.
  static PD_MEMBER uint32_t place_of(const PrefillCall& plan, const KeyPlaces& places, const Problem& p, int key,
                                     int head) {
    const int2 place = places.look_up(p, plan, key);
    if (!page_exists(p, place.x)) return KeyPlaces::kNowhere;
    return kValues ? plan.value_place(place.x, place.y, head) : plan.key_place(place.x, place.y, head);
  }

  // `loader`: which of the warps this is. The boxes of a tile are numbered row by row, all columns of the same rows one
  // after the other, as they lie side by side in memory. A lane asks for one box; `askers` warps take turns at boxes.
  // `loaders` warps share the rows of a tile that comes in pieces.
  static PD_MEMBER void run(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared,
                            int loader, int loaders, int askers) {
    const int lane = threadIdx.x % kWarp;
    const uint32_t full = shared_address(kValues ? control.values_full : control.keys_full);
    const uint32_t empty = shared_address(kValues ? control.values_empty : control.keys_empty);
    const uint32_t stages = shared + (kValues ? Shape::kValuesAt : Shape::kKeysAt);
    Ring<kValues ? Shape::kValueStages : Shape::kKeyStages> ring;
    Ring<2> slot;
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const Work& work = control.work[slot.stage];
      if (!work.exists) break;
      KeyPlaces places;
      places.start(p, work.item);
      const int head = work.head, first_tile = work.item.first_tile;
      const int wants_next = kValues || loader > 0 ? first_tile - 1 : tile_before_next<Shape>(work.item);
      int tile = first_tile + work.item.tiles - 1;
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();

      // Tiles in bulk have a loop of their own, short for the instruction cache (docs/cuda/prefill.md). What it needs
      // of a lane is found again each time, for the other loop has no registers left.
#pragma unroll 1
      while (true) {
#pragma unroll 1
        for (; tile >= first_tile; --tile) {
          const int key = tile * kKeys;
          if (kValues && !places.sees_all(key, kKeys)) break;
          const uint32_t thread = static_cast<uint32_t>(this_thread()) % kWarp;
          if (!kValues && tile == wants_next && thread == 0) want_next(control);
          const uint32_t box = thread * askers + loader, row = box / kColumns * plan.box_rows;
          const bool asks = row < kKeys && loader < askers;
          int2 place = make_int2(-1, 0);  // looked up while the stage is not yet free
          if (asks) place = places.find_box(p, plan, key + row, plan.box_rows);
          barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
          // Bytes may come before they are expected: the phase does not end without this arrival.
          const uint32_t arrived = full + ring.stage * 8;
          if (thread == 0) {
            barrier_arrive_expecting(arrived, loader < askers ? kBytes / askers : 0);
          } else if (kAllArrive) {
            barrier_arrive(arrived);
          }
          if (asks) {
            const uint32_t column = box % kColumns, target = (column * kKeys + row) * kRowBytes;
            copy_box(stages + ring.stage * kBytes + target, kValues ? plan.values : plan.keys, arrived,
                     column * Shape::kColumnDims, place.y, head, place.x, plan.copy_policy);
          }
          ring.advance();
        }
        if (!kValues || tile < first_tile) break;
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        const uint32_t stage = stages + ring.stage * kBytes;
#pragma unroll 1
        for (int i = loader * kWarp; i < kKeys; i += loaders * kWarp)
          copy_rows(p, stage + i * kRowBytes, min(kWarp, kKeys - i),
                    place_of(plan, places, p, tile * kKeys + i + lane, head));
        arrive_after_copies<kAllArrive>(full + ring.stage * 8);
        ring.advance();
        --tile;
      }
    }
  }
};

// Copies keys and values where pages hold no box: warps that take turns at runs of 4 rows. A warp looks up the pages of
// the next tile before it needs them, and never waits for its copies: barriers count those.
template <typename Shape>
struct Gatherer {
  static constexpr int kKeys = Shape::kKeys, kGatherers = Shape::kGatherers;
  static constexpr int kAllRuns = kKeys / kCopyRows;                      // of a tile
  static constexpr int kRuns = (kAllRuns + kGatherers - 1) / kGatherers;  // of a warp
  static constexpr int kLookups = (kRuns + kCopyLanes - 1) / kCopyLanes;  // of a lane
  static constexpr int kPieceDims = 16 / Shape::kElementBytes;
  // Three warps are too slow, so they find all addresses of a tile before its stage is free. Four are fast enough, and
  // their copies had better not come all at once. 6 runs: there are registers for no more.
  static constexpr bool kHurries = kGatherers == 3 && kRuns <= 6;

  // Where this lane's rows of a tile lie, in pieces of 16 bytes: the row of its 8 lanes in run lane % 8, and in every
  // eighth run behind it.
  struct Places {
    uint32_t keys[kLookups], values[kLookups];
    bool whole;  // only with kHurries: all rows of this warp exist, and all of their columns
  };

  int lane, gatherer;

  // Row of the tile that these 8 lanes copy in a run of this warp.
  PD_MEMBER int row_of(int run) const { return (run * kGatherers + gatherer) * kCopyRows + lane / kCopyLanes; }
  PD_MEMBER int own_run(int i) const { return i * kCopyLanes + lane % kCopyLanes; }

  // The last run of a warp may lie behind the tile.
  PD_MEMBER bool has(int run) const {
    return run < kRuns && ((run + 1) * kGatherers <= kAllRuns || run * kGatherers + gatherer < kAllRuns);
  }

  // The pages of this lane's rows of a tile; -1: no such row, or nobody sees it. Nothing here waits for the table.
  PD_MEMBER void look_up(const Problem& p, const PrefillCall& plan, const KeyPlaces& places, int tile,
                         int (&pages)[kLookups]) const {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int run = own_run(i);
      pages[i] = has(run) ? places.look_up(p, plan, tile * kKeys + row_of(run)).x : -1;
    }
  }

  // Where they lie.
  PD_MEMBER Places find(const Problem& p, const PrefillCall& plan, const KeyPlaces& places, int tile, int head,
                        const int (&pages)[kLookups]) const {
    Places found;
    found.whole = kHurries && p.head_dim == Shape::kDim && p.head_dim_v == Shape::kDimV;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int run = own_run(i), slot = places.slot_of(p, plan, tile * kKeys + row_of(run));
      const bool exists = page_exists(p, pages[i]);
      const uint32_t missing = has(run) ? KeyPlaces::kNowhere : 0;
      const uint32_t key = plan.key_place(pages[i], slot, head), value = plan.value_place(pages[i], slot, head);
      found.keys[i] = exists ? key : missing;
      found.values[i] = exists ? value : missing;
      found.whole = found.whole && __ballot_sync(~0u, exists || !has(run)) == ~0u;
    }
    return found;
  }

  PD_MEMBER uint32_t place_of(const Places& places, bool of_values, int run) const {
    const uint32_t own = of_values ? places.values[run / kCopyLanes] : places.keys[run / kCopyLanes];
    return __shfl_sync(~0u, own, run % kCopyLanes, kCopyLanes);
  }

  // Where a piece of this lane belongs in a tile.
  PD_MEMBER uint32_t target_of(uint32_t stage, int run) const {
    // The swizzle of a row is its number modulo 8. `below` is a multiple of 4, so to add it is to xor it there.
    const uint32_t piece = lane % kCopyLanes, below = run * kGatherers * kCopyRows;
    return stage + (row_of(0) + below) * kRowBytes + (piece ^ row_of(0) % kSwizzledRows ^ below % kSwizzledRows) * 16;
  }

  // Copies this warp's rows of a tile of keys or of values once its stage is free. Where all rows exist, their
  // addresses are known by then.
  template <bool kValues>
  PD_MEMBER void copy(const Problem& p, const Places& places, uint32_t stage, uint32_t empty, uint32_t phase) const {
    constexpr int kColumns = kValues ? Shape::kColumnsV : Shape::kColumns, kDims = kValues ? Shape::kDimV : Shape::kDim;
    const int piece = lane % kCopyLanes;
    const char* first = static_cast<const char*>(kValues ? p.cache.v : p.cache.k) + piece * 16;
    settle(first);
    if (places.whole) {
      uint32_t found[kRuns];
#pragma unroll
      for (int run = 0; run < kRuns; ++run) found[run] = place_of(places, kValues, run);
      settle(found);
      barrier_wait(empty, phase);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        if (!has(run)) break;
        const char* const source = first + static_cast<uint64_t>(found[run]) * 16;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          copy_piece(target_of(stage, run) + c * kKeys * kRowBytes, source + c * kRowBytes,
                     c * Shape::kColumnDims < kDims - piece * kPieceDims);
        }
      }
      return;
    }
    barrier_wait(empty, phase);
    int dims = static_cast<int>(kValues ? p.head_dim_v : p.head_dim) - piece * kPieceDims;
    settle(dims);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if (!has(run)) break;
      const uint32_t place = place_of(places, kValues, run);
      const bool exists = place != KeyPlaces::kNowhere;
      const char* const source = first + static_cast<uint64_t>(exists ? place : 0) * 16;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        copy_piece(target_of(stage, run) + c * kKeys * kRowBytes, source + c * kRowBytes,
                   exists && c * Shape::kColumnDims < dims);
      }
    }
  }

  PD_MEMBER void run(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared,
                     int warp) {
    lane = threadIdx.x % kWarp;
    gatherer = warp;
    Ring<Shape::kKeyStages> keys;
    Ring<Shape::kValueStages> values;
    Ring<2> slot;
    while (true) {
      barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
      const Work& work = control.work[slot.stage];
      if (!work.exists) break;
      KeyPlaces table;
      table.start(p, work.item);
      const int head = work.head, first_tile = work.item.first_tile;
      const int end_tile = first_tile + work.item.tiles;
      const int wants_next = gatherer > 0 ? first_tile - 1 : tile_before_next<Shape>(work.item);
      barrier_arrive(shared_address(&control.work_empty[slot.stage]));
      slot.advance();

      // The values of a tile come after the keys of the next one, as they are needed.
      int next[kLookups];
      Places before;
      look_up(p, plan, table, end_tile - 1, next);
#pragma unroll 1
      for (int tile = end_tile - 1; tile >= first_tile - 1; --tile) {
        Places now;
        if (tile >= first_tile) {
          if (tile == wants_next && lane == 0) want_next(control);
          now = find(p, plan, table, tile, head, next);
          look_up(p, plan, table, tile - 1, next);
          copy<false>(p, now, shared + Shape::kKeysAt + keys.stage * Shape::kKeyBytes,
                      shared_address(&control.keys_empty[keys.stage]), keys.phase ^ 1);
          arrive_with_pieces(shared_address(&control.keys_full[keys.stage]));
          keys.advance();
        }
        if (tile + 1 < end_tile) {
          copy<true>(p, before, shared + Shape::kValuesAt + values.stage * Shape::kValueBytes,
                     shared_address(&control.values_empty[values.stage]), values.phase ^ 1);
          arrive_with_pieces(shared_address(&control.values_full[values.stage]));
          values.advance();
        }
        before = now;
      }
    }
  }
};

// Copies rows [begin, end) of a tile of queries in pieces, by one warp. Each lane finds where one row of 32 lies.
template <typename Shape>
PD_DEVICE void copy_queries(const Problem& p, const PrefillCall& plan, const Work& work, uint32_t queries, int begin,
                            int end) {
  constexpr int64_t kNowhere = -1;
  const int lane = threadIdx.x % kWarp, piece = lane % kCopyLanes;
  const char* const first = static_cast<const char*>(p.q) + piece * 16;
#pragma unroll 1
  for (; begin < end; begin += kWarp) {
    const int own = begin + lane;
    const bool exists = own < work.item.rows;
    const int64_t offset = q_offset(p, work.item, query_row(p, plan, work.item, work.head, own));
    const int64_t place = exists ? offset * Shape::kElementBytes : kNowhere;
#pragma unroll(Shape::kShortTiles ? 4 : 1)  // as far as there are registers
    for (int i = 0; i < min(end - begin, kWarp); i += kCopyRows) {
      const int row = i + lane / kCopyLanes;
      const int64_t source = __shfl_sync(~0u, place, row);
      const bool found = source != kNowhere;
      const uint32_t target = queries + (begin + row) * kRowBytes + (piece ^ (row % 8)) * 16;
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c) {
        copy_piece(target + c * Shape::kRows * kRowBytes, first + (found ? source : 0) + c * kRowBytes,
                   found && c * Shape::kColumnDims + piece * 16 / Shape::kElementBytes < p.head_dim);
      }
    }
  }
}

// The same by bulk copies. They also bring what lies behind the rows of the tile; nobody stores what becomes of it.
template <typename Shape>
PD_DEVICE void copy_query_boxes(const Problem& p, const PrefillCall& plan, const Work& work, uint32_t queries,
                                uint32_t arrived) {
  const int token = work.item.q_begin + plan.group.divide(work.item.first_row);
  barrier_arrive_expecting(arrived, static_cast<int>(plan.tile_rows.divisor) * Shape::kColumns * kRowBytes);
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
    copy_query_box(queries + c * Shape::kRows * kRowBytes, plan.queries, arrived, c * Shape::kColumnDims, work.head,
                   token, p.cu_seqlens_q ? 0 : work.item.b);
  }
}

// The same of any dtype: where the cache is widened, 8-bit queries are too.
template <typename Shape>
PD_DEVICE void copy_any_queries(const Problem& p, const PrefillCall& plan, const Work& work, uint32_t queries) {
  if constexpr (Shape::kNarrow) {
    if (p.q_dtype == DType::kFloat8E4M3) return widen_queries<Shape, E4m3>(p, plan, work, queries);
    if (p.q_dtype == DType::kFloat8E5M2) return widen_queries<Shape, E5m2>(p, plan, work, queries);
  }
  copy_queries<Shape>(p, plan, work, queries, 0, Shape::kRows);
}

// The slot whose work must be done once more, or -1. The consumers are done with `slot`, which comes next. They may
// still work on the other one, which is awaited only where no other work is left (`last`).
template <typename Shape>
PD_DEVICE int slot_to_repeat(PrefillControl<Shape>& control, const Ring<2>& slot, bool last) {
  Ring<2> done = slot;
  if (!control.again[done.stage] && last) {
    done.advance();
    barrier_wait(shared_address(&control.work_empty[done.stage]), done.phase ^ 1);
  }
  return control.again[done.stage] ? done.stage : -1;
}

// Where the queries of the work in this slot go: both rings are filled in turn. A single stage has another phase with
// every work, as the number of the slot has.
template <typename Shape>
PD_DEVICE Ring<Shape::kQueryStages> queries_of(const Ring<2>& slot) {
  static_assert(Shape::kQueryStages <= 2);
  Ring<Shape::kQueryStages> queries;
  queries.stage = Shape::kQueryStages == 1 ? 0 : slot.stage;
  queries.phase = Shape::kQueryStages == 1 ? slot.stage : slot.phase;
  return queries;
}

// The director: finds work after work, tells the other warps, and brings its queries.
template <typename Shape>
PD_DEVICE void direct(const Problem& p, const PrefillCall& plan, PrefillControl<Shape>& control, uint32_t shared) {
  const int lane = threadIdx.x % kWarp;
  Scheduler<Shape> scheduler;
  if (blockIdx.x == 0 && lane == 0 && !plan.one_round) open_tickets(plan.tickets);
  int ticket = blockIdx.x;
  bool found = scheduler.start(p, plan, control.known, ticket, control.next);
  if (blockIdx.x == 0) {
    if (plan.looks_early) named_barrier_sync(kCutUnknown, 2 * kWarp);
    if (lane == 0) store_relaxed(plan.cut, control.next.split_rate != Work::kWhole ? 1 : 0);
  }
  Ring<2> slot;
  uint32_t wanted = 0;  // phase
  while (true) {
    if (!found && !plan.one_round) found = scheduler.find(p, plan, control.known, ticket, control.next);
    barrier_wait(shared_address(&control.work_empty[slot.stage]), slot.phase ^ 1);
    const int repeated = slot_to_repeat<Shape>(control, slot, !found);
    __syncwarp();
    if (lane == 0) {
      Work& work = control.work[slot.stage];
      work = repeated < 0 ? control.next : control.work[repeated];
      // With cut keys the search takes no time: it fills waits.
      work.care = repeated >= 0 ? Work::kRepeated : work.cut ? Work::kCareful : Work::kQuick;
      const bool in_boxes = work.item.rows >= plan.query_box_rows;
      work.gathers = Shape::kGathersFirst && repeated < 0 && ticket < plan.blocks_in_grid && !in_boxes;
      if (repeated >= 0) control.again[repeated] = false;
      barrier_arrive(shared_address(&control.work_full[slot.stage]));
    }
    __syncwarp();
    if (repeated < 0 && !found) break;
    const Ring<Shape::kQueryStages> queries = queries_of<Shape>(slot);
    barrier_wait(shared_address(&control.queries_empty[queries.stage]), queries.phase ^ 1);
    const uint32_t stage = shared + queries.stage * Shape::kQueryBytes;
    const uint32_t full = shared_address(&control.queries_full[queries.stage]);
    if (control.work[slot.stage].item.rows >= plan.query_box_rows) {
      if (lane == 0) copy_query_boxes<Shape>(p, plan, control.work[slot.stage], stage, full);
    } else if (control.work[slot.stage].gathers) {
      if (lane == 0) barrier_arrive(full);
    } else {
      copy_any_queries<Shape>(p, plan, control.work[slot.stage], stage);
      arrive_after_copies<false>(full);
    }
    // Tickets are taken as blocks come to the end of their work, so that the one that ends first gets the next tile.
    if (control.work[slot.stage].item.tiles > 0) {
      barrier_wait(shared_address(&control.next_wanted), wanted);
      wanted ^= 1;
    }
    slot.advance();
    if (repeated >= 0) continue;
    found = false;
    if (plan.one_round) {
      if (lane == 0) control.next.exists = false;
      continue;
    }
    if (lane == 0) {
      if (ticket < plan.blocks_in_grid) await_tickets(plan.tickets);  // once they are open they stay so
      ticket = static_cast<int>(next_ticket(plan.tickets)) + plan.blocks_in_grid;
    }
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  // As many tickets are taken as there are tiles: a block's first tile needs none, and its last ticket finds none.
  // Whoever has the last one clears the word for the next launch. Without tiles nobody takes a ticket.
  const int all = scheduler.ends;
  const bool last = all == 0 ? blockIdx.x == 0 : ticket == all - 1 + plan.blocks_in_grid;
  if (last && lane == 0 && !plan.one_round) close_tickets(plan.tickets);
  if (plan.splits == 0) leave_gap<Shape::kCodeGap>();  // never runs, see kCodeGap
}

}  // namespace paged_attn
