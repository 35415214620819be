"""Attention to a cache that several ranks of torch.distributed hold together.

A long context is sharded by pages: every key lies in a page of one rank. All ranks have the same queries. Each attends
to its own keys, and the partial results (out, lse) are exchanged and merged:

    cp = kernel.integrations.context_parallel
    owner = cp.next_owner(keys_of_ranks, page_size)
    out = cp.attention(q, k_cache, v_cache, k, v, owner=owner, cache_seqlens=own_lengths, block_table=own_table)

The new tokens of one call all go to one rank, the owner. They are then the last of its keys, so its call is the causal
one; for the other ranks every key is older than every query, and their order does not matter. That is why one attention
call per rank is enough, for single tokens, pieces of prompts and both together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..attention import flash_attn_with_kvcache
from ..merge import merge_attn_states

# A rank sees keys without their positions in the whole context.
_NEED_POSITIONS = (
    "window_size", "attention_chunk", "alibi_slopes", "cache_leftpad", "rotary_cos", "rotary_sin", "rotary_seqlens",
)  # fmt: skip


def next_owner(keys_of_ranks: Sequence[int], page_size: int) -> int:
    """The rank that takes the next tokens: the one whose last page has room, else the first with the fewest keys.

    Args:
        keys_of_ranks: how many keys of a request each rank holds, the same list on every rank. Requests that get their
            tokens in one call share an owner; the longest one may stand for all.
    """
    for rank, keys in enumerate(keys_of_ranks):
        if keys % page_size:
            return rank
    return min(range(len(keys_of_ranks)), key=lambda rank: keys_of_ranks[rank])


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    owner: int,
    group: dist.ProcessGroup | None = None,
    heads: str = "all",
    s_aux: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    **others,
):
    """Causal attention to the keys of all ranks; what one device with all pages would return.

    Args:
        q, k, v: as in `flash_attn_with_kvcache`, the same on every rank, rotated already. k and v are appended to the
            owner's pages; without them the last q_len keys of each request are those of q and lie with the owner.
        k_cache, v_cache, block_table: the pages of this rank.
        cache_seqlens: int32 (batch,): how many keys of each request this rank holds, before the append.
        owner: the rank in `group` that holds the new tokens.
        group: the ranks; None: all.
        heads: "all": every rank gets every head. "own": rank r of n gets the r-th n-th of the heads, which is what a
            following product needs whose weights are sharded by heads; a rank then receives an n-th of the bytes.
        s_aux: sinks. They count once.
        others: `softmax_scale`, `softcap`, `cu_seqlens_q`, `cu_seqlens_k_new`, `max_seqlen_q`, `k_descale`,
            `v_descale`, `num_splits` and `deterministic`, as in `flash_attn_with_kvcache`.

    Returns:
        out, or (out, lse) with `return_softmax_lse`. With heads="all" they are bitwise the same on every rank.

    Raises:
        ValueError: an argument that depends on where a key stands in the context (windows, ALiBi, rotary tables, ...),
            or does not fit.
    """
    for name in _NEED_POSITIONS:
        if others.get(name) is not None:
            raise ValueError(f"{name}: expected None (a rank does not know where its keys stand), got {others[name]!r}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q_heads, head_dim_v = q.shape[-2], v_cache.shape[-1]
    if not 0 <= owner < ranks:
        raise ValueError(f"owner: expected a rank from 0 to {ranks - 1}, got {owner}")
    if heads not in ("all", "own"):
        raise ValueError(f"heads: expected 'all' or 'own', got {heads!r}")
    if heads == "own" and q_heads % ranks:
        raise ValueError(f"heads: expected a number of q_heads that {ranks} ranks divide for 'own', got {q_heads}")

    # One message instead of two: the lse of a token and head follows its values.
    tail = 4 // q.element_size()
    message = q.new_empty((*q.shape[:-1], head_dim_v + tail))
    is_owner = rank == owner
    news = (k, v) if is_owner else (None, None)
    if not is_owner:
        others.pop("cu_seqlens_k_new", None)
    _, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *news, cache_seqlens=cache_seqlens, block_table=block_table, causal=is_owner,
        s_aux=s_aux if is_owner else None, out=message[..., :head_dim_v], return_softmax_lse=True, **others,
    )  # fmt: skip
    message[..., head_dim_v:] = lse.transpose(-1, -2).unsqueeze(-1).contiguous().view(q.dtype)
    received = _gather(message, ranks, group) if heads == "all" else _trade_heads(message, ranks, group)
    out, lse = _merge(received[..., :head_dim_v].float(), _lse_of(received[..., head_dim_v:]))
    out = out.to(message.dtype)
    return (out, lse) if return_softmax_lse else out


def _merge(out, lse):
    """The results (ranks, ...) of all ranks as one: neighbours first, in the same order everywhere, so that every rank
    gets the same bits."""
    while len(out) > 1:
        pairs = len(out) // 2 * 2
        merged = merge_attn_states(out[0:pairs:2], lse[0:pairs:2], out[1:pairs:2], lse[1:pairs:2])
        out, lse = (torch.cat([x, rest[pairs:]]) for x, rest in zip(merged, (out, lse), strict=True))
    return out[0], lse[0]


def _gather(message, ranks, group):
    """The messages of all ranks."""
    received = message.new_empty((ranks, *message.shape))
    # torch 2.13 gave it the second name and warns of the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received.view(-1), message.view(-1), group=group)
    return received


def _trade_heads(message, ranks, group):
    """This rank's heads out of the messages of all ranks."""
    sent = message.unflatten(-2, (ranks, -1)).movedim(-3, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received


def _lse_of(tail):
    """(ranks, ..., tokens, heads, elements of one float32) -> (ranks, ..., heads, tokens)"""
    return tail.contiguous().view(torch.float32).squeeze(-1).transpose(-1, -2)
