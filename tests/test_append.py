"""Writing to the cache: kv_paged_write, the append inside flash_attn_with_kvcache, and that both write the same."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import reference
import torch
from cases import Case
from compare import assert_caches, assert_same_bytes, check, judge, run

FP8 = ["float8_e4m3fn", "float8_e5m2"]
WRITES = [
    Case(append=3),
    Case(append=1, dtype="float32"),
    Case(append=3, dtype="float16", page_size=1),
    Case(append=40, page_size=3),
    Case(append=40, append_varlen=True, page_size=16),
    Case(append=7, append_varlen=True, head_dim=59, head_dim_v=33),
    Case(append=3, head_dim=1, dtype="float32"),
    Case(append=3, head_dim=192, head_dim_v=128, q_heads=6, kv_heads=3),
    Case(append=3, layout="heads_first"),
    Case(append=3, layout="interleaved"),
    Case(append=3, layout="odd_strides", wide_q=True),
    Case(append=5, append_varlen=True, wide_q=True, dtype="float32"),
    Case(batch=3, lens=(0, 0, 0), append=17),
    Case(batch=0, append=3),
    *(Case(append=4, kv_dtype=kv, dtype=dtype) for kv in FP8 for dtype in ("bfloat16", "float16", "float32")),
    *(Case(append=4, kv_dtype=kv, descale="full", layout="odd_strides") for kv in FP8),
    *(Case(append=9, append_varlen=True, kv_dtype=kv, descale="shared", dtype="float32", page_size=3) for kv in FP8),
]


def write(paged_attn, call, **slots):
    names = ("k", "v", "block_table", "cache_seqlens", "cu_seqlens_k_new", "k_descale", "v_descale")
    arguments = {name: call.kwargs[name] for name in names if name in call.kwargs} | slots
    k_cache, v_cache = call.caches()
    assert paged_attn.kv_paged_write(k_cache=k_cache, v_cache=v_cache, **arguments) is None


@pytest.mark.sanitize
@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write(paged_attn, device, case):
    call, before = cases.build(case).to(device), cases.build(case)
    write(paged_attn, call)
    assert_caches(case, call.storage, before, before.kwargs)


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_append_writes_the_same_bytes(paged_attn, device, case):
    written, appended = cases.build(case).to(device), cases.build(case).to(device)
    write(paged_attn, written)
    run(paged_attn, appended)
    for a, b in zip(appended.storage, written.storage):
        assert_same_bytes("cache", a, b.cpu())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_see_what_was_written(paged_attn, device, emulated, mode):
    """torch keeps a tensor for a gradient, and refuses it if the tensor was written since, in whatever mode."""
    if emulated:
        pytest.skip("the emulated device computes no gradients")
    q, new = torch.ones(1, 1, 2, 8, device=device), torch.ones(1, 1, 2, 8, device=device)
    cache, values, out = (torch.ones(1, n, 2, 8, device=device) for n in (4, 4, 1))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    attend = functools.partial(paged_attn.flash_attn_with_kvcache, q.detach(), cache, values, cache_seqlens=2)
    writes = {
        "append": (lambda: attend(new, new), (cache, values)),
        "write": (lambda: paged_attn.kv_paged_write(new, new, cache, values, table, 2), (cache, values)),
        "out": (lambda: attend(out=out), (out,)),
    }
    for write, written in writes.values():
        for tensor in written:
            weight = torch.ones((), device=device, requires_grad=True)
            product = (weight * tensor).sum()
            with mode():
                write()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
    weight = torch.ones((), device=device, requires_grad=True)
    product = (weight * cache).sum()
    with mode():
        attend(), paged_attn.explain(q, cache, values, new, new, cache_seqlens=2)  # which only read
    product.backward()


def test_tensors_of_inference_mode_are_written(paged_attn, device):
    """They have no count of writes, within that mode and outside of it."""
    with torch.inference_mode():
        q, new = (torch.ones(1, 1, 2, 8, device=device) for _ in range(2))
        cache, values, out = (torch.zeros(1, n, 2, 8, device=device) for n in (4, 4, 1))
    for position, mode in enumerate((torch.inference_mode, torch.no_grad)):
        with mode():
            paged_attn.flash_attn_with_kvcache(q, cache, values, new, new, cache_seqlens=position, out=out)
        assert cache.sum() == values.sum() == (position + 1) * 16 and out.sum() == 16


def slots_of(call):
    """slot_mapping of the tokens that the table would place."""
    kwargs, page_size, slots = call.kwargs, call.case.page_size, []
    for b, count in enumerate(call.seqlens_new):
        for position in range(int(kwargs["cache_seqlens"][b]), int(kwargs["cache_seqlens"][b]) + count):
            page = int(kwargs["block_table"][b, position // page_size])
            slots.append(page * page_size + position % page_size)
    return torch.tensor(slots, dtype=torch.int64)


@pytest.mark.sanitize
@pytest.mark.parametrize("skipped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("case", [case for case in WRITES if case.batch], ids=str)
def test_slot_mapping(paged_attn, device, case, skipped):
    """Slots instead of positions; a negative slot skips its token; table and lengths may be None or given."""
    call, before = cases.build(case).to(device), cases.build(case)
    slots = slots_of(before)
    torch.manual_seed(1)
    skip = torch.rand(len(slots)) < skipped
    slots[skip] = torch.tensor([-1, -17, -(2**40)])[torch.arange(int(skip.sum())) % 3]
    given = {} if skipped else {"block_table": None, "cache_seqlens": None}
    write(paged_attn, call, slot_mapping=slots.to(device), **given)
    expected = tuple(s.clone() for s in before.storage)
    names = ("k", "v", "block_table", "cache_seqlens", "cu_seqlens_k_new", "k_descale", "v_descale")
    arguments = {name: before.kwargs[name] for name in names if name in before.kwargs}
    k_cache, v_cache = before.caches(expected)
    reference.append(k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, **arguments)
    for a, b in zip(call.storage, expected):
        assert_same_bytes("cache", a, b)


def test_slot_mapping_of_a_flat_batch(paged_attn, device):
    """vLLM's form: k is (total_new, kv_heads, head_dim) and nothing tells the requests apart."""
    case = Case(append=3, dtype="float32")
    call, before = cases.build(case).to(device), cases.build(case)
    slots = slots_of(before)
    k_cache, v_cache = call.caches()
    k, v = call.kwargs["k"].flatten(0, 1), call.kwargs["v"].flatten(0, 1)
    paged_attn.kv_paged_write(k, v, k_cache, v_cache, None, None, slot_mapping=slots.to(device))
    assert_caches(case, call.storage, before, before.kwargs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 12])
