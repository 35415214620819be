"""context_parallel and tensor parallelism by heads: what one device with all the pages returns.

On the CPU three processes exchange through gloo, and two of them are one more group. On CUDA they are as many as there
are GPUs, up to three, and exchange through NCCL, then through each other's memory.
"""

import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

KERNEL = "org/paged-attn"
PAGE_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 4, 12, 6, 32
DEVICE = os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu")
RANKS = min(3, torch.cuda.device_count()) if DEVICE == "cuda" else 3
LIMIT = 240  # seconds; a rank that waits for another on the GPU does not end by itself
STEPS = [(12, 5), (1, 1), (7, 2), (1, 1), (1, 0), (3, 1), (1, 1)]  # new tokens of two requests


def steps(dtype):
    """Queries, keys and values of each step, packed, with cu_seqlens."""
    generator = torch.Generator().manual_seed(0)
    for counts in STEPS:
        q, k, v = (
            torch.randn(sum(counts), heads, HEAD_DIM, generator=generator).to(DEVICE, dtype)
            for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
        )
        yield counts, q, k, v, torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=DEVICE)


class Pages:
    """A rank's share of the cache: two requests with pages in turns."""

    def __init__(self, kernel, kv_heads, dtype):
        self.k, self.v = kernel.empty_paged_cache(32, PAGE_SIZE, kv_heads, HEAD_DIM, dtype=dtype, device=DEVICE)
        self.k.fill_(torch.nan), self.v.fill_(torch.nan)
        self.table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(16, 2).T.contiguous()
        self.lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)


FEATURES = {
    "plain": {},
    "softcap and sinks": {"softcap": 3.0, "s_aux": torch.linspace(-1, 2, Q_HEADS)},
    "scaled": {"softmax_scale": 0.4, "deterministic": True},
    # The other name of the sinks, and values that ask for nothing.
    "sinks by SGLang's name": {"sinks": torch.linspace(-1, 2, Q_HEADS), "window_size": (-1, 0), "attention_chunk": 0},
    "neutral": {"window_size": [-1, None], "alibi_slopes": None, "cache_leftpad": None},
}


def on_device(features):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in features.items()}


def expected_results(kernel, dtype, features):
    """One device. The step of every list entry: (out, lse)."""
    pages = Pages(kernel, KV_HEADS, dtype)
    for counts, q, k, v, cu in steps(dtype):
        yield kernel.flash_attn_with_kvcache(
            q, pages.k, pages.v, k, v, cache_seqlens=pages.lengths, block_table=pages.table, cu_seqlens_q=cu,
            cu_seqlens_k_new=cu, max_seqlen_q=max(counts), causal=True, return_softmax_lse=True, **features,
        )  # fmt: skip
        pages.lengths += torch.tensor(counts, device=DEVICE)


def run_sharded(kernel, group, dtype, features, heads, held, peers):
    """Every rank of the group; yields (out, lse) of each step. `held` counts the keys of each rank."""
    cp = kernel.integrations.context_parallel
    rank, pages = dist.get_rank(group), Pages(kernel, KV_HEADS, dtype)
    for counts, q, k, v, cu in steps(dtype):
        owner = cp.next_owner(held, PAGE_SIZE)
        result = cp.attention(
            q, pages.k, pages.v, k, v, owner=owner, group=group, heads=heads, peers=peers, cache_seqlens=pages.lengths,
            block_table=pages.table, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=max(counts),
            return_softmax_lse=True, **features,
        )  # fmt: skip
        held[owner] += counts[0]
        if owner == rank:
            pages.lengths += torch.tensor(counts, device=DEVICE)
        yield result


