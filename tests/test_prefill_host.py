"""The kernel of the route prefill on the host: bf16 of head_dim 64, 96, 128, 192 and 256, e4m3 of 64 and 128, 8-bit
caches that are widened of 128 and 256. See tests/blocks.py.
"""

import random

import pytest
import torch
from blocks import HOST, REPOSITORY, Case, compile_kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("prefill")
    cuda = root / "paged_decode_cuda"
    control = "PrefillControl<Shape>"
    in_shared_memory = (
        ("prefill/kernel.cuh", f"__shared__ {control} control;", f"auto& control = block_control<{control}>();"),
        ("prefill/kernel.cuh", "extern __shared__ uint8_t raw[];", "uint8_t* const raw = block_raw();"),
        (
            "prefill/combine.cu",
            "__shared__ SharedSums shared_sums;",
            "SharedSums& shared_sums = *reinterpret_cast<SharedSums*>(block_raw());",
        ),
    )
    planners = [f"prefill/{path.name}" for path in sorted((REPOSITORY / "paged_decode_cuda/prefill").glob("*.cpp"))]
    sources = [*planners, "prefill/route.cu", "prefill/combine.cu", "decode/plan.cpp", "plan.cpp"]
    return compile_kernels(root, [*(cuda / name for name in sources), HOST / "prefill.cpp"], in_shared_memory)


class Prompt(Case):
    DIMS, KEYS, VALUES = 256, slice(0, 128), slice(128, 256)
    NUMBERS = ("blocks", "box_rows", "splits", "most_splits", "rows", "tile_rows")


