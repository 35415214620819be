"""Bad input gets an error that names the argument, and leaves every byte of the caches as it was.

Lengths and page numbers lie in device memory, so a GPU looks at them only under PAGED_ATTN_CHECK=1. Without it such a
call must not fail, and must touch nothing outside of the caches; both ways are tested.
"""

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
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
NO_HEADS = Case(batch=3, lens=(20, 0, 33), q_heads=0)
NO_HEADS_PACKED = Case(batch=3, lens=(20, 0, 33), q_heads=0, q_len=4, varlen_q=True)


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
    """change(arguments) makes the call of a case bad; arguments hold k_cache and v_cache too. explain looks at values
    as the call does."""
    call, before = cases.build(case).to(device), cases.build(case)
    arguments = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches()))
    change(arguments)
    if by_value and not values_are_checked(device):
        paged_attn.explain(**arguments)
        paged_attn.flash_attn_with_kvcache(**arguments)
        assert_nothing_outside(call, before)
        return
    if by_value:
        with pytest.raises(ERRORS, match=match):
            paged_attn.explain(**arguments)
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
    match = f"^{name}: expected "
    if (name, dtype) == ("q", torch.float32):  # which the cache could be: the hint says what would fit
        match = r"^k_cache: expected the dtype of q \(float32\) .+, got bfloat16; q\.to\(k_cache\.dtype\) would fit$"
    refused(paged_attn, device, case, match, lambda a: a.update({name: same_shape(dtype)(a[name])}))


TENSORS = pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=n) for n, c in {name: case for name, case, _ in DTYPES}.items()]
)


@TENSORS
def test_device(paged_attn, device, name, case):
    """One tensor elsewhere. The meta device is the other device that every machine has."""
    blamed = "k_cache" if name == "q" else name  # q is what the others are compared with
    match = f"^{blamed}: expected a tensor on the device of q "
    refused(paged_attn, device, case, match, lambda a: a.update({name: a[name].to("meta")}))


@TENSORS
@pytest.mark.parametrize("change", ["less", "more"])
def test_rank(paged_attn, device, name, case, change):
    def bad(a):
        less = a[name].flatten()[0] if name == "alibi_slopes" else a[name][0]  # (q_heads,) would be fine
        a[name] = less if change == "less" else a[name].unsqueeze(0).unsqueeze(0)

    refused(paged_attn, device, case, f"^{name}: expected ", bad)


# argument, case, its dimension that is one too large, the argument that the error names (the first to meet a size fixes
# it) and the size
SHAPES = [
    ("q", PAGED, 0, "cache_batch_idx", "batch = 4"),
    ("q", PAGED, 1, "out", "seqlen_q = 3"),
    ("q", PAGED, 2, "out", "q_heads = 5"),
    ("q", PAGED, 3, "k_cache", "head_dim = 65"),
    ("k_cache", PAGED, 0, "v_cache", "num_pages = 10"),
    ("k_cache", PAGED, 1, "v_cache", "page_size = 17"),
    ("k_cache", PAGED, 2, "v_cache", "kv_heads = 3"),
    ("k_cache", PAGED, 3, "k_cache", "head_dim = 64"),
    ("v_cache", PAGED, 0, "v_cache", "num_pages = 9"),
    ("v_cache", PAGED, 1, "v_cache", "page_size = 16"),
    ("v_cache", PAGED, 2, "v_cache", "kv_heads = 2"),
    ("v_cache", PAGED, 3, "out", "head_dim_v = 65"),
    ("k", PAGED, 0, "k", "batch = 3"),
    ("k", PAGED, 1, "v", "seqlen_new = 3"),
    ("k", PAGED, 2, "k", "kv_heads = 2"),
    ("k", PAGED, 3, "k", "head_dim = 64"),
    ("v", PAGED, 2, "v", "kv_heads = 2"),
    ("v", PAGED, 3, "v", "head_dim_v = 64"),
    ("out", PAGED, 0, "out", "batch = 3"),
    ("out", PAGED, 3, "out", "head_dim_v = 64"),
    ("cache_seqlens", PAGED, 0, "cache_seqlens", "batch = 3"),
    ("cache_batch_idx", PAGED, 0, "cache_batch_idx", "batch = 3"),
    ("cache_leftpad", PAGED, 0, "cache_leftpad", "batch = 3"),
    ("rotary_seqlens", PAGED, 0, "rotary_seqlens", "batch = 3"),
    ("rotary_cos", PAGED, 1, "rotary_sin", "rotary_dim / 2 = 17"),
    ("alibi_slopes", PAGED, 0, "alibi_slopes", "batch = 3"),
    ("alibi_slopes", PAGED, 1, "alibi_slopes", "q_heads = 4"),
    ("s_aux", PAGED, 0, "s_aux", "q_heads = 4"),
    ("block_table", READ_ONLY, 0, "block_table", "batch = 3"),
    ("cu_seqlens_k_new", VARLEN, 0, "cu_seqlens_k_new", r"batch \+ 1 = 4"),
    ("k_descale", FP8, 0, "k_descale", "batch = 3"),
    ("v_descale", FP8, 1, "v_descale", "kv_heads = 2"),
    ("qv", QV, 1, "qv", "seqlen_q = 1"),
    ("qv", QV, 2, "qv", "q_heads = 4"),
    ("qv", QV, 3, "qv", "head_dim_v = 512"),
]


