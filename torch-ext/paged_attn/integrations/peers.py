"""GPUs of one host that write their results into each other's memory, for `context_parallel`."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from .._ops import ops

_MOST_RANKS = 16  # kMaxPeers of the kernel
_PAIR_BYTES = 8  # of a row, in a pair of words of 8 bytes: the other halves hold the number of the call


class Peers:
    """Memory of the GPUs of one host, into which every rank writes its results for the others.

    All ranks of a group make it together, and then make the same calls with it in the same order, one stream at a time.
    CUDA graphs of such calls hold its addresses: keep it as long as them.

    Args:
        q_heads, head_dim_v, dtype: of the results of the calls; 8-bit queries have results in bfloat16.
        max_tokens: of a call. One with more tokens goes through the collective, which is the better way for long
            messages.
        group: the ranks; None: all.

    Raises:
        ValueError: ranks that cannot write into each other's memory.
    """

    def __init__(
        self, *, q_heads: int, head_dim_v: int, dtype: torch.dtype, max_tokens: int = 64,
        group: dist.ProcessGroup | None = None,
    ):  # fmt: skip
        if not hasattr(ops, "merge_with_peers"):
            raise ValueError("Peers: expected the CUDA build of this package, got that of another device")
        self.group, self.rank, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        hosts = [None] * ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if ranks > _MOST_RANKS or len(set(hosts)) > 1:
            names = sorted(set(hosts))
            raise ValueError(f"group: expected at most {_MOST_RANKS} ranks, of one host, got {ranks} ranks on {names}")
        self.q_heads, self.head_dim_v, self.dtype, self.max_tokens = q_heads, head_dim_v, dtype, max_tokens
        rows = max_tokens * q_heads
        row_pairs = -(-head_dim_v * dtype.itemsize // _PAIR_BYTES) + 1  # and one for the lse
        self.calls = torch.zeros(rows, dtype=torch.int32, device="cuda")
        # Every row of every rank has two places, used in turns.
        self.memory_of_ranks = _shared_zeros((2, ranks, rows, row_pairs, 2), group)

    def take(self, q: torch.Tensor, head_dim_v: int, dtype: torch.dtype) -> bool:
        """Whether a call goes this way. Raises a ValueError if its result has another form."""
        given, made = (q.shape[-2], head_dim_v, dtype), (self.q_heads, self.head_dim_v, self.dtype)
        if given != made:
            raise ValueError(f"peers: expected one for (q_heads, head_dim_v, dtype) = {given}, got one for {made}")
        return q.shape[:-2].numel() <= self.max_tokens

    def merge(self, out, lse, merged, merged_lse) -> None:
        """Sends out (tokens, heads, head_dim_v) and lse (tokens, heads) to the others and merges theirs with them, into
        tensors for all heads or for those of this rank alone.
        """
        ops.merge_with_peers(out, lse.unsqueeze(-1), self.calls, merged, merged_lse, self.memory_of_ranks, self.rank)


def _shared_zeros(shape: tuple[int, ...], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Words of 8 bytes on every rank: tensors in the address space of this one, over the memory of each."""
    import torch.distributed._symmetric_memory as symmetric_memory  # not in every build of torch

    memory = symmetric_memory.empty(shape, dtype=torch.int64, device=torch.device("cuda", torch.cuda.current_device()))
    memory.zero_()
    handle = symmetric_memory.rendezvous(memory, group or dist.group.WORLD)
    memory_of_ranks = [
        memory if r == handle.rank else handle.get_buffer(r, shape, torch.int64) for r in range(handle.world_size)
    ]
    # Nobody writes before everybody has cleared.
    torch.cuda.synchronize()
    dist.barrier(group)
    return memory_of_ranks
