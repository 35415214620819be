"""How close is close enough, said once, and `check`, which runs one case against the reference.

The rule is FlashAttention's: the error against float64 may be at most twice that of a plain PyTorch computation with
the same dtypes, plus two roundings of the output. Why: any kernel must read inputs of that dtype and may round the
probabilities to it before the product with V (matrix units force this), so PyTorch doing just that shows what the
dtype costs; the factor 2 covers another order of summation, the two roundings the output's own. Errors are measured
per request, because lengths and scales differ between requests. In float32 a request of few keys is a small sample and
PyTorch may be lucky in it: of one key it has no error at all. So every score may carry the roundings of its own sum
too, and every probability and its product with a value half an ulp each, which adds next to nothing in 16 bits. fp8
gets no allowance: both sides start from the stored values times the descale. The lse has the same rule with ulps of
float32, as it is never rounded further.

What a call means stands in reference.py alone: the PyTorch computation is the same code with the arithmetic `Rounded`.
"""

import contextlib
import math
import random

import cases
import kept
import reference
import torch

EIGHT_BIT_SUMS = (
    2**-9
)  # what sums of 8-bit products lose, relative to the size of what is summed: see docs/cuda/prefill.md
SAMPLES = 2  # orders of summation tried in PyTorch
NOT_SEMANTIC = (
    "out", "max_seqlen_q", "max_seqlen_k", "return_softmax_lse", "num_splits", "deterministic", "scheduler_metadata",
)  # fmt: skip


@contextlib.contextmanager
def torch_threads(count):
    """So many of torch's threads, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread():
    """For the many small operations of the reference, which lose time when spread over threads."""
    return torch_threads(1)


def repeated(x, q_heads):
    """[keys, kv_heads, dim] with a row for every q_head."""
    return x.repeat_interleave(q_heads // max(1, x.shape[1]), 1)


def rounded_weights(p, dtype):
    """Probabilities as operands of a product. In 8 bits those of a row are first scaled to what the dtype holds."""
    if dtype.itemsize > 1:
        return p.to(dtype).float()
    if p.shape[1] == 0:  # a row that sees no key
        return p
    scale = 256 / p.amax(1, keepdim=True).clamp(min=1e-30)
    return (p * scale).to(dtype).float() / scale


class Rounded:
    """The reference's arithmetic as plain PyTorch would do it: scores, softmax in float32, probabilities in q's dtype.
    Where both products of a kernel are in 8 bits, `weights` is that dtype.

    order 0 is the textbook. It leaves in `spreads`, row by row, how far out and lse move, at most, when every score
    moves by the size of the numbers summed in it, and the size of the products summed in out. Every other order is
    a sample of what rounding does in a kernel: powers of 2, division after the product with V, and sums in a random
    order.
    """

    def __init__(self, dtype, order, weights=None):
        self.dtype, self.weights, self.sampled, self.spreads = dtype, weights or dtype, order > 0, []
        self.random = random.Random(order)

    def number(self, x):
        return x.float()

    def rotated(self, x, dtype):
        return x.to(dtype)

    def order(self, keys):
        return self.random.sample(keys, len(keys)) if self.sampled else keys

    def scores(self, pairs, factor):
        def product(row, keys):
            if self.dtype == torch.float32:  # head by head, as the roundings of these very sums are the measure
                return torch.einsum("hd,nhd->hn", row, repeated(keys, len(row)))
            return torch.einsum("kgd,nkd->kgn", reference.by_group(row, keys.shape[1]), keys).flatten(0, 1)

        if self.sampled:
            orders = [self.random.sample(range(row.shape[-1]), row.shape[-1]) for row, _ in pairs]
            pairs = [(row[:, order], keys[..., order]) for (row, keys), order in zip(pairs, orders)]
        else:  # the size of the numbers summed in each score, as a random walk
            self.size = sum(product(row**2, keys**2) for row, keys in pairs).sqrt() * abs(factor)
        return sum(product(row, keys) for row, keys in pairs) * factor

    def softmax(self, s, value):
        top = torch.nn.functional.pad(s, (0, 1), value=-torch.inf).amax(1, keepdim=True).clamp(min=-1e30)
        p = torch.exp2(s * math.log2(math.e) - top * math.log2(math.e)) if self.sampled else torch.exp(s - top)
        total = p.sum(1, keepdim=True)
        lse = torch.where(total > 0, top + total.log(), -torch.inf)[:, 0]
        total = total.clamp(min=1e-37)

        def average(weights, values):
            if self.dtype == torch.float32:
                return torch.einsum("hn,nhd->hd", weights, repeated(values, len(weights)))
            weights = reference.by_group(weights, values.shape[1])
            return torch.einsum("kgn,nkd->kgd", weights, values).flatten(0, 1)

        if self.sampled:
            return (average(rounded_weights(p, self.weights), value) / total).to(self.dtype).float(), lse
        p = p / total
        out = average(rounded_weights(p, self.weights), value).to(self.dtype).float()
        s = s[:, : self.size.shape[1]]  # without the sink
        moved = p[:, : s.shape[1]] * (s.abs() + self.size).masked_fill(s == -torch.inf, 0.0)
        lse_spread = moved.sum(1, keepdim=True)
        sizes = value[: s.shape[1]].abs()
        spread = average(moved, sizes) + lse_spread * out.abs()
        self.spreads.append((spread, lse_spread, average(p[:, : s.shape[1]], sizes)))
        return out, lse


def assert_within(name, actual, expected, bound):
    """actual == expected up to bound, element by element; infinities and NaN must lie in the same places."""
    actual = actual.detach().cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    finite = torch.isfinite(expected)
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan()) & ~finite | ~torch.isfinite(actual) & finite
    wrong |= (torch.nan_to_num(actual) - torch.nan_to_num(expected)).abs() > torch.nan_to_num(bound)
    if wrong.any():
        excess = torch.where(wrong, torch.nan_to_num((actual - expected).abs() / bound, nan=torch.inf), -1.0)
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), actual.shape))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, worst at {worst}: got {actual[worst]:.9g}, "
            f"expected {expected[worst]:.9g} +- {bound.expand(actual.shape)[worst]:.2g}"
        )


@kept.keep
def judgement(options, weights):
    """(expected out, what it may be off by, expected lse, what it may be off by), by the rule above."""
    expected, expected_lse = reference.attend(**options)
    q, cu_seqlens_q = options["q"], options.get("cu_seqlens_q")
    arithmetics = [Rounded(dtype_of_out(q), order, weights) for order in range(SAMPLES)]
    samples = [reference.attend(**options, arithmetic=arithmetic) for arithmetic in arithmetics]
    out_spread, lse_spread, size = (torch.zeros_like(x) for x in (expected, expected_lse, expected))
    spreads = iter(arithmetics[0].spreads)
    by_request = (reference.per_request(x, cu_seqlens_q) for x in (out_spread, lse_spread.mT, size))
    for out_of, lse_of, size_of in zip(*by_request):
        for t in range(len(out_of)):
            out_of[t], lse_of[t, :, None], size_of[t] = next(spreads)

    def worst_per_request(x, of):
        """The largest error of the PyTorch samples in each request, spread over its elements."""
        spread = torch.zeros_like(x)
        error = torch.stack([torch.nan_to_num(sample - x).abs() for sample in of]).amax(0)
        for into, err in zip(reference.per_request(spread, cu_seqlens_q), reference.per_request(error, cu_seqlens_q)):
            into[:] = err.max() if err.numel() else 0.0
        return spread

    # What the scores may carry: n products added one after the other in float32 drift like a random walk, by sqrt(n)/4
    # roundings of the partial sums (a rounding has a standard deviation of 0.29 ulp), and the worst of many sums by
    # twice that. PyTorch sums in blocks, whose size is another on every processor.
    length = q.shape[-1] + (options["qv"].shape[-1] if "qv" in options else 0)
    score = torch.finfo(torch.float32).eps * max(1.0, length**0.5 / 2)
    if weights is not None:
        score = EIGHT_BIT_SUMS

    rounding = torch.finfo(dtype_of_out(q))
    bound = 2 * worst_per_request(expected, [sample[0] for sample in samples]) + score * out_spread
    bound = bound + torch.finfo(torch.float32).eps * size
    bound = bound + rounding.eps * expected.abs() + rounding.tiny

    error = worst_per_request(expected_lse.mT.contiguous(), [sample[1].mT for sample in samples]).mT
    lse_bound = 2 * error + score * lse_spread + 2 * torch.finfo(torch.float32).eps * expected_lse.abs().clamp(min=1)
    return expected, bound, expected_lse, lse_bound


def dtype_of_out(q):
    return torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype  # 8-bit numbers are bfloat16 numbers


@one_thread()
def assert_result(out, lse, kwargs, k_cache, v_cache, seqlens_new, weights=None):
    """The rule above. The caches hold the new tokens. weights: their dtype in the second product, if not q's."""
    options = {name: x for name, x in kwargs.items() if name not in (*NOT_SEMANTIC, "k", "v", "cu_seqlens_k_new")}
    options |= {"k_cache": k_cache, "v_cache": v_cache, "seqlens_new": seqlens_new}
    expected, bound, expected_lse, lse_bound = judgement(options, weights)
    assert out.dtype == dtype_of_out(kwargs["q"]), f"out is {out.dtype}"
    assert_within("out", out, expected, bound)
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    assert_within("lse", lse, expected_lse, lse_bound)