@pytest.mark.parametrize(
    ("name", "case", "dim", "blamed", "size"), SHAPES, ids=[f"{name}-{dim}" for name, _, dim, *_ in SHAPES]
)
def test_shape(paged_attn, device, name, case, dim, blamed, size):
    def bad(a):
        a[name] = torch.cat([a[name], a[name].narrow(dim, 0, 1)], dim)  # one too many

    refused(paged_attn, device, case, rf"^{blamed}: expected .*\b{size}\b.*, got ", bad)


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
    "negative length": (
        READ_ONLY,
        r"^cache_seqlens\[2\]: expected at least 0, got -1$",
        set_entry("cache_seqlens", 2, -1),
    ),
    "very negative length": (
        READ_ONLY,
        r"^cache_seqlens\[0\]: expected at least 0, got -2147483648$",
        set_entry("cache_seqlens", 0, -(2**31)),
    ),
    "negative length, append": (
        PAGED,
        r"^cache_seqlens\[1\]: expected at least 0, got -1$",
        set_entry("cache_seqlens", 1, -1),
    ),
    "negative int length": (
        READ_ONLY,
        r"^cache_seqlens\[0\]: expected at least 0, got -5$",
        lambda a: a.update(cache_seqlens=-5),
    ),
    "length over the table": (
        READ_ONLY,
        r"^cache_seqlens\[2\]: expected at most max_pages \* page_size = 80, got 81$",
        set_entry("cache_seqlens", 2, 81),
    ),
    "length over the table, int": (
        READ_ONLY,
        r"^cache_seqlens\[0\]: expected at most max_pages \* page_size = 80, got 81$",
        lambda a: a.update(cache_seqlens=81),
    ),
    "largest length": (
        READ_ONLY,
        r"^cache_seqlens\[0\]: expected at most max_pages \* page_size = 80, got 2147483647$",
        set_entry("cache_seqlens", 0, 2**31 - 1),
    ),
    "largest length, append": (
        PAGED,
        r"^cache_seqlens\[0\]: expected at most max_pages \* page_size = 80 minus the 2 new to",
        set_entry("cache_seqlens", 0, 2**31 - 1),
    ),
    "append over the table": (
        PAGED,
        r"^cache_seqlens\[2\]: expected at most max_pages \* page_size = 80 minus the 2 new tokens, got 79$",
        set_entry("cache_seqlens", 2, 79),
    ),
    "length over the cache": (
        CONTIGUOUS,
        r"^cache_seqlens\[0\]: expected at most the cache's 38 minus the 2 new tokens, got 37$",
        set_entry("cache_seqlens", 0, 37),
    ),
    "too short table": (
        READ_ONLY,
        r"^cache_seqlens\[2\]: expected at most max_pages \* page_size = 32, got 33$",
        lambda a: a.update(block_table=a["block_table"][:, :2]),
    ),
    "table without columns": (
        READ_ONLY,
        r"^cache_seqlens\[0\]: expected at most max_pages \* page_size = 0, got 20$",
        lambda a: a.update(block_table=a["block_table"][:, :0]),
    ),
    "page number -1": (
        READ_ONLY,
        r"^block_table: expected page numbers in \[0, num_pages = 8\), got -1 for batch entry 2, page 1$",
        used_page(-1),
    ),
    "page number num_pages": (
        READ_ONLY,
        r"^block_table: expected page numbers in \[0, num_pages = 8\), got 8 for batch entry 2, page 1$",
        used_page(8),
    ),
    "page number wild": (
        READ_ONLY,
        r"^block_table: expected page numbers in \[0, num_pages = 8\), got 2147480000 for bat",
        used_page(2147480000),
    ),
    "page number, append": (
        PAGED,
        r"^block_table: expected page numbers in \[0, num_pages = 9\), got -7 for batch entry 2, page 1$",
        used_page(-7),
    ),
    "negative length, no heads": (
        NO_HEADS,
        r"^cache_seqlens\[2\]: expected at least 0, got -1$",
        set_entry("cache_seqlens", 2, -1),
    ),
    "length over the table, no heads": (
        NO_HEADS,
        r"^cache_seqlens\[2\]: expected at most max_pages \* page_size = 80, got 81$",
        set_entry("cache_seqlens", 2, 81),
    ),
    "page number, no heads": (
        NO_HEADS,
        r"^block_table: expected page numbers in \[0, num_pages = 8\), got 8 for batch entry 2, page 1$",
        used_page(8),
    ),
    "cu_seqlens_q falls, no heads": (
        NO_HEADS_PACKED,
        r"^cu_seqlens_q\[2\]: expected at least the entry before it, 9, got ",
        set_entry("cu_seqlens_q", 1, 9),
    ),
    "leftpad negative": (
        PAGED,
        r"^cache_leftpad\[1\]: expected at least 0, got -1$",
        set_entry("cache_leftpad", 1, -1),
    ),
    "batch_idx negative": (
        PAGED,
        r"^cache_batch_idx\[1\]: expected a row in \[0, 5\), got -1$",
        set_entry("cache_batch_idx", 1, -1),
    ),
    "batch_idx too large": (
        PAGED,
        r"^cache_batch_idx\[1\]: expected a row in \[0, 5\), got 5$",
        set_entry("cache_batch_idx", 1, 5),
    ),
    "batch_idx too large, contiguous": (
        CONTIGUOUS,
        r"^cache_batch_idx\[1\]: expected a row in \[0, 3\), got 3$",
        lambda a: a.update(cache_batch_idx=int32(0, 3, 1)),
    ),
    "rotary_seqlens negative": (
        PAGED,
        r"^rotary_seqlens\[1\]: expected at least 0, got -1$",
        set_entry("rotary_seqlens", 1, -1),
    ),
    "rotary_seqlens past the table": (
        PAGED,
        r"^rotary_cos\[2\]: expected at least 1002 positions for this batch entry, got 21$",
        set_entry("rotary_seqlens", 2, 1000),
    ),
    "rotary table too short": (
        PAGED,
        r"^rotary_cos\[0\]: expected at least 21 positions for this batch entry, got 20$",
        lambda a: a.update(rotary_cos=a["rotary_cos"][:-1], rotary_sin=a["rotary_sin"][:-1]),
    ),
    "rotary table too short for the last query": (
        Case(batch=1, lens=(20,), q_len=5, append=1, causal=True, rotary_dim=32),
        r"^rotary_cos\[0\]: expected at least 25 positions for this batch entry, got 24$",
        lambda a: a.update(rotary_cos=a["rotary_cos"][:24], rotary_sin=a["rotary_sin"][:24]),
    ),
    "rotary table too short without a new token": (
        Case(batch=1, lens=(20,), q_len=2, append_nothing=True, rotary_dim=32),
        r"^rotary_cos\[0\]: expected at least 21 positions for this batch entry, got 20$",
        lambda a: a.update(rotary_cos=a["rotary_cos"][:20], rotary_sin=a["rotary_sin"][:20]),
    ),
    "cu_seqlens_q starts late": (VARLEN, r"^cu_seqlens_q\[0\]: expected 0, got 1$", set_entry("cu_seqlens_q", 0, 1)),
    "cu_seqlens_q falls": (
        VARLEN,
        r"^cu_seqlens_q\[2\]: expected at least the entry before it, 9, got 3$",
        set_entry("cu_seqlens_q", 1, 9),
    ),
    "cu_seqlens_q falls below 0": (
        VARLEN,
        r"^cu_seqlens_q\[1\]: expected at least the entry before it, 0, got -1$",
        set_entry("cu_seqlens_q", 1, -1),
    ),
    "cu_seqlens_q ends too late": (
        VARLEN,
        r"^cu_seqlens_q\[3\]: expected at most the number of tokens, 7, got 99$",
        set_entry("cu_seqlens_q", 3, 99),
    ),
    "max_seqlen_q too small": (
        VARLEN, r"^max_seqlen_q: expected at least the 4 tokens of batch entry 2, got 3$",
        lambda a: a.update(max_seqlen_q=3),
    ),
    "max_seqlen_q 0": (
        VARLEN, r"^max_seqlen_q: expected at least the \d tokens of batch entry \d, got 0$",
        lambda a: a.update(max_seqlen_q=0),
    ),
    "cu_seqlens_k_new starts late": (
        VARLEN,
        r"^cu_seqlens_k_new\[0\]: expected 0, got 1$",
        set_entry("cu_seqlens_k_new", 0, 1),
    ),
    "cu_seqlens_k_new falls": (
        VARLEN,
        r"^cu_seqlens_k_new\[2\]: expected at least the entry before it, 9, got 3$",
        set_entry("cu_seqlens_k_new", 1, 9),
    ),
    "cu_seqlens_k_new ends too late": (
        VARLEN,
        r"^cu_seqlens_k_new\[3\]: expected at most the number of tokens, 4, got 99$",
        set_entry("cu_seqlens_k_new", 3, 99),
    ),
}  # fmt: skip
COMBINATIONS = {
    "softcap negative": (
        READ_ONLY,
        r"^softcap: expected at least 0 \(0 is off\), got -1\.000000$",
        lambda a: a.update(softcap=-1.0),
    ),
    "softcap NaN": (
        READ_ONLY,
        r"^softcap: expected at least 0 \(0 is off\), got nan$",
        lambda a: a.update(softcap=float("nan")),
    ),
    "softmax_scale NaN": (
        READ_ONLY,
        r"^softmax_scale: expected a number that float32 holds, got nan$",
        lambda a: a.update(softmax_scale=float("nan")),
    ),
    "softmax_scale too large": (
        READ_ONLY,
        r"^softmax_scale: expected a number that float32 holds, got -1e\+39$",
        lambda a: a.update(softmax_scale=-1e39),
    ),
    "num_splits negative": (
        READ_ONLY,
        r"^num_splits: expected at least 0 \(0 chooses\), got -1$",
        lambda a: a.update(num_splits=-1),
    ),
    "max_seqlen_q negative": (
        VARLEN, "^max_seqlen_q: expected at least 0, got -1$", lambda a: a.update(max_seqlen_q=-1),
    ),
    "max_seqlen_k negative": (
        VARLEN, "^max_seqlen_k: expected at least 0, or -1 for none, got -2$", lambda a: a.update(max_seqlen_k=-2),
    ),
    "attention_chunk negative": (
        READ_ONLY,
        r"^attention_chunk: expected at least 0 \(0 is off\), got -1$",
        lambda a: a.update(attention_chunk=-1),
    ),
    "window below -1": (
        READ_ONLY,
        r"^window_size: expected -1 \(unlimited\) or at least 0, got \(-2, 0\)$",
        lambda a: a.update(window_size=(-2, 0)),
    ),
    "window on the right below -1": (
        READ_ONLY,
        r"^window_size: expected -1 \(unlimited\) or at least 0, got \(3, -2\)$",
        lambda a: a.update(window_size=(3, -2)),
    ),
    "k alone": (PAGED, "^k and v: expected both or neither, got only one of them$", lambda a: a.pop("v")),
    "v alone": (PAGED, "^k and v: expected both or neither, got only one of them$", lambda a: a.pop("k")),
    "k without cache_seqlens": (
        PAGED,
        "^cache_seqlens: expected where to append k and v, got None$",
        lambda a: a.pop("cache_seqlens"),
    ),
    "rotary_cos alone": (
        PAGED,
        "^rotary_cos and rotary_sin: expected both or neither, got only one of them$",
        lambda a: a.pop("rotary_sin"),
    ),
    "rotary_sin alone": (
        PAGED,
        "^rotary_cos and rotary_sin: expected both or neither, got only one of them$",
        lambda a: a.pop("rotary_cos"),
    ),
    "rotary without k": (
        PAGED,
        r"^rotary_cos: expected new keys \(k and v\) to rotate, got k = None$",
        lambda a: (a.pop("k"), a.pop("v")),
    ),
    "rotary_dim over head_dim": (
        PAGED,
        "^rotary_cos: expected rotary_dim of at most head_dim = 64, got 66$",
        lambda a: a.update({n: torch.zeros(100, 33).bfloat16() for n in ("rotary_cos", "rotary_sin")}),
    ),
    "q packed without cu_seqlens_q": (
        VARLEN,
        r"^q: expected float32 or float16 or bfloat16 or float8_e4m3fn or float8_e5m2 \[batc",
        lambda a: a.pop("cu_seqlens_q"),
    ),
    "k packed without cu_seqlens_k_new": (
        VARLEN,
        r"^k: expected \[batch, seqlen_new, kv_heads, head_dim\] \(or cu_seqlens_k_new with it",
        lambda a: a.pop("cu_seqlens_k_new"),
    ),
    "cu_seqlens_q empty": (
        VARLEN,
        r"^cu_seqlens_q: expected int32 \[batch \+ 1\], got int32 \[0\]$",
        lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"][:0]),
    ),
    "block_table and page_table": (
        READ_ONLY,
        "^block_table and page_table are two names of one argument: expected one of them, got both$",
        lambda a: a.update(page_table=a["block_table"]),
    ),
    "s_aux and sinks": (
        PAGED,
        "^s_aux and sinks are two names of one argument: expected one of them, got both$",
        lambda a: a.update(sinks=a["s_aux"]),
    ),
    "unknown keyword": (
        READ_ONLY,
        r"^flash_attn_with_kvcache\(\) got an unexpected keyword argument 'block_tables'$",
        lambda a: a.update(block_tables=a["block_table"]),
    ),
    "fp8 cache of another kind of 8 bits": (
        FP8,
        r"^k_cache: expected the dtype of q \(bfloat16\) or float8_e4m3fn or float8_e5m2, got int8$",
        lambda a: a.update(k_cache=a["k_cache"].view(torch.int8)),
    ),
    "batch larger than the contiguous cache": (
        CONTIGUOUS,
        r"^k_cache: expected at least batch = 3 \(from q\) rows, got bfloat16 \[2, 38, 2, 64\]$",
        lambda a: a.update(k_cache=a["k_cache"][:2], v_cache=a["v_cache"][:2]),
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

    match = rf"^{name}: expected a contiguous last dimension \(stride 1\), got stride 2$"
    refused(paged_attn, device, PAGED, match, bad)


@pytest.mark.parametrize("q_heads", [1, 3, 5])
def test_heads_that_do_not_divide(paged_attn, device, q_heads):
    match = rf"^q_heads: expected a multiple of kv_heads = 2 \(from k_cache\), got {q_heads}$"
    refused(
        paged_attn, device, READ_ONLY, match,
        lambda a: a.update(q=torch.zeros(3, 1, q_heads, 64, dtype=torch.bfloat16, device=device)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(257, 257), (64, 512), (320, 320), (576, 576), (512, 256), (1, 257)]
)
def test_head_dims_that_nobody_promised(paged_attn, device, head_dim, head_dim_v):
    case = Case(batch=2, lens=(5, 9), head_dim=head_dim, head_dim_v=head_dim_v)
    match = rf"^head_dim and head_dim_v: expected 1 to 256 each, .+, got \({head_dim}, {head_dim_v}\)$"
    refused(paged_attn, device, case, match, lambda a: None)


@pytest.mark.parametrize("kv_len", [1, 17])
def test_no_pages_at_all(paged_attn, device, kv_len):
    """num_pages 0: every page number is out of range, whatever it is; without keys the call is fine."""

    def bad(a):
        for name in ("k_cache", "v_cache"):
            a[name] = a[name][:0]
        a["block_table"] = torch.zeros_like(a["block_table"])

    case = Case(batch=2, lens=(0, kv_len))
    refused(
        paged_attn,
        device,
        case,
        r"^block_table: expected page numbers in \[0, num_pages = 0\), got 0 ",
        bad,
        by_value=True,
    )
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
    refused(
        paged_attn,
        device,
        case,
        "^block_table: expected page numbers .+, got -3 ",
        set_entry("block_table", (0, page), -3),
        by_value=True,
    )


def test_a_bad_page_that_nobody_reads_is_no_error(paged_attn, device):
    """Outside the window; engines free such pages and reuse their numbers."""
    case = Case(batch=1, lens=(100,), window=(20, 0), causal=True)
    call = cases.build(case).to(device)
    good = run(paged_attn, call)
    call.kwargs["block_table"][0, :4] = -1
    assert all(torch.equal(a, b) for a, b in zip(run(paged_attn, call), good))


FP8_QUERY = Case(batch=3, lens=(20, 0, 33), q_len=2, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", append=2)
# Every tensor of numbers, and a case that it can be given in.
NUMBERS = {
    "q": PAGED, "k_cache": PAGED, "v_cache": PAGED, "k": PAGED, "v": PAGED, "rotary_cos": PAGED, "rotary_sin": PAGED,
    "alibi_slopes": PAGED, "s_aux": PAGED, "out": PAGED, "qv": QV, "q_descale": FP8_QUERY, "k_descale": FP8,
    "v_descale": FP8,
}  # fmt: skip


def that_requires_grad(arguments, name):
    given = arguments[name] if name in arguments else torch.ones(1, 1, device=arguments["q"].device)
    return given.detach().clone().requires_grad_()


@pytest.mark.parametrize("name", NUMBERS)
def test_inputs_that_require_grad(paged_attn, device, name):
    given = []

    def bad(a):
        a[name] = that_requires_grad(a, name)
        given.append((a[name], a[name].detach().clone()))

    refused(paged_attn, device, NUMBERS[name], f"^{name}: expected a tensor that asks for no gradient ", bad)
    ((after, before),) = given
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8)), f"{name} was written"


@pytest.mark.parametrize("name", NUMBERS)
def test_inputs_that_require_grad_without_grad_mode(paged_attn, device, name):
    call = cases.build(NUMBERS[name]).to(device)
    arguments = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches()))
    arguments[name] = that_requires_grad(arguments, name)
    with torch.no_grad():
        paged_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("name", NUMBERS)
