"""The CUDA planners and the dealing of work to thread blocks, without a GPU: tests/cuda/plans.cpp compiles them for the
host and follows every block of a grid.

Random batches on GPUs of every size: every (row, tile of keys) is some block's, once; the rows of an item have one
block that writes them, and it waits only for blocks that started before it; grids, workspaces and
shared memory are bounded.
"""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CALL = [
    *("processors", "shared_per_block", "shared_per_processor"),
    *("batch", "kv_heads", "group", "head_dim", "kv_bytes", "total_q", "max_q_len"),
    *("page_size", "max_pages", "window_left", "window_right", "chunk", "num_splits", "deterministic", "append"),
    *("cu_seqlens_q", "cache_seqlens", "leftpad"),
]
NUMBERS = [
    *("route", "blocks", "warps", "blocks_per_processor", "shared_bytes", "workspace_bytes"),
    *("balanced", "rows_per_tile", "tile_keys", "splits"),
]
SHARE = [
    *("block", "b", "head", "first_row", "rows"),
    *("tile", "tile_end", "first", "partials", "key_begin", "key_end"),
]

BLOCK_COST = 1024  # bytes of shared memory that the system takes for every block
GPUS = {  # multiprocessors, shared memory of a block and of a multiprocessor
    "sm_90": (132, 232448, 233472),
    "sm_80": (108, 166912, 167936),
    "sm_86, sm_89, sm_120": (84, 101376, 102400),
}


def structure(names):
    return type("S", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_int64) for name in names]})


