"""Bad input gets an error that names the argument, and leaves every byte of the caches as it was.

Lengths and page numbers lie in device memory, so a GPU looks at them only under PAGED_ATTN_CHECK=1. Without it such a
call must not fail, and must touch nothing outside of the caches; both ways are tested.
"""

import os
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import Case
from compare import assert_same_bytes, run

ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError)

# One good call that has every optional argument which the others do not exclude.
PAGED = Case(
    batch=3, lens=(20, 0, 33), q_len=2, append=2, causal=True, alibi="batch", sink="float32", leftpad=True,
    batch_idx=True, rotary_dim=32, rotary_seqlens=True, give_out=True,
)  # fmt: skip
FP8 = Case(batch=3, lens=(20, 0, 33), q_len=2, append=2, kv_dtype="float8_e4m3fn", descale="full")
VARLEN = Case(
    batch=3, lens=(20, 0, 33), q_len=4, varlen_q=True, append=3, append_varlen=True, causal=True, give_out=True
)
QV = Case(batch=3, lens=(20, 0, 33), head_dim_v=512, qv=True)
CONTIGUOUS = Case(batch=3, lens=(20, 0, 33), page_size=0, append=2)
READ_ONLY = Case(batch=3, lens=(20, 0, 33))


def values_are_checked(device):
    return torch.device(device).type == "cpu" or os.environ.get("PAGED_ATTN_CHECK", "0") not in ("", "0")


def assert_nothing_outside(call, before):
    """After a call with bad values: the GPU still answers, and the guard pages around the caches are untouched."""
    torch.zeros(1, device=call.storage[0].device).item()
    read_only = "k" not in call.kwargs
    for after, expected in zip(call.storage, before.storage):
        for part in (slice(None),) if read_only else (slice(cases.GUARD), slice(-cases.GUARD, None)):
            assert_same_bytes("guard pages", after[part], expected[part])


def refused(paged_attn, device, case, match, change, by_value=False):
    """change(arguments) makes the call of a case bad; arguments hold k_cache and v_cache too."""
    call, before = cases.build(case).to(device), cases.build(case)
    arguments = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches()))
    change(arguments)
    if by_value and not values_are_checked(device):
        paged_attn.flash_attn_with_kvcache(**arguments)
        assert_nothing_outside(call, before)
        return
    with pytest.raises(ERRORS, match=match) as caught:
        paged_attn.flash_attn_with_kvcache(**arguments)
    assert "\n" not in str(caught.value).strip(), "one sentence"
    for a, b in zip(call.storage, before.storage):
        assert_same_bytes("cache", a, b)
    if case.give_out:
        assert call.kwargs["out"].isnan().all(), "out was written"


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def same_shape(dtype):
    return lambda x: torch.zeros(x.shape, dtype=dtype, device=x.device)


# argument, the case it is in, dtypes that it must not have
DTYPES = [
    ("q", PAGED, (torch.float64, torch.int32, torch.float32)),
    ("k_cache", PAGED, (torch.float32, torch.float16, torch.int8, torch.uint8)),
    ("v_cache", PAGED, (torch.float32, torch.float16, torch.float8_e4m3fn)),
    ("v_cache", FP8, (torch.float8_e5m2, torch.bfloat16, torch.uint8)),
    ("k", PAGED, (torch.float32, torch.float16, torch.float8_e4m3fn)),
    ("v", PAGED, (torch.float32, torch.int64)),
    ("out", PAGED, (torch.float32, torch.float16)),
    ("block_table", PAGED, (torch.int64, torch.float32, torch.int16)),
    ("cache_seqlens", PAGED, (torch.int64, torch.float32, torch.bool)),
    ("cache_batch_idx", PAGED, (torch.int64,)),
    ("cache_leftpad", PAGED, (torch.int64,)),
    ("rotary_seqlens", PAGED, (torch.int64,)),
    ("rotary_cos", PAGED, (torch.float64, torch.float16)),
    ("rotary_sin", PAGED, (torch.int32, torch.float16)),
    ("alibi_slopes", PAGED, (torch.bfloat16, torch.float64)),
    ("s_aux", PAGED, (torch.int32, torch.float64)),
    ("cu_seqlens_q", VARLEN, (torch.int64,)),
    ("cu_seqlens_k_new", VARLEN, (torch.int64,)),
    ("k_descale", FP8, (torch.bfloat16, torch.float64)),
    ("v_descale", FP8, (torch.float16,)),
    ("qv", QV, (torch.float32, torch.float16)),
]


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [pytest.param(n, c, d, id=f"{n}-{d}".replace("torch.", "")) for n, c, dtypes in DTYPES for d in dtypes],
)
def test_dtype(paged_attn, device, name, case, dtype):
    # A wrong query is seen first where it meets its cache, or the table of angles.
    match = "q|k_cache" if name == "q" else name
    refused(paged_attn, device, case, match, lambda a: a.update({name: same_shape(dtype)(a[name])}))


