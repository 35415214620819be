"""Many rows on a GPU: every feature on its route for long queries, every page size, and tiles at their edges.

That route is `prefill` on Hopper and `prefill_mma` on other GPUs.
"""

import dataclasses
import random

import cases
import pytest
import torch
from cases import Case
from compare import check, judge, run


@pytest.fixture(autouse=True)
def only_on_a_gpu(device):
    if torch.device(device).type != "cuda":
        pytest.skip("these routes are CUDA's")


@pytest.fixture(scope="module")
def long_route(paged_attn, device):
    """The route for long queries of this GPU."""
    return explained_call(paged_attn, BASE, device).route


# Enough tiles of rows for the route: 6 requests, 4 kv_heads, 160 rows of each.
BASE = Case(batch=6, q_len=40, kv_len=300, q_heads=16, kv_heads=4, head_dim=128, causal=True)

FEATURES = {
    "plain": {},
    "not_causal": {"causal": False},
    "fp16": {"dtype": "float16"},
    "varlen": {"varlen_q": True, "q_len": 90},
    "long": {"lens": (1500, 1, 129, 128, 700, 40)},
    "more_q_than_keys": {"q_len": 70, "kv_len": 50},
    "window": {"window": (60, -1)},
    "window_both": {"window": (60, 20), "causal": False},
    "window_right": {"window": (-1, 9), "causal": False},
    "window_long": {"window": (200, -1), "lens": (1500, 1, 129, 128, 700, 40)},
    "chunk": {"chunk": 32},
    "chunk_not_causal": {"chunk": 100, "causal": False, "leftpad": True},
    "softcap": {"softcap": 2.5},
    "scale": {"scale": 0.07},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.05},
    "alibi": {"alibi": "head"},
    "alibi_batch": {"alibi": "batch", "softcap": 20.0},
    "leftpad": {"leftpad": True},
    "sink": {"sink": "float32"},
    "sink_16bit": {"sink": "bfloat16"},
    "batch_idx": {"batch_idx": True},
    "contiguous": {"page_size": 0},
    "contiguous_rows": {"page_size": 0, "batch_idx": True, "leftpad": True},
    "heads_first": {"layout": "heads_first"},
    "interleaved": {"layout": "interleaved"},
    "append": {"append": 40},
    "append_varlen": {"append": 30, "append_varlen": True, "varlen_q": True, "q_len": 80},
    "rotary": {"append": 40, "rotary_dim": 64},
    "deterministic": {"deterministic": True},
    "one_split": {"num_splits": 1},
    "out": {"give_out": True},
    "int_seqlens": {"int_seqlens": True},
    "mha": {"q_heads": 4, "q_len": 130},
    "mqa": {"q_heads": 8, "kv_heads": 1, "batch": 24},
    "group_5": {"q_heads": 20},
    "group_16": {"q_heads": 64, "q_len": 3},
    "dim_8": {"head_dim": 8},
    "dim_64": {"head_dim": 64},
    "dim_80": {"head_dim": 80},
    "dim_96": {"head_dim": 96},
    "dim_256": {"head_dim": 256},
    "dim_192_128": {"head_dim": 192, "head_dim_v": 128},
    "dim_64_128": {"head_dim": 64, "head_dim_v": 128},
    **{
        f"e4m3_{name}": {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"} | options
        for name, options in {
            "plain": {},
            "descales": {"q_descale": "full", "descale": "full"},
            "not_causal": {"causal": False},
            "varlen": {"varlen_q": True, "q_len": 90, "q_descale": "full", "descale": "shared"},
            "long": {"lens": (1500, 1, 129, 128, 700, 40)},
            "more_q_than_keys": {"q_len": 70, "kv_len": 50},
            "window": {"window": (60, 20), "causal": False},
            "window_long": {"window": (200, -1), "lens": (1500, 1, 129, 128, 700, 40)},
            "chunk": {"chunk": 32},
            "softcap": {"softcap": 2.5},
            "scale_negative": {"scale": -0.05},
            "alibi": {"alibi": "head"},
            "leftpad": {"leftpad": True},
            "sink": {"sink": "float32"},
            "batch_idx": {"batch_idx": True},
            "contiguous": {"page_size": 0},
            "page_1": {"page_size": 1},
            "page_24": {"page_size": 24},
            "page_256": {"page_size": 256, "lens": (1500, 1, 129, 128, 700, 40)},
            "heads_first": {"layout": "heads_first"},
            "append": {"append": 40},
            "deterministic": {"deterministic": True},
            "group_5": {"q_heads": 20},
            "dim_16": {"head_dim": 16},
            "dim_64": {"head_dim": 64},
            "dim_80": {"head_dim": 80},
            "dim_64_128": {"head_dim": 64, "head_dim_v": 128},
        }.items()
    },
}