def test_slot_mapping_shorter_than_k(paged_attn, device, tokens, dtype):
    """vLLM pads k and v: tokens past the end of slot_mapping are not written. Slots of 32 bits too."""
    case = Case(append=3, dtype="float32")
    call, before = cases.build(case).to(device), cases.build(case)
    slots = slots_of(before)[:tokens].to(dtype)
    k, v = (before.kwargs[name].flatten(0, 1) for name in ("k", "v"))
    k_cache, v_cache = call.caches()
    paged_attn.kv_paged_write(k.to(device), v.to(device), k_cache, v_cache, None, None, slot_mapping=slots.to(device))
    expected = tuple(s.clone() for s in before.storage)
    k_cache, v_cache = before.caches(expected)
    reference.append(
        k[None, :tokens], v[None, :tokens], k_cache, v_cache, None, torch.zeros(1), slot_mapping=slots.long()
    )
    for a, b in zip(call.storage, expected):
        assert_same_bytes("cache", a, b)


def test_slots_of_tokens_of_no_request(paged_attn, device):
    """Tokens past cu_seqlens_k_new are not written, whatever their slots."""
    new, caches = torch.ones(5, 1, 8, device=device), [torch.zeros(4, 4, 1, 8, device=device) for _ in range(2)]
    slots, cu = torch.tensor([9, 1, 5, 3, 12], device=device), torch.tensor([0, 2, 3]).int().to(device)
    paged_attn.kv_paged_write(new, new, *caches, slot_mapping=slots, cu_seqlens_k_new=cu)
    for cache in caches:
        assert cache.flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist() == [1, 5, 9]


