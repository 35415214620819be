// Writes new keys and values into the cache, and rotates keys and queries on the way. A thread handles 8 neighbouring
// elements.
//
// Both caches are written by one dispatch, and may lie in one buffer. That is no alias in the sense of the compiler:
// a thread writes to one of them, reads from neither, and no two threads write the same bytes.
#pragma once

#include "tables.h"

namespace paged_attn {

// The tokens of a request begin here.
struct FirstToken {
  const device int* cu_seqlens;

  int operator()(int b) const { return cu_seqlens[b]; }
};

struct NewToken {
  int b, t;
  bool exists;  // false past the last request
};

PD_FN NewToken find_new_token(constant Arguments& a, Tables tables, int index) {
  NewToken token = {0, index, true};
  if (has_cu_seqlens_new) {
    token.b = find_request(a.batch, index, FirstToken{tables.cu_seqlens_new});
    token.t = bounded(long(index) - tables.cu_seqlens_new[token.b]);
    token.exists = token.t >= 0 && index < tables.cu_seqlens_new[token.b + 1];
  } else if (a.seqlen_new > 0) {
    token.b = index / a.seqlen_new;
    token.t = index - token.b * a.seqlen_new;
  }
  return token;
}

// Where new token `index` goes. A padded entry has no length and no place.
PD_FN Place find_new_place(constant Arguments& a, Tables tables, const device long* slot_mapping, NewToken token,
                           int index) {
  const Place nowhere = {-1, 0};
  if (!token.exists) return nowhere;
  if (has_slot_mapping) {
    const long slot = slot_mapping[index];
    if (slot < 0 || slot >= a.num_pages * a.cache_slots) return nowhere;
    // 64-bit divisions are slow, and few caches need them.
    const long page =
        slot < 0x7fffffff && a.cache_slots < 0x7fffffff ? int(slot) / int(a.cache_slots) : slot / a.cache_slots;
    return {int(page), slot - page * a.cache_slots};
  }
  const Request request = load_request(a, tables, token.b);
  if (token.t >= request.new_len) return nowhere;
  return find_place(a, tables, token.b, request.old_len + token.t);
}

// cos and sin of the positions; to be read only with a rotation.
struct RotaryTables {
  const device void* cos;
  const device void* sin;
  const device int* seqlens;
};

// Position of the first new token of a request, and of its first query.
PD_FN int first_position(constant Arguments& a, Tables tables, RotaryTables rotary, int b) {
  return has_rotary_seqlens ? bounded(rotary.seqlens[b]) : load_request(a, tables, b).old_len;
}

// Element `dim` of a row after the rotation to `position`. Past the end of the tables nothing is read and nothing
// turns.
PD_FN float rotated(constant Arguments& a, RotaryTables rotary, const device void* base, int type, long row, int dim,
                    int position) {
  const float x = load_float(base, type, row + dim);
  if (!has_rotary || dim >= a.rotary_dim || position < 0 || position >= a.rotary_len) return x;
  const RotaryPair pair = rotary_pair(dim, a.rotary_dim, interleaved);
  const float y = load_float(base, type, row + pair.partner);
  const float cosine = load_float(rotary.cos, query_type, position * a.cos_stride + pair.angle);
  const float sine = load_float(rotary.sin, query_type, position * a.sin_stride + pair.angle);
  return pd_rotate(x, y, cosine, sine, pair.second);
}

// Copies elements of one size, at most a vector of them.
template <typename T>
PD_FN void copy_elements(const device void* source, long from, device void* target, long to, int count) {
  for (int i = 0; i < count; ++i) ((device T*)target)[to + i] = ((const device T*)source)[from + i];
}

PD_FN void copy_vector(const device void* source, long from, device void* target, long to, int count) {
  const int bytes = dtype_bytes(cache_type);
  if (aligned) {  // from, to and count are multiples of a vector
    if (bytes == 4) {
      copy_elements<uint4>(source, from / 4, target, to / 4, 2);
    } else if (bytes == 2) {
      copy_elements<uint4>(source, from / 8, target, to / 8, 1);
    } else {
      copy_elements<uint2>(source, from / 8, target, to / 8, 1);
    }
  } else if (bytes == 4) {
    copy_elements<uint>(source, from, target, to, count);
  } else if (bytes == 2) {
    copy_elements<ushort>(source, from, target, to, count);
  } else {
    copy_elements<uchar>(source, from, target, to, count);
  }
}

// One vector of query `index` of all.
PD_FN void rotate_query(constant Arguments& a, Tables tables, RotaryTables rotary, const device void* q,
                        device void* rotated_q, int index, int vector, int vectors) {
  if (vector >= a.q_heads * vectors) return;
  const int b = has_cu_seqlens_q ? find_request(a.batch, index, FirstToken{tables.cu_seqlens_q}) : index / a.q_len;
  const int token = bounded(long(index) - (has_cu_seqlens_q ? tables.cu_seqlens_q[b] : b * a.q_len));
  const int head = vector / vectors, dim = (vector - head * vectors) * kVector;
  const long row = has_cu_seqlens_q ? index * a.q.middle : b * a.q.outer + token * a.q.middle;
  const int position = first_position(a, tables, rotary, b) + (a.moving_queries ? token : 0);
  for (int i = dim; i < min(dim + kVector, head_dim); ++i) {
    const float x = rotated(a, rotary, q, query_type, row + head * a.q.head, i, position);
    store_float(rotated_q, out_type, (long(index) * a.q_heads + head) * head_dim + i, x);
  }
}

// The keys, or the values, of the new tokens and their cache.
struct NewRows {
  const device void* source;
  device void* cache;
  const device float* descales;  // of the cache, to be read only where with_descale
  bool keys, with_descale;
};

// One vector of new token `index`.
PD_FN void write_vector(constant Arguments& a, Tables tables, RotaryTables rotary, NewRows rows, NewToken token,
                        Place place, int index, int head, int dim) {
  constant Strides& from = rows.keys ? a.new_k : a.new_v;
  constant Strides& to = rows.keys ? a.k_cache : a.v_cache;
  const long source =
      (has_cu_seqlens_new ? index * from.middle : token.b * from.outer + token.t * from.middle) + head * from.head;
  const long target = place.page * to.outer + place.slot * to.middle + head * to.head;
  const int count = min(int(kVector), (rows.keys ? head_dim : head_dim_v) - dim);
  if (new_type == cache_type && !(rows.keys && has_rotary)) {
    copy_vector(rows.source, source + dim, rows.cache, target + dim, count);
    return;
  }
  float descale = 1.f;
  if (dtype_bytes(cache_type) == 1 && rows.with_descale)
    descale = descale_at(rows.descales, rows.keys ? a.k_descale : a.v_descale, token.b, head);
  const int position = has_rotary ? first_position(a, tables, rotary, token.b) + token.t : 0;
  for (int i = dim; i < dim + count; ++i) {
    const float x = rows.keys ? rotated(a, rotary, rows.source, new_type, source, i, position)
                              : load_float(rows.source, new_type, source + i);
    store_float(rows.cache, cache_type, target + i, descale == 1.f ? x : precise::divide(x, descale));
  }
}

}  // namespace paged_attn

