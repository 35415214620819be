"""explain: what a call would do, without doing it. The routes of a device are tested beside its own tests."""

import time
from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from compare import assert_same_bytes, run, torch_threads
from test_isa import INTEL
from torch._subclasses.fake_tensor import FakeTensorMode

CASES = {
    "decode": Case(kv_len=200),
    "append": Case(kv_len=200, append=3, q_len=3, causal=True, give_out=True),
    "prefill": Case(q_len=80, kv_len=100, causal=True),
    "fp8": Case(kv_len=100, kv_dtype="float8_e4m3fn", descale="full"),
    "batch 0": Case(batch=0),
    "tokens without a request": Case(batch=0, q_len=0, varlen_q=True, spare=5),
    "no query": Case(q_len=0),
    "no query, no keys": Case(q_len=0, lens=(0, 0, 0, 0), page_size=0),
    "no heads": Case(q_heads=0),
    "no heads, append": Case(q_heads=0, append=3),
    "no heads at all": Case(q_heads=0, kv_heads=0),
    "no heads at all, contiguous": Case(q_heads=0, kv_heads=0, page_size=0),
    "no keys": Case(lens=(0, 0, 0, 0)),
}


def explain(paged_attn, call, **overrides):
    k_cache, v_cache = call.caches()
    return paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **(call.kwargs | overrides))


@pytest.mark.parametrize("name", CASES)
def test_nothing_runs(paged_attn, device, name):
    """A route, reasons for every route before it, numbers; and no byte of cache or out is written."""
    call, before = cases.build(CASES[name]).to(device), cases.build(CASES[name])
    explained = explain(paged_attn, call)
    assert explained.route and explained.route not in explained.why_not
    assert all(isinstance(reason, str) and reason for reason in explained.why_not.values())
    assert all(isinstance(number, int) for number in explained.plan.values())
    for a, b in zip(call.storage, before.storage):
        assert_same_bytes("cache", a, b)
    if "out" in call.kwargs:
        assert call.kwargs["out"].isnan().all()
    run(paged_attn, call)


def test_the_errors_are_those_of_the_call(paged_attn, device):
    call = cases.build(Case()).to(device)
    with pytest.raises(
        RuntimeError, match=r"^cache_seqlens: expected int32 \[batch = 4 \(from q\)\], got int64 \[4\]$"
    ):
        explain(paged_attn, call, cache_seqlens=call.kwargs["cache_seqlens"].long())


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_data_are_refused(paged_attn, device, kind):
    def explain_zeros(device):
        q, cache = torch.zeros(2, 3, 4, 64, device=device), torch.zeros(2, 8, 2, 64, device=device)
        paged_attn.explain(q, cache, cache)

    with pytest.raises(ValueError, match=r"^q: expected a tensor with data \(the plan depends on lengths\), got one "):
        if kind == "meta":
            explain_zeros("meta")
        else:
            with FakeTensorMode():
                explain_zeros(device)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "cache_seqlens", "block_table", "alibi_slopes", "out"])
def test_one_tensor_without_data_is_refused(paged_attn, device, name):
    call = cases.build(Case(append=3, q_len=3, alibi="head", give_out=True)).to(device)
    given = call.kwargs | dict(zip(("k_cache", "v_cache"), call.caches()))
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor with data \(the plan depends on lengths\)"):
        paged_attn.explain(**(given | {name: given[name].to("meta")}))


def test_other_functions(paged_attn, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, device=device) for n, h in ((5, 4), (20, 2), (20, 2)))
    by_func = paged_attn.explain(q, k, v, function=paged_attn.flash_attn_func)
    by_cache = paged_attn.explain(q, k, v)
    assert by_func == by_cache
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 10], [0, 20, 40]))
    assert paged_attn.explain(*packed, cu_q, cu_k, 5, 20, function=paged_attn.flash_attn_varlen_func).route


def test_functions_of_flash_attention_3(paged_attn, device):
    q, k, v = (torch.zeros(2, n, h, 64, device=device) for n, h in ((5, 4), (20, 2), (20, 2)))
    for name in ("flash_attn_func", "flash_attn_with_kvcache", "flash_attn_varlen_func"):
        more = (None, None) if name == "flash_attn_varlen_func" else ()
        assert paged_attn.explain(q, k, v, *more, function=getattr(paged_attn.fa3, name)).route