TENSORS = pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=n) for n, c in {name: case for name, case, _ in DTYPES}.items()]
)


@TENSORS
def test_device(paged_attn, device, name, case):
    """One tensor elsewhere. The meta device is the other device that every machine has."""
    refused(paged_attn, device, case, "device|meta", lambda a: a.update({name: a[name].to("meta")}))


@TENSORS
@pytest.mark.parametrize("change", ["less", "more"])
def test_rank(paged_attn, device, name, case, change):
    def bad(a):
        less = a[name].flatten()[0] if name == "alibi_slopes" else a[name][0]  # (q_heads,) would be fine
        a[name] = less if change == "less" else a[name].unsqueeze(0).unsqueeze(0)

    refused(paged_attn, device, case, "q" if name == "q" else name, bad)


# argument, case, its dimension; the first to meet a size defines it, so some errors name the other side
SHAPES = [
    ("q", PAGED, 0, "cache_seqlens|block_table|out|k:|batch"),
    ("q", PAGED, 1, "out|seqlen_q|q:"),
    ("q", PAGED, 2, "q_heads|out"),
    ("q", PAGED, 3, "k_cache.*head_dim|head_dim"),
    ("k_cache", PAGED, 0, "num_pages"),
    ("k_cache", PAGED, 1, "page_size"),
    ("k_cache", PAGED, 2, "kv_heads"),
    ("k_cache", PAGED, 3, "head_dim"),
    ("v_cache", PAGED, 0, "v_cache.*num_pages"),
    ("v_cache", PAGED, 1, "v_cache.*page_size"),
    ("v_cache", PAGED, 2, "v_cache.*kv_heads"),
    ("v_cache", PAGED, 3, "head_dim_v"),
    ("k", PAGED, 0, "k: "),
    ("k", PAGED, 1, "v: .*seqlen_new"),
    ("k", PAGED, 2, "k: .*kv_heads"),
    ("k", PAGED, 3, "k: .*head_dim"),
    ("v", PAGED, 2, "v: .*kv_heads"),
    ("v", PAGED, 3, "v: .*head_dim_v"),
    ("out", PAGED, 0, "out: .*batch"),
    ("out", PAGED, 3, "head_dim_v"),
    ("cache_seqlens", PAGED, 0, "cache_seqlens: .*batch"),
    ("cache_batch_idx", PAGED, 0, "cache_batch_idx: .*batch"),
    ("cache_leftpad", PAGED, 0, "cache_leftpad: .*batch"),
    ("rotary_seqlens", PAGED, 0, "rotary_seqlens: .*batch"),
    ("rotary_cos", PAGED, 1, "rotary_sin|rotary_cos"),
    ("alibi_slopes", PAGED, 0, "alibi_slopes: .*batch"),
    ("alibi_slopes", PAGED, 1, "alibi_slopes: .*q_heads"),
    ("s_aux", PAGED, 0, "s_aux: .*q_heads"),
    ("block_table", READ_ONLY, 0, "block_table: .*batch"),
    ("cu_seqlens_k_new", VARLEN, 0, "cu_seqlens_k_new"),
    ("k_descale", FP8, 0, "k_descale: .*batch"),
    ("v_descale", FP8, 1, "v_descale: .*kv_heads"),
    ("qv", QV, 1, "qv: .*seqlen_q"),
    ("qv", QV, 2, "qv: .*q_heads"),
    ("qv", QV, 3, "qv: .*head_dim_v"),
]


