"""The functions of `paged_attn` in FlashAttention 3's positional order, for engines that call by position.

What an argument means is written at the functions of `paged_attn` itself. Nothing is copied here: arguments are put
in another order, and the call goes straight to the operator. SGLang's FlashAttention backend runs on these functions
unchanged (docs/engines.md).
"""

from __future__ import annotations

import torch

from . import attention
from ._call import all_off, check_cu_seqlens_k, either, form_of, one_of, refuse_others, reworded, run, with_q_v
from .merge import check_all, merge_checked

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_state_v2",
]

# How errors name arguments here.
_NAMES = {"block_table": "page_table", "s_aux": "sinks"}
_NAMES_OF_KEYS = _NAMES | {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k", "seqlen_cache": "seqlen_k"}
_LENGTHS = {"cache_seqlens": "(cu_seqlens_k[1:] - cu_seqlens_k[:-1])"}
# Where the score is qv . v alone, the operator gets qv as q and the values as keys.
_NAMES_OF_LATENTS = _NAMES | {"q": "qv", "k_cache": "v_cache", "k_descale": "v_descale"}
_NAMES_OF_LATENT_KEYS = _NAMES_OF_KEYS | {"q": "qv", "k_cache": "v", "k_descale": "v_descale"}
_NAMES_OF_PARTS = {"out_a": "v_a", "lse_a": "s_a", "out_b": "v_b", "lse_b": "s_b", "out": "v_merged", "lse": "s_merged"}

# attention.py says what the lines of the tuples `features` hold.


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    only_qv: bool = False,
    deterministic: bool = False,
    max_seqlen_k: int | None = None,
    out: torch.Tensor | None = None,
    ver: int | None = None,
    **others,
):
    """`paged_attn.flash_attn_with_kvcache` in FlashAttention 3's order. It has no `alibi_slopes`.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), or (total_q, q_heads, head_dim) with `cu_seqlens_q`; None with
            `only_qv`.
        k_cache, v_cache: (num_pages, page_size, kv_heads, head_dim / head_dim_v) with `page_table`, else
            (batch_cache, seqlen_cache, kv_heads, ...).
        k, v: (batch, seqlen_new, kv_heads, head_dim / head_dim_v), or (total_new, ...) with `cu_seqlens_k_new`:
            appended at `cache_seqlens`. Without them `cu_seqlens_k_new` and `rotary_seqlens` ask for nothing.
        page_table, sinks, qv: also under the names `block_table`, `s_aux` and `q_v`.
        only_qv: the score is qv . v alone (multi-head latent attention without a rotary part), as it is with a q of
            head_dim 0; k_cache may be None then, and nothing is appended.
        The others: as in `paged_attn.flash_attn_with_kvcache`.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) or (total_q, q_heads, head_dim_v); with `return_softmax_lse` also the
        lse, float32 (batch, q_heads, seqlen_q) or (q_heads, total_q).

    Raises:
        ValueError, RuntimeError: an argument does not fit. Nothing has been written then.
        TypeError: a keyword that no kernel of this kind has.
    """
    if others:
        refuse_others("flash_attn_with_kvcache", others)
    if block_table is not None:
        page_table = one_of("block_table", block_table, "page_table", page_table)
    if s_aux is not None:
        sinks = one_of("s_aux", s_aux, "sinks", sinks)
    if q_v is not None:
        qv = one_of("qv", qv, "q_v", q_v)
    names = _NAMES
    if only_qv or _is_empty(q):
        q, k_cache, qv, k_descale = _latent_alone(q, v_cache, qv, k, v_descale)
        names = _NAMES_OF_LATENTS
    if q_v is not None:
        names = with_q_v(names)
    plain = (
        all_off(softcap, num_splits, attention_chunk, deterministic)
        and cu_seqlens_q is cache_batch_idx is cache_leftpad is sinks is qv is q_descale is k_descale is v_descale
        is rotary_cos is rotary_sin is None
        and (cu_seqlens_k_new is None or k is None)
    )  # fmt: skip
    features = None if plain else (
        cu_seqlens_q, None, None if k is None else cu_seqlens_k_new,
        softcap or 0.0, num_splits or 0, deterministic,
        cache_batch_idx, cache_leftpad, None, sinks, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        rotary_cos, rotary_sin, True if rotary_interleaved is None else rotary_interleaved,
        None if k is None else rotary_seqlens,
    )  # fmt: skip
    return run(
        names, q, k_cache, v_cache, out, return_softmax_lse, cache_seqlens, page_table, softmax_scale, causal,
        window_size, features, k, v, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    only_qv: bool = False,
    out: torch.Tensor | None = None,
    **others,
):
    """`paged_attn.flash_attn_func` in FlashAttention 3's order. It has no `alibi_slopes` and no dropout.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); None with `only_qv`.
        k, v: (batch, seqlen_k, kv_heads, head_dim / head_dim_v).
        sinks, qv: also under the names `s_aux` and `q_v`.
        only_qv: the score is qv . v alone, as it is with a q of head_dim 0; k may be None then.
        The others: as in `paged_attn.flash_attn_with_kvcache`.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v); with `return_softmax_lse` or `return_attn_probs` also the lse,
        float32 (batch, q_heads, seqlen_q).

    Raises:
        ValueError, RuntimeError, TypeError: as `flash_attn_with_kvcache`.
    """
    if others:
        refuse_others("flash_attn_func", others)
    if s_aux is not None:
        sinks = one_of("s_aux", s_aux, "sinks", sinks)
    if q_v is not None:
        qv = one_of("qv", qv, "q_v", q_v)
    names = _NAMES_OF_KEYS
    if only_qv or _is_empty(q):
        q, k, qv, k_descale = _latent_alone(q, v, qv, None, v_descale)
        names = _NAMES_OF_LATENT_KEYS
    if q_v is not None:
        names = with_q_v(names)
    plain = (
        all_off(softcap, num_splits, attention_chunk, deterministic)
        and sinks is qv is q_descale is k_descale is v_descale is None
    )  # fmt: skip
    features = None if plain else (
        None, None, None,
        softcap or 0.0, num_splits or 0, deterministic,
        None, None, None, sinks, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        None, None, True, None,
    )  # fmt: skip
    return_lse = either(return_attn_probs, return_softmax_lse)
    return run(
        names, q, k, v, out, return_lse, None, None, softmax_scale, causal, window_size, features, is_cache=False
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    only_qv: bool = False,
    out: torch.Tensor | None = None,
    **others,
):
    """`paged_attn.flash_attn_varlen_func` in FlashAttention 3's order. It has no `alibi_slopes` and no dropout.

    Args:
        q: (total_q, q_heads, head_dim), packed by `cu_seqlens_q`; None with `only_qv`.
        k, v: (total_k, kv_heads, head_dim / head_dim_v), packed by `cu_seqlens_k`; with `page_table` pages
            (num_pages, page_size, kv_heads, ...), whose lengths `cu_seqlens_k` or `seqused_k` tell.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,). Without both, q, k and v are (batch, seqlen, heads, head_dim),
            as FlashAttention 3 has it.
        max_seqlen_q, max_seqlen_k: as in `paged_attn.flash_attn_with_kvcache`.
        seqused_q: None; there is nothing of it.
        seqused_k: int32 (batch,): how many keys of each request count, from its first.
        page_table, sinks, qv: also under the names `block_table`, `s_aux` and `q_v`.
        only_qv: the score is qv . v alone, as it is with a q of head_dim 0; k may be None then.
        The others: as in `paged_attn.flash_attn_with_kvcache`.

    Returns:
        out (total_q, q_heads, head_dim_v), or (batch, seqlen_q, ...); with `return_softmax_lse` or
        `return_attn_probs` also the lse, float32 (q_heads, total_q), or (batch, q_heads, seqlen_q).

    Raises:
        ValueError, RuntimeError, TypeError: as `flash_attn_with_kvcache`.
    """
    if others or seqused_q is not None:
        refuse_others("flash_attn_varlen_func", others | {"seqused_q": seqused_q})
    if block_table is not None:
        page_table = one_of("block_table", block_table, "page_table", page_table)
    if s_aux is not None:
        sinks = one_of("s_aux", s_aux, "sinks", sinks)
    if q_v is not None:
        qv = one_of("qv", qv, "q_v", q_v)
    names = _NAMES_OF_KEYS
    if only_qv or _is_empty(q):
        q, k, qv, k_descale = _latent_alone(q, v, qv, None, v_descale)
        names = _NAMES_OF_LATENT_KEYS
    if q_v is not None:
        names = with_q_v(names)
    if page_table is not None:
        if cu_seqlens_k is not None:
            check_cu_seqlens_k(cu_seqlens_k, q, cu_seqlens_q)
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise ValueError("seqused_k: expected int32 [batch] (or cu_seqlens_k) with page_table, got None")
            seqused_k, names = cu_seqlens_k[1:] - cu_seqlens_k[:-1], names | _LENGTHS
        cu_seqlens_k = None
    elif (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing, given = ("q", "k") if cu_seqlens_q is None else ("k", "q")
        raise ValueError(f"cu_seqlens_{missing}: expected int32 [batch + 1] beside cu_seqlens_{given}, got None")
    all_off(softcap, num_splits, attention_chunk, deterministic)  # refuses what is neither on nor off
    features = (
        cu_seqlens_q, cu_seqlens_k, None,
        softcap or 0.0, num_splits or 0, deterministic,
        None, None, None, sinks, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        None, None, True, None,
    )  # fmt: skip
    return_lse = either(return_attn_probs, return_softmax_lse)
    return run(
        names, q, k, v, out, return_lse, seqused_k, page_table, softmax_scale, causal, window_size, features, None,
        None, max_seqlen_q, max_seqlen_k, page_table is not None or cu_seqlens_k is not None,
    )  # fmt: skip


def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attn.merge_attn_states` as sgl_kernel names it, with lse as (tokens, heads).

    Args:
        v_a, v_b: (tokens, heads, head_dim_v).
        s_a, s_b: float32 (tokens, heads).
        v_merged, s_merged: written where they are given; they may be v_a and s_a.

    Returns:
        (v_merged, s_merged), of the shapes of v_a and s_a, in v_a's dtype and float32.

    Raises:
        ValueError: an argument does not fit. Nothing has been written then.
    """
    names = ("v_a", "s_a", "v_b", "s_b", "v_merged", "s_merged")
    check_all(names, (v_a, s_a, v_b, s_b), (v_merged, s_merged))
    for name, lse, values in (("s_a", s_a, v_a), ("s_b", s_b, v_b), ("s_merged", s_merged, v_a)):
        if lse is not None and (lse.shape != values.shape[:2] or values.dim() != 3):
            raise ValueError(
                f"{name}: expected (tokens, heads) for values (tokens, heads, head_dim_v), got {tuple(lse.shape)} for "
                f"{tuple(values.shape)}"
            )
    lse = None if s_merged is None else s_merged.T
    try:
        merged, lse = merge_checked(v_a, s_a.T, v_b, s_b.T, v_merged, lse)
    except ValueError as error:
        raise reworded(error, _NAMES_OF_PARTS) from None
    return merged, lse.T if s_merged is None else s_merged


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int | None = None,
    num_heads_k: int | None = None,
    headdim: int | None = None,
    cache_seqlens: torch.Tensor | None = None,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    attention_chunk: int | None = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
) -> torch.Tensor:
    """`paged_attn.get_scheduler_metadata` in FlashAttention 3's order, by SGLang's names or FlashAttention 3's.

    Args:
        cache_seqlens: int32 (batch,), whose device the result has. No other argument is looked at.

    Returns:
        An empty int32 tensor.

    Raises:
        ValueError: cache_seqlens is no tensor, or an argument was given under both of its names.
    """
    num_heads = one_of("num_heads", num_heads, "num_heads_q", num_heads_q)
    num_heads_k = one_of("num_heads_k", num_heads_k, "num_heads_kv", num_heads_kv)
    return attention.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens
    )


def _is_empty(q):
    """Whether q has a head_dim of 0. What has no head_dim at all is left to run(), which has errors for it."""
    try:
        return q.shape[-1] == 0
    except (AttributeError, IndexError, RuntimeError):
        return False


def _latent_alone(q, v_cache, qv, k, v_descale):
    """(q, k_cache, qv, k_descale) of a call whose score is qv . v: attention with the values as the keys."""
    if qv is None:
        raise ValueError("qv: expected a tensor with a q of head_dim 0 (or only_qv=True), got None")
    if not (q is None or _is_empty(q)):
        raise ValueError(f"q: expected head_dim 0 (or None) with only_qv=True, got {form_of(q)}")
    if k is not None:
        raise ValueError("k: expected None with a q of head_dim 0: append with kv_paged_write first")
    return qv, v_cache, None, v_descale
