"""SGLang's FlashAttention 3 kernel, served by paged-attn.

With SGLANG_USE_SGL_FA3_KERNEL=0 SGLang asks `kernels` for kernels-community/sgl-flash-attn3 and takes two functions of
it by FlashAttention 3's order of arguments. This directory goes in its place; paged-attn itself is loaded under its own
name:

    export SGLANG_USE_SGL_FA3_KERNEL=0
    export LOCAL_KERNELS="kernels-community/sgl-flash-attn3=<here>:org/paged-attn=<repository>/build/<variant>"
"""

from kernels import get_kernel

_fa3 = get_kernel("org/paged-attn", version=1, trust_remote_code=True).fa3

flash_attn_func = _fa3.flash_attn_func
flash_attn_varlen_func = _fa3.flash_attn_varlen_func
flash_attn_with_kvcache = _fa3.flash_attn_with_kvcache
get_scheduler_metadata = _fa3.get_scheduler_metadata
merge_state_v2 = _fa3.merge_state_v2

__all__ = _fa3.__all__