def test_functions_that_do_not_attend_are_refused(paged_attn, device):
    """Before they run: explain has no way to stop them."""
    case = Case(batch=3, lens=(20, 0, 33), append=2)
    call, before = cases.build(case).to(device), cases.build(case)
    k_cache, v_cache = call.caches()
    tokens = [call.kwargs[name] for name in ("k", "v")]
    ran = []
    others = {
        "kv_paged_write": paged_attn.kv_paged_write,
        "merge_attn_states": paged_attn.merge_attn_states,
        "append": lambda *arguments: ran.append(arguments),
    }
    others["append"].__name__ = "append"
    for name, function in others.items():
        match = f"^function: expected an attention function of paged_attn or paged_attn.fa3, got {name}$"
        with pytest.raises(ValueError, match=match):
            paged_attn.explain(
                *tokens, k_cache, v_cache, call.kwargs["block_table"], call.kwargs["cache_seqlens"], function=function
            )
    assert not ran
    for a, b in zip(call.storage, before.storage):
        assert_same_bytes("cache", a, b)


# Over 8-bit caches: up to how many rows which route.
ROUTES_OF_8_BIT_CACHES = {
    "bfloat16": {
        "avx512_amx_fp16": {2: "in_place_bf16", 16: "tiles_in_place_bf16", 40: "tiles_bf16"},
        "avx512_amx": {2: "in_place_bf16", 16: "tiles_in_place_bf16", 40: "tiles_bf16"},
        "avx512_intel": {15: "in_place_bf16", 40: "packed_f32"},
        "avx512_bf16": {15: "in_place_bf16", 40: "packed_bf16"},
        "avx512_zen5": {15: "in_place_bf16", 40: "packed_bf16"},
        "avx512": {15: "in_place_f32", 40: "packed_f32"},
    },
    "float16": {
        "avx512_intel": {15: "in_place_f32", 40: "packed_f32"},
        "avx512_bf16": {15: "in_place_f32", 40: "packed_f32"},
        "avx512": {15: "in_place_f32", 40: "packed_f32"},
        "avx2": {19: "in_place_f32", 40: "packed_f32"},
    },
}


