// The attention loop, for every instruction set: attend_as. For each tile of keys: scores (tile.h), online softmax
// (softmax.h), values (tile.h). What a feature means is in spec/ranges.h (which keys), spec/score.h (one score) and
// spec/state.h (merge, sink, lse).
//
// All kv_heads of an item share one walk over the pages, so a page is read once and whole; a walk for each head would
// read pieces of 256 bytes. The next tile is prefetched while this one is multiplied (fetch.h).
#pragma once

#include "fetch.h"
#include "item_rows.h"
#include "ops_f32.h"
#include "softmax.h"

namespace paged_attn {
namespace {

constexpr int64_t kItemRows = 240;  // the most of an item on packed keys

#ifndef PD_ASKED_AGAIN_ROWS
#define PD_ASKED_AGAIN_ROWS 1
#endif
constexpr int64_t kAskedAgainRows = PD_ASKED_AGAIN_ROWS;  // of a kv_head: with fewer, a second prefetch of each line
                                                          // costs more than it gains

// With one row for each kv_head, all kv_heads add the values of so many keys before the next keys, in the order of
// memory. Each time they load and store their sums, which with more rows would cost more than that order gains.
constexpr int64_t kSweepKeys = 8;

// The same for up to 8 rows whose keys come from memory, on processors where it gains that much: bytes of the values
// that a kv_head adds before the next one does. 0: off.
#ifndef PD_SWEEP_BYTES
#define PD_SWEEP_BYTES 0
#endif
constexpr int64_t kSweepBytes = PD_SWEEP_BYTES;

// The products of one tile for few rows, in place in the cache. `rows`: 8, 4, 2 or 1.
template <class Ops, class... Args>
void dot_tile_scores(int64_t rows, Args&&... args) {
  if constexpr (Ops::kTransposesKeys) {
    if (rows == 8) return transposed_scores<Ops, 8>(args...);
  } else if constexpr (Ops::kMaxDotRows == 8) {
    if (rows == 8) return dot_scores<Ops, 8>(args...);
  }
  if (rows == 4) return dot_scores<Ops, 4>(args...);
  if (rows == 2) return dot_scores<Ops, 2>(args...);
  dot_scores<Ops, 1>(args...);
}

template <class Ops, class... Args>
void dot_tile_values(int64_t rows, Args&&... args) {
  if constexpr (Ops::kMaxDotRows == 8)
    if (rows == 8) return dot_values<Ops, 8>(args...);
  if (rows == 4) return dot_values<Ops, 4>(args...);
  if (rows == 2) return dot_values<Ops, 2>(args...);
  dot_values<Ops, 1>(args...);
}

// The products of one tile for many rows, on keys and values that pack_tile laid out in panels (tile.h).
template <class Ops>
void pack_tile(const Problem& p, const Scratch<Ops>& s, const TileRows& tile, int64_t k_offset, int64_t v_offset) {
  pack_keys<Ops>(tile.k, k_offset, tile.n, p.head_dim, s.depth / Ops::kDepth, s.keys);
  pack_values<Ops>(tile.v, v_offset, round_up(tile.n, Ops::kValueKeys), p.head_dim_v, s.tile / Ops::kDepth, s.values);
  if (p.qv) pack_keys<Ops>(tile.v, v_offset, tile.n, p.head_dim_v, s.width / Ops::kDepth, s.value_keys);
}

// Scores of the n keys from key `from` of the tile on, a multiple of kPanel.
template <class Ops>
void packed_tile_scores(const Scratch<Ops>& s, int64_t rows, const typename Ops::Elem* q, int64_t depth,
                        const typename Ops::Elem* keys, int64_t from, int64_t n, const float* carry, Prefetcher& next) {
  const int64_t steps = depth / Ops::kDepth;
  matrix<Ops>(rows, q, depth, keys + from * depth, steps, steps, round_up(n, kLanes), s.scores, kMaxTile, carry, next);
}

template <class Ops>
void packed_tile_values(const Scratch<Ops>& s, int64_t rows, int64_t from, int64_t n, float* acc, Prefetcher& next) {
  const float one = 1.f;
  matrix<Ops>(rows, s.p, kMaxTile, s.values + from * kPanel, s.tile / Ops::kDepth, pd_ceil_div(n, Ops::kDepth), s.width,
              acc, s.width, &one, next);
}

// Rows of a kv_head that multiply together, and the keys of the tile that any of them sees.
struct Part {
  int64_t first, count;
  int64_t from, keys;
};

template <class Ops>
Part part_of(const Scratch<Ops>& s, const TileRows& tile, int64_t first, int64_t count, int64_t align) {
  KvRange seen = {tile.n, 0};  // counted from the start of the tile
  for (int64_t r = first; r < first + count; ++r) {
    if (s.visible[r].begin == s.visible[r].end) continue;
    seen.begin = pd_min(seen.begin, s.visible[r].begin - tile.begin);
    seen.end = pd_max(seen.end, s.visible[r].end - tile.begin);
  }
  const int64_t from = pd_max(seen.begin, 0) / align * align;
  return {first, count, from, pd_max(pd_min(seen.end, tile.n) - from, 0)};
}

// Row r of kv_head h. Positions are counted from key `begin`.
template <class Ops>
ScoreOf score_of(const Problem& p, const Item& item, const Scratch<Ops>& s, int64_t h, int64_t r, int64_t begin) {
  ScoreOf score = {s.scales[h].score, p.softcap, 0.f, static_cast<float>(s.q_pos[r] - begin)};
  if (p.alibi_slopes)
    score.slope = p.alibi_slopes[item.batch * p.alibi_stride_batch + (item.kv_head_begin + h) * p.group +
                                 (item.row_begin + r) % p.group];
  return score;
}

// Turns the scores of the rows of one part, for kv_head h, into probabilities.
template <class Ops>
void softmax_part(const Problem& p, const Item& item, const Scratch<Ops>& s, const TileRows& tile, int64_t h,
                  const Part& part, float* scores, typename Ops::Elem* probabilities) {
  const int64_t begin = tile.begin + part.from;
  for (int64_t r = part.first; r < part.first + part.count; ++r) {
    const int64_t i = h * s.head_rows + r;
    const ScoreOf score = score_of(p, item, s, h, r, begin);
    const KvRange visible = {pd_max(s.visible[r].begin - begin, 0), pd_min(s.visible[r].end - begin, part.keys)};
    softmax_row<Ops>(scores + (r - part.first) * kMaxTile, part.keys, visible, score,
                     probabilities + (r - part.first) * kMaxTile, &s.m[i], s.l + i * kLanes, s.acc + i * s.width,
                     s.width);
  }
}

// Keys of a tile of n whose values a kv_head adds before the next kv_head does: a multiple of kValueKeys.
template <class Ops>
int64_t sweep_keys(const Item& item, int64_t head_dim_v, bool cached, int64_t n) {
  static_assert(kSweepBytes == 0 || Ops::kValueKeys <= 2, "keys are taken in pairs");
  const int64_t rows = item.rows();
  if (kSweepBytes > 0 && !cached && rows <= 8 && item.heads() > 1) {
    const int64_t bytes = rows <= 4 ? kSweepBytes : 2 * kSweepBytes;  // with more rows more sums are loaded and stored
    return pd_max(bytes / (2 * head_dim_v * Ops::kBytes), 1) * 2;
  }
  // One kv_head has no others' values beside its own. (Only on Arm: elsewhere just several kv_heads were measured.)
  if (Ops::kNeon && item.heads() == 1) return n;
  return rows == 1 ? kSweepKeys : n;
}

// All kv_heads against one tile, few rows each, in three sweeps: one head alone would wait for the latency of its own
// sums and exponentials at every step. What is read from memory, from left to right:
//
//   scores    K of head 0, K of head 1, ... K of the last    (then V of head 0)
//   softmax   nothing
//   values    V of head 0, V of head 1, ... V of the last    (then K of head 0 of the next tile)
//             (one row per kv_head, on some processors a few: of a few keys, then of the next few)
//
// While one entry of this list is multiplied, the lines of the entry after it are prefetched once more (then_read):
// they were prefetched with the rest of their tile, but the processor drops some prefetches.
template <class Ops>
void attend_tile_dot(const Problem& p, const Item& item, const Scratch<Ops>& s, const TileRows& tile,
                     const TileRows& next_tile, Prefetcher& next) {
  const Cache& c = p.cache;
  const int64_t rows = item.rows();
  Part parts[Ops::kMinPackedRows];
  int64_t num_parts = 0;
  for (int64_t first = 0, count; first < rows; first += count) {
    count = Ops::kMaxDotRows;
    while (count > rows - first) count /= 2;
    parts[num_parts] = part_of(s, tile, first, count, kLanes);
    if (parts[num_parts].keys > 0) ++num_parts;
  }
  const auto each = [&](auto work) {
    for (int64_t h = 0; h < item.heads(); ++h)
      for (int64_t i = 0; i < num_parts; ++i) work(h, parts[i], h * s.head_rows + parts[i].first);
  };
  const auto k_offset = [&](int64_t h) { return (item.kv_head_begin + h) * c.k_stride_head * Ops::kBytes; };
  const auto v_offset = [&](int64_t h) { return (item.kv_head_begin + h) * c.v_stride_head * Ops::kBytes; };
  // Once per head is enough: with its last part.
  const bool asked = rows >= kAskedAgainRows && !next.near;
  const auto then_read = [&](const Part& part, const char* const* addresses, int64_t offset) {
    next.again = asked && addresses && part.first == parts[num_parts - 1].first ? addresses + part.from : nullptr;
    next.again_offset = offset;
  };
  each([&](int64_t h, const Part& part, int64_t row) {
    const bool last = h == item.heads() - 1;
    then_read(part, last ? tile.v : tile.k, last ? v_offset(0) : k_offset(h + 1));
    dot_tile_scores<Ops>(part.count, s.q + row * s.depth, s.depth, tile.k + part.from, k_offset(h), part.keys,
                         p.head_dim, s.scores + row * kMaxTile, nullptr, next);
    if (s.scales[h].with_qv)
      dot_tile_scores<Ops>(part.count, s.qv + row * s.width, s.width, tile.v + part.from, v_offset(h), part.keys,
                           p.head_dim_v, s.scores + row * kMaxTile, &s.scales[h].qv_carry, next);
  });
  each([&](int64_t h, const Part& part, int64_t row) {
    next.advance<Prefetcher::kFewPiece>(kSoftmaxSteps * part.count * pd_ceil_div(part.keys, kLanes));
    softmax_part(p, item, s, tile, h, part, s.scores + row * kMaxTile, s.p + row * kMaxTile);
  });
  const int64_t sweep = sweep_keys<Ops>(item, p.head_dim_v, next.cached, tile.n);
  for (int64_t j = 0; j < tile.n; j += sweep)
    each([&](int64_t h, const Part& part, int64_t row) {
      const int64_t keys = pd_min(part.keys - j, sweep);
      if (keys <= 0) return;
      if (h < item.heads() - 1) {
        then_read(part, tile.v + j, v_offset(h + 1));
      } else if (j + sweep < part.keys) {
        // Not past the addresses that the tile has: a last sweep may be shorter than this one.
        const int64_t end = part.from + j + sweep + round_up(keys, Ops::kValueKeys);
        then_read(part, end <= round_up(tile.n, kPaddedKeys) ? tile.v + j + sweep : nullptr, v_offset(0));
      } else {
        then_read(part, next_tile.n >= tile.n ? next_tile.k : nullptr, k_offset(0));
      }
      dot_tile_values<Ops>(part.count, s.p + row * kMaxTile + j, tile.v + part.from + j, v_offset(h), keys,
                           p.head_dim_v, s.acc + row * s.width, s.width, next);
    });
}

// One kv_head against one tile, many rows: on keys and values that pack_tile lays out.
template <class Ops>
void attend_tile_packed(const Problem& p, const Item& item, const Scratch<Ops>& s, const TileRows& tile, int64_t h,
                        Prefetcher& next) {
  const Cache& c = p.cache;
  const int64_t kv_head = item.kv_head_begin + h, rows = item.rows();
  pack_tile(p, s, tile, kv_head * c.k_stride_head * Ops::kBytes, kv_head * c.v_stride_head * Ops::kBytes);
  for (int64_t first = 0; first < rows; first += Ops::kScoreRows) {
    const Part part = part_of(s, tile, first, pd_min(rows - first, Ops::kScoreRows), kPanel);
    if (part.keys == 0) continue;
    const int64_t row = h * s.head_rows + first;
    packed_tile_scores<Ops>(s, part.count, s.q + row * s.depth, s.depth, s.keys, part.from, part.keys, nullptr, next);
    if (s.scales[h].with_qv)
      packed_tile_scores<Ops>(s, part.count, s.qv + row * s.width, s.width, s.value_keys, part.from, part.keys,
                              &s.scales[h].qv_carry, next);
    softmax_part(p, item, s, tile, h, part, s.scores, s.p);
    packed_tile_values<Ops>(s, part.count, part.from, part.keys, s.acc + row * s.width, next);
  }
}

inline void attend_f32(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial);

// The end of the rows, from r on, that belong to the token of r: they see the same keys.
inline int64_t end_of_token(const Problem& p, const Item& item, int64_t r) {
  return pd_min(item.rows(), ((item.row_begin + r) / p.group + 1) * p.group - item.row_begin);
}

// The rows [begin, end) of an item, of its kv_head h alone.
inline Item rows_of(const Item& item, int64_t h, int64_t begin, int64_t end) {
  Item rows = item;
  rows.kv_head_begin = item.kv_head_begin + h;
  rows.kv_head_end = rows.kv_head_begin + 1;
  rows.row_begin = item.row_begin + begin;
  rows.row_end = item.row_begin + end;
  return rows;
}

// Calls work() with how float32 widens this cache.
template <class Work>
auto with_ops_f32(const Problem& p, const Work& work) {
  switch (p.cache.dtype) {
    case DType::kFloat16: return work.template operator()<OpsF32<DType::kFloat16>>();
    case DType::kBFloat16: return work.template operator()<OpsF32<DType::kBFloat16>>();
    case DType::kFloat8E4M3: return work.template operator()<OpsF32<DType::kFloat8E4M3>>();
    case DType::kFloat8E5M2: return work.template operator()<OpsF32<DType::kFloat8E5M2>>();
    default: return work.template operator()<OpsF32<DType::kFloat32>>();
  }
}

// Scratch memory of an item with these Ops, and behind it what attend_again needs for the rows of one token.
template <class Ops>
int64_t scratch_bytes_as(const Problem& p, const Item& item) {
  const Item token = rows_of(item, 0, 0, pd_min(item.rows(), p.group));
  const int64_t again = with_ops_f32(p, [&]<class F32>() { return Scratch<F32>(p, token, nullptr).bytes; });
  return Scratch<Ops>(p, item, nullptr).bytes + again;
}

// Whether sums of values of row i are not finite where the true ones may be. If l is NaN, a score is, and the true
// result too, unless scores are made of pieces. (x * 0 is 0 for a finite x, else NaN.)
template <class Ops>
bool is_unsure(const Scratch<Ops>& s, int64_t i) {
  const float l = add_lanes(load<DType::kFloat32>(s.l + i * kLanes));
  f32v zero = {};
  for (int64_t d = 0; d < s.width; d += kLanes) zero += load<DType::kFloat32>(s.acc + i * s.width + d) * 0.f;
  return add_lanes(zero) != 0.f && (l == l || Ops::kLeftPieces > 1);
}

// Repairs sums that are not finite. An infinite value times a probability of 0 is NaN, and the loop makes such
// products: with keys that only other rows see, and with the padding of products of several keys. And an infinity has
// no pieces (ops_pieces.h). So a token whose sums are not finite is attended once more, to its own keys alone and in
// float32, which takes one key at a time.
template <class Ops>
[[gnu::noinline]] void attend_again(const Problem& p, const Item& item, const Scratch<Ops>& s, KvRange keys,
                                    char* memory, float* partial) {
  if (Ops::kValueKeys == 1 && end_of_token(p, item, 0) == item.rows()) return;  // it already was attended that way
  for (int64_t h = 0; h < item.heads(); ++h)
    for (int64_t r = 0, end; r < item.rows(); r = end) {
      end = end_of_token(p, item, r);
      bool unsure = false;
      for (int64_t i = r; i < end; ++i) unsure |= is_unsure(s, h * s.head_rows + i);
      if (!unsure) continue;
      Item rows = rows_of(item, h, r, end);
      const position_t begin = pd_max(keys.begin, s.visible[r].begin);
      rows.keys = {begin, pd_max(begin, pd_min(keys.end, s.visible[r].end))};
      float* rows_partial = partial ? partial + (h * item.rows() + r) * partial_floats(p.head_dim_v) : nullptr;
      attend_f32(p, rows, rows.keys, memory, rows_partial);
    }
}

// row = the sums of values of one row, in the order of the elements, times both factors. Returns the bits of a NaN if a
// sum is not finite, else of 0 or -0 (OR has a shorter latency than an addition).
template <class Ops>
[[gnu::noinline]] u32v scale_sums(const float* acc, int64_t width, float descale, float factor, float* row) {
  constexpr int kChunkRegs = Ops::kChunk / kLanes;
  u32v zero = {};
  for (int64_t d = 0; d < width; d += Ops::kChunk) {
    f32v chunk[kChunkRegs];
    if constexpr (Ops::kFewRows) {
      Ops::load_sums(acc, d, width, chunk);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kChunkRegs; ++i) chunk[i] = load<DType::kFloat32>(acc + d + i * kLanes);
      Ops::in_order(chunk);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kChunkRegs; ++i) {
      zero |= bit_cast<u32v>(chunk[i] * 0.f);
      store<DType::kFloat32>(row + d + i * kLanes, chunk[i] * descale * factor);
    }
  }
  if (factor == 0.f) memset(row, 0, width * sizeof(float));
  return zero;
}

template <class Ops>
void attend_as(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  const Request request = request_of(p, item.batch);
  const Scratch<Ops> s(p, item, memory);
  const int64_t rows = item.rows();

  // Which keys
  RowAt at(p, item);
  for (int64_t r = 0; r < rows; ++r, at.next()) {
    s.visible[r] = keys_of_token(p, request, at.token);
    s.q_pos[r] = request.kv_len - request.q_len + at.token;
  }
  for (int64_t h = 0; h < item.heads(); ++h)
    s.scales[h] = head_scale(p, item.batch, item.kv_head_begin + h, Ops::kUnit);

  // The first tile. Nothing has prefetched its keys, so it is short; its address translations are requested while the
  // query is loaded. With many rows, which multiply for long, and with long tiles (Walk) it is as long as the others.
  // Only the order in which memory is read depends on `cached` and `fetched`, not the result: longer tiles of cached
  // keys would be faster, but a clock tells whether keys are cached, and the length of tiles decides bits.
  const bool packed = rows >= Ops::kMinPackedRows, ahead = item.reads_ahead(p, Ops::kFewRows);
  const bool cached = item.maybe_cached && !packed && !ahead && keys.begin < keys.end && lie_in_caches(p, item, keys);
  const bool fetched = packed || !(ahead || cached);
  TileRows tiles[2];
  TileRows *tile = &tiles[0], *next = &tiles[1];
  const int64_t first = packed || has_long_tiles<Ops>(p, item) ? s.tile : pd_min(item.small ? 32 : kLanes, s.tile);
  tile->locate(p.cache, item.batch, keys.begin, keys.end, first);
  if (fetched) list_runs<Ops>(p, item, *tile, s.runs);

  // Load the query. Where a request has no keys its position may be anything.
  const bool rotated = p.rotary.cos && request.kv_len > 0;
  load_queries<Ops>(p, item, request, p.q, p.q_stride_batch, p.q_stride_token, p.q_stride_head, p.head_dim, rotated,
                    s.depth, s.head_rows, s.row, s.q);
  if (p.qv)
    load_queries<Ops>(p, item, request, p.qv, p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head, p.head_dim_v,
                      false, s.width, s.head_rows, s.row, s.qv);
  if constexpr (Ops::kFewRows) Ops::lay_out_queries(s, item);
  for (int64_t i = 0; i < item.heads() * s.head_rows; ++i) s.m[i] = -INFINITY;
  memset(s.l, 0, item.heads() * s.head_rows * kLanes * sizeof(float));
  memset(s.acc, 0, item.heads() * s.head_rows * s.width * sizeof(float));

  // For each tile and kv_head: scores, softmax, values; meanwhile fetch the next tile
  Prefetcher fetch = {};
  fetch.cached = cached;
  fetch.near = cached && (rows <= item.walk.near_rows ||
                          (keys.end - keys.begin) * key_bytes(p, item.heads()) <= item.walk.near_bytes);
  while (tile->n > 0) {
    next->locate(p.cache, item.batch, tile->begin + tile->n, keys.end, pd_min(2 * tile->n, s.tile));
    if (fetched) start_fetch<Ops>(p, item, s, *tile, *next, fetch);
    if constexpr (Ops::kTiles) {
      Ops::attend_tiles(p, item, s, *tile, fetch);
    } else if (packed) {
      for (int64_t h = 0; h < item.heads(); ++h) attend_tile_packed<Ops>(p, item, s, *tile, h, fetch);
    } else {
      attend_tile_dot<Ops>(p, item, s, *tile, *next, fetch);
    }
    TileRows* done = tile;
    tile = next;
    next = done;
  }

  // Write the partial, or finish
  u32v zero = {};
  for (int64_t h = 0; h < item.heads(); ++h) {
    RowAt row_at(p, item);
    for (int64_t r = 0; r < rows; ++r, row_at.next()) {
      const int64_t i = h * s.head_rows + r, head = (item.kv_head_begin + h) * p.group + row_at.head;
      const float l = add_lanes(load<DType::kFloat32>(s.l + i * kLanes));
      const float factor = partial ? 1.f : finish_row(p, request, item.batch, row_at.token, head, s.m[i], l);
      zero |= scale_sums<Ops>(s.acc + i * s.width, s.width, s.scales[h].v_descale, factor, s.row);
      if (partial) {
        float* out = partial + (h * rows + r) * partial_floats(p.head_dim_v);
        memcpy(out, s.row, p.head_dim_v * sizeof(float));
        out[p.head_dim_v] = s.m[i];
        out[p.head_dim_v + 1] = l;
      } else {
        write_result(p, request, item.batch, row_at.token, head, s.row);
      }
    }
  }
  if (add_lanes(bit_cast<f32v>(zero)) != 0.f) attend_again(p, item, s, keys, memory + s.bytes, partial);
}

inline void merge_partials(const Problem& p, const Item& item, int64_t count, float* partials, int64_t stride,
                           bool to_partial) {
  const Request request = request_of(p, item.batch);
  const int64_t width = p.head_dim_v;
  float acc[kMaxHeadDimV];
  for (int64_t h = 0; h < item.heads(); ++h) {
    RowAt at(p, item);
    for (int64_t r = 0; r < item.rows(); ++r, at.next()) {
      float* first = partials + (h * item.rows() + r) * partial_floats(width);
      const auto state_of = [&](int64_t i) {
        const float* part = first + i * stride;
        return State{part[width], part[width + 1]};
      };
      const State sum = pd_merge(count, state_of);
      memset(acc, 0, width * sizeof(float));
      for (int64_t i = 0; i < count; ++i) {
        const float* part = first + i * stride;
        const float factor = pd_rescale(state_of(i).m, sum.m);
        for (int64_t d = 0; d < width; ++d) acc[d] += part[d] * factor;
      }
      if (to_partial) {
        memcpy(first, acc, width * sizeof(float));
        first[width] = sum.m;
        first[width + 1] = sum.l;
        continue;
      }
      const int64_t head = (item.kv_head_begin + h) * p.group + at.head;
      const float factor = finish_row(p, request, item.batch, at.token, head, sum.m, sum.l);
      for (int64_t d = 0; d < width; ++d) acc[d] = factor == 0.f ? 0.f : acc[d] * factor;
      write_result(p, request, item.batch, at.token, head, acc);
    }
  }
}

// 8-bit numbers are bfloat16 numbers too.
inline bool multiplies_bfloat16(const Problem& p) {
  return p.q_dtype == DType::kBFloat16 || dtype_bytes(p.q_dtype) == 1;
}

inline Products products_f32(const Problem& p) {
  const int64_t min_packed_rows = with_ops_f32(p, []<class Ops>() { return int64_t(Ops::kMinPackedRows); });
  return {"packed_f32", "in_place_f32", min_packed_rows, OpsDefaults::kScoreRows, kItemRows};
}

inline int64_t scratch_bytes_f32(const Problem& p, const Item& item) {
  return with_ops_f32(p, [&]<class Ops>() { return scratch_bytes_as<Ops>(p, item); });
}

inline void attend_f32(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  with_ops_f32(p, [&]<class Ops>() { attend_as<Ops>(p, item, keys, memory, partial); });
}

}  // namespace
}  // namespace paged_attn