// Grid: vectors of a token (of all heads of K, then of V), tokens (the new ones, then those of q to be rotated)
[[kernel]] void append(constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS,
                       const device void* q [[buffer(kQueryBuffer), function_constant(rotates_queries)]],
                       const device void* new_k [[buffer(kNewKeysBuffer), function_constant(writes_tokens)]],
                       const device void* new_v [[buffer(kNewValuesBuffer), function_constant(writes_tokens)]],
                       device void* k_cache [[buffer(kKeyCacheBuffer), function_constant(writes_tokens)]],
                       device void* v_cache [[buffer(kValueCacheBuffer), function_constant(writes_tokens)]],
                       const device float* k_descale [[buffer(kKDescaleBuffer), function_constant(has_k_descale)]],
                       const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],
                       const device long* slot_mapping
                       [[buffer(kSlotMappingBuffer), function_constant(has_slot_mapping)]],
                       const device void* cos [[buffer(kCosBuffer), function_constant(has_rotary)]],
                       const device void* sin [[buffer(kSinBuffer), function_constant(has_rotary)]],
                       const device int* rotary_seqlens
                       [[buffer(kRotarySeqlensBuffer), function_constant(has_rotary_seqlens)]],
                       device void* rotated_q [[buffer(kRotatedBuffer), function_constant(rotates_queries)]],
                       uint3 thread_position [[thread_position_in_grid]]) {
  const Tables tables = PD_TABLES;
  const RotaryTables rotary = {cos, sin, rotary_seqlens};
  const int vectors_k = (head_dim + kVector - 1) / kVector, vectors_v = (head_dim_v + kVector - 1) / kVector;
  const int index = thread_position.y, vector = thread_position.x;
  if (index >= a.total_new) {
    if (rotates_queries) rotate_query(a, tables, rotary, q, rotated_q, index - a.total_new, vector, vectors_k);
    return;
  }
  if (!writes_tokens) return;
  const bool keys = vector < a.kv_heads * vectors_k;
  const int of_cache = keys ? vector : vector - a.kv_heads * vectors_k, vectors = keys ? vectors_k : vectors_v;
  const int head = of_cache / vectors, dim = (of_cache - head * vectors) * kVector;
  if (head >= a.kv_heads) return;
  const NewToken token = find_new_token(a, tables, index);
  const Place place = find_new_place(a, tables, slot_mapping, token, index);
  if (place.page < 0) return;
  const NewRows rows = keys ? NewRows{new_k, k_cache, k_descale, true, has_k_descale}
                            : NewRows{new_v, v_cache, v_descale, false, has_v_descale};
  write_vector(a, tables, rotary, rows, token, place, index, head, dim);
}
