"""Keywords of other kernels: accepted where they ask for nothing, refused by name where they ask for something."""

import ast
import dataclasses
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import Case
from compare import assert_same_bits, assert_same_bytes, run

CASE = Case(q_len=3, kv_len=90, causal=True, varlen_q=True)

# What FlashAttention 3 and 4, vLLM and SGLang pass as a matter of course.
NOTHING = {
    "window_size": None,
    "attention_chunk": None,
    "softcap": None,
    "num_splits": None,
    "sm_margin": 0,
    "pack_gqa": None,
    "only_qv": False,
    "seqused_q": None,
    "score_mod": None,
    "mask_mod": None,
    "aux_tensors": None,
    "block_sparse_tensors": None,
    "dynamic_causal": None,
    "output_scale": None,
    "learnable_sink": None,
    "cp_world_size": None,
    "cp_rank": None,
    "cp_tot_seqused_k": None,
    "sfq": None,
    "sfk": None,
    "sfv": None,
    "q_v": None,
    "gather_kv_indices": None,
    "gather_kv_valid_length": None,
    "min_seqlen_k": None,
    "aux_scalars": None,
    "seqlen_k_per_split": None,
    "disable_scheduler_metadata": False,
    "return_lse": False,
    "fa_version": 3,
    "ver": 4,
    "scheduler_metadata": None,
}
SOMETHING = {
    "only_qv": True,
    "seqused_q": torch.ones(4, dtype=torch.int32),
    "score_mod": lambda score: score,
    "mask_mod": lambda mask: mask,
    "aux_tensors": [torch.zeros(1)],
    "dynamic_causal": True,
    "output_scale": torch.ones(1),
    "cp_world_size": 2,
    "sfq": torch.ones(2, 2),
    "gather_kv_indices": torch.zeros(4, 8, dtype=torch.int32),
    "gather_kv_valid_length": torch.ones(4, dtype=torch.int32),
    "min_seqlen_k": 16,
    "aux_scalars": (1.0,),
    "seqlen_k_per_split": 128,
    "disable_scheduler_metadata": True,
    "return_lse": True,
}


def with_kvcache(paged_attn, call, **keywords):
    return run(paged_attn, call, **keywords)


def varlen(paged_attn, call, **keywords):
    kwargs = {"window_size": (-1, -1)} | keywords
    return paged_attn.flash_attn_varlen_func(
        call.kwargs["q"], *call.caches(), call.kwargs["cu_seqlens_q"], None, call.kwargs["max_seqlen_q"], 90,
        causal=True, block_table=call.kwargs["block_table"], seqused_k=call.kwargs["cache_seqlens"],
        return_softmax_lse=True, **kwargs,
    )  # fmt: skip


def func(paged_attn, call, **keywords):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, device=call.kwargs["q"].device) for n, h in ((5, 4), (20, 2), (20, 2)))
    return paged_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True, **keywords)


FUNCTIONS = pytest.mark.parametrize("function", [with_kvcache, varlen, func])


@FUNCTIONS
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_accepted(paged_attn, device, function, name):
    call = cases.build(CASE).to(device)
    for a, b in zip(function(paged_attn, call, **{name: NOTHING[name]}), function(paged_attn, call)):
        assert torch.equal(a, b)


