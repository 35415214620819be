"""Multi-head latent attention on a Hopper GPU: every feature on the route "mla", both forms of the call, every page
size, few and many rows, cuts of every kind. And heads of 512, on the route "wide_heads".
"""

import dataclasses
import math
import random

import cases
import pytest
import torch
from cases import Case
from compare import check, judge, run


@pytest.fixture(autouse=True)
def only_on_hopper(device):
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the route needs compute capability 9.0")


JOINED = Case(
    batch=5,
    kv_len=300,
    q_heads=128,
    kv_heads=1,
    head_dim=576,
    head_dim_v=512,
    layout="latent",
    page_size=64,
    causal=True,
)
PARTS = {"head_dim": 64, "qv": True, "layout": "plain"}
APART = dataclasses.replace(JOINED, **PARTS)
FORMS = {"joined": JOINED, "apart": APART}

FEATURES = {
    "plain": {},
    "fp16": {"dtype": "float16"},
    "long": {"lens": (3000, 1, 64, 65, 900)},
    "one_long": {"batch": 1, "lens": (20000,)},
    "one_long_of_32": {"batch": 32, "lens": (*[1, 64, 256, 130] * 5, 9000, *[256] * 11), "q_heads": 16},
    "one_long_of_32_heads_128": {"batch": 32, "lens": (9000, *[256] * 31)},
    "three_long_of_32": {"batch": 32, "lens": (256, 9000, *[100] * 28, 8500, 8000), "q_heads": 16},
    "many_long_of_32": {"batch": 32, "lens": (*[7000] * 6, *[100] * 26), "q_heads": 16},
    "equal": {"batch": 32, "lens": (1024,) * 32},
    "many": {"batch": 200, "kv_len": 150},
    "drafts_2": {"q_len": 2},
    "drafts_8": {"q_len": 8},
    "not_causal": {"q_len": 3, "causal": False},
    "varlen": {"varlen_q": True, "q_len": 8},
    "varlen_spare": {"varlen_q": True, "q_len": 5, "spare": 3},
    "prompt": {"batch": 2, "q_len": 70, "lens": (300, 130)},
    "more_q_than_keys": {"q_len": 8, "kv_len": 5},
    "heads_16": {"q_heads": 16},
    "heads_16_drafts": {"q_heads": 16, "q_len": 5},
    "heads_32": {"q_heads": 32, "q_len": 2},
    "heads_48": {"q_heads": 48, "q_len": 3},
    "heads_64": {"q_heads": 64},
    "window": {"window": (100, -1), "q_len": 2},
    "window_right": {"window": (-1, 2), "causal": False, "q_len": 4},
    "chunk": {"chunk": 50, "q_len": 3},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi": "batch"},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.05},
    "leftpad": {"leftpad": True},
    "sink": {"sink": "float32"},
    "sink_16bit": {"sink": "bfloat16"},
    "batch_idx": {"batch_idx": True},
    "contiguous": {"page_size": 0},
    "deterministic": {"deterministic": True, "kv_len": 9000},
    "deterministic_prompt": {"deterministic": True, "batch": 2, "q_len": 40, "lens": (9000, 300)},
    "deterministic_varlen": {
        "deterministic": True,
        "varlen_q": True,
        "batch": 3,
        "q_len": 40,
        "lens": (9000, 30, 5000),
    },
    "num_splits": {"num_splits": 5, "kv_len": 2000},
    "num_splits_varlen": {"num_splits": 9, "varlen_q": True, "q_len": 30, "spare": 2},
    "out": {"give_out": True},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e4m3_drafts": {"kv_dtype": "float8_e4m3fn", "q_len": 3, "lens": (700, 0, 257, 256, 64)},
    "e4m3_long": {"kv_dtype": "float8_e4m3fn", "batch": 2, "lens": (9000, 4096)},
    "e4m3_page_1": {"kv_dtype": "float8_e4m3fn", "page_size": 1, "q_len": 2},
    "e4m3_page_16": {"kv_dtype": "float8_e4m3fn", "page_size": 16, "leftpad": True},
    "e4m3_heads_16": {"kv_dtype": "float8_e4m3fn", "q_heads": 16},
    "e4m3_heads_16_page_1": {"kv_dtype": "float8_e4m3fn", "q_heads": 16, "q_len": 2, "page_size": 1},
    "e4m3_heads_32": {"kv_dtype": "float8_e4m3fn", "q_heads": 32, "leftpad": True, "window": (100, -1)},
    "e4m3_heads_64": {"kv_dtype": "float8_e4m3fn", "q_heads": 64},
    "e5m2_heads_8_drafts": {"kv_dtype": "float8_e5m2", "q_heads": 8, "q_len": 4, "dtype": "float16"},
    "e4m3_window": {"kv_dtype": "float8_e4m3fn", "window": (100, -1), "q_len": 2},
    "e4m3_fp16": {"kv_dtype": "float8_e4m3fn", "dtype": "float16"},
    "e5m2": {"kv_dtype": "float8_e5m2", "deterministic": True, "kv_len": 5000},
    "e4m3_num_splits_varlen": {"kv_dtype": "float8_e4m3fn", "num_splits": 30, "varlen_q": True, "q_len": 20},
    "e5m2_fp16": {"kv_dtype": "float8_e5m2", "dtype": "float16", "q_len": 2},
}