def test_tangents(paged_attn, device, name):
    """Forward-mode differentiation, with grad mode and without: there is no derivative, and 0 would be a wrong one."""
    for grad in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):

            def bad(a):
                given = that_requires_grad(a, name).detach()
                if given.dtype.itemsize == 1:
                    pytest.skip("torch has no tangents of 8 bits")
                a[name] = forward_ad.make_dual(given, torch.ones_like(given))

            refused(paged_attn, device, NUMBERS[name], f"^{name}: expected a tensor without a tangent ", bad)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_tangents_of_a_write(paged_attn, device, name, grad):
    a = {n: torch.zeros(1, 1, 2, 8, device=device) for n in ("k", "v")}
    a |= {n: torch.zeros(1, 4, 2, 8, device=device) for n in ("k_cache", "v_cache")}
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        a[name] = forward_ad.make_dual(a[name], torch.ones_like(a[name]))
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor without a tangent "):
            paged_attn.kv_paged_write(**a, block_table=table, cache_seqlens=0)


def test_no_derivative_is_silently_zero(paged_attn, device):
    q, k, v = (torch.randn(1, n, 2, 8, device=device) for n in (3, 5, 5))
    functions = {
        "q": lambda x: paged_attn.flash_attn_func(x, k, v),
        "v_cache": lambda x: paged_attn.flash_attn_with_kvcache(q, k, v * x.sum(), cache_seqlens=2),
        "out_a": lambda x: paged_attn.merge_attn_states(x, x[..., 0].mT, x, x[..., 0].mT)[0],
    }
    for name, function in functions.items():
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor without a tangent "):
            torch.func.jvp(function, (q,), (torch.ones_like(q),))
    pages, table = torch.zeros(1, 4, 2, 8, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^k: expected a tensor without a tangent "):
        torch.func.jvp(lambda x: paged_attn.kv_paged_write(x, q, pages, pages.clone(), table, 0), (q,), (q,))
    with forward_ad.dual_level():  # without a tangent all is as ever
        assert torch.equal(paged_attn.flash_attn_func(q, k, v), functions["q"](q))


def test_sinks_that_require_grad(paged_attn, device):
    refused(
        paged_attn, device, READ_ONLY, "^sinks: expected a tensor that asks for no gradient ",
        lambda a: a.update(sinks=torch.zeros(4, device=device, requires_grad=True)),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_tensors_in_place_of_numbers_that_require_grad(paged_attn, device, name):
    """A tensor of one element counts as a number. A learned one is refused in grad mode: its gradient would be missing
    without a word."""
    scale = torch.tensor(0.5, requires_grad=True)
    match = f"^{name}: expected a tensor that asks for no gradient "
    for value in (scale, 2 * scale):
        refused(paged_attn, device, PAGED, match, lambda a, value=value: a.update({name: value}))
    with forward_ad.dual_level():
        value = forward_ad.make_dual(scale.detach(), torch.tensor(1.0))
        match = f"^{name}: expected a tensor without a tangent "
        refused(paged_attn, device, PAGED, match, lambda a: a.update({name: value}))
    results = []
    for value in (scale, 0.5):
        call = cases.build(PAGED).to(device)
        arguments = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches())) | {name: value}
        with torch.no_grad():
            results.append(paged_attn.flash_attn_with_kvcache(**arguments))
    assert all(map(torch.equal, *results))


FP8_QUERIES = {
    "rotary": (
        r"^rotary_cos: expected None with an 8-bit q \(float8_e4m3fn\), got a tensor$",
        lambda a: a.update({n: torch.zeros(100, 16).to(a["q"]) for n in ("rotary_cos", "rotary_sin")}),
    ),
    "new keys for a cache of another dtype": (
        r"^k: expected the dtype of k_cache \(float8_e5m2\) with an 8-bit q, .+; got float8_e4m3fn$",
        lambda a: a.update({n: a[n].view(torch.float8_e5m2) for n in ("k_cache", "v_cache")}),
    ),
    "new keys and a cache of another 8-bit dtype": (
        r"^q: expected the dtype of k and k_cache \(float8_e5m2\), .+; got float8_e4m3fn$",
        lambda a: a.update({n: a[n].view(torch.float8_e5m2) for n in ("k_cache", "v_cache", "k", "v")}),
    ),
    "wider cache": (
        r"^k_cache: expected the dtype of q \(float8_e4m3fn\) or .+, got float32; q\.to\(k_cache\.dtype\) would fit$",
        lambda a: a.update({n: a[n].float() for n in ("k_cache", "v_cache")}),
    ),
    "8-bit out": (r"^out: expected bfloat16 ", lambda a: a.update(out=torch.empty_like(a["q"]))),
}


@pytest.mark.parametrize("name", FP8_QUERIES)
def test_fp8_queries(paged_attn, device, name):
    refused(paged_attn, device, FP8_QUERY, *FP8_QUERIES[name])