def check_context_parallel(kernel, group, dtype, features, heads, peers=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    mine = slice(None) if heads == "all" else slice(rank * Q_HEADS // ranks, (rank + 1) * Q_HEADS // ranks)
    held = [0] * ranks
    sharded = run_sharded(kernel, group, dtype, features, heads, held, peers)
    for (out, lse), (whole, whole_lse) in zip(sharded, expected_results(kernel, dtype, features), strict=True):
        torch.testing.assert_close(out, whole[:, mine], **tolerance)
        torch.testing.assert_close(lse, whole_lse[mine], rtol=1e-5, atol=1e-5)
        if heads == "all":
            copies = [torch.empty_like(out) for _ in range(ranks)]
            dist.all_gather(copies, out, group=group)
            assert all(torch.equal(copy, out) for copy in copies)
    assert min(held) > 0, "a rank without keys shows nothing"


def check_peers(kernel, group):
    """Through each other's memory; the steps with more than 6 tokens take the collective."""
    make = kernel.integrations.context_parallel.Peers
    if DEVICE != "cuda":
        with pytest.raises(ValueError, match="Peers: expected the CUDA build of this package"):
            make(q_heads=Q_HEADS, head_dim_v=HEAD_DIM, dtype=torch.float32)
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        peers = make(q_heads=Q_HEADS, head_dim_v=HEAD_DIM, dtype=dtype, max_tokens=6, group=group)
        for heads in ("all", "own"):
            for features in FEATURES.values():
                check_context_parallel(kernel, group, dtype, on_device(features), heads, peers)
    pages = Pages(kernel, KV_HEADS, torch.float32)
    q = torch.randn(2, 1, Q_HEADS, HEAD_DIM, device=DEVICE)
    with pytest.raises(ValueError, match=r"peers: expected one for \(q_heads, .*, got one for \(12, 32, "):
        kernel.integrations.context_parallel.attention(
            q, pages.k, pages.v, owner=0, peers=peers, cache_seqlens=pages.lengths, block_table=pages.table
        )


def check_group_of_peers(kernel, pair):
    """None and the default group are two names of the same ranks."""
    pages = Pages(kernel, KV_HEADS, torch.float32)
    q = torch.randn(2, 1, Q_HEADS, HEAD_DIM, device=DEVICE)

    def attend(made_for, group):
        peers = SimpleNamespace(group=made_for, take=lambda *result: False)  # only CUDA has others
        kernel.integrations.context_parallel.attention(
            q, pages.k, pages.v, owner=0, peers=peers, group=group, cache_seqlens=pages.lengths, block_table=pages.table
        )

    for made_for in (None, dist.group.WORLD):
        for group in (None, dist.group.WORLD):
            attend(made_for, group)
        with pytest.raises(ValueError, match=r"group: expected None or that of peers \(.*\), got "):
            attend(made_for, pair)
    with pytest.raises(ValueError, match=r"group: expected None or that of peers \(.*\), got "):
        attend(pair, dist.group.WORLD)


def check_group_of_others(kernel, pair):
    """A rank that is not in a group has no number there."""
    pages = Pages(kernel, KV_HEADS, torch.float32)
    q = torch.randn(2, 1, Q_HEADS, HEAD_DIM, device=DEVICE)
    with pytest.raises(ValueError, match=r"^group: expected one that this rank \(0\) belongs to, got "):
        kernel.integrations.context_parallel.attention(
            q, pages.k, pages.v, owner=0, group=pair, cache_seqlens=pages.lengths, block_table=pages.table
        )


def check_tensor_parallel(kernel, group):
    """By kv_heads: every rank holds all keys of its heads, and nothing is exchanged before the next product."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q_mine, kv_mine = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (Q_HEADS, KV_HEADS))
    pages = Pages(kernel, KV_HEADS // ranks, torch.float32)
    weight = torch.randn(Q_HEADS * HEAD_DIM, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for step, (whole, _) in zip(steps(torch.float32), expected_results(kernel, torch.float32, {}), strict=True):
        counts, q, k, v, cu = step
        out = kernel.flash_attn_with_kvcache(
            q[:, q_mine], pages.k, pages.v, k[:, kv_mine], v[:, kv_mine], cache_seqlens=pages.lengths,
            block_table=pages.table, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=max(counts), causal=True,
        )  # fmt: skip
        pages.lengths += torch.tensor(counts, device=DEVICE)
        product = out.flatten(1) @ weight.unflatten(0, (Q_HEADS, HEAD_DIM))[q_mine].flatten(0, 1)
        dist.all_reduce(product, group=group)
        torch.testing.assert_close(product, whole.flatten(1) @ weight, rtol=1e-4, atol=1e-4)


def check_errors(kernel):
    attention = kernel.integrations.context_parallel.attention
    pages = Pages(kernel, KV_HEADS, torch.float32)
    q = torch.randn(2, 1, Q_HEADS, HEAD_DIM, device=DEVICE)
    names = {"cache_seqlens": pages.lengths, "block_table": pages.table}
    for wrong, message in (
        ({"owner": 0, "window_size": (4, 0)}, r"window_size: expected None .*, got \(4, 0\)"),
        ({"owner": 0, "window_size": (-1, 4)}, r"window_size: expected None .*, got \(-1, 4\)"),
        ({"owner": 0, "attention_chunk": 8}, r"attention_chunk: expected None .*, got 8"),
        ({"owner": 0, "alibi_slopes": 1.0}, r"alibi_slopes: expected None"),
        ({"owner": 0, "cache_leftpad": pages.lengths}, r"cache_leftpad: expected None .*, got a tensor of shape \(2"),
        ({"owner": 0, "causal": False}, r"causal: expected True \(.*\), got False"),
        ({"owner": 0, "out": q}, r"out: expected None or False \(.*\), got a tensor of shape \(2, 1, 12, 32\)"),
        ({"owner": 0, "s_aux": q[0, 0, :, 0], "sinks": q[0, 0, :, 0]}, "s_aux and sinks are two names of one argument"),
        ({"owner": RANKS}, f"owner: expected a rank from 0 to {RANKS - 1}, got {RANKS}"),
        ({"owner": 0.5}, f"owner: expected a rank from 0 to {RANKS - 1}, got 0.5"),
        ({"owner": None}, f"owner: expected a rank from 0 to {RANKS - 1}, got None"),
        ({"owner": 0, "heads": "mine"}, "heads: expected 'all' or 'own', got 'mine'"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, pages.k, pages.v, **names, **wrong)
    with pytest.raises(ValueError, match=r"return_softmax_lse: expected None or False \(.*\), got True"):
        kernel.integrations.context_parallel.start(
            q, pages.k, pages.v, owner=0, return_softmax_lse=True, causal=True, **names
        )
    with pytest.raises(ValueError, match=f"q_heads that {RANKS} ranks divide for 'own', got 5"):
        attention(q[:, :, :5], pages.k, pages.v, owner=0, heads="own", **names)


def check_eight_bits(kernel):
    """Queries, keys and values in 8 bits: results in bfloat16, as on one device."""
    generator = torch.Generator().manual_seed(2)
    rank, eight_bits, held = dist.get_rank(), torch.float8_e4m3fn, [8, 5, 0][:RANKS]
    q = torch.randn(1, 1, Q_HEADS, HEAD_DIM, generator=generator).to(DEVICE, eight_bits)
    k, v = torch.randn(2, sum(held), 1, KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE, eight_bits)
    table = torch.arange(len(k), dtype=torch.int32, device=DEVICE)[None]  # pages of one slot
    whole = kernel.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=len(k), block_table=table, causal=True, return_softmax_lse=True
    )
    first = sum(held[:rank])
    shared = kernel.integrations.context_parallel.attention(
        q, k, v, owner=1, cache_seqlens=held[rank], block_table=table[:, first:], causal=True, return_softmax_lse=True
    )
    assert shared[0].dtype == torch.bfloat16
    for ours, expected in zip(shared, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def check_no_keys(kernel):
    """Nowhere a key: zeros, as one device returns."""
    pages = Pages(kernel, KV_HEADS, torch.float32)
    out, lse = kernel.integrations.context_parallel.attention(
        torch.randn(2, 1, Q_HEADS, HEAD_DIM, device=DEVICE), pages.k, pages.v, owner=0, cache_seqlens=pages.lengths,
        block_table=pages.table, return_softmax_lse=True,
    )  # fmt: skip
    assert (out == 0).all() and (lse == -torch.inf).all()


def be_a_rank(rank: int, file: str) -> None:
    import kernels

    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # which nothing here uses
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    kernel = kernels.get_kernel(KERNEL, version=1, backend=DEVICE, trust_remote_code=True)
    groups = [None]
    if RANKS == 3:
        pair = dist.new_group([1, 2])
        groups += [pair] if rank else []
        check_group_of_peers(kernel, pair)
        if rank == 0:
            check_group_of_others(kernel, pair)
    for group in groups:
        for heads in ("all", "own"):
            for features in FEATURES.values():
                check_context_parallel(kernel, group, torch.float32, on_device(features), heads)
        check_context_parallel(kernel, group, torch.bfloat16, {}, "all")
        check_peers(kernel, group)
    check_tensor_parallel(kernel, None)
    check_eight_bits(kernel)
    check_no_keys(kernel)
    check_errors(kernel)
    dist.barrier()
    dist.destroy_process_group()


def test_owners_take_pages_in_turns(paged_attn):
    next_owner = paged_attn.integrations.context_parallel.next_owner
    held, owners = [0, 0, 0], []
    for _ in range(14):
        owner = next_owner(held, PAGE_SIZE)
        owners.append(owner)
        held[owner] += 1
    assert owners == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 2
    with pytest.raises(ValueError, match=r"^keys_of_ranks: expected a number for each rank, got \[\]$"):
        next_owner([], PAGE_SIZE)


def test_ranks(device, tmp_path):
    """The processes check themselves; one that fails prints why and ends the others."""
    if device == "mps" or RANKS < 2:
        pytest.skip("the ranks need CPUs, or two GPUs")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path[1:]])
    ranks = torch.multiprocessing.spawn(be_a_rank, (str(tmp_path / "ranks"),), nprocs=RANKS, join=False)
    end = time.monotonic() + LIMIT
    while not ranks.join(timeout=1):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"the ranks have not ended after {LIMIT} s")