def test_a_rotation_of_none_is_the_usual_one(paged_attn, device):
    """rotary_interleaved is True where nothing is said of it."""
    results = []
    for options in ({}, {"rotary_interleaved": None}, {"rotary_interleaved": False}):
        call = cases.build(Case(q_len=2, append=2, rotary_dim=32, causal=True, kv_len=20)).to(device)
        call.kwargs.pop("rotary_interleaved", None)
        results.append(run(paged_attn, call, **options)[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@FUNCTIONS
def test_a_world_of_one(paged_attn, device, function):
    """vLLM's numbers for no context parallelism."""
    call = cases.build(CASE).to(device)
    for a, b in zip(function(paged_attn, call, cp_world_size=1, cp_rank=0), function(paged_attn, call)):
        assert torch.equal(a, b)


@FUNCTIONS
def test_everything_of_nothing_at_once(paged_attn, device, function):
    call = cases.build(CASE).to(device)
    for a, b in zip(function(paged_attn, call, **NOTHING), function(paged_attn, call)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (None, -1), (-1, None), (2, None), (None, 2), (None, 0)], ids=str)
@pytest.mark.parametrize("case", [Case(q_len=5), Case(q_len=5, sink="float32")], ids=["plain", "with a feature"])
def test_none_in_a_window_is_unlimited(paged_attn, device, case, window, causal):
    """As FlashAttention 4 writes it."""
    call = cases.build(case).to(device)
    numbers = tuple(-1 if size is None else size for size in window)
    given, expected = (run(paged_attn, call, window_size=w, causal=causal) for w in (window, numbers))
    for a, b in zip(given, expected):
        assert torch.equal(a, b)


@FUNCTIONS
@pytest.mark.parametrize("name", SOMETHING)
def test_something_is_refused_by_name(paged_attn, device, function, name):
    call = cases.build(CASE).to(device)
    with pytest.raises(ValueError, match=rf"^{name}: expected None or False \(not supported by paged_attn\), got "):
        function(paged_attn, call, **{name: SOMETHING[name]})


@FUNCTIONS
def test_typing_errors_are_not_swallowed(paged_attn, device, function):
    call = cases.build(CASE).to(device)
    with pytest.raises(TypeError, match=r"^flash_attn_\w+\(\) got an unexpected keyword argument 'score_mods'$"):
        function(paged_attn, call, score_mods=None)


@pytest.mark.parametrize("name", ["cu_seqlens_k_new", "rotary_seqlens"])
@pytest.mark.parametrize("case", [Case(q_len=3), Case(q_len=3, alibi="head"), Case(varlen_q=True)], ids=str)
def test_companions_without_their_tensors(paged_attn, device, case, name):
    """FlashAttention 3's callers always pass them, with or without k, v and the tables of angles."""
    call = cases.build(case).to(device)
    companion = torch.arange(case.batch + 1 if name == "cu_seqlens_k_new" else case.batch, dtype=torch.int32)
    with_it = run(paged_attn, call, **{name: companion.to(device)})
    for a, b in zip(with_it, run(paged_attn, call)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("features", [{}, {"softcap": 3.0}], ids=str)
def test_companions_without_new_keys_are_not_looked_at(paged_attn, device, features):
    """Whatever they are, in either function."""
    call = cases.build(Case(q_len=3)).to(device)
    k_cache, v_cache = call.caches()
    for function in (paged_attn.flash_attn_with_kvcache, paged_attn.fa3.flash_attn_with_kvcache):
        whole = dict(k_cache=k_cache, v_cache=v_cache, **call.kwargs, **features)
        with_them = function(**whole, cu_seqlens_k_new=[0, 1], rotary_seqlens=torch.zeros(7, 7))
        for a, b in zip(with_them, function(**whole)):
            assert torch.equal(a, b)


def test_rotary_seqlens_with_new_keys_but_no_angles(paged_attn, device):
    case = Case(q_len=3, append=2)
    calls = [cases.build(case).to(device) for _ in range(2)]
    given = run(paged_attn, calls[0], rotary_seqlens=torch.arange(4, dtype=torch.int32, device=device))
    for a, b in zip(given, run(paged_attn, calls[1])):
        assert torch.equal(a, b)


@pytest.mark.parametrize("module", ["", "fa3"])
@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func"])
def test_q_v_is_another_name_of_qv(paged_attn, device, name, module):
    """vLLM's."""
    function = getattr(getattr(paged_attn, module) if module else paged_attn, name)
    torch.manual_seed(0)
    q, k, v, qv = (torch.randn(2, 5, h, d, device=device) for h, d in ((4, 64), (1, 64), (1, 512), (4, 512)))
    arguments = {"q": q, "k_cache" if name.endswith("cache") else "k": k, "causal": True}
    arguments["v_cache" if name.endswith("cache") else "v"] = v
    if "varlen" in name:
        cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
        arguments = {n: x.flatten(0, 1) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        arguments |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 5, "max_seqlen_k": 5}
        qv = qv.flatten(0, 1)
    out = function(**arguments, q_v=qv)
    assert torch.equal(out, function(**arguments, qv=qv)) and not torch.equal(out, function(**arguments, qv=qv * 0))
    with pytest.raises(ValueError, match=r"^qv and q_v are two names of one argument: expected one of"):
        function(**arguments, qv=qv, q_v=qv)
    with pytest.raises((ValueError, RuntimeError), match=r"^q_v: expected "):
        function(**arguments, q_v=qv[..., :-8].contiguous())
    if module:
        alone = {n: x for n, x in arguments.items() if n not in ("q", "k", "k_cache")}
        keys = "k_cache" if name.endswith("cache") else "k"
        expected = function(q=None, **{keys: None}, **alone, qv=qv, only_qv=True)
        assert torch.equal(function(q=None, **{keys: None}, **alone, q_v=qv, only_qv=True), expected)


WILD = {name: torch.full((7, 3, 2), torch.nan, dtype=torch.float64) for name in ("q_descale", "k_descale", "v_descale")}
UNSCALED = {
    "plain": (with_kvcache, {}),
    "a feature": (with_kvcache, {"sink": "float32"}),
    "append": (with_kvcache, {"append": 3, "varlen_q": False}),
    "an append with a rotation": (with_kvcache, {"append": 3, "varlen_q": False, "rotary_dim": 32}),
    "MLA with qv": (with_kvcache, {"qv": True, "head_dim_v": 512, "kv_heads": 1}),
    "varlen": (varlen, {}),
    "dense": (func, {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", UNSCALED)
def test_descales_of_more_than_8_bits_ask_for_nothing(paged_attn, device, name, dtype):
    """As in FlashAttention 3, which does not look at them: engines pass the scales of a checkpoint whatever the cache.
    So neither their values count nor their shapes, dtypes and devices."""
    function, fields = UNSCALED[name]
    case = dataclasses.replace(CASE, dtype=dtype, **fields)
    calls = [cases.build(case).to(device) for _ in range(2)]
    assert_same_bits(function(paged_attn, calls[0], **WILD), function(paged_attn, calls[1]))
    for a, b in zip(*(call.storage for call in calls)):
        assert_same_bytes("cache", a, b.cpu())


def test_the_descale_of_a_16_bit_query_over_8_bits(paged_attn, device):
    """Each tensor by itself: the scales of the cache count."""
    calls = [cases.build(Case(kv_dtype="float8_e4m3fn", descale="full")).to(device) for _ in range(3)]
    given, without = run(paged_attn, calls[0], q_descale=WILD["q_descale"]), run(paged_attn, calls[1])
    assert_same_bits(given, without)
    assert not torch.equal(run(paged_attn, calls[2], v_descale=None)[0], without[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_descales_of_a_cache_of_more_than_8_bits_are_not_written(paged_attn, device, dtype):
    calls = [cases.build(Case(append=3, dtype=dtype)).to(device) for _ in range(2)]
    names = ("k", "v", "block_table", "cache_seqlens")
    for call, scales in zip(calls, ({name: WILD[name] for name in ("k_descale", "v_descale")}, {})):
        k_cache, v_cache = call.caches()
        paged_attn.kv_paged_write(
            k_cache=k_cache, v_cache=v_cache, **{name: call.kwargs[name] for name in names}, **scales
        )
    for a, b in zip(*(call.storage for call in calls)):
        assert_same_bytes("cache", a, b.cpu())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_descales_of_more_than_8_bits_may_ask_for_gradients(paged_attn, device, dtype):
    """They are parameters of a checkpoint, and nobody looks at them."""
    call = cases.build(Case(append=3, dtype=dtype)).to(device)
    scales = {name: torch.ones(1, 1, device=device, requires_grad=True) for name in ("k_descale", "v_descale")}
    with torch.enable_grad():
        run(paged_attn, call, **scales)
        k, v, *where = (call.kwargs[name] for name in ("k", "v", "block_table", "cache_seqlens"))
        paged_attn.kv_paged_write(k, v, *call.caches(), *where, **scales)


def test_features_stand_in_the_order_of_the_operators(paged_attn):
    """Every tuple `features` of the package: an element is the argument of its place, another name of it, or off."""
    call = sys.modules[paged_attn.__name__ + "._call"]
    names = {"sink": "s_aux", "sinks": "s_aux"}
    seen = 0
    for module in ("attention", "fa3"):
        source = Path(sys.modules[f"{paged_attn.__name__}.{module}"].__file__).read_text()
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "features"):
                continue
            values = node.value.orelse if isinstance(node.value, ast.IfExp) else node.value
            assert len(values.elts) == len(call.FEATURES), ast.unparse(node)
            for value, name, off in zip(values.elts, call.FEATURES, call._NO_FEATURES, strict=True):
                used = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - {"k", "table"}
                said = {names.get(n, n) for n in used} == {name} if used else ast.literal_eval(value) == off
                assert said, f"{module}.py: {name}: {ast.unparse(value)}"
            seen += 1
    assert seen == 6, "a function without `features`, or a new one: count them"
