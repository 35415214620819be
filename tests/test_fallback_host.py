"""The kernel of the route fallback on the host; see tests/blocks.py."""

import random

import pytest
import torch
from blocks import HOST, MANY_ROWS, PARTIALS, Case, compile_kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("fallback")
    cuda = root / "paged_decode_cuda"
    shared = "extern __shared__ __align__(128) char shared[];"
    instead = (("fallback/kernel.cuh", shared, "char* const shared = own_shared<16>();"), *PARTIALS)
    sources = [*(f"fallback/{name}" for name in ("bf16.cu", "fp16.cu", "fp32.cu", "route.cu", "plan.cpp")), "plan.cpp"]
    return compile_kernels(
        root, [HOST / "float32.cuh", *(cuda / name for name in sources), HOST / "fallback.cpp"], instead
    )


class Any(Case):
    NUMBERS = ("blocks", "rows", "balanced", "splits", "items", "key_grain", "value_grain", "query_grain")


SIZES = {"q_heads": 4, "kv_heads": 1, "page_size": 16}
BF16, FP16, FP32 = ({"dtype": dtype} for dtype in (torch.bfloat16, torch.float16, torch.float32))
E4M3, E5M2 = ({"kv_dtype": dtype} for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
DTYPES = {
    "bf16": BF16,
    "fp16": FP16,
    "fp32": FP32,
    "bf16_e4m3": BF16 | E4M3,
    "bf16_e5m2": BF16 | E5M2,
    "fp16_e4m3": FP16 | E4M3,
    "fp16_e5m2": FP16 | E5M2,
    "fp32_e4m3": FP32 | E4M3,
    "fp32_e5m2": FP32 | E5M2,
    "e4m3": {"dtype": torch.float8_e4m3fn},
}


def judge(library, head_dim=64, head_dim_v=None, plan=None, **options):
    """`plan`: numbers that the plan must have, so that a case stays what it is for."""
    case = Any.of_head_dim(head_dim, head_dim_v or head_dim)(**SIZES | options)
    numbers = case.run(library)
    case.judge()
    assert {name: getattr(numbers, name) for name in plan or {}} == (plan or {})
    return case


# head_dim, head_dim_v; with 59 and 60 rows are whole numbers, or whole pieces of 8 bytes
HEAD_DIMS = [(64, 64), (59, 59), (60, 44), (60, 200), (512, 512), (576, 512), (72, 88), (1, 3), (320, 130), (40, 300)]


@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(library, dtype, dims, rows):
    q_lens = 1 if rows == "few" else 9
    judge(library, *dims, **DTYPES[dtype], lens=[70, 150], q_lens=q_lens, seed=3)


CASES = MANY_ROWS | {
    "one_item": {"lens": [100], "q_lens": 4},
    "tile_edges": {"lens": [128, 129, 127, 256], "q_lens": 3},
    "part_edges": {"lens": [16, 17, 15, 1], "q_lens": 2},
    "no_keys": {"lens": [0, 70], "q_lens": 5},
    "nobody_has_keys": {"lens": [0, 0]},
    "two_requests": {"lens": [300, 70], "q_lens": [20, 33]},
    "page_1": {"lens": [150, 70], "q_lens": 5, "page_size": 1},
    "page_3": {"lens": [150, 70], "q_lens": 5, "page_size": 3},
    "page_256": {"lens": [300, 40], "q_lens": 5, "page_size": 256},
    "contiguous": {"lens": [300, 77], "page_size": 301, "contiguous": True},
    "group_5": {"lens": [170, 30], "q_lens": 15, "q_heads": 10, "kv_heads": 2},
    "group_40": {"lens": [170, 30], "q_lens": 2, "q_heads": 40},
    "not_causal": {"lens": [200], "q_lens": 9, "window": (-1, -1)},
    "window": {"lens": [420, 90], "q_lens": 9, "window": (150, 0)},
    "attention_chunk": {"lens": [220], "q_lens": 24, "chunk": 50},
    "leftpad": {"lens": [250, 90], "q_lens": 20, "leftpads": [140, 3]},
    "sinks": {"lens": [200, 0], "q_lens": 5, "sinks": True},
    "sinks_of_q": {"lens": [200, 0], "q_lens": 5, "sinks": True, "sinks_of_q": 1},
    "softcap": {"lens": [200, 40], "q_lens": 5, "softcap": 2.0},
    "alibi": {"lens": [200, 40], "q_lens": 5, "alibi": True},
    "alibi_not_causal": {"lens": [100], "q_lens": 8, "alibi": True, "window": (-1, -1)},
    "values_apart": {"lens": [100, 40], "q_lens": 8, "values_apart": True, "q_heads": 6, "kv_heads": 2},
    "packed": {"lens": [200, 40, 30], "q_lens": [20, 0, 9]},
    "negative_scale": {"lens": [200], "q_lens": 5, "scale": -0.05},
    "large_scale": {"lens": [420], "q_lens": 5, "scale": 0.4},
    "scale_0": {"lens": [200], "q_lens": 5, "scale": 0.0},
    "v_descales": {"lens": [200, 70], "v_descales": [0.5, 2.0], "k_descales": [2.0, 0.5], "q_descales": [1.5, 0.7]},
    "num_splits": {"lens": [600, 50], "q_lens": 3, "num_splits": 4, "plan": {"splits": 4, "balanced": 0}},
    "num_splits_of_few_tiles": {"lens": [300, 20, 0], "num_splits": 7, "plan": {"splits": 3}},
    "num_splits_window": {"lens": [600, 64], "num_splits": 4, "window": (200, 0), "q_lens": 2},
    "num_splits_packed": {"lens": [400, 66, 250, 9], "q_lens": [3, 0, 9, 1], "num_splits": 3, "sinks": True},
    # Schedules
    "even": {"lens": [700, 690], "processors": 6, "plan": {"balanced": 1}},
    "line": {"lens": [1400, 300, 1, 0, 500], "q_lens": 2, "processors": 5, "plan": {"balanced": 1}},
    "line_of_heads": {"lens": [900, 300, 1], "q_heads": 6, "kv_heads": 3, "processors": 4},
    "whole_pairs": {"lens": [200] * 7, "processors": 1},
    "short_pairs": {"lens": [20] * 9, "processors": 1},
    "many_tiles_of_rows": {"lens": [400, 90], "q_lens": [70, 90], "processors": 3, "plan": {"balanced": 1}},
    "deterministic": {"lens": [1300, 64], "deterministic": 1, "plan": {"splits": 6}},
    "deterministic_packed": {"lens": [600, 66, 9], "q_lens": [3, 0, 5], "deterministic": 1, "plan": {"rows": 32}},
}


@pytest.mark.parametrize("dtype, head_dim", [("bf16", 512), ("fp32", 64), ("bf16_e4m3", 40)])
@pytest.mark.parametrize("name", CASES)
def test_features(library, name, dtype, head_dim):
    options = dict(CASES[name])
    if dtype == "fp32":  # it has other tiles
        options.pop("plan", None)
    judge(library, head_dim, **DTYPES[dtype], **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["page_3", "leftpad", "softcap", "num_splits_packed", "deterministic"])
def test_latents(library, name, dtype):
    """With qv: the score has a part for the key and one for its value."""
    case = Case(**SIZES | DTYPES[dtype] | CASES[name] | {"apart": True})
    case.run(library)
    case.judge()


GRAINS = {
    (64, 64): (16, 16, 16),
    (60, 44): (8, 8, 8),
    (59, 64): (2, 2, 2),  # rows are one behind the other
    (576, 512): (16, 16, 16),
}


@pytest.mark.parametrize("dims", GRAINS, ids=str)
def test_grains(library, dims):
    """What is loaded at a time follows from sizes and strides."""
    names = ("key_grain", "value_grain", "query_grain")
    judge(library, *dims, plan=dict(zip(names, GRAINS[dims])), lens=[100])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_splits(library, dtype):
    judge(library, 100, 36, **DTYPES[dtype], lens=[4900], q_heads=7, num_splits=19, plan={"splits": 19})


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 300])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_infinite_values(library, head_dim, dtype, options):
    """They stay in their dimensions, and all rows see them."""
    options = {"lens": [200], "q_lens": 5, "scale": 0.02} | options
    case = Any.of_head_dim(head_dim, head_dim)(**SIZES | DTYPES[dtype] | options)
    case.judge_infinite_values(library, sees=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("lens", [[500, 90], [-7, 90], [2**31 - 1, 90], None], ids=str)
def test_what_cannot_be(library, lens):
    """Lengths behind the table or below 0, or pages that do not exist: other requests do not notice."""
    case = Any.of_head_dim(64, 64)(lens=[100, 90], q_lens=20, **SIZES)
    if lens is None:
        case.table[0, 1:4] = torch.tensor([-1, case.num_pages, 2**31 - 1])
    else:
        case.lens = lens
    case.run(library)
    case.judge_second()


@pytest.mark.parametrize("seed", range(24))
def test_some_call(library, seed):
    """Sizes and features at random."""
    rng = random.Random(seed)
    lens = [rng.choice([0, 128, rng.randint(1, 450)]) for _ in range(rng.randint(1, 3))]
    packed = rng.random() < 0.5
    judge(
        library,
        rng.choice([32, 64, 100, 128, 333, 512]),
        rng.choice([None, 20, 200]),
        lens=lens,
        q_lens=[rng.randint(0, 30) for _ in lens[1:]] + [rng.randint(1, 30)] if packed else rng.randint(1, 9),
        q_heads=rng.choice([4, 6]),
        kv_heads=2,
        page_size=rng.choice([1, 2, 8, 16, 128]),
        processors=rng.choice([1, 3, 30]),
        seed=seed,
        **DTYPES[rng.choice(list(DTYPES))],
        **rng.choice([{}, {}, {"deterministic": 1}, {"num_splits": 4}, {"window": (60, 0)}, {"sinks": True}]),
    )
