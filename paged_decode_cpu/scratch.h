// The scratch memory of an item (Scratch), and where the keys and values of a tile lie in the cache (TileRows).
#pragma once

#include "kernel.h"
#include "prefetcher.h"
#include "spec/request.h"
#include "tile.h"

namespace paged_attn {
namespace {

#ifndef PD_L2_KIB
#define PD_L2_KIB 1024
#endif
constexpr int64_t kL2Bytes = int64_t(PD_L2_KIB) << 10;  // of the smallest L2 that such processors have

// The factors of one kv_head.
struct HeadScale {
  float score;     // turns a product into a score
  float qv_carry;  // brings q.k to the scale of qv.v before that is added
  bool with_qv;
  float v_descale;
};

// `unit` is what a number read from the cache must be multiplied with.
inline HeadScale head_scale(const Problem& p, int64_t b, int64_t kv_head, float unit) {
  const Cache& c = p.cache;
  const float k_descale = unit * descale_at(c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head, b, kv_head);
  const float v_descale = unit * descale_at(c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head, b, kv_head);
  const float q_descale = descale_at(p.q_descale, p.q_descale_stride_batch, p.q_descale_stride_head, b, kv_head);
  // With qv: score = q.k * k_descale + qv.v * v_descale.
  const float carry = k_descale / v_descale;
  const bool with_qv = p.qv && v_descale != 0.f && fabsf(carry) != INFINITY;  // else qv.v counts for nothing
  return {p.scale * q_descale * (with_qv ? v_descale : k_descale), carry, with_qv, v_descale};
}

template <class Ops>
bool has_long_tiles(const Problem& p, const Item& item) {
  return item.walk.long_tiles && item.reads_ahead(p, Ops::kFewRows);
}

// Keys of a tile. Two tiles of all heads, the current one and the next, take a quarter of L2. From 8 rows on, and where
// less than 32 keys would come out (64 in a small call), they take half: every row of every tile has some overhead.
// (scratch_bytes may ask with other Ops than attend uses, and must get the same: only the cache and the item decide.)
template <class Ops>
int64_t tile_keys(const Problem& p, const Item& item) {
  if (item.rows() >= Ops::kMinPackedRows) return item.heads() == 1 ? kMaxTile : kMaxTile / 2;
  if (has_long_tiles<Ops>(p, item)) return kMaxTile;
  const int64_t slot_bytes = key_bytes(p, item.heads());
  if (item.walk.tile_bytes > 0 && !item.small)
    return pd_min(pd_max(item.walk.tile_bytes / slot_bytes / 16 * 16, 16), kMaxTile);
  const int64_t quarter = kL2Bytes / 8 / slot_bytes / 16 * 16, half = kL2Bytes / 4 / slot_bytes / 16 * 16;
  const int64_t keys = item.rows() >= 8 ? half : pd_max(quarter, pd_min(half, item.small ? 64 : 32));
  return pd_min(pd_max(keys, 16), kMaxTile);
}

// Scratch memory of one item, carved from one allocation.
template <class Ops>
struct Scratch {
  using Elem = typename Ops::Elem;
  int64_t depth, width;     // head_dim and head_dim_v, padded to whole chunks
  int64_t head_rows;        // rows of one kv_head, padded to a multiple of kRowStep
  int64_t tile;             // keys of a tile, at most
  Elem *q, *qv;             // [heads, rows, depth], [heads, rows, width]
  float *acc, *m, *l;       // [heads, rows, width], [heads, rows], [heads, rows, kLanes] (added up at the end)
  float* scores;            // [rows that multiply together, kMaxTile]
  Elem* p;                  // the same
  Elem *keys, *value_keys;  // panels of [depth, tile], and of [width, tile] for qv
  Elem* values;             // panels of [tile, width]
  Run* runs;                // of the next tile
  KvRange* visible;         // [rows]
  int64_t* q_pos;           // [rows]
  HeadScale* scales;        // [heads]
  float* row;               // one row of floats
  int64_t bytes;

  // Numbers that lie as several (ops_pieces.h).
  static constexpr int kLeft = Ops::kLeftPieces, kRight = Ops::kRightPieces;

  Scratch(const Problem& problem, const Item& item, char* base) {
    depth = round_up(problem.head_dim, Ops::kChunk);
    width = round_up(problem.head_dim_v, Ops::kChunk);
    tile = tile_keys<Ops>(problem, item);
    head_rows = round_up(item.rows(), Ops::kRowStep);
    const int64_t rows = item.heads() * head_rows;
    const bool packed = item.rows() >= Ops::kMinPackedRows;
    bytes = 0;
    take(base, kLeft * rows * depth, &q);
    take(base, problem.qv ? kLeft * rows * width : 0, &qv);
    take(base, rows * width, &acc);
    take(base, rows, &m);
    take(base, rows * kLanes, &l);
    const int64_t at_once = packed ? Ops::kScoreRows : rows;
    take(base, at_once * kMaxTile, &scores);
    take(base, kLeft * at_once * kMaxTile, &p);
    take(base, 2 * tile * item.heads(), &runs);
    const bool lays_out = packed || Ops::kFewRows;
    take(base, lays_out ? kRight * depth * tile : 0, &keys);
    take(base, packed && problem.qv ? kRight * width * tile : 0, &value_keys);
    take(base, lays_out ? kRight * round_up(width, kPanel) * tile : 0, &values);
    take(base, item.rows(), &visible);
    take(base, item.rows(), &q_pos);
    take(base, item.heads(), &scales);
    take(base, depth > width ? depth : width, &row);
  }

 private:
  template <typename T>
  void take(char* base, int64_t count, T** field) {
    *field = reinterpret_cast<T*>(base + bytes);
    bytes += round_up(count * int64_t(sizeof(T)), 64);
  }
};

// Addresses of the keys and values of a tile, at kv_head 0. Entries past n repeat the last one, so
// that kernels may read whole groups of keys.
struct TileRows {
  int64_t begin, n;
  const char *k[kMaxTile], *v[kMaxTile];

  void locate(const Cache& cache, int64_t batch, int64_t key_begin, int64_t key_end, int64_t tile) {
    begin = key_begin;
    n = pd_max(0, pd_min(tile, key_end - key_begin));
    const int64_t bytes = dtype_bytes(cache.dtype);
    for (int64_t j = 0; j < n;) {
      Slot s = slot_of_key(cache, batch, begin + j);
      const char* k_row =
          static_cast<const char*>(cache.k) + (s.page * cache.k_stride_page + s.slot * cache.k_stride_slot) * bytes;
      const char* v_row =
          static_cast<const char*>(cache.v) + (s.page * cache.v_stride_page + s.slot * cache.v_stride_slot) * bytes;
      int64_t end = pd_min(n, j + (cache.block_table ? cache.page_size - s.slot : n));
      for (; j < end; ++j, k_row += cache.k_stride_slot * bytes, v_row += cache.v_stride_slot * bytes) {
        k[j] = k_row;
        v[j] = v_row;
      }
    }
    for (int64_t j = n; n > 0 && j < round_up(n, kPaddedKeys); ++j) {
      k[j] = k[n - 1];
      v[j] = v[n - 1];
    }
  }
};

}  // namespace
}  // namespace paged_attn
