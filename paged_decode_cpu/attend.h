// The attention loop, for every instruction set. For each tile of keys: score, update the softmax,
// add the values. Features live in spec/ranges.h (which keys), spec/score.h (one score) and
// spec/state.h (merge, sink, lse); this loop names none of them.
//
// All kv_heads of an item share one walk over the pages, so a page is read once and whole, and the
// next tile is fetched while this one is worked on: a walk per head would read 256-byte pieces.
#pragma once

#include <time.h>

#include "kernel.h"
#include "ops_f32.h"
#include "rotary.h"
#include "rows.h"
#include "spec/request.h"
#include "spec/score.h"
#include "spec/state.h"
#include "tile.h"

namespace paged_attn {
namespace {

constexpr int64_t kBlockRows = 240;  // of one item on packed keys

constexpr int64_t kMemoryPage = 4096;  // the smallest piece of memory with a translation of its own

#ifndef PD_L2_KIB
#define PD_L2_KIB 1024
#endif
constexpr int64_t kL2Bytes = int64_t(PD_L2_KIB) << 10;  // of the smallest second cache that such processors have

#ifndef PD_ASKED_AGAIN_ROWS
#define PD_ASKED_AGAIN_ROWS 1
#endif
constexpr int64_t kAskedAgainRows = PD_ASKED_AGAIN_ROWS;  // of a kv_head: for fewer, asking for each line twice costs
                                                          // more than it gains

// Probabilities are relative to a score that may lie this much (in log2) below the largest one: a row changes it once
// or twice then, and not at every new maximum.
constexpr float kMaxLogProbability = 8.f;

// How far below the top score, in log2, a row begins. float16 has its full precision from 2^-14 on and ends at 2^16: a
// probability begins at 2^7, may grow to 2^15, and down to 2^-21 of the first one it has all its bits.
template <class Ops>
constexpr float kBaseBelow = Ops::kElemType == DType::kFloat16 ? PD_HALF_BELOW : 0.f;

// From which size on float32 rounds what a row is relative to by more than a probability may be wrong, so that its
// scores must be rounded alike: by more than 1, or, where probabilities are rounded to 16 bits, by more than 2^-11.
// Rounded alike, the score that a row began with gets a power of two, which 16 bits hold.
template <class Ops>
constexpr float kFarScore = Ops::kElemType == DType::kFloat32 ? 1 << 24 : 1 << 13;

// What the softmax of kLanes scores counts as in the pace of the fetch, in steps of the products.
constexpr int64_t kSoftmaxSteps = 2;

// Keys whose values all kv_heads of one row each add before the next keys: those values lie side by side. With more
// rows the sums, which each kv_head loads and stores, would cost more than that gains.
constexpr int64_t kSweepKeys = 8;

// Where it gains so much that few rows do it too, if keys come from memory: bytes of the values that a kv_head adds
// before the next one does. 0: they do not.
#ifndef PD_SWEEP_BYTES
#define PD_SWEEP_BYTES 0
#endif
constexpr int64_t kSweepBytes = PD_SWEEP_BYTES;

inline int64_t round_up(int64_t n, int64_t step) { return pd_ceil_div(n, step) * step; }

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

inline int64_t nanoseconds() {
#ifdef __APPLE__
  return clock_gettime_nsec_np(CLOCK_UPTIME_RAW);  // CLOCK_MONOTONIC counts microseconds there
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
#endif
}

// Whether keys lie in the processor's caches, told by how long a few lines take: 90 to 200 ns from there, 300 to 1200
// from memory.
inline bool lie_in_caches(const Problem& p, const Item& item, KvRange keys) {
  constexpr int kLines = 8, kLongest = 250;  // ns
  const Cache& c = p.cache;
  const int64_t start = nanoseconds();
  for (int i = 0; i < kLines; ++i) {
    const Slot s = slot_of_key(c, item.batch, keys.begin + (keys.end - keys.begin) * i / kLines);
    const int64_t offset = s.page * c.k_stride_page + s.slot * c.k_stride_slot + item.kv_head_begin * c.k_stride_head;
    static_cast<void>(static_cast<const volatile char*>(c.k)[offset * dtype_bytes(c.dtype)]);
  }
  return nanoseconds() - start < kLongest;
}

template <class Ops>
bool has_long_tiles(const Problem& p, const Item& item) {
  return item.walk.long_tiles && item.reads_ahead(p, Ops::kFewRows);
}

// Two tiles of all heads, the current one and the next, take a quarter of L2. With more to multiply than to read, and
// where less than 32 keys would come out (64 in a small call), they take half: every row of every tile costs some
// overhead. (The cache and the item alone tell: whoever sizes the scratch memory, with other Ops, must find the same.)
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
  int64_t depth, width;  // head_dim and head_dim_v, filled to whole chunks
  int64_t head_rows;     // rows of one kv_head, filled to what multiplies together
  int64_t tile;
  Elem *q, *qv;             // [heads, rows, depth], [heads, rows, width]
  float *acc, *m, *l;       // [heads, rows, width], [heads, rows], [heads, rows, kLanes] (its sum counts)
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

// The bytes of a tile in runs, keys first. Where the heads of a slot lie side by side whole slots are
// taken in the order of memory, else the rows of one head after the other. A line of every page of
// memory is asked for at once: their translations come together, and no later fetch waits for one.
template <class Ops>
int64_t list_runs(const Problem& p, const Item& item, const TileRows& tile, Run* runs) {
  const Cache& c = p.cache;
  Run* run = runs;
  const auto list = [&](const char* const* rows, int64_t head_stride, int64_t width) {
    const bool together = head_stride == width;
    const int64_t row_bytes = (together ? item.heads() : 1) * width * Ops::kBytes;
    for (int64_t h = 0; h < (together ? 1 : item.heads()); ++h) {
      const int64_t offset = (item.kv_head_begin + h) * head_stride * Ops::kBytes;
      for (int64_t j = 0; j < tile.n; ++run) {
        run->begin = run->end = rows[j] + offset;
        do run->end += row_bytes;
        while (++j < tile.n && rows[j] + offset == run->end);
        for (const char* at = run->begin; at < run->end; at += kMemoryPage) fetch_line(at);
      }
    }
  };
  list(tile.k, c.k_stride_head, p.head_dim);
  list(tile.v, c.v_stride_head, p.head_dim_v);
  return run - runs;
}

// Starts to fetch the next tile, at the pace at which that is done when this tile is.
template <class Ops>
void start_fetch(const Problem& p, const Item& item, const Scratch<Ops>& s, const TileRows& tile, const TileRows& next,
                 Prefetcher& fetch) {
  const int64_t heads = item.heads(), rows = item.rows();
  const bool packed = rows >= Ops::kMinPackedRows;
  int64_t steps;
  if (packed) {
    const int64_t panels = pd_ceil_div(tile.n, kPanel) * s.depth + pd_ceil_div(s.width, kPanel) * tile.n;
    steps = heads * pd_ceil_div(rows, Ops::kStepRows) * panels / Ops::kDepth;
  } else {
    steps = heads * (pd_ceil_div(rows, Ops::kMaxDotRows) * tile.n * (s.depth + s.width) / Ops::kChunk +
                     rows * pd_ceil_div(tile.n, kLanes) * kSoftmaxSteps);
  }
  const int64_t bytes = next.n * key_bytes(p, heads);
  const int64_t pieces = pd_ceil_div(bytes, packed ? Prefetcher::kPiece : Prefetcher::kFewPiece);
  fetch.start(s.runs, list_runs<Ops>(p, item, next, s.runs), static_cast<uint32_t>(pd_ceil_div(pieces << 16, steps)));
}

// The token and the head of its group that a row of an item is.
struct RowAt {
  int64_t group, token, head;

