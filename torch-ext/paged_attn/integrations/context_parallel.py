"""Attention to a cache that several ranks of torch.distributed hold together.

A long context is sharded by pages: every key lies in a page of one rank. All ranks have the same queries. Each attends
to its own keys, and the partial results (out, lse) are exchanged and merged:

    cp = kernel.integrations.context_parallel
    owner = cp.next_owner(keys_of_ranks, page_size)
    out = cp.attention(q, k_cache, v_cache, k, v, owner=owner, cache_seqlens=own_lengths, block_table=own_table)

`start` and `finish` are its two halves, for work that fits between them.

The results travel by a collective of torch.distributed. GPUs of one host can write them into each other's memory
instead, and one kernel does all, exchange and merge: `attention(..., peers=peers)` with

    peers = cp.Peers(q_heads=32, head_dim_v=128, dtype=torch.bfloat16)  # once, on all ranks together

The new tokens of one call all go to one rank, the owner. They are then the last of its keys, so its call is the causal
one; for the other ranks every key is older than every query, and their order does not matter. That is why one attention
call per rank is enough, for single tokens, pieces of prompts and both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .._call import fits, one_of, result_dtype, shown
from .._ops import ops
from ..attention import flash_attn_with_kvcache
from .peers import Peers

# A rank sees keys without their positions in the whole context.
_NEED_POSITIONS = (
    "window_size", "attention_chunk", "alibi_slopes", "cache_leftpad", "rotary_cos", "rotary_sin", "rotary_seqlens",
)  # fmt: skip
# Values of these that ask for nothing; causal attention has no keys on the right anyway.
_NEUTRAL = {"window_size": ((-1, -1), (-1, 0)), "attention_chunk": (0,)}


def next_owner(keys_of_ranks: Sequence[int], page_size: int) -> int:
    """The rank that takes the next tokens: the one whose last page has room, else the first with the fewest keys.

    Args:
        keys_of_ranks: how many keys of a request each rank holds, the same list on every rank. Requests that get their
            tokens in one call share an owner; the longest one may stand for all.

    Raises:
        ValueError: there are no ranks.
    """
    if not keys_of_ranks:
        raise ValueError(f"keys_of_ranks: expected a number for each rank, got {keys_of_ranks!r}")
    for rank, keys in enumerate(keys_of_ranks):
        if keys % page_size:
            return rank
    return min(range(len(keys_of_ranks)), key=lambda rank: keys_of_ranks[rank])


@dataclass
class Exchange:
    """Messages of the ranks that are on their way; `finish` waits for them and merges."""

    received: torch.Tensor  # (ranks, ..., tokens, heads, width)
    head_dim_v: int
    work: dist.Work


@dataclass
class PeerExchange:
    """The result of this rank; `finish` sends it, waits for those of the others and merges."""

    out: torch.Tensor  # (..., tokens, heads, head_dim_v)
    lse: torch.Tensor  # (..., heads, tokens)
    peers: Peers
    heads: int  # that this rank gets


def attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments, **keywords):
    """Causal attention to the keys of all ranks; what one device with all pages would return. The arguments are those
    of `start`, and `return_softmax_lse`.

    Returns:
        What `finish` returns.

    Raises:
        ValueError, RuntimeError: as `start`.
    """
    return_softmax_lse = keywords.pop("return_softmax_lse", False)
    return finish(start(q, k_cache, v_cache, *arguments, **keywords), return_softmax_lse)


def start(
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
    peers: Peers | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool | None = True,
    **others,
) -> Exchange | PeerExchange:
    """Attends to the keys of this rank and sends the result on its way. What is done before `finish`, a second half of
    the heads for example, runs beside the exchange. With `peers` nothing does: `finish` sends and merges in one kernel.

    Args:
        q, k, v: as in `flash_attn_with_kvcache`, the same on every rank, rotated already. k and v are appended to the
            owner's pages; without them the last q_len keys of each request are those of q and lie with the owner.
        k_cache, v_cache, block_table: the pages of this rank.
        cache_seqlens: int32 (batch,): how many keys of each request this rank holds, before the append.
        owner: the rank in `group` that holds the new tokens.
        group: the ranks; None: all.
        heads: "all": every rank gets every head. "own": rank r of n gets the r-th n-th of the heads, which is what a
            following product needs whose weights are sharded by heads; a rank then receives an n-th of the bytes.
        peers: exchanges through the memory of the GPUs of one host.
        s_aux, sinks: two names of the sinks. They count once.
        causal: True; there is no other attention to keys of several ranks.
        others: `softmax_scale`, `softcap`, `cu_seqlens_q`, `cu_seqlens_k_new`, `max_seqlen_q`, `k_descale`,
            `v_descale`, `num_splits` and `deterministic`, as in `flash_attn_with_kvcache`.

    Raises:
        ValueError: an argument that depends on where a key stands in the context (windows, ALiBi, rotary tables, ...),
            or does not fit.
        RuntimeError: as `flash_attn_with_kvcache`, or the exchange failed.
    """
    for name in _NEED_POSITIONS:
        value = others.pop(name, None)
        if value is not None and not _is_neutral(name, value):
            raise ValueError(f"{name}: expected None (a rank does not know where its keys stand), got {shown(value)}")
    if causal is not None and not causal:
        raise ValueError(f"causal: expected True (the new tokens come after all other keys), got {causal!r}")
    for name in ("out", "return_softmax_lse"):
        value = others.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None or False (finish makes the results), got {shown(value)}")
    sink = one_of("s_aux", s_aux, "sinks", sinks)
    if peers:
        own = peers.group or dist.group.WORLD
        if group not in (None, own):
            raise ValueError(f"group: expected None or that of peers ({own}), got {group}")
        group = own
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group: expected one that this rank ({dist.get_rank()}) belongs to, got {group}")
    q_heads, head_dim_v = q.shape[-2], v_cache.shape[-1]
    if not fits(owner, 64) or not 0 <= owner < ranks:
        raise ValueError(f"owner: expected a rank from 0 to {ranks - 1}, got {owner}")
    if heads not in ("all", "own"):
        raise ValueError(f"heads: expected 'all' or 'own', got {heads!r}")
    if heads == "own" and q_heads % ranks:
        raise ValueError(f"heads: expected a number of q_heads that {ranks} ranks divide for 'own', got {q_heads}")

    is_owner = rank == owner
    new_tokens = (k, v) if is_owner else (None, None)
    if not is_owner:
        others.pop("cu_seqlens_k_new", None)

    def attend(out):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, *new_tokens, cache_seqlens=cache_seqlens, block_table=block_table, causal=is_owner,
            s_aux=sink if is_owner else None, out=out, return_softmax_lse=True, **others,
        )  # fmt: skip

    dtype = result_dtype(q.dtype)
    if peers and peers.take(q, head_dim_v, dtype):
        return PeerExchange(*attend(None), peers, q_heads if heads == "all" else q_heads // ranks)
    # One message instead of two: behind the values of a token and head, on a boundary of 16 bytes, stand 16 more bytes,
    # and their last float32 is the lse.
    unit = 16 // dtype.itemsize
    message = q.new_empty((*q.shape[:-1], (-(-head_dim_v // unit) + 1) * unit), dtype=dtype)
    _, lse = attend(message[..., :head_dim_v])
    _lse_of(message).copy_(lse.transpose(-1, -2))
    received, work = _gather(message, ranks, group) if heads == "all" else _trade_heads(message, ranks, group)
    return Exchange(received, head_dim_v, work)


def finish(exchange: Exchange | PeerExchange, return_softmax_lse: bool = False):
    """Waits for the results of all ranks and merges them, in the same order everywhere: ranks get the same bits.

    Args:
        exchange: what `start` returned, once.
        return_softmax_lse: return (out, lse).

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v) with `cu_seqlens_q`, in q's dtype
        (bfloat16 for an 8-bit q); with `return_softmax_lse` also the lse, float32 (batch, heads, seqlen_q) or
        (heads, total_q). `heads` are all q_heads, the same on every rank. With heads="own" of `start` rank r of n has
        the q_heads / n from r * q_heads / n on.

    Raises:
        RuntimeError: the exchange failed.
    """
    peers = isinstance(exchange, PeerExchange)
    like = exchange.out[..., : exchange.heads, :] if peers else exchange.received[0, ..., : exchange.head_dim_v]
    merged = like.new_empty(like.shape)
    merged_lse = like.new_empty(like.shape[:-1], dtype=torch.float32) if return_softmax_lse else None
    # Of two dimensions of tokens, (batch, seqlen), the kernels see one.
    into = merged.flatten(0, -3), None if merged_lse is None else merged_lse.flatten(0, -2)
    if peers:
        lse = exchange.lse.transpose(-1, -2).flatten(0, -2)
        exchange.peers.merge(exchange.out.flatten(0, -3), lse, *into)
    else:
        exchange.work.wait()
        parts, lse = exchange.received[..., : exchange.head_dim_v], _lse_of(exchange.received)
        ops.merge_parts(parts.flatten(1, -3), lse.flatten(1, -2).unsqueeze(-1), *into)
    return merged if merged_lse is None else (merged, merged_lse.transpose(-1, -2).contiguous())


def _is_neutral(name, value) -> bool:
    """Whether it asks for nothing. Tensors are not read."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        value = tuple(-1 if size is None else size for size in value)
    return value in _NEUTRAL.get(name, ())


def _gather(message, ranks, group):
    """The messages of all ranks."""
    received = message.new_empty((ranks, *message.shape))
    # torch 2.13 gave it the second name and warns of the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return received, gather(received.view(-1), message.view(-1), group=group, async_op=True)


def _trade_heads(message, ranks, group):
    """This rank's heads out of the messages of all ranks."""
    sent = message.unflatten(-2, (ranks, -1)).movedim(-3, 0).contiguous()
    received = torch.empty_like(sent)
    return received, dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)


def _lse_of(message):
    """(..., tokens, heads): the last float32 of each head's message."""
    return message.view(torch.float32)[..., -1]
