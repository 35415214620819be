// What the warps of both kernels (kernel.cuh, narrow_kernel.cuh) do alike: the director finds out what is to be done,
// three loaders know where keys lie and bring them, the others multiply. Where rows are gathered, the director may
// bring keys too. run_block(), at the end, gives each warp its role.
#pragma once

#include "../key_places.cuh"
#include "../prefill/pieces.cuh"
#include "shape.cuh"

namespace paged_attn {

constexpr int kPartial = 1;  // the named barrier of the first consumer; that of the other one follows

// At the barrier of keys that have come: a lane of each producer warp says that its boxes are on their way, or each
// lane that its pieces are there.
PD_DEVICE int keys_arrivals(const MlaCall& call, int gatherers) {
  return call.box_rows > 0 ? MlaSizes::kLoaders : gatherers * kWarp;
}

// The copies of one lane of a producer warp.
struct MlaCopier {
  using Sizes = MlaSizes;
  static constexpr int kKeys = Sizes::kKeys, kColumns = Sizes::kColumns;
  static constexpr int kGatherers = Sizes::kLoaders;  // warps that bring keys where pages hold no boxes

  int lane, loader;         // of the warp, of those that bring keys
  int own_column, own_row;  // the box that this lane asks for
  bool has_box;

  PD_MEMBER void start_copier(const MlaCall& call, int warp) {
    lane = threadIdx.x % kWarp;
    loader = warp;
    // A warp asks for one box after the other, so each has a third of them. No division by what is not known here: this
    // stands before the first copy.
    const unsigned own = lane * Sizes::kLoaders + loader, row = own * call.box_rows;
    static_assert(kKeys / 8 * kColumns <= Sizes::kLoaders * kWarp, "there is a lane for every box");
    static_assert(Sizes::kMostCluster == 2, "so that the mask is right");
    own_column = row / kKeys;
    own_row = row % kKeys;
    has_box = call.box_rows > 0 && own_column < kColumns && (own & (call.cluster - 1)) == blockIdx.y;
  }

  PD_MEMBER void prefetch_own_box(const MlaCall& call, int head, int2 place) const {
    const bool latents = own_column < Sizes::kLatentColumns;
    prefetch_box(latents ? call.latents : call.rope, latents ? own_column * kColumn : 0, place.y, head, place.x);
  }

  PD_MEMBER void copy_own_box(const MlaCall& call, uint32_t target, uint32_t arrived, int head, int2 place) const {
    const bool latents = own_column < Sizes::kLatentColumns;
    const CUtensorMap& tensor = latents ? call.latents : call.rope;
    const int dim = latents ? own_column * kColumn : 0;
    if (call.cluster > 1) {
      const int blocks = (1 << Sizes::kMostCluster) - 1;
      copy_box_to(blocks, target, tensor, arrived, dim, place.y, head, place.x, call.copy_policy);
    } else {
      copy_box(target, tensor, arrived, dim, place.y, head, place.x, call.copy_policy);
    }
  }

  // Where keys lane and lane + 32 of a tile lie, in pieces.
  struct Lookup {
    uint32_t latents[2], rope[2];
  };

  PD_MEMBER Lookup look_up(const Problem& p, const MlaCall& call, const KeyPlaces& places, int key, int head) const {
    Lookup at;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 place = places.look_up(p, call, key + h * kWarp + lane);
      const bool found = page_exists(p, place.x);
      at.latents[h] = found ? call.value_place(place.x, place.y, head) : KeyPlaces::kNowhere;
      at.rope[h] = found ? call.key_place(place.x, place.y, head) : 0;
    }
    return at;
  }
};

// Where every pair shall have the same number of clusters, the pair of this one is known before any length is. Then
// queries are asked for at once, and those who bring keys find their first tiles by themselves, in a few instructions.
struct MlaExpected {
  Walker walker;  // as expect_even_stretch() says
  int b, head;    // -1: nothing is expected

  PD_MEMBER void start(const Problem& p, const MlaCall& call) {
    walker = {};
    b = head = -1;
    if (!call.expects) return;
    expect_even_stretch(p, call, walker);
    if (walker.pair < 0) return;
    b = call.kv_heads.divide(walker.pair);
    head = walker.pair - b * static_cast<int>(p.kv_heads);
  }

