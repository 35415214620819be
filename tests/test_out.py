"""What is written, out and a cache that tokens are appended to, may be any memory of its own: also rows between those
of an input, but no element of one."""

import math
import random

import cases
import pytest
import torch
from cases import Case
from compare import run

PLAIN = Case(batch=2, lens=(20, 33), q_len=3)
APPEND = Case(batch=2, lens=(20, 33), q_len=3, append=3, q_heads=2)
QV = Case(batch=2, lens=(20, 33), head_dim_v=512, qv=True)


def beside(a, name, offset):
    """Moves an input into a larger tensor, and returns a view of its form that begins `offset` elements behind it."""
    x = a[name]
    wide = torch.zeros(3 * x.numel(), dtype=x.dtype, device=x.device)
    a[name] = wide[x.numel() : 2 * x.numel()].view(x.shape).copy_(x)
    return wide[x.numel() + offset :][: x.numel()].view(x.shape)


def other_tokens_and_heads(a):
    """Of six tokens and five heads: neither view has the first or the last row of the other, yet they share some."""
    wide = torch.zeros(2, 6, 5, 64, dtype=a["q"].dtype, device=a["q"].device)
    a["q"] = wide[:, 0:3, 1:].copy_(a["q"])
    return wide[:, 1:4, :-1]