PLAIN = {
    "dropout": ({"dropout_p": 0.1}, r"^dropout_p: expected 0\.0 \(forward only, for inference\), got 0\.1$"),
    "unknown keyword": (
        {"block_tabel": None},
        r"^flash_attn_func\(\) got an unexpected keyword argument 'block_tabel'$",
    ),
    "both names of the sink": (
        {"sinks": torch.zeros(4), "s_aux": torch.zeros(4)},
        "^s_aux and sinks are two names of one argument: expected one of them, got both$",
    ),
    "sinks": (
        {"sinks": torch.zeros(3)},
        r"^sinks: expected float32 or float16 or bfloat16 \[q_heads = 4 \(from q\)\], got float32 \[3\]$",
    ),
    "heads": (
        {"k": torch.zeros(2, 5, 3, 64), "v": torch.zeros(2, 5, 3, 64)},
        r"^q_heads: expected a multiple of kv_heads = 3 \(from k\), got 4$",
    ),
    "batch": (
        {"k": torch.zeros(1, 5, 2, 64), "v": torch.zeros(1, 5, 2, 64)},
        r"^k: expected at least batch = 2 \(from q\) rows, got float32 \[1, 5, 2, 64\]$",
    ),
    "length of v": (
        {"v": torch.zeros(2, 6, 2, 64)},
        r"^v: expected float32 \[batch = 2 \(from k\), seqlen_k = 5 \(from k\), .*, got float32 \[2, 6, 2, 64\]$",
    ),
    "dtype of v": ({"v": torch.zeros(2, 5, 2, 64).half()}, r"^v: expected float32 .*, got float16 \[2, 5, 2, 64\]$"),
    "dtype of k": (
        {"k": torch.zeros(2, 5, 2, 64).half()},
        r"^k: expected the dtype of q \(float32\) or .*, got float16; q\.to\(k\.dtype\) would fit$",
    ),
    "grad": (
        {"q": torch.zeros(2, 3, 4, 64, requires_grad=True)},
        "^q: expected a tensor that asks for no gradient ",
    ),
    "grad of v": (
        {"v": torch.zeros(2, 5, 2, 64, requires_grad=True)},
        "^v: expected a tensor that asks for no gradient ",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_flash_attn_func(paged_attn, device, name):
    change, match = PLAIN[name]
    good = {"q": torch.zeros(2, 3, 4, 64), "k": torch.zeros(2, 5, 2, 64), "v": torch.zeros(2, 5, 2, 64)}
    arguments = {n: x.to(device) if torch.is_tensor(x) else x for n, x in (good | change).items()}
    with pytest.raises(ERRORS, match=match):
        paged_attn.flash_attn_func(**arguments)


VARLEN_FUNC = {
    "dropout": ({"dropout_p": 0.5}, r"^dropout_p: expected 0\.0 \(forward only, for inference\), got 0\.5$"),
    "unknown keyword": (
        {"max_seqlen_kv": 3},
        r"^flash_attn_varlen_func\(\) got an unexpected keyword argument 'max_seqlen_kv'$",
    ),
    "int64 cu_seqlens_q": (
        {"cu_seqlens_q": torch.tensor([0, 3, 6])},
        r"^cu_seqlens_q: expected int32 \[batch \+ 1\], got int64 \[3\]$",
    ),
    "int64 cu_seqlens_k": (
        {"cu_seqlens_k": torch.tensor([0, 5, 10])},
        r"^cu_seqlens_k: expected int32 \[batch \+ 1 = 3 \(from cu_seqlens_q\)\], got int64 \[3\]$",
    ),
    "no cu_seqlens_q": ({"cu_seqlens_q": None}, r"^cu_seqlens_q: expected int32 \[batch \+ 1\], got None$"),
    "no cu_seqlens_k": (
        {"cu_seqlens_k": None},
        r"^cu_seqlens_k: expected int32 \[batch \+ 1\] \(or block_table and seqused_k\), got None$",
    ),
    "other batch": (
        {"cu_seqlens_k": int32(0, 5, 7, 10)},
        r"^cu_seqlens_k: expected int32 \[batch \+ 1 = 3 \(from cu_seqlens_q\)\], got int32 \[4\]$",
    ),
    "rank of q": (
        {"q": torch.zeros(2, 3, 4, 64)},
        r"^q: expected float32 or .* \[total_q, q_heads, head_dim\], got float32 \[2, 3, 4, 64\]$",
    ),
    "rank of k": (
        {"k": torch.zeros(2, 5, 2, 64)},
        r"^k: expected float32 \[total_k, kv_heads, head_dim = 64 \(from q\)\], got float32 \[2, 5, 2, 64\]$",
    ),
    "rank of k, pages": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        r"^k: expected float32 \[num_pages, page_size, kv_heads, .*\], got float32 \[10, 2, 64\]$",
    ),
    "length of v": (
        {"v": torch.zeros(9, 2, 64)},
        r"^v: expected float32 \[total_k = 10 \(from k\), kv_heads = 2 .*\], got float32 \[9, 2, 64\]$",
    ),
    "int64 seqused_k": (
        {"seqused_k": torch.tensor([5, 5])},
        r"^seqused_k: expected int32 \[batch = 2 \(from cu_seqlens_q\)\], got int64 \[2\]$",
    ),
}
VARLEN_VALUES = {
    "cu_seqlens_k falls": (
        {"cu_seqlens_k": int32(0, 10, 5)},
        r"^cu_seqlens_k\[2\]: expected at least the entry before it, 10, got 5$",
    ),
    "cu_seqlens_k too long": (
        {"cu_seqlens_k": int32(0, 5, 11)},
        r"^cu_seqlens_k\[2\]: expected at most the number of tokens, 10, got 11$",
    ),
    "cu_seqlens_k negative": ({"cu_seqlens_k": int32(-1000, 5, 10)}, r"^cu_seqlens_k\[0\]: expected 0, got -1000$"),
    "cu_seqlens_q too long": (
        {"cu_seqlens_q": int32(0, 5, 7)},
        r"^cu_seqlens_q\[2\]: expected at most the number of tokens, 6, got 7$",
    ),
    "seqused_k too large": (
        {"seqused_k": int32(5, 6)},
        r"^seqused_k\[1\]: expected at most the cache's 5, got 6$",
    ),
    "seqused_k negative": ({"seqused_k": int32(-1, 5)}, r"^seqused_k\[0\]: expected at least 0, got -1$"),
    "max_seqlen_q too small": (
        {"max_seqlen_q": 2},
        "^max_seqlen_q: expected at least the 3 tokens of batch entry 0, got 2$",
    ),
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


OTHER_NAMES = {
    "page_table": (
        lambda a: a.update(page_table=a.pop("block_table").long()),
        r"^page_table: expected int32 \[batch = 3 \(from q\), max_pages\], got int64 \[3, 5\]$",
    ),
    "sinks": (
        lambda a: a.update(sinks=torch.zeros(3, device=a["q"].device)),
        r"^sinks: expected float32 or float16 or bfloat16 \[q_heads = 4 \(from q\)\], got float32 \[3\]$",
    ),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_named(paged_attn, device, name):
    """The message says what the caller wrote."""
    change, match = OTHER_NAMES[name]
    refused(paged_attn, device, READ_ONLY, match, change)


@pytest.mark.parametrize("lengths", [{}, {"seqused_k": (20, 33)}], ids=["alone", "beside seqused_k"])
@pytest.mark.parametrize(
    "bad",
    [torch.tensor([0, 20, 53]), int32(0, 20), int32(0, 20, 33, 53), int32(0, 20, 53)[None], torch.zeros(3)],
    ids=["int64", "too short", "too long", "two dimensions", "float32"],
)
@pytest.mark.parametrize("order", ["paged_attn", "fa3"])
def test_cu_seqlens_k_beside_a_table_is_checked(paged_attn, device, order, bad, lengths):
    """Also where seqused_k tells the lengths and nothing of it would be read."""
    call = cases.build(Case(batch=2, lens=(20, 33), varlen_q=True)).to(device)
    function = (paged_attn if order == "paged_attn" else paged_attn.fa3).flash_attn_varlen_func
    given = {name: int32(*x).to(device) for name, x in lengths.items()}
    shape = re.escape(f"{str(bad.dtype).removeprefix('torch.')} {list(bad.shape)}")
    match = rf"^cu_seqlens_k: expected int32 \[batch \+ 1 = 3 \(from cu_seqlens_q\)\], got {shape}$"
    with pytest.raises(ERRORS, match=match):
        function(
            call.kwargs["q"], *call.caches(), call.kwargs["cu_seqlens_q"], bad.to(device), 1, 33,
            page_table=call.kwargs["block_table"], **given,
        )  # fmt: skip


def test_lengths_of_pages_by_cu_seqlens_k(paged_attn, device):
    """The caller gave no seqused_k: the message says what the lengths are."""
    if not values_are_checked(device):
        pytest.skip("lengths are not checked")
    call = cases.build(Case(batch=2, lens=(20, 33), varlen_q=True)).to(device)
    with pytest.raises(
        ERRORS, match=r"^\(cu_seqlens_k\[1:\] - cu_seqlens_k\[:-1\]\)\[1\]: expected at most .*, got 380$"
    ):
        paged_attn.flash_attn_varlen_func(
            call.kwargs["q"], *call.caches(), call.kwargs["cu_seqlens_q"], int32(0, 20, 400).to(device), 1, 400,
            block_table=call.kwargs["block_table"],
        )  # fmt: skip


WRITE = Case(batch=3, lens=(20, 0, 33), append=2)
WRITE_FP8 = Case(batch=3, lens=(20, 0, 33), append=2, kv_dtype="float8_e5m2", descale="full")
SLOTS = torch.tensor([0, -1, 17, 18, 40, 41])
WRITE_VALUES = {
    "slot past the cache": (
        WRITE,
        r"^slot_mapping\[4\]: expected less than num_pages \* page_size = 144, got 144$",
        lambda a: a.update(slot_mapping=SLOTS.index_fill(0, torch.tensor([4]), 144)),
    ),
    "slot far past the cache": (
        WRITE,
        r"^slot_mapping\[4\]: expected less than num_pages \* page_size = 144, got 4611686018427387904$",
        lambda a: a.update(slot_mapping=SLOTS.index_fill(0, torch.tensor([4]), 2**62)),
    ),
    "negative length": (WRITE, r"^cache_seqlens\[2\]: expected at least 0, got -1$", set_entry("cache_seqlens", 2, -1)),
    "past the table": (
        WRITE,
        r"^cache_seqlens\[2\]: expected at most max_pages \* page_size = 80 minus the 2 new tokens, got 79$",
        set_entry("cache_seqlens", 2, 79),
    ),
    "bad page": (
        WRITE,
        r"^block_table: expected page numbers in \[0, num_pages = 9\), got 2147480000 for bat",
        set_entry("block_table", (2, 2), 2147480000),
    ),
    "negative page": (
        WRITE,
        r"^block_table: expected page numbers in \[0, num_pages = 9\), got -4 for batch entry 0, page 1$",
        set_entry("block_table", (0, 1), -4),
    ),
    "no pages": (
        WRITE,
        r"^block_table: expected page numbers in \[0, num_pages = 0\), got 2 for batch entry 0, page 1$",
        lambda a: a.update(k_cache=a["k_cache"][:0], v_cache=a["v_cache"][:0]),
    ),
    "no pages, slots": (
        WRITE, r"^slot_mapping\[0\]: expected less than num_pages \* page_size = 0, got 0$",
        lambda a: a.update(k_cache=a["k_cache"][:0], v_cache=a["v_cache"][:0], slot_mapping=SLOTS),
    ),
}  # fmt: skip
WRITES = {
    "int64 table": (
        WRITE,
        r"^block_table: expected int32 \[batch = 3 \(from k\), max_pages\], got int64 \[3, 5\]$",
        lambda a: a.update(block_table=a["block_table"].long()),
    ),
    "int64 lengths": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch = 3 \(from k\)\], got int64 \[3\]$",
        lambda a: a.update(cache_seqlens=a["cache_seqlens"].long()),
    ),
    "16-bit slots": (
        WRITE, r"^slot_mapping: expected int64 \[total_new = 6 \(from k\)\], got int16 \[6\]$",
        lambda a: a.update(slot_mapping=SLOTS.short()),
    ),
    "too many slots": (
        WRITE, r"^slot_mapping: expected int64 \[total_new = 6 \(from k\)\], got int64 \[12\]$",
        lambda a: a.update(slot_mapping=SLOTS.repeat(2)),
    ),
    "too few slots": (
        WRITE,
        r"^slot_mapping: expected int64 \[total_new = 6 \(from k\)\], got int64 \[5\]$",
        lambda a: a.update(slot_mapping=SLOTS[:5]),
    ),
    "no table and no slots": (
        WRITE,
        r"^block_table: expected int32 \[batch, max_pages\], or slot_mapping in its place, got None$",
        lambda a: a.update(block_table=None),
    ),
    "no lengths and no slots": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch\], or slot_mapping in its place, got None$",
        lambda a: a.update(cache_seqlens=None),
    ),
    "dtype of k": (
        WRITE,
        r"^v: expected float32 \[batch = 3 \(from k\), seqlen_new = 2 \(from k\), kv_heads = 2 \(",
        lambda a: a.update(k=a["k"].float()),
    ),
    "dtype of v": (
        WRITE,
        r"^v: expected bfloat16 \[batch = 3 \(from k\), seqlen_new = 2 \(from k\), kv_heads = 2 ",
        lambda a: a.update(v=a["v"].half()),
    ),
    "fp8 k": (
        WRITE_FP8,
        "^k: expected float32, float16 or bfloat16, got float8_e5m2$",
        lambda a: a.update(k=a["k"].to(torch.float8_e5m2), v=a["v"].to(torch.float8_e5m2)),
    ),
    "heads": (
        WRITE,
        r"^k_cache: expected bfloat16 \[num_pages = 9 \(from k_cache\), page_size = 16 \(from k",
        lambda a: a.update(k=a["k"][:, :, :1], v=a["v"][:, :, :1]),
    ),
    "head_dim": (
        WRITE,
        r"^k_cache: expected bfloat16 \[.*head_dim = 32 \(from k\)\], got bfloat16 \[9, 16, 2, 64\]$",
        lambda a: a.update(k=a["k"][..., :32]),
    ),
    "slots in a cache of three dimensions": (
        WRITE,
        r"^k_cache: expected bfloat16 \[num_pages, page_size, kv_heads = 2 \(from k\), head_dim = 64 \(from k\)\], ",
        lambda a: a.update(k_cache=a["k_cache"].flatten(0, 1), slot_mapping=SLOTS),
    ),
    "batch": (
        WRITE,
        r"^block_table: expected int32 \[batch = 2 \(from k\), max_pages\], got int32 \[3, 5\]$",
        lambda a: a.update(k=a["k"][:2], v=a["v"][:2]),
    ),
    "tokens of v": (
        WRITE,
        r"^v: expected bfloat16 \[batch = 3 \(from k\), seqlen_new = 2 \(from k\), kv_heads = 2 ",
        lambda a: a.update(v=a["v"][:, :1]),
    ),
    "rank": (
        WRITE,
        r"^k: expected a tensor of 3 or 4 dimensions, got shape \(2, 64\)$",
        lambda a: a.update(k=a["k"][0, 0], v=a["v"][0, 0]),
    ),
    "flat k that nothing cuts": (
        WRITE,
        r"^cu_seqlens_k_new: expected int32 \[batch \+ 1\] for k of \[total_new, kv_heads, head_dim\], got None$",
        lambda a: a.update(k=a["k"].flatten(0, 1), v=a["v"].flatten(0, 1)),
    ),
    "device": (WRITE, "^v: expected a tensor on the device of k ", lambda a: a.update(v=a["v"].to("meta"))),
    # Table and lengths beside slots say nothing, but they are not swallowed.
    "slots beside an int64 table": (
        WRITE,
        r"^block_table: expected int32 \[batch = 3 \(from k\), max_pages\], got int64 \[3, 5\]$",
        lambda a: a.update(slot_mapping=SLOTS, block_table=a["block_table"].long()),
    ),
    "slots beside a table of another batch": (
        WRITE,
        r"^block_table: expected int32 \[batch = 3 \(from k\), max_pages\], got int32 \[2, 5\]$",
        lambda a: a.update(slot_mapping=SLOTS, block_table=a["block_table"][:2]),
    ),
    "slots beside a list": (
        WRITE,
        r"^block_table: expected a tensor or None, got \[\[0\]\]$",
        lambda a: a.update(slot_mapping=SLOTS, block_table=[[0]]),
    ),
    "slots beside a table elsewhere": (
        WRITE,
        "^block_table: expected a tensor on the device of k, got one on another device$",
        lambda a: a.update(slot_mapping=SLOTS, block_table=a["block_table"].to("meta")),
    ),
    "slots beside int64 lengths": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch = 3 \(from k\)\], got int64 \[3\]$",
        lambda a: a.update(slot_mapping=SLOTS, cache_seqlens=a["cache_seqlens"].long(), block_table=None),
    ),
    "slots beside lengths of another batch": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch = 3 \(from k\)\], got int32 \[4\]$",
        lambda a: a.update(slot_mapping=SLOTS, cache_seqlens=int32(1, 2, 3, 4)),
    ),
    "slots of a flat k beside lengths of two dimensions": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch\], got int32 \[1, 3\]$",
        lambda a: a.update(k=a["k"].flatten(0, 1), v=a["v"].flatten(0, 1), slot_mapping=SLOTS, block_table=None,
                           cache_seqlens=a["cache_seqlens"][None]),
    ),
    "slots of a flat k beside a table and lengths of another batch": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch = 3 \(from block_table\)\], got int32 \[2\]$",
        lambda a: a.update(k=a["k"].flatten(0, 1), v=a["v"].flatten(0, 1), slot_mapping=SLOTS,
                           cache_seqlens=a["cache_seqlens"][:2]),
    ),
    "slots of a packed k beside lengths of another batch": (
        WRITE,
        r"^cache_seqlens: expected int32 \[batch = 2 \(from cu_seqlens_k_new\)\], got int32 \[3\]$",
        lambda a: a.update(k=a["k"].flatten(0, 1), v=a["v"].flatten(0, 1), slot_mapping=SLOTS, block_table=None,
                           cu_seqlens_k_new=int32(0, 2, 6)),
    ),
    "device of the slots": (
        WRITE,
        "^slot_mapping: expected a tensor on the device of k ",
        lambda a: a.update(slot_mapping=SLOTS.to("meta")),
    ),
    "descale": (
        WRITE_FP8,
        r"^k_descale: expected float32 \[batch = 3 \(from k\), kv_heads = 2 \(from k\)\] or a 1 i",
        lambda a: a.update(k_descale=a["k_descale"].half()),
    ),
    "unknown keyword": (WRITE, "unexpected keyword argument 'slots'", lambda a: a.update(slots=SLOTS)),
    "strided last dim": (
        WRITE,
        r"^k_cache: expected a contiguous last dimension \(stride 1\), got stride 2$",
        lambda a: a.update(k_cache=torch.stack([a["k_cache"], a["k_cache"]], -1)[..., 0]),
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


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "k_descale", "v_descale"])
def test_kv_paged_write_of_inputs_that_require_grad(paged_attn, device, name):
    call, before = cases.build(WRITE_FP8).to(device), cases.build(WRITE_FP8)
    arguments = {n: call.kwargs[n] for n in ("k", "v", "block_table", "cache_seqlens", "k_descale", "v_descale")}
    arguments |= dict(zip(("k_cache", "v_cache"), call.caches()))
    arguments[name] = arguments[name].detach().clone().requires_grad_()
    with pytest.raises(ERRORS, match=f"^{name}: expected a tensor that asks for no gradient "):
        paged_attn.kv_paged_write(**arguments)
    for a, b in zip(call.storage, before.storage):
        assert_same_bytes("cache", a, b)


