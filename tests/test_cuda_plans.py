"""The CUDA planners and the dealing of work to thread blocks, without a GPU: tests/cuda/plans.cpp compiles them for the
host and follows every block of a grid.

Random batches on GPUs of every size: every (row, tile of keys) is some block's, once; the rows of an item have one
block that writes them, and it waits only for blocks that started before it; grids, workspaces and
shared memory are bounded.
"""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))
import planner
from planner import GPUS, plan

BLOCK_COST = 1024  # bytes of shared memory that the system takes for every block


@pytest.fixture(scope="module")
def library():
    if planner.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return planner.load()


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
def test_every_plan_fits_the_gpu(library, gpu, kv_bytes):
    """Shared memory of a block, and of the blocks that stand beside each other, on GPUs that are not here."""
    _, of_block, of_processor = GPUS[gpu]
    seen = set()
    for head_dim in (16, 64, 96, 128, 192, 256, 512):
        for q_len in (1, 2, 3, 16, 200):
            for batch in (1, 3, 64, 2000):
                for options in ({}, {"deterministic": 1}, {"num_splits": 4}, {"window_left": 50}, {"capability": 90}):
                    if "capability" in options and gpu != "sm_90":
                        continue
                    numbers, _ = plan(
                        library,
                        GPUS[gpu],
                        head_dim=head_dim,
                        kv_bytes=kv_bytes,
                        q_len=q_len,
                        lens=[4096] * batch,
                        **options,
                    )
                    seen.add(numbers.route)
                    assert 0 < numbers.blocks < 2**31 and numbers.warps > 0
                    assert numbers.shared_bytes <= of_block
                    beside = numbers.blocks_per_processor * (numbers.shared_bytes + BLOCK_COST)
                    assert beside <= of_processor and numbers.blocks_per_processor > 0
    assert seen == ({0, 1, 2, 3} if kv_bytes == 4 else {0, 1, 2})


def visible(token, q_len, kv_len, leftpad, window_left, window_right, chunk):
    """Keys [begin, end) of a row."""
    q_pos = kv_len - q_len + token
    begin, end = leftpad, kv_len
    if window_left >= 0:
        begin = max(begin, q_pos - window_left)
    if window_right >= 0:
        end = min(end, q_pos + window_right + 1)
    if chunk:
        first = leftpad + (q_pos - leftpad) // chunk * chunk
        begin, end = max(begin, first), min(end, first + chunk)
    return max(begin, 0), max(begin, 0, end)


def random_call(rng):
    batch, longest_q, top = rng.choice(
        [(0, 5, 9), (1, 90, 3000), (2, 40, 900), (3, 200, 40), (7, 9, 300), (70, 2, 500)]
    )
    lens = [top] * batch if rng.random() < 0.4 else [rng.choice([0, rng.randint(0, top)]) for _ in range(batch)]
    options = {
        "gpu": (rng.choice([1, 3, 6, 10]), *rng.choice(list(GPUS.values()))[1:]),
        "kv_heads": rng.choice([1, 2, 3]),
        "group": rng.choice([1, 3, 4, 8, 16]),
        "head_dim": rng.choice([60, 64, 64, 96, 128, 128, 256]),
        "kv_bytes": rng.choice([1, 2, 2, 4]),
        "window_right": rng.choice([0, 0, -1, 5]),
    }
    if rng.random() < 0.5:
        longest = rng.choice([1, 3, longest_q])
        options["q_lens"] = [longest if rng.random() < 0.3 else rng.randint(0, longest) for _ in range(batch)]
        if rng.random() < 0.6:
            options["max_q_len"] = rng.choice([0, 1, longest, sum(options["q_lens"]), 2**31 - 1])
    else:
        options["q_len"] = rng.choice([1, 1, 2, longest_q])
    if rng.random() < 0.2:
        options["window_left"] = rng.choice([0, 7, 100])
    if rng.random() < 0.1:
        options["chunk"] = rng.choice([1, 16, 100])
    if rng.random() < 0.2:
        options["leftpads"] = [rng.randint(0, n) for n in lens]
    if rng.random() < 0.2:
        options["append"] = rng.choice([1, 3])
    options |= rng.choice([{}, {}, {}, {"deterministic": 1}, {"num_splits": rng.choice([1, 2, 7, 300])}])
    options |= rng.choice([{}, {"max_seqlen_k": rng.choice([1, max([1, *lens]), 10**6])}])  # a hint, true or not
    return lens, options


