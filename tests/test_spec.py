"""torch-ext/spec/, compiled by every device, by itself: ranges, shares, scores, partial results, places, checks."""

import itertools
import math
import random

import pytest
import reference

FAR = (0, 1, 2, 15, 16, 17, 100, 2**20, 2**31 - 1, 2**31, 2**40)


@pytest.fixture(scope="module")
def spec(native):
    return native.spec


def test_visible_keys(spec):
    """The range is what the reference lists, for thousands of rows; every list is one stretch."""
    rng = random.Random(1)
    for _ in range(20_000):
        kv_len = rng.randint(0, 40)
        q_pos, leftpad = rng.randint(-20, kv_len + 5), rng.randint(0, kv_len + 3)
        left, right = (rng.choice((-1, -1, 0, rng.randint(0, 40), 2**31)) for _ in range(2))
        chunk = rng.choice((0, 0, 1, 7, rng.randint(1, 40), 2**31))
        begin, end = spec.visible_keys(q_pos, kv_len, leftpad, left, right, chunk)
        assert list(range(begin, end)) == reference.visible_keys(q_pos, kv_len, leftpad, left, right, chunk)


@pytest.mark.parametrize("kv_len", [2**31 - 1, 2**31, 2**40])
def test_visible_keys_far_out(spec, kv_len):
    """No sum of positions wraps: the same range at the end of a long request as at the end of a short one."""
    for window, chunk in itertools.product((-1, 0, 9), (0, 8)):
        begin, end = spec.visible_keys(kv_len - 1, kv_len, 0, window, 0, chunk)
        low = max(0 if window < 0 else kv_len - 1 - window, (kv_len - 1) // chunk * chunk if chunk else 0)
        assert (begin, end) == (low, kv_len)


def test_shares_cover_a_range_once(spec):
    """Shares follow each other from end to end, cut at multiples of `align`, and differ by less than two of them."""
    rng = random.Random(2)
    for _ in range(5000):
        begin = rng.choice(FAR)
        end, align = begin + rng.choice((0, 1, rng.randint(0, 300), 2**33)), rng.choice((1, 16, 32))
        splits = rng.choice((1, 2, 3, 7, 64, 1000))
        shares = [spec.split_keys(begin, end, split, splits, align) for split in range(splits)]
        assert shares[0][0] == begin and shares[-1][1] == end
        for (_, a_end), (b_begin, _) in itertools.pairwise(shares):
            assert a_end == b_begin and (a_end % align == 0 or a_end == end)
        full = -(-(-(-end // align) - begin // align) // splits) * align
        assert all(b - a <= full for a, b in shares)


def test_score(spec):
    """Scale, then softcap, then the slope; a cap of any size."""
    for qk, scale, cap, slope, distance in itertools.product(
        (-3.0, 0.0, 70.0), (0.1, 1.0), (0.0, 0.5, 30.0, 1e6), (0.0, 0.25, -1.0), (0.0, 1.0, 5000.0)
    ):
        capped = cap * math.tanh(qk * scale / cap) if cap else qk * scale
        expected = capped - slope * distance
        assert spec.score(qk, scale, cap, slope, distance) == pytest.approx(expected, rel=3e-6, abs=1e-5)


def partial(scores):
    """(m, l) of scores in natural units, as state.h defines them."""
    units = [s * math.log2(math.e) for s in scores]
    m = max(units, default=-math.inf)
    return m, sum(2.0 ** (u - m) if u > -math.inf else 0.0 for u in units)


def test_state(spec):
    """Partial results merged in any grouping give the lse of the whole; nothing is neutral; infinities stay."""
    rng = random.Random(3)
    for _ in range(2000):
        scores = [rng.uniform(-80, 80) for _ in range(rng.randint(0, 9))]
        cut = rng.randint(0, len(scores))
        (m, sum_), (m_b, sum_b) = partial(scores[:cut]), partial(scores[cut:])
        top = max(m, m_b)
        total = sum_ * spec.rescale(m, top) + sum_b * spec.rescale(m_b, top)
        whole = math.log(sum(math.exp(s) for s in scores)) if scores else -math.inf
        assert spec.lse(top, total) == pytest.approx(whole, rel=1e-5, abs=1e-4)
        sink = rng.choice((-math.inf, rng.uniform(-80, 80)))
        m, sum_, factor = spec.add_sink(sink, top, total)
        with_sink = sum(math.exp(s) for s in [*scores, sink])
        assert spec.lse(m, sum_) == pytest.approx(math.log(with_sink) if with_sink else -math.inf, rel=1e-5, abs=1e-4)
        assert factor == (1.0 if m == top else pytest.approx(2.0 ** (top - m), rel=1e-5))
    assert spec.lse(-math.inf, 0.0) == -math.inf and spec.normalizer(0.0) == 0.0 and spec.normalizer(4.0) == 0.25
    assert spec.with_v_descale(0.0, math.nan) == 0.0 and spec.with_v_descale(0.25, 8.0) == 2.0
    assert spec.rescale(-math.inf, -math.inf) == 1.0 and spec.rescale(math.inf, math.inf) == 1.0
    assert spec.add_sink(math.inf, 3.0, 2.0)[2] == 0.0  # an infinite sink takes everything


def test_request(spec):
    """Lengths, new tokens, padded entries: whatever form they come in."""
    packed = {"batch": 3, "cu_seqlens_q": [0, 2, 2, 7], "cache_seqlens": [5, -1, 9], "cache_leftpad": [0, 0, 4]}
    packed |= {"cu_seqlens_k_new": [0, 3, 4, 4]}
    expected = [(0, 2, 5, 0, 3, 8, 0), (2, 0, 0, 3, 0, 0, 0), (2, 5, 9, 4, 0, 9, 4)]
    names = ("q_begin", "q_len", "old_len", "new_begin", "new_len", "kv_len", "leftpad")
    for b, values in enumerate(expected):
        assert spec.request(packed, b) == dict(zip(names, values))
    ragged = spec.request({"batch": 2, "max_q_len": 3, "cu_seqlens_k": [0, 4, 11]}, 1)
    assert (ragged["q_len"], ragged["kv_len"]) == (3, 7)
    assert spec.request({"page_size": 40}, 0)["kv_len"] == 40  # a contiguous cache without lengths


def test_places(spec):
    table = {
        "batch": 2,
        "page_size": 4,
        "max_pages": 3,
        "block_table_stride": 5,
        "block_table": [*range(5), *range(7, 12)],
    }
    assert [spec.slot_of_key(table, 1, key) for key in (0, 3, 4, 11)] == [(7, 0), (7, 3), (8, 0), (9, 3)]
    assert spec.slot_of_key(table | {"cache_batch_idx": [1, 0]}, 0, 5) == (8, 1)
    assert spec.slot_of_key({"batch": 2, "cu_seqlens_k": [0, 4, 9]}, 1, 3) == (0, 7)
    assert spec.slot_of_key({"batch": 2, "page_size": 2**40}, 1, 2**33) == (1, 2**33)
    assert spec.slot_of_key({"batch": 2, "page_size": 9, "cache_batch_idx": [6, 5]}, 0, 3) == (6, 3)


def test_keys_of_tokens(spec):
    """The hull of what single tokens see; tokens that see nothing do not widen it."""
    rng = random.Random(4)
    for _ in range(3000):
        kv_len, q_len = rng.randint(0, 30), rng.randint(0, 12)
        leftpad, left, right = rng.randint(0, 9), rng.choice((-1, 0, 5)), rng.choice((-1, 0, 3))
        chunk = rng.choice((0, 0, 4))
        call = {
            "max_q_len": q_len, "cache_seqlens": [kv_len], "cache_leftpad": [leftpad], "window_left": left,
            "window_right": right, "attention_chunk": chunk, "page_size": 64,
        }  # fmt: skip
        begin, end = sorted((rng.randint(0, q_len), rng.randint(0, q_len)))
        seen = [
            reference.visible_keys(kv_len - q_len + t, kv_len, leftpad, left, right, chunk) for t in range(begin, end)
        ]
        keys = sorted(set().union(*seen))
        first, last = spec.keys_of_tokens(call, 0, begin, end)
        assert first == last if not keys else (first, last) == (keys[0], keys[-1] + 1)


GOOD = {
    "batch": 2, "paged": 1, "page_size": 4, "max_pages": 3, "num_pages": 9, "table_rows": 2,
    "block_table": [1, 2, 99, 4, 5, -7], "cache_seqlens": [8, 5], "max_q_len": 2, "window_right": 0,
}  # fmt: skip
BAD = {
    "negative length": ({"cache_seqlens": [8, -1]}, r"^cache_seqlens\[1\]: .*-1"),
    "length over the table": ({"cache_seqlens": [13, 5]}, r"^cache_seqlens\[0\]: .*12.*13"),
    "page past the cache": ({"block_table": [1, 9, 99, 4, 5, -7]}, r"^block_table: .*\b9 for batch entry 0, page 1"),
    "negative page": ({"block_table": [1, 2, 99, 4, -5, -7]}, r"^block_table: .*-5 for batch entry 1, page 1"),
    "negative leftpad": ({"cache_leftpad": [0, -2]}, r"^cache_leftpad\[1\]: .*-2"),
    "row past the table": ({"cache_batch_idx": [0, 2]}, r"^cache_batch_idx\[1\]: .*\b2$"),
    "cu_seqlens_q starts late": ({"cu_seqlens_q": [1, 2, 4], "total_q": 4}, r"^cu_seqlens_q\[0\]: .*1$"),
    "cu_seqlens_q falls": ({"cu_seqlens_q": [0, 3, 2], "total_q": 4}, r"^cu_seqlens_q\[2\]: .*2$"),
    "cu_seqlens_q ends late": ({"cu_seqlens_q": [0, 3, 5], "total_q": 4}, r"^cu_seqlens_q\[2\]: .*5$"),
    "new tokens without a page": ({"seqlen_new": 1}, r"^block_table: .*99"),
    "new tokens past the table": ({"seqlen_new": 5}, r"^cache_seqlens\[0\]: .*5 new tokens"),
    "rotary table too short": ({"seqlen_new": 2, "cache_seqlens": [4, 4], "rotary_len": 5}, r"^rotary_cos"),
}  # fmt: skip


def test_good_values(spec):
    spec.check_values(GOOD)
    spec.check_values(GOOD | {"cache_seqlens": [8, 0], "block_table": [1, 2, 99, -1, -1, -1]})
    spec.check_values(GOOD | {"cu_seqlens_q": [0, 2, 4], "total_q": 9, "max_q_len": 2})


@pytest.mark.parametrize("name", BAD)
def test_bad_values(spec, name):
    change, match = BAD[name]
    with pytest.raises(RuntimeError, match=match):
        spec.check_values(GOOD | change)


def test_pages_are_checked_where_rows_see_them(spec):
    """The first bad number among the pages of visible keys is reported; all others may be anything."""
    rng = random.Random(8)
    for _ in range(500):
        page_size, num_pages = rng.choice((1, 3, 16)), rng.choice((1, 9, 2**31 - 1, 2**31, 2**40))
        kv_len, window = rng.randint(1, 300), rng.randint(0, 100)
        pages = -(-kv_len // page_size)
        wrong = [value for value in (-1, -(2**31), num_pages, 2**31 - 1) if not 0 <= value < min(num_pages, 2**31)]
        wrong = [value for value in wrong if value < 2**31]
        table = [rng.choice((0, min(num_pages, 2**31) - 1)) for _ in range(pages)]
        bad = sorted(rng.sample(range(pages), min(pages, rng.randint(0, 2))))
        for page in bad:
            table[page] = rng.choice(wrong)
        call = {
            "page_size": page_size, "num_pages": num_pages, "max_pages": pages, "block_table": table,
            "cache_seqlens": [kv_len], "window_left": window, "window_right": 0, "table_rows": 1,
        }  # fmt: skip
        seen = [page for page in bad if (page + 1) * page_size > max(0, kv_len - 1 - window)]
        if not seen:
            spec.check_values(call)
            continue
        with pytest.raises(RuntimeError, match=f", got {table[seen[0]]} for batch entry 0, page {seen[0]}$"):
            spec.check_values(call)
