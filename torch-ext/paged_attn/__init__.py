"""Attention over paged key/value caches, with the interface of flash-attn's `flash_attn_with_kvcache`.

The same functions run on every device that the loaded build supports. For one query token at position
`q_pos = kv_len - q_len + token` of its request and a key j that it sees:

    s[j]  = softmax_scale * (q . k[j])            (+ qv . v[j] inside the brackets with qv)
    s[j]  = softcap * tanh(s[j] / softcap)        if softcap > 0
    s[j] -= alibi_slope * |q_pos - j|             if alibi_slopes
    out   = sum_j exp(s[j]) v[j] / (sum_j exp(s[j]) + exp(sink))
    lse   = log of that denominator

The position rule, the order softcap before ALiBi and the rotary rule are flash-attn 2's; the sink in the
lse is FlashAttention 3's. Everything is accumulated in float32.
"""

from __future__ import annotations

from . import _fakes, fa3, integrations  # noqa: F401  (_fakes registers them)
from ._ops import ops
from .attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from .cache import empty_paged_cache
from .explanation import explain
from .merge import merge_attn_states
from .write import kv_paged_write

__all__ = [
    "cpu_isa",
    "empty_paged_cache",
    "explain",
    "fa3",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "integrations",
    "kv_paged_write",
    "merge_attn_states",
]


def cpu_isa() -> str:
    """The instruction set in use on the CPU, for example "avx512_amx_fp16", "avx512_bf16", "avx2" or "portable".

    It is the best one that the processor has and that the operating system allows, or the one that PAGED_ATTN_CPU_ISA
    names, read at the first call. "(no AMX: ...)" at the end says why the processor's matrix unit is not used.

    Raises:
        RuntimeError: PAGED_ATTN_CPU_ISA names none that this processor runs.
    """
    return ops.instruction_set()
