"""Numbers and sizes at the edge: NaN and infinities, huge scores, neutral and degenerate factors, empty tensors,
windows and positions far out."""

import functools
import math
import sys

import cases
import pytest
import torch
from cases import Case
from compare import assert_result, assert_same_bits, assert_same_bytes, check, judge, run, with_tensor_lengths

DTYPES = ["bfloat16", "float16", "float32"]


def both_calls(case, device):
    """The call on the device, and the same call on the CPU for the reference."""
    return cases.build(case).to(device), cases.build(case)


def change(calls, **kwargs):
    """The same new arguments in both."""
    for call in calls:
        place = call.kwargs["q"].device
        call.kwargs |= {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}


def test_cache_beyond_31_bits(paged_attn, device):
    """More elements than 2^31, of which only the last pages are touched: memory that nobody touches costs nothing."""
    if device != "cpu":
        pytest.skip("test_cuda.py has one of 32 GiB")
    case = Case(batch=3, kv_len=100, q_len=3, append=3, causal=True)
    call, before = both_calls(case, device)
    pages, per_page = call.storage[0].shape[0], call.storage[0][0].numel()
    first = 2**31 // per_page  # of the last pages, in the large cache
    large = [torch.empty(first + pages, *s.shape[1:], dtype=s.dtype) for s in call.storage]
    last = tuple(cache[first:] for cache in large)
    for into, storage in zip(last, call.storage):
        into.copy_(storage)
    used = call.kwargs["block_table"]
    used[(used >= 0) & (used < pages)] += first + cases.GUARD
    out, lse = paged_attn.flash_attn_with_kvcache(k_cache=large[0], v_cache=large[1], **call.kwargs)
    judge(out, lse, cases.Call(case, call.kwargs, last, call.seqlens_new), before)


FACTORS = {
    "scale 0": {"softmax_scale": 0.0},
    "scale below 0": {"softmax_scale": -0.2},
    "scale tiny": {"softmax_scale": 1e-30},
    "softcap 1e6": {"softcap": 1e6},
    "softcap 1e-3": {"softcap": 1e-3},
    "softcap 1e6, scale below 0": {"softcap": 1e6, "softmax_scale": -0.2},
    "slopes 0": {"alibi_slopes": torch.zeros(4)},
    "slopes below 0": {"alibi_slopes": torch.tensor([-0.1, -0.0, 0.2, -3.0])},
    "sinks infinite": {"s_aux": torch.tensor([-torch.inf, 3.0, -torch.inf, 0.0])},
    "sinks huge": {"s_aux": torch.tensor([1e5, -1e5, 1e30, -1e30])},
    "k_descale 0": {"k_descale": torch.tensor([[0.0, 1.0]]).expand(4, 2)},
    "k_descale below 0": {"k_descale": torch.tensor([[-1.5, 0.5]]).expand(4, 2)},
    "v_descale 0": {"v_descale": torch.tensor([[0.0, 1.0]]).expand(4, 2)},
    "v_descale below 0": {"v_descale": torch.tensor([[-1.5, 0.5]]).expand(4, 2)},
    "q_descale 0": {"q_descale": torch.tensor([[0.0, 1.0]]).expand(4, 2)},
    "q_descale below 0": {"q_descale": torch.tensor([[-1.5, 0.5]]).expand(4, 2)},
}


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FACTORS)
def test_factor(paged_attn, device, name, dtype, q_len):
    kv_dtype = "float8_e4m3fn" if "descale" in name else ""
    case = Case(kv_len=150, q_len=q_len, dtype=kv_dtype if name[0] == "q" else dtype, kv_dtype=kv_dtype)
    calls = both_calls(case, device)
    change(calls, **FACTORS[name])
    judge(*run(paged_attn, calls[0]), *calls)


# A cap, and one of the same meaning: without an end it bends nothing, and one that float32 has not leaves no score.
CAPS = [(math.inf, 0.0), (1e300, 0.0), (1e39, 0.0), (3e38, 0.0), (1e-39, 1e-20), (1e-46, 1e-20), (5e-324, 1e-20)]


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap, same", CAPS)
def test_softcap_that_float32_cannot_hold(paged_attn, device, softcap, same, dtype, q_len):
    """Also of scores that are 0."""
    calls = both_calls(Case(kv_len=150, q_len=q_len, dtype=dtype), device)
    for call, cap in zip(calls, (softcap, same)):
        call.kwargs["q"][:, 0, 0] = 0.0
        call.kwargs["softcap"] = cap
    judge(*run(paged_attn, calls[0]), *calls)


# No key lies so far away. The last of them plus a position is more than 64 bits hold.
FAR = [2**31 - 1, 2**31, 2**62, sys.maxsize]
FAR_FIELDS = {
    "window": lambda far: {"window": (far, far)},
    "left": lambda far: {"window": (far, 2)},
    "right": lambda far: {"window": (-1, far)},
    "causal": lambda far: {"window": (far, far), "causal": True},
    "chunk": lambda far: {"chunk": far},
    "chunk and window": lambda far: {"chunk": far, "window": (far, 0)},
}


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("q_len", [3, 40])
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", FAR_FIELDS)
def test_windows_and_chunks_beyond_all_keys(paged_attn, device, name, far, q_len, leftpad):
    check(paged_attn, Case(kv_len=60, q_len=q_len, leftpad=leftpad, **FAR_FIELDS[name](far)), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [2**24, 2**24 + 2**20])