  RowAt(const Problem& p, const Item& item)
      : group(p.group), token(item.row_begin / p.group), head(item.row_begin % p.group) {}
  void next() {
    if (++head < group) return;
    head = 0;
    ++token;
  }
};

// Reads the query rows of one kind (q, or qv), rotated where asked, into out[heads, rows, stride]. `row` has
// room for one.
template <class Ops>
void load_queries(const Problem& p, const Item& item, const Request& request, const void* source, int64_t stride_batch,
                  int64_t stride_token, int64_t stride_head, int64_t n, bool rotated, int64_t stride, int64_t head_rows,
                  float* row, typename Ops::Elem* out) {
  using Elem = typename Ops::Elem;
  constexpr bool kFloats = Ops::kElemType == DType::kFloat32;
  const int64_t row_elems = Ops::kLeftPieces * stride;
  const bool as_it_is = p.q_dtype == Ops::kElemType && n == stride && !rotated && !Ops::kDealt;
  for (int64_t h = item.kv_head_begin; h < item.kv_head_end; ++h, out += (head_rows - item.rows()) * row_elems) {
    RowAt at(p, item);
    for (int64_t r = 0; r < item.rows(); ++r, at.next(), out += row_elems) {
      const int64_t head = h * p.group + at.head;
      const int64_t offset =
          item.batch * stride_batch + (request.q_begin + at.token) * stride_token + head * stride_head;
      const char* q = static_cast<const char*>(source) + offset * dtype_bytes(p.q_dtype);
      if (as_it_is) {
        for (int64_t i = 0; i < n; i += Ops::kChunk) memcpy(out + i, q + i * sizeof(Elem), Ops::kChunk * sizeof(Elem));
        continue;
      }
      if constexpr (kFloats) row = out;
      read_row(p.q_dtype, q, n, row);
      for (int64_t i = n; i < stride; ++i) row[i] = 0.f;
      if (rotated) rotate(p.rotary, p.q_dtype, rotary_query_position(p, request, item.batch, at.token), row);
      if constexpr (Ops::kDealt)
        for (int64_t i = 0; i < stride; i += Ops::kChunk) Ops::deal(row + i);
      for (int64_t i = 0; i < stride && !kFloats; i += kLanes) {
        const f32v x = load<DType::kFloat32>(row + i);
        if constexpr (Ops::kLeftPieces > 1) {
          Ops::store_query(out + i, stride, x);
        } else {
          Ops::store_elems(out + i, x);
        }
      }
    }
  }
}

// The sums of a row are relative to *m from now on to new_m.
inline void change_base(float new_m, float* m, f32v* sum, float* acc, int64_t width) {
  const float old_m = *m;
  *m = new_m;
  if (old_m == -INFINITY) return;  // they are 0
  const float rescale = pd_rescale(old_m, new_m);
  *sum *= rescale;
  for (int64_t d = 0; d < width; d += kLanes) store<DType::kFloat32>(acc + d, load<DType::kFloat32>(acc + d) * rescale);
}

// Far out, a base is rounded by many powers of two, and so must be the scores that it is taken from: the product that
// goes straight into a subtraction, in one instruction, is not. So they are multiplied here, and their factor is 1
// then.
[[gnu::noinline]] inline void round_scores(float* scores, int64_t n, float* factor) {
  for (int64_t j = 0; j < n; j += kLanes)
    store<DType::kFloat32>(scores + j, load<DType::kFloat32>(scores + j) * *factor);
  *factor = 1.f;
}

// The base of a row that has n more scores, of which `top` has the largest: it moves when that lies more than
// kMaxLogProbability above where it would be with a new base, and *sum and acc move along.
template <class Ops>
[[gnu::always_inline]] inline float base_of(f32v top, float* m, f32v* sum, float* acc, int64_t width, float* scores,
                                            int64_t n, float* factor) {
  if (any_above(top, splat(*m + (kMaxLogProbability + kBaseBelow<Ops>))))
    change_base(max_lanes(top) - kBaseBelow<Ops>, m, sum, acc, width);
  const float base = *m == -INFINITY ? 0.f : *m;
  if (fabsf(base) > kFarScore<Ops>) round_scores(scores, n, factor);
  return base;
}

// What turns the products of one row into scores.
struct ScoreOf {
  float scale, softcap, slope;
  float q_pos;  // counted from the start of the tile: far out, float32 no longer holds every position
};

// Turns the products of one row with n keys into probabilities relative to *m. Keys outside
// [visible.begin, visible.end), counted from the start of the tile, get probability 0.
template <class Ops>
inline void softmax_row(float* scores, int64_t n, KvRange visible, const ScoreOf& score, typename Ops::Elem* p,
                        float* m, float* l, float* acc, int64_t width) {
  static const i32v kLaneNumbers = lane_numbers(LaneIndices{});
  const bool whole = visible.begin <= 0 && visible.end == n && n % kLanes == 0;
  // Without softcap and slope the scale and the change to log2 units are one factor, taken late.
  const bool plain = score.softcap == 0.f && score.slope == 0.f && whole && score.scale >= 0.f;
  float factor = plain ? score.scale * PD_LOG2E : 1.f;
  f32v top = splat(-INFINITY);
  if (plain) {
    for (int64_t j = 0; j < n; j += kLanes) top = max(top, load<DType::kFloat32>(scores + j));
    top *= factor;
  } else {
    for (int64_t j = 0; j < n; j += kLanes) {
      i32v key = kLaneNumbers + static_cast<int32_t>(j);
      f32v distance = score.q_pos - __builtin_convertvector(key, f32v);
      distance = distance < splat(0.f) ? -distance : distance;
      f32v x =
          pd_score(load<DType::kFloat32>(scores + j), score.scale, score.softcap, score.slope, distance) * PD_LOG2E;
      x = key < i32v{} + static_cast<int32_t>(visible.begin) ? splat(-INFINITY) : x;
      x = key >= i32v{} + static_cast<int32_t>(visible.end) ? splat(-INFINITY) : x;
      store<DType::kFloat32>(scores + j, x);
      top = max(top, x);
    }
  }
  f32v sum = load<DType::kFloat32>(l);
  const float base = base_of<Ops>(top, m, &sum, acc, width, scores, n, &factor);
  for (int64_t j = 0; j < n; j += kLanes) {
    f32v x = exp2(load<DType::kFloat32>(scores + j) * factor - base);
    sum += x;
    Ops::store_elems(p + j, x);
  }
  for (int64_t j = round_up(n, kLanes); j < round_up(n, Ops::kValueKeys); j += kLanes) Ops::store_elems(p + j, f32v{});
  store<DType::kFloat32>(l, sum);
}

// Ends one row: adds the sink, writes the lse, and returns what the sums of its values are to be multiplied with (0:
// they count for nothing, whatever they are). write_result follows.
inline float finish_row(const Problem& p, const Request& request, int64_t b, int64_t token, int64_t head, float m,
                        float l) {
  float factor = 1.f;
  if (p.sinks) pd_add_sink(load_scalar(p.sinks_dtype, p.sinks, head), &m, &l, &factor);
  if (p.lse) p.lse[b * p.lse_stride_batch + head * p.lse_stride_head + request.q_begin + token] = pd_lse(m, l);
  return l == 0.f ? 0.f : factor * pd_normalizer(l);
}

inline void write_result(const Problem& p, const Request& request, int64_t b, int64_t token, int64_t head,
                         const float* row) {
  const int64_t offset =
      b * p.out_stride_batch + (request.q_begin + token) * p.out_stride_token + head * p.out_stride_head;
  const DType dtype = out_dtype(p.q_dtype);
  write_row(dtype, row, p.head_dim_v, static_cast<char*>(p.out) + offset * dtype_bytes(dtype));
}

// The products of one tile, few rows: 8, 4, 2 or 1 at a time, on the cache rows in place.
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

// The products of one tile, many rows: on keys and values that pack_tile laid out.
template <class Ops>
void pack_tile(const Problem& p, const Scratch<Ops>& s, const TileRows& tile, int64_t k_offset, int64_t v_offset) {
  pack_keys<Ops>(tile.k, k_offset, tile.n, p.head_dim, s.depth / Ops::kDepth, s.keys);
  pack_values<Ops>(tile.v, v_offset, round_up(tile.n, Ops::kValueKeys), p.head_dim_v, s.tile / Ops::kDepth, s.values);
  if (p.qv) pack_keys<Ops>(tile.v, v_offset, tile.n, p.head_dim_v, s.width / Ops::kDepth, s.value_keys);
}

// `from` is a multiple of kPanel.
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

// `begin` is the key that positions are counted from.
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
  return rows == 1 ? kSweepKeys : n;
}

// All kv_heads against one tile, few rows each, in three sweeps: one head alone would wait for its own sums and
// exponentials at every step. What memory sees, from left to right:
//
//   scores    K of head 0, K of head 1, ... K of the last    (then V of head 0)
//   softmax   nothing
//   values    V of head 0, V of head 1, ... V of the last    (then K of head 0 of the next tile)
//             (one row per kv_head, on some processors a few: of a few keys, then of the next few)
//
// While one entry of this list is multiplied, the lines of the entry after it are asked for once more (then_read): they
// were fetched with the rest of their tile, but the processor drops some fetches.
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
        then_read(part, tile.v + j + sweep, v_offset(0));
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

// With what attend_again wants for the rows of a token.
template <class Ops>
int64_t scratch_bytes_as(const Problem& p, const Item& item) {
  const Item token = rows_of(item, 0, 0, pd_min(item.rows(), p.group));
  const int64_t again = with_ops_f32(p, [&]<class F32>() { return Scratch<F32>(p, token, nullptr).bytes; });
  return Scratch<Ops>(p, item, nullptr).bytes + again;
}

// Whether sums of values of row i are not finite, and may be wrong then. Where its sum l is NaN a score is, and all of
// the result: nothing to mend, unless scores are made of pieces.
template <class Ops>
bool is_unsure(const Scratch<Ops>& s, int64_t i) {
  const float l = add_lanes(load<DType::kFloat32>(s.l + i * kLanes));
  f32v zero = {};
  for (int64_t d = 0; d < s.width; d += kLanes) zero += load<DType::kFloat32>(s.acc + i * s.width + d) * 0.f;
  return add_lanes(zero) != 0.f && (l == l || Ops::kLeftPieces > 1);
}

// An infinite value times a probability of 0 is NaN. Such products are made with keys that only other rows see, and
// with what products of several keys are filled up with. And an infinity has no pieces (ops_pieces.h). So a token whose
// sums are not finite is done once more, with its own keys alone and in float32, which takes one key at a time.
template <class Ops>
[[gnu::noinline]] void attend_again(const Problem& p, const Item& item, const Scratch<Ops>& s, KvRange keys,
                                    char* memory, float* partial) {
  if (Ops::kValueKeys == 1 && end_of_token(p, item, 0) == item.rows()) return;  // that is how it was done
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

// row = the sums of values of one row, in the order of the elements, times both factors. Returns a NaN, as a float, if
// a sum is not finite ("or" does not wait as long as a sum would).
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

  // The first keys: nothing has fetched them, so they are few, but their translations come while the query is loaded.
  // Many rows multiply for so long that it does not matter, and where nothing is fetched ahead all tiles are alike.
  // Only the order in which memory is read depends on `cached` and `fetched`, not the result: longer tiles of cached
  // keys would be faster, but whether keys are cached is told by a clock, and the length of tiles decides bits.
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

  // For each tile and kv_head: score, update, add; meanwhile fetch the next tile
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
  return {"packed_f32", "in_place_f32", min_packed_rows, OpsDefaults::kScoreRows, kBlockRows};
}

inline int64_t scratch_bytes_f32(const Problem& p, const Item& item) {
  return with_ops_f32(p, [&]<class Ops>() { return scratch_bytes_as<Ops>(p, item); });
}

inline void attend_f32(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  with_ops_f32(p, [&]<class Ops>() { attend_as<Ops>(p, item, keys, memory, partial); });
}

}  // namespace
}  // namespace paged_attn
