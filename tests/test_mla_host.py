"""The kernels of the route mla on the host: its own sources, with thread blocks of tests/cuda/block/ in the place of a
GPU's. Results against float64; barriers that never open, copies into a tile that is still read, arrivals too many and
addresses outside of shared memory end the run.
"""

import ctypes
import itertools
import random

import pytest
import torch
from blocks import HOST, Call, Case, compile_kernels, numbers_of


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("mla")
    cuda = root / "paged_decode_cuda"
    instances = ("bf16.cu", "fp16.cu", "few_rows_bf16.cu", "few_rows_fp16.cu", "e4m3.cu", "e5m2.cu")
    sources = [cuda / "mla" / name for name in (*instances, "combine.cu", "route.cu", "plan.cpp")]
    in_shared_memory = [
        (
            "mla/combine.cu",
            "__shared__ WarpSums<kWarps> sums;",
            "WarpSums<kWarps>& sums = *reinterpret_cast<WarpSums<kWarps>*>(block_raw());",
        )
    ]
    for path, control in (
        ("mla/kernel.cuh", "MlaControl"),
        ("mla/few_rows_kernel.cuh", "FewRowsControl<Shape>"),
        ("mla/narrow_kernel.cuh", "NarrowControl<Sizes>"),
    ):
        in_shared_memory += [
            (path, f"__shared__ {control} control;", f"{control}& control = block_control<{control}>();"),
            (path, "extern __shared__ uint8_t raw[];", "uint8_t* const raw = block_raw();"),
        ]
    return compile_kernels(root, [HOST / "mla.cuh", *sources, cuda / "plan.cpp", HOST / "mla.cpp"], in_shared_memory)


E5M2_FP16 = {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16}

