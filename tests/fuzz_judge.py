"""Whether a call did what the contract says: results within the rounding of its dtypes, every byte as the reference
writes it, and nothing else changed.

The contract of reference.py once more, a request at a time instead of a row at a time, since 100,000 calls are to take
minutes; test_fuzz.py holds the two together. How close is close enough is counted here, not sampled: a kernel may round
the sums of a score like random walks in float32, the rotated query and the probabilities to the dtype of q, and the
output once more. Roundings of different keys are independent, so they add up as a root of squares; what shifts all
scores alike adds up as it is. The sum of probabilities has roundings of its own, see `error_of_the_sum`.
"""

import math

import cases
import reference
import torch
from compare import EIGHT_BIT_SUMS
from fuzz_calls import FP8, MergeCall, is_ignored, locality, place, visible

EPS32 = torch.finfo(torch.float32).eps
STEP = 4  # keys that a kernel takes at a time, at least


class Wrong(AssertionError):
    pass


def table_of(arguments):
    table = arguments.get("block_table")
    return arguments.get("page_table") if table is None else table


def descale_of(arguments, name, b, kv_heads):
    table = arguments.get(name)
    if table is None or is_ignored(arguments, name):
        return torch.ones(kv_heads, dtype=torch.float64)
    return table[b if table.shape[0] > 1 else 0].double().expand(kv_heads)


def tokens_of(x, b, packed, begin, count):
    return x[begin : begin + count] if packed else x[b][:count]


def read(cache, where):
    bits = cache.view(reference.BITS[cache.itemsize])
    return bits[where].view(cache.dtype).double()


def write_expected(call, caches):
    """Writes the new tokens of a call into these caches, in place."""
    arguments = call.arguments
    flat = "slot_mapping" in arguments and arguments["k"].dim() == 3 and "cu_seqlens_k_new" not in arguments
    packed, slots = arguments["k"].dim() == 3, arguments.get("slot_mapping")
    for b, request in enumerate(call.requests):
        count = request.new_len
        if not count:
            continue
        new = [tokens_of(arguments[name], b, packed, request.new_begin, count) for name in ("k", "v")]
        if "rotary_cos" in arguments:
            tables = (arguments["rotary_cos"], arguments["rotary_sin"], arguments.get("rotary_interleaved", True))
            new[0] = reference.rotate(new[0], range(request.rotary_base, request.rotary_base + count), *tables)
        if slots is not None:
            begin = request.new_begin if packed else b * count
            target = slots[begin : begin + count]
            new, target = [x[target >= 0] for x in new], target[target >= 0]
            where = target // caches[0].shape[1], target % caches[0].shape[1]
        else:
            where = place(caches[0], table_of(arguments), request, torch.arange(request.old_len, request.kv_len))
        for cache, x, name in zip(caches, new, ("k_descale", "v_descale")):
            scales = descale_of(arguments, name, 0 if flat else b, x.shape[1]) if name in arguments else None
            stored, bits = reference.stored_as(x, scales, cache.dtype), reference.BITS[cache.itemsize]
            cache.view(bits)[where] = stored.view(bits)


def later_rises(s):
    """For every score how many of those behind it are larger than all before them."""
    before = torch.nn.functional.pad(s.cummax(-1).values[..., :-1], (1, 0), value=torch.inf)  # the first one is no rise
    rises = (s > before).double()
    return rises.sum(-1, keepdim=True) - rises.cumsum(-1)


def error_of_the_sum(s, p):
    """Of the logarithm of a sum of probabilities that one float32 collects, key by key.

    n additions round at random, each by 0.29 ulp of a sum that grows evenly, sqrt(n / 3) * 0.29 ulp together; six
    standard deviations of that are sqrt(n). And whenever a score is the largest so far, what was collected is
    multiplied by exp2(difference): a rounding of the product and an ulp of exp2, each time. With slopes the largest
    score rises at every step by the same difference, so these add up as they are. A kernel may begin at either end.
    """
    if not s.shape[-1]:
        return torch.zeros(*s.shape[:-1], 1).double()
    rises = torch.maximum(later_rises(s), later_rises(s.flip(-1)).flip(-1))
    number = (s != -torch.inf).sum(-1, keepdim=True)
    return EPS32 * (number.sqrt() + 1.5 / STEP * (p * rises).sum(-1, keepdim=True))


