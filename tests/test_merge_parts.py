"""merge_parts, the operator behind context_parallel: the results of disjoint sets of keys as one, against float64."""

import pytest
import torch

# parts, tokens, heads, head_dim
SHAPES = [(2, 1, 32, 128), (8, 5, 12, 64), (3, 7, 5, 33), (64, 2, 8, 512), (1, 3, 3, 1), (2, 300, 32, 128)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture
def merge_parts(paged_attn, device):
    return paged_attn._ops.ops.merge_parts


def draw(shape, dtype, device):
    """Parts as ranks send them, each row with its lse behind it; some tokens have no key in a part, one has none.
    Nobody has written values there."""
    parts, tokens, heads, head_dim = shape
    torch.manual_seed(0)
    unit = 16 // dtype.itemsize
    width = (-(-head_dim // unit) + 1) * unit
    message = torch.randn(parts, tokens, heads, width).to(dtype)
    lse = message.view(torch.float32)[..., -1]
    lse.copy_(torch.randn(parts, tokens, heads) * 4)
    if tokens > 2:
        message[0, 1, :, :head_dim], lse[0, 1] = torch.nan, -torch.inf
        message[:, 2, :, :head_dim], lse[:, 2] = torch.nan, -torch.inf
    if tokens > 3:
        message[1, 3, :, :head_dim], lse[1, 3] = torch.nan, -1000
    message = message.to(device)
    return message[..., :head_dim], message.view(torch.float32)[..., -1:]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(merge_parts, device, shape, dtype):
    parts, lse = draw(shape, dtype, device)
    out = torch.full(shape[1:], torch.nan, dtype=dtype, device=device)
    merged_lse = torch.full(shape[1:-1], torch.nan, device=device)
    merge_parts(parts, lse, out, merged_lse)
    shares = lse.double().softmax(0).nan_to_num(0.0)
    expected = (parts.double().nan_to_num(0.0) * shares).sum(0)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(merged_lse.double(), lse[..., 0].double().logsumexp(0), rtol=1e-6, atol=5e-6)
    again = torch.empty_like(out)
    merge_parts(parts, lse, again)
    assert torch.equal(again, out)


def test_strided_result_and_nothing_to_do(merge_parts, device):
    parts, lse = draw((3, 4, 6, 32), torch.float32, device)
    plain, wide = torch.empty(4, 6, 32, device=device), torch.full((4, 6, 40), torch.nan, device=device)
    merge_parts(parts, lse, plain)
    merge_parts(parts, lse, wide[..., :32])
    assert torch.equal(wide[..., :32], plain) and wide[..., 32:].isnan().all()
    lses = torch.empty(4, 6, device=device), torch.full((4, 9), torch.nan, device=device)
    merge_parts(parts, lse, plain, lses[0])
    merge_parts(parts, lse, plain, lses[1][:, :6])
    assert torch.equal(lses[1][:, :6], lses[0]) and lses[1][:, 6:].isnan().all()
    for empty in (parts[:, :0], parts[:, :, :0]):
        merge_parts(empty, lse[:, : empty.shape[1], : empty.shape[2]], torch.empty_like(empty[0]))


def test_an_infinite_lse_stands_alone(merge_parts, device):
    """An infinite sink leaves nothing for the keys of any part."""
    parts, lse = draw((3, 4, 6, 32), torch.float32, device)
    parts[1], lse[1] = torch.randn(4, 6, 32, device=device), torch.inf
    out, merged_lse = torch.empty(4, 6, 32, device=device), torch.empty(4, 6, device=device)
    merge_parts(parts, lse, out, merged_lse)
    assert torch.equal(out, parts[1]) and (merged_lse == torch.inf).all()


def test_no_parts(merge_parts, device):
    out, merged_lse = torch.full((4, 6, 32), torch.nan, device=device), torch.full((4, 6), torch.nan, device=device)
    merge_parts(out[None][:0], merged_lse[None, ..., None][:0], out, merged_lse)
    assert (out == 0).all() and (merged_lse == -torch.inf).all()


@pytest.mark.parametrize("name", ["part_lse", "out", "lse"])
def test_errors(merge_parts, device, name):
    parts, lse = draw((3, 4, 6, 32), torch.float32, device)
    arguments = {"parts": parts, "part_lse": lse, "out": torch.empty(4, 6, 32, device=device)}
    wrong = {"part_lse": lse[..., 0], "out": arguments["out"].half(), "lse": torch.empty(4, 5, device=device)}
    with pytest.raises(RuntimeError, match=rf"^{name}: expected .*, got "):
        merge_parts(**(arguments | {name: wrong[name]}))
