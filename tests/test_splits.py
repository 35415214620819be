"""Properties that need no reference: what must not change a result, or not by a bit."""

import itertools

import cases
import pytest
import reference
import torch
from cases import Case
from compare import assert_result, assert_same_bits, check, judge, run, torch_threads, with_tensor_lengths

SHAPES = [
    Case(batch=1, kv_len=3000, q_heads=8, head_dim=128),
    Case(batch=5, kv_len=700, q_heads=16, head_dim=64, dtype="float32"),
    Case(batch=3, kv_len=500, q_len=4, causal=True, dtype="float16", window=(300, 0), sink="float32"),
    Case(batch=4, kv_len=400, q_len=70, varlen_q=True, causal=True, page_size=3, softcap=2.5),
    Case(batch=4, kv_len=400, kv_dtype="float8_e4m3fn", descale="full", page_size=0, leftpad=True),
    Case(batch=2, kv_len=300, head_dim=576, head_dim_v=512, layout="latent", kv_heads=1, q_heads=16, page_size=64),
]


# Long keys and more rows than decode has; in the second beside requests of few rows.
PROMPTS = [
    Case(batch=2, lens=(2100, 1300), q_len=140, causal=True),
    Case(batch=3, kv_len=2100, q_len=140, varlen_q=True, causal=True, dtype="float32"),
]


# Requests that alone are cut, or have items of another size, as a batch of so many keeps a GPU busy without that.
BATCHES = [
    Case(batch=70, kv_len=1100, q_heads=4, kv_heads=4),
    Case(batch=17, lens=(8000, *[40] * 16), q_heads=16, kv_heads=16),
    Case(batch=40, kv_len=1100, q_len=2, kv_dtype="float8_e4m3fn", causal=True),
    Case(batch=70, kv_len=1100, q_len=5, varlen_q=True, causal=True),
    Case(batch=40, kv_len=1100, q_len=30, varlen_q=True, causal=True, q_heads=2),
]


NUM_SPLITS = (1, 2, 3, 7, 16, 64, 1000, 1_000_000)
SANITIZED_SPLITS = (3, 64, 1_000_000)  # few, many, more than there are keys


@pytest.mark.parametrize(
    "num_splits", [pytest.param(n, marks=[pytest.mark.sanitize] * (n in SANITIZED_SPLITS)) for n in NUM_SPLITS]
)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_any_number_of_splits(paged_attn, device, case, num_splits):
    check(paged_attn, case, device, num_splits=num_splits)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"num_splits": 1_000_000}], ids=str)
