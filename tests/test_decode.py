"""The named cases, every feature by itself, every size; and the ways of saying the same thing."""

import dataclasses
import errno
import mmap
import platform
import re
import sys
from pathlib import Path

import cases
import pytest
import reference
import torch
from cases import Case
from compare import assert_same_bits, check, judge, run
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@pytest.mark.every_isa
@pytest.mark.kernels_ci
@pytest.mark.sanitize
@pytest.mark.parametrize("name", cases.NAMED)
def test_named(paged_attn, device, name):
    check(paged_attn, cases.NAMED[name], device)


@pytest.mark.every_isa
@pytest.mark.sanitize
@pytest.mark.parametrize("name", cases.ALONE)
def test_feature_alone(paged_attn, device, name):
    check(paged_attn, cases.ALONE[name], device)


@pytest.mark.parametrize("case", list(cases.size_cases()), ids=str)
def test_size(paged_attn, device, case):
    check(paged_attn, case, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("case", list(cases.tail_cases()), ids=str)
def test_tail(paged_attn, device, case):
    check(paged_attn, case, device)


def both(paged_attn, device, case, change):
    """The results of a case as it is and with changed arguments."""
    plain, changed = cases.build(case).to(device), cases.build(case).to(device)
    change(changed.kwargs)
    return run(paged_attn, plain), run(paged_attn, changed)


@pytest.mark.every_isa
@pytest.mark.parametrize("group", [3, 7, 9, 17, 32])
def test_many_rows_know_their_heads(paged_attn, device, group):
    """Slopes and sinks of a group that no tile or block of rows is a multiple of."""
    case = Case(
        batch=2, lens=(60, 40), q_len=-(-1100 // group), q_heads=2 * group, kv_heads=2, head_dim=16, alibi="batch",
        sink="float32", causal=True, dtype="bfloat16" if group % 2 else "float32",
    )  # fmt: skip
    check(paged_attn, case, device)


@pytest.mark.every_isa
@pytest.mark.sanitize
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_of_rows(paged_attn, device, dtype, kv_dtype):
    """Of a kv_head: as many as products take together, one more or less, and where keys begin to be laid out."""
    for rows in (5, 7, 8, 9, 11, 12, 15, 16, 17, 19, 20, 23, 24, 25):
        case = Case(batch=2, lens=(150, 20), q_heads=2 * rows, kv_heads=2, head_dim=72, dtype=dtype, kv_dtype=kv_dtype)
        check(paged_attn, case, device)


@pytest.mark.parametrize(("name", "other"), [("block_table", "page_table"), ("s_aux", "sinks")])
def test_other_name(paged_attn, device, name, other):
    case = Case(sink="float32", q_len=3, causal=True)
    assert_same_bits(*both(paged_attn, device, case, lambda kwargs: kwargs.update({other: kwargs.pop(name)})))


NEUTRAL = {
    "softcap": 0.0,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "alibi_slopes": torch.zeros(4),
    "cache_leftpad": torch.zeros(4, dtype=torch.int32),
    "cache_batch_idx": torch.arange(4, dtype=torch.int32),
    "s_aux": torch.full((4,), -torch.inf),
    "k_descale": torch.ones(4, 2),
    "v_descale": torch.ones(4, 2),
    "q_descale": torch.ones(4, 2),
    "softmax_scale": 64**-0.5,
    "num_splits": 0,
    "pack_gqa": True,
    "sm_margin": 8,
    "ver": 3,
    "scheduler_metadata": None,
    "causal": False,
    "max_seqlen_q": 5,
}


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_value_changes_no_bit(paged_attn, device, name, dtype):
    value = NEUTRAL[name]
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    case = Case(q_len=5, kv_len=200, varlen_q=name == "max_seqlen_q", dtype=dtype)
    if name.endswith("_descale"):
        case = dataclasses.replace(case, dtype="float8_e4m3fn" if name[0] == "q" else dtype, kv_dtype="float8_e4m3fn")
    assert_same_bits(*both(paged_attn, device, case, lambda kwargs: kwargs.update({name: value})))


def test_max_seqlen_q_may_be_missing_or_too_large(paged_attn, device):
    case = Case(q_len=5, varlen_q=True, causal=True)
    assert_same_bits(*both(paged_attn, device, case, lambda kwargs: kwargs.update(max_seqlen_q=4000)))
    assert_same_bits(*both(paged_attn, device, case, lambda kwargs: kwargs.pop("max_seqlen_q")))


def test_plan_changes_nothing(paged_attn, device):
    case = Case(kv_len=900, q_heads=8, head_dim=128)
    call = cases.build(case).to(device)
    plan = paged_attn.get_scheduler_metadata(
        batch_size=4, max_seqlen_q=1, max_seqlen_k=900, num_heads_q=8, num_heads_kv=2, headdim=128,
        cache_seqlens=call.kwargs["cache_seqlens"], qkv_dtype=torch.bfloat16, page_size=16,
    )  # fmt: skip
    check(paged_attn, case, device, scheduler_metadata=plan)


def test_arguments_by_position(paged_attn, device):
    """The first 19 are flash-attn 2's, in its order."""
    case = Case(q_len=2, append=2, rotary_dim=32, causal=True, softcap=2.5, alibi="head", window=(20, 0))
    call = cases.build(case).to(device)
    kw = call.kwargs
    out, lse = paged_attn.flash_attn_with_kvcache(
        kw["q"], *call.caches(), kw["k"], kw["v"], kw["rotary_cos"], kw["rotary_sin"], kw["cache_seqlens"], None, None,
        kw["block_table"], None, True, (20, 0), 2.5, True, kw["alibi_slopes"], 0, True,
    )  # fmt: skip
    judge(out, lse, call, cases.build(case))


def test_lengths_default_to_the_whole_cache(paged_attn, device):
    case = Case(batch=3, lens=(24, 24, 24), page_size=0)
    call = cases.build(case).to(device)
    k_cache, v_cache = (cache[:, :24] for cache in call.caches())
    del call.kwargs["cache_seqlens"]
    out, lse = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
    judge(out, lse, call, cases.build(case))


@pytest.mark.parametrize("length", [24, 7])
def test_one_length_for_packed_requests(paged_attn, device, length):
    """An int is the length of every request, not of every token."""
    case = Case(batch=3, lens=(length,) * 3, q_len=4, varlen_q=True, causal=True)
    call = cases.build(case).to(device)
    out, lse = run(paged_attn, call, cache_seqlens=length)
    judge(out, lse, call, cases.build(case))


def test_without_lse_only_out_is_returned(paged_attn, device):
    call = cases.build(Case()).to(device)
    with_lse = run(paged_attn, call)
    out = run(paged_attn, call, return_softmax_lse=False)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, with_lse[0])


def test_out_may_be_a_slice(paged_attn, device):
    """Rows next to it stay as they are."""
    call = cases.build(Case(q_len=3, dtype="float32")).to(device)
    wide = torch.full((4, 3, 6, 70), 7.0, device=device)
    out, lse = run(paged_attn, call, out=wide[:, :, 1:-1, 2:66])
    judge(out, lse, call, cases.build(call.case))
    wide[:, :, 1:-1, 2:66] = 7.0
    assert (wide == 7.0).all()


def test_requests_may_share_pages(paged_attn, device):
    """Two requests with one prefix, as engines with a prefix cache ask."""
    case = Case(batch=2, lens=(40, 40), q_len=2, causal=True)
    call, before = cases.build(case).to(device), cases.build(case)
    for kwargs in (call.kwargs, before.kwargs):
        kwargs["block_table"][1, :2] = kwargs["block_table"][0, :2]
    out, lse = run(paged_attn, call)
    judge(out, lse, call, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scores_that_rise_from_key_to_key(paged_attn, device, dtype):
    """Every key is the largest so far, by little from one to the next and by a lot over all of them."""
    calls = [cases.build(Case(kv_len=1000, page_size=1000, dtype=dtype)).to(d) for d in (device, "cpu")]
    for call in calls:
        call.kwargs["q"].fill_(1)
        k_cache, _ = call.caches()
        k_cache[:] = torch.linspace(-4, 4, 1000).view(1, 1000, 1, 1).to(k_cache)
    out, lse = run(paged_attn, calls[0])
    judge(out, lse, calls[0], calls[1])


@pytest.mark.parametrize("contiguous", [False, True])
def test_last_dim_of_queries_may_be_strided_or_is_refused(paged_attn, device, contiguous):
    """flash-attn copies such a query; whoever does not must say so."""
    call = cases.build(Case(q_len=2, dtype="float32")).to(device)
    expected = run(paged_attn, call)
    spread = torch.stack([call.kwargs["q"], torch.full_like(call.kwargs["q"], torch.nan)], -1)[..., 0]
    assert spread.stride(-1) == 2
    try:
        result = run(paged_attn, call, q=spread.contiguous() if contiguous else spread)
    except (ValueError, RuntimeError) as error:
        assert not contiguous and "q: " in str(error)
    else:
        assert_same_bits(result, expected)


@pytest.mark.parametrize("name, value, message", [
    ("num_pages", -64, "num_pages: expected an int of at least 0, got -64"),
    ("page_size", 16.0, "page_size: expected an int of at least 0, got 16.0"),
    ("head_dim", None, "head_dim: expected an int of at least 0, got None"),
    ("head_dim_v", "64", "head_dim_v: expected an int of at least 0, got '64'"),
    ("kv_heads", 1 << 63, "kv_heads: expected an int of at least 0, got 9223372036854775808"),
    ("dtype", "bfloat16", "dtype: expected one of torch, such as torch.bfloat16, got 'bfloat16'"),
    ("dtype", float, "dtype: expected one of torch, such as torch.bfloat16, got a value of type type"),
])  # fmt: skip
def test_what_is_no_paged_cache(paged_attn, device, name, value, message):
    sizes = {"num_pages": 700, "page_size": 16, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": device}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        paged_attn.empty_paged_cache(**(sizes | {name: value}))


def test_a_paged_cache_beyond_memory(paged_attn, device):
    if device != "cpu" or sys.platform != "linux":
        pytest.skip("only there the memory is not torch's")
    for num_pages in (1 << 34, 1 << 44):
        with pytest.raises(MemoryError, match=r"^num_pages: expected a cache that memory holds, got one of \d+ bytes"):
            paged_attn.empty_paged_cache(num_pages, 1 << 10, 8, 128, dtype=torch.bfloat16)


def test_a_paged_cache_of_numbers_of_numpy(paged_attn, device):
    sizes = map(pytest.importorskip("numpy").int64, (700, 16, 2, 64))
    k_cache, v_cache = paged_attn.empty_paged_cache(*sizes, dtype=torch.float32, device=device)
    assert k_cache.shape == v_cache.shape == (700, 16, 2, 64)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_empty_paged_cache(paged_attn, device, dtype, head_dims):
    k_cache, v_cache = paged_attn.empty_paged_cache(700, 16, 2, *head_dims, dtype=dtype, device=device)
    for cache, dim in ((k_cache, head_dims[0]), (v_cache, head_dims[1])):
        assert cache.shape == (700, 16, 2, dim)
        assert cache.dtype == dtype and cache.is_contiguous() and cache.device.type == torch.device(device).type
        cache.view(reference.BITS[dtype.itemsize]).fill_(1)  # all of it is ours
        if torch.device(device).type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE") and cache.nbytes >= 2 << 20:
            assert cache.data_ptr() % (2 << 20) == 0, "no huge page can begin inside another"


def test_paged_cache_without_huge_pages(paged_attn, device, monkeypatch):
    """On a kernel that has none madvise fails; the cache is ordinary memory then."""

    class Memory(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    for cache in paged_attn.empty_paged_cache(700, 16, 2, 64, dtype=torch.float32, device=device):
        assert cache.fill_(1).shape == (700, 16, 2, 64)


def test_fake_paged_cache(paged_attn, device):
    with FakeTensorMode():
        for cache in paged_attn.empty_paged_cache(700, 16, 2, 64, dtype=torch.float32, device=device):
            assert isinstance(cache, FakeTensor) and cache.shape == (700, 16, 2, 64)


def policy_of(address):
    """Linux's policy for the memory at this address: "default", "interleave:0-1", ..."""
    policies = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *_ = line.split()
        policies[int(start, 16)] = policy
    return policies[max(start for start in policies if start <= address)]


@pytest.mark.parametrize("num_pages", [3, 700])  # less than a huge page, and more
def test_interleaved_cache(paged_attn, device, num_pages):
    """Its memory is dealt out to the nodes; no other memory is."""
    sizes = (num_pages, 16, 2, 64)
    if device != "cpu" or sys.platform != "linux":
        with pytest.raises(ValueError, match="interleave: expected a cache on the CPU under Linux"):
            paged_attn.empty_paged_cache(*sizes, dtype=torch.float32, device=device, interleave=True)
        return
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this Linux was built without NUMA")
    for interleave in (True, False):
        for cache in paged_attn.empty_paged_cache(*sizes, dtype=torch.float32, interleave=interleave):
            assert cache.shape == sizes
            cache.fill_(1)
            first, last = cache.data_ptr(), cache.data_ptr() + cache.nbytes - 1
            assert policy_of(first).startswith("interleave:") == interleave
            assert policy_of(last).startswith("interleave:") == interleave


def test_interleaving_elsewhere(paged_attn, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"interleave: expected a cache on the CPU under Linux .*, got cpu on darwin"):
        paged_attn.empty_paged_cache(3, 16, 2, 64, dtype=torch.float32, interleave=True)


def test_interleaving_refused(paged_attn, device, monkeypatch):
    """A kernel without NUMA, or a container that forbids the call."""
    if device != "cpu" or sys.platform != "linux":
        pytest.skip("memory policies are Linux's, for the CPU")
    module = sys.modules[paged_attn.empty_paged_cache.__module__]
    monkeypatch.setitem(module._CALLS, platform.machine(), (100_000, 100_001))  # numbers of no call
    with pytest.raises(ValueError, match="interleave: expected Linux to allow it, got Function not implemented"):
        paged_attn.empty_paged_cache(3, 16, 2, 64, dtype=torch.float32, interleave=True)
