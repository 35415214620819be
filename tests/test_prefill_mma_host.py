"""The kernel of the route prefill_mma on the host; see tests/blocks.py."""

import random

import pytest
import torch
from blocks import HOST, Case, compile_kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("prefill_mma")
    cuda = root / "paged_decode_cuda"
    kernel = "prefill_mma/kernel.cuh"
    # Aligned as the declaration asks for.
    in_shared_memory = (
        (kernel, "extern __shared__ __align__(128) uint8_t raw[];", "uint8_t* const raw = block_raw() + 128 - kSkew;"),
    )
    sources = ["prefill/facts.cpp", "prefill_mma/route.cu", "prefill_mma/plan.cpp", "decode/plan.cpp", "plan.cpp"]
    return compile_kernels(root, [*(cuda / name for name in sources), HOST / "prefill_mma.cpp"], in_shared_memory)


class Prompt(Case):
    NUMBERS = ("blocks", "keys")


def prompt(head_dim, head_dim_v=None):
    return Prompt.of_head_dim(head_dim, head_dim_v or head_dim)


CASES = {
    "one_tile": {"lens": [100], "q_lens": 20},
    "chunk": {"lens": [400], "q_lens": 50},
    "two_requests": {"lens": [300, 200], "q_lens": [70, 33]},
    "page_256": {"lens": [600], "q_lens": 40, "page_size": 256},
    "page_1": {"lens": [300, 140], "q_lens": [70, 40], "page_size": 1},
    "page_3": {"lens": [500], "q_lens": 33, "page_size": 3},
    "page_4": {"lens": [130, 1, 90], "q_lens": [40, 1, 5], "page_size": 4},
    "not_causal": {"lens": [300], "q_lens": 20, "page_size": 1, "window": (-1, -1)},
    "window": {"lens": [500], "q_lens": 40, "page_size": 16, "window": (150, 0)},
    "leftpad": {"lens": [500, 260], "q_lens": 40, "page_size": 16, "leftpads": [137, 3]},
    "longer_than_keys": {"lens": [10, 260], "q_lens": 40, "page_size": 8},
    "attention_chunk": {"lens": [300], "q_lens": 70, "chunk": 100},
    "sinks": {"lens": [300], "q_lens": 33, "sinks": True},
    "softcap": {"lens": [300], "q_lens": 33, "softcap": 2.0},
    "alibi": {"lens": [300], "q_lens": 33, "alibi": True},
    # Products of q and k so small that weights without slopes would not be too large.
    "alibi_of_small_products": {"lens": [300], "q_lens": 33, "alibi": True, "q_times": 0.01},
    "values_apart": {"lens": [300, 200], "q_lens": [70, 33], "page_size": 4, "values_apart": True},
    "alibi_not_causal": {"lens": [300], "q_lens": 33, "alibi": True, "window": (-1, -1)},
    "large_softcap": {"lens": [300], "q_lens": 33, "softcap": 100.0},
    "spare_tokens": {"lens": [300, 77], "q_lens": [33, 40], "spare": 9},
    # The last keys stand in a tile of their own, which only some rows of a warp see.
    "few_rows_see": {"lens": [386], "q_lens": 32},
    "few_rows_see_more": {"lens": [388], "q_lens": 32, "scale": 3.0},
    "negative_scale": {"lens": [300], "q_lens": 33, "scale": -0.05},
    # Scores far above those of the tiles before.
    "large_scale": {"lens": [600], "q_lens": 33, "scale": 2.0},
    "large_scale_fp16": {"lens": [600], "q_lens": 33, "scale": 2.0, "dtype": torch.float16},
    "fp16": {"lens": [300], "q_lens": 33, "dtype": torch.float16},
    "little_shared": {"lens": [300, 77], "q_lens": [50, 60], "little_shared": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_attends(library, name):
    case = prompt(128)(q_heads=4, **CASES[name])
    case.run(library)
    case.judge()


@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(64, 64), (40, 64), (96, 96), (72, 80), (192, 128), (256, 256), (160, 200)]
)
def test_head_dim(library, head_dim, head_dim_v):
    case = prompt(head_dim, head_dim_v)(q_heads=8, kv_heads=2, lens=[200, 30], q_lens=[40, 30], page_size=16)
    case.run(library)
    case.judge()


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (96, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("feature", [{"softcap": 2.0}, {"alibi": True}, {"scale": -0.05}], ids=str)
def test_scores_that_are_no_multiples(library, head_dim, head_dim_v, feature):
    """Of tiles of every size."""
    case = prompt(head_dim, head_dim_v)(q_heads=8, kv_heads=2, lens=[200, 30], q_lens=[40, 30], page_size=16, **feature)
    case.run(library)
    case.judge()


def test_head_dim_256_with_little_shared(library):
    case = prompt(256)(q_heads=8, kv_heads=2, lens=[200, 30], q_lens=[40, 30], page_size=16, little_shared=1)
    case.run(library)
    case.judge()


EIGHT_BIT = {
    "e4m3": {"lens": [300, 200], "q_lens": [70, 33]},
    "e5m2": {"lens": [300, 64], "q_lens": [40, 20], "kv_dtype": torch.float8_e5m2, "page_size": 16},
    "e4m3_fp16": {"lens": [300], "q_lens": 40, "dtype": torch.float16, "page_size": 3},
    "longer_than_keys": {"lens": [10, 260], "q_lens": 40, "page_size": 8},
    "window": {"lens": [500], "q_lens": 40, "page_size": 16, "window": (150, 0)},
}


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_attends_to_8_bits(library, name):
    case = prompt(128)(q_heads=4, **({"kv_dtype": torch.float8_e4m3fn} | EIGHT_BIT[name]))
    case.run(library)
    case.judge()


def test_v_descale_of_an_idle_request_does_not_matter(library):
    """It has no keys, so its result is 0: nobody may have written its scale."""
    case = prompt(128)(
        lens=[0, 100], q_lens=40, q_heads=4, kv_dtype=torch.float8_e4m3fn, v_descales=[torch.nan, 0.5], sinks=True
    )
    case.run(library)
    case.judge()


@pytest.mark.parametrize("score", [1e5, 5e6, 1e8, 1e11, 1e30, -1e5, -1e8, -1e11, -1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_far_out(library, dtype, score):
    case = prompt(128)(lens=[400], q_lens=40, q_heads=4, window=(-1, -1), dtype=dtype)
    case.judge_scores_far_out(library, score)


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (96, 96), (192, 128), (256, 256), (144, 208)])
def test_head_dim_of_8_bits(library, head_dim, head_dim_v):
    case = prompt(head_dim, head_dim_v)(
        q_heads=8, kv_heads=2, lens=[200, 30], q_lens=[40, 30], page_size=16, kv_dtype=torch.float8_e4m3fn
    )
    case.run(library)
    case.judge()


@pytest.mark.parametrize("seed", range(6))
def test_attends_some_call(library, seed):
    rng = random.Random(seed)
    lens = [rng.choice([0, 128, rng.randint(1, 400)]) for _ in range(rng.randint(1, 3))]
    case = prompt(rng.choice([64, 80, 128]))(
        lens=lens,
        q_lens=[rng.randint(0, 60) for _ in lens[1:]] + [rng.randint(40, 60)],
        q_heads=rng.choice([4, 6]),
        kv_heads=2,
        page_size=rng.choice([1, 2, 8, 16, 128]),
        processors=rng.choice([1, 3]),
        little_shared=rng.choice([0, 1]),
        seed=seed,
    )
    case.run(library)
    case.judge()