def attend_request(call, b, request, caches, q, qv, slopes, sinks, narrow, capped, rounded=False):
    """(out, lse, error of out, error of lse) of one request: [tokens, q_heads, head_dim_v] and [tokens, q_heads].
    rounded: a rotated query is rounded to its dtype.
    """
    arguments, kv_heads = call.arguments, caches[0].shape[2]
    q_heads, tokens, group = q.shape[1], request.q_len, q.shape[1] // caches[0].shape[2]
    left, right, chunk = locality(arguments)
    seen = visible(request, left, right, chunk)
    keys = seen.any(0).nonzero()[:, 0]
    seen = seen[:, keys]
    table = table_of(arguments)
    where = place(caches[0], table, request, keys)
    key = read(caches[0], where) * descale_of(arguments, "k_descale", b, kv_heads)[:, None]
    value = read(caches[1], where) * descale_of(arguments, "v_descale", b, kv_heads)[:, None]
    key, value = key.permute(1, 0, 2), value.permute(1, 0, 2)  # [kv_heads, keys, dim]
    eps = torch.finfo(torch.bfloat16 if arguments["q"].dtype in FP8 else arguments["q"].dtype).eps

    def rows(x):  # [tokens, q_heads, dim] -> [kv_heads, tokens * group, dim]
        return x.view(tokens, kv_heads, group, -1).permute(1, 0, 2, 3).reshape(kv_heads, tokens * group, -1)

    def by_token(x):
        return x.view(kv_heads, tokens, group, -1).permute(1, 0, 2, 3).reshape(tokens, q_heads, -1)

    q, q_scale = q.double(), descale_of(arguments, "q_descale", b, kv_heads)
    rotated = 0.0
    if "rotary_cos" in arguments and request.q_len:
        moving = left >= 0 or right >= 0 or chunk > 0
        positions = [request.rotary_base + t * moving for t in range(tokens)]
        tables = (arguments["rotary_cos"], arguments["rotary_sin"], arguments.get("rotary_interleaved", True))
        q, rotated = reference.rotate(q, positions, *tables), 2 * eps
        if rounded:
            q = q.to(torch.bfloat16 if arguments["q"].dtype in FP8 else arguments["q"].dtype).double()
    q = rows(q) * q_scale[:, None, None]
    s, size = q @ key.mT, (q**2) @ (key**2).mT
    length = q.shape[-1]
    if qv is not None:
        qv = rows(qv.double()) * q_scale[:, None, None]
        s, size, length = s + qv @ value.mT, size + (qv**2) @ (value**2).mT, length + qv.shape[-1]
    scale = arguments.get("softmax_scale")
    scale = length**-0.5 if scale is None else scale
    s, size = s * scale, size.sqrt() * abs(scale)
    random = size * (6 * EPS32 * max(1.0, length**0.5 / 4))
    together = 8 * EPS32 * s.abs() + rotated * size
    if narrow:  # the matrix unit cuts each of 32 terms to 13 bits of the largest one, or of the sum so far
        together = together + EIGHT_BIT_SUMS * size + 2**-13 * math.ceil(length / 32) * s.abs()
    softcap = arguments.get("softcap", 0.0)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
        together = together + (3 * EPS32 * softcap if capped else 0.0)
    if slopes is not None:
        q_pos = torch.arange(request.kv_len - tokens, request.kv_len)
        distance = (q_pos[:, None] - keys).abs().double().repeat_interleave(group, 0)
        slope = slopes.double().view(kv_heads, 1, group).expand(-1, tokens, -1).reshape(kv_heads, -1, 1)
        s = s - slope * distance
        together = together + 8 * EPS32 * (slope * distance).abs()
    s = s.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf)
    columns = s
    if sinks is not None:
        sink = sinks.double().view(kv_heads, 1, group, 1).expand(-1, tokens, -1, -1).reshape(kv_heads, -1, 1)
        columns = torch.cat([s, sink], -1)
    if columns.shape[-1]:
        lse = torch.logsumexp(columns, -1, keepdim=True)
    else:
        lse = torch.full((*s.shape[:-1], 1), -torch.inf, dtype=torch.float64)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - lse))
    out = p @ value

    pe = p * random
    shift = p * together
    size_of_lse = lse.abs().nan_to_num(posinf=0.0).clamp(min=1)  # an infinite one is exact
    lse_error = (pe**2).sum(-1, keepdim=True).sqrt() + shift.sum(-1, keepdim=True) + 4 * EPS32 * size_of_lse
    squares = ((pe**2) @ (value**2)).sqrt() + (shift + 4 * EPS32 * p) @ value.abs()
    squares += (2 * eps if eps > 1e-6 else 0.0) * ((p**2) @ (value**2)).sqrt()  # probabilities in q's dtype
    if narrow:  # weights in e4m3, the largest of a row 16 or more; sums of them that the matrix unit cuts short
        squares += 2 * torch.finfo(torch.float8_e4m3fn).eps * ((p**2) @ (value**2)).sqrt()
        squares += p.amax(-1, keepdim=True) * (2**-14 * value.abs().sum(1, keepdim=True)) if value.shape[1] else 0.0
        squares += 4 * EIGHT_BIT_SUMS * (p @ value.abs())
    # In float16, in which a kernel may also multiply 8-bit values, they are lost below its smallest number.
    if (arguments["q"].dtype == torch.float16 or caches[1].dtype in FP8) and value.shape[1]:
        squares += 2**-24 * value.abs().sum(1, keepdim=True)
    # Out is a quotient: what scales the sum of probabilities scales the sum of values too.
    error = squares + out.abs() * (lse_error + eps) + torch.finfo(torch.float16).tiny * 2**-10
    lse_error = lse_error + error_of_the_sum(s, p)
    return by_token(out), by_token(lse)[..., 0], by_token(error), by_token(lse_error)[..., 0]