# Requests of up to 32 rows have kernels of their own.
FEATURES |= {
    f"{name}_heads_{heads}": FEATURES[name] | {"q_heads": heads}
    for heads in (16, 32)
    for name in (
        *("fp16", "long", "one_long", "equal", "many", "more_q_than_keys"),
        *("window", "window_right", "chunk", "softcap"),
        *("alibi", "scale_0", "scale_negative", "leftpad", "sink", "sink_16bit", "batch_idx", "contiguous"),
        *("deterministic", "deterministic_varlen", "num_splits", "num_splits_varlen", "varlen", "varlen_spare", "out"),
    )
}
FEATURES |= {"heads_8": {"q_heads": 8}, "heads_16_drafts_2": {"q_heads": 16, "q_len": 2}}


def on_the_route(paged_attn, case, device, route="mla"):
    """Checks the case after making sure that it is the kernel of the route that runs."""
    call = cases.build(case).to(device)
    k_cache, v_cache = call.caches()
    explained = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
    assert explained.route == route, explained
    check(paged_attn, case, device)
    return explained


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(paged_attn, device, feature, form):
    on_the_route(paged_attn, dataclasses.replace(FORMS[form], **FEATURES[feature]), device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 24, 48, 64, 128, 256, 0])
@pytest.mark.parametrize("q_heads", [16, 128])
def test_page_size(paged_attn, device, page_size, form, q_heads):
    """Bulk copies where a page holds whole boxes, piece by piece elsewhere and for few rows."""
    case = dataclasses.replace(FORMS[form], page_size=page_size, lens=(700, 0, 257, 256, 64), q_len=2, q_heads=q_heads)
    explained = on_the_route(paged_attn, case, device)
    assert (explained.plan["box_rows"] > 0) == (q_heads == 128 and page_size % 16 == 0)


WIDE = dataclasses.replace(JOINED, q_heads=8, kv_heads=2, head_dim=512, head_dim_v=0, layout="plain", page_size=16)
WIDE_FEATURES = {name: f for name, f in FEATURES.items() if "kv_dtype" not in f and "q_heads" not in f} | {
    "one_row": {"q_heads": 2},
    "rows_16": {"q_len": 4},
    "rows_20": {"q_len": 5},
    "rows_64": {"q_heads": 16, "q_len": 8},
    "append": {"append": 1},
    "append_rotary": {"append": 3, "q_len": 3, "rotary_dim": 64},
    "heads_first": {"layout": "heads_first"},
    "page_1": {"page_size": 1, "q_len": 2},
    "page_24": {"page_size": 24, "q_len": 2},
    "page_256": {"page_size": 256, "q_len": 2},
    "long_prompt": {"batch": 2, "q_len": 1500, "lens": (1500, 1700)},
    "more_items_than_are_dealt": {"batch": 40, "kv_len": 40, "q_len": 30, "q_heads": 64},
}


@pytest.mark.parametrize("feature", WIDE_FEATURES)
def test_wide_heads(paged_attn, device, feature):
    """Keys and values of 512 in the kernel of few rows."""
    on_the_route(paged_attn, dataclasses.replace(WIDE, **WIDE_FEATURES[feature]), device, "wide_heads")


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"head_dim": 256}, "head_dim and head_dim_v other than (512, 512)"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "an 8-bit cache"),
        ({"layout": "odd_strides"}, "k_cache or v_cache does not begin at a multiple of 16 bytes"),
    ],
    ids=str,
)
def test_why_not_wide_heads(paged_attn, device, options, reason):
    call = cases.build(dataclasses.replace(WIDE, **options)).to(device)
    k_cache, v_cache = call.caches()
    explained = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
    assert explained.route != "wide_heads" and explained.why_not["wide_heads"] == reason


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("options", [{"append": 1}, {"append": 3, "q_len": 3, "rotary_dim": 64}], ids=str)
def test_append(paged_attn, device, options, kv_dtype):
    """Where keys and values are tensors of their own: new tokens are written before they are read."""
    on_the_route(paged_attn, dataclasses.replace(APART, kv_dtype=kv_dtype, **options), device)


