// How the work of a call is cut: what the attention kernels read beside the problem. balance.cuh tells what it means.
#pragma once

#include "fast_divisor.h"

namespace paged_attn {

constexpr int kMaxBalancedItems = 1024;
constexpr int kLine = 128;  // bytes
constexpr int kRunKeys = 16;
constexpr int kTeam = 16;  // lanes that hold consecutive quads of a row

// A word of a partial on its way from block to block, see exchange.cuh.
struct alignas(16) TaggedWord {
  uint64_t payload, tag;
};

// Words of a row of a partial: the first two sums of each quad, the last two, and (m, l) for every team.
PD_METHOD int row_words(int quads) { return 2 * quads + (quads + kTeam - 1) / kTeam; }

// What every kernel needs to know of the plan.
struct CommonPlan {
  // Sizes of the problem that something is divided by
  FastDivisor page_size, group, kv_heads;

  // The line, or several of them, see balance.cuh
  FastDivisor blocks;              // of the grid
  FastDivisor lines, line_blocks;  // side by side, and blocks of each
  int32_t items;
  int32_t min_units;  // a shorter stretch is not worth a block
  int32_t pair_cost;  // units of time that a pair takes besides its own

  // Even dealing: blocks of every pair, divisor 0: there are not enough. Or the whole pairs of every block, 0: none,
  // and how many are left for the line.
  FastDivisor blocks_each;
  int32_t whole_pairs, line_pairs;

  // The cache, strides in pieces of 16 bytes
  uint32_t k_page_pieces, k_slot_pieces, k_head_pieces;
  uint32_t v_page_pieces, v_slot_pieces, v_head_pieces;
  // Where a key lies, and its value.
  PD_METHOD uint32_t key_place(int page, int slot, int head) const {
    return page * k_page_pieces + slot * k_slot_pieces + head * k_head_pieces;
  }
  PD_METHOD uint32_t value_place(int page, int slot, int head) const {
    return page * v_page_pieces + slot * v_slot_pieces + head * v_head_pieces;
  }

  int32_t max_keys;                 // that the cache can hold for one request
  int32_t max_pages, table_stride;  // of the block table
  int32_t q_lines, table_lines;     // to prefetch of q and of the block table
  bool whole_runs;                  // every page holds whole runs of kRunKeys

  // Items past `items`, for rows that the tiles of their request do not hold: each block has a look at one per round,
  // and at none where no request is that long.
  int32_t surplus_rounds;

  // `decode`: the keys of KV head h are those of h >> key_head_shift, see in_halves(). Basic calls: keys that an append
  // has added; keys that the first token does not see
  int32_t key_head_shift, new_keys, hidden_keys;

  // [blocks, rows_per_tile, row_words(partial_quads)]; nothing of it is set before the launch. Nowhere when nothing is
  // ever cut.
  TaggedWord* partials;
};

struct Plan : CommonPlan {
  // Rows. Items below direct_items are row_tiles for every request, whatever its length. The others are packed: as many
  // as all tokens together can fill, see packed_begin(). Those past `items` are the surplus.
  FastDivisor row_tiles, chunk;
  int32_t direct_items;
  int32_t row_shift, rows_per_tile;  // log2 of the rows of an item; the rows

  // Keys
  int32_t tile_shift;  // log2 of the keys of a tile
  bool balanced;       // the line or even dealing; else fixed cuts
  FastDivisor max_splits;
  int32_t num_splits;      // fixed: splits asked for; 0: one for every split_tiles, at most max_splits
  int32_t split_tiles;     // of keys
  int32_t request_blocks;  // fixed, packed: for the cuts of a request and kv_head; 0: no packed request is cut

  int32_t partial_quads;  // of head_dim_v, rounded up
  bool basic;             // an item is a request and its length says which keys it sees; see decode/basic_call.cuh
};

// What every route plans alike; keys are in tiles of 2^tile_shift.
void plan_tables(const Problem& p, int tile_shift, Plan& plan);

// Strides of the cache in pieces of 16 bytes, for kernels that copy those.
void plan_pieces(const Problem& p, Plan& plan);

// Rows in tiles of 2^row_shift: `row_tiles` of every request.
void plan_direct_rows(const Problem& p, int row_shift, int64_t row_tiles, Plan& plan);

// Or as many as all tokens together can fill, whatever max_q_len says. For cu_seqlens_q.
void plan_packed_rows(const Problem& p, int row_shift, Plan& plan);

// The one or the other: with cu_seqlens_q packed, else as many as max_q_len needs.
void plan_all_rows(const Problem& p, int row_shift, Plan& plan);

// How many packed ones are: every request ends with a tile that is not full.
int64_t packed_tiles(const Problem& p, int row_shift);

// How many tiles all requests together may be given without most of them being empty.
int64_t most_given_tiles(const Problem& p, int64_t processors, int row_shift);

// Keys that so many neighbouring rows see at most, as far as the host can tell.
int64_t most_keys(const Problem& p, int64_t rows);

// Tokens of the longest request as the caller says, which with cu_seqlens_q is a hint; and as far as the host can tell.
int64_t said_query(const Problem& p);
int64_t longest_query(const Problem& p);

// Whether nothing may be planned by the lengths of packed requests: what the host knows of them is said of the longest
// one or of all, and a result must not depend on the other requests.
bool hides_lengths(const Problem& p);

constexpr int64_t kFewRows = 16;  // of a request and kv_head: what a tile of the decode kernel holds

// Whether no request has more than `most` rows, as far as the host can tell. Never with hides_lengths().
bool has_few_rows(const Problem& p, int64_t most = kFewRows);

// Cuts that do not depend on the batch: num_splits of them, or one for every `split_keys` keys, `limit` at most, and
// fewer for requests of many rows. After the rows.
void plan_fixed_splits(const Problem& p, int split_keys, int64_t limit, Plan& plan);

// Whether cuts may follow from the lengths that are found, and their units can be counted.
bool may_balance(const Problem& p, int64_t items, int tile_shift, int pair_cost);

// Cuts that balance `blocks` blocks over the lengths that they find; the rows are planned. What a pair costs besides
// its units, and how short a stretch is not worth a block.
void plan_balanced_cuts(const Problem& p, int64_t blocks, int pair_cost, int min_units, Plan& plan);

// Lines of some kv_heads each, side by side, as far as they divide the blocks. After plan_balanced_cuts().
void plan_lines(const Problem& p, int64_t blocks, Plan& plan);

// Where an item is a request and its length says which keys it sees.
void plan_basic(const Problem& p, Plan& plan);

// "" or why the kernels that copy pieces of 16 bytes cannot read or write the tensors of this call.
const char* pieces_why_not(const Problem& p);

// Bytes of the workspace: a partial for every block.
int64_t partial_bytes(const Plan& plan, int64_t blocks);

}  // namespace paged_attn
