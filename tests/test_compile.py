"""torch.compile(fullgraph=True) of every public function, PyTorch's own checks of the registered operators, and a model
exported with AOTInductor."""

import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import Case
from compare import assert_caches, judge, run
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

CASES = {
    "decode": Case(),
    "decode_fp8": Case(kv_dtype="float8_e4m3fn", descale="full", sink="bfloat16"),
    "append": Case(q_len=3, append=3, rotary_dim=32, causal=True),
    "append_varlen": Case(append=5, append_varlen=True, q_len=5, varlen_q=True, causal=True),
    "contiguous": Case(page_size=0, append=2, dtype="float32", leftpad=True, batch_idx=True, alibi="head"),
    "out": Case(give_out=True, softcap=2.5, window=(10, 0)),
}


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request, device, emulated):
    if request.param == "inductor" and emulated:
        pytest.skip("inductor's code for MPS needs Metal's compiler, which the emulated device does not have")
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_with_kvcache(paged_attn, device, name, backend):
    """Between other operations, so that the graph has something to reorder; what is appended must be seen after it."""
    case = CASES[name]
    if backend == "inductor" and device == "mps" and case.kv_dtype:
        pytest.skip("inductor has no name for 8-bit floats in Metal")
    call, before = cases.build(case).to(device), cases.build(case)
    k_cache, v_cache = call.caches()

    def step(k_cache, v_cache, kwargs):
        out, lse = paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **kwargs)
        return out * 1, lse + 0, k_cache.clone(), v_cache.clone()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    out, lse, k_after, v_after = compiled(k_cache, v_cache, call.kwargs)
    if case.give_out:
        assert torch.equal(out, call.kwargs["out"])
        out = call.kwargs["out"]
    judge(out, lse, call, before)
    for copy, cache in ((k_after, k_cache), (v_after, v_cache)):
        assert torch.equal(copy.view(torch.uint8), cache.contiguous().view(torch.uint8))


def test_descales_of_a_16_bit_cache(paged_attn, device, backend):
    """Left out of the graph: no operator sees them, whatever their shape."""
    case = Case(append=3, q_len=3, causal=True)
    call, before = cases.build(case).to(device), cases.build(case)
    k_cache, v_cache = call.caches()
    names = ("q", "k", "v", "block_table", "cache_seqlens")

    def step(k_cache, v_cache, scale, q, k, v, table, lens):
        scales = {"k_descale": scale, "v_descale": scale}
        paged_attn.kv_paged_write(k * 1, v * 1, k_cache, v_cache, table, lens, **scales)
        return paged_attn.flash_attn_with_kvcache(
            q * 1, k_cache, v_cache, k * 1, v * 1, cache_seqlens=lens, block_table=table, causal=True,
            return_softmax_lse=True, **scales,
        )  # fmt: skip

    scale, given = torch.full((7, 3), torch.nan, device=device), [call.kwargs[name] for name in names]
    out, lse = torch.compile(step, backend=backend, fullgraph=True)(k_cache, v_cache, scale, *given)
    judge(out, lse, call, before)


def test_kv_paged_write(paged_attn, device, backend):
    case = Case(append=3)
    call, before = cases.build(case).to(device), cases.build(case)
    k_cache, v_cache = call.caches()

    def write(k, v, k_cache, v_cache, table, lens):
        paged_attn.kv_paged_write(k * 1, v * 1, k_cache, v_cache, table, lens)
        return k_cache.float().nan_to_num().sum()

    arguments = [call.kwargs[name] for name in ("block_table", "cache_seqlens")]
    total = torch.compile(write, backend=backend, fullgraph=True)(
        call.kwargs["k"], call.kwargs["v"], k_cache, v_cache, *arguments
    )
    assert_caches(case, call.storage, before, before.kwargs)
    torch.testing.assert_close(total, k_cache.float().nan_to_num().sum())


def test_other_functions(paged_attn, device, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, device=device) for n, h in ((5, 4), (20, 2), (20, 2)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 10], [0, 20, 40]))

    def everything(q, k, v, cu_q, cu_k):
        a = paged_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        b = paged_attn.flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 20, return_softmax_lse=True)
        return *a, *b, *paged_attn.merge_attn_states(*b, *b)

    expected = everything(q, k, v, cu_q, cu_k)
    compiled = torch.compile(everything, backend=backend, fullgraph=True)(q, k, v, cu_q, cu_k)
    for x, y in zip(compiled, expected):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)  # not under test: the compiler's own merge