CASES = {
    "one_tile": {"lens": [100], "q_lens": 20},
    "chunk": {"lens": [400], "q_lens": 50},
    "two_requests": {"lens": [300, 200], "q_lens": [70, 33]},
    "edge_inside_a_page": {"lens": [250], "q_lens": 40, "page_size": 64},
    "page_256": {"lens": [600], "q_lens": 40, "page_size": 256},
    "page_1": {"lens": [300, 140], "q_lens": [70, 40], "page_size": 1},
    "page_3": {"lens": [500], "q_lens": 33, "page_size": 3},
    "page_4": {"lens": [130, 1, 90], "q_lens": [40, 1, 5], "page_size": 4},
    "page_8": {"lens": [300, 140], "q_lens": [70, 40], "page_size": 8},
    "page_8_leftpad": {"lens": [300], "q_lens": 40, "page_size": 8, "leftpads": [137]},
    "page_24_not_causal": {"lens": [300], "q_lens": 20, "page_size": 24, "window": (-1, -1)},
    "page_1_window": {"lens": [500], "q_lens": 40, "page_size": 1, "window": (150, 0)},
    "page_1_not_causal": {"lens": [300], "q_lens": 20, "page_size": 1, "window": (-1, -1)},
    "window": {"lens": [500], "q_lens": 40, "page_size": 16, "window": (150, 0)},
    "leftpad": {"lens": [500, 260], "q_lens": 40, "page_size": 16, "leftpads": [137, 3]},
    "leftpad_page_1": {"lens": [300], "q_lens": 40, "page_size": 1, "leftpads": [137]},
    "longer_than_keys": {"lens": [10, 260], "q_lens": 40, "page_size": 8},
    "attention_chunk": {"lens": [300], "q_lens": 70, "chunk": 100},
    "sinks": {"lens": [300], "q_lens": 33, "sinks": True},
    "three_splits": {"lens": [700, 20], "q_lens": 20, "num_splits": 3},
    "splits_of_packed_requests": {"lens": [400, 0, 130], "q_lens": [33, 2, 1], "num_splits": 2, "sinks": True},
    "splits_beside_spare_tokens": {"lens": [400, 130], "q_lens": [33, 9], "num_splits": 2, "spare": 7},
    "values_apart": {"lens": [300, 200], "q_lens": [70, 33], "page_size": 4, "values_apart": True},
    "more_splits_than_tiles": {"lens": [200], "q_lens": 40, "num_splits": 7, "page_size": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_attends(library, name):
    case = Prompt(q_heads=4, **CASES[name])
    numbers = case.run(library)
    assert numbers.splits == CASES[name].get("num_splits", 1)
    case.judge()


class WidePrompt(Prompt):
    """head_dim 256: tiles have 64 keys, which three warps that gather do not share evenly."""

    DIMS, KEYS, VALUES = 512, slice(0, 256), slice(256, 512)


@pytest.mark.parametrize("name", ["chunk", "page_3", "page_1_window", "splits_of_packed_requests"])
def test_attends_with_wide_heads(library, name):
    case = WidePrompt(q_heads=4, **CASES[name])
    case.run(library)
    case.judge()


class MiddlePrompt(Prompt):
    """head_dim 192: tiles have 96 keys, in boxes of 32 where a page has 64 slots."""

    DIMS, KEYS, VALUES = 384, slice(0, 192), slice(192, 384)


@pytest.mark.parametrize(
    "name", ["chunk", "page_3", "page_8", "page_256", "page_1_window", "splits_of_packed_requests"]
)
def test_attends_with_heads_of_192(library, name):
    case = MiddlePrompt(q_heads=4, **CASES[name])
    case.run(library)
    case.judge()


class NarrowPrompt(Prompt):
    """head_dim 64, in tiles of 256 rows and 64 keys."""

    DIMS, KEYS, VALUES = 128, slice(0, 64), slice(64, 128)


NARROW_CASES = [
    *("one_tile", "chunk", "two_requests", "edge_inside_a_page", "page_256", "page_1", "page_4", "page_1_window"),
    *("page_1_not_causal", "leftpad", "longer_than_keys", "attention_chunk", "sinks", "splits_of_packed_requests"),
]


@pytest.mark.parametrize("name", NARROW_CASES)
def test_attends_with_narrow_heads(library, name):
    case = NarrowPrompt(q_heads=4, **CASES[name] | {"deterministic": 1})
    case.run(library)
    case.judge()


@pytest.mark.parametrize("scale", [3.0, 30.0])
def test_attends_with_narrow_heads_where_scores_grow(library, scale):
    """Later keys have scores far above those that came first: weights beyond bfloat16, then beyond float32."""
    case = NarrowPrompt(lens=[400], q_lens=70, q_heads=4, page_size=16, scale=scale, deterministic=1)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("prompt", [Prompt, MiddlePrompt, WidePrompt])
@pytest.mark.parametrize("scale, splits", [(3.0, 1), (30.0, 1), (30.0, 2)])
def test_attends_where_scores_grow(library, prompt, scale, splits):
    """Weights grow until their reference moves; where they are beyond float32, a tile of rows is done once more."""
    case = prompt(
        lens=[700, 400], q_lens=[100, 70], q_heads=4, page_size=16, scale=scale, num_splits=splits, processors=3
    )
    case.run(library)
    case.judge()


class ThreeConsumers(Prompt):
    """head_dim 96, in tiles of 192 rows and 96 keys."""

    DIMS, KEYS, VALUES = 192, slice(0, 96), slice(96, 192)


@pytest.mark.parametrize("name", [*NARROW_CASES[:8], "window", "leftpad", "splits_of_packed_requests"])
def test_attends_with_three_consumers(library, name):
    case = ThreeConsumers(q_heads=4, **CASES[name] | {"deterministic": 1})
    case.run(library)
    case.judge()


@pytest.mark.parametrize("scale", [3.0, 30.0])
def test_three_consumers_where_scores_grow(library, scale):
    case = ThreeConsumers(lens=[500], q_lens=100, q_heads=4, page_size=16, scale=scale, deterministic=1)
    case.run(library)
    case.judge()


E4M3 = torch.float8_e4m3fn


BETWEEN = [
    (*dims, *dtypes)
    for dims in ((112, 80), (80, 112), (144, 176), (176, 256))
    for dtypes in ((torch.bfloat16, None), (torch.bfloat16, E4M3), (E4M3, None))
    if max(dims) <= 128 or dtypes[0] != E4M3  # 8-bit products end at 128
]


@pytest.mark.parametrize("head_dim, head_dim_v, dtype, kv_dtype", BETWEEN, ids=str)
@pytest.mark.parametrize("page_size, splits", [(64, 1), (1, 1), (64, 2)])
def test_head_dims_between_those_of_tiles(library, head_dim, head_dim_v, page_size, splits, dtype, kv_dtype):
    """A row ends where its own dimensions do: behind it lies another one's, or what nobody may see."""
    options = {"lens": [300, 40], "q_lens": [40, 9], "q_heads": 4, "dtype": dtype, "kv_dtype": kv_dtype or dtype}
    case = Prompt.of_head_dim(head_dim, head_dim_v)(page_size=page_size, num_splits=splits, **options)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("prompt, rows", [(Prompt, 64), (Prompt, 65), (WidePrompt, 64), (WidePrompt, 65)])
def test_rows_that_fill_some_warpgroups(library, prompt, rows):
    """The others of a block have none, and nobody waits for them; nor does the next tile of rows."""
    case = prompt(lens=[300] * 5, q_lens=rows, q_heads=1, page_size=16, processors=2, num_splits=1)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("rows", [64, 128, 129])
def test_rows_that_fill_some_of_three_warpgroups(library, rows):
    case = ThreeConsumers(lens=[500] * 5, q_lens=rows, q_heads=1, page_size=16, processors=2, deterministic=1)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("prompt", [Prompt, ThreeConsumers, WidePrompt, NarrowPrompt])
def test_keys_of_a_tile_that_few_rows_see(library, prompt, scale):
    """Two keys stand in the last tile, whatever its size. Of four tokens, whose rows are a warp's, the last two see
    them; the others have their first score in the tile before."""
    case = prompt(lens=[386], q_lens=32, q_heads=4, page_size=16, scale=scale, deterministic=1)
    case.run(library)
    case.judge()


SHORT_PROMPTS = {
    "even": {"lens": [230, 230]},
    "uneven": {"lens": [200, 250, 0, 70]},
    "page_1": {"lens": [130, 250], "page_size": 1},
    "page_8": {"lens": [250, 200], "page_size": 8},
    "window": {"lens": [250, 250], "page_size": 16, "window": (60, 0)},
    "sinks": {"lens": [250, 230], "sinks": True},
    "leftpad": {"lens": [250, 240], "page_size": 16, "leftpads": [37, 0]},
    "scores_grow": {"lens": [250, 230], "page_size": 16, "scale": 3.0},
    "scores_grow_more": {"lens": [250, 230], "page_size": 16, "scale": 30.0},
}


@pytest.mark.parametrize("name", SHORT_PROMPTS)
def test_attends_to_short_prompts(library, name):
    """head_dim 128 without keys before the prompts: tiles of 192 rows and 64 keys, three for every multiprocessor."""
    options = SHORT_PROMPTS[name]
    case = Prompt(q_heads=4, q_lens=options["lens"], processors=2, **options)
    assert case.run(library).rows == 192
    case.judge()


WHOLE_TOKENS = [
    (Prompt, 3, {"num_splits": 1}),
    (Prompt, 5, {"window": (60, 0)}),
    (Prompt, 7, {"num_splits": 1, "page_size": 1}),
    (Prompt, 5, {"dtype": E4M3}),
    (Prompt, 3, {"kv_dtype": E4M3}),
    (MiddlePrompt, 12, {}),
    (WidePrompt, 7, {"sinks": True}),
    (NarrowPrompt, 7, {"window": (60, 0)}),
    (ThreeConsumers, 5, {"leftpads": [37, 0, 3]}),
]


@pytest.mark.parametrize("prompt, group, options", WHOLE_TOKENS)
def test_tiles_of_whole_tokens(library, prompt, group, options):
    """Where rows of the kernel are no multiple of the group, a few stay empty. What stood in their place matters to
    nobody."""
    sizes = {"lens": [250, 120, 200], "q_lens": [100, 120, 33], "q_heads": 2 * group, "kv_heads": 2, "processors": 2}
    results = []
    for fill in (0xFF, 0x7F):  # NaN, and the largest numbers
        case = prompt(**sizes, **{"page_size": 16, "fill": fill} | options)
        numbers = case.run(library)
        case.judge()
        assert numbers.blocks == 2 and numbers.tile_rows == numbers.rows // group * group < numbers.rows
        results.append((case.out.clone(), case.lse.clone()))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_attends_with_many_narrow_rows(library):
    case = NarrowPrompt(lens=[300, 270], q_lens=[300, 90], q_heads=4, page_size=16, processors=3, window=(-1, -1))
    assert case.run(library).blocks == 3
    case.judge()


# 8-bit q and cache, whose values are transposed on their way
E4M3_CASES = [
    *("one_tile", "two_requests", "edge_inside_a_page", "page_256", "page_3", "page_4", "page_1_window", "leftpad"),
    *("longer_than_keys", "attention_chunk", "sinks", "three_splits", "splits_of_packed_requests"),
]


@pytest.mark.parametrize("name", E4M3_CASES)
def test_attends_in_8_bits(library, name):
    case = Prompt(q_heads=4, dtype=torch.float8_e4m3fn, **CASES[name])
    case.run(library)
    case.judge()


@pytest.mark.parametrize("name", E4M3_CASES)
def test_attends_in_8_bits_with_narrow_heads(library, name):
    case = NarrowPrompt(q_heads=4, dtype=torch.float8_e4m3fn, **CASES[name] | {"deterministic": 1})
    case.run(library)
    case.judge()


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_attends_in_8_bits_where_scores_grow(library, scale):
    """Later keys have scores above those that came first: weights beyond e4m3. Or all scores are the same."""
    case = NarrowPrompt(
        lens=[500], q_lens=70, q_heads=4, page_size=16, dtype=torch.float8_e4m3fn, scale=scale, deterministic=1
    )
    case.run(library)
    case.judge()


def test_adds_wide_partials_together(library):
    """Several warps add the partials of a row, which has more dimensions than they do at a time."""
    case = WidePrompt(lens=[1100], q_lens=3, q_heads=4, page_size=16, num_splits=9, sinks=True)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_attends_in_8_bits_with_three_consumers(library, scale):
    """head_dim 128, in tiles of 192 rows: 6 of them instead of 9."""
    dtype = torch.float8_e4m3fn
    case = Prompt(lens=[400], q_lens=288, q_heads=4, page_size=16, dtype=dtype, scale=scale, processors=1)
    case.run(library)
    case.judge()


# An 8-bit cache of 16-bit q, which both become float16
NARROW = [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e5m2)]
NARROW_CASES = [
    *("one_tile", "two_requests", "edge_inside_a_page", "page_1_window", "page_3", "leftpad", "longer_than_keys"),
    *("sinks", "three_splits", "splits_of_packed_requests"),
]


@pytest.mark.parametrize("dtype, kv_dtype", NARROW)
@pytest.mark.parametrize("name", NARROW_CASES)
def test_attends_to_an_8_bit_cache(library, name, dtype, kv_dtype):
    case = Prompt(q_heads=4, dtype=dtype, kv_dtype=kv_dtype, **CASES[name])
    case.run(library)
    case.judge()


@pytest.mark.parametrize("name", ["chunk", "page_3", "page_1_window", "splits_of_packed_requests"])
def test_attends_to_an_8_bit_cache_with_wide_heads(library, name):
    case = WidePrompt(q_heads=4, kv_dtype=torch.float8_e4m3fn, **CASES[name])
    case.run(library)
    case.judge()


@pytest.mark.parametrize("prompt", [Prompt, WidePrompt])
def test_widens_8_bit_queries(library, prompt):
    """Where products of 8 bits do not serve: two formats, or a head_dim above 128."""
    kv_dtype = torch.float8_e5m2 if prompt is Prompt else torch.float8_e4m3fn
    case = prompt(lens=[300, 120], q_lens=[40, 70], q_heads=6, dtype=torch.float8_e4m3fn, kv_dtype=kv_dtype)
    case.run(library)
    assert case.judge() < 1e-2


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("features", [{}, {"alibi": True, "softcap": 2.0}, {"softcap": 100.0, "window": (-1, -1)}])
def test_divides_queries_that_float16_does_not_hold(library, size, features):
    case = Prompt(lens=[300], q_lens=40, q_heads=4, kv_dtype=torch.float8_e4m3fn, scale=192**-0.5 / size, **features)
    case.q *= size
    case.run(library)
    case.judge()


def test_v_descale_of_an_idle_request_does_not_matter(library):
    """It has no keys, so its result is 0: nobody may have written its scale."""
    case = Prompt(
        lens=[0, 100], q_lens=40, q_heads=4, kv_dtype=torch.float8_e4m3fn, v_descales=[torch.nan, 0.5], sinks=True
    )
    case.run(library)
    case.judge()


@pytest.mark.parametrize("score", [1e5, 5e6, 1e8, 1e11, 1e30, -1e5, -1e8, -1e11, -1e30])
@pytest.mark.parametrize(
    "prompt, options",
    [
        (Prompt, {}),
        (WidePrompt, {}),
        (NarrowPrompt, {"deterministic": 1}),
        (ThreeConsumers, {"deterministic": 1}),
        (Prompt, {"dtype": torch.float8_e4m3fn}),
        (Prompt, {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2}),
    ],
)
def test_scores_far_out(library, prompt, options, score):
    prompt(lens=[400], q_lens=40, q_heads=4, window=(-1, -1), **options).judge_scores_far_out(library, score)


def test_keys_of_few_rows_are_cut_by_themselves(library):
    case = Prompt(lens=[1200], q_lens=20, q_heads=4, page_size=16)
    assert case.run(library).splits == 4  # 1 tile of rows for 4 multiprocessors of an H100
    case.judge()


@pytest.mark.parametrize("packed", [False, True])
def test_long_requests_are_cut_into_more_splits(library, packed):
    lens, q_lens = [3000, 40, 700, 0], [20, 1, 33, 2] if packed else 20
    case = Prompt(lens=lens, q_lens=q_lens, q_heads=4, page_size=16, processors=16, sinks=True)
    numbers = case.run(library)
    assert 1 < numbers.splits < numbers.most_splits
    case.judge()


@pytest.mark.parametrize("packed", [False, True])
def test_many_requests_of_different_lengths(library, packed):
    """Four warps look at them together. The keys of some are cut, those of the others are not, and the second kernel
    leaves their rows alone."""
    lens = [2500 if b % 10 == 0 else 60 + 7 * b for b in range(40)]
    q_lens = [1 + b % 9 for b in range(40)] if packed else 5
    case = Prompt(lens=lens, q_lens=q_lens, q_heads=4, page_size=16, processors=64)
    numbers = case.run(library)
    assert numbers.splits < numbers.most_splits
    case.judge()


@pytest.mark.parametrize("batch", [31, 41])
def test_ends_where_cu_seqlens_q_falls(library, batch):
    """A GPU does not check it. Requests share tokens then, and there are more tiles than all tokens have."""
    q_lens = [1000 if b % 2 == 0 else -1000 for b in range(batch)]
    sizes = {"q_heads": 4, "page_size": 16, "processors": 132, "deterministic": 1, "max_q_len": 500}
    case = Prompt(lens=[300] * batch, q_lens=q_lens, **sizes)
    assert case.total_q == 1000
    case.run(library)


@pytest.mark.parametrize("prompt", [Prompt, MiddlePrompt, WidePrompt])
@pytest.mark.parametrize("seed", range(4))
def test_attends_some_call(library, prompt, seed):
    rng = random.Random(seed)
    lens = [rng.choice([0, 128, rng.randint(1, 400)]) for _ in range(rng.randint(1, 3))]
    case = prompt(
        lens=lens,
        q_lens=[rng.randint(0, 60) for _ in lens[1:]] + [rng.randint(1, 60)],
        q_heads=rng.choice([4, 6, 10]),
        kv_heads=2,
        page_size=(8, 16, 1, rng.choice([2, 24, 40, 128]))[seed],
        processors=rng.choice([1, 3]),
        num_splits=rng.choice([0, 0, 2]),
        seed=seed,
    )
    case.run(library)
    case.judge()