def judge(numbers, shares, lens, options):
    q_lens = options.get("q_lens") or [options.get("q_len", 1)] * len(lens)
    group, heads, append = options["group"], options["kv_heads"], options.get("append", 0)
    if numbers.halves:
        group, heads = group // 2, heads * 2
    written, covered, partials = {}, {}, {}
    for s in shares:
        item = (s.b, s.head, s.first_row)
        assert 0 < s.rows <= numbers.rows_per_tile and s.tile < s.tile_end
        covered.setdefault(item, []).append((s.tile, s.tile_end))
        if s.first:
            assert item not in written, "two blocks write the same rows"
            written[item] = s
        else:
            # One partial is all that the workspace has for a block.
            assert s.block not in partials, "a block leaves two partials"
            partials[s.block] = (item, s.tile)

    rows = sorted((s.b, s.head, row) for s in written.values() for row in range(s.first_row, s.first_row + s.rows))
    assert rows == [
        (b, head, row) for b in range(len(lens)) for head in range(heads) for row in range(q_lens[b] * group)
    ]
    for item, s in written.items():
        tiles = sorted(covered[item])
        assert all(a[1] == b[0] for a, b in zip(tiles, tiles[1:])), "a tile is missing, or some block's twice"
        keys = [
            visible(
                token,
                q_lens[s.b],
                lens[s.b] + append,
                options.get("leftpads", [0] * len(lens))[s.b],
                options.get("window_left", -1),
                options["window_right"],
                options.get("chunk", 0),
            )
            for token in {row // group for row in range(s.first_row, s.first_row + s.rows)}
        ]
        for begin, end in keys:
            inside = tiles[0][0] * numbers.tile_keys <= begin and end <= tiles[-1][1] * numbers.tile_keys
            assert begin == end or inside, "a row does not get all its keys"
        # It adds the partials of the blocks just before it in its line, the nearest keys first.
        assert s.partials == len(tiles) - 1
        for i in range(1, s.partials + 1):
            assert partials[s.block - i * s.lines] == (item, tiles[i][0])

    # Bounds
    packed = sum(q_lens) * group // numbers.rows_per_tile + len(lens)
    processors = options["gpu"][0]
    tiles = packed if "q_lens" in options else len(lens) * -(-q_lens[0] * group // numbers.rows_per_tile) if lens else 0
    if numbers.balanced:
        assert numbers.blocks <= 3 * processors
    else:
        assert numbers.blocks <= max(1, tiles * heads * numbers.splits)
    dims = options["head_dim"] if numbers.rows_per_tile <= 16 else 64 if options["head_dim"] <= 64 else 128
    words = 2 * -(-dims // 4) + -(-dims // 64)
    assert numbers.workspace_bytes <= numbers.blocks * numbers.rows_per_tile * words * 16
    if numbers.splits == 1 and not numbers.balanced:
        assert not partials and numbers.workspace_bytes == 0


@pytest.mark.parametrize("head_dim, group", [(64, 8), (128, 4), (128, 8), (256, 2)])
@pytest.mark.parametrize("window", [-1, 31])
def test_short_pairs_of_one_length_stay_whole(library, head_dim, group, window):
    """More pairs than blocks: none is cut, and no block has two pairs more than another."""
    for batch in (17, 20, 32, 50, 130):
        for keys in (1, 20, 64):
            options = {"kv_heads": 8, "group": group, "head_dim": head_dim, "window_left": window}
            numbers, shares = plan(library, shares=100_000, lens=[keys] * batch, **options)
            if numbers.blocks > 8 * batch:
                continue
            assert len(shares) == 8 * batch and all(s.first and s.partials == 0 for s in shares), (batch, keys)
            most = max(Counter(s.block for s in shares).values())
            assert most == -(-8 * batch // numbers.blocks), (batch, keys)


@pytest.mark.parametrize("seed", range(4))
def test_every_key_is_dealt_once(library, seed):
    rng = random.Random(seed)
    routes = set()
    for _ in range(60):
        lens, options = random_call(rng)
        shown = {"lens": lens} | options
        numbers, shares = plan(library, shares=1_000_000, lens=lens, **options)
        routes.add(numbers.route)
        try:
            judge(numbers, shares, lens, options)
        except AssertionError as error:
            raise AssertionError(f"{shown}: {error}") from None
    assert routes == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(4))
def test_every_key_is_dealt_once_to_warpgroups(library, seed):
    """Calls that they may take, on GPUs of a few multiprocessors with Hopper's shared memory."""
    rng, halves, pairs_of_block, rows = random.Random(seed), set(), set(), set()
    for _ in range(120):
        lens, options = random_call(rng)
        wide = rng.random() < 0.4
        fixed = ("chunk", "window_left", "deterministic", "num_splits")
        for name in (*fixed, *(("q_lens", "max_q_len") if wide else ())):
            options.pop(name, None)
        if wide:
            options |= {"group": 4, "q_len": rng.choice([5, 8])}
        options |= {"gpu": (rng.choice([3, 10, 30]), *GPUS["sm_90"][1:]), "capability": 90, "kv_bytes": 2}
        options["head_dim"] = rng.choice([64, 96, 128, 128, 256])
        shown = {"lens": lens} | options
        numbers, shares = plan(library, shares=1_000_000, lens=lens, **options)
        if not numbers.wgmma:
            continue
        assert numbers.balanced and numbers.blocks == options["gpu"][0] and numbers.tile_keys == 16, shown
        halves.add(numbers.halves)
        rows.add(numbers.rows_per_tile)
        pairs_of_block.add(max(Counter(s.block for s in shares).values(), default=0) > 1)
        try:
            judge(numbers, shares, lens, options)
        except AssertionError as error:
            raise AssertionError(f"{shown}: {error}") from None
    assert pairs_of_block == {False, True} and halves == {0, 1} and rows == {8, 16, 32}


@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_deterministic_does_not_see_the_batch(library, gpu):
    """The route of a request and its cuts are those that it has alone."""
    rng, routes = random.Random(7), set()
    for _ in range(150):
        lens, others = [rng.choice([0, 100, 2000])], [rng.randint(0, 2000) for _ in range(rng.choice([1, 9, 30]))]
        options = {
            "deterministic": 1, "num_splits": rng.choice([0, 0, 1, 7]), "kv_heads": rng.choice([1, 8]),
            "group": rng.choice([1, 4, 16]), "head_dim": rng.choice([60, 64, 128, 256]),
            "kv_bytes": rng.choice([1, 2, 4]), "window_left": rng.choice([-1, -1, 400]),
        }  # fmt: skip
        if rng.random() < 0.5:
            rows = ({"q_len": rng.choice([1, 3, 17])},) * 2
        else:
            q_lens = [rng.choice([1, 3, 17])]
            rows = {"q_lens": q_lens}, {"q_lens": q_lens + [rng.choice([0, 1, 2, 20]) for _ in others]}
        # As wide a block table for both.
        alone, beside = (
            plan(library, GPUS[gpu], shares=300_000, lens=of, max_pages=200, **options, **own)
            for of, own in ((lens, rows[0]), (lens + others, rows[1]))
        )
        shown = f"{lens}, {rows[0]} beside {others}, {rows[1]}, {options}"
        for name in ("route", "warps", "rows_per_tile", "tile_keys"):
            assert getattr(alone[0], name) == getattr(beside[0], name), (name, shown)
        cuts = [
            sorted((s.head, s.first_row, s.tile, s.tile_end) for s in shares if s.b == 0)
            for _, shares in (alone, beside)
        ]
        assert cuts[0] == cuts[1], shown
        routes.add(alone[0].route)
    assert routes == {1, 2, 3}  # decode_basic deals by the lengths that it finds


@pytest.mark.parametrize("cuts", [{"deterministic": 1}, {"num_splits": 7}, {"num_splits": 300}], ids=str)
@pytest.mark.parametrize("head_dim, kv_bytes", [(128, 2), (60, 2), (128, 4)], ids=["decode", "fallback", "float32"])
def test_long_requests_have_fewer_cuts(library, head_dim, kv_bytes, cuts):
    """Short requests beside them have as many as ever, and partials do not grow by every split of a long prompt."""
    heads, group = 2, 16
    lens, q_lens = [3000, 900, 0, 3000, 3000, 2000], [700, 1, 0, 90, 2, 90]
    sizes = {"kv_heads": heads, "group": group, "head_dim": head_dim, "kv_bytes": kv_bytes, "max_pages": 200}
    options = cuts | sizes | {"window_right": -1}
    uncut = kv_bytes == 4 and "deterministic" in cuts

    def cuts_of(b, shares):
        return sorted((s.head, s.first_row, s.tile, s.tile_end) for s in shares if s.b == b)

    numbers, shares = plan(library, shares=1_000_000, lens=lens, q_lens=q_lens, **options)
    judge(numbers, shares, lens, options | {"gpu": GPUS["sm_90"], "q_lens": q_lens})
    cut_rows = 16384 + numbers.rows_per_tile
    assert numbers.blocks * numbers.rows_per_tile <= heads * (sum(q_lens) * group + len(lens) * cut_rows)
    assert uncut or max(s.partials for s in shares if s.b == 4) >= 1
    assert 1 + max(s.partials for s in shares if s.b == 0) <= 16384 // (700 * group)
    for b in range(len(lens)):
        if kv_bytes == 4 and q_lens[b] <= 2:  # alone it has another route
            continue
        if numbers.route == 2 and q_lens[b] == 1 and "deterministic" not in cuts:  # alone it has other tiles
            continue
        _, alone = plan(library, shares=300_000, lens=[lens[b]], q_lens=[q_lens[b]], **options)
        assert cuts_of(0, alone) == cuts_of(b, shares), b
        if q_lens[b] > 1:  # a request of one token may have another route without cu_seqlens_q
            _, direct = plan(library, shares=300_000, lens=[lens[b]], q_len=q_lens[b], **options)
            assert [s.partials for s in direct if s.first] == [s.partials for s in alone if s.first], b


FALLING = [
    [3139, 36, 3, 72],
    [99, 140, 1500, 471, 547, 174, 128, 1359, 52],
    [227, 1459, 275, 599, 1445, 896, 306, 374, 1250],
]


@pytest.mark.parametrize("cuts", [{"deterministic": 1}, {"num_splits": 16}], ids=str)
@pytest.mark.parametrize("cu", FALLING, ids=len)
def test_nobody_waits_where_cu_seqlens_q_falls(library, cu, cuts):
    """Results may be any, but every partial that is awaited is left."""
    requests = len(cu) - 1
    lens, q_lens = [32768] * requests, [end - begin for begin, end in zip(cu, cu[1:])]
    sizes = {"kv_heads": 1, "group": 16, "head_dim": 128, "kv_bytes": 2, "total_q": max(cu), "max_q_len": max(cu)}
    _, shares = plan(library, shares=500_000, lens=lens, q_lens=q_lens, first_q=cu[0], **cuts, **sizes)
    left = {s.block: (s.b, s.head, s.first_row) for s in shares if not s.first}
    awaited = [(s.block - i, (s.b, s.head, s.first_row)) for s in shares for i in range(1, s.partials + 1)]
    assert awaited and all(left.get(block) == rows for block, rows in awaited)


@pytest.mark.parametrize("q_len, kv_heads, splits", [(560, 1, 11), (1120, 1, 5), (1120, 2, 2)])
def test_float32_keys_are_cut_as_the_device_wants(library, q_len, kv_heads, splits):
    """What bounds the cuts that a caller asks for does not touch those that the device bounds."""
    sizes = {"kv_heads": kv_heads, "group": 8, "head_dim": 128, "kv_bytes": 4, "q_len": q_len}
    assert plan(library, GPUS["sm_90"], lens=[16384], **sizes)[0].splits == splits


def test_shares_differ_by_little(library):
    """Equal requests on a whole GPU: no block has more than a tenth above the average, one tile aside."""
    for batch, kv_len in ((1, 8192), (1, 60000), (10, 8192), (64, 4096), (33, 8192), (256, 1024)):
        numbers, shares = plan(library, kv_heads=8, shares=100_000, lens=[kv_len] * batch)
        tiles = {}
        for s in shares:
            tiles[s.block] = tiles.get(s.block, 0) + s.tile_end - s.tile
        assert max(tiles.values()) <= 1.1 * sum(tiles.values()) / numbers.blocks + 1 + numbers.warps


def test_where_a_block_has_all_warps(library):
    """Up to one pair for each multiprocessor, of 8 rows in 16 bits up to one for each small block."""

    def warps(batch, kv_bytes=2, q_len=1):
        sizes = {"kv_heads": 8, "group": 4, "head_dim": 128, "kv_bytes": kv_bytes, "q_len": q_len}
        return plan(library, GPUS["sm_90"], lens=[4096] * batch, **sizes)[0].warps

    assert [warps(batch) for batch in (16, 17, 49, 50)] == [12, 12, 12, 4]
    assert [warps(batch, kv_bytes=1) for batch in (16, 17)] == [12, 4]
    assert [warps(batch, q_len=4) for batch in (16, 17, 20, 21)] == [8, 8, 8, 4]


def test_halves_of_a_group(library):
    """9 to 16 rows over few keys: each half of a group is planned as a KV head, with items of 8 rows. Not where the
    group is odd, where keys are many, nor where half of the multiprocessors have a pair each."""

    def plan_of(lens=(4096,), **options):
        sizes = {"kv_heads": 4, "group": 16, "head_dim": 128, "kv_bytes": 2} | options
        return plan(library, GPUS["sm_90"], shares=100_000, lens=list(lens), **sizes)

    def halves(**options):
        return bool(plan_of(**options)[0].halves)

    numbers, shares = plan_of()
    assert numbers.halves and numbers.route == 0 and numbers.rows_per_tile == 8
    assert {(s.head, s.first_row, s.rows) for s in shares if s.first} == {(head, 0, 8) for head in range(8)}
    assert [head_dim for head_dim in (64, 96, 128, 256) if halves(head_dim=head_dim)] == [64, 96, 128]
    assert not halves(kv_bytes=1) and not halves(kv_bytes=4)
    assert [group for group in range(1, 33) if halves(group=group)] == [10, 12, 14, 16]
    assert [q_len for q_len in range(1, 9) if halves(group=4, q_len=q_len)] == [3, 4]
    assert [q_len for q_len in range(1, 9) if halves(group=4, q_lens=[q_len, 1], lens=[90, 90])] == [3, 4]
    most = 14 * 3352 // 4 // 16 * 16  # of each KV head, where memory reads 3352 GB/s
    assert halves(lens=[most]) and not halves(lens=[most + 16]) and halves(lens=[most // 32 * 16] * 2)
    assert halves(lens=[60] * 16) and not halves(lens=[60] * 17)
    assert halves(lens=[100], max_pages=4096, max_seqlen_k=100) and not halves(lens=[100], max_pages=4096)
    assert not halves(deterministic=1) and not halves(num_splits=2)


def test_rows_that_take_long_to_merge_have_few_splits(library):
    """Rows for several rounds of a block's threads: 31 splits, unless stretches became too long; other rows as many as
    there are blocks with a tile for every warp."""

    def splits(keys, **options):
        sizes = {"kv_heads": 2, "group": 8, "head_dim": 256, "kv_bytes": 2} | options
        numbers, shares = plan(library, GPUS["sm_90"], shares=1000, lens=[keys], **sizes)
        return numbers, [s for s in shares if s.head == 0 and s.first_row == 0]

    numbers, shares = splits(4096)
    tiles, warps = 4096 // numbers.tile_keys, numbers.warps
    assert tiles / warps > 31 and 25 < len(shares) <= 31
    assert len(splits(2048)[1]) == -(-tiles // 2 // warps)  # no fewer than without that
    assert 31 < len(splits(8192)[1]) == -(-2 * tiles // (2 * warps))
    assert len(splits(16384)[1]) > 60  # of 66 blocks
    numbers, shares = splits(8192, head_dim=128, kv_heads=1)  # 8 rows of 128 dimensions: one round
    assert len(shares) == -(-8192 // numbers.tile_keys // numbers.warps) > 31


def test_float32_blocks_of_several_groups(library):
    """Few rows: a block has the warps of several. Where cuts are fixed or shared memory is scarce, it never has."""

    def numbers(batch, q_len, gpu="sm_90", **options):
        sizes = {"kv_heads": 8, "group": 1, "head_dim": 128, "kv_bytes": 4, "q_len": q_len, "window_right": -1}
        return plan(library, GPUS[gpu], lens=[2048] * batch, **sizes | options)[0]

    one = numbers(1, 2048)  # 256 blocks on 132 multiprocessors
    assert (one.route, one.warps, one.rows_per_tile, one.splits) == (3, 12, 64, 1)
    assert numbers(1, 2048, deterministic=1).warps == numbers(1, 2048, num_splits=2).warps == 4
    assert numbers(16, 2048).warps == 4  # many rows
    assert numbers(16, 2048, "sm_86, sm_89, sm_120").warps == numbers(1, 2048, "sm_86, sm_89, sm_120").warps == 4
    drafts = numbers(16, 8, group=4)
    assert (drafts.warps, drafts.rows_per_tile, drafts.splits) == (12, 32, 1)
    assert numbers(16, 8, "sm_80", group=4).rows_per_tile == 64
    assert numbers(1, 8, group=4).splits == 4  # a split has 512 keys at least


@pytest.mark.parametrize("leftpad", [-(2**31), -(2**31) + 1, -1, 2**31 - 1])
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
def test_wild_leftpads(library, kv_bytes, leftpad):
    """What a request holds there costs no more than its keys, and every row of the others is covered."""
    lens, leftpads = [2, 900, 40, 300], [leftpad, 0, 3, 0]
    options = {
        "kv_heads": 4,
        "group": 4,
        "head_dim": 128,
        "kv_bytes": kv_bytes,
        "q_len": 4,
        "window_right": 0,
        "chunk": 64,
    }
    numbers, shares = plan(library, shares=10000, lens=lens, leftpads=leftpads, **options)
    covered = {(s.b, s.head) for s in shares}
    assert covered == {(b, head) for b in range(len(lens)) for head in range(8 if numbers.halves else 4)}
    assert max(s.tile_end - s.tile for s in shares) <= 64  # of 16 keys at least, as many as the longest request has


def test_sizes_beyond_32_bits_are_refused_or_planned(library):
    """Nothing overflows: so many tokens, and a hint that is as large as it can be."""
    lens, q_lens = [3] * 1000, [1] * 1000
    for options in ({}, {"deterministic": 1}, {"num_splits": 256}, {"kv_bytes": 4}):
        numbers, _ = plan(library, lens=lens, q_lens=q_lens, max_q_len=2**31 - 1, total_q=2**28, **options)
        assert 0 < numbers.blocks < 2**31
        numbers, _ = plan(library, lens=lens, q_len=2**18, **options)
        assert 0 < numbers.blocks < 2**31
