"""The host code on the fake Metal (tools/metal_emulator), from Python to the encoder."""

import fake_mps
import pytest
import torch


def call(paged_attn, kv_len=40, **kwargs):
    """One decode step on the device, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, kv_len, 2, 64, generator=generator) for _ in range(2))
    q = torch.randn(2, 1, 8, 64, generator=generator)
    out = paged_attn.flash_attn_with_kvcache(*(t.to("mps") for t in (q, k, v)), causal=True, **kwargs)
    k, v = (t.double().repeat_interleave(4, 2).transpose(1, 2) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double().transpose(1, 2), k, v)
    return out, expected.transpose(1, 2)


def test_encodes_into_torchs_open_encoder_and_never_commits(paged_attn):
    call(paged_attn)  # makes the pipelines
    fake_mps.open_encoder()
    before = fake_mps.created()
    q = torch.zeros(1, 1, 4, 64, device="mps")
    k = torch.zeros(1, 8, 4, 64, device="mps")
    fake_mps.open_encoder()
    committed = fake_mps.created()["commits"]
    for _ in range(3):
        paged_attn.flash_attn_with_kvcache(q, k, k)
    assert fake_mps.created()["commits"] == committed
    assert fake_mps.created()["libraries"] == before["libraries"]


def test_pipelines_are_made_once(paged_attn):
    call(paged_attn, softcap=3.0)
    before = fake_mps.created()
    call(paged_attn, softcap=3.0)
    after = fake_mps.created()
    assert (after["libraries"], after["pipelines"]) == (before["libraries"], before["pipelines"])


@pytest.mark.parametrize("limit", [32, 64, 512])
@pytest.mark.parametrize("kv_len", [40, 3000])
def test_limit_of_a_pipeline(paged_attn, limit, kv_len):
    """A device may allow a kernel fewer threads than 1024: fewer are used, or the call says so."""
    fake_mps.limit_threads("", limit)
    try:
        out, expected = call(paged_attn, kv_len)
        torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=0)
    except RuntimeError as error:
        assert "threadgroups of at least" in str(error)
        assert "got " in str(error)
    finally:
        fake_mps.limit_threads("", 0)


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kv_len", [40, 3000])
def test_order_of_threads_does_not_matter(paged_attn, kv_len, seed):
    fake_mps.set_seed(0)
    plain = call(paged_attn, kv_len)[0].cpu()
    fake_mps.set_seed(seed)
    try:
        assert torch.equal(call(paged_attn, kv_len)[0].cpu(), plain)
    finally:
        fake_mps.set_seed(0)


def test_dispatches(paged_attn):
    """One where no request can be long, two with splits, one more for an append; one for a write."""
    q, new = torch.zeros(1, 1, 8, 64, device="mps"), torch.zeros(1, 1, 2, 64, device="mps")
    seqlens = torch.tensor([99], dtype=torch.int32, device="mps")
    counts = []
    for capacity, k in ((100, None), (9000, None), (100, new)):
        cache = torch.zeros(1, capacity, 2, 64, device="mps")
        fake_mps.dispatched()
        paged_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=seqlens, causal=True)
        counts.append(len(fake_mps.dispatched()))
    slots = torch.tensor([5], device="mps")
    paged_attn.kv_paged_write(new[0], new[0], cache, cache.clone(), None, None, slot_mapping=slots)
    counts.append(len(fake_mps.dispatched()))
    assert counts == [1, 2, 2, 1]
