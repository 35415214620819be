"""The planners of the routes for long queries and their order of tiles for Python, without a GPU: prefill.cpp, compiled
for the host and called through ctypes.
"""

import ctypes
import hashlib
import os
import subprocess

from planner import FLAGS, FOLDERS, REPOSITORY, compiler, structure

SOURCES = (
    "tests/cuda/prefill.cpp",
    *(f"paged_decode_cuda/{name}.cpp" for name in ("plan", "decode/plan", "prefill_mma/plan")),
    *sorted((REPOSITORY / "paged_decode_cuda" / "prefill").glob("*.cpp")),
)
CALL = [
    *("capability", "processors", "shared_per_block", "shared_per_processor", "read_rate"),
    *("batch", "kv_heads", "group", "head_dim", "head_dim_v", "q_bytes", "kv_bytes", "total_q", "max_q_len"),
    *("page_size", "paged", "packed", "qv"),
    *("window_left", "window_right", "chunk", "softcap", "num_splits", "deterministic"),
    "max_seqlen_k",
    *("l2_keys", "tile_rows", "splits", "most_splits", "splits_wanted", "cut_from_tiles"),
    *("least_split_keys", "least_long_split_keys", "one_round"),
    *("cu_seqlens_q", "cache_seqlens", "leftpad"),
]
NUMBERS = [
    *("rows", "tile_rows", "keys", "threads", "shared_bytes", "all_scores", "box_rows"),
    *("items", "blocks", "l2_keys", "splits", "most_splits", "splits_wanted", "cut_from_keys"),
    *("least_split_keys", "least_long_split_keys", "one_round", "combine_warps", "combine_blocks", "combine_bytes"),
]
MMA_NUMBERS = [
    *("head_dim", "keys", "widens", "rows", "threads", "shared_bytes"),
    *("items", "blocks", "blocks_per_processor", "l2_keys"),
]
TILE = ["b", "head", "first_row", "rows", "key_begin", "key_end", "split", "first_tile", "tiles"]
Call, Numbers, MmaNumbers, Tile = map(structure, (CALL, NUMBERS, MMA_NUMBERS, TILE))


def part_of(path, begin, end):
    """The text of a file from `begin` up to `end`."""
    text = (REPOSITORY / "paged_decode_cuda" / path).read_text()
    for words in (begin, end):
        assert text.count(words) == 1, f"{path}: expected {words!r} once, found it {text.count(words)} times"
    return text[text.index(begin) : text.index(end)]


def header():
    """What a tile is, how its keys are cut, and in which order tiles are taken, without the barriers of a GPU."""
    return "\n".join(
        [
            '#include "items.cuh"\n#include "prefill/sizes.h"',
            "struct CUtensorMap {};\nstruct float2;\nstruct int2;",
            "namespace paged_attn {",
            part_of("prefill/shape.cuh", "// What the kernel reads beside the problem.", "// Barriers and messages"),
            part_of("prefill/row_tiles.cuh", "// Keys of a request, new", "}  // namespace paged_attn"),
            part_of("prefill/cuts.cuh", "constexpr float kFewRounds", "}  // namespace paged_attn"),
            part_of("prefill/schedule.cuh", "constexpr int kBucketBits", "}  // namespace paged_attn"),
            "}  // namespace paged_attn\n",
        ]
    )


def load() -> ctypes.CDLL:
    """The library, compiled where something changed."""
    files = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*")) if path.is_file()]
    code = [path.read_bytes() for path in files if path.suffix in (".h", ".cuh", ".cpp")]
    digest = hashlib.sha256(b"\0".join([repr((compiler(), FLAGS)).encode(), header().encode(), *code])).hexdigest()[:12]
    folder = REPOSITORY / "build" / ".planner" / f"prefill-{digest}"
    target = folder / "prefill.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prefill_host.h").write_text(header())
        include = [f"-I{folder}", *(f"-I{REPOSITORY / name}" for name in FOLDERS)]
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler(), *FLAGS, *include, *SOURCES, "-o", fresh], check=True, cwd=REPOSITORY)
        os.replace(fresh, target)
    library = ctypes.CDLL(str(target))
    library.prefill_order.restype = ctypes.c_int64
    library.prefill_refusal.restype = library.prefill_mma_refusal.restype = ctypes.c_char_p
    return library


def call_of(lens, q_lens=None, leftpads=None, **options):
    """The call, and what keeps its tables alive. Prompts of a Hopper GPU unless said otherwise."""
    defaults = {
        "capability": 90, "processors": 132, "shared_per_block": 232448, "shared_per_processor": 233472,
        "read_rate": 3352,
        "kv_heads": 4, "group": 4, "head_dim": 128, "q_bytes": 2, "kv_bytes": 2, "page_size": 16, "paged": 1,
        "window_left": -1, "l2_keys": 1 << 20, "splits": 1, "batch": len(lens),
    }  # fmt: skip
    options = defaults | options
    options.setdefault("head_dim_v", options["head_dim"])
    if q_lens is None:
        q_len = options.setdefault("max_q_len", 1000)
        options["total_q"] = q_len * len(lens)
    else:
        options = {"total_q": sum(q_lens), "max_q_len": max([0, *q_lens])} | options
    tables = {"cache_seqlens": lens, "leftpad": leftpads}
    tables["cu_seqlens_q"] = q_lens and [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
    call, keep = Call(), []
    for name, values in tables.items():
        if values is not None:
            keep.append((ctypes.c_int32 * max(1, len(values)))(*values))
            setattr(call, name, ctypes.addressof(keep[-1]))
    for name, value in options.items():
        assert name in CALL
        setattr(call, name, value)
    return call, keep


def refusal(library, *arguments, **options):
    call, _keep = call_of(*arguments, **options)
    return library.prefill_refusal(ctypes.byref(call)).decode()


def numbers_of(library, *arguments, **options):
    call, _keep = call_of(*arguments, **options)
    numbers = Numbers()
    library.prefill_numbers(ctypes.byref(call), ctypes.byref(numbers))
    return numbers


def mma_refusal(library, *arguments, **options):
    call, _keep = call_of(*arguments, **options)
    return library.prefill_mma_refusal(ctypes.byref(call)).decode()


def mma_numbers_of(library, *arguments, **options):
    call, _keep = call_of(*arguments, **options)
    numbers = MmaNumbers()
    library.prefill_mma_numbers(ctypes.byref(call), ctypes.byref(numbers))
    return numbers


def order_of(library, call, most):
    """(how many tiles there are, the first of them in their order)."""
    room = (Tile * (most + 1))()
    count = library.prefill_order(ctypes.byref(call), room, ctypes.c_int64(most + 1))
    return count, room[:most]