def explained_call(paged_attn, case, device):
    call = cases.build(case).to(device)
    k_cache, v_cache = call.caches()
    return paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs)


def on_the_route(paged_attn, case, device, route):
    """Checks the case after making sure that it is the kernel for long queries that runs."""
    assert route in ("prefill", "prefill_mma")
    explained = explained_call(paged_attn, case, device)
    assert explained.route == route, explained
    check(paged_attn, case, device)
    return explained


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(paged_attn, device, long_route, feature):
    case = dataclasses.replace(BASE, **FEATURES[feature])
    if long_route != "prefill" and case.dtype == "float8_e4m3fn":  # 8-bit q is prefill's alone
        check(paged_attn, case, device)
    else:
        on_the_route(paged_attn, case, device, long_route)


EIGHT_BIT = {
    "plain": {},
    "e5m2": {"kv_dtype": "float8_e5m2"},
    "fp16": {"dtype": "float16"},
    "fp16_e5m2": {"dtype": "float16", "kv_dtype": "float8_e5m2"},
    "descales": {"descale": "full"},
    "not_causal": {"causal": False},
    "varlen": {"varlen_q": True, "q_len": 90, "descale": "shared"},
    "long": {"lens": (1500, 1, 129, 128, 700, 40)},
    "many_tiles": {"batch": 24, "q_len": 200},
    "window_leftpad": {"window": (60, -1), "leftpad": True},
    "window_both": {"window": (60, 20), "causal": False},
    "chunk": {"chunk": 32},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi": "head", "dtype": "float16"},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.05},
    "append": {"append": 40},
    "rotary": {"append": 40, "rotary_dim": 64},
    "batch_idx": {"batch_idx": True},
    "page_1": {"page_size": 1},
    "page_3": {"page_size": 3, "lens": (700, 0, 257, 256, 64, 511)},
    "page_24": {"page_size": 24, "kv_dtype": "float8_e5m2"},
    "page_256": {"page_size": 256, "lens": (1500, 1, 129, 128, 700, 40)},
    "contiguous": {"page_size": 0},
    "contiguous_rows": {"page_size": 0, "batch_idx": True, "leftpad": True},
    "heads_first": {"layout": "heads_first"},
    "more_q_than_keys": {"q_len": 70, "kv_len": 50},
    "sink": {"sink": "float32"},
    "splits": {"num_splits": 3, "lens": (1500, 1, 129, 128, 700, 40)},
    "splits_alibi": {"num_splits": 2, "alibi": "batch", "descale": "full"},
    "deterministic": {"deterministic": True},
    "group_5": {"q_heads": 20},
    "group_16": {"q_heads": 64, "q_len": 5},
    "dim_16": {"head_dim": 16},
    "dim_64": {"head_dim": 64},
    "dim_80": {"head_dim": 80},
    "dim_96": {"head_dim": 96, "kv_dtype": "float8_e5m2"},
    "dim_256": {"head_dim": 256},
    "dim_192_128": {"head_dim": 192, "head_dim_v": 128},
    "dim_64_128": {"head_dim": 64, "head_dim_v": 128},
    "e5m2_q": {"dtype": "float8_e5m2", "kv_dtype": "float8_e5m2", "q_descale": "full", "descale": "full"},
    "e4m3_q_e5m2": {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e5m2", "varlen_q": True, "q_len": 90},
    "e4m3_q_dim_192_128": {"dtype": "float8_e4m3fn", "head_dim": 192, "head_dim_v": 128, "window": (60, 20)},
    "e4m3_q_dim_256": {"dtype": "float8_e4m3fn", "head_dim": 256, "q_descale": "full"},
}


@pytest.mark.parametrize("feature", EIGHT_BIT)
def test_8_bit_cache(paged_attn, device, long_route, feature):
    """Widened on both routes; on prefill_mma if shared memory and registers hold that."""
    case = dataclasses.replace(BASE, **({"kv_dtype": "float8_e4m3fn"} | EIGHT_BIT[feature]))
    explained = explained_call(paged_attn, case, device)
    if long_route == "prefill_mma" and explained.route != long_route:
        why = explained.why_not[long_route]
        wide = case.head_dim > 128 and "shared memory" in why
        scores = (case.softcap or case.alibi) and why == "softcap or alibi_slopes over an 8-bit cache"
        splits = case.num_splits > 1 and why == "num_splits above 1"
        assert wide or scores or splits or case.dtype.startswith("float8"), explained  # 8-bit q is prefill's alone
    else:
        assert explained.route == long_route, explained
    check(paged_attn, case, device)


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 24, 48, 64, 128, 256, 0])
@pytest.mark.parametrize(
    "options", [{}, {"causal": False, "dtype": "float16"}, {"head_dim": 256}, {"head_dim": 192}], ids=str
)
def test_page_size(paged_attn, device, long_route, page_size, options):
    """Bulk copies where a page holds whole boxes, piece by piece elsewhere."""
    case = dataclasses.replace(BASE, page_size=page_size, lens=(700, 0, 257, 256, 64, 511), **options)
    explained = on_the_route(paged_attn, case, device, long_route)
    if long_route == "prefill":
        bulk = page_size % 8 == 0 and not (case.head_dim == 192 and page_size == 8)
        assert (explained.plan["box_rows"] > 0) == bulk


