"""The CUDA planners for Python, without a GPU: plans.cpp, compiled for the host and called through ctypes."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SOURCES = (
    "tests/cuda/plans.cpp",
    *(f"paged_decode_cuda/{name}.cpp" for name in ("plan", "fallback/plan", "decode/plan", "float32/plan")),
)
FOLDERS = ("paged_decode_cuda", "torch-ext", "tests/cuda")  # of headers
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-DPD_POSITION=int32_t"),
    *("-fsanitize=undefined", "-fno-sanitize-recover", "-fsanitize-undefined-trap-on-error"),
]
CALL = [
    *("processors", "shared_per_block", "shared_per_processor"),
    *("batch", "kv_heads", "group", "head_dim", "kv_bytes", "total_q", "max_q_len"),
    *("page_size", "max_pages", "window_left", "window_right", "chunk", "num_splits", "deterministic", "append"),
    "max_seqlen_k",
    *("cu_seqlens_q", "cache_seqlens", "leftpad"),
    "capability",  # 90: warpgroups multiply
]
NUMBERS = [
    *("route", "blocks", "warps", "blocks_per_processor", "shared_bytes", "workspace_bytes"),
    *("balanced", "rows_per_tile", "tile_keys", "splits", "halves", "wgmma"),
]
SHARE = [
    *("block", "b", "head", "first_row", "rows"),
    *("tile", "tile_end", "first", "partials", "lines", "key_begin", "key_end"),
]
SIZES = ["rows", "tile_keys", "stages", "warps", "blocks", "most_warps", "stage_bytes", "warp_bytes", "block_bytes"]
PREFILL_SIZES = [
    *("rows", "keys", "threads", "consumers", "key_stages", "value_stages", "query_stages"),
    *("producer_registers", "consumer_registers", "shared_bytes"),
]
GPUS = {  # multiprocessors, shared memory of a block and of a multiprocessor
    "sm_90": (132, 232448, 233472),
    "sm_80": (108, 166912, 167936),
    "sm_86, sm_89, sm_120": (84, 101376, 102400),
}


def structure(names):
    return type("S", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_int64) for name in names]})


Call, Numbers, Share, Sizes, PrefillSizes = map(structure, (CALL, NUMBERS, SHARE, SIZES, PREFILL_SIZES))


def compiler():
    """None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def load() -> ctypes.CDLL:
    """The library, compiled where something changed."""
    files = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*")) if path.is_file()]
    code = [path.read_bytes() for path in files if path.suffix in (".h", ".cuh", ".cpp")]
    digest = hashlib.sha256(b"\0".join([repr((compiler(), FLAGS)).encode(), *code])).hexdigest()[:12]
    target = REPOSITORY / "build" / ".planner" / f"{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        include = [f"-I{REPOSITORY / folder}" for folder in FOLDERS]
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler(), *FLAGS, *include, *SOURCES, "-o", fresh], check=True, cwd=REPOSITORY)
        os.replace(fresh, target)
    library = ctypes.CDLL(str(target))
    library.make_plan.restype = ctypes.c_int64
    return library


def plan(library, gpu=GPUS["sm_90"], shares=0, lens=(), q_lens=None, leftpads=None, **options):
    """(numbers of the plan, what every block does). Lengths are those before an append. cu_seqlens_q begins with
    first_q, 0 unless said otherwise, and falls where an entry of q_lens is below 0.
    """
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
        first_q = options.pop("first_q", 0)
        begins = [first_q + sum(q_lens[:b]) for b in range(len(lens) + 1)]
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


def decode_sizes(library, kv_bytes: int, head_dim: int, row_tiles: int):
    """The sizes of an instance of the decode kernel."""
    sizes = Sizes()
    library.decode_sizes(kv_bytes, head_dim, row_tiles, ctypes.byref(sizes))
    return sizes


def prefill_sizes(library, head_dim: int, head_dim_v: int):
    """The sizes of an instance of the prefill kernel."""
    sizes = PrefillSizes()
    library.prefill_sizes(head_dim, head_dim_v, ctypes.byref(sizes))
    return sizes
