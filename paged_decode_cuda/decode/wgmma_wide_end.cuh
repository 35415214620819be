// The end of a segment of a wide item: the sums of the consumers become those of the block, partials of other blocks
// are added, and the rows or a partial of them are written. The sums stay in registers all the way, and what is said of
// a row is found by one thread for all of them. With many rows that takes less time than to go round by shared memory.
//
//     consumers            0    1       each gives the other one half of its sums
//                           \  /
//     a thread of each row              factors of all sums:  m, l  <---  (m, l) of partials
//                            |
//     consumers            0    1       scale and add         sums  <---  words of partials
//                          |    |
//     rows of the output, by way of shared memory;  or, if another block has the first keys, a partial for that
//
// A word has the sums of two neighbouring rows and a dimension. A partial is the words of every thread, one thread
// behind the other, then (m, l) of every row: tagged words, see exchange.cuh.
#pragma once

#include "../exchange.cuh"
#include "wgmma_rows.cuh"

namespace paged_attn {

template <typename Shape>
struct WideWgmmaEnd {
  using Tables = WgmmaTables<Shape::kRows>;
  static constexpr int kRowTiles = Shape::kRows / 8, kConsumers = Shape::kConsumers;
  static constexpr int kWords = Shape::kColumns * kRowTiles * 2 / kConsumers;  // that a thread keeps
  // Where there is one column of dimensions, a consumer keeps 8 of every 16; else it keeps half of the columns.
  static constexpr bool kKeepsEights = Shape::kColumns < kConsumers;
  static constexpr int kAtOnce = 8 / kWords;  // partials whose words a thread holds
  // A merge in one level has no more partials than these; in two levels a block of the first one adds kFan - 1.
  static constexpr int kMany = kWords == 8 ? 6 : 12, kFan = 5;
  static constexpr int kPieces = Shape::kPieces / kConsumers;  // of 16 bytes, of a row of the output

  char* const shared;

  // What is computed when a segment begins: nothing, as registers are scarce.
  struct Merge {};
  static PD_MEMBER Merge begin(const Item&, const Segment&, const Dealing&) { return {}; }

  PD_MEMBER Tables& tables() const { return *reinterpret_cast<Tables*>(shared + Shape::kTablesAt); }
  // What a consumer is given.
  PD_MEMBER float2* given(int consumer) const {
    return reinterpret_cast<float2*>(shared + Shape::kSumsAt + consumer * Shape::kSumBytes) + threadIdx.x % kWarpgroup;
  }

  // Row tile of a word, and the first of its rows.
  static PD_MEMBER int row_tile_of(int word) { return kKeepsEights ? word : word / 2 % kRowTiles; }
  static PD_MEMBER int row_of(int word) { return row_tile_of(word) * 8 + threadIdx.x % 4 * 2; }
  // A word that a consumer keeps.
  static PD_MEMBER float2 word_of(const WgmmaRows<Shape>& rows, int consumer, int word) {
    const int i = kKeepsEights ? 4 * word + 2 * consumer : 2 * (consumer * kWords + word);
    const float* const sums = rows.acc[i / WgmmaRows<Shape>::kSums] + i % WgmmaRows<Shape>::kSums;
    return make_float2(sums[0], sums[1]);
  }

  static PD_MEMBER Partials partials_of(const Item& item, const Segment& segment, const Dealing& dealing) {
    const int lines = dealing.lines, many = kMany * dealing.length;
    if (!segment.first && item.tiles <= many) return {0, lines, lines};
    const int behind = partials_behind(item, segment, dealing);
    if (item.tiles <= many) return {behind, lines, lines};
    if (segment.first) return {behind == 0 ? 0 : (behind - 1) / kFan + 1, kFan * lines, lines};
    const bool adds = (segment.tile - item.first_tile - 1) / dealing.length % kFan == 0;
    return {adds ? min(behind, kFan - 1) : 0, lines, lines};
  }
  static PD_MEMBER int block_of(const Partials& partials, int index) {
    return static_cast<int>(blockIdx.x) - partials.nearest - index * partials.spacing;
  }
  // The words of a partial that are this thread's; (m, l) of a row.
  static PD_MEMBER TaggedWord* words_of(const Plan& plan, int block) {
    return partial_row(plan, block, 0) + Shape::consumer() * kWords * kWarpgroup + threadIdx.x % kWarpgroup;
  }
  static PD_MEMBER TaggedWord* ml_word(const Plan& plan, int block, int row) {
    return partial_row(plan, block, 0) + kConsumers * kWords * kWarpgroup + row;
  }

  // Half of the words goes to the other consumer, the other half stays.
  PD_MEMBER void share_words(const WgmmaRows<Shape>& rows, float2 (&words)[kWords]) const {
    const int consumer = Shape::consumer();
    float2* const there = given(1 - consumer);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 first = word_of(rows, 0, i), second = word_of(rows, 1, i);
      there[i * kWarpgroup] = consumer == 0 ? second : first;
      words[i] = consumer == 0 ? first : second;
    }
  }