def test_slots_of_pages_without_slots(paged_attn, device):
    cache, token = torch.zeros(3, 0, 1, 4, device=device), torch.zeros(1, 1, 4, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ERRORS, match=r"^k_cache: expected page_size of at least 1, got 0$"):
        paged_attn.kv_paged_write(token, token, cache, cache, slot_mapping=slots)


def test_scalars_with_an_int_length(paged_attn, device):
    """The batch size of an int length is read from the first tensor: that must have one."""
    cache, scalar = torch.zeros(1, 2, 1, 4, device=device), torch.zeros((), device=device)
    with pytest.raises(ERRORS, match=r"^q: expected"):
        paged_attn.flash_attn_with_kvcache(scalar, cache, cache, cache_seqlens=1)
    with pytest.raises(ERRORS, match=r"^k: expected"):
        paged_attn.kv_paged_write(scalar, scalar, cache, cache, None, 1)


def test_more_rows_of_keys_than_requests(paged_attn, device):
    """Only a cache may have them."""
    q, k = torch.zeros(2, 5, 4, 8, device=device), torch.zeros(3, 6, 4, 8, device=device)
    fa3 = paged_attn.fa3
    for function in (
        paged_attn.flash_attn_func, fa3.flash_attn_func, lambda *x: fa3.flash_attn_varlen_func(*x, None, None)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^k: expected batch = 2 \(from q\), got float32 \[3, 6, 4, 8\]$"):
            function(q, k, k)
        assert function(q, k[:2], k[:2]).shape == q.shape
    assert paged_attn.flash_attn_with_kvcache(q, k, k).shape == q.shape


def test_bounds_that_are_no_numbers(paged_attn, device):
    """A max_seqlen_q of any kind is looked at, and none is swallowed."""
    np = pytest.importorskip("numpy")
    call = cases.build(VARLEN).to(device)
    for value, given in (("x", "'x'"), (2.5, "2.5")):
        with pytest.raises(ValueError, match=f"^max_seqlen_q: expected an int of 64 bits, got {given}$"):
            run(paged_attn, call, max_seqlen_q=value)
    if values_are_checked(device):
        with pytest.raises(RuntimeError, match=r"^max_seqlen_q: expected at least the \d tokens .*, got 1$"):
            run(paged_attn, call, max_seqlen_q=np.int64(1))
    run(paged_attn, call, max_seqlen_q=np.int64(4))


def test_lengths_of_numpy(paged_attn, device):
    np = pytest.importorskip("numpy")
    q, k, v = torch.randn(3, 2, 1, 2, 8, device=device)
    caches = torch.zeros(4, 2, 4, 2, 8, device=device)
    table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    results = []
    for caches_of_one, length in ((caches[:2], np.int64(2)), (caches[2:], 2)):
        paged_attn.kv_paged_write(k, v, *caches_of_one, table, length)
        results.append(paged_attn.flash_attn_with_kvcache(q, *caches_of_one, k, v, cache_seqlens=length + 1))
        paged_attn.kv_paged_write(k[0], v[0], *caches_of_one, table, length, slot_mapping=torch.tensor([0]).to(device))
    assert torch.equal(*results) and torch.equal(caches[:2], caches[2:]) and caches.any()
    for wrong in (np.bool_(True), np.float32(2), np.array([1, 2])):
        with pytest.raises(
            ValueError, match=r"^cache_seqlens: expected a tensor, an int of 32 bits or None, got a value"
        ):
            paged_attn.flash_attn_with_kvcache(q, *caches[:2], cache_seqlens=wrong)


def test_a_bool_is_no_length(paged_attn, device):
    q, cache = torch.zeros(1, 1, 2, 8, device=device), torch.zeros(1, 4, 2, 8, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    match = "^cache_seqlens: expected a tensor, an int of 32 bits or None, got True$"
    with pytest.raises(ValueError, match=match):
        paged_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=True)
    with pytest.raises(ValueError, match=match):
        paged_attn.kv_paged_write(q, q, cache, cache.clone(), table, True)


@pytest.mark.parametrize("name", ["out", "k_cache", "v_cache"])
def test_views_that_negate(paged_attn, device, name):
    """torch makes such a view of the imaginary part of a conjugate. It may be read, not written."""
    q, new = (torch.ones(1, 1, 2, 8, device=device) for _ in range(2))
    a = {"q": q, "k": new, "v": new.clone(), "cache_seqlens": 2, "out": torch.zeros_like(q)}
    a |= {n: torch.zeros(1, 4, 2, 8, device=device) for n in ("k_cache", "v_cache")}
    view = torch._neg_view(a[name])
    match = f"^{name}: expected a tensor to write into, got a view that negates its memory; use resolve_neg\\(\\)$"
    with pytest.raises(ValueError, match=match):
        paged_attn.flash_attn_with_kvcache(**(a | {name: view}))
    if name != "out":
        where = {"block_table": torch.zeros(1, 1, dtype=torch.int32, device=device), "cache_seqlens": 2}
        caches = {n: a[n] for n in ("k_cache", "v_cache")} | {name: view}
        with pytest.raises(ValueError, match=match):
            paged_attn.kv_paged_write(a["k"], a["v"], **caches, **where)
    assert not a[name].any()
    negative = paged_attn.flash_attn_func(torch._neg_view(q), a["k"], a["v"])
    assert torch.equal(negative, paged_attn.flash_attn_func(-q, a["k"], a["v"]))


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "uint16"])
def test_dtypes_have_their_names(paged_attn, device, name):
    if device == "mps":
        pytest.skip("this device has no such dtypes")
    cache, q = (
        torch.zeros(1, 4, 2, 8, dtype=getattr(torch, name), device=device),
        torch.zeros(1, 1, 2, 8, device=device),
    )
    with pytest.raises(RuntimeError, match=rf"^k_cache: expected .*, got {name}$"):
        paged_attn.flash_attn_with_kvcache(q, cache, cache)