@pytest.mark.parametrize(
    ("name", "case", "dim", "match"), SHAPES, ids=[f"{name}-{dim}" for name, _, dim, _ in SHAPES]
)  # fmt: skip
def test_shape(paged_attn, device, name, case, dim, match):
    def bad(a):
        a[name] = torch.cat([a[name], a[name].narrow(dim, 0, 1)], dim)  # one too many

    refused(paged_attn, device, case, match, bad)


def set_entry(name, index, value):
    def bad(a):
        a[name] = a[name].clone()
        a[name][index] = value

    return bad


def used_page(value):
    """Puts a bad number where the second page of the third request is looked up."""

    def bad(a):
        row = int(a["cache_batch_idx"][2]) if "cache_batch_idx" in a else 2
        a["block_table"] = a["block_table"].clone()
        a["block_table"][row, 1] = value

    return bad


# What only the entries of a tensor in device memory tell.
VALUES = {
    "negative length": (READ_ONLY, "cache_seqlens.*2.*-1", set_entry("cache_seqlens", 2, -1)),
    "very negative length": (READ_ONLY, "cache_seqlens", set_entry("cache_seqlens", 0, -(2**31))),
    "negative length, append": (PAGED, "cache_seqlens.*-1", set_entry("cache_seqlens", 1, -1)),
    "negative int length": (READ_ONLY, "cache_seqlens.*-5", lambda a: a.update(cache_seqlens=-5)),
    "length over the table": (READ_ONLY, "cache_seqlens.*2.*81", set_entry("cache_seqlens", 2, 81)),
    "length over the table, int": (READ_ONLY, "cache_seqlens.*81", lambda a: a.update(cache_seqlens=81)),
    "largest length": (READ_ONLY, "cache_seqlens.*2147483647", set_entry("cache_seqlens", 0, 2**31 - 1)),
    "largest length, append": (PAGED, "cache_seqlens.*2147483647", set_entry("cache_seqlens", 0, 2**31 - 1)),
    "append over the table": (PAGED, "cache_seqlens.*2.*79", set_entry("cache_seqlens", 2, 79)),
    "length over the cache": (CONTIGUOUS, "cache_seqlens.*0.*37", set_entry("cache_seqlens", 0, 37)),
    "too short table": (READ_ONLY, "cache_seqlens.*33", lambda a: a.update(block_table=a["block_table"][:, :2])),
    "table without columns": (READ_ONLY, "cache_seqlens", lambda a: a.update(block_table=a["block_table"][:, :0])),
    "page number -1": (READ_ONLY, "block_table.*-1", used_page(-1)),
    "page number num_pages": (READ_ONLY, "block_table.*8", used_page(8)),
    "page number wild": (READ_ONLY, "block_table.*2147480000", used_page(2147480000)),
    "page number, append": (PAGED, "block_table.*-7", used_page(-7)),
    "leftpad negative": (PAGED, "cache_leftpad.*-1", set_entry("cache_leftpad", 1, -1)),
    "batch_idx negative": (PAGED, "cache_batch_idx.*-1", set_entry("cache_batch_idx", 1, -1)),
    "batch_idx too large": (PAGED, "cache_batch_idx.*5", set_entry("cache_batch_idx", 1, 5)),
    "batch_idx too large, contiguous": (
        CONTIGUOUS, "cache_batch_idx.*3", lambda a: a.update(cache_batch_idx=int32(0, 3, 1)),
    ),
    "rotary_seqlens negative": (PAGED, "rotary_seqlens.*-1", set_entry("rotary_seqlens", 1, -1)),
    "rotary_seqlens past the table": (PAGED, "rotary_cos.*2.*1002", set_entry("rotary_seqlens", 2, 1000)),
    "rotary table too short": (
        PAGED, "rotary_cos", lambda a: a.update(rotary_cos=a["rotary_cos"][:-1], rotary_sin=a["rotary_sin"][:-1]),
    ),
    "cu_seqlens_q starts late": (VARLEN, "cu_seqlens_q.*1", set_entry("cu_seqlens_q", 0, 1)),
    "cu_seqlens_q falls": (VARLEN, "cu_seqlens_q", set_entry("cu_seqlens_q", 1, 9)),
    "cu_seqlens_q ends too late": (VARLEN, "cu_seqlens_q", set_entry("cu_seqlens_q", 3, 99)),
    "max_seqlen_q too small": (
        VARLEN, r"^max_seqlen_q: expected at least the 4 tokens of batch entry 2, got 3$",
        lambda a: a.update(max_seqlen_q=3),
    ),
    "max_seqlen_q 0": (
        VARLEN, r"^max_seqlen_q: expected at least the \d tokens of batch entry \d, got 0$",
        lambda a: a.update(max_seqlen_q=0),
    ),
    "cu_seqlens_k_new starts late": (VARLEN, "cu_seqlens_k_new", set_entry("cu_seqlens_k_new", 0, 1)),
    "cu_seqlens_k_new falls": (VARLEN, "cu_seqlens_k_new", set_entry("cu_seqlens_k_new", 1, 9)),
    "cu_seqlens_k_new ends too late": (VARLEN, "cu_seqlens_k_new", set_entry("cu_seqlens_k_new", 3, 99)),
}  # fmt: skip
COMBINATIONS = {
    "softcap negative": (READ_ONLY, "softcap.*-1", lambda a: a.update(softcap=-1.0)),
    "softcap NaN": (READ_ONLY, "softcap.*nan", lambda a: a.update(softcap=float("nan"))),
    "num_splits negative": (READ_ONLY, "num_splits.*-1", lambda a: a.update(num_splits=-1)),
    "max_seqlen_q negative": (
        VARLEN, "^max_seqlen_q: expected at least 0, got -1$", lambda a: a.update(max_seqlen_q=-1),
    ),
    "attention_chunk negative": (READ_ONLY, "attention_chunk.*-1", lambda a: a.update(attention_chunk=-1)),
    "window below -1": (READ_ONLY, "window_size.*-2", lambda a: a.update(window_size=(-2, 0))),
    "k alone": (PAGED, "k and v|v: ", lambda a: a.pop("v")),
    "v alone": (PAGED, "k and v|k: ", lambda a: a.pop("k")),
    "k without cache_seqlens": (PAGED, "cache_seqlens", lambda a: a.pop("cache_seqlens")),
    "rotary_cos alone": (PAGED, "rotary_sin", lambda a: a.pop("rotary_sin")),
    "rotary_sin alone": (PAGED, "rotary_cos", lambda a: a.pop("rotary_cos")),
    "rotary without k": (PAGED, "rotary_cos", lambda a: (a.pop("k"), a.pop("v"))),
    "rotary_dim over head_dim": (
        PAGED, "rotary", lambda a: a.update({n: torch.zeros(100, 33).bfloat16() for n in ("rotary_cos", "rotary_sin")}),
    ),
    "q packed without cu_seqlens_q": (VARLEN, "q: ", lambda a: a.pop("cu_seqlens_q")),
    "k packed without cu_seqlens_k_new": (VARLEN, "k: ", lambda a: a.pop("cu_seqlens_k_new")),
    "cu_seqlens_q empty": (VARLEN, "cu_seqlens_q", lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"][:0])),
    "block_table and page_table": (
        READ_ONLY, "block_table.*page_table", lambda a: a.update(page_table=a["block_table"]),
    ),
    "s_aux and sinks": (PAGED, "s_aux.*sinks", lambda a: a.update(sinks=a["s_aux"])),
    "unknown keyword": (READ_ONLY, "block_tables", lambda a: a.update(block_tables=a["block_table"])),
    "fp8 cache of another kind of 8 bits": (FP8, "k_cache", lambda a: a.update(k_cache=a["k_cache"].view(torch.int8))),
    "batch larger than the contiguous cache": (
        CONTIGUOUS, "batch", lambda a: a.update(k_cache=a["k_cache"][:2], v_cache=a["v_cache"][:2]),
    ),
}  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("name", [*VALUES, *COMBINATIONS])
def test_value(paged_attn, device, name):
    case, match, change = (VALUES | COMBINATIONS)[name]

    def on_device(arguments):
        change(arguments)
        for key, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[key] = value.to(device)

    refused(paged_attn, device, case, match, on_device, by_value=name in VALUES)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "out"])