  // (m, l) of `count` partials from number `first` on, for all rows: a thread looks for one at a time.
  PD_MEMBER void find_partials(const Plan& plan, const Item& item, const Partials& partials, int first,
                               int count) const {
    const unsigned long long number = launch_number();
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Shape::kRows; i += Shape::kEndThreads) {
      const int j = i / Shape::kRows, row = i % Shape::kRows;
      if (row >= item.rows) continue;
      TaggedWord* const word = ml_word(plan, block_of(partials, first + j), row);
      unsigned long long payload, found;
      int looks = 0;
      do {
        if (++looks == PD_MOST_LOOKS) give_up<Shape::kCallsNothing>();
        load_word(word, payload, found);
      } while (found != number);
      store_word(word, 0.f, 0.f, 0);
      const float2 ml = unpack(payload);
      tables().others[j][row] = ml.x;
      tables().others_l[j][row] = ml.y;
    }
  }

  // (m, l) of a row, so far.
  struct RowTotal {
    float m = -INFINITY, l = 0.f;
    PD_MEMBER void add(float other_m, float other_l) {
      const float top = fmaxf(m, other_m), base = top == -INFINITY ? 0.f : top;
      l = l * fast_exp2(m - base) + other_l * fast_exp2(other_m - base);
      m = top;
    }
  };

  // By the thread of a row: factors of its sums and of those partials. After the last ones what is written of the row
  // itself. Rows that do not exist have factors of 0.
  PD_MEMBER void find_factors(const Problem& p, const Plan& plan, const Item& item, const Segment& segment,
                              const Partials& partials, int first, int count, RowTotal& total) const {
    Tables& t = tables();
    const int row = threadIdx.x;
    const bool exists = row < item.rows;
    const float before = total.m;
    if (first == 0) {
#pragma unroll
      for (int j = 0; j < kConsumers; ++j) {
        float l = 0.f;
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) l += t.l[j][w][row];
        total.add(t.base[j][row], l);
      }
    }
#pragma unroll 1
    for (int j = 0; j < count && exists; ++j) total.add(t.others[j][row], t.others_l[j][row]);
    const float base = total.m == -INFINITY ? 0.f : total.m;
    const auto factor_of = [&](float m) { return exists ? fast_exp2(m - base) : 0.f; };
#pragma unroll 1
    for (int j = 0; j < count; ++j) t.others[j][row] = factor_of(t.others[j][row]);
