"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ._call import (
    FAILURES,
    batch_of,
    check_int32,
    clearer,
    count_writes,
    is_int,
    lengths_of,
    refuse_grad,
    refuse_negations,
    scale_of,
    types_of,
)
from ._ops import ops

_write = ops.kv_paged_write.default
_TYPES = types_of(_write)

_NUMBERS = ("k", "v", "k_cache", "v_cache", "k_descale", "v_descale")  # the tensors that could require grad


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
        block_table: int32 (batch, max_pages). With `slot_mapping` it may be None, and only its form is looked at.
        cache_seqlens: int32 (batch,) or an int: the length before the write. With `slot_mapping` as `block_table`.
        cu_seqlens_k_new: int32 (batch + 1,).
        slot_mapping: int64 or int32 (total_new,); a negative entry skips its token. It may be shorter than k and v
            of (total_new, ...): the tokens past its end are not written.
        k_descale, v_descale: float32 (batch, kv_heads), either may be 1. Ignored with a cache of more than 8 bits.

    Raises:
        ValueError, RuntimeError: an argument does not fit, or a slot lies outside the cache. Nothing has been written
            then.
    """
    try:
        if not (k_descale is v_descale is None):
            k_descale, v_descale = scale_of(k_descale, k_cache), scale_of(v_descale, v_cache)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_grad(_NUMBERS, (k, v, k_cache, v_cache, k_descale, v_descale))
        if k.dim() < 3:
            raise ValueError(f"k: expected a tensor of 3 or 4 dimensions, got shape {tuple(k.shape)}")
        if slot_mapping is None:
            if is_int(cache_seqlens):
                batch = k.shape[0] if cu_seqlens_k_new is None else batch_of("cu_seqlens_k_new", cu_seqlens_k_new)
                cache_seqlens = lengths_of(cache_seqlens, batch, k.device)
        else:
            if slot_mapping.dtype == torch.int32:
                slot_mapping = slot_mapping.long()
            if block_table is not None or cache_seqlens is not None:
                _check_positions(k, block_table, cache_seqlens, cu_seqlens_k_new)
                block_table = cache_seqlens = None
        compiles = is_compiling()
        if not compiles:
            refuse_negations({"k_cache": k_cache, "v_cache": v_cache})
        _write(
            k, v, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_k_new=cu_seqlens_k_new,
            slot_mapping=slot_mapping, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        if not compiles:
            count_writes((k_cache, v_cache))
    except FAILURES as error:
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
        given |= {"cache_seqlens": cache_seqlens, "cu_seqlens_k_new": cu_seqlens_k_new, "slot_mapping": slot_mapping}
        given |= {"k_descale": k_descale, "v_descale": v_descale}
        raise clearer(error, _TYPES, given) from None


def _check_positions(k, block_table, cache_seqlens, cu_seqlens_k_new):
    """The form of what `slot_mapping` replaces: the operator does not get it, yet a wrong argument is an error."""
    batch, origin = None, "k"
    if cu_seqlens_k_new is not None:
        batch, origin = batch_of("cu_seqlens_k_new", cu_seqlens_k_new), "cu_seqlens_k_new"
    elif k.dim() == 4:
        batch = k.shape[0]
    elif isinstance(block_table, torch.Tensor) and block_table.dim() == 2:
        # Nothing tells the requests of a flat k apart, so the table may be of any number of them.
        batch, origin = block_table.shape[0], "block_table"
    size = "batch" if batch is None else f"batch = {batch} (from {origin})"
    if block_table is not None:
        check_int32("block_table", block_table, f"{size}, max_pages", (batch, None), "k", k)
    if cache_seqlens is not None and not is_int(cache_seqlens):
        check_int32("cache_seqlens", cache_seqlens, size, (batch,), "k", k)