def test_a_q_of_five_dimensions(paged_attn, device):
    """It is named, whatever the sizes of k."""
    q, k = torch.zeros(1, 2, 3, 4, 8, device=device), torch.zeros(2, 3, 4, 8, device=device)
    for module in (paged_attn, paged_attn.fa3):
        with pytest.raises(RuntimeError, match=r"^q: expected .*, got float32 \[1, 2, 3, 4, 8\]$"):
            module.flash_attn_func(q, k, k)


@pytest.mark.parametrize("causal", ["two", "meta", "numpy"])
def test_a_causal_that_says_nothing(paged_attn, device, causal):
    np = pytest.importorskip("numpy")
    value, given = {
        "two": (torch.zeros(2), r"float32 \[2\]"),
        "meta": (torch.zeros(1, device="meta"), r"float32 \[1\]"),
        "numpy": (np.zeros(2), "a value of type ndarray"),
    }[causal]
    refused(
        paged_attn, device, PAGED, f"^causal: expected True or False, got {given}$", lambda a: a.update(causal=value)
    )


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_that_no_float_holds(paged_attn, device, name):
    """10 ** 5000 has no decimal form in Python either."""
    for value, given in ((10**400, "an int of 1329 bits"), (-(10**5000), "an int of 16610 bits")):
        match = f"^{name}: expected a number, got {given}$"
        refused(paged_attn, device, PAGED, match, lambda a, value=value: a.update({name: value}))


def test_scales_that_are_no_number(paged_attn, device):
    np = pytest.importorskip("numpy")
    wrong = {
        r"float32 \[2\]": torch.zeros(2),
        r"complex64 \[\]": torch.tensor(1j),
        "a value of type ndarray": np.zeros(1),
    }
    for given, value in wrong.items():
        match = f"^softmax_scale: expected a number, got {given}$"
        refused(paged_attn, device, PAGED, match, lambda a, value=value: a.update(softmax_scale=value))


NOT_DENSE = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": lambda x: x.flatten(1).to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense(paged_attn, device, kind):
    """Every tensor of every function."""
    if device != "cpu":
        pytest.skip("some of these kinds are of the CPU alone")
    match = "^{}: expected a dense tensor, got a " + kind + " one$"
    for call, good in plain_calls(paged_attn, device).values():
        for name, tensor in good.items():
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                with pytest.raises(ValueError, match=match.format(name)):
                    call(**(good | {name: NOT_DENSE[kind](tensor)}))
    for function, names in MERGING.items():
        for i, name in enumerate(names):
            with pytest.raises(ValueError, match=match.format(name)):
                merging(paged_attn, device, function, lambda a, i=i: a.update({i: NOT_DENSE[kind](a[i])}))