def test_strided_last_dim(paged_attn, device, name):
    """Memory that the call may write or that it only reads in place: no silent copy."""

    def bad(a):
        a[name] = torch.stack([a[name], a[name]], -1)[..., 0]

    refused(paged_attn, device, PAGED, f"{name}.*(contiguous|stride)", bad)


@pytest.mark.parametrize("q_heads", [1, 3, 5])
def test_heads_that_do_not_divide(paged_attn, device, q_heads):
    refused(
        paged_attn, device, READ_ONLY, f"q_heads.*{q_heads}",
        lambda a: a.update(q=torch.zeros(3, 1, q_heads, 64, dtype=torch.bfloat16, device=device)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(257, 257), (64, 512), (320, 320), (576, 576), (512, 256), (1, 257)]
)
def test_head_dims_that_nobody_promised(paged_attn, device, head_dim, head_dim_v):
    case = Case(batch=2, lens=(5, 9), head_dim=head_dim, head_dim_v=head_dim_v)
    refused(paged_attn, device, case, f"head_dim.*{head_dim}.*{head_dim_v}", lambda a: None)


@pytest.mark.parametrize("kv_len", [1, 17])
def test_no_pages_at_all(paged_attn, device, kv_len):
    """num_pages 0: every page number is out of range, whatever it is; without keys the call is fine."""

    def bad(a):
        for name in ("k_cache", "v_cache"):
            a[name] = a[name][:0]
        a["block_table"] = torch.zeros_like(a["block_table"])

    case = Case(batch=2, lens=(0, kv_len))
    refused(paged_attn, device, case, "block_table.*num_pages.*0|block_table.*0", bad, by_value=True)
    call = cases.build(Case(batch=2, lens=(0, 0))).to(device)
    k_cache, v_cache = (cache[:0] for cache in call.caches())
    out, lse = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("options", [{"window_size": (2, 0)}, {"attention_chunk": 4, "causal": True}], ids=str)
