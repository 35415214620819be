"""Several Python threads at once, and any number of worker threads."""

import threading

import cases
import pytest
import torch
from cases import Case
from compare import check, run, torch_threads

MIX = [
    Case(kv_len=300, q_heads=16, kv_heads=4, head_dim=128),
    Case(batch=1, kv_len=2000, dtype="float32", causal=True),
    Case(kv_len=100, q_len=3, append=3, rotary_dim=64, causal=True),
    Case(kv_len=200, kv_dtype="float8_e4m3fn", descale="full", append=2),
    Case(kv_len=150, q_len=100, varlen_q=True, causal=True, dtype="float16", page_size=3),
    Case(head_dim=64, head_dim_v=512, qv=True, q_heads=8),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("num_threads", [2, 8])
def test_python_threads(paged_attn, device, num_threads):
    """Each thread calls on caches of its own, all cases in another order; every result is bitwise the lone one."""
    expected = []
    for case in MIX:
        call = cases.build(case).to(device)
        expected.append((*run(paged_attn, call, deterministic=True), *call.storage))
    start, failures = threading.Barrier(num_threads), []
    calls = [[cases.build(case).to(device) for case in MIX * 4] for _ in range(num_threads)]

    def work(index):
        start.wait()
        for i in range(len(MIX) * 4):
            which = (i * (2 * index + 1) + index) % (len(MIX) * 4)  # an odd step visits each once
            call = calls[index][which]
            got = (*run(paged_attn, call, deterministic=True), *call.storage)
            for name, a, b in zip(("out", "lse", "cache", "cache"), got, expected[which % len(MIX)]):
                if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                    failures.append(f"thread {index}: {name} of {call.case}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


@pytest.mark.sanitize
def test_threads_share_a_cache(paged_attn, device):
    """Readers of one cache do not disturb each other, nor does a writer of other pages."""
    call = cases.build(MIX[0]).to(device)
    expected = run(paged_attn, call, deterministic=True)
    k_cache, v_cache = call.caches()
    unused = sorted(set(range(k_cache.shape[0])) - set(call.kwargs["block_table"].flatten().tolist()))
    slots = torch.tensor([unused[0] * k_cache.shape[1]], device=device)
    new = torch.ones(1, 4, 128, dtype=torch.bfloat16, device=device)
    failures, stop = [], threading.Event()

    def write():
        while not stop.is_set():
            paged_attn.kv_paged_write(new, new, k_cache, v_cache, None, None, slot_mapping=slots)

    def read():
        for _ in range(50):
            out, lse = run(paged_attn, call, deterministic=True)
            if not (torch.equal(out, expected[0]) and torch.equal(lse, expected[1])):
                failures.append("a reader got another result")

    writer, readers = threading.Thread(target=write), [threading.Thread(target=read) for _ in range(3)]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert not failures


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("case", MIX, ids=str)
def test_number_of_worker_threads(paged_attn, device, case, num_threads):
    with torch_threads(num_threads):
        check(paged_attn, case, device)
