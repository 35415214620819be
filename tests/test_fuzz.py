"""A fixed number of random calls, and that fuzz.py's judge says what reference.py says. Any number by hand: fuzz.py."""

import inspect
import operator
import os
import subprocess
import sys
from pathlib import Path

import cases
import compare
import fuzz
import fuzz_faults
import fuzz_judge
import pytest
import reference
import torch

ATTENTION = ("flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func")
FUNCTIONS = (*ATTENTION, "kv_paged_write", *(f"fa3.{name}" for name in ATTENTION))  # of which some calls are spoiled
MERGES = ("merge_attn_states", "fa3.merge_state_v2")
CALLS_PER_TEST = 50
KIND = torch.device(os.environ["PAGED_ATTN_TEST_DEVICE"]).type  # conftest.py has set it
TESTS = {"cpu": 30, "cuda": 60, "mps": 6}[KIND]  # of CALLS_PER_TEST; an emulated GPU is slow


@pytest.fixture(autouse=True)
def threads_as_before():
    with compare.one_thread():
        yield


@pytest.mark.parametrize("block", range(TESTS))
def test_random_calls(paged_attn, device, block):
    """Every call of the block is made, on an emulated GPU the small ones; the first wrong ones are printed as code."""
    wrong, made = [], 0
    for seed in range(block * CALLS_PER_TEST, (block + 1) * CALLS_PER_TEST):
        call = fuzz.draw(seed)
        if KIND == "mps" and "small" not in call.features:
            continue
        made += 1
        try:
            fuzz.run_call(paged_attn, call, device)
        except fuzz_judge.Wrong as error:
            wrong.append(fuzz.report(call, error))
    assert made >= CALLS_PER_TEST // 2
    assert not wrong, f"{len(wrong)} wrong\n" + "\n\n".join(wrong[:3])


# What the reference has no word for; and it has no rule for a sink of inf, which takes everything.
UNKNOWN = set() if "q_descale" in inspect.signature(reference.attend).parameters else {"q_descale"}


def small_calls(count):
    found, seed = [], 0
    while len(found) < count:
        call = fuzz.draw(seed)
        size = sum(r.q_len * r.kv_len for r in call.requests)
        known = UNKNOWN.isdisjoint(call.arguments) and not any(
            name in call.arguments and (call.arguments[name] == torch.inf).any() for name in ("s_aux", "sinks")
        )
        if known and not call.fault and call.base != "kv_paged_write" and 0 < size < 3000:
            found.append(call)
        seed += 1
    return found


def test_judge_agrees_with_the_reference():
    """Request by request in fuzz_judge, row by row in reference: the same numbers."""
    names = ("softmax_scale", "causal", "softcap", "alibi_slopes", "cu_seqlens_q", "qv", "q_descale", "k_descale",
             "v_descale", "rotary_cos", "rotary_sin", "rotary_interleaved")  # fmt: skip
    for call in small_calls(150):
        a = call.arguments
        given = {name: a[name] for name in names if name in a}
        given["s_aux"] = a.get("s_aux", a.get("sinks"))
        for name in ("q_descale", "k_descale", "v_descale"):
            if name in given:
                given[name] = torch.stack(
                    [fuzz_judge.descale_of(a, name, b, call.case.kv_heads) for b in range(len(call.requests))]
                )
        given["window_size"] = tuple(a.get("window_size") or (-1, -1))
        given["attention_chunk"] = a.get("attention_chunk") or 0
        storage = tuple(s.clone() for s in call.storage)
        caches = cases.carve(call.case, storage)
        if any(r.new_len for r in call.requests):
            fuzz_judge.write_expected(call, caches)
        expected = fuzz_judge.attend(call, caches)
        # One contiguous row for each request, so that the reference needs to know nothing of pages and packing.
        requests, longest = call.requests, max(r.kv_len for r in call.requests)
        rows = [torch.full((len(requests), longest, *c.shape[2:]), torch.nan).to(c.dtype) for c in caches]
        for b, r in enumerate(requests):
            seen = fuzz_judge.visible(r, *fuzz_judge.locality(a)).any(0).nonzero()[:, 0]
            where = fuzz_judge.place(caches[0], fuzz_judge.table_of(a), r, seen)
            for row, cache in zip(rows, caches):
                bits = reference.BITS[row.itemsize]
                row.view(bits)[b, seen] = cache.view(bits)[where]
        if "rotary_cos" in a:
            given["rotary_seqlens"] = torch.tensor([r.rotary_base for r in requests])
        out, lse = reference.attend(
            a["q"], *rows, cache_seqlens=torch.tensor([r.kv_len for r in requests]), cache_leftpad=torch.tensor(
                [r.leftpad for r in requests]), **given
        )  # fmt: skip
        claimed = slice(0, sum(r.q_len for r in requests)) if "cu_seqlens_q" in a else slice(None)
        for actual, wanted in ((out, expected[0]), (lse.mT, expected[1])):
            torch.testing.assert_close(
                actual[claimed], wanted[claimed], rtol=1e-9, atol=1e-9, msg=fuzz.report(call, "")
            )


