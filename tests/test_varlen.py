"""flash_attn_func and flash_attn_varlen_func, plain and paged, judged as attention to a cache of the same keys."""

import itertools

import pytest
import torch
from compare import assert_result

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "window_causal": {"window_size": (12, 12), "causal": True},
    "chunk": {"attention_chunk": 8},
    "softcap": {"softcap": 2.5},
    "scale": {"softmax_scale": 0.05},
    "alibi": {"alibi_slopes": torch.linspace(0.0, 0.3, 6)},
    "sinks": {"sinks": torch.tensor([3.0, -torch.inf, -9.0, 9.0, 0.0, 1.0])},
    "s_aux": {"s_aux": torch.tensor([3.0, -torch.inf, -9.0, 9.0, 0.0, 1.0]), "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
    "splits": {"num_splits": 5},
}
LENGTHS = {  # (query lengths, key lengths)
    "decode": ([1, 1, 1], [40, 1, 300]),
    "prefill": ([130, 70, 1], [130, 70, 1]),
    "mixed": ([1, 40, 0, 7], [90, 40, 30, 7]),
    "more_q_than_keys": ([20, 9], [4, 9]),
    "no_keys": ([3, 2, 1], [0, 5, 0]),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def every_dtype(lengths):
    """All lengths, options and dtypes. With sanitizers one dtype for each length and option, going round: each dtype
    meets every length and every option.
    """
    found = []
    for (i, length), (j, option), k in itertools.product(enumerate(lengths), enumerate(OPTIONS), range(3)):
        marks = [pytest.mark.sanitize] * ((i + j) % 3 == k)
        name = length if isinstance(length, str) else "-".join(map(str, length))
        found.append(pytest.param(length, option, DTYPES[k], marks=marks, id=f"{name}-{option}-{DTYPES[k]}"))
    return found


def semantic(options, device=None):
    """The options as the reference names them."""
    renamed = {"s_aux" if name == "sinks" else name: value for name, value in options.items()}
    return renamed if device is None else {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}


def cumulative(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def draw(q_lens, k_lens, dtype, head_dim=64, head_dim_v=64, qv=False):
    """Packed q, k, v; the tensors are as long as the lengths say."""
    torch.manual_seed(sum(q_lens) + sum(k_lens))
    shapes = [(sum(q_lens), 6, head_dim), (sum(k_lens), 2, head_dim), (sum(k_lens), 2, head_dim_v)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    return (q * 3).to(dtype), k.to(dtype), v.to(dtype)


def judge_packed(out, lse, q, k, v, q_lens, k_lens, options):
    """Against the reference on a contiguous cache, NaN past each length."""
    caches = [
        torch.full((len(k_lens), max(k_lens, default=0) + 1, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)
    ]
    for b, (begin, end) in enumerate(itertools.pairwise(cumulative(k_lens).tolist())):
        caches[0][b, : end - begin], caches[1][b, : end - begin] = k[begin:end], v[begin:end]
    kwargs = {"q": q, "cu_seqlens_q": cumulative(q_lens), "cache_seqlens": torch.tensor(k_lens), **semantic(options)}
    assert_result(out, lse, kwargs, *caches, [0] * len(k_lens))


@pytest.mark.parametrize(("lengths", "option", "dtype"), every_dtype(LENGTHS))
def test_varlen(paged_attn, device, lengths, option, dtype):
    q_lens, k_lens = LENGTHS[lengths]
    q, k, v = draw(q_lens, k_lens, dtype)
    out, lse = paged_attn.flash_attn_varlen_func(
        q.to(device), k.to(device), v.to(device), cumulative(q_lens).to(device), cumulative(k_lens).to(device),
        max(q_lens), max(k_lens), return_softmax_lse=True, **semantic(OPTIONS[option], device),
    )  # fmt: skip
    judge_packed(out, lse, q, k, v, q_lens, k_lens, OPTIONS[option])


@pytest.mark.sanitize
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("lens_by", ["cu_seqlens_k", "seqused_k"])
@pytest.mark.parametrize("option", ["plain", "causal", "sinks"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen_paged(paged_attn, device, lengths, option, lens_by, by_position):
    """Keys in pages, as vLLM and transformers' continuous batching ask."""
    q_lens, k_lens = LENGTHS[lengths]
    q, k, v = draw(q_lens, k_lens, torch.bfloat16)
    pages = [-(-n // 8) for n in k_lens]
    order, max_pages = torch.randperm(sum(pages) + 2).tolist(), max(pages) + 1
    table = torch.full((len(k_lens), max_pages), 2147480000, dtype=torch.int32)
    k_cache, v_cache = (torch.full((sum(pages) + 2, 8, 2, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    for b, (begin, end) in enumerate(itertools.pairwise(cumulative(k_lens).tolist())):
        for i in range(pages[b]):
            page = table[b, i] = order.pop()
            count = min(8, end - begin - 8 * i)
            k_cache[page, :count] = k[begin + 8 * i : begin + 8 * i + count]
            v_cache[page, :count] = v[begin + 8 * i : begin + 8 * i + count]
    arguments = [
        q, k_cache, v_cache, cumulative(q_lens), None if lens_by == "seqused_k" else cumulative(k_lens),
        max(q_lens), max_pages * 8,
    ]  # fmt: skip
    keywords = dict(OPTIONS[option])
    if lens_by == "seqused_k":
        keywords["seqused_k"] = torch.tensor(k_lens, dtype=torch.int32)
    names = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
             "return_attn_probs", "block_table")  # fmt: skip
    defaults = (0.0, None, False, (-1, -1), 0.0, None, False, True, table)
    if by_position:
        arguments += [keywords.pop(name, default) for name, default in zip(names, defaults)]
    else:
        keywords |= {"block_table": table, "return_softmax_lse": True}
    arguments = [x.to(device) if torch.is_tensor(x) else x for x in arguments]
    out, lse = paged_attn.flash_attn_varlen_func(*arguments, **semantic(keywords, device))
    judge_packed(out, lse, q, k, v, q_lens, k_lens, OPTIONS[option])


def test_varlen_seqused_k_shortens(paged_attn, device):
    """seqused_k counts keys from the first of each request, whatever room cu_seqlens_k leaves."""
    q_lens, room, used = [2, 3, 1], [30, 40, 10], [30, 17, 0]
    q, k, v = draw(q_lens, room, torch.float32)
    poisoned, begins = [k.clone(), v.clone()], cumulative(room).tolist()
    for begin, n, m in zip(begins, used, room):
        for x in poisoned:
            x[begin + n : begin + m] = torch.nan
    out, lse = paged_attn.flash_attn_varlen_func(
        q.to(device), *(x.to(device) for x in poisoned), cumulative(q_lens).to(device), cumulative(room).to(device),
        3, 40, causal=True, seqused_k=torch.tensor(used, dtype=torch.int32).to(device), return_softmax_lse=True,
    )  # fmt: skip
    kept = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, used)])
    judge_packed(out, lse, q, k[kept], v[kept], q_lens, used, {"causal": True})


@pytest.mark.parametrize(
    ("lengths", "option", "dtype"), every_dtype([(1, 60), (60, 60), (7, 60), (20, 5), (3, 0), (0, 5)])
)
def test_func(paged_attn, device, lengths, option, dtype):
    q_len, k_len = lengths
    q, k, v = draw([q_len] * 3, [k_len] * 3, dtype, head_dim=48, head_dim_v=80)
    q, k, v = q.view(3, q_len, 6, 48), k.view(3, k_len, 2, 48), v.view(3, k_len, 2, 80)
    options = semantic(OPTIONS[option], device)
    out, lse = paged_attn.flash_attn_func(q.to(device), k.to(device), v.to(device), return_softmax_lse=True, **options)
    kwargs = {"q": q, "cache_seqlens": torch.tensor([k_len] * 3), **semantic(OPTIONS[option])}
    assert_result(out, lse, kwargs, k, v, [0, 0, 0])


def test_func_by_position(paged_attn, device):
    """flash-attn 2's order."""
    q, k, v = (x.view(3, 20, -1, 64).to(device) for x in draw([20] * 3, [20] * 3, torch.bfloat16))
    slopes = torch.rand(3, 6, device=device)
    by_position = paged_attn.flash_attn_func(q, k, v, 0.0, 0.2, True, (5, 0), 1.5, slopes, True, True)
    by_name = paged_attn.flash_attn_func(
        q=q, k=k, v=v, dropout_p=0.0, softmax_scale=0.2, causal=True, window_size=(5, 0), softcap=1.5,
        alibi_slopes=slopes, deterministic=True, return_softmax_lse=True,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(by_position, by_name))
    assert isinstance(paged_attn.flash_attn_func(q, k, v), torch.Tensor)


def test_func_on_slices_of_one_projection(paged_attn, device):
    """q, k and v as views of one (batch, seqlen, heads, dim) tensor, heads first in memory (transformers' layout)."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 10, 33, 64, device=device).transpose(1, 2)
    q, k, v = qkv.split((6, 2, 2), dim=2)
    views = paged_attn.flash_attn_func(q, k, v, causal=True)
    copies = paged_attn.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(views, copies)
