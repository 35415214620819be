// Schemas and registration, on torch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "backend.h"
#include "paged_attn_op.h"
#include "registration.h"

// One function under three schemas. Only with new keys and values does it change the caches, and only then may
// torch.compile treat them as changed (it would copy a cache to be safe). And the dispatcher works 0.05 to 0.25 us for
// each argument, which a decode step of a short context feels: hence the short one, and the order by use.
#define PAGED_ATTN_ARGUMENTS(CACHES)                                                                         \
  "(Tensor q, " CACHES                                                                                       \
  ", Tensor(c!) out, Tensor(d!)? lse, Tensor? cache_seqlens, Tensor? block_table, float softmax_scale, "     \
  "int window_right=-1, Tensor? k=None, Tensor? v=None, int window_left=-1, int max_seqlen_q=0, "            \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, float softcap=0.0, " \
  "int num_splits=0, bool deterministic=False, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, "   \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, int attention_chunk=0, Tensor? qv=None, "                  \
  "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, Tensor? rotary_cos=None, "        \
  "Tensor? rotary_sin=None, bool rotary_interleaved=True, "                                                  \
  "Tensor? rotary_seqlens=None) -> ()"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("flash_attn_with_kvcache" PAGED_ATTN_ARGUMENTS("Tensor k_cache, Tensor v_cache"));
  ops.def("flash_attn_with_kvcache_append" PAGED_ATTN_ARGUMENTS("Tensor(a!) k_cache, Tensor(b!) v_cache"));
  ops.def(
      "flash_attn_with_kvcache_plain(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(c!) out, Tensor(d!)? lse, "
      "Tensor? cache_seqlens, Tensor? block_table, float softmax_scale, int window_right) -> ()");
  ops.def(
      "kv_paged_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? block_table, "
      "Tensor? cache_seqlens, Tensor? cu_seqlens_k_new=None, Tensor? slot_mapping=None, Tensor? k_descale=None, "
      "Tensor? v_descale=None) -> ()");
  ops.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("instruction_set", TORCH_BOX(&paged_attn::instruction_set));
}

#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#elif defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#elif defined(METAL_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, MPS, ops) {
#endif
  ops.impl("flash_attn_with_kvcache", TORCH_BOX(&paged_attn::flash_attn_with_kvcache));
  ops.impl("flash_attn_with_kvcache_append", TORCH_BOX(&paged_attn::flash_attn_with_kvcache));
  ops.impl("flash_attn_with_kvcache_plain", TORCH_BOX(&paged_attn::flash_attn_with_kvcache_plain));
  ops.impl("kv_paged_write", TORCH_BOX(&paged_attn::kv_paged_write));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