@pytest.mark.parametrize("descale", ["full", "shared"])
def test_descale(paged_attn, device, descale):
    """Scores have the scale of the keys, the output has that of the values."""
    on_the_route(paged_attn, dataclasses.replace(JOINED, kv_dtype="float8_e4m3fn", descale=descale, q_len=2), device)


LATENTS = {  # v_cache of k_cache = kv.unsqueeze(2), kv being [pages, slots, 576]
    "of k_cache": lambda kv: kv.unsqueeze(2)[..., :512],
    "unsqueezed": lambda kv: kv[..., :512].unsqueeze(2),
    "a view": lambda kv: kv[..., :512].view(*kv.shape[:2], 1, 512),
    "split": lambda kv: kv.split([512, 64], -1)[0][:, :, None],
    "slots of a pool": lambda kv: kv.view(-1, 1, 576)[..., :512].view(-1, kv.shape[1], 1, 512),
}


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("spelling", LATENTS)
def test_every_way_to_write_v_cache(paged_attn, device, spelling, page_size):
    """Their strides differ, where one entry makes them meaningless. All are the same call."""
    generator = torch.Generator(device).manual_seed(1)
    kv = torch.randn(256 // page_size, page_size, 576, device=device, generator=generator).bfloat16()
    q = torch.randn(1, 1, 128, 576, device=device, generator=generator).bfloat16()
    table = torch.arange(len(kv), device=device).int()[None]
    options = {"cache_seqlens": torch.tensor([250], device=device).int(), "block_table": table}
    expected = paged_attn.flash_attn_with_kvcache(q, kv.unsqueeze(2), kv.unsqueeze(2)[..., :512], **options)
    call = (q, kv.unsqueeze(2), LATENTS[spelling](kv))
    assert paged_attn.explain(*call, **options).route == "mla"
    assert torch.equal(paged_attn.flash_attn_with_kvcache(*call, **options), expected)


@pytest.mark.parametrize("q_heads, dim", [(16, 576), (32, 576), (128, 576), (8, 512)])
def test_packed_keys(paged_attn, device, q_heads, dim):
    """Keys of all requests one behind the other, with room between them."""
    generator = torch.Generator(device).manual_seed(1)
    lens, room = [130, 1, 300], [150, 20, 300]
    k = torch.randn(sum(room), 1, dim, device=device, generator=generator).bfloat16()
    v = k[..., :512] if dim == 576 else torch.randn(*k.shape[:2], 512, device=device, generator=generator).bfloat16()
    q = torch.randn(3, q_heads, dim, device=device, generator=generator).bfloat16()
    cu_k, seqused, cu_q = (torch.tensor(x, device=device).int() for x in ([0, 150, 170, 470], lens, [0, 1, 2, 3]))
    out = paged_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_seqlen_q=1, max_seqlen_k=300, seqused_k=seqused, softmax_scale=0.05
    )
    for b, n in enumerate(lens):
        keys, values = (x[cu_k[b] : cu_k[b] + n, 0].double() for x in (k, v))
        expected = (q[b].double() @ keys.T * 0.05).softmax(-1) @ values
        assert (out[b].double() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("q_heads", [16, 128])
def test_large_queries_over_8_bits(paged_attn, device, q_heads):
    """q goes through float16 there: rows are brought into its range whatever they hold."""
    q = torch.zeros(1, 1, q_heads, 576, device=device).bfloat16()
    q[..., 0] = 2.0**120
    kv = torch.zeros(1, 64, 1, 576, device=device)
    kv[0, 5, 0, 0], kv[0, 5, 0, 1:512] = 2.0**-9, 3.0
    kv = kv.to(torch.float8_e4m3fn)
    table, lens = torch.zeros(1, 1, device=device).int(), torch.tensor([64], device=device).int()
    call = {"cache_seqlens": lens, "block_table": table, "softmax_scale": 2.0**-100}  # a score of 2^11
    out = paged_attn.flash_attn_with_kvcache(q, kv, kv[..., :512], **call)
    assert paged_attn.explain(q, kv, kv[..., :512], **call).route == "mla"
    assert (out[..., 1:] == 3.0).all()


@pytest.mark.parametrize("q_heads", [16, 128])
@pytest.mark.parametrize("cache", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_many_small_probabilities(paged_attn, device, cache, q_heads):
    """As in test_edges.py: 2^-23.6 each."""
    keys, kind = 2**14, getattr(torch, cache)
    kv = torch.zeros(keys // 64, 64, 1, 576, device=device)
    kv[..., :512] = 64
    kv[0, 0, 0, :512], kv[0, 0, 0, 575] = 0, 1
    q = torch.zeros(1, 1, q_heads, 576, device=device, dtype=kind if kind.itemsize == 2 else torch.float16)
    q[..., 575] = 1
    kv, table = kv.to(kind), torch.arange(keys // 64, device=device).int()[None]
    call = {"cache_seqlens": torch.tensor([keys], device=device).int(), "block_table": table}
    call["softmax_scale"] = 23.6 * math.log(2)
    out = paged_attn.flash_attn_with_kvcache(q, kv, kv[..., :512], **call)
    assert paged_attn.explain(q, kv, kv[..., :512], **call).route == "mla"
    together = (keys - 1) * 2**-23.6
    torch.testing.assert_close(out, torch.full_like(out, 64 * together / (1 + together)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("q_heads", [1, 16, 128])
def test_two_kv_heads(paged_attn, device, q_heads):
    on_the_route(paged_attn, dataclasses.replace(APART, q_heads=2 * q_heads, kv_heads=2, q_len=2), device)


def random_case(rng):
    """A few features at once."""
    some = {
        "window": (rng.randint(0, 300), rng.choice([-1, 0, 5])), "chunk": rng.choice([16, 100, 128]), "softcap": 5.0,
        "alibi": "batch", "leftpad": True, "sink": "float32", "varlen_q": True,
    }  # fmt: skip
    return dataclasses.replace(
        FORMS[rng.choice([*FORMS])],
        batch=rng.randint(1, 40), q_len=rng.randint(1, 9), kv_len=rng.randint(1, 2500),
        q_heads=rng.choice([16, 24, 32, 64, 128]), page_size=rng.choice([0, 1, 16, 64]), causal=rng.random() < 0.7,
        dtype=rng.choice(["bfloat16", "float16"]), seed=rng.getrandbits(20),
        **{name: some[name] for name in rng.sample([*some], rng.randint(0, 3))},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_features_together(paged_attn, device, seed):
    on_the_route(paged_attn, random_case(random.Random(seed)), device)


@pytest.mark.parametrize("q_heads", [16, 128])
def test_deterministic_does_not_see_the_tokens_of_others(paged_attn, device, q_heads):
    """Packed requests; the second one has more tokens than the first."""
    torch.manual_seed(0)
    q = torch.randn(20, q_heads, 576, device=device).bfloat16()
    k_cache = torch.randn(130, 64, 1, 576, device=device).bfloat16()
    table = torch.randperm(130, device=device).int().view(2, -1)
    results = []
    for cu in ([0, 8], [0, 8, 20]):
        requests = len(cu) - 1
        out, lse = paged_attn.flash_attn_with_kvcache(
            q[: cu[-1]], k_cache, k_cache[..., :512], block_table=table[:requests], causal=True, deterministic=True,
            cache_seqlens=torch.full((requests,), 4099, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device), max_seqlen_q=12 if requests > 1 else 8,
            return_softmax_lse=True,
        )  # fmt: skip
        results.append((out[:8], lse[:, :8]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("num_splits", [0, 5])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_heads", [16, 128])
def test_deterministic_does_not_see_a_large_batch(paged_attn, device, q_heads, kv_dtype, num_splits):
    torch.manual_seed(0)
    q = torch.randn(150, 2, q_heads, 576, device=device).bfloat16()
    k_cache = torch.randn(500, 64, 1, 576, device=device).to(kv_dtype)
    table = torch.randint(500, (150, 100), device=device).int()
    lengths = torch.randint(4000, 6400, (150,), device=device).int()

    def attend(requests):
        return paged_attn.flash_attn_with_kvcache(
            q[:requests], k_cache, k_cache[..., :512], block_table=table[:requests], cache_seqlens=lengths[:requests],
            causal=True, deterministic=True, num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip

    out, lse = attend(150)
    for requests in (1, 9, 40):
        few = attend(requests)
        assert torch.equal(few[0], out[:requests]) and torch.equal(few[1], lse[:requests]), requests


@pytest.mark.parametrize("options", [{"deterministic": True}, {"num_splits": 16}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_workspace_of_a_long_prompt(paged_attn, device, packed, options):
    """As docs/cuda.md says: not for every split that its table would allow."""
    tokens, heads = 4096, 16
    cache = torch.zeros(512, 64, 1, 576, device=device, dtype=torch.bfloat16)
    table = torch.arange(512, device=device).int().view(1, -1)
    q = torch.zeros(tokens, heads, 576, device=device, dtype=torch.bfloat16)
    out = torch.empty(tokens, heads, 512, device=device, dtype=torch.bfloat16)
    if packed:
        options = options | {"cu_seqlens_q": torch.tensor([0, tokens], device=device).int(), "max_seqlen_q": tokens}
    else:
        q, out = q.unsqueeze(0), out.unsqueeze(0)
    lengths = torch.tensor([tokens], device=device).int()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paged_attn.flash_attn_with_kvcache(
        q, cache, cache[..., :512], cache_seqlens=lengths, block_table=table, causal=True, out=out, **options
    )
    rows = tokens * heads + 16384 + 64 if packed else 0
    assert torch.cuda.max_memory_allocated() - before <= rows * 514 * 4 + (1 << 20)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_replayed_with_other_lengths(paged_attn, device, form):
    lens = (700, 0, 2300, 64, 511)
    options = [dataclasses.replace(FORMS[form], lens=lens[-i:] + lens[:-i], seed=i) for i in range(5)]
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


def big_call(device, batch=32, kv_len=4096, q_len=1, seed=0, page_size=64):
    generator = torch.Generator(device).manual_seed(seed)
    pages = -(-kv_len // page_size) * batch
    cache = torch.randn(pages, page_size, 1, 576, device=device, generator=generator).bfloat16()
    q = torch.randn(batch, q_len, 128, 576, device=device, generator=generator).bfloat16()
    table = torch.randperm(pages, device=device, generator=generator).int().view(batch, -1)
    lens = torch.full((batch,), kv_len, device=device, dtype=torch.int32)
    return {"q": q, "k_cache": cache, "v_cache": cache[..., :512], "block_table": table, "cache_seqlens": lens,
            "causal": True, "softmax_scale": 192**-0.5, "return_softmax_lse": True}  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [{}, {"q_len": 2}, {"batch": 1, "kv_len": 32768}, {"batch": 3, "kv_len": 5000}], ids=str
)
def test_many_times_the_same(paged_attn, device, sizes):
    """The sizes of the benchmark: what a race would change differs from call to call."""
    arguments = big_call(device, **sizes)
    out, lse = paged_attn.flash_attn_with_kvcache(**arguments)
    k = arguments["k_cache"][arguments["block_table"].long()].flatten(1, 2)[..., 0, :].float()
    k = k[:, : int(arguments["cache_seqlens"][0])]
    scores = torch.einsum("bthd,bkd->bthk", arguments["q"].float(), k) * 192**-0.5
    q_len, kv_len = scores.shape[1], scores.shape[3]
    positions = torch.arange(kv_len, device=device)
    hidden = positions > (kv_len - q_len + torch.arange(q_len, device=device))[:, None]
    scores.masked_fill_(hidden[None, :, None], -torch.inf)
    expected = torch.einsum("bthk,bkd->bthd", scores.softmax(-1), k[..., :512])
    assert ((out.float() - expected).norm() / expected.norm()).item() < 4e-3
    assert (lse - scores.logsumexp(-1).transpose(1, 2)).abs().max().item() < 2e-3
    for _ in range(50):
        again, again_lse = paged_attn.flash_attn_with_kvcache(**arguments)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_streams_do_not_disturb_each_other(paged_attn, device):
    arguments = [big_call(device, batch=3 + i, kv_len=700 * (i + 1), seed=i) for i in range(5)]
    expected = [paged_attn.flash_attn_with_kvcache(**a) for a in arguments]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in arguments], []
    for _ in range(20):
        for stream, a in zip(streams, arguments):
            with torch.cuda.stream(stream):
                results.append(paged_attn.flash_attn_with_kvcache(**a))
    torch.cuda.synchronize()
    for i, (out, lse) in enumerate(results):
        assert torch.equal(out, expected[i % 5][0]) and torch.equal(lse, expected[i % 5][1])


def test_why_not(paged_attn, device):
    """What keeps a call from the route is said."""
    for options, reason in (
        ({"head_dim": 128, "head_dim_v": 128, "layout": "plain"}, "head_dim"),
        ({"dtype": "float8_e4m3fn", "q_descale": "full"}, "8-bit q"),
        ({"kv_dtype": "float8_e4m3fn", "descale": "full", **PARTS}, "descales with qv"),
        ({"dtype": "float32"}, "float32"),
        ({"layout": "plain"}, "first 512"),
    ):
        call = cases.build(dataclasses.replace(JOINED, **options)).to(device)
        k_cache, v_cache = call.caches()
        explained = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
        assert reason in explained.why_not["mla"], (options, explained)