  // Whether the lengths hardly differ. Then the stretch is what find_stretch() would find, and kv_len is known.
  PD_MEMBER bool find(const Problem& p, const MlaCall& call, Dealing& dealing, int& kv_len) {
    if (b < 0) return false;
    const int lane = threadIdx.x % kWarp;
    const bool exists = lane < call.items;
    const int length = exists ? basic_length(p, call, lane) : 0, tiles = exists ? basic_tiles(call, length) : 0;
    // Each has rows, and its item holds them all.
    const int rows = exists && p.cu_seqlens_q ? query_length(p, lane) * static_cast<int>(p.group) : 1;
    if (__any_sync(~0u, rows <= 0 || rows > call.rows_per_tile)) return false;
    const int most = __reduce_max_sync(~0u, tiles), all = __reduce_add_sync(~0u, tiles);
    if (most * call.items - all > all / 16) return false;
    deal_evenly<false>(call, most, walker, dealing);
    kv_len = __shfl_sync(~0u, length, b);
    return true;
  }
};

// The item of request b as far as copies of its queries need it.
PD_DEVICE Item expected_item(const Problem& p, const MlaCall& call, int b) {
  Item item = {};
  item.b = b;
  item.q_begin = query_begin(p, b);
  item.rows = min(query_length(p, b) * static_cast<int>(p.group), call.rows_per_tile);
  return item;
}

// Finds the work of this cluster, which both of its blocks do alike.
struct MlaDirector {
  Walker walker;
  Dealing dealing;
  Ring<2> slot;
  bool cut;  // this cluster has written its record; it has the first keys of one cut pair at most

  PD_MEMBER void start(const Problem& p, const MlaCall& call, MlaExpected& expected) {
    dealing = {};
    slot = {};
    cut = false;
    int kv_len;
    const bool even = expected.find(p, call, dealing, kv_len);
    walker = expected.walker;
    if (even) return;
    if (call.blocks_each.divisor > 0) expect_even_stretch(p, call, walker);
    if (call.balanced) {
      find_stretch(p, call, walker, dealing);
    } else {
      find_split(p, call, walker, dealing);
    }
  }

  // Whether this lane writes the record for the combine kernel: one lane of one block of the cluster does.
  PD_MEMBER bool says(const MlaCall& call) const {
    return call.slots > 0 && blockIdx.y == 0 && threadIdx.x % kWarp == 0;
  }

  // Whether there is a place for what is found next.
  template <typename Control>
  PD_MEMBER bool may_tell(Control& control) const {
    const bool passed = barrier_passed(shared_address(&control.work_empty[slot.stage]), slot.phase ^ 1);
    return __any_sync(~0u, passed);
  }

  // The next work, or that there is none: then false.
  template <typename Control>
  PD_MEMBER bool tell(const Problem& p, const MlaCall& call, Control& control) {
    const int lane = threadIdx.x % kWarp;
    Segment segment = {};
    MlaWork next = {};
    next.exists = walker.next(p, call, dealing, segment, next.item);
    if (next.exists) {
      next.head = segment.head;
      next.tile = segment.tile;
      next.tile_end = segment.tile_end;
      next.first = segment.first;
      // Where lengths change during the call, blocks see different ones: no more than there are blocks before this one.
      next.behind = min(partials_behind(next.item, segment, dealing), static_cast<int>(blockIdx.x));
      // Before the last partial of a pair stand others of a whole stretch each, but for the first one.
      const int before = segment.tile - next.item.first_tile;
      next.two_partials =
          call.adds_two && (next.first ? next.behind == 1 : next.behind == 0 && before <= dealing.length);
      if (next.first && next.behind > 0 && !next.two_partials) {
        cut = true;
        if (says(call)) {
          const Item& item = next.item;
          call.records[blockIdx.x] = {next.behind, next.head, item.b, item.first_row, item.rows, item.q_begin, 0};
        }
      }
    }
    barrier_wait(shared_address(&control.work_empty[slot.stage]), slot.phase ^ 1);
    if (lane == 0) {
      const bool first_rows = next.exists && next.item.first_row == 0;
      next.asked = first_rows && next.item.b == control.asked.x && next.head == control.asked.y;
      control.asked.x = -1;  // the first work only
      control.work[slot.stage] = next;
      barrier_arrive(shared_address(&control.work_full[slot.stage]));
    }
    __syncwarp();
    slot.advance();
    if (!next.exists && says(call)) {
      if (!cut) call.records[blockIdx.x].behind = 0;
      call.records[blockIdx.x].even = dealing.most > 0;
    }
    return next.exists;
  }
};

template <typename Control>
PD_DEVICE void direct_mla(const Problem& p, const MlaCall& call, Control& control, MlaExpected& expected) {
  MlaDirector director;
  director.start(p, call, expected);
  while (director.tell(p, call, control)) {
  }
}

// What a producer warp knows of the work that it has taken.
struct MlaTask {
  KeyPlaces places;
  int head, tile, tile_end;

