// What host and shader agree on: the places of buffers, the numbers of function constants, the sizes and strides of a
// call. Compiled by both.
#pragma once

#ifndef __METAL_VERSION__
#include <stdint.h>
#endif

namespace paged_attn {

enum BufferIndex {
  kArgumentsBuffer,
  kQueryBuffer,
  kQvBuffer,
  kOutBuffer,
  kLseBuffer,
  kKeyCacheBuffer,
  kValueCacheBuffer,
  kBlockTableBuffer,
  kBatchIdxBuffer,
  kSeqlensBuffer,
  kLeftpadBuffer,
  kCuSeqlensQBuffer,
  kCuSeqlensKBuffer,
  kCuSeqlensNewBuffer,
  kQDescaleBuffer,
  kKDescaleBuffer,
  kVDescaleBuffer,
  kSlopesBuffer,
  kSinksBuffer,
  kPartialAccBuffer,   // of merge_parts: the parts
  kPartialSumsBuffer,  // and their lse
  kNewKeysBuffer,
  kNewValuesBuffer,
  kSlotMappingBuffer,
  kCosBuffer,
  kSinBuffer,
  kRotarySeqlensBuffer,
  kRotatedBuffer,
  kTableBuffer,
  kCopyBuffer,
  kNumBuffers
};

// Function constants. Each combination that occurs is compiled into a pipeline, so what is off costs nothing.
enum ConstantIndex {
  // bool: which tensors are given
  kHasBlockTable,
  kHasBatchIdx,
  kHasSeqlens,
  kHasLeftpad,
  kHasCuSeqlensQ,
  kHasCuSeqlensK,
  kHasNew,
  kHasCuSeqlensNew,
  kHasQDescale,
  kHasKDescale,
  kHasVDescale,
  kHasQv,
  kHasSlopes,
  kHasSinks,
  kHasLse,
  kHasSlotMapping,
  kHasRotary,
  kHasRotarySeqlens,
  // bool: how
  kHasSoftcap,
  kHasSplits,       // a request may be cut
  kHasPrefill,      // requests with more than kVectorRows rows are left to prefill
  kWritesTokens,    // append: there is a new token; else no cache is an argument
  kRotatesQueries,  // append: queries too
  kWide,            // the cache has offsets of more than 31 bits
  kAligned,         // rows of the caches (when writing: also of the new tokens) are whole vectors of 8 elements
  kInterleaved,
  // int
  kHeadDim,
  kHeadDimV,
  kPageSize,   // with a block table
  kQueryType,  // of q as the kernel reads it: after a rotation that of out
  kQvType,
  kOutType,
  kCacheType,
  kNewType,
  kSinksType,
  kNumConstants,
  kFirstInt = kHeadDim
};

enum Sizes {
  kSimdWidth = 32,
  kMaxSimdgroups = 8,     // of a threadgroup of attend
  kVector = 8,            // elements that a lane handles at once
  kSplitKeys = 512,       // a longer request is cut, as far as the plan allows
  kMinSplitKeys = 128,    // and a shorter one down to this, while there are few threadgroups
  kBusySplitKeys = 8192,  // where there are items enough, only what is longer than this
  kMaxSplitRows = 64,     // of a request and kv_head: with more there is enough to do without cuts
  kVectorRows = 8,        // of an item of attend
};

// The numbers of DType in problem.h
enum Types { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

struct Strides {
  int64_t outer, middle, head;  // of (page, slot, head) in caches, of (batch, token, head) elsewhere
};

struct DescaleStrides {
  int64_t batch, head;
};

// Of merge_parts; strides are those of (part, token, head).
struct Parts {
  Strides values, lse;
  int64_t merged_lse_stride_token;
  int64_t rows;  // tokens times heads
  int32_t count, heads;
};

struct Arguments {
  Strides q, qv, out, k_cache, v_cache, new_k, new_v;
  int64_t lse_stride_batch, lse_stride_head;
  int64_t block_table_stride;
  DescaleStrides q_descale, k_descale, v_descale;
  int64_t slopes_stride_batch;
  int64_t cos_stride, sin_stride;
  int64_t cache_slots;  // of a page; of all keys when they are packed
  int32_t batch, q_heads, kv_heads, group;
  int32_t q_len;  // of every request without cu_seqlens_q
  int32_t total_q;
  int32_t seqlen_k, capacity;  // keys of every request when no length is given; keys that a request can have
  int32_t num_pages, max_pages, table_rows;
  int32_t window_left, window_right, attention_chunk;
  int32_t num_splits, max_splits;  // the caller's, 0: by length; those that the grid and the workspace have room for
  int32_t split_keys;              // kSplitKeys or kBusySplitKeys
  int32_t wanted_splits;           // of an item, for enough threadgroups
  int32_t split_rows;              // a request with more rows is not cut
  int32_t packed_row_tiles;        // tiles of rows of all requests in attend's grid, 0: a row of the grid per request
  int32_t seqlen_new, total_new;
  int64_t total_words;  // of a table that the host fetches
  int32_t rotary_dim, rotary_len;
  int32_t moving_queries;  // queries are rotated at their own positions, else all at the first
  float scale, softcap;
  Parts parts;
};

}  // namespace paged_attn