@pytest.mark.parametrize("page", range(9))
def test_a_bad_page_is_seen_by_whichever_row_reads_it(paged_attn, device, page, options):
    """The first rows and the last see few keys; the rows between them read every page."""
    case = Case(batch=1, lens=(34,), q_len=45, page_size=4, window=options.get("window_size", (-1, -1)),
                chunk=options.get("attention_chunk", 0), causal="causal" in options)  # fmt: skip
    refused(paged_attn, device, case, "block_table.*-3", set_entry("block_table", (0, page), -3), by_value=True)


def test_a_bad_page_that_nobody_reads_is_no_error(paged_attn, device):
    """Outside the window; engines free such pages and reuse their numbers."""
    case = Case(batch=1, lens=(100,), window=(20, 0), causal=True)
    call = cases.build(case).to(device)
    good = run(paged_attn, call)
    call.kwargs["block_table"][0, :4] = -1
    assert all(torch.equal(a, b) for a, b in zip(run(paged_attn, call), good))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "qv", "s_aux"])
def test_inputs_that_require_grad(paged_attn, device, name):
    case = QV if name == "qv" else PAGED

    def bad(a):
        a[name] = a[name].detach().clone().requires_grad_()

    refused(paged_attn, device, case, f"{name}.*grad", bad)
    call = cases.build(READ_ONLY).to(device)
    with torch.no_grad():
        run(paged_attn, call, q=call.kwargs["q"].requires_grad_())


