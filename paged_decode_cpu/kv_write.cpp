#define PD_LANES 4
#include "kv_write.h"

#include <torch/csrc/stable/ops.h>

#include "request.h"
#include "rotary.h"
#include "values.h"

namespace paged_attn {
namespace {

// Nearest 8-bit number, ties to even, saturating; NaN stays NaN. The mantissa is rounded in the
// float's own bits; below the smallest normal number, adding `step` (2^23 subnormal steps) rounds.
template <int kMantissaBits, int kBias>
inline u32v to_fp8(f32v x, float largest, float smallest_normal, float step) {
  constexpr int kShift = 23 - kMantissaBits;
  u32v bits = bit_cast<u32v>(x);
  u32v sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  f32v ax = bit_cast<f32v>(magnitude);
  f32v clamped = ax > splat(largest) ? splat(largest) : ax;
  u32v m = bit_cast<u32v>(clamped);
  u32v normal = ((m + ((1u << (kShift - 1)) - 1) + ((m >> kShift) & 1u)) >> kShift) - ((127u - kBias) << kMantissaBits);
  u32v subnormal = bit_cast<u32v>(clamped + step) - bit_cast<u32v>(splat(step));
  u32v code = clamped < splat(smallest_normal) ? subnormal : normal;
  code = magnitude > (255u << 23) ? u32v{} + 0x7fu : code;
  return code | sign;
}

inline u32v to_fp8(DType type, f32v x) {
  return type == DType::kFloat8E4M3 ? to_fp8<3, 7>(x, 448.f, 0.015625f, 16384.f)
                                    : to_fp8<2, 15>(x, 57344.f, 6.103515625e-05f, 128.f);
}

template <DType kType>
void read_row(const char* source, int64_t n, float* x) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store<DType::kFloat32>(x + i, load<kType>(source + i * dtype_bytes(kType)));
  if (i < n) store<DType::kFloat32>(x + i, load_tail<kType>(source + i * dtype_bytes(kType), n - i));
}

void read_row(DType type, const char* source, int64_t n, float* x) {
  switch (type) {
    case DType::kFloat32: return read_row<DType::kFloat32>(source, n, x);
    case DType::kFloat16: return read_row<DType::kFloat16>(source, n, x);
    default: return read_row<DType::kBFloat16>(source, n, x);
  }
}

template <DType kType>
void write_row(const float* x, int64_t n, char* target) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_tail<kType>(target + i * dtype_bytes(kType), load<DType::kFloat32>(x + i), pd_min(n - i, kLanes));
}

void write_row(DType type, const float* x, int64_t n, float descale, char* target) {
  switch (type) {
    case DType::kFloat32: return write_row<DType::kFloat32>(x, n, target);
    case DType::kFloat16: return write_row<DType::kFloat16>(x, n, target);
    case DType::kBFloat16: return write_row<DType::kBFloat16>(x, n, target);
    default:
      for (int64_t i = 0; i < n; i += kLanes) {
        u32v codes = to_fp8(type, load<DType::kFloat32>(x + i) / descale);
        for (int64_t j = i; j < pd_min(n, i + kLanes); ++j) target[j] = static_cast<char>(codes[j - i]);
      }
  }
}

// All heads of one token, of k or of v.
void write_token(const Problem& p, const TokenWrite& w, bool is_key, float* row) {
  const Cache& c = p.cache;
  const Append& a = p.append;
  const int64_t n = is_key ? p.head_dim : p.head_dim_v;
  const bool rotated = is_key && p.rotary.cos;
  const int64_t source_stride = is_key ? a.k_stride_head : a.v_stride_head;
  const int64_t target_stride = is_key ? c.k_stride_head : c.v_stride_head;
  const char* source = static_cast<const char*>(is_key ? a.k : a.v) + (is_key ? w.source_k : w.source_v) * dtype_bytes(a.dtype);
  char* target = static_cast<char*>(is_key ? c.k : c.v) +
                 (is_key ? w.page * c.k_stride_page + w.slot * c.k_stride_slot : w.page * c.v_stride_page + w.slot * c.v_stride_slot) *
                     dtype_bytes(c.dtype);
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const char* from = source + h * source_stride * dtype_bytes(a.dtype);
    char* to = target + h * target_stride * dtype_bytes(c.dtype);
    if (!rotated && a.dtype == c.dtype) {
      memcpy(to, from, n * dtype_bytes(a.dtype));
      continue;
    }
    read_row(a.dtype, from, n, row);
    if (rotated) rotate(p.rotary, p.q_dtype, w.rotary_position, row);
    float descale = is_key ? descale_at(c.k_descale, c.k_descale_stride_batch, c.k_descale_stride_head, w.batch, h)
                           : descale_at(c.v_descale, c.v_descale_stride_batch, c.v_descale_stride_head, w.batch, h);
    write_row(c.dtype, row, n, descale, to);
  }
}

}  // namespace

std::vector<TokenWrite> place_tokens(const Problem& p) {
  const Append& a = p.append;
  const Cache& c = p.cache;
  std::vector<TokenWrite> writes;
  writes.reserve(a.total_new);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request r = request_of(p, b);
    for (int64_t t = 0; t < r.new_len; ++t) {
      TokenWrite w;
      w.batch = b;
      w.source_k = b * a.k_stride_batch + (r.new_begin + t) * a.k_stride_token;
      w.source_v = b * a.v_stride_batch + (r.new_begin + t) * a.v_stride_token;
      if (a.slot_mapping) {
        const int64_t i = (a.cu_seqlens_k_new ? 0 : b * a.seqlen_new) + r.new_begin + t, slot = a.slot_mapping[i];
        if (slot < 0) continue;
        w.page = slot / c.page_size;
        w.slot = slot % c.page_size;
        if (w.page >= c.num_pages)
          bad_value("slot_mapping", i, slot, "less than num_pages * page_size = " + std::to_string(c.num_pages * c.page_size));
      } else {
        const Slot s = slot_of_key(c, b, r.old_len + t);
        w.page = s.page;
        w.slot = s.slot;
        check_page(c, b, (r.old_len + t) / c.page_size, s.page);
      }
      w.rotary_position = p.rotary.cos ? rotary_key_position(p, r, b, t) : 0;
      writes.push_back(w);
    }
  }
  return writes;
}

void write_tokens(const Problem& p, const std::vector<TokenWrite>& writes) {
  const int64_t token_bytes = p.kv_heads * (p.head_dim + p.head_dim_v) * dtype_bytes(p.append.dtype);
  const int64_t grain = pd_max(1, (int64_t(64) << 10) / pd_max(token_bytes, 1));
  torch::stable::parallel_for(0, static_cast<int64_t>(writes.size()), grain, [&](int64_t begin, int64_t end) {
    float row[kMaxHeadDim + kLanes];
    for (int64_t i = begin; i < end; ++i) {
      write_token(p, writes[i], true, row);
      write_token(p, writes[i], false, row);
    }
  });
}

}  // namespace paged_attn
