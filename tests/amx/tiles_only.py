"""A plugin of pytest for the build with emulated tiles: a sample of the tests whose products may be tiles.

Those are the cases with q in bfloat16, float16 or 8 bits; on `avx512_amx_fp16` those in float16, for all else is as on
`avx512_amx`. Of the tests of a function every third is left (of float16 in pieces, which takes several products for
one, every ninth), all with PAGED_ATTN_TILE_TESTS=all; of test_amx.py every second edge and the rest.
"""

import itertools
import os

EVERY = {
    "test_edges_of_tiles": 2,
    "test_many_tiles": 1,
    "test_many_small_probabilities": 1,
    "test_scores_far_out": 1,
    "test_infinite_values_stay_in_their_columns": 1,
    "test_infinite_values_that_some_rows_see": 1,
    "test_a_key_of_minus_infinity_is_not_there": 1,
    "test_an_infinite_key_under_softcap": 1,
    "test_a_query_of_minus_infinity_sees_nothing": 1,
}
NONE = {"test_products_of_8_bit_caches"}  # the routes of processors, where few rows are no tiles
ALL = os.environ.get("PAGED_ATTN_TILE_TESTS") == "all"
IN_PIECES = os.environ["PAGED_ATTN_CPU_ISA"] == "avx512_amx"
DTYPES = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"} if IN_PIECES else {"float16"}


def dtype_of(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters["case"].dtype if "case" in parameters else parameters.get("dtype", "bfloat16")


def pytest_collection_modifyitems(config, items):
    kept = []
    in_tiles = (item for item in items if dtype_of(item) in DTYPES and item.function.__name__ not in NONE)
    for name, group in itertools.groupby(in_tiles, key=lambda item: item.function.__name__):
        every, found = EVERY.get(name, 3), list(group)
        kept += items_of([item for item in found if dtype_of(item) != "float16"], every)
        rarely = 9 if IN_PIECES and name not in EVERY else every
        kept += items_of([item for item in found if dtype_of(item) == "float16"], rarely)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def items_of(group, every):
    return group[:: 1 if ALL else every]