@pytest.mark.every_isa
@pytest.mark.parametrize("with_descale", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_rounds_and_saturates(paged_attn, device, kv_dtype, dtype, with_descale):
    """Every size of number that the query's dtype has: ties, subnormals, overflow, infinities, NaN, both zeros."""
    target = getattr(torch, kv_dtype)
    every = torch.arange(256, dtype=torch.uint8).view(target).float()
    every = every[torch.isfinite(every)]
    between = (every[:-1] + every[1:]) / 2  # ties to even
    sizes = torch.exp2(torch.linspace(-30, 30, 481)) * torch.tensor([[1.0], [-1.0]])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(target).max, -448.5, 464.0, 480.0])
    x = torch.cat([every, between, sizes.flatten(), special]).to(getattr(torch, dtype))
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(1, -1, 2, 64)
    tokens = x.shape[1]
    case = Case(
        batch=1, lens=(5,), append=tokens, dtype=dtype, kv_dtype=kv_dtype, descale="full" if with_descale else ""
    )
    call, before = cases.build(case).to(device), cases.build(case)
    for kwargs in (call.kwargs, before.kwargs):
        kwargs["k"], kwargs["v"] = x.to(kwargs["q"].device), -x.to(kwargs["q"].device)
    write(paged_attn, call)
    expected = tuple(s.clone() for s in before.storage)
    names = ("k", "v", "block_table", "cache_seqlens", "k_descale", "v_descale")
    k_cache, v_cache = before.caches(expected)
    arguments = {name: before.kwargs[name] for name in names if name in before.kwargs}
    reference.append(k_cache=k_cache, v_cache=v_cache, **arguments)
    for a, b in zip(call.storage, expected):
        a, sign = a.cpu(), 0x7F  # the sign of a NaN says nothing
        nan = a.isnan() & b.isnan()
        assert torch.equal(
            a.view(torch.uint8) & torch.where(nan, sign, 0xFF), b.view(torch.uint8) & torch.where(nan, sign, 0xFF)
        )


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", ["plain", "odd_strides"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_with_subnormal_descales(paged_attn, device, emulated, kv_dtype, dtype, layout):
    """The quotients are ordinary numbers, though 1 / descale is none."""
    if device == "mps" and not emulated:
        pytest.skip("Apple GPUs take subnormal numbers for 0")
    case = Case(batch=2, lens=(5, 30), append=16, dtype=dtype, kv_dtype=kv_dtype, descale="full", layout=layout)
    call, before = cases.build(case).to(device), cases.build(case)
    for kwargs in (call.kwargs, before.kwargs):
        for name in ("k_descale", "v_descale"):
            kwargs[name] = torch.full_like(kwargs[name], 2.0**-130)
        for name in ("k", "v"):
            kwargs[name].copy_(torch.arange(1, 17, dtype=torch.float32).view(1, -1, 1, 1) * 2.0**-126)
    write(paged_attn, call)
    expected = tuple(s.clone() for s in before.storage)
    k_cache, v_cache = before.caches(expected)
    names = ("k", "v", "block_table", "cache_seqlens", "k_descale", "v_descale")
    reference.append(k_cache=k_cache, v_cache=v_cache, **{name: before.kwargs[name] for name in names})
    for a, b in zip(call.storage, expected):
        assert_same_bytes("cache", a, b)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["plain", "odd_strides"])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_8_bit_keys_are_stored_byte_for_byte(paged_attn, device, kv_dtype, layout, packed):
    """With an 8-bit q: all 256 bytes, NaNs and both zeros among them; the descales belong to the reader."""
    case = Case(
        batch=2, lens=(5, 30), q_len=2, append=16, append_varlen=packed, dtype=kv_dtype, kv_dtype=kv_dtype,
        q_heads=2, kv_heads=1, head_dim=16, layout=layout, descale="full", q_descale="full",
    )  # fmt: skip
    call, before = cases.build(case).to(device), cases.build(case)
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kv_dtype)).view(16, 1, 16)
    k = every if packed else torch.stack([every, every.flip(0)])
    for kwargs in (call.kwargs, before.kwargs):
        kwargs["k"], kwargs["v"] = (x.to(kwargs["q"].device) for x in (k, k.flip(-3)))
    assert call.seqlens_new == ([16, 0] if packed else [16, 16])
    run(paged_attn, call)
    assert_caches(case, call.storage, before, before.kwargs)


