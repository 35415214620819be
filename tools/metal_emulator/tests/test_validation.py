"""The emulator against something not written here: MLX's attention kernels, once from their source and once as Apple's
compiler left them. Same bits, from two compilers, on one runtime."""

import metal_build
import mlx
import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def kernels():
    try:
        mlx.fetch()
    except metal_build.Missing as missing:
        pytest.skip(str(missing))


def attention(library, name, dim, causal=False, with_sink=False, q_len=1, batch=2, q_heads=8, kv_heads=2, kv_len=133):
    """One call of MLX's sdpa_vector, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    q, k, v = (torch.randn(shape, generator=generator).to(mlx.TYPES[name]) for shape in shapes)
    sink = torch.randn(q_heads, generator=generator).to(mlx.TYPES[name]) if with_sink else None
    out = mlx.sdpa_vector(library, q, k, v, causal, sink)

    k, v = (t.double().repeat_interleave(q_heads // kv_heads, 1) for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * dim**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q_len, kv_len).triu(kv_len - q_len + 1).bool(), float("-inf"))
    if with_sink:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(batch, -1, q_len, 1)], -1)
    return out, scores.softmax(-1)[..., :kv_len] @ v


CASES = [{}, {"causal": True, "q_len": 3}, {"with_sink": True}]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dim", mlx.HEAD_DIMS)
@pytest.mark.parametrize("name", mlx.TYPES)
def test_source_of_mlx(name, dim, case):
    out, expected = attention(mlx.from_source(), name, dim, **case)
    torch.testing.assert_close(out.double(), expected, atol=2e-6 if name == "float" else 1e-3, rtol=0)


@pytest.mark.skipif(not metal_build.FMA, reason="this processor cannot multiply and add in one rounding")
@pytest.mark.parametrize(("name", "dim"), [("float", 64), ("float", 128), ("float16_t", 64)])
def test_same_bits_as_apples_compiler(name, dim):
    apple, ours = mlx.from_apple(name, dim), mlx.from_source()
    for case in CASES:
        assert torch.equal(attention(apple, name, dim, **case)[0], attention(ours, name, dim, **case)[0]), case