def attend(call, caches, narrow=False, capped=False):
    """(out, lse, error of out, error of lse) of a call, out as it is returned, lse as [..., tokens, q_heads]."""
    arguments = call.arguments
    q, qv, head_dim_v = arguments["q"], arguments.get("qv"), caches[1].shape[-1]
    packed = "cu_seqlens_q" in arguments
    shape = q.shape[:-1]
    out, lse = torch.zeros(*shape, head_dim_v).double(), torch.full(shape, -torch.inf).double()
    out_error, lse_error = torch.zeros_like(out), torch.zeros_like(lse)
    slopes, sinks = arguments.get("alibi_slopes"), arguments.get("s_aux", arguments.get("sinks"))
    for b, request in enumerate(call.requests):
        if request.q_len == 0:
            continue
        of = slice(request.q_begin, request.q_begin + request.q_len) if packed else b
        slope = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        given = call, b, request, caches, q[of], None if qv is None else qv[of], slope, sinks, narrow, capped
        found = attend_request(*given)
        for into, x in zip((out, lse, out_error, lse_error), found):
            into[of] = x
        if "rotary_cos" in arguments:
            # Where scores are large, one rounding of a query moves probabilities by more than in proportion.
            rounded = attend_request(*given, rounded=True)
            out_error[of] += (rounded[0] - found[0]).abs()
            lse_error[of] += (rounded[1] - found[1]).abs().nan_to_num()
    return out, lse, out_error, lse_error


