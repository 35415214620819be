// From memory to shared memory: rows of queries, tiles of keys and of values, in pieces of 16 bytes from pages of any
// size. The warps of a group share its tiles. Those of the first one copy the queries of their rows.
#pragma once

#include "../key_places.cuh"
#include "../rows.cuh"
#include "shape.cuh"

namespace paged_attn {

template <typename Shape>
struct Float32Loader {
  uint2* places;  // in shared memory: of the keys and values of the group's tile found last, in pieces

  // Looks up the pages of a tile, before its copies start.
  PD_MEMBER void find(const Problem& p, const Plan& plan, const KeyPlaces& keys, int head, int tile) {
    const int thread = this_thread(), lane = thread % kWarp, warp = Shape::place_in_group(thread / kWarp);
    if (lane >= Shape::kWarpKeys) return;
    const int2 place = keys.look_up(p, plan, tile * Shape::kTileKeys + warp * Shape::kWarpKeys + lane);
    const bool found = page_exists(p, place.x);
    places[warp * Shape::kWarpKeys + lane] = {found ? plan.key_place(place.x, place.y, head) : KeyPlaces::kNowhere,
                                              found ? plan.value_place(place.x, place.y, head) : KeyPlaces::kNowhere};
  }

  PD_MEMBER void copy_keys(const Problem& p, uint32_t target) {
    copy_rows<false>(p.cache.k, target, static_cast<int>(p.head_dim));
  }

  PD_MEMBER void copy_values(const Problem& p, uint32_t target) {
    copy_rows<true>(p.cache.v, target, static_cast<int>(p.head_dim_v));
  }

  template <bool kValues>
  PD_MEMBER void copy_rows(const void* cache, uint32_t target, int dims) {
    constexpr int kLanes = Shape::kPieces < kWarp ? Shape::kPieces : kWarp, kRowsAtOnce = kWarp / kLanes;
    const int thread = this_thread(), lane = thread % kWarp;
    const int first_row = Shape::place_in_group(thread / kWarp) * Shape::kWarpKeys;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Shape::kWarpKeys; i += kRowsAtOnce) {
      const int row = first_row + i + lane / kLanes;
      const uint32_t from = kValues ? places[row].y : places[row].x;
      const char* const source =
          static_cast<const char*>(cache) + static_cast<uint64_t>(from == KeyPlaces::kNowhere ? 0 : from) * 16;
#pragma unroll
      for (int first = 0; first < Shape::kPieces; first += kLanes) {
        const int piece = first + lane % kLanes;
        const int at = kValues ? Shape::place_v(row, piece) : Shape::place_k(row, piece);
        const bool valid = from != KeyPlaces::kNowhere && piece * 4 < dims;
        copy_async(target + (row * Shape::kPieces + at) * 16, source + (valid ? piece * 16 : 0), valid);
      }
    }
  }

  // The queries of this warp's rows, for all groups; zeros for rows that do not exist.
  static PD_MEMBER void copy_queries(const Problem& p, const Plan& plan, const Item& item, int head, uint32_t target) {
    const float* const q = static_cast<const float*>(p.q);
    const int first_row = threadIdx.x / kWarp * Shape::kWarpRows;
#pragma unroll 1
    for (int i = threadIdx.x % kWarp; i < Shape::kWarpRows * Shape::kPieces; i += kWarp) {
      const int row = first_row + i / Shape::kPieces, piece = i % Shape::kPieces;
      const bool valid = row < item.rows && piece * 4 < p.head_dim;
      const int64_t offset = q_offset(p, item, query_row(p, plan, item, head, row)) + piece * 4;
      copy_async(target + (row * Shape::kPieces + Shape::place_k(row, piece)) * 16, valid ? q + offset : q, valid);
    }
  }
};

}  // namespace paged_attn