def plain_calls(paged_attn, device):
    """Every function that attends or writes, with its tensors by the names that it has for them."""
    q, new, cache = (torch.zeros(2, n, h, 64, device=device) for n, h in ((3, 4), (3, 2), (8, 2)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 6), (0, 8, 16)))
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    pages = {"k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": 3}
    packed = {"q": q.flatten(0, 1), "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    fa3 = paged_attn.fa3
    return {
        "with_kvcache": (paged_attn.flash_attn_with_kvcache, {"q": q} | pages),
        "fa3.with_kvcache": (fa3.flash_attn_with_kvcache, {"q": q} | pages),
        "func": (paged_attn.flash_attn_func, {"q": q, "k": cache, "v": cache}),
        "fa3.func": (fa3.flash_attn_func, {"q": q, "k": cache, "v": cache}),
        "varlen": (paged_attn.flash_attn_varlen_func, packed | {n: cache.flatten(0, 1) for n in "kv"}),
        "fa3.varlen": (fa3.flash_attn_varlen_func, packed | {n: cache.flatten(0, 1) for n in "kv"}),
        "varlen on pages": (paged_attn.flash_attn_varlen_func, packed | {"k": cache, "v": cache, "block_table": table}),
        "fa3.varlen on pages": (fa3.flash_attn_varlen_func, packed | {"k": cache, "v": cache, "block_table": table}),
        "write": (paged_attn.kv_paged_write, {"k": new, "v": new, "block_table": table} | pages),
    }


REQUIRED = {
    **dict.fromkeys(("with_kvcache", "fa3.with_kvcache"), ("q", "k_cache", "v_cache")),
    **dict.fromkeys(("func", "fa3.func", "varlen", "fa3.varlen"), ("q", "k", "v")),
    **dict.fromkeys(("varlen on pages", "fa3.varlen on pages"), ("q", "k", "v")),
    "write": ("k", "v", "k_cache", "v_cache"),
}


@pytest.mark.parametrize("function", REQUIRED)
def test_what_is_no_tensor(paged_attn, device, function):
    """In place of a required tensor: None and a list, by the name that the function has for it."""
    call, good = plain_calls(paged_attn, device)[function]
    call(**good)
    for name in REQUIRED[function]:
        for value, given in ((None, "None"), ([1, 2], r"\[1, 2\]"), (5, "5"), (iter(()), "a value of type tuple_iter")):
            with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got {given}"):
                call(**(good | {name: value}))


OPTIONAL = {
    "with_kvcache": """k v rotary_cos rotary_sin cache_batch_idx cache_leftpad block_table alibi_slopes cu_seqlens_q
        rotary_seqlens qv q_descale k_descale v_descale s_aux page_table sinks""",
    "fa3.with_kvcache": "cache_batch_idx cache_leftpad page_table qv q_descale sinks",
    "func": "alibi_slopes qv k_descale s_aux sinks",
    "varlen": "seqused_k cu_seqlens_q cu_seqlens_k block_table page_table v_descale sinks",
    "fa3.varlen": "cu_seqlens_q cu_seqlens_k page_table qv sinks",
    "varlen on pages": "cu_seqlens_q cu_seqlens_k seqused_k",
    "fa3.varlen on pages": "cu_seqlens_q cu_seqlens_k seqused_k",
    "write": "cache_seqlens block_table cu_seqlens_k_new slot_mapping k_descale v_descale",
}


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, names in OPTIONAL.items() for name in names.split()]
)
def test_a_list_in_place_of_an_optional_tensor(paged_attn, device, function, name):
    call, good = plain_calls(paged_attn, device)[function]
    if name == "page_table":
        good.pop("block_table", None)
    if name == "rotary_seqlens":  # which asks for nothing alone
        good |= {n: torch.zeros(2, 3, 2, 64, device=device) for n in "kv"}
        good |= {n: torch.zeros(8, 16, device=device) for n in ("rotary_cos", "rotary_sin")}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got \[5, 5\]$"):
        call(**(good | {name: [5, 5]}))


SCALARS = {
    "softmax_scale": ("x", "a number, got 'x'"),
    "softcap": ("x", "a number, got 'x'"),
    "num_splits": (1.5, "an int of 64 bits, got 1.5"),
    "attention_chunk": (2**63, f"an int of 64 bits, got {2**63}"),
    "rotary_interleaved": ("x", "True or False, got 'x'"),
    "cache_seqlens": (1.5, "a tensor, an int of 32 bits or None, got 1.5"),
    "out": (1.5, "a tensor, got 1.5"),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_another_type(paged_attn, device, name):
    value, message = SCALARS[name]
    call, good = plain_calls(paged_attn, device)["with_kvcache"]
    with pytest.raises(ValueError, match=f"^{name}: expected {re.escape(message)}$"):
        call(**(good | {"sinks": torch.zeros(4, device=device), name: value}))


SWITCHES = {
    "softcap": "a number",
    "num_splits": "an int of 64 bits",
    "attention_chunk": "an int of 64 bits",
    "deterministic": "True or False",
    "return_softmax_lse": "True or False",
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("function", [name for name in REQUIRED if name != "write"])
def test_what_is_neither_on_nor_off(paged_attn, device, function, name):
    """By name, alone and beside another feature. One element says it."""
    np = pytest.importorskip("numpy")
    call, good = plain_calls(paged_attn, device)[function]
    wrong = {
        r"float32 \[2\]": torch.zeros(2, device=device),
        r"int64 \[0\]": torch.zeros(0, dtype=torch.int64, device=device),
        r"float32 \[1\]": torch.zeros(1, device="meta"),
        "a value of type ndarray": np.zeros(2),
    }
    others = {}, {"sinks": torch.zeros(4, device=device)}, {"softcap": 2.0} if name != "softcap" else {"num_splits": 1}
    for (given, value), other in itertools.product(wrong.items(), others):
        with pytest.raises(ValueError, match=f"^{name}: expected {SWITCHES[name]}, got {given}$"):
            call(**(good | other | {name: value}))
    for value in (0, 1):
        results = [call(**(good | {name: x})) for x in (value, torch.tensor([value], device=device))]
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("function", ["func", "varlen", "fa3.func", "fa3.varlen"])
def test_arguments_of_flash_attention_that_are_neither_on_nor_off(paged_attn, device, function):
    np = pytest.importorskip("numpy")
    call, good = plain_calls(paged_attn, device)[function]
    for value in (torch.zeros(2, device=device), torch.zeros(1, device="meta"), np.zeros(2)):
        with pytest.raises(ValueError, match=r"^return_attn_probs: expected True or False, got "):
            call(**good, return_attn_probs=value)
        if "fa3" not in function:
            with pytest.raises(ValueError, match=r"^dropout_p: expected 0\.0 \(forward only, for inference\), got "):
                call(**good, dropout_p=value)


@pytest.mark.parametrize("value", [128, (1, 0, 2), (1,), (1.5, 0), (0, "x"), (2**63, 0), (0, -(2**63) - 1)], ids=str)
@pytest.mark.parametrize("function", [name for name in REQUIRED if name != "write"])
def test_windows_that_are_no_pair_of_ints(paged_attn, device, function, value):
    call, good = plain_calls(paged_attn, device)[function]
    match = rf"^window_size: expected \(left, right\), each an int of 64 bits or None, got {re.escape(str(value))}$"
    if value == (1,):
        match = match.replace(",\\)", "\\)")
    with pytest.raises(ValueError, match=match):
        call(**(good | {"window_size": value}))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, 2**100], ids=str)
@pytest.mark.parametrize(
    ("function", "name"),
    [("with_kvcache", "cache_seqlens"), ("fa3.with_kvcache", "cache_seqlens"), ("varlen on pages", "seqused_k"),
     ("fa3.varlen on pages", "seqused_k"), ("write", "cache_seqlens")],
)  # fmt: skip
def test_int_lengths_that_int32_cannot_hold(paged_attn, device, function, name, value):
    call, good = plain_calls(paged_attn, device)[function]
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor, an int of 32 bits or None, got {value}$"):
        call(**(good | {name: value}))


@pytest.mark.parametrize("lengths", ["int", "tensor"])
@pytest.mark.parametrize("shape", [(), (0,), (1, 3)], ids=str)
@pytest.mark.parametrize("function", ["with_kvcache", "fa3.with_kvcache", "write", "varlen on pages"])
def test_cu_seqlens_without_entries(paged_attn, device, function, shape, lengths):
    """The batch size is read from it, so it must have one."""
    call, good = plain_calls(paged_attn, device)[function]
    name = "cu_seqlens_k_new" if function == "write" else "cu_seqlens_q"
    for tokens in ("k", "v") if function == "write" else ("q",):
        good[tokens] = good[tokens].reshape(6, -1, 64)
    if function != "varlen on pages":
        good["cache_seqlens"] = 3 if lengths == "int" else torch.zeros(2, dtype=torch.int32, device=device)
    good[name] = torch.zeros(shape, dtype=torch.int32, device=device)
    given = re.escape(f"int32 {list(shape)}")
    with pytest.raises(ERRORS, match=rf"^{name}: expected int32 \[batch \+ 1\], got {given}$"):
        call(**good)


@pytest.mark.parametrize("function", ["with_kvcache", "func", "varlen", "varlen on pages"])
@pytest.mark.parametrize("empty", ["q and k", "v", "all"])
def test_head_dim_0(paged_attn, device, function, empty):
    """With the default scale, which head_dim 0 does not have."""
    call, good = plain_calls(paged_attn, device)[function]
    for name in REQUIRED[function]:
        if empty == "all" or name.startswith("v") == (empty == "v"):
            good[name] = good[name][..., :0].contiguous()
    sizes = {"q and k": "(0, 64)", "v": "(64, 0)", "all": "(0, 0)"}[empty]
    with pytest.raises(ERRORS, match=f"^head_dim and head_dim_v: expected 1 to 256 each, .*, got {re.escape(sizes)}$"):
        call(**good)


def test_plan_without_lengths(paged_attn):
    for module in (paged_attn, paged_attn.fa3):
        with pytest.raises(ValueError, match=r"^cache_seqlens: expected int32 \[batch\], got None$"):
            module.get_scheduler_metadata(1, 1, 1, 1, 1, 64, None)


# argument, its shape and dtype, the whole message
MERGES = {
    "out_b": ((2, 3, 4, 32), torch.float32, "out_b: expected shape (2, 3, 4, 64) like out_a, got (2, 3, 4, 32)"),
    "lse_a": ((2, 3, 4), torch.float32, "lse_b: expected shape (2, 3, 4) like lse_a, got (2, 4, 3)"),
    "lse_b": ((2, 4), torch.float32, "lse_b: expected shape (2, 4, 3) like lse_a, got (2, 4)"),
    "out": ((2, 3, 4, 32), torch.float32, "out: expected torch.float32 (2, 3, 4, 64), got torch.float32 (2, 3, 4, 32)"),
    "lse": ((2, 4, 3), torch.float64, "lse: expected torch.float32 (2, 4, 3), got torch.float64 (2, 4, 3)"),
}