@pytest.mark.parametrize("spare", [8, 16])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_8_bit_rows_with_a_few_bytes_between(paged_attn, device, kv_dtype, spare):
    """As where scales stand behind the numbers of a row. With 8 bytes every second row begins between pieces of 16."""
    draw = lambda *shape: torch.randn(*shape, device=device).to(getattr(torch, kv_dtype))  # noqa: E731
    q, k, v = draw(2, 3, 2, 32), draw(2, 3, 1, 32), draw(2, 3, 1, 32)
    memory = torch.zeros(2, 2, 8, 1, 32 + spare, dtype=torch.uint8, device=device)
    apart = torch.zeros(2, 2, 8, 1, 32, dtype=torch.uint8, device=device).view(k.dtype)
    caches = memory.view(k.dtype)[..., :32]
    ours, expected = (
        paged_attn.flash_attn_with_kvcache(q, *pair, k, v, cache_seqlens=2, causal=True) for pair in (caches, apart)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)  # on a GPU two kernels
    assert torch.equal(memory[..., :32], apart.view(torch.uint8)) and not memory[..., 32:].any()


@pytest.mark.parametrize("layout", ["plain", "odd_strides"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_keys_are_stored_byte_for_byte(paged_attn, device, dtype, layout):
    """Every word of 16 bits, so that each NaN stays that NaN."""
    every = torch.arange(1 << 16).to(torch.uint16).view(getattr(torch, dtype)).view(1, -1, 2, 64)
    case = Case(batch=1, lens=(5,), append=every.shape[1], dtype=dtype, layout=layout)
    call, before = cases.build(case).to(device), cases.build(case)
    for kwargs in (call.kwargs, before.kwargs):
        kwargs["k"], kwargs["v"] = (x.to(kwargs["q"].device) for x in (every, every.flip(1)))
    write(paged_attn, call)
    assert_caches(case, call.storage, before, before.kwargs)


@pytest.mark.every_isa
@pytest.mark.sanitize
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", ""), ("float16", ""), ("float32", ""), ("bfloat16", FP8[0])]
)
def test_rotary(paged_attn, device, dtype, kv_dtype, rotary_dim, interleaved, causal):
    case = Case(
        q_len=3, append=3, rotary_dim=rotary_dim, rotary_interleaved=interleaved, causal=causal, dtype=dtype,
        kv_dtype=kv_dtype, descale="full" if kv_dtype else "",
    )  # fmt: skip
    check(paged_attn, case, device)


@pytest.mark.parametrize(("q_len", "append"), [(1, 4), (4, 1), (5, 5), (9, 2)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, -1), (4, 4)])
def test_rotary_positions_of_queries(paged_attn, device, q_len, append, window):
    """Queries move along with a window or causality and share one position without, whatever the number of keys."""
    check(paged_attn, Case(q_len=q_len, append=append, window=window, rotary_dim=32, dtype="float32"), device)


def test_step_by_step_equals_at_once(paged_attn, device):
    """Decoding token by token leaves the cache that one prefill leaves, and gives nearly its rows."""
    tokens, page_size = 37, 4
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, 64, device=device) for heads in (4, 2, 2))
    angle = torch.randn(tokens, 32, device=device)
    caches = [torch.full((24, page_size, 2, 64), torch.nan, device=device) for _ in range(4)]
    table = torch.randperm(24, device=device)[:20].view(2, 10).to(torch.int32)
    shared = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "block_table": table, "causal": True}
    whole = paged_attn.flash_attn_with_kvcache(q, *caches[:2], k, v, cache_seqlens=0, **shared)
    for t in range(tokens):
        new = slice(t, t + 1)
        step = paged_attn.flash_attn_with_kvcache(
            q[:, new], *caches[2:], k[:, new], v[:, new], cache_seqlens=t, **shared
        )
        torch.testing.assert_close(step, whole[:, new], rtol=1e-5, atol=1e-5)  # not under test: two orders of summation
    for a, b in zip(caches[:2], caches[2:]):
        assert_same_bytes("cache", a, b.cpu())


def test_no_memory_for_partial_results_leaves_the_cache_as_it_was(paged_attn, device):
    """A process may have a limit. Whatever a call needs is there before it writes."""
    if device != "cpu" or sys.platform != "linux":
        pytest.skip("limits of memory are those of Linux's processes")
    import resource

    case = Case(batch=8, lens=(2000,) * 8, q_len=8, append=1, q_heads=64, kv_heads=1, head_dim=8, head_dim_v=128)
    run(paged_attn, cases.build(case), num_splits=1)  # threads and their memory are there
    call, before = cases.build(case), cases.build(case)
    needed = 8 * 8 * 64 * 100 * (128 + 2) * 4  # 100 partial results of each row: 213 MB
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + needed // 4, hard))
    try:
        with pytest.raises(MemoryError):
            run(paged_attn, call, num_splits=100)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    for after, expected in zip(call.storage, before.storage):
        assert_same_bytes("cache", after, expected)
    judge(*run(paged_attn, call, num_splits=100), call, before)


