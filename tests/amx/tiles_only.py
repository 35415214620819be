"""A plugin of pytest for the build with emulated tiles: the tests whose products may be tiles.

Those are the cases with q in bfloat16 or 8 bits. Of the tests of a function every third is left, all with
PAGED_ATTN_TILE_TESTS=all; all of test_amx.py in any case but for every second edge.
"""

import itertools
import os

EVERY = {"test_edges_of_tiles": 2, "test_many_tiles": 1}
ALL = os.environ.get("PAGED_ATTN_TILE_TESTS") == "all"


def in_tiles(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    dtype = parameters["case"].dtype if "case" in parameters else parameters.get("dtype", "bfloat16")
    return dtype not in ("float16", "float32")


def pytest_collection_modifyitems(config, items):
    kept = []
    for name, group in itertools.groupby(filter(in_tiles, items), key=lambda item: item.function.__name__):
        kept += list(group)[:: 1 if ALL else EVERY.get(name, 3)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