CASES = {
    "one_tile": {"lens": [64]},
    "one_key": {"lens": [1]},
    "no_keys": {"lens": [0, 70]},
    "whole_tiles": {"lens": [256], "processors": 1},
    "ragged": {"lens": [130, 1, 300]},
    "apart": {"lens": [130, 1, 300], "apart": True},
    "fp16": {"lens": [130, 70], "dtype": torch.float16},
    "e4m3": {"lens": [200, 70], "kv_dtype": torch.float8_e4m3fn},
    "e5m2_fp16": {"lens": [130, 1], "apart": True, **E5M2_FP16},
    "e4m3_cluster": {"lens": [300, 90], "kv_dtype": torch.float8_e4m3fn, "q_heads": 128, "processors": 4},
    "e4m3_cluster_pages_of_16": {"lens": [200], "kv_dtype": torch.float8_e4m3fn, "q_heads": 128, "page_size": 16},
    "e4m3_pages_of_3": {"lens": [200, 129], "kv_dtype": torch.float8_e4m3fn, "page_size": 3},
    "e4m3_line": {"lens": [70, 600, 1, 200, 90], "processors": 4, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_line_cluster": {"lens": [70, 500, 1, 90], "processors": 6, "q_heads": 128, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_num_splits": {"lens": [300, 64], "num_splits": 3, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_second_block_idle": {"lens": [150, 70], "q_lens": 9, "q_heads": 64, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_packed": {"lens": [200, 66, 9], "q_lens": [3, 0, 5], "q_heads": 32, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_leftpad": {"lens": [200, 129], "leftpads": [70, 3], "kv_dtype": torch.float8_e4m3fn},
    "e4m3_window": {"lens": [300, 100], "q_lens": 2, "window": (100, 0), "kv_dtype": torch.float8_e4m3fn},
    "e4m3_softcap": {"lens": [100, 70], "softcap": 2.0, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_alibi": {"lens": [200, 70], "q_lens": 2, "alibi": True, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_alibi_not_causal": {
        "lens": [200, 70],
        "q_lens": 3,
        "alibi": True,
        "window": (-1, -1),
        "kv_dtype": torch.float8_e4m3fn,
    },
    "alibi_not_causal": {"lens": [200, 70], "q_lens": 3, "alibi": True, "window": (-1, -1)},
    "large_softcap": {"lens": [100, 70], "softcap": 100.0},
    "spare_tokens": {"lens": [200, 66, 9], "q_lens": [3, 0, 5], "q_heads": 32, "spare": 4},
    "e4m3_sinks": {"lens": [200, 0], "sinks": True, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_large_scores": {"lens": [400], "scale": 3.0, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_negative_scale": {"lens": [100], "scale": -0.05, "kv_dtype": torch.float8_e4m3fn},
    "e5m2_softcap": {"lens": [100, 70], "softcap": 2.0, "kv_dtype": torch.float8_e5m2, "page_size": 16},
    "e4m3_large_q": {"lens": [200], "q_times": 1e30, "scale": 1e-31, "kv_dtype": torch.float8_e4m3fn},
    "e4m3_small_q": {"lens": [200], "q_times": 1e-30, "scale": 1e29, "kv_dtype": torch.float8_e4m3fn},
    "cluster": {"lens": [200, 64], "q_heads": 128},
    "cluster_uneven": {"lens": [300, 1, 90], "q_heads": 128, "processors": 6},
    "cluster_second_block_idle": {"lens": [150, 70], "q_lens": 9, "q_heads": 64},
    "cluster_pages_of_1": {"lens": [100, 30], "q_heads": 128, "page_size": 1},
    "drafts": {"lens": [200, 66], "q_lens": 4, "q_heads": 16},
    "drafts_cluster": {"lens": [100, 66], "q_lens": 3, "q_heads": 128, "processors": 8},
    "drafts_longer_than_keys": {"lens": [2, 66], "q_lens": 4, "q_heads": 16},
    "packed": {"lens": [200, 66, 9], "q_lens": [3, 0, 5], "q_heads": 32},
    "packed_cluster": {"lens": [200, 66, 9], "q_lens": [3, 1, 5], "q_heads": 64},
    "packed_decode": {"lens": [256, 250, 240], "q_lens": [1, 1, 1], "processors": 6},
    "packed_decode_cluster": {"lens": [256, 250, 240], "q_lens": [1, 1, 1], "q_heads": 128, "processors": 12},
    "packed_decode_uneven": {"lens": [500, 64, 1, 200], "q_lens": [1, 1, 1, 1], "processors": 6},
    "packed_decode_with_nobody": {"lens": [256, 250, 240], "q_lens": [1, 0, 1], "processors": 6},
    "packed_decode_kv_heads": {"lens": [256, 250], "q_lens": [1, 1], "q_heads": 32, "kv_heads": 2, "processors": 8},
    # max_q_len is a hint: the rows that it leaves out are items of their own.
    "packed_more_rows_than_said": {"lens": [256, 250, 240], "q_lens": [1, 9, 1], "max_q_len": 1, "processors": 6},
    "packed_more_rows_uneven": {"lens": [9, 300, 66], "q_lens": [5, 0, 7], "max_q_len": 2, "processors": 4},
    "packed_more_rows_cluster": {"lens": [256, 250], "q_lens": [1, 3], "max_q_len": 1, "q_heads": 128, "processors": 8},
    "packed_says_nothing": {"lens": [300, 66, 400], "q_lens": [1, 0, 5], "max_q_len": 6, "processors": 6},
    "packed_window": {"lens": [300, 100], "q_lens": [2, 3], "max_q_len": 1, "window": (100, 0)},
    "e4m3_packed_decode": {"lens": [256, 250], "q_lens": [1, 1], "kv_dtype": torch.float8_e4m3fn},
    "e4m3_packed_more_rows": {"lens": [256, 250], "q_lens": [1, 3], "max_q_len": 1, "kv_dtype": torch.float8_e4m3fn},
    "group_48": {"lens": [100, 129], "q_lens": 2, "q_heads": 48},
    "kv_heads": {"lens": [100, 129], "q_heads": 32, "kv_heads": 2},
    "page_16": {"lens": [100, 129], "page_size": 16},
    "page_8": {"lens": [100], "page_size": 8},
    "page_256": {"lens": [300, 40], "page_size": 256},
    "page_3": {"lens": [100, 129], "page_size": 3},
    "pages_of_1_line": {"lens": [70, 600, 1, 200, 90], "processors": 4, "page_size": 1},
    "pages_of_1_line_cluster": {"lens": [70, 300, 1, 90], "processors": 6, "q_heads": 128, "page_size": 1},
    "pages_of_1_num_splits": {"lens": [300, 64], "num_splits": 3, "page_size": 1},
    "pages_of_1_apart": {"lens": [100, 129], "page_size": 1, "apart": True, "dtype": torch.float16},
    "page_24": {"lens": [100, 129], "page_size": 24, "apart": True},
    "leftpad": {"lens": [200, 129], "leftpads": [70, 3]},
    "leftpad_all": {"lens": [100], "leftpads": [100]},
    "window": {"lens": [300, 100], "q_lens": 2, "window": (100, 0)},
    "window_right": {"lens": [300, 100], "q_lens": 3, "window": (-1, 1)},
    "not_causal": {"lens": [100], "q_lens": 3, "window": (-1, -1)},
    "chunk": {"lens": [300, 129], "q_lens": 3, "chunk": 100, "leftpads": [5, 0]},
    "softcap": {"lens": [100, 70], "softcap": 2.0},
    "alibi": {"lens": [200, 70], "q_lens": 2, "alibi": True},
    "sinks": {"lens": [200, 0], "sinks": True},
    "large_scores": {"lens": [400], "scale": 3.0},
    "negative_scale": {"lens": [100], "scale": -0.05},
    "scale_0": {"lens": [100], "scale": 0.0},
    "many_partials": {"lens": [900], "q_heads": 128, "processors": 16},
    "many_partials_and_rows": {"lens": [700, 500], "q_heads": 128, "q_lens": 2, "processors": 20},
    # The warps of a block add the partials of 16 rows together.
    "one_long": {"lens": [*[1] * 5, 1900, 1, 90], "processors": 40},
    "one_very_long": {"lens": [1, 1, 4400, *[1] * 5], "processors": 60},
    # With more rows each warp adds by itself, but blocks add those of two long ones; three are too many for that.
    "two_long_of_64_rows": {"lens": [1900, 1900, *[1] * 6], "processors": 60, "q_heads": 64},
    "three_long_of_64_rows": {"lens": [1900, 1900, 1900, *[1] * 5], "processors": 60, "q_heads": 64},
    "long_and_others_of_64_rows": {"lens": [300, 1900, 200, *[1] * 5, 260], "processors": 60, "q_heads": 64},
    "one_long_cluster": {"lens": [1900, *[1] * 7], "processors": 80, "q_heads": 128},
    "one_long_kv_heads": {"lens": [0, *[1] * 6, 1900], "processors": 80, "kv_heads": 2, "apart": True},
    "two_long": {"lens": [1900, 1900, *[1] * 6], "processors": 60},
    "num_splits": {"lens": [300, 64], "num_splits": 3},
    "num_splits_cluster": {"lens": [300, 64], "num_splits": 2, "q_heads": 128},
    "num_splits_packed": {"lens": [200, 66, 300, 9], "q_lens": [3, 0, 5, 1], "q_heads": 32, "num_splits": 3},
    "num_splits_packed_cluster": {"lens": [200, 66, 9], "q_lens": [3, 1, 5], "q_heads": 128, "num_splits": 2},
    "num_splits_packed_kv_heads": {"lens": [200, 66], "q_lens": [3, 5], "q_heads": 64, "kv_heads": 2, "num_splits": 2},
    "deterministic": {"lens": [300, 64], "deterministic": 1},
    "splits_for_16_warps": {"lens": [2100], "num_splits": 33},
    # Every request is expected to get two clusters, and one gets more: queries of others have been asked for.
    "other_queries": {"lens": [500, 64, 64], "processors": 6},
    "other_queries_cluster": {"lens": [64, 0, 400], "processors": 12, "q_heads": 128},
    "same_queries": {"lens": [500, 470, 490], "processors": 6, "kv_heads": 2},
    "e4m3_other_queries": {"lens": [500, 64, 64], "processors": 6, "kv_dtype": torch.float8_e4m3fn},
    "e5m2_other_queries_cluster": {"lens": [64, 0, 400], "processors": 12, "q_heads": 128, **E5M2_FP16},
    "e4m3_same_queries": {"lens": [500, 470, 490], "processors": 6, "kv_heads": 2, "kv_dtype": torch.float8_e4m3fn},
    "more_pairs_than_blocks": {"lens": [128] * 7, "processors": 3},
    "line": {"lens": [70, 600, 1, 200, 90], "processors": 4},
    "two_partials_of_a_block": {"lens": [700, 700, 100], "processors": 3},
    "line_cluster": {"lens": [70, 500, 1, 200, 90], "processors": 6, "q_heads": 128},
}


# Up to 32 rows have kernels of their own, over 8-bit caches one, over 16-bit ones two: of up to 16 and up to 32 rows.
# Most cases have 16 rows or fewer.
FEATURES = (
    *("apart", "chunk", "leftpad", "leftpad_all", "window", "window_right", "not_causal", "softcap", "alibi", "sinks"),
    *("large_scores", "negative_scale", "scale_0", "fp16", "no_keys", "ragged", "whole_tiles", "kv_heads"),
    *("page_3", "page_16", "page_24", "pages_of_1_line", "pages_of_1_num_splits", "pages_of_1_apart"),
    *("line", "two_partials_of_a_block", "more_pairs_than_blocks", "num_splits", "deterministic"),
    *("packed_decode", "packed_decode_uneven", "packed_decode_with_nobody", "other_queries", "same_queries"),
)
E4M3_FEATURES = ("leftpad", "alibi", "large_scores", "negative_scale", "packed")
CASES |= {f"{name}_of_64_rows": CASES[name] | {"q_heads": 64} for name in FEATURES}
CASES |= {f"{name}_of_32_rows": CASES[name] | {"q_heads": 32} for name in FEATURES if CASES[name].get("q_lens", 1) == 1}
CASES |= {
    f"{name}_of_64_rows": CASES[name] | {"q_heads": 64}
    for name in (*(f"e4m3_{x}" for x in E4M3_FEATURES), "e5m2_softcap")
}
CASES |= {
    "rows_8": {"lens": [130, 1, 300], "q_heads": 8},
    "rows_16_of_2_tokens": {"lens": [130, 1, 300], "q_lens": 2, "q_heads": 8},
    "rows_16_and_spare_tokens": {"lens": [200, 66], "q_lens": [1, 0], "spare": 3},
    "rows_32_and_spare_tokens": {"lens": [200, 66, 9], "q_lens": [2, 0, 1], "spare": 3},
    "rows_20": {"lens": [130, 1, 300], "q_heads": 20},
    "rows_32_of_2_tokens": {"lens": [130, 1, 300], "q_lens": 2, "window": (70, 0)},
    "rows_32_of_4_tokens_packed": {"lens": [130, 90, 300], "q_lens": [4, 1, 3], "q_heads": 8, "alibi": True},
    "rows_32_more_than_said": {"lens": [256, 250, 240], "q_lens": [2, 9, 1], "max_q_len": 2, "processors": 6},
}


@pytest.mark.parametrize("name", CASES)
def test_attends(library, name):
    case = Case(**CASES[name])
    case.run(library)
    case.judge()


# The cases whose sizes leave the heads to the test, and a few of their own.
WIDE = {
    name: CASES[name]
    for name in (
        *("leftpad", "window", "not_causal", "chunk", "softcap", "alibi", "sinks", "large_scores"),
        *("one_key", "no_keys", "ragged", "fp16", "page_3", "page_16", "line", "num_splits", "deterministic"),
    )
} | {
    "rows_16": {"lens": [130, 1, 300], "q_lens": 2},
    "rows_24": {"lens": [130, 2, 300], "q_lens": 3},
    "rows_48": {"lens": [130, 5, 300], "q_lens": 6},
    "heads_1": {"lens": [130, 64], "q_heads": 1, "kv_heads": 1},
    "prompts": {"lens": [64, 33], "q_lens": [64, 33]},
    "packed": {"lens": [200, 66, 9], "q_lens": [3, 0, 5], "spare": 2},
    "packed_more_rows": {"lens": [256, 250, 240], "q_lens": [1, 9, 1], "max_q_len": 1, "processors": 6},
    "even": {"lens": [256, 250, 240], "processors": 12},
    "page_1": {"lens": [100, 129], "page_size": 1},
    "many_partials": {"lens": [900], "processors": 16},
}


@pytest.mark.parametrize("name", WIDE)
def test_attends_with_wide_heads(library, name):
    """Keys and values of 512, of two KV heads of four query heads: the kernel of few rows without latents."""
    case = Case.of_head_dim(512, 512)(**{"q_heads": 8, "kv_heads": 2, "page_size": 64} | WIDE[name])
    case.run(library)
    case.judge()


@pytest.mark.parametrize("q_heads", [16, 64])
def test_v_descale_of_an_idle_request_does_not_matter(library, q_heads):
    """It has no keys, so its result is 0: nobody may have written its scale."""
    sizes = {"lens": [0, 100], "q_heads": q_heads, "kv_dtype": torch.float8_e4m3fn}
    case = Case(v_descales=[torch.nan, 0.5], sinks=True, **sizes)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("score", [1e5, 5e6, 1e8, 1e11, 1e30, -1e5, -1e8, -1e11, -1e30])
@pytest.mark.parametrize(
    "options", [{}, {"q_heads": 32}, {"q_heads": 128}, {"dtype": torch.float16}, {"kv_dtype": torch.float8_e4m3fn}]
)
def test_scores_far_out(library, options, score):
    Case(lens=[400], window=(-1, -1), **options).judge_scores_far_out(library, score)


@pytest.mark.parametrize("seed", range(12))
def test_attends_some_call(library, seed):
    """Lengths, groups, pages and processors at random."""
    rng = random.Random(seed)
    batch, packed = rng.randint(1, 4), rng.random() < 0.4
    lens = [rng.choice([0, 1, 64, 65, rng.randint(1, 400)]) for _ in range(batch)]
    longest = rng.choice([1, 2, 3])
    case = Case(
        lens=lens,
        q_lens=[rng.randint(0, longest) for _ in range(batch - 1)] + [longest] if packed else longest,
        q_heads=rng.choice([8, 16, 32, 40, 64, 128]),
        page_size=rng.choice([1, 8, 16, 64, 128]),
        max_q_len=rng.choice([1, longest]) if packed else longest,
        apart=rng.random() < 0.5,
        processors=rng.choice([1, 2, 5, 12]),
        seed=seed,
        **rng.choice([{}, {}, {"deterministic": 1}, {"num_splits": 3}, {"window": (70, 0)}, {"sinks": True}]),
        **rng.choice([{}, {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": torch.float8_e5m2}]),
    )
    case.run(library)
    case.judge()


def explained(library, **options):
    """(reason, numbers) of a call that is only planned, on an H200."""
    call = Call(
        batch=32, q_heads=128, kv_heads=1, head_dim=576, head_dim_v=512, max_q_len=1, page_size=64, max_pages=64, seed=1
    )
    call.q = call.k = call.v = call.cache_seqlens = call.block_table = 1 << 20
    call.window_left, call.window_right, call.processors, call.scale = -1, 0, 132, 0.1
    for which in "kv":
        for name, stride in (("page", 64 * 576), ("slot", 576), ("head", 576)):
            setattr(call, f"{which}_stride_{name}", stride)
    for name, value in options.items():
        setattr(call, name, value)
    call.num_pages = options.get("num_pages", call.batch * call.max_pages)
    call.total_q = options.get("total_q", call.batch * call.max_q_len)
    numbers = numbers_of(Case.NUMBERS)
    return library.attend(ctypes.byref(call), ctypes.byref(numbers)).decode(), numbers


def test_plans(library):
    for options, expected in (
        ({}, {"clusters": 66, "cluster": 2, "items": 32, "partial_count": 264, "balanced": 1, "box_rows": 64}),
        ({"batch": 1, "max_pages": 512}, {"clusters": 66, "cluster": 2, "items": 1}),
        ({"max_q_len": 2}, {"cluster": 2, "items": 64}),
        ({"q_heads": 16}, {"clusters": 132, "cluster": 1, "items": 32, "partial_count": 264}),
        ({"q_heads": 64, "max_q_len": 3}, {"cluster": 1, "items": 96}),
        ({"q_heads": 16, "cu_seqlens_q": 1 << 20}, {"cluster": 1, "items": 32, "balanced": 1}),
        ({"cu_seqlens_q": 1 << 20, "max_q_len": 4}, {"cluster": 2, "items": 128}),
        ({"cu_seqlens_q": 1 << 20, "max_q_len": 1000, "total_q": 1031}, {"items": 32 + 1031}),
        ({"page_size": 16, "max_pages": 256}, {"box_rows": 16}),
        ({"page_size": 8, "max_pages": 512}, {"box_rows": 0}),
        ({"page_size": 8, "max_pages": 512, "kv_dtype": 1}, {"box_rows": 8}),
        ({"kv_dtype": 1}, {"rows": 64, "clusters": 66}),
        ({"kv_dtype": 1, "q_heads": 32}, {"rows": 32, "clusters": 132, "partial_count": 264}),
        ({"kv_dtype": 1, "q_heads": 16, "max_q_len": 3}, {"rows": 64, "clusters": 132}),
        ({"q_heads": 8}, {"rows": 16, "box_rows": 0}),
        ({"q_heads": 16}, {"rows": 16, "box_rows": 0, "items": 32}),
        ({"q_heads": 16, "max_q_len": 2}, {"rows": 32, "clusters": 132}),
        ({"q_heads": 32, "cu_seqlens_q": 1 << 20}, {"rows": 32, "clusters": 132, "items": 32}),
        ({"q_heads": 16, "max_q_len": 3}, {"rows": 64, "box_rows": 64}),
        ({"deterministic": 1}, {"clusters": 64, "splits": 2, "partial_count": 128, "balanced": 0}),
        ({"num_splits": 4}, {"clusters": 128, "splits": 4}),
        ({"batch": 4, "max_q_len": 1024}, {"balanced": 0, "cut": 0, "partial_count": 0, "clusters": 4096}),
    ):
        reason, numbers = explained(library, **options)
        assert reason == "" and {name: getattr(numbers, name) for name in expected} == expected, options


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_deterministic_does_not_see_the_batch(library, packed):
    """The kernel, the rows of an item and the cuts of a request are those that it has alone."""
    for q_heads, kv_dtype, num_splits, q_len in itertools.product((16, 32, 64, 128), (0, 1), (0, 4), (1, 3, 8)):
        options = {"deterministic": 1, "q_heads": q_heads, "kv_dtype": kv_dtype, "num_splits": num_splits}
        found = set()
        for batch, longest in ((1, q_len), (2, 12), (40, 30)):
            longest = longest if packed else q_len
            options |= {"batch": batch, "max_q_len": longest, "cu_seqlens_q": packed << 20, "num_pages": 5000}
            reason, n = explained(library, total_q=q_len + (batch - 1) * longest, **options)
            assert reason == ""
            found.add((n.cluster, n.rows, n.splits, n.balanced))
        assert len(found) == 1, (q_heads, kv_dtype, num_splits, q_len, found)


def test_why_not(library):
    for options, reason in (
        ({"head_dim": 128}, "head_dim"),
        ({"head_dim": 64}, "head_dim"),
        ({"v": 1 << 21}, "v_cache is not the first 512"),
        ({"v_stride_slot": 512}, "v_cache is not the first 512"),
        ({"k_stride_slot": 577, "v_stride_slot": 577}, "stride"),
        ({"batch": 2**20, "max_q_len": 2**10, "total_q": 2**30, "num_pages": 9}, "32 bits"),
        ({"kv_heads": 2, "v_stride_head": 512}, "v_cache is not the first 512"),
        ({"num_pages": 10**6}, "64 GiB"),
    ):
        said, _ = explained(library, **options)
        assert reason in said, (options, said)


@pytest.mark.parametrize(
    "options",
    [
        {"v_stride_head": 512},
        {"v_stride_head": 513},
        {"k_stride_head": 1},
        {"page_size": 1, "max_pages": 4096, "v_stride_slot": 512},
        {"num_pages": 1, "v_stride_page": 7},
    ],
    ids=str,
)
def test_strides_of_single_entries_say_nothing(library, options):
    """kv[..., :512].unsqueeze(2) has another stride of its one head than kv.unsqueeze(2)."""
    assert explained(library, **options)[0] == ""