@pytest.mark.parametrize("name", MERGES)
def test_merge_attn_states(paged_attn, device, name):
    shape, dtype, message = MERGES[name]
    out, lse = torch.zeros(2, 3, 4, 64, device=device), torch.zeros(2, 4, 3, device=device)
    arguments = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    arguments[name] = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(ERRORS, match=f"^{re.escape(message)}$"):
        paged_attn.merge_attn_states(**arguments)


# The two functions that merge, and how each calls values and lse of the parts and of the union.
MERGING = {
    "merge_attn_states": ("out_a", "lse_a", "out_b", "lse_b", "out", "lse"),
    "merge_state_v2": ("v_a", "s_a", "v_b", "s_b", "v_merged", "s_merged"),
}


def merging(paged_attn, device, function, change):
    """Calls it with three tokens of four heads; change(arguments by their place) makes the call bad."""
    fa3 = function == "merge_state_v2"
    arguments = {i: torch.zeros((3, 4) if fa3 else (4, 3), device=device) for i in (1, 3, 5)}
    arguments |= {i: torch.zeros(3, 4, 64, device=device) for i in (0, 2, 4)}
    change(arguments)
    named = {MERGING[function][i]: x for i, x in arguments.items()}
    return getattr(paged_attn.fa3 if fa3 else paged_attn, function)(**named)


@pytest.mark.parametrize("function", MERGING)
@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64])
def test_dtypes_of_parts(paged_attn, device, function, i, dtype):
    """Values are what attention returns, an lse is float32."""
    if device == "mps" and dtype in (torch.float64, torch.complex64):
        pytest.skip("this device has no such dtype")
    change = lambda a: a.update({i: a[i].to(dtype)})  # noqa: E731
    if i % 2 == 0 and dtype in (torch.float16, torch.bfloat16):
        merging(paged_attn, device, function, lambda a: (change(a), a.pop(4)))
        return
    expected = "float32" if i % 2 else "float32, float16 or bfloat16"
    name, given = MERGING[function][i], str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^{name}: expected {expected}, got {given} \[\d, \d"):
        merging(paged_attn, device, function, change)


@pytest.mark.parametrize("function", MERGING)
@pytest.mark.parametrize("i", range(6))
def test_parts_that_nothing_can_be_made_of(paged_attn, device, function, i):
    name = MERGING[function][i]
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor.*, got \[1\]$"):
        merging(paged_attn, device, function, lambda a: a.update({i: [1]}))
    if i < 4:
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got None$"):
            merging(paged_attn, device, function, lambda a: a.update({i: None}))
    if i > 0:
        match = rf"^{name}: expected a tensor on the device of {MERGING[function][0]} \(.*\), got one on meta$"
        with pytest.raises(ValueError, match=match):
            merging(paged_attn, device, function, lambda a: a.update({i: a[i].to("meta")}))
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor that asks for no gradient "):
        merging(paged_attn, device, function, lambda a: a.update({i: a[i].requires_grad_()}))


@pytest.mark.parametrize("function", MERGING)
@pytest.mark.parametrize("i", [4, 5])
@pytest.mark.parametrize("how", ["expanded", "overlapping"])
def test_merge_into_a_tensor_that_overlaps_itself(paged_attn, device, function, i, how):
    """Refused before the other target is written."""
    strides = {4: (0, 64, 1), 5: (0, 1)} if how == "expanded" else {4: (130, 32, 1), 5: (1, 1)}
    targets = {}

    def change(a):
        memory = torch.zeros(1000, device=device)
        targets.update({j: memory.as_strided(a[j].shape, strides[j]) if j == i else a[j] for j in (4, 5)})
        a.update({j: torch.ones_like(a[j]) for j in range(4)})
        a.update(targets)

    name = MERGING[function][i]
    with pytest.raises(ValueError, match=rf"^{name}: expected memory for every element, got strides \(.*\) for \("):
        merging(paged_attn, device, function, change)
    assert not any(x.any() for x in targets.values())


@pytest.mark.parametrize("function", MERGING)
def test_merge_into_targets_that_share_memory(paged_attn, device, function):
    """One element is too much, to lie between each other is fine."""
    width = 64 + 1  # a row of values, and its lse behind it

    def merged(column, dtype=torch.float32):
        memory = torch.zeros(3 * 4 * width, device=device)
        rows = memory.view(3, 4, width)
        lse = rows[..., column] if function == "merge_state_v2" else rows[..., column].T
        out = memory.view(dtype).view(3, 4, -1)[..., :64]

        def change(a):
            a.update(
                {j: torch.randn(a[j].shape, generator=torch.Generator().manual_seed(j)).to(device) for j in range(4)}
            )
            a.update({j: a[j].to(dtype) for j in (0, 2)})
            a.update({4: out, 5: lse})

        try:
            return merging(paged_attn, device, function, change), merging(
                paged_attn, device, function, lambda a: (change(a), a.pop(4), a.pop(5))
            )
        except ValueError:
            assert not memory.any()
            raise

    _, _, _, _, out, lse = MERGING[function]
    for column, dtype in ((64, torch.float32), (32, torch.bfloat16), (64, torch.bfloat16)):
        for ours, expected in zip(*merged(column, dtype)):
            assert torch.equal(ours, expected)
    for column, dtype in ((63, torch.float32), (0, torch.float32), (31, torch.bfloat16)):
        with pytest.raises(ValueError, match=f"^{lse}: expected memory of its own, got memory of {out}$"):
            merged(column, dtype)


@pytest.mark.parametrize("function", MERGING)
def test_merge_into_tensors_of_inference_mode(paged_attn, device, function):
    """Outside of that mode too, as attention writes them."""
    with torch.inference_mode():
        targets = merging(paged_attn, device, function, lambda a: None)

    def change(a):
        a.update({j: torch.ones_like(a[j]) for j in range(4)})
        a.update(zip((4, 5), targets))

    merging(paged_attn, device, function, change)
    assert (targets[0] == 1).all() and torch.allclose(targets[1], torch.tensor(1 + math.log(2), device=device))


def test_merge_into_an_expanded_tensor_without_elements(paged_attn, device):
    """There is nothing that two elements could share."""
    out, lse = torch.zeros(2, 0, 3, 4, device=device), torch.zeros(2, 3, 0, device=device)
    targets = {"out": out[:1].expand_as(out), "lse": lse[:1].expand_as(lse)}
    merged = paged_attn.merge_attn_states(out, lse, out, lse, **targets)
    assert [x.shape for x in merged] == [out.shape, lse.shape]


def test_merge_of_parts_without_heads(paged_attn, device):
    out, lse = torch.zeros(4, 64, device=device), torch.zeros(4, device=device)
    message = "out_a: expected a tensor of 3 or 4 dimensions, got shape (4, 64)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        paged_attn.merge_attn_states(out, lse, out, lse)


def test_merge_attn_states_of_another_layout(paged_attn, device):
    """(tokens, heads) is not ours; where both are equal nobody could tell."""
    out, lse = torch.zeros(5, 4, 64, device=device), torch.zeros(5, 4, device=device)
    message = "lse_a: expected (batch, q_heads, seqlen_q) or (q_heads, total_q) for out_a (5, 4, 64), got (5, 4)"
    with pytest.raises(ERRORS, match=f"^{re.escape(message)}$"):
        paged_attn.merge_attn_states(out, lse, out, lse)


def test_new_keys_beside_packed_ones(paged_attn, device):
    """No function asks for both, but an operator can be called directly: packed keys have no room for new ones."""
    cache = torch.full((2, 10, 2, 64), torch.nan, device=device)
    q, out, k = (torch.zeros(n, h, 64, device=device) for n, h in ((4, 4), (4, 4), (2, 2)))
    arguments = {
        "q": q, "k_cache": cache[0], "v_cache": cache[1], "out": out, "lse": None, "block_table": None, "k": k, "v": k,
        "cache_seqlens": int32(4, 4).to(device), "softmax_scale": 1.0, "max_seqlen_q": 2,
        "cu_seqlens_q": int32(0, 2, 4).to(device), "cu_seqlens_k": int32(0, 5, 10).to(device),
        "cu_seqlens_k_new": int32(0, 1, 2).to(device),
    }  # fmt: skip
    match = r"^cu_seqlens_k: expected None with new keys \(k and v\), got a tensor$"
    with pytest.raises(RuntimeError, match=match):
        getattr(torch.ops, paged_attn._ops.ops.name).flash_attn_with_kvcache_append(**arguments)
    assert cache.isnan().all()


def test_a_new_token_without_a_page_that_no_query_sees(paged_attn, device):
    """The window hides the first page, but the new tokens are written to it."""
    refused(
        paged_attn,
        device,
        Case(batch=1, lens=(0,), append=32, page_size=16, window=(3, 0)),
        r"^block_table: expected page numbers in \[0, num_pages = \d+\), got 99 for batch entry 0, page 0$",
        lambda arguments: arguments["block_table"].__setitem__((0, 0), 99),
        by_value=True,
    )


@pytest.mark.runs_tests
def test_again_with_checks(device):
    """PAGED_ATTN_CHECK is read once, so the other way needs a process of its own."""
    if values_are_checked(device):
        pytest.skip("values are checked already")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", Path(__file__).name]
    options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    again = subprocess.run(command, env=os.environ | {"PAGED_ATTN_CHECK": "1"}, **options)
    assert again.returncode == 0, again.stdout[-6000:]
