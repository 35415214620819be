"""The host code on the fake Metal (tools/metal_emulator), from Python to the encoder."""

import itertools

import cases
import compare
import fake_mps
import pytest
import torch
from cases import Case


def call(paged_attn, kv_len=40, **kwargs):
    """One decode step on the device, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, kv_len, 2, 64, generator=generator) for _ in range(2))
    q = torch.randn(2, 1, 8, 64, generator=generator)
    out = paged_attn.flash_attn_with_kvcache(*(t.to("mps") for t in (q, k, v)), causal=True, **kwargs)
    k, v = (t.double().repeat_interleave(4, 2).transpose(1, 2) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double().transpose(1, 2), k, v)
    return out, expected.transpose(1, 2)


def test_encodes_into_torchs_open_encoder_and_never_commits(paged_attn):
    call(paged_attn)  # makes the pipelines
    fake_mps.open_encoder()
    before = fake_mps.created()
    q = torch.zeros(1, 1, 4, 64, device="mps")
    k = torch.zeros(1, 8, 4, 64, device="mps")
    fake_mps.open_encoder()
    committed = fake_mps.created()["commits"]
    for _ in range(3):
        paged_attn.flash_attn_with_kvcache(q, k, k)
    assert fake_mps.created()["commits"] == committed
    assert fake_mps.created()["libraries"] == before["libraries"]


def test_pipelines_are_made_once(paged_attn):
    call(paged_attn, softcap=3.0)
    before = fake_mps.created()
    call(paged_attn, softcap=3.0)
    after = fake_mps.created()
    assert (after["libraries"], after["pipelines"]) == (before["libraries"], before["pipelines"])


@pytest.mark.parametrize("limit", [32, 64, 200, 512])
@pytest.mark.parametrize("kv_len", [40, 500, 3000])
def test_limit_of_a_pipeline(paged_attn, limit, kv_len):
    """A device may allow a kernel fewer threads than 1024: fewer are used. The merge of splits needs its 128."""
    fake_mps.limit_threads("", limit)
    try:
        if kv_len == 3000 and limit < 128:
            with pytest.raises(RuntimeError, match=f"merge: expected .* threadgroups of at least 128 .*, got {limit}"):
                call(paged_attn, kv_len)
        else:
            fake_mps.dispatched()
            out, expected = call(paged_attn, kv_len)
            torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=0)
            threads = [int(line.split()[6]) for line in fake_mps.dispatched()]
            assert all(count <= limit and count % 32 == 0 for count in threads), "whole simdgroups"
    finally:
        fake_mps.limit_threads("", 0)


def test_an_error_of_a_later_kernel_leaves_the_cache_as_it_was(paged_attn):
    """The append would be first in the queue."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 17, heads, 64, device="mps").bfloat16() for heads in (8, 2, 2))
    caches = [torch.zeros(1, 64, 2, 64, device="mps").bfloat16() for _ in range(2)]
    fake_mps.limit_threads("prefill", 32)
    try:
        with pytest.raises(RuntimeError, match="threadgroups of at least"):
            paged_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, causal=True)
    finally:
        fake_mps.limit_threads("prefill", 0)
    assert not any(cache.cpu().any() for cache in caches)


def test_sizes_that_32_bits_do_not_count(paged_attn):
    """One page, or one token, stands for all of them here."""
    page, token = torch.zeros(1, 1, 1, 8, device="mps"), torch.zeros(1, 1, 1, 8, device="mps")
    one = torch.ones(1, dtype=torch.int32, device="mps")
    pages = page.expand(2**31, 1, 1, 8)
    words = r"metal: expected sizes below 2\^31 .* got "
    with pytest.raises(RuntimeError, match=words):
        paged_attn.flash_attn_with_kvcache(token, pages, pages, cache_seqlens=one, block_table=one[None] - 1)
    wide = torch.zeros(1, 2**18, dtype=torch.int32, device="mps")
    large = torch.zeros(1, 4096, 1, 8, device="mps")
    tokens, cu_seqlens = token[0].expand(2**31, 1, 8), torch.cat((one - 1, one))
    with pytest.raises(RuntimeError, match=words):
        paged_attn.kv_paged_write(tokens, tokens, large, large, one[None] - 1, one - 1, cu_seqlens_k_new=cu_seqlens)
    with pytest.raises(RuntimeError, match=words):
        paged_attn.kv_paged_write(token, token, large, large, wide, torch.full_like(one, 2**30))
    assert not large.cpu().any()
    tables = (one[None] - 1).expand(2**31, 1)
    with pytest.raises(RuntimeError, match=words):
        paged_attn.flash_attn_with_kvcache(
            token, large, large, cache_seqlens=one, block_table=tables, cache_batch_idx=one - 1
        )
    queries = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device="mps").expand(1, 2**27, 16, 1)
    with pytest.raises(RuntimeError, match=words):  # rows of one kv_head
        paged_attn.flash_attn_with_kvcache(queries, *[queries[:, :1, :1]] * 2)


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kv_len", [40, 3000])
def test_order_of_threads_does_not_matter(paged_attn, kv_len, seed):
    fake_mps.set_seed(0)
    plain = call(paged_attn, kv_len)[0].cpu()
    fake_mps.set_seed(seed)
    try:
        assert torch.equal(call(paged_attn, kv_len)[0].cpu(), plain)
    finally:
        fake_mps.set_seed(0)