def compare(name, actual, expected, bound):
    """The largest error in units of its bound; raises where it is above 1."""
    actual = actual.double()
    if actual.shape != expected.shape:
        raise Wrong(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return 0.0
    finite = torch.isfinite(expected)
    assert not bound.isnan().any(), f"{name}: a bound is NaN, so nothing would be wrong"
    # Equal numbers need no bound, which is 0 for tokens of no request.
    error = torch.where(finite & (actual != expected), (actual - expected).abs() / bound, 0.0)
    error = torch.where(finite & ~torch.isfinite(actual) | ~finite & (actual != expected), torch.inf, error)
    worst = error.max()
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise Wrong(
            f"{name}: {int((error > 1).sum())} of {error.numel()} wrong, worst at {at}: got {actual[at]:.9g}, "
            f"expected {expected[at]:.9g} +- {bound[at]:.2g}"
        )
    return float(worst)


def same_bytes(name, actual, expected):
    bits = reference.BITS.get(expected.itemsize, expected.dtype)
    if not torch.equal(actual.view(bits), expected.view(bits)):
        wrong = (actual.view(bits) != expected.view(bits)).nonzero()
        at = tuple(int(i) for i in wrong[0])
        raise Wrong(f"{name}: {len(wrong)} elements changed or wrong, first at {at}: got {actual[at]}, "
                    f"expected {expected[at]}")  # fmt: skip


def whole(x):
    """The memory behind a tensor, all of what it is a slice of, as bytes on the CPU."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((elements,), (1,), 0).cpu().view(torch.uint8)


def check_inputs(call, before, after):
    """No argument but the caches and out may change, to the last byte of the memory that they are slices of."""
    written = {
        x.untyped_storage().data_ptr() for x in (*call.storage, *(before[n] for n in call.results if n in before))
    }
    seen = set()
    for name, x in call.arguments.items():
        if not isinstance(x, torch.Tensor) or x.is_meta:
            continue
        memory = x.untyped_storage().data_ptr()
        if memory == 0 or memory in written or memory in seen:
            continue
        seen.add(memory)
        same_bytes(f"{name} (an input)", whole(after[name]), whole(before[name]))


def check_caches(call, storage):
    """The storage holds the new tokens and is otherwise as it was. Rotated keys may differ by one rounding."""
    expected = tuple(s.clone() for s in call.storage)
    caches = cases.carve(call.case, expected)
    arguments = call.arguments
    if any(r.new_len for r in call.requests):
        write_expected(call, caches)
    if "rotary_cos" in arguments:
        exact, got = (cases.carve(call.case, s)[0] for s in (expected, storage))
        bits = reference.BITS[exact.itemsize]
        differ = exact.view(bits) != got.view(bits)
        a, b = exact.float(), got.float()
        info = torch.finfo(exact.dtype)
        step = (info.eps * torch.maximum(a.abs(), b.abs())).clamp(min=info.tiny * info.eps)
        near = (a - b).abs() <= step + 4 * EPS32 * a.abs().nan_to_num().amax(-1, keepdim=True)
        exact.view(bits)[differ & near] = got.view(bits)[differ & near]
    for name, s, e in zip(("storage of K", "storage of V"), storage, expected):
        same_bytes(name, s, e)


def judge_merge(call, result, arguments):
    """The union of two parts, in float64: weights are exp(lse) relative to the larger one."""
    names = call.names
    out_a, lse_a, out_b, lse_b = (call.arguments[name].double() for name in names[:4])
    by_token = (lambda lse: lse) if call.heads_last else (lambda lse: lse.mT)
    lse_a, lse_b = by_token(lse_a), by_token(lse_b)
    larger = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = (torch.where(lse == larger, 1.0, torch.exp(lse - larger))[..., None] for lse in (lse_a, lse_b))
    total = weight_a + weight_b
    expected, expected_lse = (weight_a * out_a + weight_b * out_b) / total, larger + torch.log(total[..., 0])
    dtype = call.arguments[names[0]].dtype
    if result[0].dtype != dtype or result[1].dtype != torch.float32:
        raise Wrong(f"out is {result[0].dtype}, lse is {result[1].dtype}")
    # The difference of two lse rounds by its size; weights, shares and products round a few times.
    distance = torch.where(lse_a == lse_b, 0.0, (lse_a - lse_b).abs()).nan_to_num(posinf=0.0)[..., None]
    bound = EPS32 * (6 + distance) * (weight_a * out_a.abs() + weight_b * out_b.abs()) / total
    bound += torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).tiny
    worst = compare("out", result[0].cpu(), expected, bound)
    bound = EPS32 * (4 + expected_lse.abs().nan_to_num(posinf=0.0))
    worst = max(worst, compare("lse", by_token(result[1].cpu()), expected_lse, bound))
    for name, x in zip(names[4:], result, strict=True):
        target = arguments.get(name)
        if target is not None and x.numel() and x.data_ptr() != target.data_ptr():
            raise Wrong(f"the result is not in the given {name}")
    return worst


def judge(call, result, arguments, storage, narrow=False, capped=False):
    """Raises Wrong; returns the largest error in units of what is allowed. arguments, storage: after the call.
    narrow: the weights of the call may be 8-bit. capped: its scores may be off by some roundings of softcap.
    """
    on_cpu = tuple(s.cpu() for s in storage)
    if call.storage:
        check_caches(call, on_cpu)
    check_inputs(call, call.arguments, arguments)
    if isinstance(call, MergeCall):
        return judge_merge(call, result, arguments)
    if call.base == "kv_paged_write":
        if result is not None:
            raise Wrong(f"kv_paged_write returned {result!r}")
        return 0.0
    if call.arguments.get("return_softmax_lse") or call.arguments.get("return_attn_probs"):
        out, lse = result
    else:
        out, lse = result, None
    if not isinstance(out, torch.Tensor):
        raise Wrong(f"expected out, got {type(out)}")
    # The attention is judged on the keys as written.
    caches = cases.carve(call.case, on_cpu)
    expected, expected_lse, bound, lse_bound = attend(call, caches, narrow, capped)
    q_dtype = call.arguments["q"].dtype
    dtype = torch.bfloat16 if q_dtype in FP8 else q_dtype
    if out.dtype != dtype:
        raise Wrong(f"out is {out.dtype}")
    worst = compare("out", out.cpu(), expected, bound)
    if lse is not None:
        if lse.dtype != torch.float32:
            raise Wrong(f"lse is {lse.dtype}")
        worst = max(worst, compare("lse", lse.cpu().mT, expected_lse, lse_bound))
    given = arguments.get("out")
    if given is not None:
        if out.numel() and out.data_ptr() != given.data_ptr():
            raise Wrong("the result is not in the given out")
        memory = whole(given)
        before = whole(call.arguments["out"]).clone()
        mine = before.view(given.dtype).as_strided(given.shape, given.stride(), given.storage_offset())
        mine.copy_(out.cpu())
        same_bytes("memory beside out", memory, before)
    return worst


def judge_refusal(call, error, arguments, storage):
    """A bad call: an error that names the argument, in one sentence, and every byte as it was."""
    if error is None:
        raise Wrong(f"no error for a bad {call.fault}")
    message = str(error).strip()
    if not isinstance(error, (ValueError, RuntimeError, TypeError, NotImplementedError)):
        raise Wrong(f"a bad {call.fault} raised {type(error).__name__}: {message[:300]}")
    if not any(name in message for name in call.fault.split("|")) or "\n" in message:
        raise Wrong(f"the message does not name {call.fault}: {message[:300]}")
    judge_untouched(call, arguments, storage)


def judge_untouched(call, arguments, storage):
    for name, s, e in zip(("storage of K", "storage of V"), storage, call.storage):
        same_bytes(name, s.cpu(), e)
    check_inputs(call, call.arguments, arguments)
    if arguments.get("out") is not None and not arguments["out"].is_meta:
        same_bytes("out", whole(arguments["out"]), whole(call.arguments["out"]))


def judge_guards(call, storage):
    """Nothing outside of the caches was written; without new tokens nothing at all."""
    for name, s, e in zip(("storage of K", "storage of V"), storage, call.storage):
        appends = "k" in call.arguments and call.base in ("flash_attn_with_kvcache", "kv_paged_write")
        parts = (slice(cases.GUARD), slice(-cases.GUARD, None)) if appends else (slice(None),)
        for part in parts:
            same_bytes(f"guards of the {name}", s.cpu()[part], e[part])
