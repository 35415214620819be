"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from ._call import refuse_grad
from ._ops import ops

_write = ops.kv_paged_write.default


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
        slot_mapping: int64 or int32 (total_new,); a negative entry skips its token. It may be shorter than k and v
            of (total_new, ...): the tokens past its end are not written.
        k_descale, v_descale: float32 (batch, kv_heads), either may be 1.

    Raises:
        ValueError, RuntimeError: an argument does not fit, or a slot lies outside the cache. Nothing has been written
            then.
    """
    if torch.is_grad_enabled():
        refuse_grad("k v k_cache v_cache", k, v, k_cache, v_cache)
    if k.dim() < 3:
        raise ValueError(f"k: expected a tensor of 3 or 4 dimensions, got shape {tuple(k.shape)}")
    if isinstance(cache_seqlens, int):
        batch = k.shape[0] if cu_seqlens_k_new is None else cu_seqlens_k_new.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k.device)
    if slot_mapping is not None and slot_mapping.dtype == torch.int32:
        slot_mapping = slot_mapping.long()
    _write(
        k, v, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_k_new=cu_seqlens_k_new,
        slot_mapping=slot_mapping, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