def test_dispatches(paged_attn):
    """One where no request can be long, two with splits, one more for an append; one for a write."""
    q, new = torch.zeros(1, 1, 8, 64, device="mps"), torch.zeros(1, 1, 2, 64, device="mps")
    seqlens = torch.tensor([99], dtype=torch.int32, device="mps")
    counts = []
    for capacity, k in ((100, None), (9000, None), (100, new)):
        cache = torch.zeros(1, capacity, 2, 64, device="mps")
        fake_mps.dispatched()
        paged_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=seqlens, causal=True)
        counts.append(len(fake_mps.dispatched()))
    slots = torch.tensor([5], device="mps")
    paged_attn.kv_paged_write(new[0], new[0], cache, cache.clone(), None, None, slot_mapping=slots)
    counts.append(len(fake_mps.dispatched()))
    assert counts == [1, 2, 2, 1]


# ---- Routes

DECODE = {"prefill": "more than 8 rows"}
ROUTES = {
    "decode": (Case(q_heads=8, kv_heads=2), DECODE),
    "decode_many_rows_fp32": (Case(q_len=17, dtype="float32"), {"prefill": "q in 16 or 8 bits"}),
    "decode_many_rows_256": (Case(q_len=17, head_dim=256), {"prefill": "head_dim and head_dim_v of at most 128"}),
    "prefill": (Case(q_len=17), {}),
    "prefill_varlen": (Case(q_len=17, varlen_q=True), {}),
    "wide_latent": (Case(head_dim=576, head_dim_v=512, layout="latent", kv_heads=1), {"decode": "at most 256"}),
    "wide_qv": (Case(head_dim=64, head_dim_v=512, qv=True), {"prefill": "no qv", "decode": "no qv"}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_route(paged_attn, name):
    case, reasons = ROUTES[name]
    call = cases.build(case).to("mps")
    fake_mps.dispatched()
    explained = paged_attn.explain(call.kwargs["q"], *call.caches(), **without(call.kwargs, "q"))
    assert fake_mps.dispatched() == []
    assert explained.route == name.partition("_")[0]
    for route, reason in reasons.items():
        assert reason in explained.why_not[route]
    # What it says is what runs.
    paged_attn.flash_attn_with_kvcache(call.kwargs["q"], *call.caches(), **without(call.kwargs, "q"))
    ran = [line.split() for line in fake_mps.dispatched()]
    assert len(ran) == explained.plan["dispatches"]
    assert sum(int(x) * int(y) * int(z) for _, _, x, y, z, *_ in ran) == explained.plan["threadgroups"]
    assert ran[0][0].startswith("prefill" if explained.route == "prefill" else "attend")


def without(kwargs, *names):
    return {name: value for name, value in kwargs.items() if name not in names}


# ---- How many rows requests have is only known on the device

PROMISES = [None, 0, 1, 2, 5, 1000]
SEEDS = range(4)
# With sanitizers one seed for each promise, going round.
PROMISES_AND_SEEDS = [
    pytest.param(promise, seed, marks=[pytest.mark.sanitize] * (i % len(SEEDS) == seed))
    for (i, promise), seed in itertools.product(enumerate(PROMISES), SEEDS)
]


@pytest.mark.parametrize(("max_seqlen_q", "seed"), PROMISES_AND_SEEDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_or_fewer_rows_than_promised(paged_attn, dtype, max_seqlen_q, seed):
    """No row stays unwritten, whatever max_seqlen_q promises. A threadgroup of several simdgroups then takes one tile
    of rows after the other, in any order of simdgroups."""
    case = Case(batch=5, q_len=9, varlen_q=True, kv_len=300, q_heads=8, causal=True, dtype=dtype, give_out=True)
    fake_mps.set_seed(seed)
    try:
        compare.check(paged_attn, case, "mps", max_seqlen_q=max_seqlen_q)
    finally:
        fake_mps.set_seed(0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("max_seqlen_q", [None, 3, 4096, 1 << 40])
def test_grid_does_not_grow_with_requests_times_tokens(paged_attn, dtype, max_seqlen_q):
    """One long prompt beside many single tokens, in a long cache."""
    batch, longest, group, kv_heads = 300, 2000, 4, 2
    lens = torch.tensor([longest] + [1] * (batch - 1), dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32).to("mps")
    q = torch.zeros(int(lens.sum()), group * kv_heads, 64, dtype=getattr(torch, dtype), device="mps")
    k = torch.zeros(batch, 4096, kv_heads, 64, dtype=q.dtype, device="mps")
    plan = paged_attn.explain(q, k, k, cache_seqlens=lens.to("mps"), cu_seqlens_q=cu_seqlens,
                              max_seqlen_q=max_seqlen_q).plan  # fmt: skip
    tiles = len(q) * group // 8 + 2 * batch
    assert plan["threadgroups"] <= plan["splits"] * 4 * kv_heads * tiles


# ---- Places that 32 bits do not count, and what a wrong length may not reach


@pytest.mark.parametrize("far", ["k_cache", "v_cache"])
def test_pages_far_apart(paged_attn, far):
    """More than 2^32 elements, in memory that nobody touches. The other cache is small."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, heads, 64, device="mps") for heads in (8, 2, 2))
    near = {name: torch.randn(3, 16, 2, 64, device="mps").to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    pages, stride = near[far], 2**31 + 64
    memory = torch.empty(2 * stride + pages[0].numel(), dtype=pages.dtype, device="mps")
    apart = memory.as_strided(pages.shape, (stride, *pages.stride()[1:]))
    apart.copy_(pages)
    table = torch.tensor([[1, 0, 2]], dtype=torch.int32, device="mps")
    options = {"k": k, "v": v, "cache_seqlens": 40, "block_table": table, "causal": True}
    out = paged_attn.flash_attn_with_kvcache(q, **(near | {far: apart}), **options)
    assert torch.equal(out, paged_attn.flash_attn_with_kvcache(q, **near, **options))
    assert torch.equal(apart.view(torch.uint8), pages.view(torch.uint8))


def test_slots_beyond_31_bits(paged_attn):
    caches = [torch.empty(2, 2**30 + 8, 1, 1, dtype=torch.float8_e4m3fn, device="mps") for _ in range(2)]
    slots = torch.tensor([2**31 + 5, 3], device="mps")
    new = torch.tensor([1.5, -2.0], device="mps").view(2, 1, 1)
    paged_attn.kv_paged_write(new, -new, *caches, slot_mapping=slots)
    for cache, expected in zip(caches, (new, -new), strict=True):
        assert torch.equal(cache.flatten()[slots].float(), expected.flatten())


def test_positions_past_the_rotary_tables(paged_attn):
    """The device sees them alone: nothing is read there, and nothing turns."""
    tables = torch.full((2, 24, 8), torch.nan, device="mps")
    tables[:, :20] = torch.rand(2, 20, 8)
    cos, sin = tables[:, :20]
    new, cache = torch.randn(1, 2, 1, 16, device="mps"), torch.zeros(1, 32, 1, 16, device="mps")
    paged_attn.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cos, sin, cache_seqlens=20, causal=True)
    assert torch.equal(cache[:, 20:22], new)


def test_new_tokens_before_the_first_request(paged_attn):
    """A cu_seqlens_k_new that begins late: the token before it belongs to nobody, and older keys stay."""
    new, caches = torch.ones(3, 1, 8, device="mps"), [torch.zeros(4, 4, 1, 8, device="mps") for _ in range(2)]
    table, cu = (torch.tensor(x, dtype=torch.int32, device="mps") for x in ([[2, 0, 1, 3]], [1, 3]))
    paged_attn.kv_paged_write(new, new, *caches, table, 6, cu_seqlens_k_new=cu)
    for cache in caches:
        assert cache[:, :, 0, 0].nonzero().tolist() == [[0, 2], [0, 3]]