def rows_of(call, lse, kind):
    """Where the rows of a kind are, as a mask like lse by token."""
    claimed = torch.ones(lse.shape, dtype=torch.bool)
    if "cu_seqlens_q" in call.arguments:
        claimed[int(call.arguments["cu_seqlens_q"][-1]) :] = False
    return {"sees keys": lse.isfinite(), "sees none": claimed & (lse == -torch.inf), "of no request": ~claimed}[kind]


@pytest.mark.parametrize("kind", ["sees keys", "sees none", "of no request"])
def test_judge_sees_what_is_wrong(kind):
    """A right result passes; one number too far, one changed byte, one unwritten row do not, whatever the row sees."""
    for call in small_calls(200):
        if not call.arguments.get("return_softmax_lse") or "k" in call.arguments:
            continue
        expected, lse, _, _ = fuzz_judge.attend(call, cases.carve(call.case, call.storage))
        found = rows_of(call, lse, kind).nonzero()
        if len(found):
            break
    row, dtype = tuple(found[len(found) // 2].tolist()), call.arguments["q"].dtype
    dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype

    def judged(change=lambda out, lse, storage: None):
        arguments, storage = call.on("cpu")
        given = arguments.get("out")
        out = torch.empty(expected.shape, dtype=dtype) if given is None else given
        out.copy_(expected)
        result = out, lse.float().mT.contiguous()
        change(out, result[1].mT, storage)
        fuzz_judge.judge(call, result, arguments, storage)

    judged()
    faults = (
        lambda out, lse, storage: out[row][0].add_(1.0),
        lambda out, lse, storage: out[row][-1].fill_(torch.nan),
        lambda out, lse, storage: lse[row].fill_(1000.0),
        lambda out, lse, storage: lse[row].fill_(torch.nan),
        lambda out, lse, storage: storage[0].view(torch.uint8).view(-1)[-1:].bitwise_xor_(1),
    )
    for fault in faults:
        with pytest.raises(fuzz_judge.Wrong):
            judged(fault)


def test_judge_sees_a_wrong_merge():
    """The same for merge_attn_states and merge_state_v2."""
    seen, seed = set(), 0
    while len(seen) < len(MERGES):
        call, seed = fuzz.draw(seed), seed + 1
        if call.function not in MERGES or call.arguments[call.names[0]].numel() < 20 or call.function in seen:
            continue
        seen.add(call.function)
        result = merged_in_float64(call)
        fuzz_judge.judge_merge(call, result, {})
        for i in (0, 1):
            for wrong in (result[i] + 1.0, torch.where(torch.rand(result[i].shape) < 0.5, torch.nan, result[i])):
                changed = tuple(wrong if j == i else x for j, x in enumerate(result))
                with pytest.raises(fuzz_judge.Wrong):
                    fuzz_judge.judge_merge(call, changed, {})


def merged_in_float64(call):
    """The definition: out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)."""
    out_a, lse_a, out_b, lse_b = (call.arguments[name].double() for name in call.names[:4])
    weights = torch.softmax(torch.stack([lse_a, lse_b]), 0).nan_to_num(0.5)
    by_token = weights if call.heads_last else weights.mT
    out = (torch.stack([out_a, out_b]) * by_token[..., None]).sum(0).to(call.arguments[call.names[0]].dtype)
    return out, torch.logaddexp(lse_a, lse_b).float()


def test_a_number_gives_one_call():
    for seed in range(40):
        a, b = fuzz.draw(seed), fuzz.draw(seed)
        assert a.code() == b.code() and a.fault == b.fault
        for x, y in zip(a.storage, b.storage):
            fuzz_judge.same_bytes("storage", x, y)


def test_every_argument_and_every_fault_is_drawn(paged_attn):
    """Every parameter of every public function is given, by some call, and every fault is made in some call."""
    missing = {}
    for name in (*FUNCTIONS, *MERGES):
        parameters = inspect.signature(operator.attrgetter(name)(paged_attn)).parameters.values()
        missing[name] = {p.name for p in parameters if p.kind != p.VAR_KEYWORD}
    faults = {f"refused: {f.__name__}" for f in fuzz_faults.FAULTS} | {f"refused by {name}" for name in FUNCTIONS}
    for seed in range(15_000):
        call = fuzz.draw(seed)
        missing[call.function] -= call.given(call.neutral | call.arguments).keys()
        faults -= call.features
        if not faults and not any(missing.values()):
            return
    raise AssertionError(f"never drawn: {faults}, {missing}")


def test_by_hand():
    """The command of the file's first lines prints the call as code."""
    command = [sys.executable, "fuzz.py", "--seed", "123", "--calls", "1"]
    shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert "fuzz.draw(123)" in shown.stdout and "paged_attn." in shown.stdout, shown.stderr
