"""The reference and the cases themselves, against definitions that share nothing with them. No kernel is called."""

import itertools

import cases
import pytest
import reference
import torch
from cases import Case
from compare import with_tensor_lengths


def test_visible_keys_is_the_contract():
    """The inequalities of the contract, key by key."""
    options = itertools.product(range(-6, 8), range(8), (0, 2), (-1, 0, 3), (-1, 0, 2), (0, 1, 3))
    for q_pos, kv_len, leftpad, left, right, chunk in options:
        p = q_pos - leftpad  # chunks count from the first key that exists
        expected = [
            j
            for j in range(kv_len)
            if j >= leftpad
            and (left == -1 or j >= q_pos - left)
            and (right == -1 or j <= q_pos + right)
            and (chunk == 0 or leftpad + (p // chunk) * chunk <= j < leftpad + (p // chunk + 1) * chunk)
        ]
        assert reference.visible_keys(q_pos, kv_len, leftpad, left, right, chunk) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 2)])
def test_reference_is_scaled_dot_product_attention(causal, window):
    """In float64, where PyTorch's own function says the same: a mask, grouped heads."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 6, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 24)
    lens = torch.tensor([12, 12])
    out, lse = reference.attend(q, k, v, cache_seqlens=lens, causal=causal, window_size=window)
    distance = torch.arange(12)[None] - torch.arange(5, 12)[:, None]
    mask = torch.ones(7, 12, dtype=torch.bool)
    if window[0] >= 0:
        mask &= distance >= -window[0]
    if causal or window[1] >= 0:
        mask &= distance <= (0 if causal else window[1])
    heads = [x.double().transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    s = heads[0] @ heads[1].repeat_interleave(3, 1).mT / 4
    torch.testing.assert_close(lse, s.masked_fill(~mask, -torch.inf).logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_sink_takes_its_share():
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 5, 1, 8), torch.randn(1, 5, 1, 8)
    lens, sink = torch.tensor([5]), torch.tensor([0.5, -torch.inf])
    plain, plain_lse = reference.attend(q, k, v, cache_seqlens=lens)
    out, lse = reference.attend(q, k, v, cache_seqlens=lens, s_aux=sink)
    share = torch.exp(plain_lse) / (torch.exp(plain_lse) + torch.exp(sink.double())[:, None])
    torch.testing.assert_close(out, plain * share.transpose(1, 2)[..., None])
    torch.testing.assert_close(lse, torch.log(torch.exp(plain_lse) + torch.exp(sink.double())[:, None]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved):
    x, angle = torch.randn(4, 3, 10).double(), torch.randn(9, 4).double()
    pairs = x[..., :8].view(4, 3, 4, 2) if interleaved else torch.stack([x[..., :4], x[..., 4:8]], -1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()).double(), angle[2:6, None])
    )
    expected = turned.flatten(-2) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], -1)
    got = reference.rotate(x, [2, 3, 4, 5], angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(got, torch.cat([expected, x[..., 8:]], -1))


@pytest.mark.parametrize("case", list(cases.ALONE.values()), ids=str)
def test_poison_is_there_and_the_reference_avoids_it(case):
    call = cases.build(case)
    kwargs = {n: x for n, x in with_tensor_lengths(call).items() if n not in ("k", "v", "cu_seqlens_k_new")}
    if case.append:
        names = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_seqlens", "cache_batch_idx")
        more = {n: kwargs[n] for n in names if n in kwargs}
        reference.append(
            call.kwargs["k"], call.kwargs["v"], *call.caches(), kwargs.get("block_table"), kwargs["cache_seqlens"],
            cu_seqlens_k_new=call.kwargs.get("cu_seqlens_k_new"), **more,
        )  # fmt: skip
    options = ("return_softmax_lse", "num_splits", "deterministic", "out", "max_seqlen_q")
    kwargs = {n: x for n, x in kwargs.items() if n not in (*options, "q")}
    out, lse = reference.attend(call.kwargs["q"], *call.caches(), seqlens_new=call.seqlens_new, **kwargs)
    assert torch.isfinite(out).all()
    assert not lse.isnan().any()
    for storage in call.storage:
        assert storage.float().isnan()[: cases.GUARD].all()
        assert storage.float().isnan()[cases.GUARD : -cases.GUARD].any()


def test_names_say_what_differs():
    assert str(Case()) == "defaults"
    assert str(Case(q_len=3, window=(1, -1))) == "q_len=3-window=(1,-1)"


def test_a_slice_stays_a_slice_on_its_way(device):
    """What a case says about strides and shared memory also holds on the device of the tests."""
    before = cases.build(Case(wide_q=True, append=2, descale="shared", layout="latent", kv_heads=1, head_dim_v=32))
    call = before.to(device)
    for name, x in before.kwargs.items():
        if not isinstance(x, torch.Tensor):
            continue
        y = call.kwargs[name]
        assert y.device.type == torch.device(device).type and y.untyped_storage().data_ptr() != 0
        assert (y.shape, y.stride(), y.storage_offset()) == (x.shape, x.stride(), x.storage_offset()), name
        assert torch.equal(y.cpu(), x), name
    q = call.kwargs["q"]
    assert q.storage_offset() == 1 and q.as_strided((1,), (1,), 0).isnan().all(), "poison beside q"
    k_cache, v_cache = call.caches()
    assert k_cache.data_ptr() == v_cache.data_ptr(), "a latent cache is one tensor"