# What tiles of every size are tried with.
EVERY_TILE = {
    "plain": {},
    "leftpad": {"leftpad": True},
    "sink": {"sink": "float32"},
    # Later keys have scores far above those that came first: weights beyond 16 bits, then beyond float32.
    "scores_grow": {"scale": 3.0},
    "scores_grow_fp16": {"scale": 3.0, "dtype": "float16", "page_size": 1},
    "scores_grow_more": {"scale": 30.0, "window": (100, -1)},
    "page_1": {"page_size": 1},
    "contiguous": {"page_size": 0},
}

MIDDLE = EVERY_TILE | {
    "not_causal": {"causal": False, "dtype": "float16"},
    "varlen": {"varlen_q": True, "q_len": 90},
    "long": {"lens": (1500, 1, 129, 128, 700, 40)},
    "more_q_than_keys": {"q_len": 70, "kv_len": 50},
    "window": {"window": (60, 20), "causal": False},
    "page_24": {"page_size": 24},
    "page_64": {"page_size": 64, "lens": (1500, 1, 129, 128, 700, 40)},
    "append": {"append": 40},
    "splits": {"num_splits": 3, "lens": (1500, 1, 129, 128, 700, 40)},
    "deterministic": {"deterministic": True},
    "dim_136": {"head_dim": 136},
    "dim_160": {"head_dim": 160},
    "values_wider": {"head_dim": 96, "head_dim_v": 160},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi": "head", "dtype": "float16"},
}


@pytest.mark.parametrize("feature", MIDDLE)
def test_heads_between_128_and_192(paged_attn, device, long_route, feature):
    """prefill takes tiles of 96 keys; with softcap and ALiBi those of head_dim 256."""
    case = dataclasses.replace(BASE, **({"head_dim": 192} | MIDDLE[feature]))
    explained = on_the_route(paged_attn, case, device, long_route)
    all_scores = bool(case.softcap or case.alibi)
    assert long_route != "prefill" or explained.plan["tile_keys"] == (64 if all_scores else 96)


