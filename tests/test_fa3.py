"""paged_attn.fa3: FlashAttention 3's order of arguments, its neutral keywords, SGLang's merge and plan."""

import inspect

import pytest
import torch
from cases import Case, build
from compare import assert_same_bits, judge

WITH_KVCACHE = """q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table
    cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal
    window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin
    return_softmax_lse"""
VARLEN = """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv
    q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin
    return_attn_probs"""
DENSE = """q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits
    pack_gqa deterministic sm_margin return_attn_probs"""
PLAN = "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim cache_seqlens qkv_dtype headdim_v"
ORDERS = {
    "flash_attn_with_kvcache": WITH_KVCACHE,
    "flash_attn_varlen_func": VARLEN,
    "flash_attn_func": DENSE,
    "get_scheduler_metadata": PLAN,
    "merge_state_v2": "v_a s_a v_b s_b v_merged s_merged",
}

# What SGLang and vLLM pass to every kernel although they ask for nothing.
NEUTRAL = {
    "ver": 3, "fa_version": 4, "only_qv": False, "score_mod": None, "mask_mod": None, "aux_tensors": None, "sfq": None,
    "sfk": None, "sfv": None, "rel_bias": None, "rel_bias_prep_cache": None, "cp_world_size": 1,
    "cp_rank": 0, "cp_tot_seqused_k": None, "output_scale": None, "dynamic_causal": False, "block_sparse_tensors": None,
    "aux_tensor_leading_dims": None,
}  # fmt: skip