def test_cuts_of_prompts(paged_attn, device, options):
    check(paged_attn, Case(batch=1, kv_len=2100, q_len=70, causal=True), device, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_repeating_gives_the_same_bits(paged_attn, device, case, deterministic):
    call = cases.build(case).to(device)
    first = run(paged_attn, call, deterministic=deterministic)
    for _ in range(5):
        assert_same_bits(run(paged_attn, call, deterministic=deterministic), first)


@pytest.mark.parametrize("case", [case for case in SHAPES if case.page_size], ids=str)
def test_order_of_pages_changes_no_bit(paged_attn, device, case):
    call, moved = cases.build(case).to(device), cases.build(case).to(device)
    table, num_pages = moved.kwargs["block_table"], moved.storage[0].shape[0] - 2 * cases.GUARD
    torch.manual_seed(3)
    to = torch.randperm(num_pages)
    for before, after in zip(call.storage, moved.storage):
        bits = reference.BITS[before.itemsize]
        after.view(bits)[to.to(device) + cases.GUARD] = before.view(bits)[cases.GUARD : -cases.GUARD]
    used = (table >= 0) & (table < num_pages)
    table[used] = to.to(table)[table[used].long()]
    assert_same_bits(run(paged_attn, call), run(paged_attn, moved))


@pytest.mark.parametrize("page_size", [1, 8, 100, 400])
def test_size_of_pages_is_no_feature(paged_attn, device, page_size):
    """The same keys on other pages: within the tolerance; the contiguous cache is one of them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, device=device).bfloat16() for n, h in ((1, 4), (400, 2), (400, 2)))
    pages = 400 // page_size
    table = torch.arange(2 * pages, device=device).flip(0).view(2, pages).to(torch.int32)
    k_cache, v_cache = (x.reshape(2 * pages, page_size, 2, 64).flip(0) for x in (k, v))
    out, lse = paged_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=391, block_table=table, return_softmax_lse=True
    )
    kwargs = {"q": q.cpu(), "cache_seqlens": torch.tensor([391, 391])}
    assert_result(out, lse, kwargs, k.cpu(), v.cpu(), [0, 0])


def one_request(call, b):
    """The arguments of request b alone, on the same cache."""
    kwargs = dict(call.kwargs)
    batch = len(kwargs["cache_seqlens"])
    if "cu_seqlens_q" in kwargs:
        begin, end = kwargs["cu_seqlens_q"][b : b + 2].tolist()
        kwargs["q"] = kwargs["q"][begin:end]
        kwargs["cu_seqlens_q"] = torch.tensor([0, end - begin], dtype=torch.int32, device=kwargs["q"].device)
        kwargs["max_seqlen_q"] = end - begin
        rows = slice(begin, end)
    else:
        kwargs["q"], rows = kwargs["q"][b : b + 1], slice(b, b + 1)
    for name in ("cache_seqlens", "block_table", "cache_leftpad", "k_descale", "v_descale"):
        if name in kwargs:
            kwargs[name] = kwargs[name][b : b + 1]
    if "block_table" not in kwargs and batch > 1:
        kwargs["cache_batch_idx"] = torch.tensor([b], dtype=torch.int32, device=kwargs["q"].device)
    return kwargs, rows


@pytest.mark.parametrize("num_splits", [0, 4])
@pytest.mark.parametrize("case", SHAPES + PROMPTS + BATCHES, ids=str)
def test_deterministic_does_not_see_the_batch(paged_attn, device, case, num_splits):
    """Some requests alone give the bits that they give in the batch, and in the batch turned around."""
    call = cases.build(case).to(device)
    options = {"deterministic": True, "num_splits": num_splits}
    out, lse = run(paged_attn, call, **options)
    k_cache, v_cache = call.caches()
    for b in range(0, case.batch, case.batch // 8 + 1):
        kwargs, rows = one_request(call, b)
        alone = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **(kwargs | options))
        assert torch.equal(alone[0], out[rows])
        assert torch.equal(alone[1], lse[:, rows] if case.varlen_q else lse[rows])
    if not case.varlen_q and case.page_size:
        turned = {name: call.kwargs[name].flip(0) for name in ("q", "block_table", "cache_seqlens")}
        assert torch.equal(run(paged_attn, call, **options, **turned)[0].flip(0), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_deterministic_does_not_see_the_queries_of_others(paged_attn, device, q_len, dtype):
    """Packed requests lie side by side in memory; the scores of the second one are far larger, or not numbers."""
    q_lens, kv_len = (q_len, 40), 200
    for seed, factor in itertools.product(range(3), (1.0, 20.0, torch.nan)):
        torch.manual_seed(seed)
        q = torch.randn(sum(q_lens), 8, 64).to(dtype)
        k_cache, v_cache = (torch.randn(2, kv_len, 2, 64).to(dtype).to(device) for _ in range(2))
        q[q_len:] *= factor
        results = []
        for requests in (1, 2):
            cu = torch.tensor([0, *itertools.accumulate(q_lens[:requests])], dtype=torch.int32, device=device)
            out, lse = paged_attn.flash_attn_with_kvcache(
                q[: cu[-1]].to(device), k_cache, v_cache, cache_seqlens=kv_len, cu_seqlens_q=cu, max_seqlen_q=40,
                causal=True, deterministic=True, return_softmax_lse=True,
            )  # fmt: skip
            results.append((out[:q_len], lse[:, :q_len]))
        assert_same_bits(*results)


@pytest.mark.parametrize("case", SHAPES + PROMPTS, ids=str)
def test_deterministic_does_not_see_the_threads(paged_attn, device, case):
    call = cases.build(case).to(device)
    results = []
    for count in (1, 2, 5):
        with torch_threads(count):
            results.append(run(paged_attn, call, deterministic=True))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("varlen_q", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cut", [0, 1, 16, 100, 199, 200])
def test_merged_parts_are_the_whole(paged_attn, device, dtype, cut, varlen_q):
    """Keys [0, cut) and [cut, kv_len) apart, then merged; one part or both may be empty."""
    case = Case(kv_len=200, q_len=3, varlen_q=varlen_q, dtype=dtype, softcap=2.5)
    call, before = cases.build(case).to(device), cases.build(case)
    lens = call.kwargs["cache_seqlens"]
    head = run(paged_attn, call, cache_seqlens=lens.clamp(max=cut))
    tail = run(paged_attn, call, cache_leftpad=lens.clamp(max=cut))
    out, lse = paged_attn.merge_attn_states(*head, *tail)
    judge(out, lse, call, before)
    assert_same_bits(paged_attn.merge_attn_states(*tail, *head), (out, lse))


def test_sink_belongs_to_one_part(paged_attn, device):
    case = Case(kv_len=200, q_len=3, sink="float32", dtype="float32")
    call, before = cases.build(case).to(device), cases.build(case)
    lens = call.kwargs["cache_seqlens"]
    head = run(paged_attn, call, cache_seqlens=lens.clamp(max=60))
    tail = run(paged_attn, call, cache_leftpad=lens.clamp(max=60), s_aux=None)
    judge(*paged_attn.merge_attn_states(*head, *tail), call, before)


def test_merge_of_nothing_is_nothing(paged_attn, device):
    out, lse = torch.zeros(2, 3, 4, 64, device=device), torch.full((2, 4, 3), -torch.inf, device=device)
    some = torch.randn(2, 3, 4, 64, device=device), torch.randn(2, 4, 3, device=device)
    assert_same_bits(paged_attn.merge_attn_states(out, lse, out, lse), (out, lse))
    assert_same_bits(paged_attn.merge_attn_states(*some, out, lse), some)
    assert_same_bits(paged_attn.merge_attn_states(out, lse, *some), some)


def test_values_of_a_part_without_weight(paged_attn, device):
    """Nobody may have written them."""
    some = torch.randn(2, 3, 4, 64, device=device), torch.randn(2, 4, 3, device=device)
    values = torch.full((2, 3, 4, 64), torch.nan, device=device)
    nothing, little = ((values, torch.full((2, 4, 3), x, device=device)) for x in (-torch.inf, -1000.0))
    for part in (nothing, little):
        assert_same_bits(paged_attn.merge_attn_states(*some, *part), some)
        assert_same_bits(paged_attn.merge_attn_states(*part, *some), some)
    assert_same_bits(paged_attn.merge_attn_states(*nothing, *nothing), (torch.zeros_like(values), nothing[1]))
    # A part that counts keeps its NaN.
    assert paged_attn.merge_attn_states(values, some[1], *some)[0].isnan().all()


def test_merge_into_given_tensors(paged_attn, device):
    """Also into the tensors of one of the parts, as engines do."""
    a, b = ((torch.randn(5, 4, 64, device=device), torch.randn(4, 5, device=device)) for _ in range(2))
    expected = paged_attn.merge_attn_states(*a, *b)
    out, lse = torch.full_like(a[0], torch.nan), torch.full_like(a[1], torch.nan)
    result = paged_attn.merge_attn_states(*a, *b, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert_same_bits(result, expected)
    assert_same_bits(paged_attn.merge_attn_states(*a, *b, out=a[0], lse=a[1]), expected)
    assert_same_bits(a, expected)


def test_window_equals_the_keys_alone(paged_attn, device):
    """A window by another definition: the same keys in a cache of their own."""
    case = Case(batch=1, kv_len=300, page_size=0, dtype="float32")
    call, before = cases.build(case).to(device), cases.build(case)
    windowed = run(paged_attn, call, window_size=(49, 0))
    k_cache, v_cache = (cache[:, 250:300] for cache in call.caches())
    kwargs = call.kwargs | {"cache_seqlens": None}
    alone = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **kwargs)
    expected = before.kwargs | {"window_size": (49, 0)}
    for out, lse in (windowed, alone):
        assert_result(out, lse, with_tensor_lengths(before) | expected, *before.caches(), [0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("lse, other", [(-torch.inf, 0.0), (-1000.0, 0.0), (-torch.inf, -torch.inf)])
def test_merge_does_not_look_at_values_of_weight_0(paged_attn, device, lse, other, bad):
    """As with an lse of -inf, one so low that its weight is 0, and that of two parts without keys."""
    values, empty = torch.randn(5, 4, 16, device=device), torch.full((5, 4, 16), bad, device=device)
    low, high = (torch.full((4, 5), x, device=device) for x in (lse, other))
    expected = values
    if other == -torch.inf:
        values, expected = empty, torch.zeros_like(values)
    for parts in ((empty, low, values, high), (values, high, empty, low)):
        merged, merged_lse = paged_attn.merge_attn_states(*parts)
        assert torch.equal(merged, expected) and torch.equal(merged_lse, high)
