"""How close is close enough, said once, and `check`, which runs one case against the reference.

The rule is FlashAttention's: the error against float64 may be at most twice that of a plain PyTorch computation with
the same dtypes, plus two roundings of the output. Why: any kernel must read inputs of that dtype and may round the
probabilities to it before the product with V (matrix units force this), so PyTorch doing just that shows what the
dtype costs; the factor 2 covers another order of summation, the two roundings the output's own. Errors are measured
per request, because lengths and scales differ between requests. In float32 a request of few keys is a small sample
and PyTorch may be lucky in it, so every score may carry the roundings of its own sum too, which adds next to nothing
in 16 bits. fp8 gets no allowance: both sides start from the stored values times the descale. The lse has the
same rule with ulps of float32, as it is never rounded further.
"""

import contextlib
import math
import random

import cases
import reference
import torch

SAMPLES = 2  # orders of summation tried in PyTorch
NOT_SEMANTIC = ("out", "max_seqlen_q", "return_softmax_lse", "num_splits", "deterministic", "scheduler_metadata")


@contextlib.contextmanager
def one_thread():
    """For the many small operations of the reference, which lose time when spread over threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Request:
    """What dense PyTorch needs of one request: its queries, the keys that some row sees, and who sees which.

    `order` 0 leaves keys and dimensions as they are; any other number draws an order of summation.
    """

    def __init__(self, kwargs, k_cache, v_cache, b, q, qv, new_len, order):
        self.kwargs, self.b, self.q_len, self.q_heads = kwargs, b, len(q), q.shape[1]
        self.group = self.q_heads // max(1, k_cache.shape[2])
        left, right = kwargs.get("window_size", (-1, -1))
        right, chunk = 0 if kwargs.get("causal") else right, kwargs.get("attention_chunk", 0)
        leftpad = int(kwargs["cache_leftpad"][b]) if self.has("cache_leftpad") else 0
        old_len = int(kwargs["cache_seqlens"][b])
        kv_len = old_len + new_len
        self.rows = range(kv_len - self.q_len, kv_len)
        seen = [reference.visible_keys(pos, kv_len, leftpad, left, right, chunk) for pos in self.rows]
        self.keys = sorted(set().union(*seen))
        self.dims = torch.arange(q.shape[-1])
        if order:
            self.keys = random.Random(order).sample(self.keys, len(self.keys))
            self.dims = self.dims[torch.randperm(len(self.dims))]
        visible = [[j in s for j in self.keys] for s in map(set, seen)]
        self.mask = torch.tensor(visible, dtype=torch.bool).view(self.q_len, len(self.keys))
        if self.has("rotary_cos"):
            base = int(kwargs["rotary_seqlens"][b]) if self.has("rotary_seqlens") else old_len
            moving = left >= 0 or right >= 0 or chunk > 0
            tables = (kwargs["rotary_cos"], kwargs["rotary_sin"], kwargs["rotary_interleaved"])
            q = reference.rotate(q, [base + t * moving for t in range(self.q_len)], *tables).to(q.dtype)
        self.q, self.qv = q.float(), None if qv is None else qv.float()
        row = int(kwargs["cache_batch_idx"][b]) if self.has("cache_batch_idx") else b
        self.key, self.value = (
            reference.read(cache, kwargs.get("block_table"), row, self.keys).float().repeat_interleave(self.group, 1)
            for cache in (k_cache, v_cache)
        )  # [keys, q_heads, dim]

    def has(self, name):
        return name in self.kwargs

    def descale(self, name):
        """One factor per q_head."""
        return self.kwargs[name][self.b].repeat_interleave(self.group) if self.has(name) else torch.ones(self.q_heads)

    def scores(self, scale):
        """(scores, size), [q_heads, tokens, keys]: size is that of the numbers summed in each, as a random walk."""
        dims, k_scale, v_scale = self.dims, self.descale("k_descale")[:, None, None], self.descale("v_descale")
        product = "thd,nhd->htn"
        s = torch.einsum(product, self.q[..., dims], self.key[..., dims]) * k_scale
        size = torch.einsum(product, self.q**2, self.key**2) * k_scale**2
        if self.qv is not None:
            s = s + torch.einsum(product, self.qv, self.value) * v_scale[:, None, None]
            size += torch.einsum(product, self.qv**2, self.value**2) * v_scale[:, None, None] ** 2
        factor = scale * self.descale("q_descale")[:, None, None]
        s, size, softcap = s * factor, size.sqrt() * factor.abs(), self.kwargs.get("softcap", 0.0)
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if self.has("alibi_slopes"):
            slope = self.kwargs["alibi_slopes"].expand(len(self.kwargs["cache_seqlens"]), self.q_heads)[self.b]
            distance = torch.tensor(list(self.rows))[:, None] - torch.tensor(self.keys, dtype=torch.int64)
            s = s - slope[:, None, None] * distance.abs()
        return s.masked_fill(~self.mask, -torch.inf), size

    def softmax(self, s, order):
        """(p, total, lse): p is not yet divided by total, which has the sink in it. Other orders use powers of 2."""
        sink = self.kwargs["s_aux"].float() if self.has("s_aux") else torch.full((self.q_heads,), -torch.inf)
        sink = sink[:, None, None].expand(-1, self.q_len, 1)
        top = torch.cat([s, sink], 2).amax(2, keepdim=True).clamp(min=-1e30)
        unit, power = (math.log2(math.e), torch.exp2) if order else (1.0, torch.exp)
        p = power(s * unit - top * unit)
        total = p.sum(2, keepdim=True) + power(sink * unit - top * unit)
        return p, total.clamp(min=1e-37), torch.where(total > 0, top + total.log(), -torch.inf)[..., 0]


def torch_attend(kwargs, k_cache, v_cache, seqlens_new, order):
    """(out, lse, out_spread, lse_spread) by dense PyTorch: scores and softmax in float32, probabilities in q's dtype.

    order 0 is the textbook. Every other order is a sample of what rounding does in a kernel: powers of 2, division
    after the product with V, and sums in a random order. The spreads say how far out and lse move, at most, when
    every score moves by the size of the numbers summed in it: sums over keys of p size (|v| + |out|) and p size.
    """
    q, qv, cu_seqlens_q = kwargs["q"], kwargs.get("qv"), kwargs.get("cu_seqlens_q")
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype  # 8-bit numbers are bfloat16 numbers
    head_dim, head_dim_v, scale = q.shape[-1], v_cache.shape[-1], kwargs.get("softmax_scale")
    scale = (head_dim + (head_dim_v if qv is not None else 0)) ** -0.5 if scale is None else scale
    out, lse = torch.zeros(*q.shape[:-1], head_dim_v), torch.full(q.shape[:-1], -torch.inf)
    results = (out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    of_requests = zip(*(reference.per_request(x, cu_seqlens_q) for x in results))
    qs = reference.per_request(q, cu_seqlens_q)
    qvs = [None] * len(qs) if qv is None else reference.per_request(qv, cu_seqlens_q)
    for b, (out_b, lse_b, out_spread, lse_spread) in enumerate(of_requests):
        if len(qs[b]) == 0:
            continue
        r = Request(kwargs, k_cache, v_cache, b, qs[b], qvs[b], seqlens_new[b], order)
        s, size = r.scores(scale)
        p, total, log_total = r.softmax(s, order)
        lse_b[:] = log_total.T
        weights = p.to(dtype).float() if order else (p / total).to(dtype).float()
        result = torch.einsum("htn,nhd->thd", weights, r.value) * r.descale("v_descale")[:, None]
        out_b[:] = (result / total.transpose(0, 1) if order else result).to(dtype).float()
        moved = p / total * (s.abs() + size).masked_fill(s == -torch.inf, 0.0)
        lse_spread[:] = moved.sum(2).T
        out_spread[:] = torch.einsum("htn,nhd->thd", moved, r.value.abs()) * r.descale("v_descale")[:, None].abs()
        out_spread += lse_spread[..., None] * out_b.abs()
    return out, lse.transpose(-1, -2), results[2], results[3].transpose(-1, -2)


def assert_within(name, actual, expected, bound):
    """actual == expected up to bound, element by element; infinities and NaN must lie in the same places."""
    actual = actual.detach().cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    finite = torch.isfinite(expected)
    wrong = (actual != expected) & ~finite | ~torch.isfinite(actual) & finite
    wrong |= (torch.nan_to_num(actual) - torch.nan_to_num(expected)).abs() > torch.nan_to_num(bound)
    if wrong.any():
        excess = torch.where(wrong, torch.nan_to_num((actual - expected).abs() / bound, nan=torch.inf), -1.0)
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), actual.shape))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, worst at {worst}: got {actual[worst]:.9g}, "
            f"expected {expected[worst]:.9g} +- {bound.expand(actual.shape)[worst]:.2g}"
        )


@one_thread()
def assert_result(out, lse, kwargs, k_cache, v_cache, seqlens_new):
    """The rule above. The caches hold the new tokens."""
    options = {name: x for name, x in kwargs.items() if name not in (*NOT_SEMANTIC, "q", "k", "v", "cu_seqlens_k_new")}
    expected, expected_lse = reference.attend(kwargs["q"], k_cache, v_cache, seqlens_new=seqlens_new, **options)
    samples = [torch_attend(kwargs, k_cache, v_cache, seqlens_new, order) for order in range(SAMPLES)]
    cu_seqlens_q = kwargs.get("cu_seqlens_q")

    def worst_per_request(x, of):
        """The largest error of the PyTorch samples in each request, spread over its elements."""
        spread = torch.zeros_like(x)
        error = torch.stack([torch.nan_to_num(sample - x).abs() for sample in of]).amax(0)
        for into, err in zip(reference.per_request(spread, cu_seqlens_q), reference.per_request(error, cu_seqlens_q)):
            into[:] = err.max() if err.numel() else 0.0
        return spread

    # What the scores may carry: n products added one after the other in float32 drift like a random walk, by sqrt(n)/4
    # roundings of the partial sums (a rounding has a standard deviation of 0.29 ulp). PyTorch sums in blocks.
    length = kwargs["q"].shape[-1] + (kwargs["qv"].shape[-1] if "qv" in kwargs else 0)
    score = torch.finfo(torch.float32).eps * max(1.0, length**0.5 / 4)

    dtype = kwargs["q"].dtype
    assert out.dtype == (torch.bfloat16 if dtype.itemsize == 1 else dtype), f"out is {out.dtype}"
    rounding = torch.finfo(out.dtype)
    bound = 2 * worst_per_request(expected, [sample[0] for sample in samples]) + score * samples[0][2]
    assert_within("out", out, expected, bound + rounding.eps * expected.abs() + rounding.tiny)

    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    error = worst_per_request(expected_lse.mT.contiguous(), [sample[1].mT for sample in samples]).mT
    bound = 2 * error + score * samples[0][3] + 2 * torch.finfo(torch.float32).eps * expected_lse.abs().clamp(min=1)
    assert_within("lse", lse, expected_lse, bound)


def assert_same_bytes(name, actual, expected):
    bits = reference.BITS[expected.itemsize]
    wrong = actual.cpu().view(bits) != expected.view(bits)
    if wrong.any():
        first = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements changed or wrong, first at {first}: "
            f"got {actual[first].item()}, expected {expected[first].item()}"
        )


@one_thread()
def assert_caches(case, actual, before, kwargs):
    """The storage holds the new tokens and is otherwise untouched, to the last guard byte.

    Rotated keys may differ in the last place (products rounded in another order); every other byte is given.
    """
    expected = tuple(s.clone() for s in before.storage)
    k_expected, v_expected = before.caches(expected)
    if "k" in kwargs:
        names = ("block_table", "cache_seqlens", "cu_seqlens_k_new", "cache_batch_idx", "rotary_cos", "rotary_sin",
                 "rotary_interleaved", "rotary_seqlens", "k_descale", "v_descale")  # fmt: skip
        options = {"block_table": None} | {name: kwargs[name] for name in names if name in kwargs}
        reference.append(kwargs["k"], kwargs["v"], k_expected, v_expected, **options)
    actual = tuple(s.cpu() for s in actual)
    if case.rotary_dim:
        k_actual = before.caches(actual)[0]
        exact, got = k_expected.float().nan_to_num(), k_actual.float().nan_to_num()
        size = exact.abs().amax(-1, keepdim=True)
        info = torch.finfo(k_expected.dtype)
        step = torch.maximum(info.eps * torch.maximum(exact.abs(), got.abs()), torch.tensor(info.tiny * info.eps))
        near = (exact - got).abs() <= step + 4 * torch.finfo(torch.float32).eps * size
        near &= k_expected.isnan() == k_actual.isnan()
        bits = reference.BITS[k_expected.itemsize]
        k_expected.view(bits)[near] = k_actual.view(bits)[near]
    for name, s, e in zip(("storage of K", "storage of V"), actual, expected):
        assert_same_bytes(name, s, e)


def run(paged_attn, call, **overrides):
    """(out, lse) of a call, the caches changed in place."""
    k_cache, v_cache = call.caches()
    return paged_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **(call.kwargs | overrides))


def with_tensor_lengths(call):
    """The keyword arguments with cache_seqlens as a tensor, as the reference reads them."""
    lens = call.kwargs["cache_seqlens"]
    given = isinstance(lens, torch.Tensor)
    return call.kwargs if given else call.kwargs | {"cache_seqlens": torch.full((call.case.batch,), lens)}


def check(paged_attn, case, device="cpu", **overrides):
    """Runs a case and compares everything: output, lse, cache contents, untouched bytes."""
    before, call = cases.build(case), cases.build(case).to(device)
    judge(*run(paged_attn, call, **overrides), call, before)


def judge(out, lse, call, before):
    """The results and the caches of a call, before being the same call not made."""
    case = call.case
    try:
        if case.give_out:
            assert out.data_ptr() == call.kwargs["out"].data_ptr(), "the result is not in the given out"
        kwargs = with_tensor_lengths(before)
        after = tuple(s.cpu() for s in call.storage)
        assert_caches(case, after, before, kwargs)
        # The attention is judged on the keys as written: a last place of a rotated key is no error of the attention.
        assert_result(out, lse, kwargs, *before.caches(after), before.seqlens_new)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None
