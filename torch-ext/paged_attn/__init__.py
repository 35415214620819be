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

import torch

from . import _fakes, integrations  # noqa: F401  (registers the fakes)
from ._ops import ops
from .cache import empty_paged_cache

__all__ = [
    "cpu_isa",
    "empty_paged_cache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "kv_paged_write",
    "merge_attn_states",
]

_attend = ops.flash_attn_with_kvcache.default
_attend_plainly = ops.flash_attn_with_kvcache_plain.default
_append_and_attend = ops.flash_attn_with_kvcache_append.default
_write = ops.kv_paged_write.default

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
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
):
    """Attends `q` to a cache, after appending `k` and `v` to it where they are given.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), or (total_q, q_heads, head_dim) with `cu_seqlens_q`.
            float32, bfloat16 or float16. q_heads is a multiple of kv_heads.
        k_cache: (num_pages, page_size, kv_heads, head_dim) with `block_table`, else
            (batch_cache, seqlen_cache, kv_heads, head_dim). In q's dtype, float8_e4m3fn or float8_e5m2.
        v_cache: the same with head_dim_v. head_dim and head_dim_v are 1 to 256 each, or (576, 512), or
            (64, 512) with `qv`.
        k, v: (batch, seqlen_new, kv_heads, head_dim / head_dim_v), or (total_new, ...) with
            `cu_seqlens_k_new`: written into the cache from position `cache_seqlens` on. They change the cache.
        rotary_cos, rotary_sin: (rotary_len, rotary_dim / 2), in q's dtype. Rotates `k` at its position, and `q` at
            the same positions when causal or windowed, else all of q at `cache_seqlens`.
        cache_seqlens: int32 (batch,) or an int: the length before `k` and `v` are appended. An entry of minus the
            number of new tokens marks a padded entry: nothing is written, and its output is 0.
        cache_batch_idx: int32 (batch,): the row of the contiguous cache, or of `block_table`, of each entry.
        cache_leftpad: int32 (batch,): the first keys that do not exist; counted inside the length.
        block_table: int32 (batch, max_pages): entries past the pages that hold keys are never read.
        softmax_scale: default head_dim ** -0.5, with `qv` (head_dim + head_dim_v) ** -0.5.
        causal: a token sees no key after its own position (bottom-right aligned).
        window_size: (left, right) keys seen around the position; -1 is unlimited.
        softcap: 0 is off.
        rotary_interleaved: pairs (0, 1), (2, 3), ... if True, else i with i + rotary_dim / 2.
        alibi_slopes: float32 (q_heads,) or (batch, q_heads).
        num_splits: into how many parts the keys of a request are cut; 0 chooses.
        return_softmax_lse: return (out, softmax_lse).
        page_table: another name of `block_table`.
        cu_seqlens_q, cu_seqlens_k_new: int32 (batch + 1,): where the tokens of each request begin.
        max_seqlen_q: an upper bound of q_len with `cu_seqlens_q`.
        rotary_seqlens: int32 (batch,): rotary positions start here instead of at `cache_seqlens`.
        qv: like q with head_dim_v: the score is q . k + qv . v (multi-head latent attention).
        q_descale, k_descale, v_descale: float32 (batch, kv_heads), either may be 1: value = stored * descale.
        attention_chunk: a token sees only keys of its own chunk of this many positions; 0 is off.
        s_aux: (q_heads,): one more logit per head, without a value. `sinks` is another name of it.
        scheduler_metadata: what get_scheduler_metadata() returned; never changes a result.
        pack_gqa, sm_margin, ver: hints of FlashAttention 3, accepted; they never change a result.
        deterministic: the result of a request is bitwise the same whatever else is in the batch.
        out: like q with head_dim_v, in q's dtype: written and returned.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) or (total_q, ...), in q's dtype; with `return_softmax_lse` also
        softmax_lse, float32 (batch, q_heads, seqlen_q) or (q_heads, total_q), natural log, the sink included. A token
        that sees no key has out 0 and lse -inf (with a sink: the sink).

    Raises:
        ValueError, RuntimeError: an argument does not fit; the message names it, what was expected and what was given.
            Nothing has been written then.
    """
    # A decode step of a short context feels every call and every argument: a tenth of the time on the host.
    if page_table is not None:
        block_table = _one_of("block_table", block_table, "page_table", page_table)
    if sinks is not None:
        s_aux = _one_of("s_aux", s_aux, "sinks", sinks)
    plain = (
        cu_seqlens_q is cu_seqlens_k_new is cache_batch_idx is cache_leftpad is alibi_slopes is s_aux is qv is q_descale
        is k_descale is v_descale is rotary_cos is rotary_sin is rotary_seqlens is None
        and softcap == 0.0 and num_splits == attention_chunk == 0 and not deterministic
    )  # fmt: skip
    rest = None if plain else (
        cu_seqlens_q, None, cu_seqlens_k_new, softcap, num_splits, deterministic, cache_batch_idx, cache_leftpad,
        alibi_slopes, s_aux, attention_chunk, qv, q_descale, k_descale, v_descale, rotary_cos, rotary_sin,
        rotary_interleaved, rotary_seqlens,
    )  # fmt: skip
    return _run(
        q, k_cache, v_cache, out, return_softmax_lse, cache_seqlens, block_table, softmax_scale, causal, window_size,
        rest, k, v, qv, s_aux, cu_seqlens_q, max_seqlen_q,
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
):
    """Attention of q (batch, seqlen_q, q_heads, head_dim) to k, v (batch, seqlen_k, kv_heads, head_dim / head_dim_v).

    Forward only. The arguments mean what they mean in `flash_attn_with_kvcache`. Returns out (batch, seqlen_q, q_heads,
    head_dim_v); with `return_softmax_lse` or `return_attn_probs` also the lse (batch, q_heads, seqlen_q).

    Raises:
        ValueError, RuntimeError: dropout_p > 0, or as `flash_attn_with_kvcache`.
    """
    _refuse_dropout(dropout_p)
    s_aux = _one_of("s_aux", s_aux, "sinks", sinks)
    plain = (
        alibi_slopes is s_aux is qv is q_descale is k_descale is v_descale is None
        and softcap == 0.0 and num_splits == attention_chunk == 0 and not deterministic
    )  # fmt: skip
    rest = None if plain else (
        None, None, None, softcap, num_splits, deterministic, None, None, alibi_slopes, s_aux, attention_chunk, qv,
        q_descale, k_descale, v_descale, None, None, True, None,
    )  # fmt: skip
    return_lse = return_softmax_lse or return_attn_probs
    return _run(
        q, k, v, out, return_lse, None, None, softmax_scale, causal, window_size, rest, qv=qv, s_aux=s_aux
    )  # fmt: skip


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
):
    """Attention of requests of different lengths, packed one after the other.

    Args:
        q: (total_q, q_heads, head_dim); request b has the tokens [cu_seqlens_q[b], cu_seqlens_q[b + 1]). Tokens past
            the last entry belong to no request: their output is 0.
        k, v: (total_k, kv_heads, head_dim / head_dim_v), packed by `cu_seqlens_k`; with `block_table` pages
            (num_pages, page_size, kv_heads, ...), and `cu_seqlens_k` tells only the lengths.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,). `cu_seqlens_k` may be None with `block_table` and `seqused_k`.
        max_seqlen_q, max_seqlen_k: upper bounds; they never change a result.
        block_table: int32 (batch, max_pages); `page_table` is another name of it.
        seqused_k: int32 (batch,): how many keys of each request count, from its first.
        The others: as in `flash_attn_with_kvcache`.

    Returns:
        out (total_q, q_heads, head_dim_v); with `return_softmax_lse` or `return_attn_probs` also the lse
        (q_heads, total_q).

    Raises:
        ValueError, RuntimeError: dropout_p > 0, or as `flash_attn_with_kvcache`.
    """
    _refuse_dropout(dropout_p)
    block_table = _one_of("block_table", block_table, "page_table", page_table)
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q: expected int32 [batch + 1], got None")
    if cu_seqlens_k is None and (block_table is None or seqused_k is None):
        raise ValueError("cu_seqlens_k: expected int32 [batch + 1] (or block_table and seqused_k), got None")
    if block_table is not None:
        if seqused_k is None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    s_aux = _one_of("s_aux", s_aux, "sinks", sinks)
    rest = (
        cu_seqlens_q, cu_seqlens_k, None, softcap, num_splits, deterministic, None, None, alibi_slopes, s_aux,
        attention_chunk, qv, q_descale, k_descale, v_descale, None, None, True, None,
    )  # fmt: skip
    return_lse = return_softmax_lse or return_attn_probs
    return _run(
        q, k, v, out, return_lse, seqused_k, block_table, softmax_scale, causal, window_size, rest, qv=qv, s_aux=s_aux,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip


def kv_paged_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    *,
    cu_seqlens_k_new: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> None:
    """Writes new keys and values into a paged cache; only their slots change.

    Token t of request b goes to position p = cache_seqlens[b] + t: page block_table[b, p // page_size], slot
    p % page_size. With `slot_mapping` it goes to slot s % page_size of page s // page_size, s its entry, instead.

    Args:
        k, v: (batch, seqlen_new, kv_heads, head_dim / head_dim_v), or (total_new, ...) with `cu_seqlens_k_new` or
            `slot_mapping`. float32, bfloat16 or float16.
        k_cache, v_cache: (num_pages, page_size, kv_heads, ...), in k's dtype, float8_e4m3fn or float8_e5m2. 8-bit
            caches store value / descale, saturated.
        block_table: int32 (batch, max_pages). None with `slot_mapping`.
        cache_seqlens: int32 (batch,) or an int: the length before the write. None with `slot_mapping`.
        cu_seqlens_k_new: int32 (batch + 1,).
        slot_mapping: int64 (total_new,); a negative entry skips its token.
        k_descale, v_descale: float32 (batch, kv_heads), either may be 1.

    Raises:
        ValueError, RuntimeError: an argument does not fit, or a slot lies outside the cache. Nothing has been written
            then.
    """
    if torch.is_grad_enabled():
        _refuse_grad("k v k_cache v_cache", k, v, k_cache, v_cache)
    if k.dim() < 3:
        raise ValueError(f"k: expected a tensor of 3 or 4 dimensions, got shape {tuple(k.shape)}")
    if isinstance(cache_seqlens, int):
        batch = k.shape[0] if cu_seqlens_k_new is None else cu_seqlens_k_new.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k.device)
    _write(
        k, v, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_k_new=cu_seqlens_k_new,
        slot_mapping=slot_mapping, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the results of the same queries over two disjoint sets of keys.

    Args:
        out_a, out_b: (batch, seqlen_q, q_heads, head_dim_v) or (total_q, q_heads, head_dim_v).
        lse_a, lse_b: float32 (batch, q_heads, seqlen_q) or (q_heads, total_q), as the attention functions return them.
            A sink belongs to one of the two only.

    Returns:
        (out, lse) of the union, in out_a's dtype and float32. With w = exp(lse): out = (w_a out_a + w_b out_b) /
        (w_a + w_b) and lse = log(w_a + w_b), computed relative to the larger lse.
    """
    for name, t in (("out_b", out_b), ("lse_b", lse_b)):
        expected = out_a.shape if name == "out_b" else lse_a.shape
        if t.shape != expected:
            raise ValueError(f"{name}: expected shape {tuple(expected)} like {name[:-1]}a, got {tuple(t.shape)}")
    if lse_a.transpose(-1, -2).shape != out_a.shape[:-1]:
        raise ValueError(
            f"lse_a: expected (batch, q_heads, seqlen_q) or (q_heads, total_q) for out_a {tuple(out_a.shape)}, "
            f"got {tuple(lse_a.shape)}"
        )
    larger = torch.maximum(lse_a, lse_b)
    # The comparison covers two empty parts, where the difference of two -inf would be NaN.
    weight_a = torch.where(lse_a == larger, 1.0, torch.exp(lse_a - larger))
    weight_b = torch.where(lse_b == larger, 1.0, torch.exp(lse_b - larger))
    total = weight_a + weight_b
    share_a = (weight_a / total).transpose(-1, -2).unsqueeze(-1)
    share_b = (weight_b / total).transpose(-1, -2).unsqueeze(-1)
    out = (out_a.float() * share_a + out_b.float() * share_b).to(out_a.dtype)
    return out, larger + torch.log(total)


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
    """A plan that the layers of one step share, for `scheduler_metadata`; the arguments are FlashAttention 3's.

    A call plans by itself, in less time than it takes to pass a plan (on a GPU the thread blocks do, from the lengths),
    so the result is an empty int32 tensor.
    """
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def cpu_isa() -> str:
    """The instruction set in use on the CPU: "avx512_bf16", "avx512", "avx2" or "portable".

    It is the first of these that the processor has, or the one that PAGED_ATTN_CPU_ISA names, read at the first call.

    Raises:
        RuntimeError: PAGED_ATTN_CPU_ISA names none that this processor runs.
    """
    return ops.instruction_set()


# What the operators take after window_left and max_seqlen_q when nothing of it is given.
_NO_REST = (None,) * 3 + (0.0, 0, False) + (None,) * 4 + (0,) + (None,) * 6 + (True, None)


def _run(
    q, k_cache, v_cache, out, return_lse, cache_seqlens, block_table, softmax_scale, causal, window_size, rest,
    k=None, v=None, qv=None, s_aux=None, cu_seqlens_q=None, max_seqlen_q=None,
):  # fmt: skip
    """Fills defaults, allocates the results and calls the operator; every check of a tensor is there. `rest`: the
    operator's last arguments, as in _NO_REST; None where all have their defaults. Those of them that are looked at
    here come by name too."""
    if torch.is_grad_enabled():
        _refuse_grad("q k_cache v_cache k v qv s_aux", q, k_cache, v_cache, k, v, qv, s_aux)
    q_shape, v_shape = q.shape, v_cache.shape
    if len(q_shape) < 3 or len(v_shape) < 3:
        name, shape = ("q", q_shape) if len(q_shape) < 3 else ("v_cache", v_shape)
        raise ValueError(f"{name}: expected a tensor of 3 or 4 dimensions, got shape {tuple(shape)}")
    head_dim, head_dim_v = q_shape[-1], v_shape[-1]
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if softmax_scale is None:
        softmax_scale = (head_dim if qv is None else head_dim + head_dim_v) ** -0.5
    window_left, window_right = window_size
    if causal:
        window_right = 0
    if out is None:
        fp8 = q.dtype in _FP8
        if head_dim == head_dim_v and not fp8:
            # Naming the memory format takes a fifth of the time.
            if q.is_contiguous():
                out = torch.empty_like(q)
            else:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            dtype = torch.bfloat16 if fp8 else q.dtype
            out = torch.empty((*q.shape[:-1], head_dim_v), dtype=dtype, device=q.device)
    lse = None
    if return_lse:
        # (batch, seqlen_q, q_heads) -> (batch, q_heads, seqlen_q), or (total_q, q_heads) -> (q_heads, total_q)
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    # What the dispatcher does per argument is felt too, most of all with keywords: arguments go by position, a plain
    # call has an operator of its own, and a plain append ends after `v`.
    plain = rest is None and window_left == -1
    append = k is not None or v is not None
    if plain and not append:
        _attend_plainly(q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right)
    elif plain:
        _append_and_attend(q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v)
    else:
        operator = _append_and_attend if append else _attend
        # Only a bound: a tensor is not read, for that would wait for the device.
        max_seqlen_q = max_seqlen_q if isinstance(max_seqlen_q, int) else q_shape[0]
        operator(
            q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v, window_left,
            max_seqlen_q, *(_NO_REST if rest is None else rest),
        )  # fmt: skip
    return (out, lse) if return_lse else out


def _one_of(name, value, other_name, other):
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are two names of one argument: expected one of them, got both")
    return other if value is None else value


def _refuse_dropout(dropout_p):
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: expected 0.0 (forward only, for inference), got {dropout_p}")


def _refuse_grad(names, *tensors):
    for i, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{names.split()[i]}: expected a tensor that asks for no gradient (forward only, for inference), "
                "got requires_grad=True; use torch.no_grad() or detach()"
            )
