"""The kernels of the routes decode_basic and decode on the host; see tests/blocks.py."""

import random

import pytest
import torch
from blocks import HOST, PARTIALS, Case, compile_kernels

# What the warpgroups of a block share.
WGMMA_CONTROL = """__shared__ WgmmaBarriers<Shape> barriers;
  __shared__ float tops[Shape::kConsumers][Shape::kWarps][Shape::kRows];"""
WGMMA_CONTROL_HERE = """struct Control {
    WgmmaBarriers<Shape> barriers;
    float tops[Shape::kConsumers][Shape::kWarps][Shape::kRows];
  };
  auto& [barriers, tops] = block_control<Control>();"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("decode")
    cuda = root / "paged_decode_cuda"
    kernel = "decode/kernel.cuh"
    instead = (
        (kernel, "extern __shared__ __align__(128) char queues[];", "char* const queues = own_shared();"),
        (
            kernel,
            "__shared__ int free_stages[Shape::kMostWarps];",
            "auto& free_stages = block_control<int[Shape::kMostWarps]>();",
        ),
        (
            "decode/wgmma_kernel.cuh",
            "extern __shared__ __align__(1024) char ring_and_more[];",
            "char* const ring_and_more = own_shared<1024>();",
        ),
        ("decode/wgmma_kernel.cuh", WGMMA_CONTROL, WGMMA_CONTROL_HERE),
        *PARTIALS,
    )
    dtypes = ("fp32", "bf16", "fp16", "e4m3", "e5m2")
    wgmma = ("wgmma_bf16", "wgmma_fp16")
    sources = [*(f"decode/{name}.cu" for name in (*dtypes, *wgmma)), "decode/route.cu", "decode/plan.cpp", "plan.cpp"]
    return compile_kernels(
        root, [HOST / "decode.cuh", *(cuda / name for name in sources), HOST / "decode.cpp"], instead
    )


class Decode(Case):
    NUMBERS = (
        *("basic", "balanced", "blocks", "warps", "splits", "items", "rows", "each", "whole_pairs", "lines"),
        *("surplus_rounds", "halves", "wgmma"),
    )


def decode(head_dim, head_dim_v=None):
    return Decode.of_head_dim(head_dim, head_dim_v or head_dim)


def judge(library, head_dim=128, head_dim_v=None, plan=None, **options):
    """`plan`: numbers that the plan must have, so that a case stays what it is for."""
    sizes = {"q_heads": 8, "kv_heads": 2, "page_size": 16}
    case = decode(head_dim, head_dim_v)(**sizes | options)
    numbers = case.run(library)
    case.judge()
    for name, value in (plan or {}).items():
        assert getattr(numbers, name) == value, name
    return case


E4M3, E5M2 = {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": torch.float8_e5m2}
FP16, FP32 = {"dtype": torch.float16}, {"dtype": torch.float32}
DTYPES = {"bf16": {}, "fp16": FP16, "e4m3": E4M3, "e5m2": E5M2, "fp32": FP32}
ROWS = {
    "token": {"lens": [130, 77]},
    "drafts": {"lens": [70, 130], "q_lens": 3},
    "packed": {"lens": [130, 77, 20], "q_lens": [1, 0, 2]},
    "packed_16_rows": {"lens": [70, 90], "q_lens": [4, 2]},
    "many_rows": {"lens": [40, 33], "q_lens": 9},
}
HEADS = {"64": [64], "128": [128], "256": [256], "32_48": [32, 48], "112_80": [112, 80], "208_144": [208, 144]}


# The same shared memory, with warpgroups that multiply and without.
GPUS = {"hopper": {}, "blackwell": {"blackwell": 1}}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_sizes(library, dtype, rows, heads):
    judge(library, *HEADS[heads], **DTYPES[dtype], **ROWS[rows], processors=2, blackwell=1)


@pytest.mark.parametrize("heads", ["64", "128", "256", "112_80"])
@pytest.mark.parametrize("rows", ["token", "many_rows"])
@pytest.mark.parametrize("dtype", ["fp16", "e5m2", "fp32"])
def test_some_sizes(library, dtype, rows, heads):
    judge(library, *HEADS[heads], **DTYPES[dtype], **ROWS[rows], processors=2, blackwell=1)


@pytest.mark.parametrize("heads", [[128], [112, 80], [72, 128], [96]], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sizes_of_warpgroups(library, dtype, rows, heads):
    judge(library, *heads, **DTYPES[dtype], **ROWS[rows], processors=3, plan={"wgmma": 1})


TWO_TOKENS = {"lens": [600, 131], "q_lens": 2}  # 8 rows
SOME_SIZES_OF_WARPGROUPS = {
    "64": ([64], TWO_TOKENS),
    "64_many_tiles": ([64], {"lens": [2500], "processors": 2}),
    "64_pages_of_1": ([64], {"lens": [700, 130], "page_size": 1}),
    "64_16_rows": ([64], ROWS["drafts"] | {"processors": 8}),
    "40_64": ([40, 64], TWO_TOKENS),
    "256": ([256], TWO_TOKENS),
    "256_many_tiles": ([256], {"lens": [900], "processors": 2}),
    "208_144": ([208, 144], TWO_TOKENS),
    "192_pages_of_8": ([192], {"lens": [700, 130], "page_size": 8}),
}


@pytest.mark.parametrize("name", SOME_SIZES_OF_WARPGROUPS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_some_sizes_of_warpgroups(library, dtype, name):
    heads, rows = SOME_SIZES_OF_WARPGROUPS[name]
    judge(library, *heads, **DTYPES[dtype], **{"processors": 3} | rows, plan={"wgmma": 1})


MANY_PAIRS = {"lens": [20] * 3, "processors": 2}  # 6 of 8 rows
SIZES_OF_WARPS = {
    "16_rows_of_256": ([256], "bf16", ROWS["drafts"]),
    "many_pairs": ([128], "bf16", MANY_PAIRS),
    "16_rows_of_64": ([64], "bf16", {"lens": [70, 130], "q_lens": 3, "processors": 7}),
    "e4m3": ([128], "e4m3", ROWS["drafts"]),
    "fp32": ([128], "fp32", ROWS["drafts"]),
}


@pytest.mark.parametrize("name", SIZES_OF_WARPS)
def test_sizes_that_warpgroups_do_not_take(library, name):
    heads, dtype, rows = SIZES_OF_WARPS[name]
    judge(library, *heads, **DTYPES[dtype], **rows, plan={"wgmma": 0})


FEATURES = {
    "one_key": {"lens": [1]},
    "no_keys": {"lens": [0, 70]},
    "nobody_has_keys": {"lens": [0, 0], "leftpads": [0, 0]},
    "longer_than_keys": {"lens": [2, 66], "q_lens": 4},
    "longer_than_keys_full": {"lens": [2, 66], "q_lens": 4, "leftpads": [0, 0]},
    "page_1": {"lens": [130, 77], "page_size": 1},
    "page_3": {"lens": [130, 77], "page_size": 3, "q_lens": 2},
    "page_24": {"lens": [130, 77], "page_size": 24},
    "page_48": {"lens": [130, 77], "page_size": 48},
    "page_256": {"lens": [300, 77], "page_size": 256},
    "contiguous": {"lens": [130, 77], "page_size": 131, "contiguous": True},
    "values_apart": {"lens": [130, 77], "values_apart": True},
    "window": {"lens": [300, 100], "q_lens": 3, "window": (70, 0)},
    "window_at_a_tile": {"lens": [300, 100], "q_lens": 3, "window": (73, 0)},  # the first row's begins with it
    "window_right": {"lens": [300, 100], "q_lens": 3, "window": (-1, 1)},
    "window_of_pages_of_1": {"lens": [300, 100], "q_lens": 3, "window": (37, 1), "page_size": 1},
    "not_causal": {"lens": [130, 77], "q_lens": 3, "window": (-1, -1)},
    "chunk": {"lens": [300, 129], "q_lens": 3, "chunk": 50, "leftpads": [5, 0]},
    "leftpad": {"lens": [200, 129], "leftpads": [70, 3]},
    "leftpad_all": {"lens": [100, 50], "leftpads": [100, 50]},
    "sinks": {"lens": [200, 0], "sinks": True},
    "sinks_of_q": {"lens": [200, 0], "sinks": True, "sinks_of_q": 1},
    "softcap": {"lens": [130, 77], "softcap": 2.0},
    "large_softcap": {"lens": [130, 77], "softcap": 100.0},
    "alibi": {"lens": [200, 70], "q_lens": 2, "alibi": True},
    "alibi_not_causal": {"lens": [200, 70], "q_lens": 3, "alibi": True, "window": (-1, -1)},
    "alibi_and_softcap": {"lens": [200, 70], "q_lens": 5, "alibi": True, "softcap": 2.0},
    "negative_scale": {"lens": [130, 77], "scale": -0.05},
    "scale_0": {"lens": [130, 77], "scale": 0.0},
    "large_scale": {"lens": [400, 77], "scale": 2.0},
    "large_scale_fp16": {"lens": [400, 77], "scale": 2.0, **FP16},
    "large_scale_e4m3": {"lens": [400, 77], "scale": 2.0, **E4M3},
    "spare_tokens": {"lens": [130, 77, 9], "q_lens": [2, 0, 1], "spare": 3, "max_q_len": 2},
    "group_1": {"lens": [130, 77], "q_heads": 3, "kv_heads": 3, "q_lens": 2},
    "group_3": {"lens": [130, 77], "q_heads": 9, "kv_heads": 3, "q_lens": 4},
    "group_12": {"lens": [130, 77], "q_heads": 12, "kv_heads": 1},
    "group_20": {"lens": [130, 77], "q_heads": 20, "kv_heads": 1, "q_lens": [1, 2]},
    "group_16_of_many_rows": {"lens": [70, 37], "q_heads": 16, "kv_heads": 1, "q_lens": [4, 2], "max_q_len": 1},
    "little_shared": {"lens": [130, 77], "little_shared": 1},
    # Schedules
    "blocks_for_each_pair": {"lens": [300, 290], "plan": {"each": 3, "balanced": 1}, "processors": 12},
    "line": {"lens": [70, 600, 1, 200, 90], "processors": 5, "q_heads": 4, "kv_heads": 1, "plan": {"lines": 1}},
    "lines": {"lens": [70, 500, 1, 200, 90], "processors": 6, "plan": {"lines": 2}},
    "lines_of_two_heads": {"lens": [70, 300, 1, 90], "processors": 6, "q_heads": 4, "kv_heads": 4},
    "whole_pairs": {"lens": [200] * 7, "processors": 1, "leftpads": [0] * 7, "kv_heads": 4},
    "short_pairs": {"lens": [20] * 9, "processors": 1},
    # More than a lane counts at a time.
    "line_of_many": {"lens": [*[20] * 20, 700, *[40] * 20, 300], "processors": 3, "kv_heads": 1, "q_heads": 2},
    "two_levels": {"lens": [2600], "processors": 30, "q_heads": 2, "kv_heads": 1},
    "two_levels_of_16_rows": {"lens": [1500], "processors": 20, "q_heads": 15, "kv_heads": 1, "plan": {"halves": 0}},
    "two_levels_of_halves": {"lens": [1500], "processors": 20, "q_heads": 16, "kv_heads": 1},
    "halves": {"lens": [130, 77], "q_heads": 32, "kv_heads": 2, "processors": 8, "plan": {"halves": 1, "rows": 8}},
    "halves_of_features": {
        "lens": [300, 100],
        "q_lens": 2,
        "q_heads": 8,
        "kv_heads": 1,
        "processors": 9,
        "window": (70, 1),
        "alibi": True,
        "softcap": 2.0,
        "sinks": True,
        "leftpads": [100, 3],
        "plan": {"halves": 1, "basic": 0},
    },
    "halves_of_contiguous_keys": {
        "lens": [130, 77],
        "q_heads": 24,
        "kv_heads": 2,
        "page_size": 131,
        "contiguous": True,
        "processors": 9,
        "plan": {"halves": 1, "basic": 0},
    },
    "halves_of_12": {"lens": [130, 0], "q_heads": 12, "kv_heads": 1, "processors": 9, "plan": {"halves": 1}},
    "halves_of_drafts": {"lens": [130, 90], "q_lens": 3, "q_heads": 8, "processors": 8, "plan": {"halves": 1}},
    "halves_of_packed": {
        "lens": [90, 70, 20, 5],
        "q_lens": [4, 1, 0, 9],
        "max_q_len": 4,
        "q_heads": 8,
        "processors": 16,
        "plan": {"halves": 1},
        "sinks": True,
        "sinks_of_q": 1,
    },
    "few_rows_share_partials": {"lens": [900], "processors": 20, "q_heads": 1, "kv_heads": 1},
    "line_and_long": {"lens": [1900, 40, 700], "processors": 24, "q_heads": 16, "kv_heads": 1},
    "more_rows_than_said": {"lens": [256, 250, 240], "q_lens": [1, 9, 1], "max_q_len": 1, "processors": 3},
    "more_rows_uneven": {"lens": [9, 300, 66], "q_lens": [5, 0, 7], "max_q_len": 2, "processors": 4},
    "says_nothing": {"lens": [300, 66, 200], "q_lens": [1, 0, 5], "max_q_len": 6, "processors": 2},
    "num_splits": {"lens": [300, 64], "num_splits": 3, "plan": {"splits": 3, "balanced": 0}},
    "num_splits_of_few_tiles": {"lens": [300, 20, 0], "num_splits": 7},
    "num_splits_window": {"lens": [300, 64], "num_splits": 4, "window": (100, 0), "q_lens": 2},
    "num_splits_many": {"lens": [700], "num_splits": 40, "q_heads": 16, "kv_heads": 1},
    "num_splits_packed": {"lens": [200, 66, 150, 9], "q_lens": [3, 0, 9, 1], "num_splits": 3},
    "deterministic": {"lens": [300, 64], "deterministic": 1, "plan": {"balanced": 0}},
    "deterministic_long": {"lens": [4200], "deterministic": 1, "q_heads": 2, "kv_heads": 1},
    "deterministic_packed": {"lens": [200, 66, 9], "q_lens": [3, 0, 5], "deterministic": 1},
}
SOME_FEATURES = (
    *("no_keys", "page_3", "values_apart", "window", "leftpad", "softcap", "alibi", "sinks_of_q", "lines"),
    "two_levels_of_16_rows",
)
# What warpgroups do not take: few keys of many, many pairs of 8 rows, fixed cuts.
NOT_OF_WARPGROUPS = (
    *("window", "window_at_a_tile", "window_of_pages_of_1", "chunk", "halves_of_features"),
    *("large_scale_e4m3", "little_shared"),
    *("lines_of_two_heads", "whole_pairs", "short_pairs", "line_of_many"),
    *("num_splits", "num_splits_of_few_tiles", "num_splits_window", "num_splits_many", "num_splits_packed"),
    *("deterministic", "deterministic_long", "deterministic_packed"),
)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", FEATURES)
def test_features(library, name, gpu):
    wgmma = gpu == "hopper" and name not in NOT_OF_WARPGROUPS
    plan = FEATURES[name].get("plan", {}) | {"wgmma": wgmma}
    judge(library, **FEATURES[name] | GPUS[gpu] | {"plan": plan})


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "e4m3", "e5m2"])
@pytest.mark.parametrize("name", SOME_FEATURES)
def test_some_features(library, name, dtype):
    judge(library, **DTYPES[dtype], **FEATURES[name], blackwell=1)


# Of warpgroups, which take tiles of 64 keys in turns; cuts are between any 16 keys. The ring has 6 tiles.
WARPGROUPS = {
    "whole_tile": {"lens": [64], "processors": 1, "q_heads": 4, "kv_heads": 1},
    "odd_tiles": {"lens": [1400], "processors": 1, "q_heads": 4, "kv_heads": 1, "plan": {"basic": 1, "rows": 8}},
    "odd_tiles_of_16_rows": {"lens": [1400], "processors": 1, "q_lens": 3, "q_heads": 5, "kv_heads": 1},
    # Segments of 9 units, which end inside a tile; then of 21
    "cuts_inside_tiles": {"lens": [1000], "processors": 7, "kv_heads": 1, "plan": {"each": 7}},
    "cuts_inside_tiles_of_16_rows": {"lens": [1000], "processors": 3, "q_lens": 2, "kv_heads": 1, "q_heads": 7},
    "cuts_of_pages_of_1": {"lens": [700], "processors": 4, "kv_heads": 1, "page_size": 1},
    "cuts_of_pages_of_24": {"lens": [700], "processors": 4, "kv_heads": 1, "page_size": 24, "q_lens": 2},
    "cuts_of_contiguous_keys": {"lens": [700, 640], "processors": 6, "page_size": 701, "contiguous": True},
    # Pages are looked up for 32 tiles at a time, or for 16.
    "many_pages_of_1_in_turn": {"lens": [2200], "processors": 1, "q_heads": 2, "kv_heads": 1, "page_size": 1},
    "many_pages_in_turn": {"lens": [2400], "processors": 1, "q_heads": 2, "kv_heads": 1, "page_size": 32},
    "two_levels": {"lens": [2560], "processors": 20, "q_heads": 8, "kv_heads": 1, "plan": {"each": 20}},
    "two_levels_of_groups": {"lens": [4400], "processors": 34, "q_heads": 4, "kv_heads": 1, "plan": {"each": 34}},
    "two_levels_of_16_rows": {"lens": [1500], "processors": 10, "q_heads": 15, "kv_heads": 1, "plan": {"rows": 16}},
    # Buffers of queries and the ring in turns, beyond the ends of segments
    "short_segments": {"lens": [70, 20, 130, 0, 64, 1, 200, 90], "processors": 1, "q_lens": 3},
    "short_segments_of_full": {
        "lens": [70, 20, 130, 0, 64, 1, 200, 90],
        "processors": 1,
        "q_lens": 3,
        "leftpads": [3, 20, 70, 0, 0, 1, 130, 0],
        "sinks": True,
        "plan": {"basic": 0},
    },
    "line": {"lens": [300, 20, 700, 0, 64, 500], "processors": 4, "q_heads": 12, "kv_heads": 1, "q_lens": [1] * 6},
    "line_of_8_rows": {"lens": [300, 20, 700, 0, 64, 500], "processors": 5, "q_heads": 4, "kv_heads": 1},
    "packed": {
        "lens": [300, 20, 140, 90],
        "q_lens": [2, 0, 1, 2],
        "spare": 2,
        "q_heads": 4,
        "kv_heads": 1,
        "sinks": True,
        "sinks_of_q": 1,
        "plan": {"basic": 1, "rows": 8},
    },
    "surplus": {"lens": [256, 250, 240], "q_lens": [1, 9, 1], "max_q_len": 1, "processors": 3},
    "halves": {"lens": [600, 400], "q_heads": 32, "processors": 9, "plan": {"halves": 1, "basic": 1}},
    # A consumer whose rows see no key of its only tile, then some of them
    "first_row_sees_one_tile": {"lens": [66], "q_lens": 4, "processors": 1},
    "not_causal": {"lens": [500, 77], "q_lens": 3, "window": (-1, -1), "processors": 3},
    "window_right": {"lens": [500, 77], "q_lens": 3, "window": (-1, 1), "processors": 3},
    "wide_window": {"lens": [300, 77], "q_lens": 3, "window": (400, 0), "plan": {"basic": 0}},
    "features": {
        "lens": [400, 90, 130],
        "q_lens": 2,
        "leftpads": [70, 90, 3],
        "alibi": True,
        "softcap": 2.0,
        "sinks": True,
        "processors": 3,
        "page_size": 24,
        "plan": {"basic": 0},
    },
    "alibi": {"lens": [400, 77], "q_lens": 3, "alibi": True, "processors": 3},
    "softcap": {"lens": [400, 77], "q_lens": 3, "softcap": 2.0, "processors": 3},
    "values_apart": {"lens": [400, 77], "q_lens": 3, "values_apart": True, "processors": 3},
    "large_scores": {"lens": [700], "q_times": 6.0, "processors": 2},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WARPGROUPS)
def test_warpgroups(library, name, dtype):
    plan = {"wgmma": 1} | WARPGROUPS[name].get("plan", {})
    judge(library, **DTYPES[dtype], **WARPGROUPS[name] | {"plan": plan})


# Items of 32 rows, of GPUs with about as many pairs as multiprocessors. The ring has 5 tiles.
WIDE = {
    "20_rows": {"lens": [300, 77], "q_lens": 5},
    "32_rows": {"lens": [300, 77], "q_lens": 8},
    "one_token_of_17_heads": {"lens": [300, 77], "q_heads": 17, "kv_heads": 1, "processors": 3},
    "longer_than_keys": {"lens": [2, 66, 0], "q_lens": 8, "processors": 7},
    "longer_than_keys_full": {
        "lens": [2, 66, 0],
        "q_lens": 7,
        "leftpads": [0, 0, 0],
        "processors": 7,
        "plan": {"basic": 0},
    },
    "many_tiles": {"lens": [1500], "q_lens": 7, "processors": 1, "kv_heads": 1, "q_heads": 4},
    "odd_tiles": {"lens": [1400, 1300], "q_lens": 5, "processors": 2, "kv_heads": 1, "q_heads": 4},
    "cuts": {"lens": [1000], "q_lens": 4, "processors": 2, "kv_heads": 1, "plan": {"each": 2}},
    "cuts_of_a_line": {"lens": [300, 20, 700, 0, 64, 500], "processors": 7, "kv_heads": 1, "q_lens": 3},
    "cuts_inside_tiles": {"lens": [1000, 400, 90], "processors": 5, "kv_heads": 1, "q_lens": 4},
    "many_cuts_of_one": {"lens": [7200, *[40] * 8], "processors": 20, "kv_heads": 1, "q_lens": 3},
    "short_segments": {"lens": [70, 20, 130, 0, 64, 1, 2050, 90], "processors": 9, "q_lens": 5},
    "packed": {
        "lens": [300, 20, 140, 90],
        "q_lens": [2, 0, 7, 1],
        "spare": 2,
        "max_q_len": 7,
        "sinks": True,
        "sinks_of_q": 1,
        "processors": 8,
    },
    "surplus": {"lens": [256, 250, 240], "q_lens": [1, 40, 1], "max_q_len": 8, "processors": 7},
    "pages_of_1": {"lens": [300, 77], "q_lens": 8, "page_size": 1},
    "pages_of_24": {"lens": [300, 77], "q_lens": 7, "page_size": 24},
    "contiguous": {"lens": [130, 77], "q_lens": 6, "page_size": 131, "contiguous": True, "plan": {"basic": 0}},
    "values_apart": {"lens": [400, 77], "q_lens": 7, "values_apart": True},
    "not_causal": {"lens": [500, 77], "q_lens": 6, "window": (-1, -1)},
    "window_right": {"lens": [500, 77], "q_lens": 7, "window": (-1, 1)},
    "wide_window": {"lens": [300, 77], "q_lens": 7, "window": (400, 0), "plan": {"basic": 0}},
    "features": {
        "lens": [400, 90, 130],
        "q_lens": 7,
        "leftpads": [70, 90, 3],
        "alibi": True,
        "softcap": 2.0,
        "sinks": True,
        "processors": 7,
        "page_size": 24,
        "plan": {"basic": 0},
    },
    "large_scores": {"lens": [700, 500], "q_times": 6.0, "q_lens": 8, "kv_heads": 1, "q_heads": 4, "processors": 3},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_items(library, name, dtype):
    plan = {"wgmma": 1, "basic": 1, "rows": 32} | WIDE[name].get("plan", {})
    judge(library, **DTYPES[dtype], **{"processors": 5} | WIDE[name] | {"plan": plan})


@pytest.mark.parametrize("rows", ["packed", "cuts_of_a_line", "many_cuts_of_one", "features"])
@pytest.mark.parametrize("heads", [[64], [40, 64], [112, 80], [96]], ids=str)
def test_sizes_of_wide_items(library, heads, rows):
    judge(library, *heads, **WIDE[rows] | {"plan": {"wgmma": 1, "rows": 32}})


# As many rows, but few or many pairs, a head_dim or a window that other kernels are faster with.
NOT_WIDE = {
    "few_pairs": {"lens": [300]},
    "many_pairs": {"lens": [2100] * 4, "processors": 3},
    "more_pairs_than_blocks": {"lens": [300, 77], "processors": 3},
    "256": {"head_dim": 256, "lens": [300, 77]},
    "narrow_window": {"lens": [300, 77], "window": (70, 0)},
    "chunk": {"lens": [300, 77], "chunk": 50},
    "num_splits": {"lens": [300, 77], "num_splits": 2},
    "deterministic": {"lens": [300, 77], "deterministic": 1},
    "e4m3": {"lens": [300, 77], **E4M3},
    "blackwell": {"lens": [300, 77], "blackwell": 1},
}


@pytest.mark.parametrize("name", NOT_WIDE)
def test_items_that_are_not_wide(library, name):
    case = {"processors": 5, "q_lens": 8} | NOT_WIDE[name]
    assert judge(library, **case).numbers.rows <= 16


@pytest.mark.parametrize("step", [0.05, 0.3, 2.0, -0.3])
@pytest.mark.parametrize("q_lens", [1, 3, 7])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_warpgroups_where_scores_grow(library, dtype, q_lens, step):
    """By about `step` from a key to the next, for each head at a pace of its own, for some not at all."""
    case = decode(128)(lens=[500, 130], q_lens=q_lens, q_heads=8, kv_heads=2, page_size=16, scale=1.0, **DTYPES[dtype])
    case.q *= 0.1
    case.q[..., 0] = step * torch.arange(8) / 4
    for table, n in zip(case.table, case.lens, strict=True):
        keys = torch.arange(n)
        case.cache[table[keys // 16].long(), keys % 16, :, 0] = keys[:, None].to(case.dtype)
    assert case.run(library).wgmma
    case.judge()


@pytest.mark.parametrize("q_lens", [3, 7])
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_warpgroups_do_not_read_behind_the_table(library, page_size, q_lens):
    """What stands there is no page, or one of somebody else."""
    case = decode(128)(lens=[500, 130, 0], q_lens=q_lens, q_heads=8, kv_heads=2, page_size=page_size)
    for table, n in zip(case.table, case.lens, strict=True):
        behind = table[-(-n // page_size) :]
        behind.copy_(torch.tensor([-1, 2**31 - 1, 2**30, case.num_pages, 0]).repeat(len(behind))[: len(behind)])
    assert case.run(library).wgmma
    case.judge()


@pytest.mark.parametrize("q_lens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_factors_of_8_bits(library, dtype, q_lens):
    """Every request has factors of its own. The result of 8-bit q is bf16, and no worse than that of 16-bit q."""
    factors = {"k_descales": [0.5, 2.0, 1.25], "v_descales": [3.0, 0.25, 1.0], "q_descales": [1.5, 1.0, 0.5]}
    case = judge(library, lens=[130, 77, 9], q_lens=q_lens, dtype=dtype, kv_dtype=torch.float8_e4m3fn, **factors)
    assert case.judge() < 1e-2
    del factors["q_descales"]  # without it bf16 takes the basic kernel
    judge(library, lens=[130, 77, 9], dtype=dtype, kv_dtype=torch.float8_e4m3fn, **factors)


def test_v_descale_of_an_idle_request_does_not_matter(library):
    """It has no keys, so its result is 0: nobody may have written its scale."""
    judge(library, lens=[0, 100], v_descales=[torch.nan, 0.5], sinks=True, sinks_of_q=1, **E4M3)


@pytest.mark.parametrize("q_heads", [8, 16])
@pytest.mark.parametrize("times", [1e30, 1e-30, 1e-39])
def test_range_of_bf16_over_8_bits(library, times, q_heads):
    """Rows of every size, one of them of zeros. fp16 would not hold them."""
    case = decode(128)(lens=[130], q_heads=q_heads, page_size=16, scale=0.1 / times, **E4M3)
    case.q *= times
    for head in range(q_heads):
        case.q[:, head] *= 2.0 ** -(head % 8)
    case.q[:, 2] = 0
    case.run(library)
    case.judge()


@pytest.mark.parametrize("score", [1e5, 1e11, 1e30, -1e5, -1e11, -1e30])
@pytest.mark.parametrize(
    "dtype, gpu", [*((name, "blackwell") for name in DTYPES), ("bf16", "hopper"), ("fp16", "hopper")]
)
def test_scores_far_out(library, dtype, gpu, score):
    sizes = {"q_heads": 8, "kv_heads": 2, "page_size": 16}
    case = decode(128)(lens=[200], window=(-1, -1), **sizes, **DTYPES[dtype], **GPUS[gpu])
    case.judge_scores_far_out(library, score)
    assert case.numbers.wgmma == (gpu == "hopper")


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_deterministic_does_not_see_the_batch(library, packed):
    """Not a bit of it."""
    both = {"deterministic": 1, "num_splits": 0, "q_heads": 8, "kv_heads": 2, "page_size": 16}
    case = decode(128)(lens=[2300, 90, 300], q_lens=[2, 9, 0] if packed else 2, **both)
    case.run(library)
    alone = decode(128)(lens=[2300], q_lens=[2] if packed else 2, **both)
    alone.q, alone.cache, alone.num_pages, alone.table = case.q[:2], case.cache, case.num_pages, case.table[:1]
    alone.run(library)
    assert torch.equal(alone.out, case.out[:2])
    assert torch.equal(alone.lse, case.lse[:, :2] if packed else case.lse[:1])


@pytest.mark.parametrize("seed", range(24))
def test_attends_some_call(library, seed):
    """Lengths, heads, pages and processors at random."""
    rng = random.Random(seed)
    batch, packed, kv_heads = rng.randint(1, 5), rng.random() < 0.5, rng.choice([1, 2, 3])
    longest = rng.choice([1, 2, 5])
    judge(
        library,
        rng.choice([64, 96, 128]),
        lens=[rng.choice([0, 1, 32, rng.randint(1, 300)]) for _ in range(batch)],
        q_lens=[rng.randint(0, longest) for _ in range(batch - 1)] + [longest] if packed else longest,
        max_q_len=rng.choice([1, longest]) if packed else longest,
        q_heads=kv_heads * rng.choice([1, 4, 7]),
        kv_heads=kv_heads,
        page_size=rng.choice([1, 8, 16, 64]),
        processors=rng.choice([1, 2, 5, 9]),
        **rng.choice([{}, {"blackwell": 1}, {"little_shared": 1}]),
        seed=seed,
        **rng.choice([{}, {}, {"deterministic": 1}, {"num_splits": 3}, {"window": (70, 0)}, {"sinks": True}]),
        **rng.choice(list(DTYPES.values())),
    )
