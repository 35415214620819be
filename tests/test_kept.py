"""What is kept of the reference (kept.py) never makes a wrong result right: another input is another key, a result is
judged as before, and a damaged file is no file. No kernel is called.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import cases
import compare
import kept
import pytest
import reference
import torch
from cases import Case


class Computed(Exception):
    """The reference was asked."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_ATTN_TEST_KEEP", str(tmp_path))
    return tmp_path


@pytest.fixture
def call():
    return cases.build(Case(batch=2, q_len=2, sink="float32", window=(9, 3), softcap=2.5))


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def judged(call, change=lambda out, lse: None, **overrides):
    """A right result, in float64 rounded once, and then changed, is compared with what is kept or computed."""
    options = {n: x for n, x in call.kwargs.items() if n not in compare.NOT_SEMANTIC} | overrides
    k_cache, v_cache = call.caches()
    out, lse = reference.attend(**options, k_cache=k_cache, v_cache=v_cache)
    out, lse = out.to(call.kwargs["q"].dtype), lse.float()
    change(out, lse)
    compare.assert_result(out, lse, options, k_cache, v_cache, call.seqlens_new)


def refuse_to_compute(monkeypatch):
    def attend(*args, arithmetic=reference.Exact, attend=reference.attend, **kwargs):
        if arithmetic is not reference.Exact:  # PyTorch's samples, which only the judgement asks for
            raise Computed
        return attend(*args, **kwargs)

    monkeypatch.setattr(reference, "attend", attend)


WRONG = {
    "a number of out": lambda out, lse: out[0, 0, 0, :1].add_(0.5),
    "NaN in out": lambda out, lse: out[0, 1, 2, 3:4].fill_(torch.nan),
    "a row never written": lambda out, lse: out[0, 0].zero_(),
    "a number of lse": lambda out, lse: lse[0, 0, :1].add_(0.01),
    "infinity in lse": lambda out, lse: lse[0, 1, :1].fill_(torch.inf),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_fails_also_on_what_is_kept(folder, call, monkeypatch, wrong):
    with pytest.raises(AssertionError, match="wrong, worst at"):
        judged(call, WRONG[wrong])  # computed, and kept
    assert len(files(folder)) == 1
    refuse_to_compute(monkeypatch)
    judged(call)
    with pytest.raises(AssertionError, match="wrong, worst at"):
        judged(call, WRONG[wrong])
    assert len(files(folder)) == 1


CHANGES = {
    "a value of q": lambda call: {"q": call.kwargs["q"].index_fill(3, torch.tensor([5]), 1.0)},
    "a dtype": lambda call: {"s_aux": call.kwargs["s_aux"].double()},
    "an option": lambda call: {"softcap": 2.0},
    "a tuple": lambda call: {"window_size": (9, 2)},
    "one option more": lambda call: {"attention_chunk": 8},
    "a length": lambda call: {"cache_seqlens": call.kwargs["cache_seqlens"] - torch.tensor([1, 0])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_input_is_computed(folder, call, monkeypatch, change):
    judged(call)
    refuse_to_compute(monkeypatch)
    with pytest.raises(Computed):
        judged(call, **CHANGES[change](call))


def test_a_changed_cache_is_computed(folder, call, monkeypatch):
    judged(call)
    refuse_to_compute(monkeypatch)
    judged(call)
    k_cache, _ = call.caches()
    k_cache[k_cache.isfinite()] *= 2
    with pytest.raises(Computed):
        judged(call)


def test_keys_tell_apart_what_has_the_same_bytes():
    x = torch.arange(12.0)
    alike = [x, x.view(3, 4), x.view(torch.int32), x.view(4, 3), x[:11], 1, 1.0, True, "1", None, [], {}, [1], {"a": 1}]
    assert len({kept.key_of(value) for value in [*alike, [alike], {"a": 2}, {"b": 1}]}) == len(alike) + 3
    strided = torch.stack([x, x], 1)[:, 0]
    assert kept.key_of(strided) == kept.key_of(x), "where the numbers lie is no input"
    with pytest.raises(AssertionError, match="no key for"):
        kept.key_of(object())


def cut(path, other):
    path.write_bytes(path.read_bytes()[:-1])


def turn_a_bit(path, other):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut short": cut,
    "empty": lambda path, other: path.write_bytes(b""),
    "a bit": turn_a_bit,
    "removed": lambda path, other: path.unlink(),
    "another result": lambda path, other: path.write_bytes(other.read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_again(folder, damage):
    computed = []

    @kept.keep
    def double(x):
        computed.append(x)
        return (2 * x,)

    x = torch.arange(5.0)
    double(x)
    (path,) = files(folder)
    good = path.read_bytes()
    double(x + 1)
    (other,) = set(files(folder)) - {path}
    DAMAGES[damage](path, other)
    for _ in range(2):
        assert torch.equal(double(x)[0], 2 * x)
    assert len(computed) == 3 and path.read_bytes() == good


def test_one_process_computes_and_the_others_wait(folder):
    computed = []

    @kept.keep
    def slow(x):
        computed.append(x)
        time.sleep(0.2)
        return (2 * x,)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(slow, [torch.ones(3)] * 4))
    assert len(computed) == 1 and all(torch.equal(result, torch.full((3,), 2.0)) for (result,) in results)


def test_a_full_folder_takes_nothing_more(folder, monkeypatch):
    monkeypatch.setattr(kept, "FOLDERS", 1)
    monkeypatch.setattr(kept, "ROOM", 20_000)
    same = kept.keep(lambda x: (x,))
    for i in range(9):
        assert torch.equal(same(torch.full((1000,), float(i)))[0], torch.full((1000,), float(i)))
    assert 2 <= len(files(folder)) <= 4 and sum(path.stat().st_size for path in files(folder)) <= 20_000 + 9 * 32


def test_nothing_is_kept_unless_asked(tmp_path, call, monkeypatch):
    monkeypatch.delenv("PAGED_ATTN_TEST_KEEP", raising=False)
    monkeypatch.chdir(tmp_path)
    judged(call)
    assert os.listdir(tmp_path) == []