# The memory that a thread works in is found before a byte is written, or the thread leaves its tasks to others. A
# process of its own: threads keep what they once had.
REFUSE = """
import ctypes
import cases, conftest, kernels, torch
from compare import assert_same_bytes, run, torch_threads

paged_attn = kernels.get_kernel(conftest.KERNEL, version=1, backend="cpu", trust_remote_code=True)
refuse = ctypes.CDLL(None).refuse_scratch
nobody, everybody, others = range(3)
case = cases.Case(batch=4, kv_len=3000, append=1, q_heads=16, kv_heads=4, head_dim=128)
with torch_threads(4):
    before, call = cases.build(case), cases.build(case)
    refuse(everybody)
    try:
        run(paged_attn, call, num_splits=5)
        raise SystemExit("expected MemoryError")
    except MemoryError:
        pass
    for after, expected in zip(call.storage, before.storage):
        assert_same_bytes("cache", after, expected)
    refuse(others)
    alone = run(paged_attn, call, num_splits=5)
    refuse(nobody)
    for a, b in zip(alone, run(paged_attn, before, num_splits=5)):
        assert_same_bytes("result", a, b)
"""


def test_no_memory_for_threads(paged_attn, device, tmp_path):
    if device != "cpu" or sys.platform != "linux" or "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the allocator of Linux's processes is replaced")
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    library = tmp_path / "no_memory.so"
    source = Path(__file__).resolve().parent / "native" / "no_memory.cpp"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(source.parent.parent)}
    subprocess.run([sys.executable, "-c", REFUSE], env=environment, check=True)


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1), (1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("q_dtype", ["bfloat16", "float8_e4m3fn"])
def test_descales_of_size_one(paged_attn, device, q_dtype, sizes):
    """They serve every request, or every kv_head, as if they were written out. That of the values is of its own sizes:
    (3, 2) stands beside one number for all keys."""
    torch.manual_seed(0)

    def random(*shape, dtype="float8_e4m3fn"):
        return torch.randn(shape).to(getattr(torch, dtype)).to(device)

    q, k, v = (random(3, 2, heads, 64, dtype=q_dtype) for heads in (4, 2, 2))
    caches = [random(6, 16, 2, 64).view(torch.uint8) for _ in range(2)]
    where = {
        "cache_seqlens": torch.tensor([5, 20, 0], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[3, 0], [1, 5], [2, 4]], dtype=torch.int32, device=device),
    }
    # With NaN behind them, which shows if it is read.
    scales = {name: torch.full((12,), torch.nan, device=device) for name in ("q_descale", "k_descale", "v_descale")}
    for name, scale in scales.items():
        own = (1, 1) if sizes == (3, 2) and name != "v_descale" else sizes
        scales[name] = scale[: own[0] * own[1]].view(own)
        scales[name].copy_(torch.rand(own) + 0.5)
    results = []
    for given in (scales, {name: scale.expand(3, 2).contiguous() for name, scale in scales.items()}):
        written = [cache.clone() for cache in caches]
        k_cache, v_cache = (cache.view(torch.float8_e4m3fn) for cache in written)
        out = paged_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, causal=True, **where, **given)
        results.append((out, *written))
    assert results[0][0].isfinite().all()
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_rotary_tables_of_different_strides(paged_attn, device, name, interleaved):
    """A part of a wider table beside one of its own: each is read by its own strides."""
    case = Case(q_len=3, append=3, rotary_dim=32, rotary_interleaved=interleaved, causal=True)
    plain, wide = cases.build(case).to(device), cases.build(case).to(device)
    table = wide.kwargs[name]
    wide.kwargs[name] = torch.nn.functional.pad(table, (0, 8), value=torch.nan)[:, : table.shape[1]]
    for a, b in zip((*run(paged_attn, wide), *wide.storage), (*run(paged_attn, plain), *plain.storage), strict=True):
        assert_same_bytes("result and cache", a, b.cpu())