# Case, input, and how out is made of the arguments so that it has some of the input's elements.
SHARED = {
    "out is q": (PLAIN, "q", lambda a: a["q"]),
    "requests and tokens in another order": (
        PLAIN, "q", lambda a: a["q"].as_strided((2, 3, 4, 64), (256, 512, 64, 1)),
    ),
    "one row of q": (PLAIN, "q", lambda a: beside(a, "q", 64 * 4 * 5)),
    "one element of q": (PLAIN, "q", lambda a: beside(a, "q", 64 * 4 * 6 - 1)),
    "one element before": (PLAIN, "q", lambda a: beside(a, "q", 1 - 64 * 4 * 6)),
    "other tokens and other heads": (PLAIN, "q", other_tokens_and_heads),
    "out is qv": (QV, "qv", lambda a: a["qv"]),
    "out is k": (APPEND, "k", lambda a: a["k"]),
    "out is v": (APPEND, "v", lambda a: a["v"]),
    "keys of the cache": (PLAIN, "k_cache", lambda a: a["k_cache"].as_strided((2, 3, 4, 64), (768, 256, 64, 1))),
    "values of the cache": (PLAIN, "v_cache", lambda a: a["v_cache"][1:4].view(-1)[100:][:1536].view(2, 3, 4, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_is_refused(paged_attn, device, name):
    case, blamed, make_out = SHARED[name]
    call = cases.build(case).to(device)
    k_cache, v_cache = call.caches()
    arguments = call.kwargs | {"k_cache": k_cache, "v_cache": v_cache}
    arguments["out"] = make_out(arguments)
    written = [*call.storage, arguments["out"]]
    before = [x.clone() for x in written]
    for function in (paged_attn.flash_attn_with_kvcache, paged_attn.explain):
        with pytest.raises(RuntimeError, match=f"^out: expected memory of its own, got memory of {blamed}$"):
            function(**arguments)
    for x, expected in zip(written, before):
        assert torch.equal(x.nan_to_num(), expected.nan_to_num())


# Every table of a call, and a case that has it.
MANY = Case(
    batch=3, lens=(20, 0, 33), q_len=2, append=2, causal=True, alibi="batch", sink="float32", leftpad=True,
    batch_idx=True, rotary_dim=32, rotary_seqlens=True,
)  # fmt: skip
PACKED = Case(batch=3, lens=(20, 0, 33), q_len=4, varlen_q=True, append=3, append_varlen=True, causal=True)
DESCALED = Case(batch=3, lens=(20, 0, 33), q_len=2, append=2, kv_dtype="float8_e4m3fn", descale="full")
TABLES = {
    "block_table": MANY, "cache_seqlens": MANY, "cache_batch_idx": MANY, "cache_leftpad": MANY, "rotary_cos": MANY,
    "rotary_sin": MANY, "rotary_seqlens": MANY, "alibi_slopes": MANY, "s_aux": MANY, "cu_seqlens_q": PACKED,
    "cu_seqlens_k_new": PACKED, "k_descale": DESCALED, "v_descale": DESCALED, "q": MANY, "k": MANY, "v": MANY,
}  # fmt: skip


def over_the_start(a, name, like):
    """A tensor as `like` is, whose last 16 bytes are the first of an argument, which moves there."""
    x, start = a[name], math.prod(like.shape) * like.element_size() - 16
    memory = torch.zeros(start + max(16, x.nbytes), dtype=torch.uint8, device=x.device)
    a[name] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return memory[: start + 16].view(like.dtype).view(like.shape)


def over_the_end(a, name, like):
    """The same, whose first bytes are the last element of the argument."""
    x = a[name]
    begin = x.nbytes - x.element_size()
    memory = torch.zeros(begin + math.prod(like.shape) * like.element_size(), dtype=torch.uint8, device=x.device)
    a[name] = memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return memory[begin:].view(like.dtype).view(like.shape)


@pytest.mark.parametrize("over", [over_the_start, over_the_end])
@pytest.mark.parametrize("written", ["out", "k_cache", "v_cache"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_in_the_memory_that_is_written(paged_attn, device, name, written, over):
    call = cases.build(TABLES[name]).to(device)
    a = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches()))
    a["out"] = torch.zeros_like(a["q"])
    a[written] = over(a, name, a[written])
    before = {n: x.clone() for n, x in a.items() if isinstance(x, torch.Tensor)}
    for function in (paged_attn.flash_attn_with_kvcache, paged_attn.explain):
        with pytest.raises(RuntimeError, match=f"^{written}: expected memory of its own, got memory of {name}$"):
            function(**a)
    for n, x in before.items():
        assert torch.equal(a[n].view(torch.uint8), x.view(torch.uint8)), n


@pytest.mark.parametrize("over", [over_the_start, over_the_end])
@pytest.mark.parametrize("written", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["k", "v", "block_table", "cache_seqlens", "slot_mapping", "k_descale", "v_descale"])
def test_tables_in_the_memory_of_a_write(paged_attn, device, name, written, over):
    call = cases.build(DESCALED).to(device)
    names = ("k", "v", "k_descale", "v_descale")
    a = {n: call.kwargs[n] for n in names} | dict(zip(("k_cache", "v_cache"), call.caches()))
    if name == "slot_mapping":
        a["slot_mapping"] = torch.arange(6, device=device)
    else:
        a |= {n: call.kwargs[n] for n in ("block_table", "cache_seqlens")}
    a[written] = over(a, name, a[written])
    before = a[written].view(torch.uint8).clone()
    with pytest.raises(RuntimeError, match=f"^{written}: expected memory of its own, got memory of {name}$"):
        paged_attn.kv_paged_write(**a)
    assert torch.equal(a[written].view(torch.uint8), before)


def appends(paged_attn, k, v, k_cache, v_cache, **options):
    """Both functions that write, as calls."""
    batch, tokens, _, head_dim = k.shape
    table = torch.arange(batch, dtype=torch.int32, device=k.device)[:, None]
    q = torch.ones(batch, tokens, 2, head_dim, device=k.device)
    yield lambda: paged_attn.kv_paged_write(k, v, k_cache, v_cache, table, 1, **options)
    yield lambda: paged_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=1, **options)


LATENT_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["float32", "e4m3"])


@LATENT_DTYPES
@pytest.mark.parametrize("place", [0, 16], ids=["beginning", "end"])
@pytest.mark.parametrize("copied", [False, True])
def test_values_that_are_a_part_of_the_keys(paged_attn, device, dtype, place, copied):
    """Latents: what is written twice is the same, wherever the new ones lie: k is often made of v and the rest."""
    if device == "mps":
        pytest.skip("Metal: a kernel that writes takes it that its buffers share no memory")
    k = torch.randn(2, 3, 1, 48, device=device)
    part = slice(place, place + 32)
    v = k[..., part].clone() if copied else k[..., part]
    wanted = [torch.zeros(2, 8, 1, n, device=device).to(dtype) for n in (48, 32)]
    cache = torch.zeros(2, 8, 1, 48, device=device).to(dtype)
    for apart, shared in zip(
        appends(paged_attn, k, v, *wanted),
        appends(paged_attn, k, v, cache, cache[..., part]),
        strict=True,
    ):
        cache.view(torch.uint8).zero_()
        results = apart(), shared()
        assert results[0] is None or torch.equal(*results)
        assert torch.equal(cache.view(torch.uint8), wanted[0].view(torch.uint8))


@LATENT_DTYPES
@pytest.mark.parametrize("way", ["one cache", "heads", "values first"])
def test_keys_and_values_in_one_memory(paged_attn, device, dtype, way):
    """Whatever is written last would stay."""
    k = torch.randn(2, 3, 1, 48, device=device)
    memory = torch.zeros(3, 8, 1, 64, device=device).to(dtype)
    whole, heads = memory[..., :48], memory.view(2, 4, 3, 64)[..., :48]
    v, k_cache, v_cache = {
        "one cache": (torch.randn_like(k), whole[:2], whole[:2]),
        "heads": (k.expand(-1, -1, 2, -1), heads[:, :, :2], heads[:, :, 1:]),
        "values first": (k[..., 16:], memory[:2, ..., 16:], memory[:2, ..., 8:40]),
    }[way]
    for call in appends(paged_attn, k.expand_as(v) if way == "heads" else k, v, k_cache, v_cache):
        with pytest.raises(RuntimeError, match=r"^v_cache: expected memory of its own, got memory of k_cache$"):
            call()
    assert not memory.view(torch.uint8).any()


@pytest.mark.parametrize("begin", [0, 8, 16])
def test_values_in_keys_that_are_rotated(paged_attn, device, begin):
    """The values would be written over what the rotation made of the first 16 numbers."""
    k, q = torch.randn(2, 3, 1, 48, device=device), torch.randn(2, 3, 2, 48, device=device)
    angles = torch.rand(20, 8, device=device)
    cache, apart = torch.zeros(2, 2, 8, 1, 48, device=device)
    v = k[..., begin : begin + 16]

    def attend(keys, values):
        return paged_attn.flash_attn_with_kvcache(
            q, keys, values, k, v, angles.cos(), angles.sin(), cache_seqlens=2, causal=True
        )

    if begin < 16:
        words = f"^rotary_cos: expected rotary_dim of at most {begin}, where the values begin .*, got 16$"
        with pytest.raises(RuntimeError, match=words):
            attend(cache, cache[..., begin : begin + 16])
        assert not cache.any()
    elif device == "mps":
        pytest.skip("Metal: a kernel that writes takes it that its buffers share no memory")
    else:
        ours = attend(cache, cache[..., begin : begin + 16])
        assert torch.equal(ours, attend(apart, torch.zeros(2, 8, 1, 16, device=device)))
        assert torch.equal(cache, apart)


def test_keys_and_values_in_pages_by_turns(paged_attn, device):
    """The caches lie in each other, the pages of a table do not: so transformers' continuous batching has them."""
    pool, apart = torch.zeros(5, 8, 2, 48, device=device), torch.zeros(2, 2, 8, 2, 48, device=device)
    k, v = torch.randn(2, 2, 3, 2, 48, device=device)
    q = torch.randn(2, 3, 2, 48, device=device)
    table = torch.tensor([[0], [2]], dtype=torch.int32, device=device)
    ours = paged_attn.flash_attn_with_kvcache(q, pool[:-1], pool[1:], k, v, cache_seqlens=1, block_table=table)
    assert torch.equal(ours, paged_attn.flash_attn_with_kvcache(q, *apart, k, v, cache_seqlens=1))
    assert torch.equal(pool[[0, 2]], apart[0]) and torch.equal(pool[[1, 3]], apart[1])
    paged_attn.kv_paged_write(v, k, pool[:-1], pool[1:], table, 1)
    assert torch.equal(pool[[0, 2], 1:4], v) and torch.equal(pool[[1, 3], 1:4], k)


def test_tokens_of_the_cache_itself(paged_attn, device):
    """Moved within it: whether a token is read before another one is written over it, no caller knows."""
    cache, values = torch.randn(2, 1, 8, 2, 64, device=device)
    before, q = cache.clone(), torch.zeros(1, 1, 2, 64, device=device)
    tokens, new = cache[:, :4], torch.zeros(1, 4, 2, 64, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for k, v, blamed in ((tokens, new, "k"), (new, tokens, "v")):
        with pytest.raises(RuntimeError, match=f"^k_cache: expected memory of its own, got memory of {blamed}$"):
            paged_attn.flash_attn_with_kvcache(q, cache, values, k, v, cache_seqlens=2)
        with pytest.raises(RuntimeError, match=f"^k_cache: expected memory of its own, got memory of {blamed}$"):
            paged_attn.kv_paged_write(k, v, cache, values, table, 2)
    assert torch.equal(cache, before)
    paged_attn.kv_paged_write(tokens.clone(), new, cache, values, table, 2)
    assert torch.equal(cache[:, 2:6], before[:, :4])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_expanded_caches_are_not_written(paged_attn, device, name):
    """Every request would write into the row of all. They may be read."""
    one, q, new = (torch.zeros(n, t, 1, 8, device=device) for n, t in ((1, 4), (3, 1), (3, 1)))
    caches = {n: torch.zeros(3, 4, 1, 8, device=device) for n in ("k_cache", "v_cache")} | {
        name: one.expand(3, 4, 1, 8)
    }
    match = rf"^{name}: expected rows that share no memory, got rows of 32 bytes that begin 0 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        paged_attn.flash_attn_with_kvcache(q, **caches, k=new + 1, v=new + 1, cache_seqlens=0)
    with pytest.raises(RuntimeError, match=match):
        slots = torch.tensor([0, 4, 8], device=device)
        paged_attn.kv_paged_write(new[:, 0] + 1, new[:, 0] + 1, **caches, slot_mapping=slots)
    assert not one.any()
    paged_attn.flash_attn_with_kvcache(q, **caches, cache_seqlens=3)


def test_shared_memory_has_the_name_of_the_caller(paged_attn, device):
    q, k, v = (torch.randn(1, 8, 2, 64, device=device) for _ in range(3))
    with pytest.raises(RuntimeError, match=r"^out: expected memory of its own, got memory of v$"):
        paged_attn.flash_attn_func(q, k, v, out=v)


# What is expanded to (2, 3, 4, 64).
EXPANDED = {"batch": (1, 3, 4, 64), "tokens": (2, 1, 4, 64), "heads": (2, 3, 1, 64)}


@pytest.mark.parametrize("name", EXPANDED)
def test_rows_that_share_memory_are_refused(paged_attn, device, name):
    call = cases.build(PLAIN).to(device)
    out = torch.full(EXPANDED[name], 7.0, dtype=torch.bfloat16, device=device)
    match = r"^out: expected rows that share no memory, got rows of 128 bytes that begin 0 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        run(paged_attn, call, out=out.expand(2, 3, 4, 64))
    assert (out == 7.0).all()


def test_rows_that_overlap_in_part_are_refused(paged_attn, device):
    call = cases.build(PLAIN).to(device)
    out = torch.full((2000,), 7.0, dtype=torch.bfloat16, device=device)
    match = r"^out: expected rows that share no memory, got rows of 128 bytes that begin 126 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        run(paged_attn, call, out=out.as_strided((2, 3, 4, 64), (768, 256, 63, 1)))
    assert (out == 7.0).all()


def test_rows_of_8_bits_that_share_one_byte_are_refused(paged_attn, device):
    k, memory = torch.ones(1, 2, 2, 16, device=device), torch.zeros(500, device=device).to(torch.float8_e4m3fn)
    k_cache, v_cache = (memory[begin:].as_strided((1, 4, 2, 16), (62, 31, 15, 1)) for begin in (0, 250))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    match = r"^k_cache: expected rows that share no memory, got rows of 16 bytes that begin 15 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        paged_attn.kv_paged_write(k, k, k_cache, v_cache, table, 1)
    assert (memory.float() == 0).all()


def test_rows_that_overlap_only_together_are_refused(paged_attn, device):
    """The second head of the first token is where the first head of the second one is."""
    q, out = torch.zeros(1, 2, 2, 8, device=device), torch.full((24,), 7.0, device=device)
    match = r"^out: expected rows that share no memory, got rows of 64 bytes that begin 32 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        paged_attn.flash_attn_func(q, q, q, out=out.as_strided((1, 2, 2, 8), (0, 8, 8, 1)))
    assert (out == 7.0).all()


def fused(a):
    """q and out side by side in every token of one tensor, as a fused projection has them."""
    wide = torch.zeros(2, 3, 8, 64, dtype=a["q"].dtype, device=a["q"].device)
    a["q"] = wide[:, :, 4:].copy_(a["q"])
    return wide[:, :, :4]


def heads_between(a):
    """Heads of q and out in turn."""
    wide = torch.zeros(2, 3, 4, 2, 64, dtype=a["q"].dtype, device=a["q"].device)
    a["q"] = wide[:, :, :, 0].copy_(a["q"])
    return wide[:, :, :, 1]


def halves_of_rows(a):
    wide = torch.zeros(2, 3, 4, 128, dtype=a["q"].dtype, device=a["q"].device)
    a["q"] = wide[..., 64:].copy_(a["q"])
    return wide[..., :64]


def page_of_a_pool(a):
    """K, V and results of a page side by side: out lies between the keys and values of the pages."""
    pages, slots = a["k_cache"].shape[:2]
    pool = torch.zeros(pages, 3, slots, 2, 64, dtype=a["q"].dtype, device=a["q"].device)
    a["k_cache"], a["v_cache"] = pool[:, 0].copy_(a["k_cache"]), pool[:, 1].copy_(a["v_cache"])
    return pool[:2, 2].view(2, slots // 2, 4, 64)[:, :3]


def heads_first(a):
    return torch.zeros(2, 4, 3, 64, dtype=a["q"].dtype, device=a["q"].device).transpose(1, 2)


BESIDE = (fused, heads_between, halves_of_rows, page_of_a_pool, heads_first)


@pytest.mark.parametrize("make_out", BESIDE, ids=lambda function: function.__name__)
def test_memory_beside_the_inputs_is_fine(paged_attn, device, make_out):
    call = cases.build(PLAIN).to(device)
    expected, expected_lse = run(paged_attn, call)
    k_cache, v_cache = call.caches()
    arguments = call.kwargs | {"k_cache": k_cache, "v_cache": v_cache}
    arguments["out"] = make_out(arguments)
    out, lse = paged_attn.flash_attn_with_kvcache(**arguments)
    assert out.data_ptr() == arguments["out"].data_ptr()
    torch.testing.assert_close(out, expected, rtol=0.02, atol=1e-3)  # other alignment may be another route
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


STRIDES = ((96, 32, 8), (96, 32, 16), (8, 64, 16), (200, 16, 48), (64, 16, 8))


def test_random_views_of_one_tensor(paged_attn, device):
    """What is refused shares elements, and what shares elements is refused where both views have the same strides."""
    dice, memory = random.Random(1), torch.zeros(1000, device=device)
    numbers = torch.arange(len(memory))
    k, v = (torch.randn(2, 5, 1, 8, device=device) for _ in range(2))
    count = {"refused": 0, "apart": 0, "undecided": 0}
    for _ in range(400):
        size = (2, dice.choice((1, 3)), dice.choice((1, 2)), 8)
        strides = [dice.choice(STRIDES)] * 2 if dice.random() < 0.6 else dice.choices(STRIDES, k=2)
        views = [(size, (*s, 1), dice.randrange(120)) for s in strides]
        elements = [set(numbers.as_strided(*view).flatten().tolist()) for view in views]
        shared = not elements[0].isdisjoint(elements[1])
        q, out = (memory.as_strided(*view) for view in views)
        try:
            paged_attn.flash_attn_func(q, k, v, out=out)
        except RuntimeError as error:
            assert str(error) == "out: expected memory of its own, got memory of q" and shared, views
            count["refused"] += 1
        else:
            assert not shared or strides[0] != strides[1], views
            count["undecided" if shared else "apart"] += 1
    assert min(count["refused"], count["apart"]) > 50, count


def test_rows_of_lse_that_share_memory_are_refused(paged_attn, device):
    """Of the operator itself: the functions make the lse."""
    x = torch.randn(1, 3, 2, 64, device=device)
    lse = torch.full((1, 1, 3), 7.0, device=device)
    match = r"^softmax_lse: expected rows that share no memory, got rows of 12 bytes that begin 0 bytes apart$"
    with pytest.raises(RuntimeError, match=match):
        paged_attn._ops.ops.flash_attn_with_kvcache_plain(
            x, x, x, torch.zeros_like(x), lse.expand(1, 2, 3), None, None, 0.1, -1
        )
    assert (lse == 7.0).all()