TALL = EVERY_TILE | {
    "not_causal": {"causal": False, "dtype": "float16"},
    "varlen": {"varlen_q": True, "q_len": 300, "batch": 20},
    "more_q_than_keys": {"q_len": 170, "kv_len": 50},
    "window": {"window": (60, 20), "causal": False},
    "chunk": {"chunk": 32},
    "scale_negative": {"scale": -0.05},
    "page_24": {"page_size": 24},
    "mha": {"q_heads": 4, "q_len": 400, "batch": 17},
    "group_5": {"q_heads": 20},
    "dim_40": {"head_dim": 40},
    "append": {"append": 40},
    "deterministic": {"batch": 3, "deterministic": True},
}


@pytest.mark.parametrize("feature", TALL)
def test_tall_tiles(paged_attn, device, long_route, feature):
    """Narrow heads, and rows for every multiprocessor: prefill takes tiles of 256 rows, or of their whole tokens."""
    narrow = dataclasses.replace(BASE, batch=40, q_len=70, head_dim=64)
    case = dataclasses.replace(narrow, **TALL[feature])
    explained, group = on_the_route(paged_attn, case, device, long_route), case.q_heads // case.kv_heads
    assert long_route != "prefill" or explained.plan["rows_per_tile"] == 256 // group * group


SHORT = EVERY_TILE | {
    "fp16": {"dtype": "float16"},
    "packed": {"varlen_q": True, "batch": 40},
    "window": {"window": (60, -1)},
    "more_q_than_keys": {"q_len": 400, "kv_len": 150},
    "page_8": {"page_size": 8},
    "mha": {"q_heads": 4, "q_len": 400, "kv_len": 400, "batch": 40},
    "dim_104": {"head_dim": 104},
}


@pytest.mark.parametrize("feature", SHORT)
def test_short_prompts(paged_attn, device, long_route, feature):
    """Three tiles of rows for every multiprocessor, and no keys before the prompts: tiles of 192 rows."""
    case = dataclasses.replace(BASE, batch=20, q_len=300, kv_len=300)
    explained = on_the_route(paged_attn, dataclasses.replace(case, **SHORT[feature]), device, long_route)
    assert long_route != "prefill" or explained.plan["rows_per_tile"] == 192


SPLITS = {
    "chosen": {"batch": 1},
    "chosen_packed": {"batch": 2, "varlen_q": True, "lens": (5000, 1300)},
    "two": {"num_splits": 2},
    "seven": {"num_splits": 7, "lens": (1500, 1, 0, 128, 700, 40)},
    "packed": {"num_splits": 3, "varlen_q": True, "lens": (1500, 1, 129, 0, 700, 40), "sink": "float32"},
    "window": {"num_splits": 3, "window": (200, -1), "softcap": 3.0},
    "deterministic": {"num_splits": 4, "deterministic": True, "alibi": "head"},
    "append": {"num_splits": 2, "append": 40, "rotary_dim": 64},
    "dim_256": {"num_splits": 3, "head_dim": 256, "dtype": "float16"},
    "dim_80_page_1": {"num_splits": 2, "head_dim": 80, "page_size": 1, "leftpad": True},
    "contiguous": {"num_splits": 5, "page_size": 0, "batch_idx": True},
    "drafts": {"batch": 3, "q_len": 8, "num_splits": 6},
}


@pytest.mark.parametrize("splits", SPLITS)
def test_keys_in_splits(paged_attn, device, long_route, splits):
    """As many as are asked for; for few rows over many keys more than one without being asked."""
    case = dataclasses.replace(BASE, **({"kv_len": 5000} | SPLITS[splits]))
    if long_route != "prefill" or case.deterministic:
        if long_route == "prefill":  # where memory would bound the splits, and so the batch
            assert explained_call(paged_attn, case, device).route == "decode"
        check(paged_attn, case, device)
        return
    explained = on_the_route(paged_attn, case, device, long_route)
    assert explained.plan["splits"] == SPLITS[splits].get("num_splits", explained.plan["splits"]) > 1


