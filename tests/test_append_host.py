"""The kernels that write new tokens and rotate, on the host; see tests/blocks.py. Every byte of the caches is compared
with the reference, guards and unused slots included."""

import ctypes
import random

import cases
import pytest
import reference
import torch
from blocks import HOST, compile_kernels, numbers_of
from cases import Case
from compare import assert_caches, assert_same_bytes, assert_within, one_thread

FP8 = ["float8_e4m3fn", "float8_e5m2"]
GUARD = 1024  # numbers before and behind the rotated queries
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
TENSORS = [
    *("q", "rotated_q", "k", "v", "k_cache", "v_cache", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("slot_mapping", "block_table", "cache_batch_idx", "k_descale", "v_descale"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens"),
]
NUMBERS = [
    *("batch", "q_heads", "kv_heads", "head_dim", "head_dim_v", "total_q", "max_q_len", "seqlen_new", "total_new"),
    *("dtype", "kv_dtype"),
    *(f"{name}_stride_{which}" for name in ("q", "k", "v") for which in ("batch", "token", "head")),
    *(f"{name}_cache_stride_{which}" for name in ("k", "v") for which in ("page", "slot", "head")),
    *(f"{name}_descale_stride_{which}" for name in ("k", "v") for which in ("batch", "head")),
    *("num_pages", "page_size", "max_pages", "table_rows", "block_table_stride"),
    *("rotary_cos_stride", "rotary_sin_stride", "rotary_len", "rotary_dim", "rotary_interleaved"),
    *("window_left", "window_right", "chunk", "processors", "seed"),
]


class AppendCall(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in TENSORS + NUMBERS]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("append")
    places = "TokenPlaces (&places)[kTokens] = *reinterpret_cast<TokenPlaces (*)[kTokens]>(block_raw());"
    in_shared_memory = [("append.cuh", "__shared__ TokenPlaces places[kTokens];", places)]
    sources = [root / "paged_decode_cuda/append.cu", HOST / "append.cpp"]
    return compile_kernels(root, sources, in_shared_memory, "append")


def write(library, call, **given):
    """Makes the call, with what is given in the place of the case's arguments. What the library says of it (`copies`,
    `released`), and the rotated queries."""
    kwargs, case = dict(zip(("k_cache", "v_cache"), call.caches())) | call.kwargs | given, call.case
    k, v, q, k_cache = (kwargs[name] for name in ("k", "v", "q", "k_cache"))
    memory = torch.full((q.numel() + 2 * GUARD,), torch.nan, dtype=torch.float32).to(q.dtype)
    rotated = memory[GUARD:-GUARD].view(q.shape) if case.rotary_dim else None
    tensors = kwargs | {"rotated_q": rotated}
    c, table = AppendCall(), kwargs.get("block_table")
    for name in TENSORS:
        tensor = tensors.get(name)
        setattr(c, name, 0 if tensor is None else tensor.data_ptr() or 1)
    for name in ("q", "k", "v"):
        strides = (0, *tensors[name].stride()) if tensors[name].dim() == 3 else tensors[name].stride()
        for which, stride in zip(("batch", "token", "head"), strides):
            setattr(c, f"{name}_stride_{which}", stride)
    for name in ("k_cache", "v_cache"):
        for which, stride in zip(("page", "slot", "head"), tensors[name].stride()):
            setattr(c, f"{name}_stride_{which}", stride)
    for name in ("k_descale", "v_descale"):
        if name in kwargs:
            for which, stride in zip(("batch", "head"), kwargs[name].stride()):
                setattr(c, f"{name}_stride_{which}", stride)
    packed, cos, window = k.dim() == 3, kwargs.get("rotary_cos"), kwargs.get("window_size", (-1, -1))
    for name, value in {
        "batch": case.batch, "q_heads": q.shape[-2], "kv_heads": k.shape[-2], "head_dim": k.shape[-1],
        "head_dim_v": v.shape[-1], "total_q": q.shape[:-2].numel(), "max_q_len": kwargs.get("max_q_len", case.q_len),
        "seqlen_new": 0 if packed else k.shape[1], "total_new": kwargs.get("total_new", k.shape[:-2].numel()),
        "dtype": DTYPES.index(k.dtype), "kv_dtype": DTYPES.index(k_cache.dtype),
        "num_pages": k_cache.shape[0], "page_size": k_cache.shape[1],
        "max_pages": 0 if table is None else table.shape[1], "table_rows": 0 if table is None else table.shape[0],
        "block_table_stride": 0 if table is None else table.stride(0),
        "rotary_cos_stride": 0 if cos is None else cos.stride(0),
        "rotary_sin_stride": 0 if cos is None else kwargs["rotary_sin"].stride(0),
        "rotary_len": 0 if cos is None else cos.shape[0], "rotary_dim": case.rotary_dim,
        "rotary_interleaved": case.rotary_interleaved,
        "window_left": window[0], "window_right": 0 if case.causal else window[1], "chunk": case.chunk,
        "processors": kwargs.get("processors", 4), "seed": random.Random(str(case)).randrange(1 << 30),
    }.items():  # fmt: skip
        setattr(c, name, value)
    numbers = numbers_of(("copies", "released"))
    said = library.append(ctypes.byref(c), ctypes.byref(numbers)).decode()
    assert said == "", said
    assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()
    return numbers, rotated


@one_thread()
def judge_queries(call, rotated):
    """Within one rounding of what the reference rotates."""
    kwargs, case = call.kwargs, call.case
    cos, sin, interleaved = kwargs["rotary_cos"], kwargs["rotary_sin"], kwargs["rotary_interleaved"]
    local = case.causal or case.window != (-1, -1) or case.chunk > 0
    bases = kwargs.get("rotary_seqlens", kwargs["cache_seqlens"]).tolist()
    cu, dtype = kwargs.get("cu_seqlens_q"), kwargs["q"].dtype
    expected = torch.full(rotated.shape, torch.nan, dtype=torch.float64)
    for base, into, q in zip(bases, *(reference.per_request(x, cu) for x in (expected, kwargs["q"]))):
        into[:] = reference.rotate(q, [base + local * t for t in range(len(q))], cos, sin, interleaved)
    size = kwargs["q"].double().nan_to_num().abs().amax(-1, keepdim=True)
    bound = torch.finfo(dtype).eps * expected.abs() + 4 * torch.finfo(torch.float32).eps * size
    assert_within("rotated q", rotated, expected, bound)


def check(library, case, given=None, expected=None):
    """Makes the call of a case and looks at every byte of the caches. given: arguments that differ from those of the
    case; expected: those that differ in what the reference gets."""
    call, before = cases.build(case), cases.build(case)
    numbers, rotated = write(library, call, **(given or {}))
    before.kwargs |= (given or {}) | (expected or {})
    assert_caches(case, call.storage, before, before.kwargs)
    if rotated is not None:
        judge_queries(before, rotated)
    return numbers


def slots_of(call):
    """The slot of each new token, as the table has it."""
    kwargs, slots = call.kwargs, []
    for b, (old, count) in enumerate(zip(kwargs["cache_seqlens"].tolist(), call.seqlens_new)):
        row = int(kwargs["cache_batch_idx"][b]) if call.case.batch_idx else b
        for position in range(old, old + count):
            page, slot = reference.place(call.caches()[0], kwargs.get("block_table"), row, [position])
            slots.append(int(page) * call.caches()[0].shape[1] + int(slot))
    return torch.tensor(slots, dtype=torch.int64)


COPIED = {  # rows of whole pieces of 16 bytes
    "one": {},
    "fp32": {"dtype": "float32", "kv_heads": 1},
    "fp16_page_1": {"dtype": "float16", "page_size": 1},
    "page_3": {"append": 40, "page_size": 3},
    "packed": {"append": 9, "append_varlen": True},
    "packed_many": {"append": 60, "append_varlen": True, "page_size": 256},
    "many": {"append": 17, "batch": 3, "lens": (0, 5, 16)},
    "many_narrow": {"append": 20, "head_dim": 8, "head_dim_v": 8, "kv_heads": 1, "q_heads": 2},
    "many_wide": {"append": 20, "head_dim": 512, "kv_heads": 3, "q_heads": 3},
    "wide": {"append": 2, "head_dim": 576, "head_dim_v": 512, "kv_heads": 4},
    "values_narrower": {"append": 20, "head_dim": 192, "head_dim_v": 128, "q_heads": 6, "kv_heads": 3},
    "heads_first": {"append": 12, "layout": "heads_first"},
    "interleaved": {"append": 12, "layout": "interleaved"},
    "contiguous": {"append": 12, "page_size": 0, "batch_idx": True},
    "batch_idx": {"append": 12, "batch_idx": True},
    "e4m3": {"append": 3, "kv_dtype": FP8[0], "descale": "full"},
    "e4m3_many": {"append": 12, "kv_dtype": FP8[0], "descale": "full"},
    "e5m2_fp16": {"append": 12, "kv_dtype": FP8[1], "dtype": "float16", "descale": "full", "head_dim_v": 32},
    "e5m2_shared": {"append": 12, "kv_dtype": FP8[1], "descale": "shared", "append_varlen": True, "page_size": 3},
    "e4m3_no_descale": {"append": 12, "kv_dtype": FP8[0], "dtype": "float16"},
    "bytes": {"append": 12, "dtype": FP8[0], "kv_dtype": FP8[0], "descale": "full"},
}
PAIRS = {  # two elements at a time
    "odd_dims": {"append": 7, "append_varlen": True, "head_dim": 59, "head_dim_v": 33},
    "one_dim": {"head_dim": 1, "dtype": "float32"},
    "odd_values": {"head_dim_v": 20},
    "odd_strides": {"layout": "odd_strides", "wide_q": True},
    "odd_strides_fp32": {"append": 5, "layout": "odd_strides", "dtype": "float32", "page_size": 3},
    "slices": {"append": 5, "append_varlen": True, "wide_q": True, "dtype": "float32"},
    "many_blocks": {"append": 2, "head_dim": 511, "head_dim_v": 301, "kv_heads": 3, "q_heads": 3, "dtype": "float16"},
    "contiguous": {"append": 5, "page_size": 0, "batch_idx": True, "head_dim": 30},
    "fp32_to_e4m3": {"append": 5, "dtype": "float32", "kv_dtype": FP8[0], "descale": "full"},
    "fp32_to_e5m2": {"append": 5, "dtype": "float32", "kv_dtype": FP8[1], "descale": "shared"},
    "e4m3_odd": {"append": 5, "kv_dtype": FP8[0], "descale": "full", "layout": "odd_strides"},
    "e5m2_fp16": {"append": 5, "kv_dtype": FP8[1], "dtype": "float16", "head_dim": 28},
    "bytes": {"append": 5, "dtype": FP8[1], "kv_dtype": FP8[1], "descale": "full", "head_dim": 27},
}
CASES = [(True, fields) for fields in COPIED.values()] + [(False, fields) for fields in PAIRS.values()]
NAMES = [*(f"copies-{name}" for name in COPIED), *(f"pairs-{name}" for name in PAIRS)]


@pytest.mark.parametrize("processors", [1, 100])  # many tokens for them, or few
@pytest.mark.parametrize("copies, fields", CASES, ids=NAMES)
def test_writes(library, copies, fields, processors):
    numbers = check(library, Case(**({"append": 3} | fields)), {"processors": processors})
    assert bool(numbers.copies) == copies


def spread(x, dim, gap):
    """x with so many numbers more between the entries of a dimension; dimension 3: before all of them."""
    strides, step = [1] * 4, 1
    for d in range(3, -1, -1):
        strides[d] = step + gap * (d == dim < 3)
        step = -(-strides[d] * x.shape[d] // 16) * 16
    y = torch.full((step + gap,), torch.nan).to(x.dtype).as_strided(x.shape, strides, gap * (dim == 3))
    bits = reference.BITS[x.itemsize]
    y.view(bits).copy_(x.view(bits))
    return y


@pytest.mark.parametrize("kv_dtype", ["", FP8[0]])
@pytest.mark.parametrize("gap", [4, 8])
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_strides(library, name, dim, gap, kv_dtype):
    """Rows are copied if each of them begins at a whole piece of 16 bytes, or of 8 where they become bytes."""
    call = cases.build(Case(append=5, kv_dtype=kv_dtype, head_dim_v=48))
    tensors = dict(zip(("k_cache", "v_cache"), call.caches())) | {name: call.kwargs[name] for name in "kv"}
    tensors[name] = spread(tensors[name], dim, gap)
    expected = tensors["k_cache"].clone(), tensors["v_cache"].clone()
    names = "block_table", "cache_seqlens"
    reference.append(tensors["k"], tensors["v"], *expected, *(call.kwargs[n] for n in names))
    numbers, _ = write(library, call, **tensors)
    assert bool(numbers.copies) == (gap == 8 and (dim < 3 or name in ("k", "v") or not kv_dtype))
    for actual, wanted in zip((tensors["k_cache"], tensors["v_cache"]), expected):
        assert_same_bytes(name, actual, wanted)


@pytest.mark.parametrize("dims", [(64, 20), (20, 64)])
def test_rows_that_are_no_whole_pieces(library, dims):
    """Though each of them begins at one."""
    call = cases.build(Case(append=5, head_dim=dims[0], head_dim_v=dims[1]))
    tensors = dict(zip(("k_cache", "v_cache"), call.caches())) | {name: call.kwargs[name] for name in "kv"}
    tensors = {name: spread(x, 2, 0) if x.shape[-1] == 20 else x for name, x in tensors.items()}
    expected = tensors["k_cache"].clone(), tensors["v_cache"].clone()
    names = "block_table", "cache_seqlens"
    reference.append(tensors["k"], tensors["v"], *expected, *(call.kwargs[n] for n in names))
    numbers, _ = write(library, call, **tensors)
    assert not numbers.copies
    for actual, wanted in zip((tensors["k_cache"], tensors["v_cache"]), expected):
        assert_same_bytes("cache", actual, wanted)


@pytest.mark.parametrize("skipped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("copies, fields", CASES[::3], ids=NAMES[::3])
def test_slot_mapping(library, copies, fields, skipped):
    """Neither table nor lengths are looked at. Negative slots, and those behind the cache, skip their tokens."""
    case = Case(**({"append": 13} | fields))
    call = cases.build(case)
    slots, cache = slots_of(call), call.caches()[0]
    skip = torch.rand(len(slots), generator=torch.Generator().manual_seed(1)) < skipped
    behind = cache.shape[0] * cache.shape[1]
    nowhere = torch.tensor([-1, -(2**40), behind, behind + 3, 2**31, 2**31 + 5, 2**40])
    given = slots.where(~skip, nowhere[torch.arange(len(slots)) % len(nowhere)])
    given_tables = {name: None for name in ("block_table", "cache_seqlens", "cache_batch_idx") if not skipped}
    call, before = cases.build(case), cases.build(case)
    numbers, _ = write(library, call, slot_mapping=given, **given_tables)
    assert_caches(case, call.storage, before, before.kwargs | {"slot_mapping": slots.where(~skip, -1)})
    assert bool(numbers.copies) == copies


@pytest.mark.parametrize("head_dim", [64, 30])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_fewer_slots_than_tokens(library, head_dim, tokens):
    case = Case(batch=1, lens=(0,), append=52, head_dim=head_dim)
    slots = slots_of(cases.build(case))
    expected = slots.where(torch.arange(len(slots)) < tokens, -1)
    given = {"slot_mapping": slots[:tokens], "total_new": tokens}
    check(library, case, given, {"slot_mapping": expected})


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("head_dim", [64, 30])
@pytest.mark.parametrize("processors", [1, 100])
@pytest.mark.parametrize("end", [-1, 3])
def test_tokens_of_no_request(library, head_dim, processors, slots, end):
    """Those before the first request and behind the last one are not written, not even to a slot of their own. Nor are
    tokens that cu_seqlens_k_new promises and k does not have."""
    case = Case(batch=3, lens=(5, 0, 17), append=13, append_varlen=True, head_dim=head_dim, seed=5)
    call = cases.build(case)
    total, cache = call.kwargs["k"].shape[0], call.caches()[0]
    cu = call.kwargs["cu_seqlens_k_new"] + torch.tensor([2, 0, 0, end]).int()
    existing = cu.clamp(max=total)
    assert existing[3] - existing[2] > 1 and 1 <= total % 8 <= 5
    given, expected = {"cu_seqlens_k_new": cu, "processors": processors}, {"cu_seqlens_k_new": existing}
    if slots:
        every = torch.randperm(cache.shape[0] * cache.shape[1], generator=torch.Generator().manual_seed(3))
        given["slot_mapping"] = every[:total]
        expected["slot_mapping"] = every[2 : existing[3]]
    check(library, case, given, expected)


def in_slots(call, place_of):
    """The slot of each new token by place_of(b, position), and -1 where that is None."""
    return torch.tensor(
        [
            -1 if (place := place_of(b, old + t)) is None else place
            for b, old in enumerate(call.kwargs["cache_seqlens"].tolist())
            for t in range(call.case.append)
        ]
    )


@pytest.mark.parametrize("head_dim", [64, 30])
@pytest.mark.parametrize("processors", [1, 100])
def test_places_that_do_not_exist(library, head_dim, processors):
    """Pages that the cache does not have, positions that the table does not reach, rows that the table does not have:
    nothing is written there, and the other tokens of the request are."""
    case = Case(batch=7, lens=(13, 30, 20, 6, 9, 9, 31), append=9, page_size=4, batch_idx=True, head_dim=head_dim)
    call = cases.build(case)
    rows, table, cache = call.kwargs["cache_batch_idx"], call.kwargs["block_table"], call.caches()[0]
    table[rows[0], 4], table[rows[1], 8], table[rows[1], 9] = -1, cache.shape[0], 2**31 - 1
    table.as_strided((len(table), 1), table.stride(), table.shape[1])[:] = 0  # behind the table
    lens = call.kwargs["cache_seqlens"].clone()
    lens[2], lens[3] = 4 * table.shape[1] - 5, -4  # the table ends after 5 tokens; the first token begins 4 later
    lens[6] = 2**31 - 3  # no number of 32 bits for some of them
    bad_rows = rows.clone()
    bad_rows[4], bad_rows[5] = -1, table.shape[0]
    table[rows[2], -2:] = torch.tensor([x for x in range(cache.shape[0]) if not (table == x).any()][:2])

    def place_of(b, position):
        row = int(bad_rows[b])
        if not (0 <= row < table.shape[0] and 0 <= position < 4 * table.shape[1]):
            return None
        page = int(table[row, position // 4])
        return page * 4 + position % 4 if 0 <= page < cache.shape[0] else None

    given = {"cache_batch_idx": bad_rows, "cache_seqlens": lens, "block_table": table, "processors": processors}
    call.kwargs |= given
    slots = in_slots(call, place_of)
    assert (slots.view(7, 9) >= 0).sum(1).tolist() == [5, 2, 5, 5, 0, 0, 0]
    check(library, case, given, {"slot_mapping": slots})


@pytest.mark.parametrize("head_dim", [64, 30])
def test_places_that_a_contiguous_cache_does_not_have(library, head_dim):
    case = Case(batch=4, lens=(13, 30, 20, 6), append=9, page_size=0, batch_idx=True, head_dim=head_dim)
    call = cases.build(case)
    pages, page_size = call.caches()[0].shape[:2]
    lens, rows = call.kwargs["cache_seqlens"].clone(), call.kwargs["cache_batch_idx"].clone()
    lens[0], lens[1], rows[2], rows[3] = page_size - 4, -2, pages, -1
    given = {"cache_seqlens": lens, "cache_batch_idx": rows}
    call.kwargs |= given

    def place_of(b, position):
        return int(rows[b]) * page_size + position if 0 <= rows[b] < pages and 0 <= position < page_size else None

    slots = in_slots(call, place_of)
    assert (slots.view(4, 9) >= 0).sum(1).tolist() == [4, 7, 0, 0]
    check(library, case, given, {"slot_mapping": slots})


@pytest.mark.parametrize("page_size", [1, 16])
def test_positions_of_more_than_31_bits(library, page_size):
    case = Case(batch=2, lens=(5, 9), append=9, page_size=page_size)
    lens = torch.tensor([5, 2**31 - 4], dtype=torch.int32)
    slots = slots_of(cases.build(case)).where(torch.arange(18) < 9, -1)
    check(library, case, {"cache_seqlens": lens}, {"slot_mapping": slots})


def judge_numbers(library, case, k, v, **given):
    """New tokens of chosen numbers. The sign of a NaN in 8 bits says nothing."""
    call, before = cases.build(case), cases.build(case)
    for kwargs in (call.kwargs, before.kwargs):
        kwargs |= {"k": k, "v": v} | given
    write(library, call)
    expected = tuple(s.clone() for s in before.storage)
    k_cache, v_cache = before.caches(expected)
    names = ("k", "v", "block_table", "cache_seqlens", "k_descale", "v_descale")
    reference.append(k_cache=k_cache, v_cache=v_cache, **{n: before.kwargs[n] for n in names if n in before.kwargs})
    for actual, wanted in zip(call.storage, expected):
        bits = reference.BITS[wanted.itemsize]
        shown = torch.full((), -1, dtype=torch.int16).to(bits)
        if wanted.itemsize == 1 and case.dtype != case.kv_dtype:
            shown = torch.where(actual.isnan() & wanted.isnan(), 0x7F, 0xFF).to(bits)
        assert_same_bytes("cache", actual.view(bits) & shown, wanted.view(bits) & shown)


@pytest.mark.parametrize("descale", ["", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_8_bits_round_and_saturate(library, kv_dtype, dtype, descale):
    """Every 8-bit number, what lies between two of them, every size, infinities, NaN and both zeros."""
    target = getattr(torch, kv_dtype)
    every = torch.arange(256, dtype=torch.uint8).view(target).float()
    every = every[every.isfinite()].sort().values
    sizes = torch.exp2(torch.linspace(-30, 30, 481)) * torch.tensor([[1.0], [-1.0]])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -448.5, 464.0, 480.0, 61440.0])
    x = torch.cat([every, (every[:-1] + every[1:]) / 2, sizes.flatten(), special]).to(getattr(torch, dtype))
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(1, -1, 2, 64)
    case = Case(batch=1, lens=(5,), append=x.shape[1], dtype=dtype, kv_dtype=kv_dtype, descale=descale)
    judge_numbers(library, case, x, -x)


@pytest.mark.parametrize("head_dim", [64, 30])
@pytest.mark.parametrize("factor", [2.0**-130, 2.0**-120, 2.0**-149])
def test_subnormal_descales(library, head_dim, factor):
    """The quotients are ordinary numbers, though 1 / descale may be none."""
    case = Case(batch=2, lens=(5, 30), append=16, kv_dtype=FP8[0], descale="full", head_dim=head_dim)
    x = torch.arange(1, 17).view(1, -1, 1, 1).expand(2, 16, 2, head_dim) * max(factor, 2.0**-126)
    x = x.bfloat16().contiguous()
    descale = torch.full((2, 2), factor)
    judge_numbers(library, case, x, -x, k_descale=descale, v_descale=descale * 2)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_quotients_are_rounded_once(library, kv_dtype):
    """They lie in the middle of two 8-bit numbers: the last bit of a quotient decides."""
    every = torch.arange(128, dtype=torch.uint8).view(getattr(torch, kv_dtype)).float()
    every = every[every.isfinite()]
    middles = ((every[:-1] + every[1:]) / 2)[16:-24]
    middles = torch.nn.functional.pad(middles, (0, -len(middles) % 64)).view(-1, 1, 64)
    descales = torch.arange(3, 63, 2).view(15, 2) / 64
    x = (middles * descales[:, None, :, None]).half()
    case = Case(batch=15, lens=(5,) * 15, append=len(middles), dtype="float16", kv_dtype=kv_dtype, descale="full")
    judge_numbers(library, case, x, -x, k_descale=descales, v_descale=descales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FP8[0], FP8[1]])
@pytest.mark.parametrize("layout", ["plain", "odd_strides"])
def test_bits_stay(library, dtype, layout):
    """Each NaN stays that NaN."""
    bits = torch.uint8 if dtype in FP8 else torch.int16
    every = torch.arange(1 << 8 * bits.itemsize).to(bits).view(1, -1, 1, 128)
    case = Case(
        batch=1, lens=(5,), append=every.shape[1], dtype=dtype, kv_dtype=dtype, layout=layout, head_dim=128, kv_heads=1
    )
    judge_numbers(library, case, *(x.view(getattr(torch, dtype)) for x in (every, every.flip(1, 3))))


ROTATIONS = {
    "one": {},
    "half": {"rotary_interleaved": False},
    "some_dims": {"rotary_dim": 6},
    "some_dims_half": {"rotary_dim": 6, "rotary_interleaved": False},
    "two_dims": {"rotary_dim": 2},
    "all_dims": {"rotary_dim": 64, "causal": True},
    "all_dims_half": {"rotary_dim": 64, "causal": True, "rotary_interleaved": False},
    "odd_dims": {"head_dim": 59, "head_dim_v": 33, "rotary_dim": 58, "rotary_interleaved": False},
    "window_left": {"window": (6, -1)},
    "window_right": {"window": (-1, 3)},
    "chunk": {"chunk": 8},
    "no_window": {"q_len": 4, "append": 1},
    "more_queries": {"q_len": 9, "append": 2, "causal": True},
    "more_keys": {"q_len": 1, "append": 9, "causal": True},
    "only_queries": {"append": 0, "append_nothing": True, "causal": True},
    "seqlens": {"rotary_seqlens": True, "causal": True},
    "packed_q": {"varlen_q": True, "q_len": 7, "causal": True},
    "packed": {"varlen_q": True, "q_len": 7, "append": 5, "append_varlen": True, "causal": True, "wide_q": True},
    "contiguous": {"page_size": 0, "batch_idx": True, "causal": True},
    "wide": {"wide_q": True, "layout": "odd_strides", "causal": True, "q_heads": 6},
    "many_q_heads": {"q_heads": 24, "causal": True},
    "many_heads": {"q_heads": 16, "kv_heads": 16, "rotary_dim": 64, "head_dim_v": 128},
    "page_1": {"page_size": 1, "causal": True},
    "page_256": {"page_size": 256, "kv_len": 300, "causal": True},
}


@pytest.mark.parametrize("dtype, kv_dtype", [("bfloat16", ""), ("float16", ""), ("float32", ""), ("bfloat16", FP8[0])])
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotates(library, name, dtype, kv_dtype):
    descale = "full" if kv_dtype else ""
    fields = {"q_len": 3, "append": 3, "rotary_dim": 32} | ROTATIONS[name]
    check(library, Case(dtype=dtype, kv_dtype=kv_dtype, descale=descale, **fields))


@pytest.mark.parametrize("rotary_dim", [0, 32])
@pytest.mark.parametrize("head_dim", [64, 42])
def test_requests_apart(library, head_dim, rotary_dim):
    """Between the tokens of two requests are others, in q as in k and v."""
    case = Case(q_len=5, append=5, head_dim=head_dim, rotary_dim=rotary_dim, causal=True)
    kwargs = cases.build(case).kwargs
    check(library, case, {name: kwargs[name][:, 1:4] for name in ("q", "k", "v")} | {"max_q_len": 3})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_outside_of_the_tables(library, interleaved, causal):
    """Nothing turns there. The tables are parts of larger ones: what stands beside them is not a number."""
    case = Case(
        batch=4, q_len=4, append=5, rotary_dim=32, rotary_interleaved=interleaved, rotary_seqlens=True, causal=causal
    )
    kwargs = cases.build(case).kwargs
    length, spare, given, expected = len(kwargs["rotary_cos"]), 10, {}, {}
    for name, still in (("rotary_cos", 1.0), ("rotary_sin", 0.0)):
        table = kwargs[name]
        rows = torch.full((length + 2 * spare, table.shape[1] + 3), torch.nan).to(table.dtype)
        rows[spare:-spare, 2:-1] = table
        given[name] = rows[spare:-spare, 2:-1]
        expected[name] = torch.nn.functional.pad(table, (0, 0, spare, spare), value=still)
    given["rotary_seqlens"] = torch.tensor([length - 3, -2, length + 1, -spare], dtype=torch.int32)
    expected["rotary_seqlens"] = given["rotary_seqlens"] + spare
    check(library, case, given, expected)


@pytest.mark.parametrize("fields", [{}, {"rotary_dim": 32, "q_len": 2}, {"head_dim": 30}], ids=str)
@pytest.mark.parametrize("processors", [1, 100])
def test_next_kernel_starts_early(library, fields, processors):
    """Unless blocks that write pairs stand on every multiprocessor: the next kernel would find room on some alone."""
    numbers = check(library, Case(append=1, **fields), {"processors": processors})
    assert bool(numbers.released) == (not fields or processors == 100)


def test_no_request(library):
    for fields in ({}, {"rotary_dim": 32}, {"append_varlen": True}):
        check(library, Case(batch=0, append=3, **fields))
    tokens = {name: torch.ones(5, 2, 64, dtype=torch.bfloat16) for name in ("k", "v")}
    cu = torch.tensor([0, 5], dtype=torch.int32)[:1]
    check(library, Case(batch=0, append=3, append_varlen=True), tokens | {"cu_seqlens_k_new": cu})
