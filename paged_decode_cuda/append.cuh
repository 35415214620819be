// Writes new keys and values into the cache, and rotates keys and queries on the way.
//
// copy_kernel is for rows that need no arithmetic but the conversion to fp8: pieces of 16 bytes of the source.
// append_kernel does everything else, two elements to a thread, many blocks to a token; it puts rotated queries beside
// the originals, and attention reads those.
#pragma once

#include "ptx.cuh"
#include "rows.cuh"
#include "spec/rotary.h"
#include "spec/search.h"

namespace paged_attn {

constexpr int kAppendThreads = 256;
constexpr int kManyTokens = 8;  // of a block of copy_kernel, where there are many

struct NewToken {
  int b, t;
  bool exists;  // false past the last request
};

struct Place {
  int64_t page, slot;  // page -1: not written
};

// Where the tokens of a request begin, for find_request.
struct FirstToken {
  const int32_t* cu_seqlens;
  PD_METHOD int operator()(int b) const { return cu_seqlens[b]; }
};

// Token `index` of all new ones.
PD_DEVICE NewToken find_new_token(const Problem& p, const FastDivisor& seqlen_new, int64_t index) {
  NewToken token;
  const Optional<const int32_t>& cu = p.append.cu_seqlens_k_new;
  if (cu) {
    token.b = find_request(static_cast<int>(p.batch), static_cast<int>(index), FirstToken{cu});
    token.t = static_cast<int>(index - cu[token.b]);
    token.exists = index >= cu[0] && index < cu[token.b + 1] && index < p.append.total_new;
  } else {
    token.b = seqlen_new.divide(static_cast<int>(index));
    token.t = static_cast<int>(index) - token.b * static_cast<int>(seqlen_new.divisor);
    token.exists = index < p.append.total_new;
  }
  return token;
}

// Where it goes.
PD_DEVICE Place find_place(const Problem& p, const FastDivisor& page_size, const NewToken& token, int64_t index) {
  const Cache& cache = p.cache;
  const Place nowhere = {-1, 0};
  if (!token.exists) return nowhere;
  Place place;
  if (p.append.slot_mapping) {
    const int64_t slot = p.append.slot_mapping[index];
    if (slot < 0) return nowhere;
    place.page = slot <= INT32_MAX ? page_size.divide(static_cast<int>(slot)) : slot / cache.page_size;
    place.slot = slot - place.page * cache.page_size;
  } else {
    const int64_t position = static_cast<int64_t>(cached_length(p, token.b)) + token.t;
    if (position < 0 || position > INT32_MAX) return nowhere;
    const int64_t row = cache.cache_batch_idx ? cache.cache_batch_idx[token.b] : token.b;
    if (cache.block_table) {
      if (row < 0 || row >= cache.table_rows) return nowhere;
      const int entry = page_size.divide(static_cast<int>(position));
      if (entry >= cache.max_pages) return nowhere;
      place.page = cache.block_table[row * cache.block_table_stride + entry];
      place.slot = position - static_cast<int64_t>(entry) * cache.page_size;
    } else {
      place.page = row;
      place.slot = position;
    }
  }
  return place.page < 0 || place.page >= cache.num_pages || place.slot >= cache.page_size ? nowhere : place;
}

struct AppendPlan {
  FastDivisor page_size, seqlen_new;
  FastDivisor vectors_k, vectors_v;  // 16-byte pieces of a source row of one head
  FastDivisor width;                 // threads of a token in copy_kernel
  int32_t rows;                      // tokens that its threads move at once
  FastDivisor pairs_k, pairs_v;      // pairs of elements of a row in append_kernel
  FastDivisor token_blocks;          // blocks of a token
  int64_t total_new;
  bool early_successor;  // may begin before this kernel ends
  bool moving_queries;   // rotated at their own positions, else all at the first one
  void* rotated_q;       // [total_q, q_heads, head_dim]
};

// Element offset of new token `index` in append.k or append.v.
PD_DEVICE int64_t source_offset(const Append& append, const NewToken& token, int64_t index, int64_t stride_batch,
                                int64_t stride_token) {
  return append.cu_seqlens_k_new ? index * stride_token : token.b * stride_batch + token.t * stride_token;
}

// x / divisor, rounded once (Markstein). Without the branches that a division has for subnormal divisors, whose
// reciprocals may be infinite: those go up, and x with them.
PD_DEVICE float divide(float x, float divisor) {
  const float up = fabsf(divisor) < 0x1p-100f ? 0x1p64f : 1.f;
  x *= up;
  divisor *= up;
  const float reciprocal = __frcp_rn(divisor);
  const float quotient = x * reciprocal;
  const float remainder = __fmaf_rn(-quotient, divisor, x);
  // Neither for an infinity, nor for the sign of a zero, is there anything to correct.
  return isfinite(remainder) && x != 0.f ? __fmaf_rn(remainder, reciprocal, quotient) : quotient;
}

// Eight values of 16 bits as fp8, saturating.
PD_DEVICE uint2 narrow(const uint4& words, DType from, DType to, float scale) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  uint16_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 x;
    if (from == DType::kBFloat16) {
      x = make_float2(__uint_as_float(pairs[i] << 16), __uint_as_float(pairs[i] & 0xffff0000u));
    } else {
      x = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    }
    // One scale of 1 per cache is common.
    if (scale != 1.f) x = make_float2(divide(x.x, scale), divide(x.y, scale));
    codes[i] = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, to == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2);
  }
  return make_uint2(codes[0] | static_cast<uint32_t>(codes[1]) << 16, codes[2] | static_cast<uint32_t>(codes[3]) << 16);
}