Call, Numbers, Share = structure(CALL), structure(NUMBERS), structure(SHARE)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    cuda = REPOSITORY / "paged_decode_cuda"
    target = tmp_path_factory.mktemp("plans") / "plans.so"
    sources = [
        REPOSITORY / "tests/cuda/plans.cpp",
        cuda / "plan.cpp",
        cuda / "fallback_plan.cpp",
        cuda / "decode/plan.cpp",
    ]
    include = [f"-I{REPOSITORY / folder}" for folder in ("paged_decode_cuda", "torch-ext", "tests/cuda")]
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-fsanitize=undefined",
        "-fno-sanitize-recover",
        "-fsanitize-undefined-trap-on-error",
    ]
    subprocess.run([compiler, *flags, "-Wno-unknown-pragmas", *include, *sources, "-o", target], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.make_plan.restype = ctypes.c_int64
    return loaded


def plan(library, gpu=GPUS["sm_90"], shares=0, lens=(), q_lens=None, leftpads=None, **options):
    """(numbers of the plan, what every block does). Lengths are those before an append."""
    call = Call(
        kv_heads=2, group=4, head_dim=128, kv_bytes=2, page_size=16, window_left=-1, window_right=0, batch=len(lens)
    )
    call.processors, call.shared_per_block, call.shared_per_processor = gpu
    longest = max([0, *lens]) + options.get("append", 0)
    call.max_pages = max(1, -(-longest // 16))
    keep = [(ctypes.c_int32 * max(1, len(lens)))(*lens)]
    call.cache_seqlens = ctypes.addressof(keep[0])
    if q_lens is None:
        call.max_q_len = options.pop("q_len", 1)
        call.total_q = call.max_q_len * len(lens)
    else:
        begins = [sum(q_lens[:b]) for b in range(len(lens) + 1)]
        keep.append((ctypes.c_int32 * len(begins))(*begins))
        call.cu_seqlens_q = ctypes.addressof(keep[1])
        call.total_q, call.max_q_len = begins[-1], max([0, *q_lens])
    if leftpads is not None:
        keep.append((ctypes.c_int32 * len(leftpads))(*leftpads))
        call.leftpad = ctypes.addressof(keep[-1])
    for name, value in options.items():
        assert name in CALL
        setattr(call, name, value)
    numbers, room = Numbers(), (Share * max(1, shares))()
    count = library.make_plan(ctypes.byref(call), ctypes.byref(numbers), room, ctypes.c_int64(shares))
    assert count <= shares or shares == 0
    return numbers, room[:count]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
def test_every_plan_fits_the_gpu(library, gpu, kv_bytes):
    """Shared memory of a block, and of the blocks that stand beside each other, on GPUs that are not here."""
    _, of_block, of_processor = GPUS[gpu]
    seen = set()
    for head_dim in (16, 64, 96, 128, 192, 256, 512):
        for q_len in (1, 2, 3, 16, 200):
            for batch in (1, 3, 64, 2000):
                for options in ({}, {"deterministic": 1}, {"num_splits": 4}, {"window_left": 50}):
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
                    assert beside <= of_processor and (numbers.route == 2 or numbers.blocks_per_processor > 0)
    assert seen == ({2} if kv_bytes == 4 else {0, 1, 2})


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
        "head_dim": rng.choice([64, 96, 128, 256]),
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
    return lens, options


def judge(numbers, shares, lens, options):
    q_lens = options.get("q_lens") or [options.get("q_len", 1)] * len(lens)
    group, heads, append = options["group"], options["kv_heads"], options.get("append", 0)
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
        # It adds the partials of the blocks just before it, the nearest keys first.
        assert s.partials == len(tiles) - 1
        for i in range(1, s.partials + 1):
            assert partials[s.block - i] == (item, tiles[i][0])

    # Bounds
    packed = sum(q_lens) * group // numbers.rows_per_tile + len(lens)
    processors = options["gpu"][0]
    tiles = packed if "q_lens" in options else len(lens) * -(-q_lens[0] * group // numbers.rows_per_tile) if lens else 0
    if numbers.balanced:
        assert numbers.blocks <= 3 * processors
    else:
        assert numbers.blocks <= max(1, tiles * heads * numbers.splits)
    words = 2 * -(-options["head_dim"] // 4) + -(-options["head_dim"] // 64)
    assert numbers.workspace_bytes <= numbers.blocks * numbers.rows_per_tile * words * 16
    if numbers.splits == 1 and not numbers.balanced:
        assert not partials and numbers.workspace_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_every_key_is_dealt_once(library, seed):
    rng = random.Random(seed)
    routes = set()
    for _ in range(40):
        lens, options = random_call(rng)
        shown = {"lens": lens} | options
        numbers, shares = plan(library, shares=1_000_000, lens=lens, **options)
        routes.add(numbers.route)
        try:
            judge(numbers, shares, lens, options)
        except AssertionError as error:
            raise AssertionError(f"{shown}: {error}") from None
    assert routes == {0, 1, 2}


def test_shares_differ_by_little(library):
    """Equal requests on a whole GPU: no block has more than a tenth above the average, one tile aside."""
    for batch, kv_len in ((1, 8192), (1, 60000), (10, 8192), (64, 4096), (33, 8192), (256, 1024)):
        numbers, shares = plan(library, kv_heads=8, shares=100_000, lens=[kv_len] * batch)
        tiles = {}
        for s in shares:
            tiles[s.block] = tiles.get(s.block, 0) + s.tile_end - s.tile
        assert max(tiles.values()) <= 1.1 * sum(tiles.values()) / numbers.blocks + 1 + numbers.warps


def test_sizes_beyond_32_bits_are_refused_or_planned(library):
    """Nothing overflows: so many tokens, and a hint that is as large as it can be."""
    lens, q_lens = [3] * 1000, [1] * 1000
    for options in ({}, {"deterministic": 1}, {"num_splits": 256}, {"kv_bytes": 4}):
        numbers, _ = plan(library, lens=lens, q_lens=q_lens, max_q_len=2**31 - 1, total_q=2**28, **options)
        assert 0 < numbers.blocks < 2**31
        numbers, _ = plan(library, lens=lens, q_len=2**18, **options)
        assert 0 < numbers.blocks < 2**31