LONG_DRAFTS = {
    "plain": {},
    "packed": {"varlen_q": True, "sink": "float32"},
    "fp16_dim_64": {"dtype": "float16", "head_dim": 64, "page_size": 1},
    "dim_256_window": {"head_dim": 256, "window": (9000, -1)},
    "softcap": {"softcap": 20.0},
    "append": {"append": 8, "rotary_dim": 64},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("feature", LONG_DRAFTS)
def test_long_drafts_among_short_ones(paged_attn, device, long_route, feature):
    """More tiles of rows than multiprocessors, which no two share keys: only the long ones are cut."""
    drafts = dataclasses.replace(BASE, batch=20, q_len=8, q_heads=32, kv_heads=8, lens=(16000, *[300] * 17, 20, 7000))
    case = dataclasses.replace(drafts, **LONG_DRAFTS[feature])
    explained = on_the_route(paged_attn, case, device, long_route)
    assert long_route != "prefill" or explained.plan["most_splits"] == (1 if case.deterministic else 8)


def test_keys_are_cut_where_requests_are_long(paged_attn, device, long_route):
    """The plan of a wide table has splits; a graph that finds short requests makes none, and long ones again."""
    if long_route != "prefill":
        pytest.skip("only that route has splits")
    generator = torch.Generator(device).manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator, device=device).bfloat16()  # noqa: E731
    q, k_cache, v_cache = random(1, 400, 8, 128), random(512, 16, 2, 128), random(512, 16, 2, 128)
    table = torch.randperm(512, generator=generator, device=device).int().view(1, -1)
    lengths, out = torch.zeros(1, dtype=torch.int32, device=device), torch.empty_like(q)
    call = {"cache_seqlens": lengths, "block_table": table, "causal": True, "return_softmax_lse": True}
    explained = paged_attn.explain(q, k_cache, v_cache, **call)
    assert explained.route == "prefill" and explained.plan["splits"] > 1
    assert 401 < explained.plan["split_keys"] < 8000
    attend = lambda **options: paged_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **call, **options)  # noqa: E731
    attend(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attend(out=out)
    for length in (8000, 410, 8192, 401):
        lengths.fill_(length)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = attend(num_splits=1)
        cut = length >= explained.plan["split_keys"]
        # Uncut it is the same work in the same order.
        assert torch.equal(out, expected) != cut and torch.allclose(lse, expected_lse, atol=1e-5)
        assert (out.float() - expected.float()).norm() < 5e-3 * expected.float().norm()


def random_case(rng):
    """A few features at once."""
    chosen = rng.sample(
        ["window", "chunk", "softcap", "alibi", "leftpad", "sink", "append", "varlen_q"], rng.randint(1, 4)
    )
    some = {
        "window": (rng.randint(0, 300), rng.choice([-1, 0, 50])), "chunk": rng.choice([16, 100, 128]),
        "softcap": 5.0, "alibi": "batch", "leftpad": True, "sink": "float32", "append": rng.randint(1, 60),
        "varlen_q": True,
    }  # fmt: skip
    kv_heads = rng.choice([2, 4, 8])
    return Case(
        batch=rng.randint(12, 40) // kv_heads + 8, q_len=rng.randint(33, 150), kv_len=rng.randint(1, 600),
        q_heads=kv_heads * rng.choice([1, 3, 4, 8]), kv_heads=kv_heads, head_dim=rng.choice([64, 72, 128, 160, 256]),
        page_size=rng.choice([0, 1, 16, 64]), causal=rng.random() < 0.7, dtype=rng.choice(["bfloat16", "float16"]),
        seed=rng.getrandbits(20), **{name: some[name] for name in chosen},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_features_together(paged_attn, device, long_route, seed):
    on_the_route(paged_attn, random_case(random.Random(seed)), device, long_route)


def packed(paged_attn, device, q_lens, k_lens, total_q=None, **options):
    """Packed prompts and their lone results, by the deterministic kernel."""
    torch.manual_seed(len(q_lens))
    total_q = total_q or sum(q_lens)
    q = torch.randn(total_q, 16, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(k_lens), 4, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (q_lens, k_lens)
    )
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max(q_lens),
            "max_seqlen_k": max(k_lens), "causal": True, "return_softmax_lse": True} | options  # fmt: skip


def test_a_request_does_not_depend_on_the_others(paged_attn, device):
    """Bitwise, when asked for: alone, among longer ones, among many short ones."""
    lens = [300, 1, 77, 128, 1000]
    arguments = packed(paged_attn, device, lens, lens, deterministic=True)
    out, lse = paged_attn.flash_attn_varlen_func(**arguments)
    begin = 0
    for n in lens:
        part = slice(begin, begin + n)
        alone = {name: arguments[name][part].contiguous() for name in "qkv"}
        cu = torch.tensor([0, n], dtype=torch.int32, device=device)
        alone |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": n, "max_seqlen_k": n}
        lone_out, lone_lse = paged_attn.flash_attn_varlen_func(**(arguments | alone))
        assert torch.equal(out[part], lone_out) and torch.equal(lse[:, part], lone_lse)
        begin += n


def test_tokens_of_no_request_are_cleared(paged_attn, device):
    lens = [100, 0, 300, 129]
    arguments = packed(paged_attn, device, lens, lens, total_q=sum(lens) + 77)
    arguments["out"] = torch.full_like(arguments["q"], torch.nan)
    out, lse = paged_attn.flash_attn_varlen_func(**arguments)
    assert (out[sum(lens) :] == 0).all() and (lse[:, sum(lens) :] == -torch.inf).all()
    assert out[: sum(lens)].isfinite().all()


def test_a_graph_of_chunks_is_replayed_with_other_lengths(paged_attn, device):
    """Captured once; then other lengths, tables and queries, also with requests that have none."""
    lens = (700, 0, 33, 64, 511, 300)
    options = [dataclasses.replace(BASE, lens=lens[-i:] + lens[:-i], seed=i) for i in range(5)]
    call = cases.build(options[0]).to(device)
    run(paged_attn, cases.build(options[0]).to(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(paged_attn, call)
    for case in [*options, options[0]]:
        before = cases.build(case)
        for name, value in before.kwargs.items():
            if isinstance(value, torch.Tensor):
                call.kwargs[name].copy_(value)
        for into, values in zip(call.storage, before.storage, strict=True):
            into.copy_(values)
        call.case = case
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
        judge(out, lse, call, before)


def test_streams_do_not_disturb_each_other(paged_attn, device):
    """Each has a counter of tiles of its own."""
    lens = [500, 40, 900]
    arguments = [packed(paged_attn, device, lens, lens, causal=i % 2 == 0) for i in range(6)]
    expected = [paged_attn.flash_attn_varlen_func(**a) for a in arguments]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in arguments], []
    for _ in range(20):
        for stream, a in zip(streams, arguments):
            with torch.cuda.stream(stream):
                results.append(paged_attn.flash_attn_varlen_func(**a))
    torch.cuda.synchronize()
    for i, (out, lse) in enumerate(results):
        assert torch.equal(out, expected[i % 6][0]) and torch.equal(lse, expected[i % 6][1])


E4M3 = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
ONLY_PREFILL = [({"dtype": "float32"}, "float32")]
ONLY_PREFILL_MMA = [(E4M3, "8-bit q")]


def test_why_not(paged_attn, device, long_route):
    """What keeps a call from the route is said."""
    for options, reason in (
        ({"q_len": 1}, "rows"),
        ({"num_splits": 40}, "num_splits"),
        ({"batch": 1, "kv_heads": 1, "q_len": 20}, "too few"),
        *(ONLY_PREFILL if long_route == "prefill" else ONLY_PREFILL_MMA),
    ):
        explained = explained_call(paged_attn, dataclasses.replace(BASE, **options), device)
        assert explained.route != long_route and reason in explained.why_not[long_route], explained