def assert_same_bits(a, b):
    for x, y in zip(a, b):
        assert torch.equal(x, y)


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
        names = ("block_table", "cache_seqlens", "cu_seqlens_k_new", "slot_mapping", "cache_batch_idx", "rotary_cos",
                 "rotary_sin", "rotary_interleaved", "rotary_seqlens", "k_descale", "v_descale")  # fmt: skip
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
    before = cases.build(case)
    call = before.to(device)  # a copy, also on the CPU
    judge(*run(paged_attn, call, **overrides), call, before, weights_of(paged_attn, call, overrides))


def weights_of(paged_attn, call, overrides):
    """The dtype of the weights where it is not that of q: the route prefill of CUDA multiplies e4m3 as it is."""
    if not call.kwargs["q"].is_cuda or call.kwargs["q"].dtype != torch.float8_e4m3fn:
        return None
    k_cache, v_cache = call.caches()
    explained = paged_attn.explain(k_cache=k_cache, v_cache=v_cache, **(call.kwargs | overrides))
    return torch.float8_e4m3fn if explained.route == "prefill" else None


def judge(out, lse, call, before, weights=None):
    """The results and the caches of a call, before being the same call not made."""
    case = call.case
    try:
        if case.give_out:
            assert out.data_ptr() == call.kwargs["out"].data_ptr(), "the result is not in the given out"
        kwargs = with_tensor_lengths(before)
        after = tuple(s.cpu() for s in call.storage)
        assert_caches(case, after, before, kwargs)
        # The attention is judged on the keys as written: a last place of a rotated key is no error of the attention.
        assert_result(out, lse, kwargs, *before.caches(after), before.seqlens_new, weights)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None