# Every feature that FlashAttention 3's function has, in a few calls.
CASES = {
    "decode": Case(),
    "contiguous": Case(page_size=0, batch_idx=True, leftpad=True),
    "window": Case(q_len=5, window=(9, 2), varlen_q=True, sink="float32"),
    "chunk": Case(q_len=7, chunk=8, causal=True, softcap=2.0, scale=0.2),
    "rotary": Case(append=3, q_len=3, causal=True, rotary_dim=32, rotary_interleaved=False, rotary_seqlens=True),
    "ragged append": Case(append=4, append_varlen=True, causal=True, num_splits=3),
    "8 bits": Case(kv_dtype="float8_e4m3fn", descale="full"),
    "latent": Case(qv=True, kv_heads=1, head_dim=64, head_dim_v=128, q_len=2, causal=True),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order(paged_attn, name):
    parameters = inspect.signature(getattr(paged_attn.fa3, name)).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    order = ORDERS[name].split()
    assert positional[: len(order)] == order
    assert name in paged_attn.fa3.__all__


def by_position(call, k_cache, v_cache):
    """The arguments of a call in FlashAttention 3's order, and the keywords that have no place in it."""
    given = {"k_cache": k_cache, "v_cache": v_cache, **call.kwargs}
    given["page_table"] = given.pop("block_table", None)
    defaults = {"causal": False, "window_size": None, "attention_chunk": None, "softcap": 0.0, "num_splits": 0}
    defaults |= {"rotary_interleaved": True, "sm_margin": 0, "return_softmax_lse": False}
    return [given.pop(name, defaults.get(name)) for name in WITH_KVCACHE.split()], given


@pytest.mark.parametrize("name", CASES)
def test_by_position(paged_attn, device, name):
    before, call = build(CASES[name]), build(CASES[name]).to(device)
    positional, keywords = by_position(call, *call.caches())
    judge(*paged_attn.fa3.flash_attn_with_kvcache(*positional, **keywords, **NEUTRAL, max_seqlen_k=None), call, before)


@pytest.mark.parametrize("name", ["decode", "window"])
def test_arguments_of_an_append_ask_for_nothing_without_keys(paged_attn, device, name):
    before, call = build(CASES[name]), build(CASES[name]).to(device)
    positional, keywords = by_position(call, *call.caches())
    arguments = dict(zip(WITH_KVCACHE.split(), positional, strict=True))
    lengths = arguments["cache_seqlens"]
    arguments["cu_seqlens_k_new"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    arguments["rotary_seqlens"] = lengths
    judge(*paged_attn.fa3.flash_attn_with_kvcache(**arguments, **keywords), call, before)


def test_varlen_and_dense(paged_attn, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 32, device=device) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    expected, lse = paged_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    fa3 = paged_attn.fa3
    assert torch.equal(fa3.flash_attn_func(q, k, v, None, True, **NEUTRAL), expected)
    # SGLang: batches without lengths go through the function for packed sequences too.
    out, dense_lse = fa3.flash_attn_varlen_func(q, k, v, None, None, causal=True, return_softmax_lse=True)
    assert torch.equal(out, expected) and torch.equal(dense_lse, lse)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, packed_lse = fa3.flash_attn_varlen_func(
        *packed, cu_seqlens, cu_seqlens, 9, 9, None, None, None, True, return_attn_probs=True, **NEUTRAL
    )
    torch.testing.assert_close(out.view_as(expected), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(packed_lse, lse.transpose(0, 1).flatten(1), rtol=0, atol=1e-6)
    # A paged cache: pages of 3 slots, in order.
    pages = [x.view(6, 3, 2, 32) for x in packed[1:]]
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    for lengths in ({"cu_seqlens_k": cu_seqlens}, {"cu_seqlens_k": None, "seqused_k": cu_seqlens.diff()}):
        paged = fa3.flash_attn_varlen_func(
            packed[0], *pages, cu_seqlens, max_seqlen_q=9, causal=True, page_table=table, **lengths
        )
        torch.testing.assert_close(paged.view_as(expected), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_keys_past_seqused_k_do_not_exist(paged_attn, device, packed):
    """Without pages too: NaN behind the keys that count, and the results of each request alone."""
    torch.manual_seed(0)
    used = [5, 0, 12]
    q, k, v = (torch.randn(3, tokens, heads, 32, device=device) for tokens, heads in ((4, 4), (12, 2), (12, 2)))
    expected = [
        paged_attn.flash_attn_func(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal=True)
        for b, n in enumerate(used)
    ]
    for b, n in enumerate(used):
        k[b, n:] = v[b, n:] = torch.nan
    int32 = {"dtype": torch.int32, "device": device}
    cu_seqlens_q, cu_seqlens_k = (torch.arange(0, 3 * n + 1, n, **int32) if packed else None for n in (4, 12))
    given = [x.flatten(0, 1) if packed else x for x in (q, k, v)]
    out = paged_attn.fa3.flash_attn_varlen_func(
        *given, cu_seqlens_q, cu_seqlens_k, 4, 12, seqused_k=torch.tensor(used, **int32), causal=True
    )
    torch.testing.assert_close(out.view_as(q), torch.cat(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("only_qv", [False, True])
def test_latent_attention_without_a_rotary_part(paged_attn, device, only_qv):
    """q of head_dim 0: as qv . v with a rotary part of zeros."""
    torch.manual_seed(0)
    qv, v_cache = torch.randn(3, 2, 4, 128, device=device), torch.randn(8, 16, 1, 128, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    lengths = torch.tensor([5, 32, 17], dtype=torch.int32, device=device)
    zeros = [torch.zeros(*x.shape[:-1], 64, device=device) for x in (qv, v_cache)]
    kwargs = {"cache_seqlens": lengths, "page_table": table, "causal": True, "softmax_scale": 0.1}
    expected = paged_attn.flash_attn_with_kvcache(zeros[0], zeros[1], v_cache, qv=qv, **kwargs)
    q = torch.empty(3, 2, 4, 0, device=device)
    k_cache = None if only_qv else torch.empty(8, 16, 1, 0, device=device)
    out = paged_attn.fa3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, **kwargs, only_qv=only_qv)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func"])
def test_latent_attention_names_its_arguments(paged_attn, device, function):
    """The operator gets qv as q and the values as keys; errors say what the caller gave."""
    qv, v = torch.zeros(1, 2, 4, 120, device=device), torch.zeros(1, 2, 2, 128, device=device)
    q, arguments = qv[..., :0], {}
    if function == "flash_attn_varlen_func":
        q, qv, v = q[0], qv[0], v[0]
        cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
        arguments = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 2, "max_seqlen_k": 2}
    values = "v_cache" if function == "flash_attn_with_kvcache" else "v"
    with pytest.raises((ValueError, RuntimeError), match=rf"^{values}: expected .* head_dim = 120 \(from qv\)"):
        getattr(paged_attn.fa3, function)(q, v[..., :0], v, qv=qv, **arguments)
    with pytest.raises((ValueError, RuntimeError), match=rf"^{values}: expected the dtype of qv \(float32\)"):
        getattr(paged_attn.fa3, function)(q, v[..., :0], v.half(), qv=qv, **arguments)


def test_latent_values_in_8_bits(paged_attn, device):
    """The values are the keys, so their scale is that of the scores too."""
    case = Case(
        head_dim=128, layout="latent", kv_heads=1, q_len=2, causal=True, kv_dtype="float8_e4m3fn", descale="full"
    )
    before, call = build(case), build(case).to(device)
    for kwargs in (before.kwargs, call.kwargs):
        kwargs["k_descale"] = kwargs["v_descale"]
    k_cache, v_cache = call.caches()
    assert k_cache.shape == v_cache.shape and k_cache.data_ptr() == v_cache.data_ptr()
    given = {name: x for name, x in call.kwargs.items() if name not in ("q", "k_descale")}
    qv = call.kwargs["q"]
    result = paged_attn.fa3.flash_attn_with_kvcache(qv[..., :0], None, v_cache, qv=qv, **given)
    judge(*result, call, before)


@pytest.mark.parametrize("name", ["decode", "window", "ragged append", "latent", "only qv", "varlen", "dense"])
def test_descales_of_16_bits_ask_for_nothing(paged_attn, device, name):
    """SGLang passes a checkpoint's scales over a bfloat16 cache too, of its own batch. FlashAttention 3 reads scales
    where the tensor is of 8 bits."""
    fa3, wild = paged_attn.fa3, torch.full((2, 7), torch.nan, requires_grad=True)  # parameters of a model
    scales = {"q_descale": wild, "k_descale": wild, "v_descale": wild}
    results = []
    for given in ({}, scales):
        if name in CASES:
            call = build(CASES[name]).to(device)
            positional, keywords = by_position(call, *call.caches())
            arguments = dict(zip(WITH_KVCACHE.split(), positional, strict=True)) | keywords | given
            results.append((*fa3.flash_attn_with_kvcache(**arguments), *(x.nan_to_num() for x in call.storage)))
            continue
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 9, heads, 64, device=device).bfloat16() for heads in (4, 2, 2))
        if name == "only qv":
            out = fa3.flash_attn_func(None, None, v, qv=q, only_qv=True, **given)
        elif name == "dense":
            out = fa3.flash_attn_func(q, k, v, causal=True, **given)
        else:
            cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
            packed = [x.flatten(0, 1) for x in (q, k, v)]
            out = fa3.flash_attn_varlen_func(*packed, cu_seqlens, cu_seqlens, 9, 9, causal=True, **given)
        results.append((out,))
    assert_same_bits(*results)


@pytest.mark.parametrize("scale", [torch.full((4, 2), 3.0), torch.full((2, 7), torch.nan)], ids=["fits", "wild"])
def test_operators_ignore_descales_of_16_bits(paged_attn, device, scale):
    """A direct call through torch.ops means what the functions mean."""
    ops, scale, results = paged_attn._ops.ops, scale.to(device), []
    for given in ({}, {"k_descale": scale, "v_descale": scale}):
        call = build(Case(append=3, q_len=3)).to(device)
        q, k, v, lens, table = (call.kwargs[name] for name in ("q", "k", "v", "cache_seqlens", "block_table"))
        caches, out = call.caches(), torch.empty_like(q)
        query = given and {"q_descale": scale}
        ops.flash_attn_with_kvcache_append(q, *caches, out, None, lens, table, 0.1, 0, k, v, **given, **query)
        appended = [x.nan_to_num() for x in call.storage]
        ops.kv_paged_write(k * 2, v * 2, *caches, table, lens, **given)
        results.append((out, *appended, *(x.nan_to_num() for x in call.storage)))
    assert_same_bits(*results)


def test_merge_takes_lse_as_tokens_and_heads(paged_attn, device):
    """As many tokens as heads: the shape alone does not say which is which."""
    torch.manual_seed(0)
    values = [torch.randn(4, 4, 8, device=device) for _ in range(2)]
    lse = [torch.randn(4, 4, device=device) * 4 for _ in range(2)]
    lse[1][0] = -torch.inf
    merged, merged_lse = paged_attn.fa3.merge_state_v2(values[0], lse[0], values[1], lse[1])
    weights = torch.stack(lse).double().exp()
    expected = (torch.stack(values).double() * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse.double(), weights.sum(0).log(), rtol=1e-5, atol=1e-5)
    in_place = paged_attn.fa3.merge_state_v2(values[0], lse[0], values[1], lse[1], values[0], lse[0])
    assert in_place[0] is values[0] and in_place[1] is lse[0]
    assert torch.equal(values[0], merged) and torch.equal(lse[0], merged_lse)


def test_plan_by_every_name(paged_attn, device):
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device)
    common = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 4, "headdim": 64, "cache_seqlens": lengths}
    for names in ({"num_heads": 4, "num_heads_k": 2}, {"num_heads_q": 4, "num_heads_kv": 2}):
        plan = paged_attn.fa3.get_scheduler_metadata(**common, **names, qkv_dtype=torch.bfloat16, page_size=16)
        assert plan.dtype == torch.int32 and plan.device == lengths.device
    with pytest.raises(ValueError, match="num_heads and num_heads_q are two names"):
        paged_attn.fa3.get_scheduler_metadata(**common, num_heads=4, num_heads_q=4)


TENSOR = torch.zeros(2)
REFUSED = {
    "score_mod": (lambda scores: scores, "score_mod: expected None"),
    "cp_world_size": (2, "cp_world_size: expected None or False .* got 2"),
    "seqused_q": (TENSOR, r"seqused_q: expected None .* a tensor of shape \(2,\)"),
    "output_scale": (TENSOR, r"output_scale: expected None"),
    "dynamic_causal": (True, "dynamic_causal: expected None"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_a_real_value_is_refused_by_name(paged_attn, device, function, name):
    x = torch.zeros(1, 2, 2, 8, device=device)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    packed = function == "flash_attn_varlen_func"
    arguments = (x[0], x[0], x[0], cu_seqlens, cu_seqlens) if packed else (x, x, x)
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        getattr(paged_attn.fa3, function)(*arguments, **{name: value})


def test_an_unknown_keyword_is_refused(paged_attn, device):
    q = torch.zeros(1, 2, 2, 8, device=device)
    with pytest.raises(TypeError, match=r"flash_attn_with_kvcache.*'alibi'"):
        paged_attn.fa3.flash_attn_with_kvcache(q, q, q, alibi=None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"only_qv": True}, "qv: expected a tensor"),
        ({"only_qv": True, "qv": TENSOR}, "q: expected head_dim 0"),
        ({"page_table": TENSOR, "block_table": TENSOR}, "block_table and page_table are two names"),
        ({"sinks": TENSOR, "s_aux": TENSOR}, "s_aux and sinks are two names"),
    ],
)
def test_arguments_that_do_not_fit(paged_attn, device, arguments, message):
    q = torch.zeros(1, 2, 2, 8, device=device)
    with pytest.raises(ValueError, match=message):
        paged_attn.fa3.flash_attn_with_kvcache(q, q, q, **arguments)