// Byte offset of the row of a new token in append.k or append.v; -1: there is none.
PD_DEVICE int64_t find_source(const Problem& p, const NewToken& token, int64_t index, bool value) {
  const Append& a = p.append;
  const int64_t offset = value ? source_offset(a, token, index, a.v_stride_batch, a.v_stride_token)
                               : source_offset(a, token, index, a.k_stride_batch, a.k_stride_token);
  return token.exists ? offset * dtype_bytes(a.dtype) : -1;
}

// Byte offset of its row in cache.k or cache.v; -1: not written.
PD_DEVICE int64_t find_target(const Problem& p, const Place& place, bool value) {
  const Cache& c = p.cache;
  const int64_t offset = place.page * (value ? c.v_stride_page : c.k_stride_page) +
                         place.slot * (value ? c.v_stride_slot : c.k_stride_slot);
  return place.page >= 0 ? offset * dtype_bytes(c.dtype) : -1;
}

// From where to where a new token goes: byte offsets of k and v; -1: nowhere.
struct TokenPlaces {
  int request;
  int64_t source[2], target[2];
};

// Grid: groups of kTokens tokens; a thread moves the same piece of several. One thread finds the places of a token
// for all, or, where a block has a single token, each for itself, which takes no barrier.
template <int kTokens, bool kFp8>
__global__ void __launch_bounds__(kAppendThreads, 4)
    copy_kernel(const __grid_constant__ Problem p, const __grid_constant__ AppendPlan plan) {
  constexpr bool kAlone = kTokens == 1;
  constexpr int kBatch = kAlone ? 1 : 4;  // pieces in flight
  constexpr int kTargetBytes = kFp8 ? 8 : 16;
  __shared__ TokenPlaces places[kTokens];
  wait_for_predecessor();
  let_successor_start();
  const Append& append = p.append;
  const Cache& cache = p.cache;
  const int source_bytes = static_cast<int>(dtype_bytes(append.dtype));
  const int target_bytes = static_cast<int>(dtype_bytes(cache.dtype));

  const bool guide = kAlone || threadIdx.x < kTokens;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokens + (kAlone ? 0 : threadIdx.x);
  NewToken token = {};
  Place place = {};
  if (guide) token = find_new_token(p, plan.seqlen_new, index);
  if constexpr (!kAlone) {
    if (guide) {
      TokenPlaces& found = places[threadIdx.x];
      found.request = token.b;
      for (int i = 0; i < 2; ++i) found.source[i] = find_source(p, token, index, i);
    }
    __syncthreads();
  }

  // Tokens side by side where one has fewer pieces than there are threads.
  const int pieces_k = static_cast<int>(p.kv_heads * plan.vectors_k.divisor);
  const int pieces = pieces_k + static_cast<int>(p.kv_heads * plan.vectors_v.divisor);
  const int width = static_cast<int>(plan.width.divisor);
  const int row = plan.width.divide(threadIdx.x), column = threadIdx.x - row * width;
  for (int first = 0; first < pieces; first += width) {
    const int i = first + column;
    const bool moves = row < plan.rows && i < pieces;
    const bool value = i >= pieces_k;
    const FastDivisor& vectors = value ? plan.vectors_v : plan.vectors_k;
    const int head = vectors.divide(value ? i - pieces_k : i);
    const int piece = (value ? i - pieces_k : i) - head * static_cast<int>(vectors.divisor);
    const char* source = static_cast<const char*>(value ? append.v.data : append.k.data) + piece * 16 +
                         head * (value ? append.v_stride_head : append.k_stride_head) * source_bytes;
    char* target = static_cast<char*>(value ? cache.v : cache.k) + piece * kTargetBytes +
                   head * (value ? cache.v_stride_head : cache.k_stride_head) * target_bytes;
    const bool scaled = value ? cache.v_descale.given : cache.k_descale.given;
    const float* descale = (value ? cache.v_descale.data : cache.k_descale.data) +
                           head * (value ? cache.v_descale_stride_head : cache.k_descale_stride_head);
    const int64_t descale_stride = value ? cache.v_descale_stride_batch : cache.k_descale_stride_batch;

    for (int t = 0; t < kTokens; t += kBatch * plan.rows) {
      uint4 words[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int t_own = t + u * plan.rows + row;
        words[u] = make_uint4(0, 0, 0, 0);
        if (!moves || t_own >= kTokens) continue;
        const int64_t offset = kAlone ? find_source(p, token, index, value) : places[t_own].source[value];
        if (offset >= 0) words[u] = __ldcs(reinterpret_cast<const uint4*>(source + offset));
      }
      // Looked up while the first pieces are on their way.
      if (first == 0 && t == 0) {
        if (guide) place = find_place(p, plan.page_size, token, index);
        if constexpr (!kAlone) {
          if (guide) {
            for (int i = 0; i < 2; ++i) places[threadIdx.x].target[i] = find_target(p, place, i);
          }
          __syncthreads();
        }
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int t_own = t + u * plan.rows + row;
        if (!moves || t_own >= kTokens) continue;
        const int64_t offset = kAlone ? find_target(p, place, value) : places[t_own].target[value];
        if (offset < 0) continue;
        if constexpr (kFp8) {
          const int b = kAlone ? token.b : places[t_own].request;
          const float scale = scaled ? descale[b * descale_stride] : 1.f;
          __stcs(reinterpret_cast<uint2*>(target + offset), narrow(words[u], append.dtype, cache.dtype, scale));
        } else {
          __stcs(reinterpret_cast<uint4*>(target + offset), words[u]);
        }
      }
    }
  }
}

