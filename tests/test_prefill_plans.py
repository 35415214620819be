"""CUDA's routes for long queries without a GPU: what they take, what they plan, and the order of their tiles."""

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from test_cuda_plans import BLOCK_COST, visible

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))
import planner
import prefill_planner
from prefill_planner import call_of, mma_numbers_of, mma_refusal, numbers_of, order_of, refusal


@pytest.fixture(scope="module")
def library():
    if planner.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return prefill_planner.load()


PROMPTS = [1000, 300, 2000]
PREFILL_REFUSES = {
    "a device of another compute capability than 9.0": {"capability": 100},
    "no more rows than one tile of the decode kernel": {"max_q_len": 4},
    "8-bit q with a 16-bit cache": {"q_bytes": 1},
    "an 8-bit cache and no more rows than the decode kernel is faster for": {
        "kv_bytes": 1,
        "max_q_len": 8,
        "kv_heads": 8,
        "window_left": 400,
    },
    "num_splits above 1 and more rows than it is meant for": {"num_splits": 2, "max_q_len": 20000},
    "deterministic and num_splits above 1": {"num_splits": 2, "deterministic": 1},
    "float32": {"kv_bytes": 4, "q_bytes": 4},
    "qv": {"qv": 1},
    "head_dim or head_dim_v above 256": {"head_dim": 512},
    "rows of the cache are not whole pieces of 16 bytes": {"head_dim": 60},
    "there are more tiles of rows than 32 bits count": {"max_q_len": 2**33},
    "too few tiles of rows to fill the device": {"max_q_len": 20, "kv_heads": 1, "window_left": 400},
}


@pytest.mark.parametrize("reason", PREFILL_REFUSES)
def test_why_not_prefill(library, reason):
    assert refusal(library, PROMPTS) == ""
    assert refusal(library, PROMPTS, **PREFILL_REFUSES[reason]) == reason


