// Writes new keys and values into the cache, and rotates keys and queries on the way. A thread handles 8 neighbouring
// elements.
//
// Both caches are written by one dispatch, and may lie in one buffer. That is no alias in the sense of the compiler:
// a thread writes to one of them, reads from neither, and no two threads write the same bytes.
#pragma once

#include "tables.h"

namespace paged_attn {

// Largest b with cu_seqlens[b] <= index.
PD_FN int find_request(const device int* cu_seqlens, int batch, int index) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct NewToken {
  int b, t;
  bool exists;  // false past the last request
};

PD_FN NewToken find_new_token(constant Arguments& a, Tables tables, int index) {
  NewToken token = {0, index, true};
  if (has_cu_seqlens_new) {
    token.b = find_request(tables.cu_seqlens_new, a.batch, index);
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

// Element `dim` of a row after the rotation to `position`. Past the end of the tables nothing is read and nothing
// turns.
PD_FN float rotated(constant Arguments& a, RotaryTables rotary, const device void* base, int type, long row, int dim,
                    int position) {
  const float x = load_float(base, type, row + dim);
  const int half_dim = a.rotary_dim / 2;
  if (!has_rotary || dim >= a.rotary_dim || position < 0 || position >= a.rotary_len) return x;
  const bool second = interleaved ? dim % 2 == 1 : dim >= half_dim;
  const int pair = interleaved ? dim / 2 : second ? dim - half_dim : dim;
  const int partner = interleaved ? dim ^ 1 : second ? dim - half_dim : dim + half_dim;
  const float y = load_float(base, type, row + partner);
  const float cosine = load_float(rotary.cos, query_type, position * a.cos_stride + pair);
  const float sine = load_float(rotary.sin, query_type, position * a.sin_stride + pair);
  return second ? y * sine + x * cosine : x * cosine - y * sine;
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
    } else {
      copy_elements<uint4>(source, from / 8, target, to / 8, 1);
    }
  } else if (bytes == 4) {
    copy_elements<uint>(source, from, target, to, count);
  } else {
    copy_elements<ushort>(source, from, target, to, count);
  }
}

// Grid: vectors of a token (of all heads of K, then of V), tokens (the new ones, then those of q to be rotated)
[[kernel]] void append(
    constant Arguments& a [[buffer(kArgumentsBuffer)]], PD_TABLE_BUFFERS,
    const device void* q [[buffer(kQueryBuffer), function_constant(has_rotary)]],
    const device void* new_k [[buffer(kNewKeysBuffer)]], const device void* new_v [[buffer(kNewValuesBuffer)]],
    device void* k_cache [[buffer(kKeyCacheBuffer)]], device void* v_cache [[buffer(kValueCacheBuffer)]],
    const device float* k_descale [[buffer(kKDescaleBuffer), function_constant(has_k_descale)]],
    const device float* v_descale [[buffer(kVDescaleBuffer), function_constant(has_v_descale)]],
    const device long* slot_mapping [[buffer(kSlotMappingBuffer), function_constant(has_slot_mapping)]],
    const device void* cos [[buffer(kCosBuffer), function_constant(has_rotary)]],
    const device void* sin [[buffer(kSinBuffer), function_constant(has_rotary)]],
    const device int* rotary_seqlens [[buffer(kRotarySeqlensBuffer), function_constant(has_rotary_seqlens)]],
    device void* rotated_q [[buffer(kRotatedBuffer), function_constant(has_rotary)]],
    uint3 position [[thread_position_in_grid]]) {
  const Tables tables = PD_TABLES;
  const RotaryTables rotary = {cos, sin, rotary_seqlens};
  const int vectors_k = (head_dim + kVector - 1) / kVector, vectors_v = (head_dim_v + kVector - 1) / kVector;
  int vector = position.x;

  if (has_rotary && int(position.y) >= a.total_new) {
    // Rotate a query
    const int index = position.y - a.total_new;
    if (vector >= a.q_heads * vectors_k) return;
    const int b = has_cu_seqlens_q ? find_request(tables.cu_seqlens_q, a.batch, index) : index / a.max_q_len;
    const int token = bounded(long(index) - (has_cu_seqlens_q ? tables.cu_seqlens_q[b] : b * a.max_q_len));
    const int head = vector / vectors_k, dim = (vector - head * vectors_k) * kVector;
    const long row = has_cu_seqlens_q ? index * a.q.middle : b * a.q.outer + token * a.q.middle;
    const int first = has_rotary_seqlens ? bounded(rotary_seqlens[b]) : load_request(a, tables, b).old_len;
    for (int i = dim; i < min(dim + kVector, head_dim); ++i) {
      const float x =
          rotated(a, rotary, q, query_type, row + head * a.q.head, i, first + (a.moving_queries ? token : 0));
      store_float(rotated_q, query_type, (long(index) * a.q_heads + head) * head_dim + i, x);
    }
    return;
  }

  const bool value = vector >= a.kv_heads * vectors_k;
  if (value) vector -= a.kv_heads * vectors_k;
  const int vectors = value ? vectors_v : vectors_k, dims = value ? head_dim_v : head_dim;
  const int head = vector / vectors, dim = (vector - head * vectors) * kVector;
  const int index = position.y;
  if (head >= a.kv_heads || index >= a.total_new) return;
  const NewToken token = find_new_token(a, tables, index);
  const Place place = find_new_place(a, tables, slot_mapping, token, index);
  if (place.page < 0) return;

  constant Strides& from = value ? a.new_v : a.new_k;
  constant Strides& to = value ? a.v_cache : a.k_cache;
  const long source = (has_cu_seqlens_new ? index * from.middle : token.b * from.outer + token.t * from.middle) +
                      head * from.head + dim;
  const long target = place.page * to.outer + place.slot * to.middle + head * to.head + dim;
  const int count = min(int(kVector), dims - dim);
  const device void* source_base = value ? new_v : new_k;
  device void* target_base = value ? v_cache : k_cache;
  if (new_type == cache_type && (value || !has_rotary)) {
    copy_vector(source_base, source, target_base, target, count);
    return;
  }
  float descale = 1.f;
  if (dtype_bytes(cache_type) == 1) {
    if (!value && has_k_descale)
      descale = descale_at(k_descale, a.k_descale_stride_batch, a.k_descale_stride_head, token.b, head);
    if (value && has_v_descale)
      descale = descale_at(v_descale, a.v_descale_stride_batch, a.v_descale_stride_head, token.b, head);
  }
  const int first = !has_rotary          ? 0
                    : has_rotary_seqlens ? bounded(rotary_seqlens[token.b])
                                         : load_request(a, tables, token.b).old_len;
  for (int i = 0; i < count; ++i) {
    const float x = value ? load_float(new_v, new_type, source + i)
                          : rotated(a, rotary, new_k, new_type, source - dim, dim + i, first + token.t);
    store_float(target_base, cache_type, target + i, descale == 1.f ? x : precise::divide(x, descale));
  }
}

}  // namespace paged_attn
