#include "kv_write.h"

#include <torch/csrc/stable/ops.h>

#include "spec/check_tables.h"
#include "spec/request.h"

namespace paged_attn {

std::vector<TokenWrite> place_tokens(const Problem& p) {
  const Append& a = p.append;
  std::vector<TokenWrite> writes;
  if (!a.k) return writes;
  check_new_places(p);
  writes.reserve(a.total_new);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request r = request_of(p, b);
    for (int64_t t = 0; t < r.new_len; ++t) {
      TokenWrite w;
      w.batch = b;
      w.source_k = b * a.k_stride_batch + (r.new_begin + t) * a.k_stride_token;
      w.source_v = b * a.v_stride_batch + (r.new_begin + t) * a.v_stride_token;
      const Slot place = slot_of_new_token(p, r, b, t);
      if (place.page < 0) continue;
      w.page = place.page;
      w.slot = place.slot;
      w.rotary_position = p.rotary.cos ? rotary_key_position(p, r, b, t) : 0;
      writes.push_back(w);
    }
  }
  return writes;
}

void write_tokens(const Problem& p, const Kernel& kernel, const std::vector<TokenWrite>& writes) {
  // A thread takes at least 64 KiB: waking one costs about as much as writing that.
  const int64_t token_bytes = p.kv_heads * (p.head_dim + p.head_dim_v) * dtype_bytes(p.append.dtype);
  const int64_t grain = pd_max(1, (int64_t(64) << 10) / pd_max(token_bytes, 1));
  torch::stable::parallel_for(0, static_cast<int64_t>(writes.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel.write_token(p, writes[i]);
  });
}

}  // namespace paged_attn