def test_where_prefill_begins(library):
    """16 rows are one tile of the decode kernel, or 32 where it has about a block for each (request, kv_head). It is
    as fast with few such tiles and few keys, where a sixth of the multiprocessors would have no tile of prefill."""
    few_rows = "no more rows than one tile of the decode kernel"
    for requests, keys, rows in ((20, 1000, 16), (58, 1000, 16), (59, 1000, 32), (132, 1000, 32), (133, 1000, 16),
                                 (133, 2048, 32), (264, 2048, 32), (265, 2048, 16)):  # fmt: skip
        many = {"lens": [keys] * requests, "group": 4, "kv_heads": 1, "max_seqlen_k": keys}
        assert refusal(library, max_q_len=rows // 4, **many) == few_rows, (requests, keys)
        assert refusal(library, max_q_len=rows // 4 + 1, **many) == "", (requests, keys)
    wide = {"lens": [100] * 100, "group": 4, "kv_heads": 1, "max_q_len": 5}
    assert refusal(library, **wide) == few_rows
    for change in ({"head_dim": 256}, {"window_left": 50}, {"deterministic": 1}, {"kv_bytes": 1}):
        assert refusal(library, **wide | change) == "", change
    few = {"kv_heads": 1, "group": 1, "max_q_len": 128, "window_left": 100}  # no keys to cut
    too_few = "too few tiles of rows to fill the device"
    # A window of 100 and 128 queries see 228 keys: 14 tiles of 16 rows.
    assert refusal(library, [100], **few) == too_few and refusal(library, [100] * 2, **few) == ""
    # Without partials to add more of them, however few keys there are.
    for keys, requests in ((112, 7), (16, 7)):
        alone = {"kv_heads": 1, "group": 1, "max_q_len": 128, "paged": 0, "page_size": keys}
        assert refusal(library, [keys] * requests, **alone) == too_few
        assert refusal(library, [keys] * (requests + 1), **alone) == ""
    # Of 528 keys 39. Rows of fewer dimensions are less work for `decode`, those of 256 are more.
    wider = few | {"window_left": 400}
    assert refusal(library, [100] * 4, **wider) == too_few and refusal(library, [100] * 5, **wider) == ""
    assert refusal(library, [100] * 10, **wider, head_dim=64) == too_few
    assert refusal(library, [100] * 11, **wider, head_dim=64) == ""
    for head_dim in (192, 256):
        sizes = wider | {"head_dim": head_dim}
        assert refusal(library, [100] * 2, **sizes) == too_few and refusal(library, [100] * 3, **sizes) == ""
    # What must not depend on the other requests is always the same kernel; so are packed requests of few rows then.
    assert refusal(library, [100], deterministic=1, **few) == ""
    assert refusal(library, [100], q_lens=[1], deterministic=1) == ""
    assert "no more rows" in refusal(library, [100], max_q_len=1, deterministic=1)


def gpu(name):
    """Options of a GPU of planner.GPUS without wgmma; 8.6 stands for all of its limits."""
    processors, of_block, of_processor = planner.GPUS[name]
    capability = {"sm_80": 80, "sm_86, sm_89, sm_120": 86}[name]
    return {"capability": capability, "processors": processors, "shared_per_block": of_block,
            "shared_per_processor": of_processor}  # fmt: skip


OTHER_GPUS = [name for name in planner.GPUS if name != "sm_90"]


def alone_and_beside(rng):
    """A request by itself and among others, as arguments of call_of; the same options for both, `deterministic`."""
    lens, q_len = [rng.choice([0, 100, 4096, 60000])], rng.choice([1, 3, 5, 8, 64, 70, 500])
    others = [rng.randint(0, 9000) for _ in range(rng.choice([1, 7, 12, 40, 300]))]
    options = {
        "deterministic": 1, "num_splits": rng.choice([0, 0, 1, 2, 4, 40]), "kv_heads": rng.choice([1, 4, 8]),
        "group": rng.choice([1, 4, 16]), "head_dim": rng.choice([64, 80, 128, 192, 256]), "page_size": 16,
        "window_right": rng.choice([0, -1]), "window_left": rng.choice([-1, -1, 400]), "softcap": rng.choice([0, 0, 3]),
    }  # fmt: skip
    options |= rng.choice([{}, {"kv_bytes": 1}, {"kv_bytes": -1}, {"kv_bytes": 1, "q_bytes": 1}])
    if rng.random() < 0.5:
        return (lens, None), (lens + others, None), options | {"max_q_len": q_len}
    q_lens = [rng.choice([0, 1, 2, 40, 900]) for _ in others]
    return (lens, [q_len]), (lens + others, [q_len, *q_lens]), options


def test_what_is_deterministic_does_not_see_the_batch(library):
    """The route of a request, its tiles and its cuts are those that it has alone."""
    rng, routes = random.Random(5), set()
    for _ in range(2000):
        alone, beside, options = alone_and_beside(rng)
        shown = f"{alone} beside {beside}, {options}"
        refused = refusal(library, *alone, **options)
        assert (refusal(library, *beside, **options) == "") == (refused == ""), shown
        routes.add(refused)
        if refused:
            continue
        one, many = (numbers_of(library, *call, **options) for call in (alone, beside))
        for name in ("rows", "keys", "threads", "splits", "box_rows"):
            assert getattr(one, name) == getattr(many, name), (name, shown)
    assert len(routes) > 2 and "" in routes


@pytest.mark.parametrize("name", OTHER_GPUS)
def test_what_is_deterministic_does_not_see_the_batch_on_other_gpus(library, name):
    rng, routes = random.Random(6), set()
    for _ in range(2000):
        alone, beside, options = alone_and_beside(rng)
        refused, other = (mma_refusal(library, *call, **options, **gpu(name)) for call in (alone, beside))
        assert (refused == "") == (other == ""), f"{alone} beside {beside}, {options}"
        routes.add(refused)
        if refused:
            continue
        one, many = (mma_numbers_of(library, *call, **options, **gpu(name)) for call in (alone, beside))
        assert (one.head_dim, one.keys, one.rows, one.threads) == (many.head_dim, many.keys, many.rows, many.threads)
    assert len(routes) > 2 and "" in routes


def test_rows_of_wide_heads_that_decode_serves(library):
    """Up to 16 with 128 dimensions, above only 8, but in a short window with few tiles, and with `deterministic`."""
    few_rows = "no more rows than one tile of the decode kernel"

    def taken(requests, tokens, head_dim=192, **options):
        sizes = {"kv_heads": 2, "group": 1, "max_q_len": tokens, "head_dim": head_dim, "head_dim_v": head_dim}
        reason = refusal(library, [1000] * requests, **sizes | options)
        assert reason in ("", few_rows)
        return reason == ""

    for head_dim in (136, 192, 256):
        assert taken(8, 9, head_dim) and not taken(8, 8, head_dim)
    assert not taken(8, 16, 128) and taken(8, 17, 128)
    assert not taken(8, 16, deterministic=1) and taken(8, 17, deterministic=1)
    # 88 tiles are two thirds of the multiprocessors. 240 keys before 16 tokens are 256.
    assert not taken(43, 16, window_left=240) and taken(44, 16, window_left=240) and taken(43, 16, window_left=241)
    assert taken(43, 16, max_seqlen_k=257) and not taken(43, 16, max_seqlen_k=256)
    # Widening needs rounds of which three quarters are full: two from 198 tiles on.
    eight_bits = {"kv_bytes": 1}
    assert not taken(66, 16, **eight_bits) and not taken(98, 16, **eight_bits) and taken(99, 16, **eight_bits)
    assert taken(132, 16, **eight_bits) and not taken(134, 16, **eight_bits)


def test_prompts_of_several_rounds_stay_whole(library):
    """Cuts must save a fifth there, and tiles that are not tall 15 percent."""

    def plan(q_lens, heads, head_dim=64, **options):
        kv_heads, group = heads
        sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "head_dim_v": head_dim, "page_size": 16}
        n = numbers_of(library, q_lens, q_lens=q_lens, **sizes | {"max_seqlen_k": max(q_lens)} | options)
        return n.rows, n.splits

    assert plan([2254, 758, 3797, 3615, 2670], (2, 2)) == (256, 1)
    assert plan([5000], (3, 3)) == (128, 1) and plan([2600], (8, 2)) == (128, 1)
    assert plan([3000], (8, 2)) == plan([1500, 1500], (8, 2)) == plan([2048] * 3, (3, 3)) == (256, 1)
    # A table that is much wider does not tell that they are prompts.
    assert plan([5000], (3, 3), max_seqlen_k=0) != (128, 1)


def test_where_widening_begins(library):
    """With more than 32 rows, or where three quarters of the multiprocessors have work; products of 8 bits widen
    nothing. What must not depend on other requests widens 33 rows and packed ones."""
    few, e4m3, e5m2 = "an 8-bit cache and no more rows than the decode kernel is faster for", 1, -1
    many, some = {"lens": [4096] * 32, "group": 4}, {"lens": [4096] * 9, "group": 4}
    for q_bytes, kv_bytes, head_dim in ((2, e4m3, 128), (2, e5m2, 64), (e5m2, e5m2, 128), (e4m3, e4m3, 256)):
        options = {"q_bytes": q_bytes, "kv_bytes": kv_bytes, "head_dim": head_dim, "kv_heads": 8}
        assert refusal(library, max_q_len=5, **many, **options) == ""
        assert refusal(library, max_q_len=8, **some, **options) == few
        assert refusal(library, max_q_len=9, **some, **options) == ""
        assert refusal(library, q_lens=[5] * 9, deterministic=1, **some, **options) == ""
        assert refusal(library, max_q_len=8, deterministic=1, **many, **options) == few
        assert refusal(library, max_q_len=9, deterministic=1, **many, **options) == ""
    assert refusal(library, max_q_len=5, q_bytes=e4m3, kv_bytes=e4m3, **some) == ""


def test_the_longest_query_is_a_guess_with_packed_requests(library):
    """A hint of all tokens says nothing, so the mean counts; another one is taken at its word."""
    decode, prompts = [1] * 400, [50] * 400
    for q_lens, hint, wanted in (
        (decode, 400, False),
        (decode, 2**31 - 1, False),
        (decode, 1, False),
        (prompts, 20000, True),
        (prompts, 50, True),
        (prompts, 1, False),
    ):
        taken = refusal(library, [100] * 400, q_lens=q_lens, max_q_len=hint) == ""
        assert taken == wanted, (q_lens[0], hint)


@pytest.mark.parametrize("head_dim, head_dim_v", [(8, 8), (64, 64), (96, 80), (64, 128), (128, 128), (192, 128),
                                                  (192, 192), (256, 256)])  # fmt: skip
def test_prefill_plans(library, head_dim, head_dim_v):
    """The instance holds the dimensions; a box of a bulk copy fits a page and a tile; no more blocks than tiles."""
    for page_size in (1, 2, 8, 12, 16, 24, 48, 64, 100, 128, 256):
        for kv_heads, q_len in ((1, 2000), (8, 100), (2, 129)):
            options = {"head_dim": head_dim, "head_dim_v": head_dim_v, "kv_heads": kv_heads, "max_q_len": q_len}
            n = numbers_of(library, PROMPTS, page_size=page_size, **options)
            wide = max(head_dim, head_dim_v) > 128 and (head_dim, head_dim_v) != (192, 128)
            assert n.shared_bytes <= 232448 and (n.rows == 128 or q_len == 2000)  # 189 tiles of 128 rows: two rounds
            assert n.threads == {128: 384 if wide else 512, 192: 512, 256: 640}[n.rows]
            assert n.keys % max(1, n.box_rows) == 0 and page_size % max(1, n.box_rows) == 0 and n.box_rows % 8 == 0
            # 36 boxes of 8 rows are more than a warp has lanes to ask for them.
            too_many = n.keys == 96 and head_dim == 192 and math.gcd(page_size, 96) == 8
            assert (n.box_rows > 0) == (page_size % 8 == 0 and not too_many)
            tiles = len(PROMPTS) * -(-q_len * 4 // n.rows) * kv_heads
            assert n.items * kv_heads == tiles and n.blocks == min(tiles * n.most_splits, 132)
            assert n.l2_keys * (head_dim + head_dim_v) * 2 <= 24 << 20
    whole = numbers_of(library, PROMPTS, paged=0, page_size=1001, head_dim=head_dim, head_dim_v=head_dim_v)
    assert whole.box_rows == whole.keys
    assert not whole.all_scores and numbers_of(library, PROMPTS, softcap=3).all_scores


def test_tiles_of_whole_tokens(library):
    """Queries of whole tokens come in one box. It pays where a block has several tiles of few keys or few rows."""

    def plan(lens, q_lens, group, **options):
        n = numbers_of(library, lens, q_lens, group=group, **({"kv_heads": 8, "max_seqlen_k": max(lens)} | options))
        assert n.items >= sum(-(-q_len * group // n.tile_rows) for q_len in q_lens)
        return n.rows, n.tile_rows

    prompts = [400] * 8
    for group, rows in ((3, 126), (5, 125), (7, 126), (12, 120), (4, 128), (13, 128)):
        assert plan(prompts, prompts, group, head_dim=256) == (128, rows), group
    assert plan(prompts, prompts, 7, head_dim=96) == (192, 189)
    assert plan(prompts, prompts, 3, head_dim=96) == (192, 192)
    assert plan(prompts, prompts, 5, q_bytes=1, kv_bytes=1)[1] % 5 == 0
    assert plan(prompts, prompts, 3, kv_bytes=1) == (128, 126)  # widened
    window = {"window_left": 127, "head_dim": 256}
    assert plan([5000] * 4, [5000] * 4, 3, **window) == (128, 126)
    # Tiles of many keys take longer than their queries; where each block has one, nobody waits for them.
    assert plan([5000] * 4, [5000] * 4, 3, head_dim=256) == (128, 128)
    assert plan([400], [400], 3, head_dim=256) == (128, 128)
    # Most requests have few rows, whatever the table has room for.
    assert plan([9000] + [500] * 99, [400] + [1] * 99, 3, head_dim=256) == (128, 126)
    assert plan(prompts, prompts, 3, head_dim=256, deterministic=1) == (128, 128)


def test_tall_tiles_of_rows(library):
    """Up to head_dim 96, where each multiprocessor has one that is more than half full, or where tiles must not depend
    on the other requests. Or where others need a second round."""

    def rows(requests, q_len, head_dim=64, **options):
        options = {"kv_heads": 4, "max_q_len": q_len, "head_dim": head_dim, "head_dim_v": 64} | options
        n = numbers_of(library, [100] * requests, **options)
        assert n.shared_bytes <= 232448 and n.threads == {128: 512, 192: 512, 256: 640}[n.rows]
        assert n.blocks == min(132, n.items * 4 * n.most_splits)
        return n.rows

    # 132, 128 and 68 tiles of 64 tokens, group 4. 17 requests have 136 of 32 tokens, 16 have 128.
    assert rows(33, 64) == rows(32, 64) == rows(17, 64) == 256 and rows(16, 64) == 128
    assert rows(33, 33) == 256 and rows(33, 32) == 128
    assert rows(33, 64, head_dim=112) == 128 and rows(33, 64, softcap=3) == 128
    assert rows(33, 48, head_dim=80) == rows(17, 48, head_dim=80) == 192  # tiles of 48 tokens
    assert rows(16, 48, head_dim=80) == 128
    assert rows(33, 24, head_dim=80) == 128 and rows(33, 25, head_dim=96) == 192
    assert rows(33, 64, head_dim=80, softcap=3) == 128 and rows(1, 64, head_dim=80, deterministic=1) == 192
    assert rows(1, 64, deterministic=1) == 256 and rows(33, 16, deterministic=1) == 256
    assert rows(33, 64, deterministic=1, softcap=3) == 128


def test_tall_tiles_that_save_a_round(library):
    """One round where others take two. A long prompt's tiles in the second round are short, so it keeps them."""

    def rows(q_len, keys, head_dim, requests=1, **options):
        options = {"kv_heads": 8, "group": 5, "paged": 0, "page_size": keys} | options
        return numbers_of(
            library, [100] * requests, max_q_len=q_len, head_dim=head_dim, head_dim_v=head_dim, **options
        ).rows

    chunk = {head_dim: rows(512, 4096, head_dim) for head_dim in (64, 96, 128, 192)}  # 160 tiles of 128 rows
    assert chunk == {64: 256, 96: 192, 128: 192, 192: 128}
    assert rows(512, 4096, 128, q_bytes=1, kv_bytes=1) == 192 and rows(512, 4096, 128, kv_bytes=1) == 128
    assert rows(512, 4096, 128, kv_heads=6) == 128  # 120 tiles, one round
    assert rows(512, 4096, 128, kv_heads=11) == 128  # 220 tiles, and 154 tall ones
    assert rows(512, 4096, 128, deterministic=1) == rows(512, 4096, 128, softcap=3) == 128
    prompt = {"kv_heads": 3, "group": 3}  # 144 tiles, of which the last twelve are short
    assert {rows(2048, 2048, head_dim, **prompt) for head_dim in (64, 96, 128)} == {128}
    assert rows(2048, 2048, 128, **prompt, window_right=-1) == 192
    assert rows(600, 600, 128, group=4) == 192  # 152 tiles, of which any may be the second one of a block
    # A table may have room for more keys than there are. Chunks on many keys would lose more time than prompts.
    assert rows(2048, 65536, 64, **prompt) == 256 and rows(2048, 65536, 128, **prompt) == 192
    assert rows(300, 65536, 64, requests=2, group=4) == 256
    # Others would be left for the second round where requests differ.
    assert rows(300, 4096, 128, requests=2, group=4, q_lens=[300, 290]) == 192
    assert rows(300, 4096, 128, requests=2, group=4, q_lens=[300, 200]) == 128


def test_tall_tiles_that_leave_fewer_multiprocessors_idle(library):
    """48 tiles of 128 rows in two splits keep 96 of 132 multiprocessors busy; 24 or 32 tall ones have five or four."""

    def plan(q_len, keys, head_dim, **options):
        few = {"kv_heads": 1, "group": 6, "window_right": 0, "paged": 0, "page_size": keys, "read_rate": 4917}
        sizes = {"max_q_len": q_len, "head_dim": head_dim, "head_dim_v": head_dim}
        n = numbers_of(library, [keys], **(few | sizes | options))
        return n.rows, n.splits

    for head_dim, wanted in ((64, (256, 5)), (96, (192, 4)), (128, (192, 4))):
        assert plan(1024, 8192, head_dim) == plan(1024, 65536, head_dim) == wanted
        assert plan(1024, 8192, head_dim, num_splits=2) == (128, 2)
    eight_bits = {"q_bytes": 1, "kv_bytes": 1}
    assert plan(1024, 8192, 64, **eight_bits) == (256, 5) and plan(1024, 8192, 128, **eight_bits) == (192, 4)
    # Where there are no tall tiles, two rounds of shorter splits.
    assert {plan(1024, 8192, head_dim) for head_dim in (192, 256)} == {(128, 5)}
    assert plan(1024, 8192, 128, softcap=3) == (128, 5) and plan(1024, 8192, 128, deterministic=1) == (128, 1)
    # A prompt's splits would cost more than they save.
    assert plan(1024, 1024, 64) == plan(1024, 1024, 128) == (128, 1)


def test_tall_tiles_of_short_prompts(library):
    """At head_dim 128 causal prompts of up to 4096 tokens, with no more keys before them than they have themselves."""

    def rows(requests, q_len, keys, **options):
        options = {"kv_heads": 8, "max_q_len": q_len, "paged": 0, "page_size": keys} | options
        n = numbers_of(library, [100] * requests, **options)
        assert (n.keys, n.threads) == ((64, 512) if n.rows == 192 else (128, 512)) and n.shared_bytes <= 232448
        return n.rows

    assert rows(4, 2048, 2048) == 192 and rows(4, 1024, 2048) == 192 and rows(4, 1024, 2049) == 128
    assert rows(2, 4096, 8192) == 192 and rows(2, 4097, 4097) == 128 and rows(1, 8192, 8192) == 128
    assert rows(4, 2048, 2048, softcap=3) == 128 and rows(4, 2048, 2048, window_right=-1) == 128
    assert rows(4, 2048, 2048, deterministic=1) == 128 and rows(4, 2048, 2048, head_dim=192, head_dim_v=128) == 128
    # 49 or 50 tiles of rows of 8 kv_heads, of 396 that blocks ask for.
    assert rows(50, 48, 48) == 192 and rows(49, 48, 48) == 128
    # Packed keys are in one page; as many as queries are those of prompts alone.
    packed = {"q_lens": [2000, 1000, 1000, 1000], "packed": 1}
    assert rows(4, 2000, 5000, **packed) == 192 and rows(4, 2000, 5001, **packed) == 128
    # A table for 4096 keys or fewer is one of short prompts too.
    assert rows(4, 2047, 1, paged=1) == 128 and rows(4, 2048, 1, paged=1) == 192


def test_tall_tiles_of_rows_in_8_bits(library):
    def rows(requests, **options):
        options = {"kv_heads": 4, "max_q_len": 64, "head_dim": 64, "head_dim_v": 64} | options
        n = numbers_of(library, [100] * requests, q_bytes=1, kv_bytes=1, **options)
        assert n.shared_bytes <= 232448 and n.threads == {128: 384, 192: 512, 256: 640}[n.rows]
        return n.rows

    assert rows(33) == rows(17) == 256 and rows(16) == 192 and rows(33, softcap=3) == 192
    assert rows(1, deterministic=1) == 256 and rows(33, deterministic=1, softcap=3) == 192
    # Above head_dim 64 where rounds of tiles pay: 16, 8 and 11 requests of 16 x 4 tiles of 192 rows or 24 x 4 of 128
    # take 8 or 12, 4 or 6, and 6 or 8.
    assert rows(33, head_dim=80) == 128
    assert rows(16, head_dim=80, max_q_len=768) == 192 and rows(8, head_dim=128, max_q_len=768) == 192
    assert rows(11, head_dim=128, max_q_len=768) == 128
    assert rows(16, head_dim=128, max_q_len=768, deterministic=1) == 128


@pytest.mark.parametrize("head_dim, head_dim_v", [(16, 16), (64, 64), (64, 128), (80, 80), (128, 128)])
def test_plans_of_8_bits(library, head_dim, head_dim_v):
    """As in 16 bits, with a third consumer up to head_dim 64; twice as many keys of a head fit into L2."""
    for page_size in (1, 8, 16, 24, 256):
        options = {"head_dim": head_dim, "head_dim_v": head_dim_v, "q_bytes": 1, "kv_bytes": 1, "page_size": page_size}
        options["max_q_len"] = 40  # one tile of rows of each request
        assert refusal(library, PROMPTS, **options) == ""
        n = numbers_of(library, PROMPTS, **options)
        assert (n.rows, n.threads) == ((192, 512) if max(head_dim, head_dim_v) <= 64 else (128, 384))
        assert n.shared_bytes <= 232448
        assert n.keys % max(1, n.box_rows) == 0 and page_size % max(1, n.box_rows) == 0 and n.box_rows % 8 == 0
        assert (n.box_rows > 0) == (page_size % 8 == 0)
        assert n.l2_keys == (24 << 20) // (head_dim + head_dim_v)


@pytest.mark.parametrize("head_dim, head_dim_v", [(16, 16), (64, 128), (128, 128), (192, 128), (256, 256)])
def test_plans_of_8_bit_caches(library, head_dim, head_dim_v):
    """Nothing comes in bulk, as it is widened; another warpgroup helps where the consumers leave registers."""
    options = {"head_dim": head_dim, "head_dim_v": head_dim_v, "kv_bytes": 1}
    for page_size, other in itertools.product((1, 16, 256), ({}, {"kv_bytes": -1}, {"kv_bytes": -1, "q_bytes": -1})):
        assert refusal(library, PROMPTS, page_size=page_size, **(options | other)) == ""
        n = numbers_of(library, PROMPTS, page_size=page_size, **(options | other))
        assert n.box_rows == 0 and n.rows == 128 and n.threads == (512 if head_dim <= 128 else 384)
        assert n.shared_bytes <= 232448 and n.l2_keys == (24 << 20) // (head_dim + head_dim_v)


def test_how_keys_are_cut(library):
    """Into as many splits as multiprocessors have no tile of rows, where keys are worth it, or as the caller says."""
    splits = lambda *arguments, **options: numbers_of(library, *arguments, **options).splits  # noqa: E731
    one = {"kv_heads": 1, "max_q_len": 16, "page_size": 16}  # 65536 keys fit into the table
    seen = lambda keys: {"window_left": keys - 32}  # noqa: E731
    several = one | {"max_q_len": 256}
    assert splits([100], **one, **seen(16384)) == 32 and splits([100] * 8, **one) == 16
    assert splits([100] * 44, **one) == 3
    assert splits([100] * 128, **one) == 1 and splits(PROMPTS) == 1
    # Splits of 128 keys where tiles only read or are 8 at most, of 256 with more that compute.
    assert splits([100], **one, **seen(300)) == 1 and splits([100], **one, **seen(900)) == 7
    assert splits([100] * 16, **one, **seen(1024)) == 8 and splits([100] * 17, **one, **seen(1024)) == 7
    assert splits([100], **several, **seen(1024)) == 8 and splits([100] * 2, **several, **seen(1024)) == 4
    # With 256 dimensions partials are twice as large, but long keys of few rows are worth as many.
    wide = one | {"head_dim": 256, "head_dim_v": 256}
    assert splits([100], **wide, **seen(4096)) == 16 and splits([100], **wide, **seen(8192)) == 32
    # Longer keys have more splits, of 512 keys or more, or 1024 where tiles compute; then none has fewer than 256.
    assert splits([100], **one) == 128 and splits([100], **one, **seen(32768)) == 64
    two = one | {"max_q_len": 64}
    assert splits([100], **two) == 64 and splits([100], **two, window_left=40000) == 39
    least = lambda **options: numbers_of(library, [100], **(one | options)).least_split_keys  # noqa: E731
    assert least() == 256 and least(**seen(16384)) == 128
    assert splits([100], **one, deterministic=1) == 1 and splits([100], **one, deterministic=1, num_splits=1) == 1
    assert splits([100], **one, num_splits=1) == 1 and splits([100] * 67, **one, num_splits=3) == 3
    assert numbers_of(library, [100] * 8, **one).blocks == 132
    # A long one among short ones is cut into more, as far as there is memory for.
    most = lambda *arguments, **options: numbers_of(library, *arguments, **options).most_splits  # noqa: E731
    assert most([100], **one) == 128 and most([100] * 8, **one) == 32 and most([100] * 44, **one) == 15
    assert most([100] * 128, **one) == 5 and most([100] * 67, **one, num_splits=3) == 3
    assert most([100] * 331, **one) == 3 and most([100] * 529, **one) == 1  # memory for rows; more than four rounds
    assert most([100], **one, window_left=5000) == 32 and most([100], **one, window_left=2000) == 15
    # One round of splits with half as many tiles as multiprocessors, else two; short ones where few tiles are cut.
    cuts = lambda batch, **options: numbers_of(library, [100] * batch, **options)  # noqa: E731
    assert cuts(66, **one).splits_wanted == 132 and cuts(128, **one).splits_wanted == 264
    assert cuts(44, **one).least_long_split_keys == 128 and cuts(45, **one).least_long_split_keys == 512
    assert cuts(1, **several).least_long_split_keys == 128 and cuts(2, **several).least_long_split_keys == 256
    # Packed requests: one fills its tiles of rows, of several each may end with a row in a tile of its own.
    packed = {"kv_heads": 8, "page_size": 16}
    assert splits([100], q_lens=[128], **packed) == 4 and splits([100], q_lens=[129], **packed) == 3
    assert splits([100] * 2, q_lens=[64, 64], **packed) == 4 and splits([100] * 2, q_lens=[65, 63], **packed) == 3
    assert numbers_of(library, [100] * 2, q_lens=[65, 63], **packed).items == 5
    # Tokens of no request.
    assert splits([], q_lens=[], **one, total_q=500) == 1
    # The sums of all splits are those of five tiles of rows per multiprocessor at most.
    assert refusal(library, [100] * 82, **one, num_splits=8) == ""
    assert refusal(library, [100] * 83, **one, num_splits=8) != ""
    assert refusal(library, [100], **one, num_splits=2**40) != ""


def test_blocks_that_add_partials_are_spread(library):
    """No multiprocessor takes more of them than its share, or two; with few rows several warps add those of each."""
    for tokens, warps in ((4, 4), (66, 4), (67, 2), (99, 2), (100, 1), (2000, 1)):
        plan = numbers_of(library, [60000], max_q_len=tokens, num_splits=8)
        assert plan.combine_warps == warps
        share = 233472 // (plan.combine_bytes + 8 * 32 * 24 + 1024)
        assert plan.combine_blocks == min(-(-tokens * 16 * warps // 8), 8 * 132)
        assert share == max(2, -(-plan.combine_blocks // 132))
    few = numbers_of(library, [60000], max_q_len=4, num_splits=7)
    assert few.combine_warps == 1  # splits are few too


def test_keys_are_cut_where_the_last_round_has_few_tiles(library):
    """A few tiles more than multiprocessors. Splits cost time too, so there must be keys enough."""
    sizes = {"kv_heads": 8, "page_size": 16}
    wide = {"head_dim": 256, "head_dim_v": 256} | sizes  # has no tall tiles
    for tokens, wanted in ((500, 1), (528, 4), (700, 3), (1050, 1), (1100, 2), (2000, 1)):
        cut = numbers_of(library, [8192], max_q_len=tokens, **wide)
        assert cut.splits == wanted, tokens
        assert (2000 < cut.cut_from_keys < 9000) if wanted > 1 else cut.cut_from_keys == 0
        # Causal tiles of the last round are short, so cutting them gains less.
        even = numbers_of(library, [8192], max_q_len=tokens, **wide, window_right=-1)
        assert even.splits == wanted and even.cut_from_keys <= cut.cut_from_keys
    assert numbers_of(library, [8192], max_q_len=528, **wide, window_left=1024).splits == 1
    # One round of 88 tiles, however long the prompt is.
    one = numbers_of(library, [5632], max_q_len=5632, kv_heads=1, group=2, paged=0, page_size=5632)
    assert one.splits > 1 and 2000 < one.cut_from_keys < 5632
    prompt = {"kv_heads": 8, "group": 2, "head_dim": 64, "paged": 0, "page_size": 3000}
    fast = {"read_rate": 4917} | prompt  # 192 tiles of 256 rows
    assert numbers_of(library, [3000], max_q_len=3000, **fast).splits == 1
    assert numbers_of(library, [3000], max_q_len=3000, **fast, window_right=-1).splits > 1
    # Drafts, whose keys no two tiles share: memory bounds, so fewer tiles are enough for the last round.
    for batch, wanted in ((16, 1), (17, 3), (20, 2), (24, 1), (32, 1)):
        cut = numbers_of(library, [4096] * batch, max_q_len=8, **sizes)
        assert cut.splits == wanted, batch
        # Long ones may be cut into more if others are short.
        if wanted > 1:
            assert 1000 < cut.cut_from_keys < 4096 and cut.most_splits == 8
        else:
            assert (cut.cut_from_keys, cut.most_splits) == ((1024, 5) if batch == 16 else (2460, 8))
        # Packed ones may have a tile more each, but not if max_seqlen_q is right.
        packed = numbers_of(library, [4096] * batch, q_lens=[8] * batch, **sizes)
        assert (packed.splits, packed.cut_from_keys) == (cut.splits, cut.cut_from_keys), batch
    # Faster memory waits for single multiprocessors sooner, and for those that share a port.
    fast = {"read_rate": 4917} | sizes
    for batch, wanted in ((10, 3), (12, 4), (16, 1), (17, 4), (22, 2), (26, 1)):
        assert numbers_of(library, [4096] * batch, max_q_len=8, **fast).splits == wanted, batch
        packed = numbers_of(library, [4096] * batch, q_lens=[8] * batch, **fast)
        assert packed.splits == min(wanted, 5 * 132 // (packed.items * 8)), batch  # memory is for all that there may be
    assert numbers_of(library, [4096] * 32, q_lens=[8] * 32, **fast).splits == 1
    # An 8-bit cache has half of the bytes for a split that has as many.
    narrow = numbers_of(library, [4096] * 17, max_q_len=16, kv_bytes=1, **sizes)
    assert narrow.cut_from_keys > numbers_of(library, [4096] * 17, max_q_len=16, **sizes).cut_from_keys
    # As asked for, whatever the keys.
    assert numbers_of(library, [100], max_q_len=16, num_splits=3, **sizes).cut_from_keys == 0


def test_max_seqlen_k_stands_for_a_narrower_cache(library):
    """Rows, tiles and cuts are those of a cache that holds no more keys, but where they must not depend on others."""
    numbers = lambda n: {name: getattr(n, name) for name, _ in n._fields_}  # noqa: E731
    differ = 0
    for tokens, heads, group, dim in itertools.product((20, 300, 1536), (1, 4, 8), (1, 3), (64, 128, 256)):
        sizes = {"max_q_len": tokens, "kv_heads": heads, "group": group, "head_dim": dim, "head_dim_v": dim, "paged": 0}
        for keys in (tokens, 4 * tokens):
            wide = sizes | {"page_size": 65536}
            said = numbers(numbers_of(library, [keys], **wide, max_seqlen_k=keys))
            assert said == numbers(numbers_of(library, [keys], **sizes, page_size=keys)), (sizes, keys)
            differ += said != numbers(numbers_of(library, [keys], **wide))
            for fixed in ({"num_splits": 2}, {"deterministic": 1}):
                plans = [numbers_of(library, [keys], **wide, **fixed, max_seqlen_k=n) for n in (keys, 0)]
                assert numbers(plans[0]) == numbers(plans[1]), "a hint has changed what must not change"
    assert differ > 20, "calls for which the hint changes nothing test nothing"


def test_long_requests_may_be_cut_with_several_rounds(library):
    """Drafts, from so many keys on as one multiprocessor reads in 30 us, if the table has room for twice as many."""

    def cut(batch, **options):
        return numbers_of(library, [100] * batch, **({"kv_heads": 8, "max_q_len": 8} | options))

    plan = cut(32)
    assert (plan.splits, plan.most_splits, plan.cut_from_keys, plan.blocks) == (1, 8, 2460, 132)
    assert plan.splits_wanted == 132 * 3 + 32 * 8 // 2
    assert cut(32, head_dim=64).cut_from_keys == 4921 and cut(32, kv_bytes=1).cut_from_keys == 4921
    # Five tiles of rows for each multiprocessor hold the splits of 2640 tokens of 32 heads.
    assert cut(64).most_splits == 5 and cut(66).most_splits == 5
    assert cut(64, max_q_len=16).most_splits == 2 and cut(64, max_q_len=24).most_splits == 1
    # With more than four rounds a long one is not longer than all.
    assert cut(67).most_splits == 1
    # Not where the table has no room, where a window hides most of the keys, nor for prompts.
    assert cut(32, page_size=1).most_splits == 1 and cut(32, window_left=4000).most_splits == 1
    assert cut(8, max_q_len=100).most_splits == 1 and cut(32, deterministic=1).most_splits == 1
    packed = numbers_of(library, [100] * 32, q_lens=[8] * 32, kv_heads=8)
    assert (packed.most_splits, packed.cut_from_keys, packed.splits_wanted) == (8, 2460, plan.splits_wanted)


def test_long_requests_may_be_cut_where_tiles_compute(library):
    """From so many keys on as one multiprocessor reads in 30 us: chunks in one round of tiles, mixed ones in more."""
    one = {"group": 8, "kv_heads": 1, "max_q_len": 512}

    def cut(batch, **options):
        plan = numbers_of(library, [100] * batch, **(one | options))
        return plan.splits, plan.most_splits, plan.cut_from_keys

    assert cut(4) == (1, 5, 2460)  # 128 tiles, and memory for 660
    # Not for one request, with two rounds, where a window hides keys, or where other requests may not change a result.
    assert cut(1, kv_heads=4) == cut(8) == cut(4, window_left=1000) == cut(4, deterministic=1) == (1, 1, 0)
    # Decode steps beside a chunk: one round, or more in a table with room for 60 us.
    decode = {"q_lens": [1] * 64 + [512], "group": 8, "kv_heads": 1}
    one_round = numbers_of(library, [100] * 65, **decode)
    assert (one_round.splits, one_round.most_splits, one_round.cut_from_keys) == (1, 6, 2460)
    more = {"q_lens": [1] * 30 + [512], "kv_heads": 8}
    rounds = numbers_of(library, [100] * 31, **more)
    assert (rounds.splits, rounds.most_splits, rounds.cut_from_keys) == (1, 4, 2460)
    assert rounds.splits_wanted == 3 * 132 + rounds.items * 8 // 2
    assert numbers_of(library, [100] * 31, **more, page_size=1).most_splits == 1
    # Not where most requests have a chunk.
    assert numbers_of(library, [100] * 4, q_lens=[512, 512, 512, 1], kv_heads=8).most_splits == 1


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_splits_hold_every_tile_of_keys_once(library, splits):
    lens, q_lens = [1000, 0, 100, 4000, 37], [70, 3, 100, 33, 0]
    call, _keep = call_of(lens, q_lens, kv_heads=3, splits=splits)
    wanted = sum(-(-n * 4 // 128) for n in q_lens) * 3 * splits
    count, tiles = order_of(library, call, wanted)
    assert count == wanted
    dealt = {}
    for t in tiles:
        dealt.setdefault((t.b, t.head, t.first_row), []).append((t.split, t.first_tile, t.tiles))
        first, end = t.key_begin // 128, -(-t.key_end // 128)
        assert t.tiles <= max(0, -(-(end - first) // splits))
    for (b, _head, first_row), cuts in dealt.items():
        cuts.sort()
        assert [split for split, _, _ in cuts] == list(range(splits))
        begin, end = cuts[0][1], cuts[0][1]
        for _, first, own in cuts:
            assert own == 0 or first == end
            end += own
        last = max(0, lens[b] - q_lens[b] + min(first_row // 4 + 32, q_lens[b]))
        assert (begin, end) == (0, -(-last // 128)), (b, first_row)
    # The longest tile of rows sees 32 tiles of keys.
    for cut_from_tiles, cut in ((32, True), (33, False)):
        call, _keep = call_of(lens, q_lens, kv_heads=3, splits=splits, cut_from_tiles=cut_from_tiles)
        count, tiles = order_of(library, call, wanted)
        assert count == (wanted if cut else wanted // splits)
        assert cut or all(t.split == 0 and t.tiles == -(-t.key_end // 128) for t in tiles[:count])


@pytest.mark.parametrize("seed", range(12))
def test_long_requests_have_more_splits(library, seed):
    """Every tile of keys once, in splits of about the same length, and about as many as if all requests were alike."""
    rng = random.Random(seed)
    packed, batch, heads, host = seed % 2 == 0, rng.choice([3, 16, 40]), rng.choice([1, 3]), rng.choice([1, 2, 4])
    lens = [rng.choice([0, rng.randint(1, 2000), 40000]) for _ in range(batch - 1)] + [50000]
    q_lens = [rng.choice([1, 8, 70]) if packed else 8 for _ in lens]
    most = rng.choice([host, 2 * host, 32])
    rows = {"q_lens": q_lens} if packed else {"max_q_len": 8}
    tiles_of_rows = sum(-(-n * 4 // 128) for n in q_lens) * heads
    wanted = host * tiles_of_rows
    plan = {"kv_heads": heads, "splits": host, "most_splits": most, "splits_wanted": wanted}
    least = rng.choice([1, 4])  # tiles of keys in a split
    plan |= {"processors": rng.choice([132, 2000]), "least_long_split_keys": 128 * least}
    call, _keep = call_of(lens, cut_from_tiles=20, **plan, **rows)
    count, tiles = order_of(library, call, tiles_of_rows * (most + 1))
    dealt = {}
    for t in tiles[:count]:
        dealt.setdefault((t.b, t.head, t.first_row), []).append(t)
    assert len(dealt) == tiles_of_rows
    lengths = []
    for (b, _head, first_row), cuts in dealt.items():
        cuts.sort(key=lambda t: t.split)
        assert [t.split for t in cuts] == list(range(len(cuts))) and len(cuts) <= most
        assert all(
            t.tiles == 0 or t.first_tile == before.first_tile + before.tiles for before, t in zip(cuts, cuts[1:])
        )
        last = max(0, lens[b] - q_lens[b] + min(first_row // 4 + 32, q_lens[b]))
        assert sum(t.tiles for t in cuts) == -(-last // 128)
        lengths += [t.tiles for t in cuts]
        assert max(t.tiles for t in cuts) <= -(-sum(t.tiles for t in cuts) // len(cuts))
    tiles_of_keys = sum(-(-n // 128) * -(-q * 4 // 128) for n, q in zip(lens, q_lens)) * heads
    longest = -(-50000 // 128)
    rate = min((wanted - tiles_of_rows / 2) / tiles_of_keys, 1 / least)  # of splits for a tile of keys
    if min(longest * rate, most) >= 1.25 * host:
        assert count <= wanted + 0.6 * tiles_of_rows
        fair = max(tiles_of_keys / (wanted - tiles_of_rows / 2), least, -(-50000 // 128) / most)
        assert max(lengths) <= fair + 2
    else:
        assert count == wanted
    # Where the longest has few keys nothing is cut.
    call, _keep = call_of(lens, cut_from_tiles=500, **plan, **rows)
    assert order_of(library, call, tiles_of_rows)[0] == tiles_of_rows


@pytest.mark.parametrize("batch", [20, 100])
def test_short_requests_have_no_short_splits(library, batch):
    """The longest one has as many splits as the host says. Those of others are not shorter, but for their last one, and
    none is empty. Where blocks have one of them each at most, all have as many, for that is found sooner."""
    lens = [round(128 * 32 ** (b / (batch - 1))) for b in range(batch)]
    plan = {"max_q_len": 8, "kv_heads": 1, "splits": 5, "most_splits": 6, "splits_wanted": 5 * batch}
    for processors in (132, 2000):
        call, _keep = call_of(lens, processors=processors, **plan)
        count, tiles = order_of(library, call, 6 * batch)
        splits = [math.ceil(math.ceil(n / 128) / 7) for n in lens]  # 32 tiles of keys in 5 splits: 7 at most
        alike = batch * 5 <= processors
        assert count == (5 * batch if alike else sum(splits))
        assert alike or all(t.tiles > 0 for t in tiles[:count])


@pytest.mark.parametrize("batch", [33, 129, 700])
@pytest.mark.parametrize("blocks", [1, 132])
def test_many_requests_go_from_long_to_short(library, batch, blocks):
    """By eighths of the longest, in four groups of requests that are whole chunks of 32."""
    lens = [random.Random(b).randint(1, 8000) for b in range(batch)]
    call, _keep = call_of(lens, max_q_len=8, kv_heads=2, processors=blocks)
    count, tiles = order_of(library, call, 2 * batch)
    assert count == 2 * batch and len({(t.b, t.head) for t in tiles[:count]}) == count
    longest = max(-(-n // 128) for n in lens)
    group = -(-batch // 128) * 32
    places = [(-min(-(-lens[t.b] // 128) * 8 // longest, 7), t.b // group) for t in tiles[:count]]
    assert places == sorted(places)


def test_few_keys_have_fewer_splits(library):
    """The host does not know how many keys there are: splits of 256 of them at least, 8 splits at most."""
    for keys, wanted in ((128, 1), (384, 1), (385, 2), (1000, 4), (1792, 7), (1920, 7), (2048, 8), (40000, 8)):
        call, _keep = call_of([keys], max_q_len=256, kv_heads=3, splits=8, least_split_keys=256, cut_from_tiles=4)
        count, tiles = order_of(library, call, 8 * 3 * 8)
        assert count == 8 * 3 * wanted and {t.split for t in tiles[:count]} == set(range(wanted)), keys


@pytest.mark.parametrize("seed", range(8))
def test_one_round_has_the_same_tiles(library, seed):
    """Where every block has one tile at most their order does not matter: the tiles and splits of a single block that
    takes the long ones first, and those that the host knows to be so few."""
    rng = random.Random(seed)
    batch, heads, packed = rng.choice([1, 3, 32, 50]), rng.choice([1, 3]), seed % 2 == 0
    lens = [rng.choice([0, 100, rng.randint(1, 5000)]) for _ in range(batch)]
    q_lens = [rng.choice([0, 1, 33, 200]) for _ in lens]
    rows = {"q_lens": q_lens} if packed else {"max_q_len": 100}
    splits = rng.choice([1, 4])
    plan = {"kv_heads": heads, "splits": splits, "cut_from_tiles": rng.choice([0, 20])}
    plan["least_split_keys"] = rng.choice([1, 512])
    orders = []
    for one_round, blocks in ((0, 1), (0, 5000), (batch <= 32, 5000)):  # it is only known of so few requests
        call, _keep = call_of(lens, one_round=one_round, processors=blocks, **plan, **rows)
        count, tiles = order_of(library, call, 5000)
        orders.append(sorted(tuple(getattr(t, name) for name in prefill_planner.TILE) for t in tiles[:count]))
    assert orders[0] == orders[1] == orders[2] and (orders[0] or not any(q_lens))


def test_where_one_round_is_enough(library):
    """Tiles and their splits are no more than multiprocessors, and requests have several tiles of rows each."""
    for batch, q_len, one_round in ((1, 512, True), (1, 513, True), (32, 33, False), (1, 16, False), (8, 500, False)):
        plan = numbers_of(library, [100] * batch, max_q_len=q_len, kv_heads=1)
        assert plan.one_round == one_round, (batch, q_len)
        assert not one_round or plan.blocks >= plan.items * plan.most_splits
    sizes = {"kv_heads": 1, "window_left": 0}  # nothing is cut
    assert numbers_of(library, [100] * 32, max_q_len=64, **sizes).one_round
    assert not numbers_of(library, [100] * 33, max_q_len=64, **sizes).one_round  # more than a warp has lanes
    assert numbers_of(library, [100] * 32, q_lens=[64] * 32, **sizes).one_round


MMA_REFUSES = {
    "a device of compute capability 9.0, which has the route prefill": {"capability": 90},
    "8-bit q": {"q_bytes": 1, "kv_bytes": 1},
    "q and the cache differ in dtype": {"q_bytes": 1},
    "softcap or alibi_slopes over an 8-bit cache": {"kv_bytes": 1, "softcap": 3},
    "num_splits above 1": {"num_splits": 2},
    **{
        reason: PREFILL_REFUSES[reason]
        for reason in (
            "no more rows than one tile of the decode kernel",
            "float32",
            "qv",
            "head_dim or head_dim_v above 256",
            "rows of the cache are not whole pieces of 16 bytes",
            "there are more tiles of rows than 32 bits count",
        )
    },
    "too few tiles of rows to fill the device": {"max_q_len": 20, "kv_heads": 1},
}


@pytest.mark.parametrize("name", OTHER_GPUS)
@pytest.mark.parametrize("reason", MMA_REFUSES)
def test_why_not_prefill_mma(library, name, reason):
    assert mma_refusal(library, PROMPTS, **gpu(name)) == ""
    assert mma_refusal(library, PROMPTS, kv_bytes=1, **gpu(name)) == ""
    assert mma_refusal(library, PROMPTS, **(gpu(name) | MMA_REFUSES[reason])) == reason


@pytest.mark.parametrize("name", OTHER_GPUS)
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_prefill_mma_plans(library, name, kv_bytes):
    """Every instance holds the dimensions and fits the GPU, as many blocks beside each other as the plan says."""
    limits, seen, refused = gpu(name), set(), set()
    for dims in ((16, 16), (64, 64), (96, 80), (64, 128), (128, 128), (192, 128), (192, 192), (256, 256)):
        for kv_heads, q_len in ((1, 2000), (8, 100), (2, 129)):
            options = {"head_dim": dims[0], "head_dim_v": dims[1], "kv_heads": kv_heads, "max_q_len": q_len}
            reason = mma_refusal(library, PROMPTS, kv_bytes=kv_bytes, **options, **limits)
            if reason:
                assert reason == "tiles larger than the shared memory of a block"
                refused.add(dims)
                continue
            n = mma_numbers_of(library, PROMPTS, kv_bytes=kv_bytes, **options, **limits)
            seen.add((n.head_dim, n.keys))
            assert n.head_dim >= dims[0] and n.widens == (kv_bytes == 1) and n.keys % 16 == 0
            wide = {(64, 128)} if kv_bytes == 2 and limits["capability"] == 80 else {(128, 256)}
            assert (n.rows, n.threads) in (wide if n.head_dim == 256 else {(128, 128)})
            assert n.shared_bytes <= limits["shared_per_block"]
            assert n.blocks_per_processor * (n.shared_bytes + BLOCK_COST) <= limits["shared_per_processor"]
            tiles = len(PROMPTS) * -(-q_len * 4 // n.rows) * kv_heads
            assert n.items * kv_heads == tiles
            assert n.blocks == min(tiles, limits["processors"] * n.blocks_per_processor)
            assert n.l2_keys * sum(dims) * kv_bytes <= 24 << 20
            # A block of 128 threads is not alone where that can be.
            if kv_bytes == 2 and (n.head_dim <= 128 or limits["capability"] == 80):
                assert n.blocks_per_processor == 2
    small = limits["capability"] == 86
    assert refused == ({(192, 128), (192, 192), (256, 256)} if small and kv_bytes == 1 else set())
    assert len(seen) == (5 if kv_bytes == 2 else 2 if small else 3)


@pytest.mark.parametrize("seed", range(12))
def test_prefill_tiles_are_dealt_once(library, seed):
    """Every row of every kv_head is in one tile, with all its keys; long tiles come before short ones."""
    rng, keys = random.Random(seed), 128
    for _ in range(20):
        batch = rng.choice([0, 1, 2, 7, 33, 70])
        top = rng.choice([40, 700, 5000])
        lens = [rng.choice([0, 1, rng.randint(0, top), top]) for _ in range(batch)]
        q_lens = [rng.choice([0, 1, rng.randint(0, 200), rng.randint(0, top)]) for _ in range(batch)]
        options = {
            "kv_heads": rng.choice([1, 3, 8]), "group": rng.choice([1, 3, 4, 8, 12]),
            "chunk": rng.choice([0, 0, 0, 100]),
            "window_right": rng.choice([0, 0, -1, 5]), "window_left": rng.choice([-1, -1, 60]),
            "l2_keys": rng.choice([1, 1000, 1 << 20]), "processors": rng.choice([1, 1, 132]),
        }  # fmt: skip
        leftpads = [rng.randint(0, n) for n in lens] if rng.random() < 0.3 else None
        group = options["group"]
        rows = rng.choice([128, 128 // group * group])
        call, _keep = call_of(lens, q_lens, leftpads, tile_rows=rows, **options)
        wanted = sum(-(-n * group // rows) for n in q_lens) * options["kv_heads"]
        count, tiles = order_of(library, call, wanted)
        assert count == wanted
        plan = numbers_of(library, lens, q_lens, **options)
        assert plan.items >= sum(-(-n * group // plan.tile_rows) for n in q_lens)
        covered = sorted((t.b, t.head, row) for t in tiles for row in range(t.first_row, t.first_row + t.rows))
        assert covered == [
            (b, h, row) for b in range(batch) for h in range(options["kv_heads"]) for row in range(q_lens[b] * group)
        ]
        places = [options["window_left"], options["window_right"], options["chunk"]]
        for t in rng.sample(tiles, min(30, len(tiles))):
            for row in (t.first_row, t.first_row + t.rows - 1):
                leftpad = leftpads[t.b] if leftpads else 0
                begin, end = visible(row // group, q_lens[t.b], lens[t.b], leftpad, *places)
                assert begin >= end or (t.key_begin <= begin and end <= t.key_end)
        falls = options["window_right"] >= 0 and options["window_left"] < 0 and not options["chunk"]
        blocks = options["processors"]
        longest = max([0, *(-(-t.key_end // keys) - t.key_begin // keys for t in tiles)])
        alike = longest <= 2 or options["window_left"] >= 0 or wanted >= 2 * blocks
        if batch <= 32 and (wanted <= blocks or (longest <= 3 and alike)):  # their order matters little
            assert [t.b for t in tiles] == sorted(t.b for t in tiles)
        elif falls and not leftpads:
            sections = batch <= 32 and all(2 * -(-n * group // rows) * options["kv_heads"] >= blocks for n in q_lens)
            assert sections or long_ones_first(tiles, keys, 8 if batch <= 32 else 4)


def long_ones_first(tiles, keys, classes=8):
    """Classes by length: a tile is behind others that are shorter by no more than a class, and one tile. Those without
    keys take no time, and stand where those with one tile of keys do."""
    counts = [max(0, -(-t.key_end // keys) - t.key_begin // keys) for t in tiles]

    def most_behind(counts):
        return max([0, *(b - a for a, b in zip(itertools.accumulate(counts, min), counts[1:]))])

    allowed = max([0, *counts]) / classes + 1
    return most_behind([n for n in counts if n > 0]) <= allowed and most_behind(counts) <= allowed + 1


@pytest.mark.parametrize("cut", [False, True])
def test_more_requests_than_a_block_remembers(library, cut):
    """Every tile once, longest first, with 500 requests, one of which may have too many tiles of rows for a word."""
    rng = random.Random(3)
    lens = [rng.choice([0, rng.randint(1, 3000), 9000]) for _ in range(500)]
    q_lens = [rng.choice([0, 1, 1, 8, 40]) for _ in lens]
    lens[100], q_lens[100] = (60000, 40) if cut else (140000, 140000)
    q_lens = [min(q_len, n) for q_len, n in zip(q_lens, lens)]
    plan = {"splits": 1, "most_splits": 4, "cut_from_tiles": 8, "splits_wanted": 4000} if cut else {}
    call, _keep = call_of(lens, q_lens, kv_heads=2, **plan)
    wanted = sum(-(-n * 4 // 128) for n in q_lens) * 2
    assert cut or max(q_lens) * 4 // 128 > 4095
    count, tiles = order_of(library, call, 5 * wanted)
    tiles = tiles[:count]
    assert len({(t.b, t.head, t.first_row, t.split) for t in tiles}) == count
    assert len({(t.b, t.head, t.first_row) for t in tiles}) == wanted and (count > wanted if cut else count == wanted)
    assert sum(t.tiles for t in tiles) == sum(-(-t.key_end // 128) for t in tiles if t.split == 0)
    assert cut or long_ones_first(tiles, 128, 4)


def test_few_splits_more_than_blocks_become_none(library):
    """About one split for each block is asked for: two more would need a round of their own."""

    def splits_of(batch, splits_wanted):
        lens = [round(128 * 64 ** (i / (batch - 1))) for i in range(batch)]
        all_tiles = sum(-(-n // 128) for n in lens)
        plan = {"splits": 1, "most_splits": 16, "cut_from_tiles": 8, "splits_wanted": splits_wanted, "processors": 132}
        call, _keep = call_of(lens, [4] * batch, group=8, kv_heads=1, **plan)
        count, tiles = order_of(library, call, 1000)
        tiles = tiles[:count]
        assert sum(t.tiles for t in tiles) == all_tiles
        return count, max(t.tiles for t in tiles), all_tiles

    for batch in range(20, 61):
        count, longest, all_tiles = splits_of(batch, 132)
        assert count <= 132 or count > 132 + 132 // 8, batch
        assert longest <= -(-all_tiles // 90) + 1
    # With many rounds nothing is gained by it.
    assert any(0 < splits_of(batch, 600)[0] % 132 <= 132 // 8 for batch in range(20, 61))


@pytest.mark.parametrize("l2_keys, wanted", [(1, "0|1|2|3"), (8000, "0|12|3"), (14000, "01|23"), (1 << 20, "0123")])
def test_sections_of_requests(library, l2_keys, wanted):
    """Where tiles of rows are few for each key, requests come together whose keys L2 holds (twice `l2_keys`)."""
    lens, q_lens, rows = [2000, 1500, 500, 2000], [900, 800, 420, 950], 128

    def order(q_lens, **options):
        call, _keep = call_of(lens, q_lens, l2_keys=l2_keys, **({"kv_heads": 8} | options))
        call.processors = 200
        wanted = sum(-(-n * 4 // rows) for n in q_lens) * call.kv_heads
        count, tiles = order_of(library, call, wanted)
        assert count == wanted
        return tiles

    tiles = order(q_lens)
    sections = [list(map(int, section)) for section in wanted.split("|")]
    place = {b: i for i, section in enumerate(sections) for b in section}
    assert [place[t.b] for t in tiles] == sorted(place[t.b] for t in tiles)
    for section in sections:
        assert long_ones_first([t for t in tiles if t.b in section], 128)
    # One with fewer tiles than half of the blocks, or with two tiles in a bucket: then all of them together.
    assert long_ones_first(order([900, 800, 380, 950]), 128)
    assert long_ones_first(order([900, 800, 420, 1000]), 128)
    # Requests without a query, at the end too.
    order([900, 0, 420, 0])