def test_fp8_queries(paged_attn, device):
    """Promised on CUDA only; elsewhere the message says so."""
    if torch.device(device).type == "cuda":
        pytest.skip("fp8 queries work on CUDA")
    change = lambda a: a.update(q=a["q"].to(torch.float8_e4m3fn), k=None, v=None)  # noqa: E731
    refused(paged_attn, device, FP8, "q: .*(8-bit|float8)", change)


PLAIN = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p.*0.1"),
    "unknown keyword": ({"block_tabel": None}, "block_tabel"),
    "both names of the sink": ({"sinks": torch.zeros(4), "s_aux": torch.zeros(4)}, "s_aux.*sinks"),
    "heads": ({"k": torch.zeros(2, 5, 3, 64), "v": torch.zeros(2, 5, 3, 64)}, "q_heads.*4"),
    "batch": ({"k": torch.zeros(1, 5, 2, 64), "v": torch.zeros(1, 5, 2, 64)}, "batch"),
    "length of v": ({"v": torch.zeros(2, 6, 2, 64)}, "v"),
    "dtype": ({"v": torch.zeros(2, 5, 2, 64).half()}, "v"),
    "grad": ({"q": torch.zeros(2, 3, 4, 64, requires_grad=True)}, "q.*grad"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_flash_attn_func(paged_attn, device, name):
    change, match = PLAIN[name]
    good = {"q": torch.zeros(2, 3, 4, 64), "k": torch.zeros(2, 5, 2, 64), "v": torch.zeros(2, 5, 2, 64)}
    arguments = {n: x.to(device) if torch.is_tensor(x) else x for n, x in (good | change).items()}
    with pytest.raises(ERRORS, match=match):
        paged_attn.flash_attn_func(**arguments)


VARLEN_FUNC = {
    "dropout": ({"dropout_p": 0.5}, "dropout_p.*0.5"),
    "unknown keyword": ({"max_seqlen_kv": 3}, "max_seqlen_kv"),
    "int64 cu_seqlens_q": ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, "cu_seqlens_q"),
    "int64 cu_seqlens_k": ({"cu_seqlens_k": torch.tensor([0, 5, 10])}, "cu_seqlens_k"),
    "no cu_seqlens_q": ({"cu_seqlens_q": None}, "cu_seqlens_q"),
    "no cu_seqlens_k": ({"cu_seqlens_k": None}, "cu_seqlens_k"),
    "other batch": ({"cu_seqlens_k": int32(0, 5, 7, 10)}, "cu_seqlens_k"),
    "rank of q": ({"q": torch.zeros(2, 3, 4, 64)}, "q: "),
    "table int64": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
        "^k: expected float32 .num_pages, page_size, kv_heads, head_dim",
    ),
}
VARLEN_VALUES = {
    "cu_seqlens_k falls": ({"cu_seqlens_k": int32(0, 10, 5)}, "cu_seqlens_k"),
    "cu_seqlens_k too long": ({"cu_seqlens_k": int32(0, 5, 11)}, "cu_seqlens_k.*11"),
    "cu_seqlens_k negative": ({"cu_seqlens_k": int32(-1000, 5, 10)}, "cu_seqlens_k.*-1000"),
    "cu_seqlens_q too long": ({"cu_seqlens_q": int32(0, 5, 7)}, "cu_seqlens_q.*7"),
    "seqused_k too large": ({"seqused_k": int32(5, 6)}, "seqused_k.*6|cache_seqlens.*6"),
    "seqused_k negative": ({"seqused_k": int32(-1, 5)}, "seqused_k.*-1|cache_seqlens.*-1"),
}


@pytest.mark.parametrize("name", [*VARLEN_FUNC, *VARLEN_VALUES])
def test_flash_attn_varlen_func(paged_attn, device, name):
    change, match = (VARLEN_FUNC | VARLEN_VALUES)[name]
    good = {
        "q": torch.zeros(6, 4, 64), "k": torch.zeros(10, 2, 64), "v": torch.zeros(10, 2, 64), "max_seqlen_q": 3,
        "cu_seqlens_q": int32(0, 3, 6), "cu_seqlens_k": int32(0, 5, 10), "max_seqlen_k": 5,
    }  # fmt: skip
    arguments = {n: x.to(device) if torch.is_tensor(x) else x for n, x in (good | change).items()}
    if name in VARLEN_VALUES and not values_are_checked(device):
        assert paged_attn.flash_attn_varlen_func(**arguments).isfinite().all()  # of zeros; and the GPU still answers
        return
    with pytest.raises(ERRORS, match=match):
        paged_attn.flash_attn_varlen_func(**arguments)