  // What the director is about to tell, if that is sure.
  PD_MEMBER bool expect(const Problem& p, const MlaCall& call, MlaExpected& expected) {
    Dealing dealing;
    int kv_len;
    if (!expected.find(p, call, dealing, kv_len)) return false;
    Item item = {};
    item.b = expected.b;
    item.key_end = kv_len;
    places.start(p, item);
    head = expected.head;
    tile = expected.walker.unit;
    tile_end = min(tile + expected.walker.left, basic_tiles(call, kv_len));
    return tile < tile_end;
  }

  template <typename Control>
  PD_MEMBER void pass(Control& control, Ring<2>& slot) const {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
  }

  // The next one; false at the end.
  template <typename Control>
  PD_MEMBER bool take(const Problem& p, Control& control, Ring<2>& slot) {
    barrier_wait(shared_address(&control.work_full[slot.stage]), slot.phase);
    const MlaWork& work = control.work[slot.stage];
    if (!work.exists) return false;
    places.start(p, work.item);
    head = work.head;
    tile = work.tile;
    tile_end = work.tile_end;
    barrier_arrive(shared_address(&control.work_empty[slot.stage]));
    slot.advance();
    return true;
  }
};

// Tile after tile of the work that the director finds.
template <bool kBoxes, typename Loader, typename Control>
PD_DEVICE void load_tiles(Loader& loader, const Problem& p, const MlaCall& call, Control& control, uint32_t shared,
                          MlaExpected& expected) {
  using Sizes = typename Loader::Sizes;
  Ring<2> slot;
  MlaTask task;
  bool untold = task.expect(p, call, expected);
  while (untold || task.take(p, control, slot)) {
#pragma unroll 1
    for (; task.tile < task.tile_end; ++task.tile) {
      const uint32_t stage = shared + Sizes::kKeysAt + loader.ring.stage * Sizes::kKeyBytes;
      const int key = task.tile * Sizes::kKeys;
      if constexpr (kBoxes) {
        loader.copy_boxes(p, call, control, task.places, stage, key, task.head);
      } else {
        loader.gather(p, call, control, task.places, stage, key, task.head);
      }
      loader.ring.advance();
    }
    if (untold) task.pass(control, slot);
    untold = false;
  }
}

// Barriers of the consumers and of the work, which do not depend on how tiles are cut. meeting: threads that multiply
// or weigh. Every thread that reads a work arrives when it is done with it.
template <typename Control>
PD_DEVICE void init_work_barriers(Control& control, int loaders, int meeting) {
  barrier_init(shared_address(&control.meet), meeting);
  for (int i = 0; i < 2; ++i) {
    barrier_init(shared_address(&control.ready[i]), kWarpgroup);
    barrier_init(shared_address(&control.work_full[i]), 1);
    barrier_init(shared_address(&control.work_empty[i]), loaders * kWarp + meeting);
  }
  fence_async_proxy();
  publish_barriers();
}

// A block, once one thread has made its barriers. consume(consumer): what the warps of that one do; weigh(): what those
// of the weigher do, where there is one.
template <typename Sizes, typename Loader, typename Control, typename Consume, typename Weigh = void (*)()>
PD_DEVICE void run_block(const Problem& p, const MlaCall& call, Control& control, uint32_t shared, Consume consume,
                         Weigh weigh = {}) {
  MlaExpected expected;
  expected.start(p, call);
  if (threadIdx.x == 0) control.expected = control.asked = make_int2(expected.b, expected.head);
  if (call.cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    give_registers<Sizes::kProducerRegisters>();
    const int warp = threadIdx.x / kWarp;
    Loader loader;
    loader.start(call, warp);
    wait_for_predecessor();
    let_successor_start();
    if (call.box_rows == 0 && Loader::kGatherers > Sizes::kLoaders) {
      if constexpr (Loader::kGatherers > Sizes::kLoaders) loader.gather_tiles(p, call, control, shared, expected);
    } else if (warp == Sizes::kLoaders) {
      direct_mla(p, call, control, expected);
    } else if (call.box_rows > 0) {
      load_tiles<true>(loader, p, call, control, shared, expected);
    } else {
      if constexpr (Loader::kGatherers == Sizes::kLoaders)
        load_tiles<false>(loader, p, call, control, shared, expected);
    }
  } else if (Sizes::kWeighers > 0 && warpgroup > Sizes::kConsumers) {
    if constexpr (Sizes::kWeighers > 0) {
      give_registers<Sizes::kWeigherRegisters>();
      wait_for_predecessor();
      weigh();
    }
  } else {
    take_registers<Sizes::kConsumerRegisters>();
    wait_for_predecessor();
    consume(warpgroup - 1);
  }
  if (blockIdx.y == 0) clear_unclaimed(p);
  // A block stays while another may still copy into it or arrive at its barriers.
  if (call.cluster > 1) cluster_sync();
}

}  // namespace paged_attn
