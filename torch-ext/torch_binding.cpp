// The entry of the extension: schemas and registration of the operators, on torch's stable ABI. op_attend.cpp is next.
#include <registration.h>  // kernel-builder's, or tools/local_build.py's: not this folder's before theirs
#include <torch/csrc/stable/library.h>

#include "backend.h"
#include "ops.h"

namespace paged_attn {

template <auto kFunction, size_t kCount = kAllArguments>
using AttendOperator = Operator<kAttendArguments, kFunction, std::make_index_sequence<kCount>>;
using Attend = AttendOperator<&flash_attn_with_kvcache>;
using AttendPlainly = AttendOperator<&flash_attn_with_kvcache, kPlainArguments>;
using Explain = AttendOperator<&explain_flash_attn_with_kvcache>;
using Write =
    Operator<kWriteArguments, &kv_paged_write, std::make_index_sequence<std::tuple_size_v<decltype(kWriteArguments)>>>;
using Merge =
    Operator<kMergeArguments, &merge_parts, std::make_index_sequence<std::tuple_size_v<decltype(kMergeArguments)>>>;
#ifdef CUDA_KERNEL
using MergeWithPeers = Operator<kPeerMergeArguments, &merge_with_peers,
                                std::make_index_sequence<std::tuple_size_v<decltype(kPeerMergeArguments)>>>;
#endif

}  // namespace paged_attn

// One attention function under three schemas. Only "_append", with new keys and values, marks the caches as changed:
// torch.compile may copy a tensor that an operator changes. "_plain" ends after the arguments that every call has.
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  using namespace paged_attn;
  const auto attend = [&](const char* name, size_t count, Changes changes, const char* returned) {
    ops.def(schema_of(name, kAttendArguments, count, changes, returned).c_str());
  };
  attend("flash_attn_with_kvcache", kAllArguments, Changes::kResults, "()");
  attend("flash_attn_with_kvcache_append", kAllArguments, Changes::kAll, "()");
  attend("flash_attn_with_kvcache_plain", kPlainArguments, Changes::kResults, "()");
  attend("explain_flash_attn_with_kvcache", kAllArguments, Changes::kNothing, "str");
  ops.def(schema_of("kv_paged_write", kWriteArguments, size_t(-1), Changes::kAll, "()").c_str());
  ops.def(schema_of("merge_parts", kMergeArguments, size_t(-1), Changes::kResults, "()").c_str());
#ifdef CUDA_KERNEL
  ops.def(schema_of("merge_with_peers", kPeerMergeArguments, size_t(-1), Changes::kAll, "()").c_str());
#endif
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
  ops.impl("flash_attn_with_kvcache", TORCH_BOX(&paged_attn::Attend::call));
  ops.impl("flash_attn_with_kvcache_append", TORCH_BOX(&paged_attn::Attend::call));
  ops.impl("flash_attn_with_kvcache_plain", TORCH_BOX(&paged_attn::AttendPlainly::call));
  ops.impl("explain_flash_attn_with_kvcache", TORCH_BOX(&paged_attn::Explain::call));
  ops.impl("kv_paged_write", TORCH_BOX(&paged_attn::Write::call));
  ops.impl("merge_parts", TORCH_BOX(&paged_attn::Merge::call));
#ifdef CUDA_KERNEL
  ops.impl("merge_with_peers", TORCH_BOX(&paged_attn::MergeWithPeers::call));
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