WRITE = Case(batch=3, lens=(20, 0, 33), append=2)
WRITE_FP8 = Case(batch=3, lens=(20, 0, 33), append=2, kv_dtype="float8_e5m2", descale="full")
SLOTS = torch.tensor([0, -1, 17, 18, 40, 41])
WRITE_VALUES = {
    "slot past the cache": (
        WRITE, "slot_mapping.*4.*144", lambda a: a.update(slot_mapping=SLOTS.index_fill(0, torch.tensor([4]), 144)),
    ),
    "slot far past the cache": (
        WRITE, "slot_mapping", lambda a: a.update(slot_mapping=SLOTS.index_fill(0, torch.tensor([4]), 2**62)),
    ),
    "negative length": (WRITE, "cache_seqlens.*-1", set_entry("cache_seqlens", 2, -1)),
    "past the table": (WRITE, "cache_seqlens.*2.*79", set_entry("cache_seqlens", 2, 79)),
    "bad page": (WRITE, "block_table.*2147480000", set_entry("block_table", (2, 2), 2147480000)),
    "negative page": (WRITE, "block_table.*-4", set_entry("block_table", (0, 1), -4)),
    "no pages": (
        WRITE, "block_table", lambda a: a.update(k_cache=a["k_cache"][:0], v_cache=a["v_cache"][:0]),
    ),
    "no pages, slots": (
        WRITE, "slot_mapping",
        lambda a: a.update(k_cache=a["k_cache"][:0], v_cache=a["v_cache"][:0], slot_mapping=SLOTS),
    ),
}  # fmt: skip
WRITES = {
    "int64 table": (WRITE, "block_table", lambda a: a.update(block_table=a["block_table"].long())),
    "int64 lengths": (WRITE, "cache_seqlens", lambda a: a.update(cache_seqlens=a["cache_seqlens"].long())),
    "int32 slots": (WRITE, "slot_mapping", lambda a: a.update(slot_mapping=SLOTS.int())),
    "too few slots": (WRITE, "slot_mapping", lambda a: a.update(slot_mapping=SLOTS[:5])),
    "no table and no slots": (WRITE, "block_table", lambda a: a.update(block_table=None)),
    "no lengths and no slots": (WRITE, "cache_seqlens", lambda a: a.update(cache_seqlens=None)),
    "dtype of k": (WRITE, "k", lambda a: a.update(k=a["k"].float())),
    "dtype of v": (WRITE, "v", lambda a: a.update(v=a["v"].half())),
    "fp8 k": (WRITE_FP8, "k", lambda a: a.update(k=a["k"].to(torch.float8_e5m2), v=a["v"].to(torch.float8_e5m2))),
    "heads": (WRITE, "kv_heads", lambda a: a.update(k=a["k"][:, :, :1], v=a["v"][:, :, :1])),
    "head_dim": (WRITE, "head_dim", lambda a: a.update(k=a["k"][..., :32])),
    "batch": (WRITE, "block_table|k:|batch", lambda a: a.update(k=a["k"][:2], v=a["v"][:2])),
    "tokens of v": (WRITE, "v: ", lambda a: a.update(v=a["v"][:, :1])),
    "rank": (WRITE, "k: ", lambda a: a.update(k=a["k"][0, 0], v=a["v"][0, 0])),
    "flat k that nothing cuts": (
        WRITE, "cu_seqlens_k_new|k: ", lambda a: a.update(k=a["k"].flatten(0, 1), v=a["v"].flatten(0, 1)),
    ),
    "device": (WRITE, "device|meta", lambda a: a.update(v=a["v"].to("meta"))),
    "device of the slots": (WRITE, "device|meta", lambda a: a.update(slot_mapping=SLOTS.to("meta"))),
    "descale": (WRITE_FP8, "k_descale", lambda a: a.update(k_descale=a["k_descale"].half())),
    "unknown keyword": (WRITE, "slots", lambda a: a.update(slots=SLOTS)),
    "strided last dim": (
        WRITE, "k_cache", lambda a: a.update(k_cache=torch.stack([a["k_cache"], a["k_cache"]], -1)[..., 0]),
    ),
}  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("name", [*WRITES, *WRITE_VALUES])
def test_kv_paged_write(paged_attn, device, name):
    case, match, change = (WRITES | WRITE_VALUES)[name]
    call, before = cases.build(case).to(device), cases.build(case)
    names = ("k", "v", "block_table", "cache_seqlens", "k_descale", "v_descale")
    arguments = {n: call.kwargs[n] for n in names if n in call.kwargs} | dict(
        zip(("k_cache", "v_cache"), call.caches())
    )
    change(arguments)
    on = {n: x.to(device) if torch.is_tensor(x) and not x.is_meta else x for n, x in arguments.items()}
    if name in WRITE_VALUES and not values_are_checked(device):
        paged_attn.kv_paged_write(**on)
        assert_nothing_outside(call, before)
        return
    with pytest.raises(ERRORS, match=match):
        paged_attn.kv_paged_write(**on)
    for a, b in zip(call.storage, before.storage):
        assert_same_bytes("cache", a, b)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_kv_paged_write_of_inputs_that_require_grad(paged_attn, device, name):
    call = cases.build(WRITE).to(device)
    arguments = {n: call.kwargs[n] for n in ("k", "v", "block_table", "cache_seqlens")}
    arguments |= dict(zip(("k_cache", "v_cache"), call.caches()))
    arguments[name] = arguments[name].detach().clone().requires_grad_()
    with pytest.raises(ERRORS, match=f"{name}.*grad"):
        paged_attn.kv_paged_write(**arguments)


