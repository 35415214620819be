"""The kernel of the route float32 on the host; see tests/blocks.py."""

import random

import pytest
import torch
from blocks import HOST, MANY_ROWS, PARTIALS, Case, compile_kernels

SYNC = """asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(Shape::kGroupWarps * kWarp) : "memory");"""
WAIT = "while (!barrier_passed(met, 0)) {\n    }"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("float32")
    cuda = root / "paged_decode_cuda"
    kernel = "float32/kernel.cuh"
    instead = (
        (kernel, "extern __shared__ __align__(128) char shared[];", "char* const shared = own_shared<16>();"),
        (kernel, SYNC, "named_barrier_sync(group + 1, Shape::kGroupWarps * kWarp);"),
        (kernel, WAIT, "barrier_wait(met, 0);"),
        ("decode/plan.cpp", "kSplitKeys", "kDecodeSplitKeys"),  # both stand in one file
        *PARTIALS,
    )
    sources = ["float32/fp32.cu", "float32/route.cu", "float32/plan.cpp", "decode/plan.cpp", "plan.cpp"]
    return compile_kernels(
        root, [HOST / "float32.cuh", *(cuda / name for name in sources), HOST / "float32.cpp"], instead
    )


class Rows(Case):
    NUMBERS = ("blocks", "head_dim", "rows", "groups", "splits", "items")


SIZES = {"q_heads": 4, "kv_heads": 1, "page_size": 16, "dtype": torch.float32}


def rows_of(head_dim, head_dim_v=None):
    return Rows.of_head_dim(head_dim, head_dim_v or head_dim)


def judge(library, head_dim=64, head_dim_v=None, plan=None, **options):
    """`plan`: numbers that the plan must have, so that a case stays what it is for."""
    case = rows_of(head_dim, head_dim_v)(**SIZES | options)
    numbers = case.run(library)
    case.judge()
    assert {name: getattr(numbers, name) for name in plan or {}} == (plan or {})
    return case


CASES = MANY_ROWS | {
    "one_item": {"lens": [100], "q_lens": 16},
    "tile_edges": {"lens": [32, 33, 31, 64], "q_lens": 9},
    "one_key": {"lens": [1, 2], "q_lens": 9},
    "no_keys": {"lens": [0, 70], "q_lens": 20},
    "two_requests": {"lens": [110, 70], "q_lens": [20, 33]},
    "page_1": {"lens": [150, 70], "q_lens": 18, "page_size": 1},
    "page_3": {"lens": [150, 70], "q_lens": 18, "page_size": 3},
    "page_256": {"lens": [150, 40], "q_lens": 18, "page_size": 256},
    "group_5": {"lens": [70, 30], "q_lens": 15, "q_heads": 10, "kv_heads": 2},
    "not_causal": {"lens": [100], "q_lens": 18, "window": (-1, -1)},
    "window": {"lens": [120, 90], "q_lens": 18, "window": (50, 0)},
    "attention_chunk": {"lens": [120], "q_lens": 24, "chunk": 50},
    "leftpad": {"lens": [150, 90], "q_lens": 20, "leftpads": [70, 3]},
    "sinks": {"lens": [100, 0], "q_lens": 18, "sinks": True},
    "softcap": {"lens": [100, 40], "q_lens": 18, "softcap": 2.0},
    "alibi": {"lens": [100, 40], "q_lens": 18, "alibi": True},
    "alibi_not_causal": {"lens": [100], "q_lens": 18, "alibi": True, "window": (-1, -1)},
    "alibi_kv_heads": {"lens": [100], "q_lens": 12, "alibi": True, "softcap": 3.0, "q_heads": 6, "kv_heads": 2},
    "values_apart": {"lens": [100, 40], "q_lens": 18, "values_apart": True, "q_heads": 6, "kv_heads": 2},
    "packed": {"lens": [100, 40, 30], "q_lens": [20, 0, 9]},
    "negative_scale": {"lens": [100], "q_lens": 18, "scale": -0.05},
    "large_scale": {"lens": [120], "q_lens": 18, "scale": 0.4},
    "scale_0": {"lens": [100], "q_lens": 18, "scale": 0.0},
}


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_attends(library, name, deterministic):
    """Where cuts are fixed blocks have one group of warps, else several."""
    case = judge(library, **CASES[name], deterministic=deterministic)
    assert (case.numbers.groups == 1) == bool(deterministic)


def test_little_shared_memory_has_no_room_for_groups(library):
    options = {"lens": [100, 40], "q_lens": 18, "head_dim": 128}
    for little, groups in ((0, 3), (1, 1)):
        judge(library, plan={"groups": groups}, little_shared=little, **options)


def test_few_rows(library):
    """The last requests' rows fill half of the blocks of 32."""
    for options in ({"lens": [150, 31], "q_lens": 7}, {"lens": [70, 33], "q_lens": [5, 6], "q_heads": 5}):
        judge(library, plan={"rows": 32}, **options)


HEAD_DIMS = [(64, 64), (4, 40), (128, 128), (72, 100), (192, 128), (256, 256), (132, 200)]