// Two elements of a row of one head that a thread of append_kernel moves: a pair of the rotation, or two neighbours.
// All loads of a thread come before it waits for one of them.
template <typename T>
struct RowPair {
  int first, second;  // dimensions
  bool whole;         // the second one is there too: not at the end of an odd row
  bool turns;
  T x, y, cos, sin;

  // Pair `i` of a row of `dims`, of which the first `turning` turn.
  PD_MEMBER void find(const Rotary& rotary, int i, int dims, int turning) {
    const int half = turning / 2;
    turns = i < half;
    const bool apart = turns && !rotary.interleaved;
    first = apart ? i : 2 * i;
    second = apart ? i + half : first + 1;
    whole = second < dims;
  }

  PD_MEMBER void load(const void* base, int64_t offset) {
    const T* const row = static_cast<const T*>(base) + offset;
    x = row[first];
    if (whole) y = row[second];
  }

  // Past the end of the tables nothing is read and nothing turns.
  PD_MEMBER void load_angle(const Rotary& rotary, int i, int64_t position) {
    turns = turns && position >= 0 && position < rotary.rotary_len;
    if (!turns) return;
    cos = static_cast<const T*>(rotary.cos.data)[position * rotary.cos_stride + i];
    sin = static_cast<const T*>(rotary.sin.data)[position * rotary.sin_stride + i];
  }

  PD_MEMBER float2 turned() const {
    const float a = static_cast<float>(x), b = static_cast<float>(y);
    const float c = static_cast<float>(cos), s = static_cast<float>(sin);
    return make_float2(pd_rotate(a, b, c, s, /*second=*/false), pd_rotate(b, a, c, s, /*second=*/true));
  }

  // What does not turn keeps its bits where the dtype stays: a NaN stays that NaN.
  PD_MEMBER void store(void* base, DType dtype, bool same_dtype, int64_t offset, float descale) const {
    if (same_dtype && !turns) {
      T* const row = static_cast<T*>(base) + offset;
      row[first] = x;
      if (whole) row[second] = y;
      return;
    }
    float2 pair = turns ? turned() : make_float2(static_cast<float>(x), static_cast<float>(y));
    if (!same_dtype && dtype_bytes(dtype) == 1) pair = make_float2(pair.x / descale, pair.y / descale);
    store_float(base, dtype, offset + first, pair.x);
    if (whole) store_float(base, dtype, offset + second, pair.y);
  }
};