def test_slots_of_pages_without_slots(paged_attn, device):
    cache, token = torch.zeros(3, 0, 1, 4, device=device), torch.zeros(1, 1, 4, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ERRORS, match=r"page_size.*0"):
        paged_attn.kv_paged_write(token, token, cache, cache, slot_mapping=slots)


def test_scalars_with_an_int_length(paged_attn, device):
    """The batch size of an int length is read from the first tensor: that must have one."""
    cache, scalar = torch.zeros(1, 2, 1, 4, device=device), torch.zeros((), device=device)
    with pytest.raises(ERRORS, match="q: expected"):
        paged_attn.flash_attn_with_kvcache(scalar, cache, cache, cache_seqlens=1)
    with pytest.raises(ERRORS, match="k: expected"):
        paged_attn.kv_paged_write(scalar, scalar, cache, cache, None, 1)


MERGES = {
    "shape of out_b": (1, (2, 3, 4, 32), "out_b"),
    "shape of lse_a": (2, (2, 3, 4), "lse_a"),
    "shape of lse_b": (3, (2, 4), "lse_b"),
}


@pytest.mark.parametrize("name", MERGES)
def test_merge_attn_states(paged_attn, device, name):
    index, shape, match = MERGES[name]
    out, lse = torch.zeros(2, 3, 4, 64, device=device), torch.zeros(2, 4, 3, device=device)
    arguments = [out, out, lse, lse]
    arguments[index] = torch.zeros(shape, device=device)
    with pytest.raises(ERRORS, match=match):
        paged_attn.merge_attn_states(arguments[0], arguments[2], arguments[1], arguments[3])


def test_again_with_checks(device):
    """PAGED_ATTN_CHECK is read once, so the other way needs a process of its own."""
    if values_are_checked(device):
        pytest.skip("values are checked already")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", Path(__file__).name]
    options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    again = subprocess.run(command, env=os.environ | {"PAGED_ATTN_CHECK": "1"}, **options)
    assert again.returncode == 0, again.stdout[-6000:]