def test_new_keys_beside_values_alone(paged_attn, device):
    """There is no k_cache that they could be appended to."""
    latents, empty = torch.zeros(1, 2, 1, 8, device=device), torch.zeros(1, 1, 1, 0, device=device)
    words = r"^k: expected None with a q of head_dim 0: append with kv_paged_write first$"
    with pytest.raises(ValueError, match=words):
        paged_attn.fa3.flash_attn_with_kvcache(
            None, None, latents, empty, latents[:, :1], latents, cache_seqlens=1, only_qv=True
        )


@pytest.mark.parametrize("missing, given", [("k", "q"), ("q", "k")])
def test_cu_seqlens_of_one_of_both(paged_attn, device, missing, given):
    tokens, cu_seqlens = torch.zeros(4, 2, 8, device=device), torch.tensor([0, 2, 4]).int().to(device)
    both = {"cu_seqlens_q": None, "cu_seqlens_k": None} | {f"cu_seqlens_{given}": cu_seqlens}
    words = rf"^cu_seqlens_{missing}: expected int32 \[batch \+ 1\] beside cu_seqlens_{given}, got None$"
    with pytest.raises(ValueError, match=words):
        paged_attn.fa3.flash_attn_varlen_func(tokens, tokens, tokens, **both)


@pytest.mark.parametrize("given", ["cu_seqlens_k", "seqused_k"])
def test_lengths_are_named_as_they_were_given(paged_attn, device, given):
    q, pages = torch.zeros(2, 2, 8, device=device), torch.zeros(1, 4, 2, 8, device=device)
    cu_seqlens, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [[0]]))
    message = {"cu_seqlens_k": r"^cu_seqlens_k: expected int32 \[batch \+ 1 = 2",
               "seqused_k": r"^seqused_k: expected int32 \[batch = 1"}  # fmt: skip
    lengths = {"cu_seqlens_k": None} | {given: torch.tensor([0, 2, 4], dtype=torch.int32, device=device)}
    with pytest.raises((ValueError, RuntimeError), match=message[given]):
        paged_attn.fa3.flash_attn_varlen_func(q, pages, pages, cu_seqlens, page_table=table, **lengths)