class TestCpu:
    """The products of the CPU: from some number of rows on, keys and values are laid out first."""

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, device):
        if device != "cpu":
            pytest.skip("the CPU's routes")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_products(self, paged_attn, device, dtype):
        isa = paged_attn.cpu_isa().split()[0]
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32"}
        own = {"avx512_bf16": ["bfloat16"], "avx512_zen5": ["bfloat16"]}
        own |= {"neon_bf16": ["bfloat16", "float16"], "neon_fp16": ["float16"]}
        numbers = names[dtype if dtype in own.get(isa, []) else "float32"]
        packed = f"tiles_{names[dtype]}" if isa.startswith("avx512_amx") and dtype != "float32" else f"packed_{numbers}"
        # Of 40 dimensions: tiles in place want whole ones.
        few, many = (explain(paged_attn, cases.build(Case(q_len=n, dtype=dtype, head_dim=40))) for n in (1, 40))
        assert few.route == f"in_place_{numbers}"
        assert "rows (q_len * group) of a kv_head in an item, got 2" in few.why_not[packed]
        assert many.route == packed
        assert few.plan["packed_items"] == 0
        assert many.plan["packed_items"] == many.plan["items"] == 4

    @pytest.mark.every_isa
    @pytest.mark.parametrize("dtype", list(ROUTES_OF_8_BIT_CACHES))
    def test_products_of_8_bit_caches(self, paged_attn, device, dtype):
        routes = ROUTES_OF_8_BIT_CACHES[dtype].get(paged_attn.cpu_isa().split()[0], {})
        first = 1
        for last, route in routes.items():
            for rows in (first, last):
                case = Case(batch=1, kv_len=600, q_heads=rows, kv_heads=1, kv_dtype="float8_e4m3fn", dtype=dtype)
                explained = explain(paged_attn, cases.build(case))
                assert explained.route == route
                assert explained.plan["packed_items"] == (0 if "in_place" in route else 1)
            first = last + 1

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_few_rows_in_tiles(self, paged_attn, device, dtype):
        """Decode with a group takes the matrix unit where keys and values lie, unless there are hardly any keys."""
        isa = paged_attn.cpu_isa()
        if isa != "avx512_amx_fp16" and (isa, dtype) != ("avx512_amx", "bfloat16"):
            pytest.skip("this processor has no such matrix unit")
        name = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        decode = Case(batch=1, dtype=dtype, q_heads=8, kv_heads=2, head_dim=128)
        long, short = (explain(paged_attn, cases.build(replace(decode, lens=(n,)))) for n in (32, 31))
        assert long.route == f"tiles_in_place_{name}" and f"tiles_{name}" in long.why_not
        assert short.route == "in_place_f32"
        assert "at least 32 keys, got 4 rows and 31 keys" in short.why_not[f"tiles_in_place_{name}"]

    @pytest.mark.every_isa
    def test_who_fetches_the_next_keys(self, paged_attn, device):
        """On Intel's processors before Granite Rapids their prefetchers do where a slot is long; not those of AMD's."""
        isa = paged_attn.cpu_isa().split()[0]
        call, short = (cases.build(Case(q_heads=16, kv_heads=n, head_dim=128, dtype="bfloat16")) for n in (8, 1))
        plan = explain(paged_attn, call).plan
        assert explain(paged_attn, short).plan["read_ahead_items"] == 0
        if isa != "avx512":  # no prefetcher finds the next page; on Ice Lake such pages are read faster all the same
            pages = cases.build(Case(q_heads=16, kv_heads=8, head_dim=128, dtype="bfloat16", page_size=1))
            assert explain(paged_attn, pages).plan["read_ahead_items"] == 0
        if isa == "avx512" or (isa == "avx512_intel" and not INTEL):
            assert plan["read_ahead_items"] == plan["items"]
        elif isa not in ("avx512_intel", "avx512_amx"):  # avx512_amx_fp16 is Granite Rapids, those may be
            assert plan["read_ahead_items"] == 0

    def test_float16_in_tiles(self, paged_attn, device):
        """As few rows as in bfloat16 where the matrix unit multiplies float16, more where a number is two pieces."""
        fewest = {"avx512_amx_fp16": 8, "avx512_amx": 24}.get(paged_attn.cpu_isa())
        if not fewest:
            pytest.skip("this processor has no AMX")
        case = Case(batch=1, dtype="float16", kv_len=20, kv_heads=1)
        less, enough = (explain(paged_attn, cases.build(replace(case, q_heads=n))) for n in (fewest - 1, fewest))
        assert (less.route, enough.route) == ("in_place_f32", "tiles_fp16")

    def test_pages_of_one_slot_are_checked_fast(self, paged_attn, device):
        """Millions of page numbers, in every layer: to look at them takes no longer than to copy them. (Four times
        that, for other programs take their share too.)"""
        q = torch.zeros(64, 1, 8, 128, dtype=torch.bfloat16)
        cache = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(2**21, 1, 1, 128)
        table = torch.arange(2**21, dtype=torch.int32).view(64, -1)
        lens = torch.full((64,), table.shape[1], dtype=torch.int32)
        keywords = {"block_table": table, "cache_seqlens": lens, "causal": True}

        def seconds(work):
            times = []
            for _ in range(7):
                start = time.process_time()
                work()
                times.append(time.process_time() - start)
            return min(times)

        with torch_threads(1):
            assert seconds(lambda: paged_attn.explain(q, cache, cache, **keywords)) < 4 * seconds(table.clone)

    @pytest.mark.parametrize("splits", [1, 3, 7])
    def test_splits_that_were_asked_for(self, paged_attn, device, splits):
        call = cases.build(Case(kv_len=3000))
        assert explain(paged_attn, call, num_splits=splits).plan["splits"] == splits

    @pytest.mark.parametrize("options", [{"deterministic": True}, {"num_splits": 10**9}], ids=str)
    @pytest.mark.parametrize("q_len, keys", [(1, 131072), (100, 131072), (4096, 131072), (1, 4_000_000)])
    def test_memory_of_partial_results(self, paged_attn, device, q_len, keys, options):
        """At most 32 MiB for a request, however many rows and keys it has. Nothing but a promise is in this cache."""
        q = torch.empty(2, q_len, 1, 128, dtype=torch.bfloat16).expand(-1, -1, 32, -1)
        cache = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16).expand(2, keys, 8, -1)
        out = torch.empty(2, q_len, 32, 128, dtype=torch.bfloat16)
        plan = paged_attn.explain(q, cache, cache, causal=True, out=out, **options).plan
        assert plan["partial_bytes"] <= 2 * 32 * 2**20
        assert (plan["splits"] > 1) == (q_len < 4096)

    @pytest.mark.every_isa
    def test_small_calls(self, paged_attn, device):
        """Two threads share keys that their caches hold: half of the kv_heads each, or on Intel half of the keys."""
        call = cases.build(Case(batch=1, kv_len=512, q_heads=32, kv_heads=8, head_dim=128))
        with torch_threads(2):
            plan = explain(paged_attn, call).plan
        by_keys = paged_attn.cpu_isa() in ("avx512", "avx512_intel", "avx512_amx", "avx512_amx_fp16")
        assert plan["tasks"] == plan["threads"] == 2
        assert plan["items"] == (1 if by_keys else 2) and plan["splits"] == (2 if by_keys else 1)

    def test_one_long_request_is_cut(self, paged_attn, device):
        """Every thread has work, also where there is one request with one kv_head."""
        call = cases.build(Case(batch=1, kv_len=60000, q_heads=4, kv_heads=1))
        with torch_threads(4):
            plan = explain(paged_attn, call).plan
        assert plan["threads"] == 4
        assert plan["tasks"] >= 4 and plan["splits"] >= 4