PD_DEVICE int64_t rotary_start(const Problem& p, int b) {
  return p.rotary.seqlens ? p.rotary.seqlens[b] : cached_length(p, b);
}

// Rotates pair `i` of token `index` of q.
template <typename T>
PD_DEVICE void rotate_query(const Problem& p, const AppendPlan& plan, int64_t index, int i) {
  const int head = plan.pairs_k.divide(i), own = i - head * static_cast<int>(plan.pairs_k.divisor);
  if (head >= p.q_heads) return;
  int b, t;
  int64_t source;
  if (p.cu_seqlens_q) {
    b = find_request(static_cast<int>(p.batch), static_cast<int>(index), FirstToken{p.cu_seqlens_q});
    t = static_cast<int>(index - p.cu_seqlens_q[b]);
    source = index * p.q_stride_token;
  } else {
    b = static_cast<int>(index / p.max_q_len);
    t = static_cast<int>(index - b * p.max_q_len);
    source = b * p.q_stride_batch + t * p.q_stride_token;
  }
  const int head_dim = static_cast<int>(p.head_dim);
  RowPair<T> pair;
  pair.find(p.rotary, own, head_dim, static_cast<int>(p.rotary.rotary_dim));
  pair.load(p.q, source + head * p.q_stride_head);
  pair.load_angle(p.rotary, own, rotary_start(p, b) + (plan.moving_queries ? t : 0));
  pair.store(plan.rotated_q, p.q_dtype, true, (index * p.q_heads + head) * head_dim, 1.f);
}

// Writes pair `i` of new token `index`: its keys, then its values.
template <typename T>
PD_DEVICE void write_token(const Problem& p, const AppendPlan& plan, int64_t index, int i) {
  const Append& append = p.append;
  const Cache& cache = p.cache;
  const int keys = static_cast<int>(p.kv_heads * plan.pairs_k.divisor);
  const bool value = i >= keys;
  const FastDivisor& pairs = value ? plan.pairs_v : plan.pairs_k;
  if (value) i -= keys;
  const int head = pairs.divide(i), own = i - head * static_cast<int>(pairs.divisor);
  if (head >= p.kv_heads) return;
  const NewToken token = find_new_token(p, plan.seqlen_new, index);
  if (!token.exists) return;
  const int64_t source = value ? source_offset(append, token, index, append.v_stride_batch, append.v_stride_token) +
                                     head * append.v_stride_head
                               : source_offset(append, token, index, append.k_stride_batch, append.k_stride_token) +
                                     head * append.k_stride_head;
  const bool rotates = p.rotary.cos && !value;
  RowPair<T> pair;
  pair.find(p.rotary, own, static_cast<int>(value ? p.head_dim_v : p.head_dim),
            rotates ? static_cast<int>(p.rotary.rotary_dim) : 0);
  pair.load(value ? append.v : append.k, source);
  if (rotates) pair.load_angle(p.rotary, own, rotary_start(p, token.b) + token.t);
  const Place place = find_place(p, plan.page_size, token, index);
  if (place.page < 0) return;
  const int64_t target =
      value ? place.page * cache.v_stride_page + place.slot * cache.v_stride_slot + head * cache.v_stride_head
            : place.page * cache.k_stride_page + place.slot * cache.k_stride_slot + head * cache.k_stride_head;
  const float descale = value ? v_descale_of(cache, token.b, head) : k_descale_of(cache, token.b, head);
  pair.store(value ? cache.v : cache.k, cache.dtype, append.dtype == cache.dtype, target, descale);
}

// Grid: plan.token_blocks blocks for each new token, then for each token of q when there is a rotation; a thread moves
// a pair. T: of the new tokens, the queries and the tables. 8-bit tokens are bytes, which nothing turns.
//
// With a block on every multiprocessor the successor does not start early: some of its blocks would find room between
// these, others not, and a decode step of 64 requests of 4k took 289 us instead of 245.
template <typename T>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ Problem p, const __grid_constant__ AppendPlan plan) {
  touch(p);
  touch(plan);
  wait_for_predecessor();
  if (plan.early_successor) let_successor_start();
  const int block = static_cast<int>(blockIdx.x), index = plan.token_blocks.divide(block);
  const int part = block - index * static_cast<int>(plan.token_blocks.divisor);
  const int i = part * kAppendThreads + static_cast<int>(threadIdx.x);
  if (index >= plan.total_new) {
    rotate_query<T>(p, plan, index - plan.total_new, i);
  } else {
    write_token<T>(p, plan, index, i);
  }
}

}  // namespace paged_attn