def test_functions_in_the_order_of_flash_attention_3(paged_attn, device, backend):
    torch.manual_seed(0)
    fa3 = paged_attn.fa3
    q, k, v = (torch.randn(2, n, h, 64, device=device) for n, h in ((5, 4), (20, 2), (20, 2)))
    k_cache, v_cache = paged_attn.empty_paged_cache(8, 16, 2, 64, dtype=torch.float32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    before, cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([7, 20], [0, 5, 10], [0, 20, 40]))

    def everything(q, k, v, k_cache, v_cache):
        plan = fa3.get_scheduler_metadata(2, 5, 64, num_heads=4, num_heads_k=2, headdim=64, cache_seqlens=before)
        names = {"scheduler_metadata": plan, "causal": True, "return_softmax_lse": True}
        a = fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, None, None, None, before, None, None, table, **names
        )  # fmt: skip
        b = fa3.flash_attn_func(q, k, v, None, True, return_softmax_lse=True)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        c, lse = fa3.flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 20, return_softmax_lse=True)
        return *a, *b, c, lse, *fa3.merge_state_v2(c, lse.T, c, lse.T), k_cache.clone(), v_cache.clone()

    caches = [[x.zero_().clone() for x in (k_cache, v_cache)] for _ in range(2)]
    expected = everything(q, k, v, *caches[0])
    compiled = torch.compile(everything, backend=backend, fullgraph=True)(q, k, v, *caches[1])
    assert caches[0][0].any()
    for x, y in zip(compiled, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


TRACED = {
    "alibi_slopes": (lambda q: {"alibi_slopes": torch.ones(4, device=q.device, requires_grad=True)}, "no gradient"),
    "out": (lambda q: {"out": torch.empty_like(q).requires_grad_()}, "no gradient"),
    "k_cache": (lambda q: {"k_cache": None}, ", got None"),
    "q": (lambda q: {"q": None}, ", got None"),
    "window_size": (lambda q: {"window_size": 128}, ", got 128"),
}


@pytest.mark.parametrize("name", TRACED)
def test_errors_of_the_trace_say_what_is_wrong(paged_attn, device, name):
    """The compiler wraps them, with our words inside."""
    change, words = TRACED[name]
    q, cache = torch.zeros(2, 3, 4, 64, device=device), torch.zeros(2, 8, 2, 64, device=device)
    given = {"q": q, "k_cache": cache, "v_cache": cache} | change(q)
    compiled = torch.compile(paged_attn.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"\b{name}: expected .*{words}"):
        compiled(**given)


@pytest.mark.parametrize("pool", ["stacked", "unbound", "of all layers", "flat inputs"])
def test_caches_of_one_memory_whose_size_changes(paged_attn, device, backend, pool, monkeypatch, tmp_path):
    """Layers with caches in one pool: a view of it begins where the number of pages says. Inductor keeps its graphs on
    disk; one that is wrong could come from there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = 3
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([3, 20], dtype=torch.int32, device=device)
    q, new = torch.randn(2, 1, 4, 64, device=device), torch.randn(2, 1, 1, 64, device=device)

    def caches_of(pools):
        if pool == "stacked":
            return [(pools[0][i], pools[1][i]) for i in range(layers)]
        if pool == "unbound":  # vLLM's layout, K and V of a layer in one tensor
            return [tuple(both.unbind(0)) for both in pools]
        if pool == "of all layers":
            return [(pools[0][2 * i], pools[0][2 * i + 1]) for i in range(layers)]
        return list(zip(pools[::2], pools[1::2], strict=True))

    def step(q, pools):
        for k_cache, v_cache in caches_of(pools):
            keywords = {"cache_seqlens": lens, "block_table": table, "causal": True}
            q = paged_attn.flash_attn_with_kvcache(q, k_cache, v_cache, q[:, :, :1], new, **keywords)
        return q

    def pools_of(pages):
        shapes = {"stacked": [(layers,)] * 2, "unbound": [(2,)] * layers, "of all layers": [(2 * layers,)]}
        if pool != "flat inputs":
            return [torch.randn(*first, pages, 16, 1, 64, device=device) for first in shapes[pool]]
        return list(torch.randn(2 * layers, pages, 16, 1, 64, device=device).unbind(0))

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for pages in (4, 6, 9):
        pools = pools_of(pages)
        copies = [x.clone() for x in pools]
        out, expected = compiled(q, pools), step(q, copies)
        for x, y in zip([out, *pools], [expected, *copies], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# Tensors of a call whose heads do not fit, and what is said of them.
MISFITS = {
    "head_dim": (
        {"k_cache": (2, 8, 2, 32)},
        "k_cache: expected .*head_dim = 64 .from q.*, got float32 .2, 8, 2, 32.$",
    ),
    "kv_heads": ({"v_cache": (2, 8, 4, 64)}, "v_cache: expected .*kv_heads = 2 .from k., .*, got "),
    "dimensions": ({"k_cache": (8, 64)}, "k_cache: expected 3 or 4 dimensions that end .*, got float32 .8, 64.$"),
    "new keys": ({"k": (2, 3, 1, 64)}, "v: expected .*kv_heads = 1 .from k., .*, got "),
    "out": ({"out": (2, 3, 4, 32)}, "out: expected .*head_dim_v = 64 .from v.., got float32 .2, 3, 4, 32.$"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_heads_that_do_not_fit_are_refused_without_data(paged_attn, name):
    """On `meta`, where only the fakes see them."""
    shapes, words = MISFITS[name]
    shapes = {"q": (2, 3, 4, 64), "k": (2, 3, 2, 64), "v": (2, 3, 2, 64), "out": (2, 3, 4, 64)} | shapes
    shapes = {"k_cache": (2, 8, 2, 64), "v_cache": (2, 8, 2, 64)} | shapes
    given = {n: torch.zeros(shape, device="meta") for n, shape in shapes.items()}
    lens = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=f"^{words}"):
        paged_attn.flash_attn_with_kvcache(**given, cache_seqlens=lens)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_lengths_are_ints_of_a_free_size(paged_attn, device, strict):
    """An int length that comes from a shape is symbolic in torch.export, and so is a max_seqlen_q."""

    class Model(torch.nn.Module):
        def forward(self, q, k, cu_seqlens):
            whole = paged_attn.flash_attn_with_kvcache(q, k, k, cache_seqlens=k.shape[1])
            packed = q.flatten(0, 1)
            lens = torch.full((2,), 4, dtype=torch.int32, device=q.device)
            ragged = paged_attn.flash_attn_with_kvcache(
                packed, k, k, cache_seqlens=lens, cu_seqlens_q=cu_seqlens, max_seqlen_q=q.shape[1]
            )
            k_cache, v_cache = torch.zeros_like(k), torch.zeros_like(k)
            table = torch.arange(2, dtype=torch.int32, device=q.device)[:, None]
            paged_attn.kv_paged_write(k[:, :1], k[:, :1], k_cache, v_cache, table, k.shape[1] - 1)
            return whole, ragged, k_cache

    def inputs(tokens, keys):
        q, k = torch.randn(2, tokens, 4, 8, device=device), torch.randn(2, keys, 2, 8, device=device)
        return q, k, torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32, device=device)

    shapes = ({1: torch.export.Dim("tokens", min=2)}, {1: torch.export.Dim("keys", min=4)}, None)
    exported = torch.export.export(Model(), inputs(3, 7), dynamic_shapes=shapes, strict=strict).module()
    for call in (inputs(3, 7), inputs(5, 20)):
        for x, y in zip(exported(*call), Model()(*call), strict=True):
            assert torch.equal(x, y)


def loops(paged_attn, module, table_name, device):
    """By name: a function of `module`, its calls i = 0, 1, ..., every length of which differs from the call before, and
    the graphs that they may take. A length in a tensor takes none; a size that changes takes a second graph, for every
    size."""
    k_cache, v_cache = paged_attn.empty_paged_cache(64, 16, 2, 64, dtype=torch.float32, device=device)
    k_cache.zero_(), v_cache.zero_()
    draw = lambda *shape: torch.zeros(shape, device=device)  # noqa: E731
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    lens = lambda i: ints(3 + i, 9, 20 + 5 * i, 40 + i)  # noqa: E731
    q, new = draw(4, 1, 4, 64), draw(4, 1, 2, 64)
    pages = {table_name: torch.arange(64, dtype=torch.int32, device=device).view(4, 16), "causal": True}

    def packed(i):
        counts = (7 + i, 3, 2 * i + 1, 5)
        return sum(counts), ints(0, *torch.tensor(counts).cumsum(0)), max(counts)

    def decode(i):
        return (q, k_cache, v_cache), pages | {"cache_seqlens": lens(i)}

    def decode_at_an_int(i):
        return (q, k_cache, v_cache), pages | {"cache_seqlens": 10 + i}

    def append(i):
        return (q, k_cache, v_cache, new, new), pages | {"cache_seqlens": lens(i)}

    def mixed(i):
        total, cu, longest = packed(i)
        names = {"cache_seqlens": lens(i), "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": longest}
        return (draw(total, 4, 64), k_cache, v_cache, draw(total, 2, 64), draw(total, 2, 64)), pages | names

    def varlen(i):
        total, cu, longest = packed(i)
        return (draw(total, 4, 64), draw(total, 2, 64), draw(total, 2, 64), cu, cu, longest, longest), {"causal": True}

    def varlen_on_pages(i):
        total, cu, longest = packed(i)
        return (draw(total, 4, 64), k_cache, v_cache, cu, None, longest), pages | {"seqused_k": lens(i)}

    def whole(i):
        return (draw(2, 5 + i, 4, 64), draw(2, 20 + 3 * i, 2, 64), draw(2, 20 + 3 * i, 2, 64)), {}

    with_kvcache, packed_together = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    return {
        "decode": (with_kvcache, decode, 1),
        "decode at an int": (with_kvcache, decode_at_an_int, 2),
        "append": (with_kvcache, append, 1),
        "mixed": (with_kvcache, mixed, 2),
        "varlen": (packed_together, varlen, 2),
        "varlen on pages": (packed_together, varlen_on_pages, 2),
        "whole": (module.flash_attn_func, whole, 2),
    }


def loops_around_attention(paged_attn, device):
    """The same for the functions that write and merge."""
    k_cache, v_cache = paged_attn.empty_paged_cache(8, 16, 2, 64, dtype=torch.float32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    new = torch.zeros(4, 1, 2, 64, device=device)

    def write(i):
        lens = torch.tensor([i, 2 * i, 3 + i, 9], dtype=torch.int32, device=device)
        return (new, new, k_cache, v_cache, table, lens), {}

    def write_to_slots(i):
        tokens = torch.zeros(5 + i, 2, 64, device=device)
        return (tokens, tokens, k_cache, v_cache), {"slot_mapping": torch.arange(5 + i, device=device)}

    def merge(i):
        part = torch.zeros(5 + i, 4, 64, device=device), torch.zeros(4, 5 + i, device=device)
        return part + part, {}

    def merge_tokens_first(i):
        part = torch.zeros(5 + i, 4, 64, device=device), torch.zeros(5 + i, 4, device=device)
        return part + part, {}

    return {
        "write": (paged_attn.kv_paged_write, write, 1),
        "write to slots": (paged_attn.kv_paged_write, write_to_slots, 2),
        "merge": (paged_attn.merge_attn_states, merge, 2),
        "fa3 merge": (paged_attn.fa3.merge_state_v2, merge_tokens_first, 2),
    }


def test_lengths_may_change_without_compiling_again(paged_attn, device):
    """Loops of engines: other lengths every step, and no graph after the second."""
    graphs = {}
    calls = loops_around_attention(paged_attn, device) | loops(paged_attn, paged_attn, "block_table", device)
    in_their_order = loops(paged_attn, paged_attn.fa3, "page_table", device)
    calls |= {f"fa3 {name}": call for name, call in in_their_order.items()}
    for name, (function, call, _) in calls.items():
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        for i in range(5):
            arguments, keywords = call(i)
            with torch.no_grad():
                compiled(*arguments, **keywords)
        graphs[name] = counters["stats"]["unique_graphs"]
    assert graphs == {name: limit for name, (_, _, limit) in calls.items()}


def test_one_request_takes_a_graph_of_its_own(paged_attn, device):
    """And no other number of requests does."""
    k_cache, v_cache = paged_attn.empty_paged_cache(64, 16, 2, 64, dtype=torch.float32, device=device)
    k_cache.zero_(), v_cache.zero_()
    compiled = torch.compile(paged_attn.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    graphs = []
    for batch in (4, 5, 9, 2, 1, 7, 1):
        q, new = torch.zeros(batch, 1, 4, 64, device=device), torch.zeros(batch, 1, 2, 64, device=device)
        lens = torch.full((batch,), 5, dtype=torch.int32, device=device)
        table = torch.arange(4 * batch, dtype=torch.int32, device=device).view(batch, 4)
        counters.clear()
        compiled(q, k_cache, v_cache, new, new, cache_seqlens=lens, block_table=table, causal=True)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("return_lse", [True, False])
def test_in_a_branch(paged_attn, device, return_lse):
    """torch.cond looks at every result of an operator. Where the lse may be left out, usage.md can forget about it."""
    q, cache = torch.randn(2, 3, 4, 64, device=device), torch.randn(2, 20, 2, 64, device=device)

    def attend(q):
        given = paged_attn.flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=return_lse)
        return given[0] if return_lse else given

    def branch(q, condition):
        return torch.cond(condition, attend, lambda q: q * 1, (q,))

    compiled = torch.compile(branch, backend="aot_eager", fullgraph=True)
    if not return_lse:
        with pytest.raises(Exception, match="Expected arg_val to be a Tensor, got <class 'NoneType'>"):
            compiled(q, torch.tensor(True, device=device))
        return
    for condition in (True, False):
        assert torch.equal(compiled(q, torch.tensor(condition, device=device)), attend(q) if condition else q)


@pytest.mark.parametrize("pages", [3, 3000], ids=["small", "of huge pages"])
@pytest.mark.parametrize("give_device", [False, True])
def test_a_cache_made_in_a_graph(paged_attn, device, pages, give_device):
    """Without a device it is torch's default one."""
    torch.compiler.reset()
    options = {"device": device} if give_device else {}

    def make():
        k_cache, v_cache = paged_attn.empty_paged_cache(pages, 16, 2, 64, 32, dtype=torch.float16, **options)
        return k_cache.zero_(), v_cache.zero_()

    compiled = torch.compile(make, backend="eager", fullgraph=True)
    with torch.device(device if not give_device else "cpu"):
        caches = compiled()
    assert [x.shape for x in caches] == [(pages, 16, 2, 64), (pages, 16, 2, 32)]
    assert all(x.dtype == torch.float16 and x.device.type == device and not x.any() for x in caches)


class Recorder(TorchDispatchMode):
    """Collects the calls of the operators of one namespace."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace, self.calls = namespace, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == self.namespace:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_opcheck(paged_attn, device, name):
    """Schema, fake and compiled behaviour of the raw operators, with the arguments that the public functions pass."""
    call = cases.build(CASES[name]).to(device)
    names = ("k", "v", "block_table", "cache_seqlens", "cu_seqlens_k_new")
    with torch.no_grad(), Recorder(paged_attn._ops.ops.name) as recorder:
        run(paged_attn, call)
        if call.case.append and call.case.page_size:
            written = {n: call.kwargs[n] for n in names if n in call.kwargs}
            paged_attn.kv_paged_write(**written, **dict(zip(("k_cache", "v_cache"), call.caches())))
    assert recorder.calls
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_static", "test_autograd_registration"]
    if call.case.kv_dtype:
        tests.remove("test_schema")  # PyTorch's comparison before and after knows no fp8
    for func, args, kwargs in recorder.calls:
        torch.library.opcheck(func, args, kwargs, test_utils=tests)


def test_opcheck_leaves_no_operator_out(paged_attn, device):
    """The operators that the calls above reach, and the two that only tell: they return text, which no graph holds."""
    operators, reached = paged_attn._ops.ops, set()
    explain = operators.explain_flash_attn_with_kvcache.default
    for case in (CASES["decode"], CASES["append"], CASES["out"]):
        call = cases.build(case).to(device)
        with torch.no_grad(), Recorder(operators.name) as recorder:
            run(paged_attn, call)
        for func, args, kwargs in recorder.calls:
            torch.library.opcheck(explain, args, kwargs, test_utils="test_schema")
            reached.add(func._schema.name)
    torch.library.opcheck(operators.instruction_set.default, (), {}, test_utils="test_schema")
    parts, lse = torch.randn(3, 5, 4, 16, device=device), torch.randn(3, 5, 4, 1, device=device)
    arguments = (parts, lse, torch.empty_like(parts[0]), torch.empty_like(lse[0, ..., 0]))
    torch.library.opcheck(operators.merge_parts.default, arguments, test_utils=["test_schema", "test_faketensor"])
    names = ("kv_paged_write", "merge_parts", "explain_flash_attn_with_kvcache", "instruction_set")
    names += ("merge_with_peers",) if torch.device(device).type == "cuda" else ()  # test_merge_with_peers.py checks it
    reached |= {f"{operators.name}::{name}" for name in names}
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(operators.name + "::")}
    assert reached == registered


def test_results_have_the_right_form_on_fake_tensors(paged_attn, device):
    """Shapes, dtypes and strides without data, as a compiler sees them."""
    for case in CASES.values():
        call = cases.build(case)
        expected = run(paged_attn, cases.build(case).to(device))
        meta = call.to("meta")
        for x, y in zip(run(paged_attn, meta), expected):
            assert (x.shape, x.dtype, x.stride(), x.device.type) == (y.shape, y.dtype, y.stride(), "meta")


class Layer(torch.nn.Module):
    """Attention as a decoder has it: one call that appends and attends, one over a window with the lse."""

    def __init__(self, paged_attn):
        super().__init__()
        self.paged_attn = paged_attn
        self.qkv, self.out = torch.nn.Linear(64, 8 * 32), torch.nn.Linear(4 * 32, 64)

    def forward(self, x, k_cache, v_cache, table, lens):
        q, k, v = self.qkv(x).unflatten(-1, (8, 32)).split((4, 2, 2), dim=-2)
        attend = self.paged_attn.flash_attn_with_kvcache
        near = attend(q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, causal=True)
        names = {"cache_seqlens": lens + 1, "block_table": table, "return_softmax_lse": True}
        far, lse = attend(q, k_cache, v_cache, window_size=(7, 0), softcap=3.0, **names)
        return self.out((near + far).flatten(-2)), lse


# No Python of this package: the operators' library and the exported model are all that a server needs.
SERVE = """
import sys, torch
library, package, inputs, outputs = sys.argv[1:]
torch.ops.load_library(library)
model = torch._inductor.aoti_load_package(package)
torch.save([(model(*call), call) for call in torch.load(inputs)], outputs)
"""
LOAD = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"


def load_without_this_package(device, folder):
    """How a process ends that only loads a model of torch alone: its return code, below 0 a signal."""
    model = torch.nn.Linear(8, 8).to(device).eval().requires_grad_(False)
    exported = torch.export.export(model, (torch.randn(2, 8, device=device),))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "plain.pt2"))
    return subprocess.run([sys.executable, "-c", LOAD, package]).returncode


def test_exported_model(paged_attn, device, tmp_path, emulated):
    """torch.export with a free batch, AOTInductor, and a process of its own that loads the package and runs it."""
    if emulated:
        pytest.skip("inductor's code for MPS needs Metal's compiler, which the emulated device does not have")
    torch.manual_seed(0)
    model = Layer(paged_attn).to(device).eval().requires_grad_(False)
    k_cache, v_cache = (
        x.normal_() for x in paged_attn.empty_paged_cache(32, 16, 2, 32, dtype=torch.float32, device=device)
    )

    def inputs(batch):
        table = torch.randperm(32)[: batch * 4].view(batch, 4).int().to(device)
        lens = torch.randint(1, 60, (batch,), dtype=torch.int32, device=device)
        return torch.randn(batch, 1, 64, device=device), k_cache.clone(), v_cache.clone(), table, lens

    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = ({0: batch}, None, None, {0: batch}, {0: batch})
    exported = torch.export.export(model, inputs(3), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))

    calls = [inputs(b) for b in (3, 1, 5)]
    torch.save(calls, tmp_path / "inputs.pt")
    library = next(Path(paged_attn.__file__).parent.glob("*.so"))
    names = [library, package, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    served = subprocess.run([sys.executable, "-c", SERVE, *map(str, names)])
    if served.returncode < 0 and load_without_this_package(device, tmp_path) == served.returncode:
        pytest.skip("torch cannot load a model of its own here: the same signal ends that process")
    assert served.returncode == 0
    for call, (results, after) in zip(calls, torch.load(tmp_path / "outputs.pt"), strict=True):
        expected = model(*call)
        for x, y in zip((*results, *after), (*expected, *call), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert not torch.equal(after[1], k_cache)  # the append is part of the graph
