// The shader's language: qualifiers for the shared headers, function constants, numbers of every dtype.
//
// Metal's fast math may assume that no number is infinite or NaN. paged_decode.metal asks for a mode that may not, so
// that both go from inputs to results. Nothing else relies on them: an empty partial has a finite m, keys that no row
// sees are skipped rather than multiplied by 0, and an lse of -inf is written as bits.
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

using namespace metal;

#define PD_FN static inline
#define PD_POSITION int
#define PD_THREAD thread
#define PD_EMPTY (-1e38f)
#define PD_EXP2 metal::exp2
#define PD_LOG2 metal::log2

namespace paged_attn {

PD_FN float pd_tanh(float x) { return precise::tanh(x); }

}  // namespace paged_attn

#include "arguments.h"
#include "spec/ranges.h"
#include "spec/rotary.h"
#include "spec/score.h"
#include "spec/search.h"
#include "spec/state.h"

namespace paged_attn {

constant bool has_block_table [[function_constant(kHasBlockTable)]];
constant bool has_batch_idx [[function_constant(kHasBatchIdx)]];
constant bool has_seqlens [[function_constant(kHasSeqlens)]];
constant bool has_leftpad [[function_constant(kHasLeftpad)]];
constant bool has_cu_seqlens_q [[function_constant(kHasCuSeqlensQ)]];
constant bool has_cu_seqlens_k [[function_constant(kHasCuSeqlensK)]];
constant bool has_new [[function_constant(kHasNew)]];
constant bool has_cu_seqlens_new [[function_constant(kHasCuSeqlensNew)]];
constant bool has_q_descale [[function_constant(kHasQDescale)]];
constant bool has_k_descale [[function_constant(kHasKDescale)]];
constant bool has_v_descale [[function_constant(kHasVDescale)]];
constant bool has_qv [[function_constant(kHasQv)]];
constant bool has_slopes [[function_constant(kHasSlopes)]];
constant bool has_sinks [[function_constant(kHasSinks)]];
constant bool has_lse [[function_constant(kHasLse)]];
constant bool has_slot_mapping [[function_constant(kHasSlotMapping)]];
constant bool has_rotary [[function_constant(kHasRotary)]];
constant bool has_rotary_seqlens [[function_constant(kHasRotarySeqlens)]];
constant bool has_softcap [[function_constant(kHasSoftcap)]];
constant bool has_splits [[function_constant(kHasSplits)]];
constant bool has_prefill [[function_constant(kHasPrefill)]];
constant bool writes_tokens [[function_constant(kWritesTokens)]];
constant bool rotates_queries [[function_constant(kRotatesQueries)]];
constant bool wide [[function_constant(kWide)]];
constant bool aligned [[function_constant(kAligned)]];
constant bool interleaved [[function_constant(kInterleaved)]];
constant int head_dim [[function_constant(kHeadDim)]];
constant int head_dim_v [[function_constant(kHeadDimV)]];
constant int page_size [[function_constant(kPageSize)]];
constant int query_type [[function_constant(kQueryType)]];
constant int qv_type [[function_constant(kQvType)]];
constant int out_type [[function_constant(kOutType)]];
constant int cache_type [[function_constant(kCacheType)]];
constant int new_type [[function_constant(kNewType)]];
constant int sinks_type [[function_constant(kSinksType)]];

constant uint kInfinity = 0x7f800000u, kMinusInfinity = 0xff800000u;

// By its bits, which no mode of fast math has a rule for.
PD_FN bool is_finite(float x) { return (as_type<uint>(x) & kInfinity) != kInfinity; }

PD_FN int dtype_bytes(int type) { return type == kFloat32 ? 4 : type <= kBFloat16 ? 2 : 1; }

// ---- 8-bit numbers: a sign, then 4 or 5 bits of exponent; the smallest magnitudes have no leading one.

PD_FN float fp8_value(uint byte, int type) {
  const uint magnitude = byte & 0x7f;
  uint bits;
  float tiny;
  if (type == kFloat8E4M3) {
    bits = magnitude == 0x7f ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
    tiny = magnitude < 8 ? float(magnitude) * 0x1p-9f : 0.f;
    bits = magnitude < 8 ? as_type<uint>(tiny) : bits;
  } else {
    bits = (magnitude << 21) + (magnitude >= 0x7c ? 224u << 23 : 112u << 23);
    tiny = magnitude < 4 ? float(magnitude) * 0x1p-16f : 0.f;
    bits = magnitude < 4 ? as_type<uint>(tiny) : bits;
  }
  return as_type<float>(bits | (byte & 0x80) << 24);
}

// Rounds to nearest even; what is too large, infinities included, becomes the largest finite number.
PD_FN uchar fp8_byte(float x, int type) {
  const uint bits = as_type<uint>(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
  const bool e4m3 = type == kFloat8E4M3;
  const uint dropped = e4m3 ? 20 : 21, top = e4m3 ? 0x7e : 0x7b;
  if (magnitude > 0x7f800000u) return uchar(sign | 0x7f);
  uint result;
  if (magnitude < (e4m3 ? 121u << 23 : 113u << 23)) {
    result = uint(rint(as_type<float>(magnitude) * (e4m3 ? 0x1p9f : 0x1p16f)));
  } else {
    const uint rounded = magnitude + (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
    result = min((rounded >> dropped) - (e4m3 ? 120u << 3 : 112u << 2), top);
  }
  return uchar(sign | result);
}

// ---- One number of a dtype that is a function constant

PD_FN float load_float(const device void* base, int type, long index) {
  switch (type) {
    case kFloat32: return ((const device float*)base)[index];
    case kFloat16: return float(((const device half*)base)[index]);
    case kBFloat16: return float(((const device bfloat*)base)[index]);
    default: return fp8_value(((const device uchar*)base)[index], type);
  }
}

PD_FN void store_float(device void* base, int type, long index, float x) {
  switch (type) {
    case kFloat32: ((device float*)base)[index] = x; break;
    case kFloat16: ((device half*)base)[index] = half(x); break;
    case kBFloat16: ((device bfloat*)base)[index] = bfloat(x); break;
    default: ((device uchar*)base)[index] = fp8_byte(x, type);
  }
}

// ---- Eight neighbouring elements of a cache

struct Vector {
  float4 low, high;
};

PD_FN float4 fp8_values(uint bytes) {
  return float4(fp8_value(bytes & 0xff, cache_type), fp8_value(bytes >> 8 & 0xff, cache_type),
                fp8_value(bytes >> 16 & 0xff, cache_type), fp8_value(bytes >> 24, cache_type));
}

// Elements [dim, dim + 8) of the row of `dims` elements that begins at `row`; 0 past its end.
PD_FN Vector load_vector(const device void* cache, long row, int dim, int dims) {
  Vector result = {float4(0.f), float4(0.f)};
  if (dim >= dims) return result;
  if (!aligned) {
    for (int i = 0; i < 4; ++i) {
      if (dim + i < dims) result.low[i] = load_float(cache, cache_type, row + dim + i);
      if (dim + 4 + i < dims) result.high[i] = load_float(cache, cache_type, row + dim + 4 + i);
    }
  } else if (cache_type == kFloat32) {
    const device float4* vectors = (const device float4*)((const device float*)cache + row + dim);
    result = {vectors[0], vectors[1]};
  } else if (cache_type == kFloat16) {
    const uint4 words = *(const device uint4*)((const device half*)cache + row + dim);
    result = {float4(as_type<half4>(uint2(words.xy))), float4(as_type<half4>(uint2(words.zw)))};
  } else if (cache_type == kBFloat16) {
    const uint4 words = *(const device uint4*)((const device bfloat*)cache + row + dim);
    result = {float4(as_type<bfloat4>(uint2(words.xy))), float4(as_type<bfloat4>(uint2(words.zw)))};
  } else {
    const uint2 words = *(const device uint2*)((const device uchar*)cache + row + dim);
    result = {fp8_values(words.x), fp8_values(words.y)};
  }
  return result;
}

}  // namespace paged_attn

// Kernels stand outside of it: inside, their names for the host would begin with paged_attn::, and an instantiation
// outside of the namespace of its template is no C++.
using namespace paged_attn;