@pytest.mark.parametrize("rows", ["few", "groups", "one_group", "splits"])
@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIMS)
def test_head_dim(library, head_dim, head_dim_v, rows):
    """Each class of head_dim in each kind of instance."""
    options = {"few": {}, "groups": {}, "one_group": {"deterministic": 1}, "splits": {"num_splits": 2}}[rows]
    size = max(head_dim, head_dim_v)
    plan = {"head_dim": 64 if size <= 64 else 128 if size <= 128 else 256, "rows": 32 if rows == "few" else 64}
    q_lens = 5 if rows == "few" else 11
    case = judge(
        library, head_dim, head_dim_v, plan, lens=[110, 30], q_lens=q_lens, q_heads=8, kv_heads=2, alibi=True, **options
    )
    assert (case.numbers.groups > 1) == (rows in ("few", "groups"))


CUTS = {
    "groups": ({"lens": [1030, 100], "q_lens": 17, "processors": 8}, {"rows": 64, "splits": 2}),
    "few_rows": ({"lens": [2100, 20], "q_lens": 7, "processors": 20}, {"rows": 32, "splits": 5}),
    "few_rows_128": ({"lens": [1100], "q_lens": 7, "processors": 20, "head_dim": 128}, {"rows": 32, "splits": 3}),
    "as_many_as_tiles": ({"lens": [400, 50], "q_lens": 18, "num_splits": 13}, {"groups": 1, "splits": 13}),
    "many": ({"lens": [420, 50], "q_lens": 18, "num_splits": 7, "sinks": True}, {"groups": 1, "splits": 7}),
    "packed": ({"lens": [150, 50, 90], "q_lens": [20, 0, 18], "num_splits": 4}, {"splits": 4}),
    "packed_heads": (
        {"lens": [200, 90], "q_lens": [33, 10], "num_splits": 3, "q_heads": 6, "kv_heads": 2},
        {"splits": 3},
    ),
    "window": ({"lens": [300, 90], "q_lens": 20, "num_splits": 3, "window": (80, 0)}, {"splits": 3}),
    "odd_values": ({"lens": [300], "q_lens": 17, "num_splits": 6, "head_dim_v": 20}, {"splits": 6}),
    "wide_values": ({"lens": [200], "q_lens": 17, "num_splits": 6, "head_dim": 256}, {"splits": 6}),
    "uncut": ({"lens": [540], "q_lens": 17, "deterministic": 1}, {"groups": 1, "splits": 1}),
    "some_rows": ({"lens": [200], "q_lens": 5, "q_heads": 7, "num_splits": 6}, {"splits": 6}),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(library, name):
    options, plan = CUTS[name]
    judge(library, plan=plan, **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_infinite_values(library, head_dim, options):
    """Rows that see them get them. The other dimensions do not notice."""
    case = rows_of(head_dim)(lens=[100], q_lens=20, **SIZES | options)
    case.judge_infinite_values(library, sees=torch.arange(20) >= 10)  # row t is at position 80 + t


def test_infinite_keys(library):
    """A score of -inf leaves its key out."""
    for options in ({}, {"deterministic": 1}):
        case = rows_of(64)(lens=[100], q_lens=20, **SIZES | options)
        case.q[..., 3] = 1.0
        case.cache[case.table[0, 2], 5, :, 3] = -torch.inf
        case.run(library)
        case.judge()


@pytest.mark.parametrize("deterministic", [0, 1])
def test_pages_that_do_not_exist(library, deterministic):
    """Nothing is read from there, and other requests do not notice."""
    case = rows_of(64)(lens=[100, 90], q_lens=20, deterministic=deterministic, **SIZES)
    case.table[0, 1:4] = torch.tensor([-1, case.num_pages, 2**31 - 1])
    case.run(library)
    case.judge_second()


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("lens", [[500, 90], [-7, 90], [2**31 - 1, 90]], ids=str)
def test_lengths_that_cannot_be(library, deterministic, lens):
    """The same, of keys behind the table and of fewer than none."""
    case = rows_of(64)(lens=[100, 90], q_lens=20, deterministic=deterministic, **SIZES)
    case.lens = lens
    case.run(library)
    case.judge_second()


@pytest.mark.parametrize("seed", range(4))
def test_attends_some_call(library, seed):
    """Sizes and features at random."""
    rng = random.Random(seed)
    lens = [rng.choice([0, 64, rng.randint(1, 250)]) for _ in range(rng.randint(1, 3))]
    packed = rng.random() < 0.5
    judge(
        library,
        rng.choice([32, 64, 100, 128]),
        lens=lens,
        q_lens=[rng.randint(0, 40) for _ in lens[1:]] + [rng.randint(20, 40)] if packed else rng.randint(9, 40),
        q_heads=rng.choice([4, 6]),
        kv_heads=2,
        page_size=rng.choice([1, 2, 8, 16, 128]),
        processors=rng.choice([1, 3, 30]),
        seed=seed,
        **rng.choice([{}, {}, {"deterministic": 1}, {"num_splits": 4}, {"window": (60, 0)}, {"sinks": True}]),
    )