def test_slopes_far_out(paged_attn, device, before, dtype, q_len):
    """float32 does not hold every position from 2^24 on. The bias counts from the query, so that a long request gives
    what its last keys give as a request of their own."""
    torch.manual_seed(0)
    page_size, kv_len = 256, 300 + q_len % 2  # an odd position and an even one at the end
    caches = [torch.randn(2, page_size, 2, 64).to(getattr(torch, dtype)) for _ in range(2)]
    q, slopes = torch.randn(1, q_len, 4, 64).to(getattr(torch, dtype)), torch.tensor([0.5, 0.1, 1.0, -0.3])
    alone = {"q": q, "alibi_slopes": slopes, "window_size": (64, 0), "cache_seqlens": torch.tensor([kv_len])}
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    for earlier in (0, before):
        out, lse = paged_attn.flash_attn_with_kvcache(
            q.to(device), *(cache.to(device) for cache in caches), cache_seqlens=earlier + kv_len,
            block_table=table.repeat(1, earlier // page_size // 2 + 1), alibi_slopes=slopes.to(device),
            window_size=(64, 0), return_softmax_lse=True,
        )  # fmt: skip
        assert_result(out, lse, alone, *(cache.view(1, 2 * page_size, 2, 64) for cache in caches), [0])


@pytest.mark.parametrize("v_descale", [0.0, -0.5, 1e-39])
def test_descale_of_values_with_qv(paged_attn, device, v_descale):
    """The values are in the score too then, if they count for anything."""
    if v_descale == 1e-39 and torch.device(device).type != "cpu":
        pytest.skip("a number that only the CPU does not take for 0")
    calls = both_calls(Case(kv_len=60, head_dim_v=512, qv=True, kv_dtype="float8_e4m3fn", descale="full"), device)
    for call in calls:
        call.kwargs["v_descale"] = torch.full((4, 2), v_descale, device=call.kwargs["q"].device)
    judge(*run(paged_attn, calls[0]), *calls)


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("size", [30.0, 3000.0])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores(paged_attn, device, dtype, q_len, size, scale):
    """Up to 1e5 and of both signs: far beyond what exp can hold; the largest one takes the row. With a negative scale
    it is that of the smallest product."""
    calls = both_calls(Case(kv_len=300, q_len=q_len, dtype=dtype, scale=scale), device)
    for call in calls:
        call.kwargs["q"].mul_(size)
    out, lse = run(paged_attn, calls[0])
    assert torch.isfinite(out).all()
    judge(out, lse, *calls)


@pytest.mark.every_isa
@pytest.mark.parametrize("score", [1e5, 1e6, 1e7, 2e9, 1e11, 1e30])
@pytest.mark.parametrize("q_len, deterministic", [(1, False), (3, False), (40, False), (40, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_out(paged_attn, device, dtype, q_len, deterministic, score):
    """One key scores so much that all others count for nothing, also where float32 rounds such scores by many powers of
    two. float16 is short of them: the scale makes them. Its probability is 1. deterministic: where a kernel for long
    queries would not be taken for so few. Its weights are rounded to `dtype`."""
    rtol = max(1e-6, torch.finfo(getattr(torch, dtype)).eps) if deterministic else 1e-6
    like = {"dtype": getattr(torch, dtype), "device": device}
    keys, v, q = (
        torch.zeros(1, 32, 1, 64, **like),
        torch.zeros(1, 32, 1, 64, **like),
        torch.zeros(1, q_len, 1, 64, **like),
    )
    v[0, :, 0], q[..., 0] = torch.arange(32.0, device=device)[:, None], 1
    for i in range(50):
        keys[0, 3, 0, 0], scale = 1 + i / 64, score * (1 + i / 333)  # a product that float32 does not hold
        out, lse = paged_attn.flash_attn_func(
            q, keys, v, softmax_scale=scale, deterministic=deterministic, return_softmax_lse=True
        )
        torch.testing.assert_close(out, torch.full_like(out, 3), rtol=rtol, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, (1 + i / 64) * scale), rtol=1e-6, atol=0)


@pytest.mark.every_isa
@pytest.mark.parametrize("score", [1e5, 1e7, 1e11, 1e30])
@pytest.mark.parametrize("q_len, deterministic", [(1, False), (3, False), (40, False), (40, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_below_0(paged_attn, device, dtype, q_len, deterministic, score):
    """All are: the key that lies highest takes the row, and its probability is 1."""
    rtol = max(1e-6, torch.finfo(getattr(torch, dtype)).eps) if deterministic else 1e-6
    like = {"dtype": getattr(torch, dtype), "device": device}
    keys, v = torch.zeros(1, 32, 1, 64, **like), torch.zeros(1, 32, 1, 64, **like)
    q = torch.zeros(1, q_len, 1, 64, **like)
    keys[..., 0], v[0, :, 0], q[..., 0] = 4, torch.arange(32.0, device=device)[:, None], -1
    for i in range(50):
        keys[0, 3, 0, 0], scale = 1 + i / 64, score * (1 + i / 333)  # a product that float32 does not hold
        out, lse = paged_attn.flash_attn_func(
            q, keys, v, softmax_scale=scale, deterministic=deterministic, return_softmax_lse=True
        )
        torch.testing.assert_close(out, torch.full_like(out, 3), rtol=rtol, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, -(1 + i / 64) * scale), rtol=1e-6, atol=0)


@pytest.mark.every_isa
@pytest.mark.parametrize("score", [1e5, 1e8, 1e11, 1e30, -1e5, -1e8, -1e11, -1e30])
@pytest.mark.parametrize(
    "dtype, kv_dtype, q_len, q_heads, head_dim, head_dim_v",
    [
        ("bfloat16", "bfloat16", 2, 16, 576, 512),
        ("float16", "float16", 2, 16, 576, 512),
        ("bfloat16", "float8_e4m3fn", 2, 16, 576, 512),
        ("bfloat16", "bfloat16", 70, 4, 128, 128),
        ("float16", "float16", 70, 4, 128, 128),
        ("bfloat16", "float8_e4m3fn", 70, 4, 128, 128),
        ("float8_e4m3fn", "float8_e4m3fn", 70, 4, 128, 128),
    ],
)
def test_scores_far_out_in_a_cache(paged_attn, device, dtype, kv_dtype, q_len, q_heads, head_dim, head_dim_v, score):
    """The same of latents and of 8 bits. All other keys are 0, or twice as far below 0. The key is among the first and
    among the last, as kernels begin at either end."""
    dtype, kv_dtype = getattr(torch, dtype), getattr(torch, kv_dtype)
    for key in (3, 450):
        rows = torch.zeros(8, 64, 1, head_dim)
        q = torch.zeros(1, q_len, q_heads, head_dim)
        q[..., -1] = math.copysign(1, score)
        rows[..., -1] = 2.5 if score < 0 else 0
        rows.view(512, head_dim)[key, -1] = 1.25
        rows.view(512, head_dim)[key, 0] = 3
        cache = rows.to(kv_dtype).to(device)
        out, lse = paged_attn.flash_attn_with_kvcache(
            q.to(dtype).to(device),
            cache,
            cache[..., :head_dim_v],
            cache_seqlens=torch.tensor([500], dtype=torch.int32, device=device),
            block_table=torch.arange(8, dtype=torch.int32, device=device)[None],
            softmax_scale=abs(score) * 1.003,
            deterministic=True,
            return_softmax_lse=True,
        )
        eps = torch.finfo(kv_dtype if dtype.itemsize == 1 else torch.bfloat16).eps
        torch.testing.assert_close(out[..., 0].float(), torch.full_like(lse.mT, 3), rtol=eps, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, 1.25 * score * 1.003), rtol=1e-6, atol=0)


NAN_BYTES = {"float8_e4m3fn": (0x7F, 0xFF), "float8_e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)}


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", NAN_BYTES)
def test_every_nan_of_8_bits_is_one(paged_attn, device, kv_dtype, dtype, q_len):
    """In a value that a row sees: its column is NaN, whichever of the bytes says so."""
    for byte in NAN_BYTES[kv_dtype]:
        call = cases.build(Case(batch=1, lens=(50,), q_len=q_len, dtype=dtype, kv_dtype=kv_dtype)).to(device)
        page = int(call.kwargs["block_table"][0, 1])
        call.caches()[1].view(torch.uint8)[page, 4, 1, 5] = byte
        out, lse = run(paged_attn, call)
        assert out[0, :, 2:, 5].isnan().all() and lse.isfinite().all(), hex(byte)


@pytest.mark.every_isa
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows", [1, 4, 8, 40, 136])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_small_probabilities(paged_attn, device, dtype, rows, cache):
    """Of 2^-23.6 each, which float16 has one bit for: half of it lost would be a quarter of the result."""
    kind, heads, keys = getattr(torch, dtype), min(rows, 8), 2**14
    k = torch.zeros(1, keys, 1, 64, device=device)
    v = torch.full_like(k, 64.0)
    k[:, 0, :, 0], v[:, 0] = 1, 0
    k, v = (x.to(getattr(torch, cache) if cache else kind) for x in (k, v))
    q = torch.zeros(1, rows // heads, heads, 64, dtype=kind, device=device)
    q[..., 0] = 1
    out = paged_attn.flash_attn_with_kvcache(q, k, v, softmax_scale=23.6 * math.log(2))
    together = (keys - 1) * 2**-23.6
    torch.testing.assert_close(out, torch.full_like(q, 64 * together / (1 + together)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("rows", [1, 17, 23])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_million_equal_keys(paged_attn, device, emulated, threads, rows):
    """A float32 sum of so many would be off by more than a percent: each addition is rounded the same way."""
    if emulated:
        pytest.skip("minutes")
    value, keys = torch.tensor(0.7, dtype=torch.bfloat16), 1 << 20
    q = torch.zeros(1, 1, rows, 8, dtype=torch.bfloat16, device=device)
    k, v = (x[:, :, :1].expand(1, keys, 1, 8) for x in (q, q + value.item()))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = paged_attn.flash_attn_func(q, k, v)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.float().cpu(), value.float().expand(1, 1, rows, 8), rtol=2**-8, atol=0)


def test_infinite_sink_takes_everything(paged_attn, device):
    call = cases.build(Case(q_len=2, sink="float32")).to(device)
    call.kwargs["s_aux"][0] = torch.inf
    out, lse = run(paged_attn, call)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, 0] == torch.inf).all()
    assert torch.isfinite(out).all()


def poison_key(call, cache_index, b, position, kv_head, dim, value):
    """Overwrites one number of one key or value of request b."""
    cache, page_size = call.caches()[cache_index], call.case.page_size
    page = int(call.kwargs["block_table"][b, position // page_size])
    cache[page, position % page_size, kv_head, dim] = value


@pytest.mark.sanitize
@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["key", "value", "query"])
def test_nan_and_infinity_stay_where_they_belong(paged_attn, device, what, bad, dtype, q_len):
    """In one key or value: in the rows of that request and kv_head; in one row of q: in that row."""
    case = Case(batch=3, lens=(80, 60, 100), q_len=q_len, dtype=dtype, q_heads=6, kv_heads=3)
    calls = call, before, clean = *both_calls(case, device), cases.build(case).to(device)
    for each in calls:
        each.kwargs["q"][..., 7] = 1.0  # so that a score with an infinite key is +inf
    good = run(paged_attn, call)
    rows = torch.zeros(3, q_len, 6, dtype=torch.bool)
    if what == "query":
        rows[1, q_len // 2, 3] = True
        call.kwargs["q"][1, q_len // 2, 3, 7] = bad
    else:
        rows[1, :, 2:4] = True
        poison_key(call, ["key", "value"].index(what), 1, 40, 1, 7, bad)
    out, lse = run(paged_attn, call)
    out, lse, good = out.cpu(), lse.cpu(), [x.cpu() for x in good]
    reached = out[..., 7] if what == "value" else out[..., 0]
    assert not torch.isfinite(reached[rows]).any()
    if what != "value":
        assert not (torch.isfinite(lse.mT) & rows).any()
    # All else is right.
    out[rows] = good[0][rows]
    lse = torch.where(rows.mT, good[1], lse)
    judge(out, lse, clean, before)


# Queries, and heads that share keys: few rows and many, whose products are made in other ways.
ROWS = [(1, 1), (1, 4), (3, 2), (1, 40), (40, 2)]


def judge_with_values(paged_attn, calls, places, columns_shared):
    """places: request, position, kv_head, dimension and a value for it. columns_shared: what is infinite may make its
    column NaN, in rows that share a product, but nothing else."""

    def put(value_of):
        for call in calls:
            for b, position, kv_head, dim, value in places:
                poison_key(call, 1, b, position, kv_head, dim, value_of(value))

    put(float)
    out, lse = run(paged_attn, calls[0])
    if columns_shared:
        put(lambda value: 1.0)
        columns = sorted({dim for *_, dim, _ in places})
        out[..., columns] = run(paged_attn, calls[0])[0][..., columns]
    judge(out, lse, *calls)


# Of request 0 and 1: of every sign, both in one column, and in the last key.
BAD_VALUES = [
    (0, 40, 1, 7, "inf"),
    (0, 19, 1, 8, "-inf"),
    (0, 3, 1, 20, "inf"),
    (0, 50, 1, 20, "-inf"),
    (0, 60, 1, 33, "nan"),
    (0, 130, 0, 12, "inf"),
    (1, 76, 1, 63, "-inf"),
]


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len, group", ROWS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e5m2"])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_infinite_values_stay_in_their_columns(paged_attn, device, dtype, q_len, group, num_splits):
    """Of every sign, both in one column, NaN, and in the last key, behind which a product may be filled up. Scores are
    small: a probability that rounds to 0 in 16 bits would make NaN of an infinity. Metal's prompts scale rows by a
    diagonal matrix, so that there it does."""
    case = Case(
        batch=2, lens=(131, 77), q_len=q_len, q_heads=2 * group, dtype=dtype, num_splits=num_splits, scale=0.02,
        kv_dtype=dtype if dtype == "float8_e5m2" else "",
    )  # fmt: skip
    shared = device == "mps" and q_len * group >= 40
    judge_with_values(paged_attn, both_calls(case, device), BAD_VALUES, columns_shared=shared)


SEEN_BY_SOME = {
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "window_causal": {"causal": True, "window": (9, 0), "sink": "float32"},
    "chunk": {"chunk": 24},
    "splits": {"causal": True, "num_splits": 3},
    "long": {"causal": True, "lens": (400, 333)},
}


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len, group", [(2, 1), (4, 4), (40, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SEEN_BY_SOME)
def test_infinite_values_that_some_rows_see(paged_attn, device, name, dtype, q_len, group):
    """They do not reach the rows beside them. On a GPU they do, in their own columns."""
    case = Case(
        **({"batch": 2, "lens": (131, 77), "q_len": q_len, "q_heads": 2 * group, "dtype": dtype} | SEEN_BY_SOME[name])
    )
    places = [
        (b, length - 1 - before_last, 1, dim, value)
        for b, length in enumerate(case.lens)
        for before_last, dim, value in ((0, 7, "inf"), (1, 8, "nan"), (5, 9, "-inf"), (25, 10, "inf"))
    ]
    judge_with_values(paged_attn, both_calls(case, device), places, columns_shared=device != "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_values_of_more_rows_than_a_thread_takes(paged_attn, device, dtype):
    """Where the rows are cut, heads of one token are in two pieces."""
    case = Case(batch=1, lens=(230,), q_len=203, q_heads=5, kv_heads=1, dtype=dtype, causal=True)
    places = [(0, 229 - before_last, 0, dim, "inf") for before_last, dim in ((0, 7), (1, 8), (60, 9), (201, 10))]
    judge_with_values(paged_attn, both_calls(case, device), places, columns_shared=device != "cpu")


def calls_with_ones(device, dtype, q_len, group, **fields):
    """Two calls whose queries are 1 in dimension 3: the sign of what stands there in a key is that of its score."""
    case = Case(batch=2, lens=(131, 77), q_len=q_len, q_heads=2 * group, dtype=dtype, **fields)
    calls = both_calls(case, device)
    for call in calls:
        call.kwargs["q"][..., 3] = 1.0
    return calls


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len, group", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_of_minus_infinity_is_not_there(paged_attn, device, dtype, q_len, group):
    """Its scores are -inf: the result is that of the other keys."""
    calls = calls_with_ones(device, dtype, q_len, group)
    for call in calls:
        for kv_head, position in enumerate((20, 76)):
            poison_key(call, 0, 1, position, kv_head, 3, -torch.inf)
    judge(*run(paged_attn, calls[0]), *calls)


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len, group", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_key_under_softcap(paged_attn, device, dtype, q_len, group):
    """Its score is softcap, as that of a key that is merely large."""
    calls = calls_with_ones(device, dtype, q_len, group, softcap=2.5)
    poison_key(calls[0], 0, 1, 40, 0, 3, torch.inf)
    out, lse = run(paged_attn, calls[0])
    for call in calls:
        poison_key(call, 0, 1, 40, 0, 3, 30000.0)
    judge(out, lse, *calls)


@pytest.mark.every_isa
@pytest.mark.parametrize("q_len, group", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_of_minus_infinity_sees_nothing(paged_attn, device, dtype, q_len, group):
    """Where all keys are positive in its dimension."""
    calls = calls_with_ones(device, dtype, q_len, group)
    for call in calls:
        call.caches()[0][..., 3] = 1.0
        call.kwargs["q"][1, 0, 1, 3] = -torch.inf
    judge(*run(paged_attn, calls[0]), *calls)


EVERYTHING = Case(
    q_len=2, varlen_q=True, causal=True, window=(60, 5), softcap=2.5, alibi="batch", leftpad=True, batch_idx=True,
    sink="float32", kv_dtype="float8_e5m2", descale="full", q_descale="full", append=2, append_varlen=True,
    rotary_dim=32, rotary_seqlens=True, give_out=True, dtype="float32",
)  # fmt: skip
EMPTY = {
    "batch 0": {"batch": 0},
    "batch 0, padded": {"batch": 0, "varlen_q": False, "append_varlen": False},
    "no token of q": {"q_len": 0},
    "no token of q, padded": {"q_len": 0, "varlen_q": False},
    "no new token": {"append": 0, "append_nothing": True},
    "no new token, padded": {"append": 0, "append_nothing": True, "append_varlen": False},
    "no heads": {"q_heads": 0},
    "no heads at all": {"q_heads": 0, "kv_heads": 0},
    "nothing in the cache": {"lens": (0, 0, 0, 0)},
    "nothing anywhere": {"lens": (0, 0, 0, 0), "append": 0, "append_nothing": True, "q_len": 0},
    "no rotary dimension": {"rotary_dim": 0},
}


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors(paged_attn, device, name, contiguous):
    """With every optional argument given, each empty where its sizes say so: an empty tensor has no address."""
    fields = EMPTY[name] | ({"page_size": 0} if contiguous else {})
    case = Case(**({f: getattr(EVERYTHING, f) for f in EVERYTHING.__dataclass_fields__} | fields))
    check(paged_attn, case, device)


@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_and_a_cache_without_slots(paged_attn, device, paged):
    """Of padded entries. Caches without an element have one address, and yet do not lie in each other."""
    shape = (0, 4, 1, 32) if paged else (2, 0, 1, 32)
    k_cache, v_cache = torch.zeros(2, *shape, device=device)
    q, angles = torch.randn(2, 3, 2, 32, device=device), torch.rand(8, 16, device=device)
    table = {"block_table": torch.full((2, 1), -1, dtype=torch.int32, device=device)} if paged else {}
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    lens = torch.full((2,), -3, dtype=torch.int32, device=device)
    new = torch.randn(2, 3, 1, 32, device=device)
    out = paged_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **rotary, cache_seqlens=lens, **table)
    assert not out.any()


@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_tokens_without_a_request(paged_attn, device, rotary_dim):
    """Batch 0, yet there are tokens of q, or new keys: out 0, lse -inf, nothing is written."""
    case = Case(batch=0, q_len=0, varlen_q=True, spare=5, append_nothing=True, append_varlen=True,
                rotary_dim=rotary_dim, give_out=True)  # fmt: skip
    check(paged_attn, case, device)
    call = cases.build(Case(batch=2)).to(device)
    before = [s.clone() for s in call.storage]
    k, v = (torch.zeros(3, *cache.shape[2:], dtype=cache.dtype, device=device) for cache in call.caches())
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    paged_attn.kv_paged_write(k, v, *call.caches(), call.kwargs["block_table"][:0], nobody[:0], cu_seqlens_k_new=nobody)
    for after, expected in zip(call.storage, before):
        assert_same_bytes("cache", after, expected.cpu())


@pytest.mark.parametrize("q_len", [1, 3])
def test_rotary_tables_without_a_dimension(paged_attn, device, q_len):
    """Tables of no angle rotate nothing."""
    calls = both_calls(Case(q_len=q_len, append=2, causal=True), device)
    tables = torch.empty(50, 0, dtype=torch.bfloat16)
    change(calls[:1], rotary_cos=tables, rotary_sin=tables)
    judge(*run(paged_attn, calls[0]), *calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_queries_are_rotated_without_new_tokens(paged_attn, device, varlen, causal, dtype):
    case = Case(q_len=3, append_nothing=True, append_varlen=varlen, rotary_dim=32, causal=causal, dtype=dtype)
    check(paged_attn, case, device)


VARLEN = Case(batch=4, kv_len=90, q_len=40, varlen_q=True, spare=5, causal=True, give_out=True)


ON_META = torch.empty((), dtype=torch.int32, device="meta")  # as on a GPU, nobody can read it without waiting


@pytest.mark.parametrize("max_seqlen_q", [40, 45, 46, 4000, 2**31 - 1, 2**40, None, torch.tensor(40), ON_META], ids=str)
def test_max_seqlen_q_is_a_hint(paged_attn, device, max_seqlen_q):
    """Exact, larger than all tokens, far too large, missing; with tokens that belong to no request."""
    check(paged_attn, VARLEN, device, max_seqlen_q=max_seqlen_q)


def test_max_seqlen_q_may_be_0_where_no_request_has_a_token(paged_attn, device):
    case = Case(batch=4, kv_len=90, q_len=0, varlen_q=True, spare=3, append=2, give_out=True)
    calls = both_calls(case, device)
    assert calls[0].kwargs["max_seqlen_q"] == 0
    judge(*run(paged_attn, calls[0]), *calls)


MAX_SEQLEN_K = [0, 1, 89, 90, 4000, 2**31 - 1, 2**40, None, torch.tensor(90), ON_META]
LONG = Case(batch=2, lens=(3000, 700), q_len=40, causal=True, head_dim=128)


@pytest.mark.parametrize("max_seqlen_k", MAX_SEQLEN_K, ids=str)
@pytest.mark.parametrize("case", [VARLEN, LONG, Case(kv_len=2000), Case(append=2, kv_len=90)], ids=str)
def test_max_seqlen_k_is_a_hint(paged_attn, device, case, max_seqlen_k):
    """Too small, exact, far too large, missing: it chooses the plan alone."""
    check(paged_attn, case, device, max_seqlen_k=max_seqlen_k)


@pytest.mark.parametrize("left", [60, 88, 89, 90, 10**9])
@pytest.mark.parametrize("right", [0, 2, -1])
@pytest.mark.parametrize("page_size", [16, 0])
def test_a_window_as_wide_as_the_cache_hides_nothing(paged_attn, device, page_size, right, left):
    """Wider ones count as none. But with rotary any window rotates all tokens, one without an end on the right too."""
    case = Case(kv_len=90, q_len=3, append=3, rotary_dim=32, window=(left, right), page_size=page_size)
    check(paged_attn, case, device)


@pytest.mark.parametrize("fixed", [{"deterministic": True}, {"num_splits": 3}], ids=str)
def test_max_seqlen_k_does_not_change_fixed_cuts(paged_attn, device, fixed):
    results = [run(paged_attn, cases.build(LONG).to(device), max_seqlen_k=n, **fixed) for n in (None, 1, 3000)]
    assert_same_bits(*results[:2])
    assert_same_bits(*results[::2])


@pytest.mark.parametrize("max_seqlen_q", [0, 1, 16, 39])
def test_max_seqlen_q_too_small_leaves_no_row_unwritten(paged_attn, device, max_seqlen_q):
    """An error where lengths are checked (test_errors.py); elsewhere every row of out is written, and those of the
    requests that the hint covers are right."""
    call, before = both_calls(VARLEN, device)
    try:
        out, lse = run(paged_attn, call, max_seqlen_q=max_seqlen_q)
    except RuntimeError as error:
        assert str(error).startswith("max_seqlen_q: expected at least the ")
        return
    out, lse = out.cpu(), lse.cpu()
    assert not out.isnan().any() and not lse.isnan().any()
    exact = [x.cpu() for x in run(paged_attn, cases.build(VARLEN).to(device))]
    ends = before.kwargs["cu_seqlens_q"].tolist()
    for begin, end in zip(ends, ends[1:]):
        if end - begin > max_seqlen_q:
            out[begin:end], lse[:, begin:end] = exact[0][begin:end], exact[1][:, begin:end]
    call.kwargs["out"].copy_(out)
    judge(call.kwargs["out"], lse, call, before)


@pytest.mark.parametrize("spare", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_past_the_last_request(paged_attn, device, dtype, spare):
    """They belong to no request: out 0, lse -inf, whatever was there."""
    case = Case(batch=3, kv_len=50, q_len=5, varlen_q=True, spare=spare, dtype=dtype, give_out=True)
    call, before = both_calls(case, device)
    out, lse = run(paged_attn, call)
    assert (out[-spare:] == 0).all() and (lse[:, -spare:] == -torch.inf).all()
    judge(out, lse, call, before)
    q, cu_seqlens_q = call.kwargs["q"], call.kwargs["cu_seqlens_q"]
    k_cache, v_cache = call.caches()
    out, lse = paged_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q=5, block_table=call.kwargs["block_table"],
        seqused_k=call.kwargs["cache_seqlens"], return_softmax_lse=True, out=torch.full_like(call.kwargs["out"], 7.0),
    )  # fmt: skip
    call.kwargs["out"].copy_(out)
    judge(call.kwargs["out"], lse, call, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_past_the_last_request_of_a_wider_tensor(paged_attn, device, dtype):
    """Only their own rows are cleared, not what lies between them."""
    case = Case(batch=3, kv_len=50, q_len=5, varlen_q=True, spare=7, dtype=dtype, give_out=True)
    call = cases.build(case).to(device)
    out = call.kwargs["out"]
    wide = torch.full((*out.shape[:-1], 2 * out.shape[-1]), 7.0, dtype=out.dtype, device=device)
    run(paged_attn, call, out=wide[..., : out.shape[-1]])
    assert (wide[-7:, :, : out.shape[-1]] == 0).all() and (wide[..., out.shape[-1] :] == 7).all()


@pytest.mark.parametrize("leftpad", [0, 1, 7, 40])
@pytest.mark.parametrize("chunk", [1, 8, 16, 1000])
def test_chunks_count_from_the_first_key_that_exists(paged_attn, device, chunk, leftpad):
    """By another definition: the same keys in a cache without padding."""
    case = Case(batch=1, lens=(100,), q_len=9, page_size=0, chunk=chunk, causal=True, dtype="float32")
    call, before = both_calls(case, device)
    k_cache, v_cache = call.caches()
    whole = {n: torch.randn(x.shape, device=device) for n, x in (("k_cache", k_cache), ("v_cache", v_cache))}
    kwargs = dict(call.kwargs)
    padded = paged_attn.flash_attn_with_kvcache(
        **(kwargs | whole), cache_leftpad=torch.tensor([leftpad], dtype=torch.int32, device=device)
    )
    kwargs["cache_seqlens"] = kwargs["cache_seqlens"] - leftpad
    alone = paged_attn.flash_attn_with_kvcache(**kwargs, **{n: x[:, leftpad:] for n, x in whole.items()})
    for a, b in zip(padded, alone):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # two places in tiles: two orders of summation
    assert with_tensor_lengths(before)["attention_chunk"] == chunk


@pytest.mark.parametrize("position", [-1, 1 << 20])
@pytest.mark.parametrize("paged", [True, False])
def test_what_an_idle_entry_has_does_not_matter(paged_attn, device, paged, position):
    """A padded batch: its row, its pages and its position may be anything."""
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(device)

    caches = [numbers(*((12, 16) if paged else (3, 32)), 2, 32) for _ in range(2)]
    q, k, v = numbers(3, 1, 4, 32), numbers(3, 1, 2, 32), numbers(3, 1, 2, 32)
    cos, sin = numbers(32, 8), numbers(32, 8)
    table = ints([[3, 7], [-5, 999], [0, 9]]) if paged else None

    def call(entries, lengths, rows, positions):
        written = [cache.clone() for cache in caches]
        result = paged_attn.flash_attn_with_kvcache(
            q[entries], *written, k[entries], v[entries], rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(lengths),
            cache_batch_idx=ints(rows), rotary_seqlens=ints(positions), block_table=table, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        return *result, *written

    out, lse, *written = call([0, 1, 2], [20, -1, 9], [0, -1, 2], [20, position, 9])
    out_alone, lse_alone, *written_alone = call([0, 2], [20, 9], [0, 2], [20, 9])
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    torch.testing.assert_close(out[[0, 2]], out_alone, rtol=1e-5, atol=1e-5)  # cut in other ways
    torch.testing.assert_close(lse[[0, 2]], lse_alone, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(written, written_alone))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_descales_of_an_idle_entry_do_not_matter(paged_attn, device, bad, q_len, sink):
    """Its rows see no key, so their result is 0: nobody may have written its scales."""
    case = Case(batch=2, lens=(0, 50), q_len=q_len, kv_dtype="float8_e4m3fn", sink="float32" if sink else "")
    calls = both_calls(case, device)
    scales = torch.tensor([[bad], [1.0]]).expand(2, 2)
    change(calls[:1], k_descale=scales, v_descale=scales)
    judge(*run(paged_attn, calls[0]), *calls)


EVERY_VECTOR = Case(
    batch=3, lens=(20, 0, 33), q_len=2, append=2, causal=True, alibi="heads", sink="float32", leftpad=True,
    batch_idx=True, rotary_dim=32, rotary_seqlens=True,
)  # fmt: skip
PACKED_VECTORS = Case(batch=3, lens=(20, 0, 33), q_len=4, varlen_q=True, append=3, append_varlen=True, causal=True)
VECTORS = {
    "cache_seqlens": EVERY_VECTOR, "cache_batch_idx": EVERY_VECTOR, "cache_leftpad": EVERY_VECTOR,
    "rotary_seqlens": EVERY_VECTOR, "alibi_slopes": EVERY_VECTOR, "s_aux": EVERY_VECTOR,
    "cu_seqlens_q": PACKED_VECTORS, "cu_seqlens_k_new": PACKED_VECTORS,
}  # fmt: skip


def with_gaps(x):
    """The same numbers, the last dimension with a stride of 2 and other numbers between."""
    return torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_with_gaps(paged_attn, device, name):
    """As flash-attn takes them: a column of a table, say."""
    given = with_gaps(cases.build(VECTORS[name]).to(device).kwargs[name])
    assert not given.is_contiguous()
    check(paged_attn, VECTORS[name], device, **{name: given})


def test_slopes_of_requests_with_gaps(paged_attn, device):
    call = cases.build(Case(batch=3, lens=(20, 5, 33), alibi="batch")).to(device)
    slopes = call.kwargs["alibi_slopes"]
    assert_same_bits(run(paged_attn, call, alibi_slopes=with_gaps(slopes)), run(paged_attn, call))


@pytest.mark.parametrize("name", ["alibi_slopes", "k_descale", "v_descale"])
def test_parts_of_wider_tables(paged_attn, device, name):
    """A row does not begin where the one before it ends."""
    features = {"alibi": "batch"} if name == "alibi_slopes" else {"kv_dtype": "float8_e4m3fn", "descale": "full"}
    call = cases.build(Case(batch=3, lens=(20, 5, 33), **features)).to(device)
    wide = torch.nn.functional.pad(call.kwargs[name], (0, 3), value=7.0)[:, :-3]
    assert_same_bits(run(paged_attn, call, **{name: wide}), run(paged_attn, call))


def test_expanded_vectors(paged_attn, device):
    """One number for all."""
    call = cases.build(Case(batch=3, lens=(20, 20, 20), alibi="heads", sink="float32")).to(device)
    one = {"cache_seqlens": torch.tensor([20], dtype=torch.int32), "alibi_slopes": torch.tensor([0.5])}
    one["s_aux"] = torch.tensor([1.5])
    expanded = {n: x.to(device).expand(len(call.kwargs[n])) for n, x in one.items()}
    contiguous = {n: x.contiguous() for n, x in expanded.items()}
    assert_same_bits(run(paged_attn, call, **expanded), run(paged_attn, call, **contiguous))
    k_cache, v_cache = call.caches()
    for arguments in (expanded, contiguous):
        assert paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **(call.kwargs | arguments)).route


def test_packed_keys_by_vectors_with_gaps(paged_attn, device):
    q, k, v = torch.randn(3, 9, 2, 16, device=device)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    used = torch.tensor([3, 5], dtype=torch.int32, device=device)
    wanted = paged_attn.flash_attn_varlen_func(q, k, v, cu, cu, seqused_k=used)
    gaps = [with_gaps(x) for x in (cu, cu, used)]
    assert torch.equal(paged_attn.flash_attn_varlen_func(q, k, v, *gaps[:2], seqused_k=gaps[2]), wanted)


def test_writes_by_vectors_with_gaps(paged_attn, device):
    k, v = torch.randn(2, 2, 3, 2, 16, device=device)
    caches = torch.zeros(4, 4, 8, 2, 16, device=device)
    table = torch.tensor([[0], [2]], dtype=torch.int32, device=device)
    paged_attn.kv_paged_write(k, v, *caches[:2], table, torch.tensor([4], dtype=torch.int32, device=device).expand(2))
    slots = torch.tensor([[4, 5, 6], [20, 21, 22]], device=device)
    paged_attn.kv_paged_write(k, v, *caches[2:], slot_mapping=with_gaps(slots.flatten())[None].expand(1, 6)[0])
    assert torch.equal(caches[:2], caches[2:]) and caches.any()
    cu = with_gaps(torch.tensor([0, 3, 6], dtype=torch.int32, device=device))
    lengths, again = torch.tensor([4, 4], dtype=torch.int32, device=device), torch.zeros_like(caches[:2])
    paged_attn.kv_paged_write(k.flatten(0, 1), v.flatten(0, 1), *again, table, lengths, cu_seqlens_k_new=cu)
    assert torch.equal(again, caches[:2])
