"""The attention functions, under the names and in the argument order of flash-attn."""

from __future__ import annotations

import torch

from ._call import all_off, check_cu_seqlens_k, either, form_of, one_of, refuse_dropout, refuse_others, run, with_q_v


def _names(**others):
    """How errors name arguments, for a call that used the second names page_table and sinks or not: [table, sink]."""
    return {
        (table, sink): {"block_table": "page_table" if table else "block_table", "s_aux": "sinks" if sink else "s_aux"}
        | others
        for table in (False, True)
        for sink in (False, True)
    }


_NAMES = _names()
_NAMES_OF_KEYS = _names(k_cache="k", v_cache="v", batch_cache="batch", seqlen_cache="seqlen_k")
_NAMES_OF_PACKED = _names(k_cache="k", v_cache="v", cache_seqlens="seqused_k")
_NAMES_OF_LENGTHS = _names(k_cache="k", v_cache="v", cache_seqlens="(cu_seqlens_k[1:] - cu_seqlens_k[:-1])")

# The tuples `features` below have the values of _call.FEATURES, in its order. Their lines, in every function:
#     cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new
#     softcap, num_splits, deterministic
#     cache_batch_idx, cache_leftpad, alibi_slopes, s_aux, attention_chunk
#     qv, q_descale, k_descale, v_descale
#     rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    ver: int | None = None,
    **others,
):
    """Attends `q` to a cache, after appending `k` and `v` to it where they are given.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), or (total_q, q_heads, head_dim) with `cu_seqlens_q`.
            float32, bfloat16 or float16, or 8-bit with an 8-bit cache (out is bfloat16 then, and k and v have the
            cache's dtype and are stored as they are). q_heads is a multiple of kv_heads.
        k_cache: (num_pages, page_size, kv_heads, head_dim) with `block_table`, else
            (batch_cache, seqlen_cache, kv_heads, head_dim). In q's dtype, float8_e4m3fn or float8_e5m2.
        v_cache: the same with head_dim_v. head_dim and head_dim_v are 1 to 256 each, or (512, 512), or
            (576, 512), or (64, 512) with `qv`.
        k, v: (batch, seqlen_new, kv_heads, head_dim / head_dim_v), or (total_new, ...) with
            `cu_seqlens_k_new`: written into the cache from position `cache_seqlens` on. They change the cache. Without
            them `cu_seqlens_k_new` and `rotary_seqlens` ask for nothing.
        rotary_cos, rotary_sin: (rotary_len, rotary_dim / 2), in q's dtype. Rotates `k` at its position, and `q` at
            the same positions when causal, windowed or in chunks, else all of q at `cache_seqlens`.
        cache_seqlens: int32 (batch,) or an int: the length before `k` and `v` are appended. An entry of minus the
            number of new tokens marks a padded entry: nothing is written, and its output is 0.
        cache_batch_idx: int32 (batch,): the row of the contiguous cache, or of `block_table`, of each entry.
        cache_leftpad: int32 (batch,): the first keys that do not exist; counted inside the length.
        block_table: int32 (batch, max_pages): entries past the pages that hold keys are never read.
        softmax_scale: default head_dim ** -0.5, with `qv` (head_dim + head_dim_v) ** -0.5.
        causal: a token sees no key after its own position (bottom-right aligned).
        window_size: (left, right) keys seen around the position; -1 or None is unlimited.
        softcap: 0 is off.
        rotary_interleaved: pairs (0, 1), (2, 3), ... if True, else i with i + rotary_dim / 2.
        alibi_slopes: float32 (q_heads,) or (batch, q_heads).
        num_splits: how many splits the keys of a request are cut into; 0 chooses.
        return_softmax_lse: return (out, softmax_lse).
        page_table: another name of `block_table`.
        cu_seqlens_q, cu_seqlens_k_new: int32 (batch + 1,): where the tokens of each request begin.
        max_seqlen_q: a hint with `cu_seqlens_q`: an upper bound of q_len; None for none. One that is too small is an
            error where lengths are checked (on the CPU, or with PAGED_ATTN_CHECK=1).
        max_seqlen_k: a hint: an upper bound of the keys of a request, new ones among them; None for none. It is for
            tables that are wider than the requests are long. Any value gives the same result, a wrong one slower.
        rotary_seqlens: int32 (batch,): rotary positions start here instead of at `cache_seqlens`.
        qv: like q with head_dim_v: the score is q . k + qv . v (multi-head latent attention). `q_v` is another name.
        q_descale, k_descale, v_descale: float32 (batch, kv_heads), either may be 1: value = stored * descale. Ignored
            with a tensor of more than 8 bits.
        attention_chunk: a token sees only keys of its own chunk of this many positions, counted from the first key
            that exists (`cache_leftpad`); 0 is off.
        s_aux: (q_heads,): one more logit per head, without a value. `sinks` is another name of it.
        scheduler_metadata: what get_scheduler_metadata() returned; never changes a result.
        pack_gqa, sm_margin, ver: hints of FlashAttention 3, accepted; they never change a result.
        deterministic: the result of a request is bitwise the same whatever else is in the batch.
        out: like q with head_dim_v, in q's dtype (bfloat16 for an 8-bit q): written and returned.
        others: keywords of other kernels (score_mod, fa_version, ...), accepted where they ask for nothing.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) or (total_q, ...), in q's dtype (bfloat16 for an 8-bit q); with
        `return_softmax_lse` also softmax_lse, float32 (batch, q_heads, seqlen_q) or, with `cu_seqlens_q`,
        (q_heads, total_q), natural log, the sink included. A token that sees no key has out 0 and lse -inf (with a
        sink: the sink).

    Raises:
        ValueError, RuntimeError: an argument does not fit; the message names it, what was expected and what was given.
            Nothing has been written then.
    """
    if others:
        refuse_others("flash_attn_with_kvcache", others)
    table = block_table if page_table is None else one_of("block_table", block_table, "page_table", page_table)
    sink = s_aux if sinks is None else one_of("s_aux", s_aux, "sinks", sinks)
    names = _NAMES[page_table is not None, sinks is not None]
    if q_v is not None:
        qv, names = one_of("qv", qv, "q_v", q_v), with_q_v(names)
    plain = (
        all_off(softcap, num_splits, attention_chunk, deterministic)
        and cu_seqlens_q is cache_batch_idx is cache_leftpad is alibi_slopes is sink is qv is q_descale is k_descale
        is v_descale is rotary_cos is rotary_sin is None
        and (cu_seqlens_k_new is None or k is None)
    )  # fmt: skip
    features = None if plain else (
        cu_seqlens_q, None, None if k is None else cu_seqlens_k_new,
        softcap or 0.0, num_splits or 0, deterministic,
        cache_batch_idx, cache_leftpad, alibi_slopes, sink, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        rotary_cos, rotary_sin, True if rotary_interleaved is None else rotary_interleaved,
        None if k is None else rotary_seqlens,
    )  # fmt: skip
    return run(
        names, q, k_cache, v_cache, out, return_softmax_lse, cache_seqlens, table, softmax_scale, causal, window_size,
        features, k, v, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    **others,
):
    """Attention of q (batch, seqlen_q, q_heads, head_dim) to k, v (batch, seqlen_k, kv_heads, head_dim / head_dim_v).

    Forward only. The arguments mean what they mean in `flash_attn_with_kvcache`. Returns out (batch, seqlen_q, q_heads,
    head_dim_v); with `return_softmax_lse` or `return_attn_probs` also the lse (batch, q_heads, seqlen_q).

    Raises:
        ValueError, RuntimeError: dropout_p > 0, or as `flash_attn_with_kvcache`.
    """
    if others:
        refuse_others("flash_attn_func", others)
    refuse_dropout(dropout_p)
    sink = s_aux if sinks is None else one_of("s_aux", s_aux, "sinks", sinks)
    names = _NAMES_OF_KEYS[False, sinks is not None]
    if q_v is not None:
        qv, names = one_of("qv", qv, "q_v", q_v), with_q_v(names)
    plain = (
        all_off(softcap, num_splits, attention_chunk, deterministic)
        and alibi_slopes is sink is qv is q_descale is k_descale is v_descale is None
    )  # fmt: skip
    features = None if plain else (
        None, None, None,
        softcap or 0.0, num_splits or 0, deterministic,
        None, None, alibi_slopes, sink, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        None, None, True, None,
    )  # fmt: skip
    return_lse = either(return_attn_probs, return_softmax_lse)
    return run(
        names, q, k, v, out, return_lse, None, None, softmax_scale, causal, window_size, features, is_cache=False
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **others,
):
    """Attention of requests of different lengths, packed one after the other.

    Args:
        q: (total_q, q_heads, head_dim); request b has the tokens [cu_seqlens_q[b], cu_seqlens_q[b + 1]). Tokens past
            the last entry belong to no request: their output is 0.
        k, v: (total_k, kv_heads, head_dim / head_dim_v), packed by `cu_seqlens_k`; with `block_table` pages
            (num_pages, page_size, kv_heads, ...), and `cu_seqlens_k` tells only the lengths.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,). `cu_seqlens_k` may be None with `block_table` and `seqused_k`.
        max_seqlen_q, max_seqlen_k: as in `flash_attn_with_kvcache`.
        block_table: int32 (batch, max_pages); `page_table` is another name of it.
        seqused_k: int32 (batch,): how many keys of each request count, from its first. With `block_table` it replaces
            the lengths of `cu_seqlens_k`, of which only dtype and shape are looked at then.
        The others: as in `flash_attn_with_kvcache`.

    Returns:
        out (total_q, q_heads, head_dim_v); with `return_softmax_lse` or `return_attn_probs` also the lse
        (q_heads, total_q).

    Raises:
        ValueError, RuntimeError: dropout_p > 0, or as `flash_attn_with_kvcache`.
    """
    if others:
        refuse_others("flash_attn_varlen_func", others)
    refuse_dropout(dropout_p)
    table = block_table if page_table is None else one_of("block_table", block_table, "page_table", page_table)
    sink = s_aux if sinks is None else one_of("s_aux", s_aux, "sinks", sinks)
    names = _NAMES_OF_PACKED if seqused_k is not None else _NAMES_OF_LENGTHS
    names = names[page_table is not None, sinks is not None]
    if q_v is not None:
        qv, names = one_of("qv", qv, "q_v", q_v), with_q_v(names)
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q: expected int32 [batch + 1], got None")
    if cu_seqlens_k is None and (table is None or seqused_k is None):
        raise ValueError("cu_seqlens_k: expected int32 [batch + 1] (or block_table and seqused_k), got None")
    lengths = seqused_k
    if table is not None and cu_seqlens_k is not None:
        check_cu_seqlens_k(cu_seqlens_k, q, cu_seqlens_q)
        if seqused_k is None:
            lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    all_off(softcap, num_splits, attention_chunk, deterministic)  # refuses what is neither on nor off
    features = (
        cu_seqlens_q, cu_seqlens_k if table is None else None, None,
        softcap or 0.0, num_splits or 0, deterministic,
        None, None, alibi_slopes, sink, attention_chunk or 0,
        qv, q_descale, k_descale, v_descale,
        None, None, True, None,
    )  # fmt: skip
    return_lse = either(return_attn_probs, return_softmax_lse)
    return run(
        names, q, k, v, out, return_lse, lengths, table, softmax_scale, causal, window_size, features, None, None,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What FlashAttention 3's callers pass as `scheduler_metadata`; the arguments are FlashAttention 3's.

    A call of this package plans by itself (on a GPU the thread blocks do, from the lengths). So there is nothing to
    prepare: no argument changes anything, and the result is an empty int32 tensor on the device of `cache_seqlens`.

    Raises:
        ValueError: cache_seqlens is no tensor.
    """
    if not isinstance(cache_seqlens, torch.Tensor):
        raise ValueError(f"cache_seqlens: expected int32 [batch], got {form_of(cache_seqlens)}")
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
