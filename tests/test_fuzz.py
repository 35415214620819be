"""A fixed number of random calls, and that fuzz.py's judge says what reference.py says. Any number by hand: fuzz.py."""

import collections
import inspect
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

FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func", "kv_paged_write")
CALLS_PER_TEST = 50
KIND = torch.device(os.environ["PAGED_ATTN_TEST_DEVICE"]).type  # conftest.py has set it
TESTS = {"cpu": 30, "cuda": 60, "mps": 6}[KIND]  # of CALLS_PER_TEST; an emulated GPU is slow


@pytest.fixture(autouse=True)
def threads_as_before():
    with compare.one_thread():
        yield


@pytest.mark.parametrize("block", range(TESTS))
def test_random_calls(paged_attn, device, block):
    """Every call of the block is made; the first wrong ones are printed as code."""
    wrong = []
    for seed in range(block * CALLS_PER_TEST, (block + 1) * CALLS_PER_TEST):
        call = fuzz.draw(seed)
        if KIND == "mps" and "small" not in call.features:
            continue
        try:
            fuzz.run_call(paged_attn, call, device)
        except fuzz_judge.Wrong as error:
            wrong.append(fuzz.report(call, error))
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
        if known and not call.fault and call.function != "kv_paged_write" and 0 < size < 3000:
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


def test_judge_sees_what_is_wrong():
    """A right result passes; one number too far, one changed byte, one unwritten row do not."""
    call = next(c for c in small_calls(50) if c.arguments.get("return_softmax_lse") and "k" not in c.arguments)
    expected, lse, _, _ = fuzz_judge.attend(call, cases.carve(call.case, call.storage))
    dtype = call.arguments["q"].dtype
    dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype

    def judged(change=lambda out, lse, storage: None):
        arguments, storage = call.on("cpu")
        out = arguments.get("out", torch.empty(expected.shape, dtype=dtype))
        out.copy_(expected)
        result = out, lse.float().mT.contiguous()
        change(*result, storage)
        fuzz_judge.judge(call, result, arguments, storage)

    judged()
    faults = (
        lambda out, lse, storage: out.view(-1)[:1].add_(1.0),
        lambda out, lse, storage: out.view(-1)[-1:].fill_(torch.nan),
        lambda out, lse, storage: lse.view(-1)[:1].add_(0.5),
        lambda out, lse, storage: storage[0].view(torch.uint8).view(-1)[-1:].bitwise_xor_(1),
    )
    for fault in faults:
        with pytest.raises(fuzz_judge.Wrong):
            judged(fault)


def test_a_number_gives_one_call():
    for seed in range(40):
        a, b = fuzz.draw(seed), fuzz.draw(seed)
        assert a.code() == b.code() and a.fault == b.fault
        for x, y in zip(a.storage, b.storage):
            fuzz_judge.same_bytes("storage", x, y)


def test_every_argument_and_every_fault_is_drawn(paged_attn):
    """Every parameter of every public function is given, by some call, and every fault is made in some call."""
    drawn, spoiled = collections.defaultdict(set), set()
    for seed in range(2500):
        call = fuzz.draw(seed)
        drawn[call.function].update(call.arguments, call.neutral)
        spoiled.update(call.features if call.fault else ())
    for name in FUNCTIONS:
        parameters = inspect.signature(getattr(paged_attn, name)).parameters.values()
        missing = {p.name for p in parameters if p.kind != p.VAR_KEYWORD} - drawn[name]
        assert not missing, f"{name}: {missing} never given"
    wanted = {f"refused: {f.__name__}" for f in fuzz_faults.FAULTS} | {f"refused by {name}" for name in FUNCTIONS}
    assert not wanted - spoiled


def test_by_hand():
    """The command of the file's first lines prints the call as code."""
    command = [sys.executable, "fuzz.py", "--seed", "123", "--calls", "1"]
    shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert "fuzz.draw(123)" in shown.stdout and "paged_attn." in shown.stdout, shown.stderr
