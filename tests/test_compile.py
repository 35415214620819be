"""torch.compile(fullgraph=True) of every public function, and PyTorch's own checks of the registered operators."""

import cases
import pytest
import torch
from cases import Case
from compare import assert_caches, judge, run
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
def backend(request, device):
    if request.param == "inductor" and device == "mps" and not torch.backends.mps.is_built():
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


def test_lengths_may_change_without_compiling_again(paged_attn, device):
    """A decode loop: other values every step, one graph."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(paged_attn.flash_attn_with_kvcache, backend=count, fullgraph=True)
    case = Case(append=1, causal=True, dtype="float32", page_size=64)
    call = cases.build(case).to(device)
    k_cache, v_cache = call.caches()
    for _ in range(4):
        with torch.no_grad():
            step(k_cache=k_cache, v_cache=v_cache, **call.kwargs)
        call.kwargs["cache_seqlens"] += 1
    assert len(graphs) == 1


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
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_static"]
    if call.case.kv_dtype:
        tests.remove("test_schema")  # PyTorch's comparison before and after knows no fp8
    for func, args, kwargs in recorder.calls:
        torch.library.opcheck(func, args, kwargs, test_utils=tests)


def test_results_have_the_right_form_on_fake_tensors(paged_attn, device):
    """Shapes, dtypes and strides without data, as a compiler sees them."""
    for case in CASES.values():
        call = cases.build(case)
        expected = run(paged_attn, cases.build(case).to(device))
        meta = call.to("meta")
        for x, y in zip(run(paged_attn, meta), expected):
            assert (x.shape, x.dtype, x.stride(), x.device.type) == (y.shape, y.dtype, y.stride(), "meta")
