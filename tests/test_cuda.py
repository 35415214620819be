"""What the contract promises of a GPU alone: CUDA graphs, streams, caches beyond 2^31 elements, bounded workspace; and
every way in which the keys are dealt to thread blocks."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import cases
import pytest
import torch
from cases import Case
from compare import assert_same_bytes, check, judge, run

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = {
    "decode": {"q_heads": 8, "head_dim": 128},
    "many heads, long": {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "lens": (5000, 0, 700, 64)},
    "append, rotary": {"q_len": 3, "append": 3, "rotary_dim": 64, "causal": True},
    "append": {"append": 1, "causal": True, "layout": "heads_first"},
    "fp8": {"kv_dtype": "float8_e4m3fn", "descale": "full", "append": 2, "head_dim": 128},
    "five splits": {"num_splits": 5, "q_heads": 8},
    "deterministic": {"deterministic": True, "q_heads": 8, "window": (300, 0)},
    "float32": {"dtype": "float32", "sink": "float32"},
    "float32, long": {"dtype": "float32", "q_len": 70, "causal": True, "head_dim": 128},
    "MLA": {"head_dim": 64, "head_dim_v": 512, "qv": True, "q_heads": 8},
    "heads of 512": {"head_dim": 512, "q_heads": 8, "append": 1, "causal": True},
    "contiguous": {"page_size": 0, "append": 2, "batch_idx": True, "leftpad": True},
    "verify": {"q_len": 16, "causal": True, "q_heads": 8, "dtype": "float16"},
}


@pytest.fixture(autouse=True)
def only_on_cuda(device):
    if torch.device(device).type != "cuda":
        pytest.skip("the tests run on another device")


def tensors(call):
    return [x for x in call.kwargs.values() if isinstance(x, torch.Tensor)] + list(call.storage)


def refill(call, other):
    """Puts the values of a call of the same shapes into the tensors of this one, and takes over what they mean."""
    for into, values in zip(tensors(call), tensors(other), strict=True):
        into.copy_(values)
    call.case, call.seqlens_new = other.case, other.seqlens_new


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_replayed_with_other_values(paged_attn, device, name):
    """Captured once; then other lengths, pages, queries and new tokens, in another order of requests."""
    options = {"lens": (700, 0, 33, 64), "batch": 4} | CASES[name]
    first, *others = (
        Case(**(options | {"seed": seed, "lens": options["lens"][-seed:] + options["lens"][:-seed]}))
        for seed in range(4)
    )
    call = cases.build(first).to(device)
    run(paged_attn, cases.build(first).to(device))  # sets up what is set up once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(paged_attn, call)
    for case in (first, *others, first):
        before = cases.build(case)
        refill(call, before)
        out.fill_(torch.nan)
        graph.replay()
        judge(out, lse, call, before)


def test_a_smaller_batch_in_a_larger_graph(paged_attn, device):
    """Idle rows: length 0, a table of nonsense; with an append, minus the number of its new tokens."""
    for append in (0, 1):
        case = Case(batch=4, lens=(300, 64, 0, 7), append=append, causal=True, head_dim=128)
        call = cases.build(case).to(device)
        alone = [x.clone() for x in run(paged_attn, cases.build(case).to(device), deterministic=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = run(paged_attn, call, deterministic=True)
        call.kwargs["cache_seqlens"][2:] = -append
        call.kwargs["block_table"][2:] = -1
        graph.replay()
        assert torch.equal(out[:2], alone[0][:2]) and torch.equal(lse[:2], alone[1][:2])
        assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all()


DEALINGS = {
    "whole ones, then a line": {"batch": 67, "lens": (300,) * 67},
    "lengths that hardly differ": {"batch": 67, "lens": tuple(300 - i % 8 for i in range(67))},
    "a line": {"batch": 67, "lens": tuple(37 * i % 700 for i in range(67))},
    "most of the blocks": {"batch": 10, "lens": (900,) * 10},
    "a part for every block": {"batch": 1, "kv_heads": 1, "lens": (40000,)},
    "short ones and a long one": {"batch": 40, "kv_heads": 2, "lens": (64,) * 39 + (30000,)},
}


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128, "page_size": 16},
        {"head_dim": 128, "page_size": 16, "sink": "bfloat16"},
        {"head_dim": 96, "page_size": 24, "q_len": 2, "causal": True},
        {"head_dim": 128, "head_dim_v": 64, "kv_dtype": "float8_e4m3fn", "descale": "full", "page_size": 32},
        {"head_dim": 256, "dtype": "float16", "page_size": 48},
        {"head_dim": 64, "kv_dtype": "float8_e4m3fn", "descale": "full", "page_size": 24, "q_len": 2, "causal": True},
        {"head_dim": 128, "page_size": 16, "softcap": 20.0, "window": (5000, 0)},
        {"head_dim": 128, "page_size": 16, "dtype": "float32"},
        {"head_dim": 256, "page_size": 1, "dtype": "float32", "q_len": 2, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dealing", DEALINGS)
def test_every_way_of_dealing(paged_attn, device, dealing, options):
    """With more (request, kv_head) than blocks, with fewer, and with many parts of one; plain calls and others."""
    options = {"kv_heads": 8} | DEALINGS[dealing] | options
    check(paged_attn, Case(q_heads=2 * options["kv_heads"], **options), device)


BASIC = {"head_dim": 128}
REASONS = {  # of a route: what keeps a call from it
    "decode_basic": {
        "no block_table": {"page_size": 0},
        "cache_batch_idx": {"batch_idx": True},
        "cache_leftpad": {"leftpad": True},
        "cu_seqlens_k_new": {"append": 2, "append_varlen": True},
        "a left window": {"window": (20, 0)},
        "attention_chunk": {"chunk": 16},
        "softcap": {"softcap": 20.0},
        "alibi_slopes": {"alibi": "head"},
        "sinks that are not of q's dtype": {"sink": "float32"},
        "another dtype of q than the usual one": {"dtype": "float16", "kv_dtype": "float8_e4m3fn"},
        "head_dim and head_dim_v differ": {"head_dim_v": 64},
        "a head_dim other than 64, 128 and 256": {"head_dim": 96},
        "more rows of a request than one tile holds": {"q_len": 9, "q_heads": 4},
        "num_splits fixes the cuts": {"num_splits": 2},
        "deterministic fixes the cuts": {"deterministic": True},
        "there are more than 1024 tiles of rows": {"batch": 1025, "kv_len": 3},
    },
    "decode": {
        "float32 q with an 8-bit cache": {"dtype": "float32", "kv_dtype": "float8_e4m3fn"},
        "qv": {"head_dim": 64, "head_dim_v": 512, "qv": True, "kv_dtype": "float8_e4m3fn", "descale": "full"},
        "head_dim or head_dim_v above 256": {"head_dim": 576, "head_dim_v": 512},
        "rows of the cache are not whole pieces of 16 bytes": {"head_dim": 60},
        "k_cache or v_cache does not begin at a multiple of 16 bytes": {"layout": "odd_strides"},
    },
}


def explain(paged_attn, device, **options):
    call = cases.build(Case(**(BASIC | options))).to(device)
    k_cache, v_cache = call.caches()
    return paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs)


@pytest.mark.parametrize("route, reason", [(route, reason) for route, reasons in REASONS.items() for reason in reasons])
def test_why_a_call_does_not_take_a_route(paged_attn, device, route, reason):
    explained = explain(paged_attn, device, **REASONS[route][reason])
    assert explained.why_not[route] == reason
    assert explained.route != route and explained.plan["blocks"] > 0


def test_rows_of_q_that_are_not_aligned(paged_attn, device):
    call = cases.build(Case(**BASIC)).to(device)
    k_cache, v_cache = call.caches()
    q = call.kwargs.pop("q")
    wide = torch.zeros(*q.shape[:-1], q.shape[-1] + 8, dtype=q.dtype, device=device)
    for begin, reason in ((0, None), (8, None), (1, "q or out does not begin at a multiple of 16 bytes")):
        explained = paged_attn.explain(wide[..., begin : begin + 128], k_cache, v_cache, **call.kwargs)
        assert explained.why_not.get("decode") == reason
    odd = torch.zeros(*q.shape[:-1], q.shape[-1] + 3, dtype=q.dtype, device=device)
    explained = paged_attn.explain(odd[..., :128], k_cache, v_cache, **call.kwargs)
    assert explained.why_not["decode"] == "a stride of q is no multiple of 16 bytes"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_len": 4, "q_heads": 8, "causal": True},
        {"q_len": 4, "q_heads": 8, "causal": True, "varlen_q": True},
        {"append": 2},
        {"sink": "bfloat16"},
        {"dtype": "float16"},
        {"kv_dtype": "float8_e5m2", "descale": "full"},
        {"head_dim": 64},
        {"head_dim": 256},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_what_engines_ask_takes_the_basic_route(paged_attn, device, options):
    assert explain(paged_attn, device, **options).route == "decode_basic"


@pytest.mark.parametrize(
    "options",
    [
        {"q_heads": 32, "kv_heads": 2},
        {"q_heads": 12, "kv_heads": 1, "kv_len": 700, "sink": "bfloat16", "page_size": 1},
        {"q_heads": 16, "kv_heads": 2, "q_len": 2, "causal": True, "dtype": "float16", "layout": "heads_first"},
        {"q_heads": 16, "kv_heads": 4, "q_len": 4, "causal": True, "varlen_q": True, "kv_len": 300},
        {"head_dim": 64, "q_heads": 64, "kv_heads": 4, "kv_len": 300, "sink": "bfloat16"},
        {"q_heads": 10, "kv_heads": 1, "append": 1, "rotary_dim": 64, "causal": True, "batch": 5},
        {"q_heads": 32, "kv_heads": 2, "window": (50, 0), "alibi": "head", "softcap": 20.0, "kv_len": 400},
    ],
    ids=str,
)
def test_halves_of_a_group(paged_attn, device, options):
    """9 to 16 rows over few keys are two items of 8: each half of a group is planned as a KV head."""
    explained = explain(paged_attn, device, **options)
    assert explained.route == ("decode" if "window" in options else "decode_basic")
    assert explained.plan["halves"] == 1 and explained.plan["rows_per_tile"] == 8
    check(paged_attn, Case(**BASIC | options), device)


def test_the_fallback_has_no_reason(paged_attn, device):
    explained = explain(paged_attn, device, head_dim=60)
    assert explained.route == "fallback" and "fallback" not in explained.why_not


@pytest.mark.parametrize(
    "options, reason",
    [
        ({}, None),
        ({"head_dim": 60}, None),
        ({"page_size": 3, "head_dim_v": 64, "num_splits": 3}, None),
        ({"q_len": 1, "varlen_q": True, "deterministic": True}, None),
        ({"dtype": "float16"}, "q is not float32"),
        ({"q_len": 4}, "no more rows than one tile of the decode kernel"),
        ({"kv_dtype": "float8_e5m2"}, "float32 q with an 8-bit cache"),
        ({"head_dim": 512}, "head_dim or head_dim_v above 256"),
        ({"head_dim": 59}, "rows of the cache are not whole pieces of 16 bytes"),
    ],
    ids=str,
)
def test_the_route_of_many_rows_in_float32(paged_attn, device, options, reason):
    options = {"dtype": "float32", "q_len": 20, "causal": True} | options
    explained = explain(paged_attn, device, **options)
    assert (explained.route == "float32") == (reason is None) and explained.why_not.get("float32") == reason
    check(paged_attn, Case(**(BASIC | options)), device)


def hints(lens):
    return {"none": None, "one": 1, "half": max(lens) // 2, "exact": max(lens), "far too large": 2**31 - 1}


@pytest.mark.parametrize("hint", hints([1]))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": 40, "q_len": 3},
        {"dtype": "float32", "q_len": 50},
        {"deterministic": True},
        {"num_splits": 3, "append": 2},
        {"kv_dtype": "float8_e4m3fn", "descale": "full", "q_len": 300, "kv_len": 900},
        {"window": (50, 0), "lens": (3000, 700, 0, 64), "q_heads": 16},
    ],
    ids=str,
)
def test_max_seqlen_q_is_a_hint(paged_attn, device, options, hint):
    """A request may be longer than it says, and far shorter: every row is written, and the grid follows the rows."""
    case = Case(**({"varlen_q": True, "q_len": 70, "kv_len": 300, "causal": True, "head_dim": 128} | options))
    value = hints([case.q_len])[hint]
    check(paged_attn, case, device, max_seqlen_q=value)
    call = cases.build(case).to(device)
    k_cache, v_cache = call.caches()
    plan = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **(call.kwargs | {"max_seqlen_q": value})).plan
    tiles = call.kwargs["q"].shape[0] * case.q_heads // case.kv_heads / plan["rows_per_tile"] + case.batch
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    assert plan["blocks"] <= max(3 * processors, tiles * case.kv_heads * plan["splits"])
    assert plan["items"] <= max(processors, 2 * tiles)


def test_streams_do_not_disturb_each_other(paged_attn, device):
    """Each stream repeats its case behind a delay, with nothing between them; every result is bitwise the lone one."""
    mix = [Case(**({"lens": (700, 0, 33, 64)} | options)) for options in CASES.values()]
    expected = [run(paged_attn, cases.build(case).to(device)) for case in mix]
    calls = [[cases.build(case).to(device) for _ in range(5)] for case in mix]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in mix], []
    for i in range(5):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                results.append((index, run(paged_attn, calls[index][i])))
    torch.cuda.synchronize()
    for index, got in results:
        assert all(torch.equal(a, b) for a, b in zip(got, expected[index], strict=True)), mix[index]


def test_more_elements_than_32_bits_count(paged_attn, device):
    """Pages at the far end of a cache of more than 2^31 elements, against the same pages in a small cache."""
    kv_heads, head_dim, pages = 8, 128, 64
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of free memory")
    for kv_dtype, page_size in itertools.product((torch.bfloat16, torch.float8_e4m3fn, torch.float32), (1, 16)):
        num_pages = 2**31 // (page_size * kv_heads * head_dim) + pages
        dtype = kv_dtype if kv_dtype.itemsize > 1 else torch.bfloat16
        torch.manual_seed(0)
        shape = (page_size, kv_heads, head_dim)
        big = [torch.empty(num_pages, *shape, dtype=kv_dtype, device=device) for _ in range(2)]
        small = [torch.randn(pages, *shape, device=device).to(kv_dtype) for _ in range(2)]
        for a, b in zip(big, small, strict=True):
            a[-pages:].copy_(b)
        table = torch.randperm(pages, device=device).int().view(2, -1)
        kv_len = table.shape[1] * page_size - 2
        lengths = torch.tensor([kv_len, kv_len // 2], dtype=torch.int32, device=device)
        q, k, v = (torch.randn(2, 2, heads, head_dim, dtype=dtype, device=device) for heads in (32, 8, 8))
        results = []
        for caches, pages_of in ((small, table), (big, table + num_pages - pages)):
            out = paged_attn.flash_attn_with_kvcache(
                q, *caches, k, v, cache_seqlens=lengths, block_table=pages_of, causal=True, deterministic=True
            )
            results.append([out, *(cache[-pages:].view(torch.uint8) for cache in caches)])
        assert results[0][0].isfinite().all()
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), (kv_dtype, page_size)
        del big, results, caches
        torch.cuda.empty_cache()


def test_a_workspace_beyond_64_gib(paged_attn, device):
    """The partials of so many rows have more 16-byte words than 32 bits count; they must not share any."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 72 << 30:
        pytest.skip("needs 72 GiB of free memory")
    torch.manual_seed(0)
    batch, kv_len = 1024, 1024
    q = torch.randn(1, 64, 8, 512, device=device).bfloat16().expand(batch, -1, -1, -1).contiguous()
    k, v = (torch.randn(kv_len // 16, 16, 1, 512, device=device).bfloat16() for _ in range(2))
    table = torch.arange(1024, device=device).int() % (kv_len // 16)  # 32 splits, of which two have keys
    out = paged_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=kv_len, block_table=table.expand(batch, -1).contiguous(), deterministic=True
    )
    for i in range(1, len(out)):
        assert torch.equal(out[i], out[0])
    del out
    torch.cuda.empty_cache()


@pytest.mark.parametrize("q_len", [1, 300])
def test_strides_of_single_entries_say_nothing(paged_attn, device, q_len):
    """q as a slice of a fused row that is no multiple of 16 bytes, one kv_head whose stride is odd."""
    generator = torch.Generator(device).manual_seed(1)
    fused = torch.randn(1, 1, 4 * 128 + 1, device=device, generator=generator).bfloat16()
    pool = torch.randn(40, 16, 128, device=device, generator=generator).bfloat16()
    cache = pool.as_strided((40, 16, 1, 128), (16 * 128, 128, 1, 1))
    q = fused[:, :, : 4 * 128].view(1, 1, 4, 128) if q_len == 1 else pool[:20].view(-1, 4, 128)[None, :q_len]
    q = q.as_strided(q.shape, (7, *q.stride()[1:]))
    options = {"cache_seqlens": torch.tensor([600], device=device).int(), "causal": True}
    options["block_table"] = torch.arange(40, device=device).int()[None]
    plain = (q.clone(memory_format=torch.contiguous_format), pool.unsqueeze(2), pool.unsqueeze(2))
    assert paged_attn.explain(q, cache, cache, **options).route == paged_attn.explain(*plain, **options).route
    out = paged_attn.flash_attn_with_kvcache(q, cache, cache, **options)
    assert torch.equal(out, paged_attn.flash_attn_with_kvcache(*plain, **options))


def test_more_new_tokens_than_32_bits_count(paged_attn, device):
    """Refused, whatever cu_seqlens_k_new says; one row stands for all of them here."""
    k = torch.zeros(1, 1, 8, device=device).expand(2**31 + 8, 1, 8)
    cache, table, zero = torch.zeros(1, 16, 1, 8, device=device), *torch.zeros(2, 1, device=device).int()
    with pytest.raises(RuntimeError, match=r"^cuda: expected sizes below 2\^31 .* got 1, 0, 1, 2147483656, 0$"):
        paged_attn.kv_paged_write(k, k, cache, cache, table[None], zero, cu_seqlens_k_new=torch.cat((zero, zero + 1)))


@pytest.mark.parametrize("many", [False, True])
def test_cu_seqlens_k_new_ends_behind_the_tokens(paged_attn, device, many):
    """A GPU does not see it. What lies behind k and v is not read, so it is not written either."""
    tokens, behind = (2 * 8 * torch.cuda.get_device_properties(device).multi_processor_count + 1, 7) if many else (5, 7)
    k, v = (torch.full((tokens + behind, 2, 64), 9.0, device=device).bfloat16() for _ in range(2))
    caches = [torch.zeros(1 + (tokens + 64) // 16, 16, 2, 64, device=device).bfloat16() for _ in range(2)]
    table = torch.arange(len(caches[0]), device=device).int()[None]
    cu = torch.tensor([0, tokens + 64], dtype=torch.int32, device=device)
    paged_attn.kv_paged_write(
        k[:tokens], v[:tokens], *caches, table, torch.zeros(1, device=device).int(), cu_seqlens_k_new=cu
    )
    for cache in caches:
        flat = cache.view(-1, 2, 64)
        assert (flat[:tokens] == 9).all() and (flat[tokens:] == 0).all()


@pytest.mark.parametrize("cu", [[2, 66], [0, 50, 20, 66], [70, 66]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wrong_cu_seqlens_q_writes_nothing_outside(paged_attn, device, cu, dtype):
    """Few rows over many keys, so that keys are cut; what lies around out and lse stays as it is."""
    batch, around = len(cu) - 1, 1 << 20
    q = torch.randn(66, 32, 128, device=device).to(dtype)
    k_cache, v_cache = (torch.randn(2048, 16, 8, 128, device=device).to(dtype) for _ in range(2))
    room = torch.full((2 * around + q.numel(),), 7.0, device=device, dtype=dtype)
    out = room[around:-around].view_as(q)
    table = torch.arange(2048, device=device).int().expand(batch, -1).contiguous()
    paged_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=30000, block_table=table, causal=True, out=out, max_seqlen_q=64,
        cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device), return_softmax_lse=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert (room[:around] == 7).all() and (room[-around:] == 7).all()


DETERMINISTIC = {  # shapes at which the size of the batch would choose another way
    "8-bit cache, few rows": Case(kv_dtype="float8_e4m3fn", descale="full", q_len=8, head_dim=128, causal=True),
    "splits of a prompt": Case(q_len=64, num_splits=4, head_dim=128, causal=True),
    "prompt": Case(q_len=64, head_dim=128, causal=True),
    "head_dim 80, pages of 12": Case(q_len=64, head_dim=80, causal=True, page_size=12),
    "float32": Case(dtype="float32", q_len=16, head_dim=64, causal=True),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_does_not_see_a_large_batch(paged_attn, device, name):
    case = dataclasses.replace(DETERMINISTIC[name], batch=24, lens=(1100,) * 24, q_heads=32, kv_heads=8)
    call = cases.build(case).to(device)
    call.kwargs["deterministic"] = True
    out, lse = run(paged_attn, call)
    assert out.isfinite().all()
    k_cache, v_cache = call.caches()
    for requests in (1, 9, 13):
        few = {
            name: x[:requests] if name in ("q", "cache_seqlens", "block_table", "k_descale", "v_descale") else x
            for name, x in call.kwargs.items()
        }
        alone = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **few)
        assert torch.equal(alone[0], out[:requests]) and torch.equal(alone[1], lse[:requests]), requests


@pytest.mark.parametrize("options", [{}, {"num_splits": 8}, {"deterministic": True}], ids=str)
def test_workspace_is_bounded(paged_attn, device, options):
    """What docs/cuda.md says of decode with 32/8 heads of 128: by the size of the GPU, or by the splits asked for."""
    for batch, kv_len in ((8, 512), (64, 4096)):
        cache = torch.zeros(batch * kv_len // 16, 16, 8, 128, dtype=torch.bfloat16, device=device)
        table = torch.arange(len(cache), device=device).int().view(batch, -1)
        lengths = torch.full((batch,), kv_len, dtype=torch.int32, device=device)
        q = torch.zeros(batch, 1, 32, 128, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(q)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        paged_attn.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, block_table=table, causal=True, out=out, **options
        )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        partials = batch * 8 * options.get("num_splits", 2) if options else 3 * processors
        assert torch.cuda.max_memory_allocated() - before <= partials * 8 * (128 // 4) * 3 * 16 + 4096


@pytest.mark.parametrize("rotary_dim", [0, 64])
def test_no_memory_for_the_workspace_leaves_the_cache_as_it_was(paged_attn, device, rotary_dim):
    """An allocator without room is asked before the new tokens are written."""
    case = Case(
        batch=8, lens=(2000,) * 8, append=1, q_heads=128, kv_heads=8, head_dim=64, head_dim_v=256, dtype="bfloat16",
        rotary_dim=rotary_dim, num_splits=32,
    )  # fmt: skip
    call, before = cases.build(case).to(device), cases.build(case)
    k_cache, v_cache = call.caches()
    needed = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs).plan["workspace_bytes"]
    assert needed > 32 << 20  # half of it is enough for the results
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + needed / 2) / total)
    taken = []  # what an earlier test may have left in the allocator
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(needed, dtype=torch.uint8, device=device))
        with pytest.raises(RuntimeError):
            run(paged_attn, call)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del taken
    for after, expected in zip(call.storage, before.storage, strict=True):
        assert_same_bytes("cache", after.cpu(), expected)
    judge(*run(paged_attn, call), call, before)


@pytest.mark.parametrize("head_dim, blocks, rows", [(126, 1, 16), (128, 6, 64)], ids=["fallback", "float32"])
@pytest.mark.parametrize("batch, q_len", [(1, 1), (64, 1), (1, 20), (1, 700), (4, 33)])
def test_workspace_in_float32_is_bounded(paged_attn, device, batch, q_len, head_dim, blocks, rows):
    """By so many blocks per multiprocessor, of so many rows each, however long the prompt."""
    q = torch.zeros(batch, q_len, 32, head_dim, device=device)
    cache = torch.zeros(batch, 4096, 8, head_dim, device=device)
    out = torch.empty_like(q)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paged_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4096, causal=True, out=out)
    blocks *= torch.cuda.get_device_properties(device).multi_processor_count
    assert torch.cuda.max_memory_allocated() - before <= blocks * rows * (128 // 4) * 3 * 16 + 4096


@pytest.fixture(scope="session")
def exchange(tmp_path_factory):
    """The program of tests/cuda/exchange.cu."""
    nvcc = shutil.which("nvcc")
    program = os.environ.get("PAGED_ATTN_EXCHANGE_TEST")
    if program is None and nvcc is None:
        pytest.skip("needs nvcc")
    if program is None:
        program = tmp_path_factory.mktemp("exchange") / "exchange"
        include = [f"-I{REPOSITORY / folder}" for folder in ("paged_decode_cuda", "torch-ext")]
        source = REPOSITORY / "tests" / "cuda" / "exchange.cu"
        subprocess.run([nvcc, "-std=c++17", "-O2", "-arch=native", *include, source, "-o", program], check=True)
    return program


@pytest.mark.parametrize("what", ["torn", "slow", "lost"])
def test_partials_between_blocks(exchange, what):
    """Words of 16 bytes arrive whole, a late partial is waited for, one that never comes ends the kernel."""
    result = subprocess.run([exchange, what], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    if what == "lost":
        assert "a block waited too long for the partial of another" in result.stdout + result.stderr


@pytest.mark.parametrize(
    "options", [{}, {"window": (30000, 0)}, {"kv_dtype": "float8_e4m3fn", "descale": "full"}], ids=str
)
def test_parts_meet_beside_other_kernels(paged_attn, device, options):
    """Large products hold the multiprocessors on two other streams: blocks start late and far apart, results stay."""
    case = Case(batch=3, kv_heads=2, q_heads=8, lens=(40000, 0, 9000), head_dim=128, **options)
    calls = [cases.build(case).to(device) for _ in range(4)]
    expected = run(paged_attn, calls[0])
    others, big = [torch.cuda.Stream() for _ in range(2)], torch.randn(6000, 6000, device=device)
    own, results = [torch.cuda.Stream() for _ in calls], []
    torch.cuda.synchronize()
    for i in range(40):
        if i % 10 == 0:
            for stream in others:
                with torch.cuda.stream(stream):
                    big @ big
        with torch.cuda.stream(own[i % len(own)]):
            results.append(run(paged_attn, calls[i % len(calls)]))
    torch.cuda.synchronize()
    for got in results:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