#pragma unroll
    for (int j = 0; j < kConsumers; ++j) t.own[j][row] = factor_of(first == 0 ? t.base[j][row] : before);
    if (!exists || first + count < partials.count) return;
    if (segment.first) {
      const RowTarget target = row_target(p, plan, item, segment.head, row);
      t.normalizer[row] = finish_row(p, target, item.b, segment.head, total.m, total.l, true);
      t.place[row] = target.out;
    } else {
      store_word(ml_word(plan, blockIdx.x, row), total.m, total.l, launch_number());
    }
  }

  // What a table says of the rows of this thread.
  static PD_MEMBER void look_up(const float (&table)[Shape::kRows], float2 (&values)[kRowTiles]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
      values[n] = *reinterpret_cast<const float2*>(&table[n * 8 + threadIdx.x % 4 * 2]);
  }

  static PD_MEMBER void scale(const float (&table)[Shape::kRows], float2 (&words)[kWords]) {
    float2 factors[kRowTiles];
    look_up(table, factors);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i].x *= factors[row_tile_of(i)].x;
      words[i].y *= factors[row_tile_of(i)].y;
    }
  }

  // Adds what the other consumer gave.
  PD_MEMBER void add_given(float2 (&words)[kWords]) const {
    float2 factors[kRowTiles];
    look_up(tables().own[1 - Shape::consumer()], factors);
    const float2* const own = given(Shape::consumer());
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 x = own[i * kWarpgroup], factor = factors[row_tile_of(i)];
      words[i].x += x.x * factor.x;
      words[i].y += x.y * factor.y;
    }
  }

  // Adds up to kAtOnce partials from number `first` on, of `count` that there are; `at`: the first one's place in the
  // table.
  PD_MEMBER void add_words(const Plan& plan, const Item& item, const Partials& partials, int first, int count, int at,
                           float2 (&words)[kWords]) const {
    const unsigned long long number = launch_number();
    const auto exists = [&](int j, int i) { return j < count && row_of(i) < item.rows; };
    const auto place = [&](int j, int i) { return words_of(plan, block_of(partials, first + j)) + i * kWarpgroup; };
    unsigned long long payload[kAtOnce][kWords], found[kAtOnce][kWords], stale;
    int looks = 0;
    do {
      if (++looks == PD_MOST_LOOKS) give_up<Shape::kCallsNothing>();
      // All loads before the first look at one.
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          payload[j][i] = 0;
          found[j][i] = number;
          if (exists(j, i)) load_word(place(j, i), payload[j][i], found[j][i]);
        }
      stale = 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kWords; ++i) stale |= found[j][i] ^ number;
    } while (__any_sync(~0u, stale != 0));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j >= count) break;
      float2 factors[kRowTiles];
      look_up(tables().others[at + j], factors);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float2 x = unpack(payload[j][i]), factor = factors[row_tile_of(i)];
        words[i].x += x.x * factor.x;
        words[i].y += x.y * factor.y;
        if (exists(j, i)) store_word(place(j, i), 0.f, 0.f, 0);
      }
    }
  }

  // Where a piece that this consumer keeps lies in shared memory until it is written: those of neighbouring rows in
  // other banks.
  static PD_MEMBER int place_of(int row, int piece) {
    const int swizzle = kPieces >= 8 ? row % 8 : row / 2 % 4;
    return (row * kPieces + (piece ^ swizzle)) * 16;
  }

  PD_MEMBER void write_rows(const Problem& p, const Item& item, const float2 (&words)[kWords]) const {
    constexpr int kMatrices = 4;  // of 8 dimensions and 8 rows, at a time
    const int consumer = Shape::consumer();
    const uint32_t rows = shared_address(shared + Shape::kStagedAt + consumer * (Shape::kStagedBytes / kConsumers));
    float2 normalizers[kRowTiles];
    look_up(tables().normalizer, normalizers);
#pragma unroll
    for (int i = 0; i < kWords; i += kMatrices) {
      uint32_t pairs[kMatrices];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const float2 by = normalizers[row_tile_of(i + m)];
        pairs[m] = pack_pair<Shape::kBf16>(words[i + m].x * by.x, words[i + m].y * by.y);
      }
      // A lane says where a row of a matrix shall be.
      const int word = i + threadIdx.x % kWarp / 8, row = row_tile_of(word) * 8 + threadIdx.x % 8;
      const int column = word / (2 * kRowTiles);
      const int piece = kKeepsEights ? Shape::part() : column * (kColumn / 8) + Shape::part() * 2 + word % 2;
      store_transposed(rows + place_of(row, piece), pairs);
    }
    WgmmaRows<Shape>::sync();
#pragma unroll
    for (int i = threadIdx.x % kWarpgroup; i < Shape::kRows * kPieces; i += kWarpgroup) {
      const int row = i / kPieces, own = i % kPieces;
      const int piece = kKeepsEights ? 2 * own + consumer : consumer * kPieces + own;
      if (row >= item.rows || piece * 8 >= p.head_dim_v) continue;
      uint4 values;
      load_piece(rows + place_of(row, own), values.x, values.y, values.z, values.w);
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + tables().place[row] + piece * 8) = values;
    }
  }

  static PD_MEMBER void write_words(const Plan& plan, const Item& item, const float2 (&words)[kWords]) {
    const unsigned long long number = launch_number();
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (row_of(i) < item.rows) {
        store_word(words_of(plan, blockIdx.x) + i * kWarpgroup, words[i].x, words[i].y, number);
      }
    }
  }

  PD_MEMBER void finish(const Problem& p, const Plan& plan, const Item& item, const Segment& segment,
                        const Dealing& dealing, const Merge&, WgmmaRows<Shape>& rows) const {
    const Partials partials = partials_of(item, segment, dealing);
    const int consumer = Shape::consumer();
    rows.publish(tables().base[consumer], tables().l[consumer][Shape::part()]);
    Shape::end_sync();
    float2 words[kWords];
    share_words(rows, words);
    RowTotal total;
    int done = 0;
#pragma unroll 1
    do {
      const int count = min(partials.count - done, Tables::kMostPartials);
      if (count > 0) {
        find_partials(plan, item, partials, done, count);
        Shape::end_sync();
      }
      if (threadIdx.x < Shape::kRows) find_factors(p, plan, item, segment, partials, done, count, total);
      Shape::end_sync();
      scale(tables().own[done == 0 ? Shape::consumer() : 0], words);
      if (done == 0) add_given(words);
#pragma unroll 1
      for (int at = 0; at < count; at += kAtOnce) {
        add_words(plan, item, partials, done + at, count - at, at, words);
      }
      done += count;
      if (done < partials.count) Shape::end_sync();  // the tables are free
    } while (done < partials.count);
    if (segment.first) {
      write_rows(p, item, words);
    } else {
      write_words(plan, item, words);
    }
    WgmmaRows<Shape>::sync();  // what was given has been read: weights may take its place
  }
};

}  // namespace paged_attn
