"""The matrix unit of Intel's processors (AMX): shapes around the edges of its tiles, everywhere on the processor's own
path, and all features in tiles, on a processor that has them or on a build that emulates them (amx/emulated_tiles.h).
"""

import itertools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case
from compare import check
from test_isa import ASK, CHOSEN, available

TESTS = Path(__file__).resolve().parent
BUILD_TOOL = TESTS.parent / "tools" / "local_build.py"
EMULATED = TESTS.parent / "build-emulated-amx"

pytestmark = pytest.mark.skipif(os.environ["PAGED_ATTN_TEST_DEVICE"] != "cpu", reason="the matrix unit is the CPU's")

# Tiles have 16 rows and 32 elements of head_dim or keys; parts 32 rows, panels 64 keys, steps of the loop 128 keys, and
# items 512 rows, which two heads reach with 256.
ROWS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 255, 257)
KEYS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 256, 300)
KEYS_OF_ITEMS = {255: KEYS[::5], 257: KEYS[4::5]}  # they take long
DIMS = ((8, 8), (32, 64), (59, 59), (64, 96), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512))
MASKS = (
    {},
    {"causal": True},
    {"window": (40, 7)},
    {"window": (3, 0), "causal": True},
    {"leftpad": True, "causal": True},
    {"chunk": 24},
    {"causal": True, "softcap": 2.5},
    {"alibi": "head", "causal": True},
    {"sink": "float32", "causal": True},
)
WAYS = (
    {},
    {"kv_dtype": "float8_e4m3fn", "descale": "full"},
    {"num_splits": 3},
    {"kv_dtype": "float8_e5m2"},
    {"scale": -0.1},
)
DTYPES = ("bfloat16", "float16", "bfloat16")


def edges():
    """Every number of rows with every number of keys, but for items; the rest goes around."""
    ways = WAYS + WAYS[:1] * 2
    rest = zip(*map(itertools.cycle, (DIMS, MASKS + MASKS[:2], [(dtype, way) for dtype in DTYPES for way in ways])))
    for (rows, keys), ((dim, dim_v), mask, (dtype, way)) in zip(itertools.product(ROWS, KEYS), rest):
        if keys not in KEYS_OF_ITEMS.get(rows, KEYS):
            continue
        q_heads = 2 if rows in KEYS_OF_ITEMS else 1 + keys % 2
        page_size = (16, 0, 64, 1)[(rows + keys) % 4]
        yield Case(
            batch=2, lens=(keys, max(1, keys - 9)), q_len=rows, q_heads=q_heads, kv_heads=1, head_dim=dim,
            head_dim_v=dim_v, page_size=page_size, dtype=dtype, **mask, **way,
        )  # fmt: skip


MLA = Case(batch=2, kv_len=700, q_heads=128, kv_heads=1, head_dim=576, head_dim_v=512, layout="latent")
LARGE = {
    "mla": MLA,
    "mla_verify": replace(MLA, kv_len=300, q_len=3, causal=True),
    "mla_qv": replace(MLA, kv_len=300, q_len=3, causal=True, q_heads=64, head_dim=64, layout="plain", qv=True),
    "prefill": Case(batch=2, lens=(0, 0), append=300, q_len=300, q_heads=8, head_dim=128, causal=True),
    "chunk_of_prefill": Case(batch=1, lens=(1000,), q_len=300, q_heads=8, head_dim=128, causal=True),
    "draft": Case(batch=6, kv_len=500, q_len=8, varlen_q=True, q_heads=8, head_dim=128, causal=True),
    "decode_of_96": Case(batch=3, kv_len=300, q_heads=8, head_dim=96),
    "decode_of_32": Case(batch=3, kv_len=300, q_heads=8, head_dim=32, page_size=1),
    "decode_to_160": Case(batch=3, kv_len=300, q_len=3, head_dim=64, head_dim_v=160, causal=True),
    "large_scores": Case(batch=2, kv_len=400, q_len=40, head_dim=128, scale=3.0),
    "scale_0": Case(batch=2, kv_len=90, q_len=40, head_dim=128, scale=0.0, causal=True),
}
LARGE |= {f"{name}_float16": replace(LARGE[name], dtype="float16") for name in LARGE}


@pytest.mark.every_isa
@pytest.mark.parametrize("case", list(edges()), ids=str)
def test_edges_of_tiles(paged_attn, device, case):
    check(paged_attn, case, device)


@pytest.mark.every_isa
@pytest.mark.parametrize("name", LARGE)
def test_many_tiles(paged_attn, device, name):
    check(paged_attn, LARGE[name], device)


def test_taken_where_the_processor_has_it(paged_attn):
    if not available("avx512_amx"):
        pytest.skip("this processor has no AMX")
    if "PAGED_ATTN_CPU_ISA" not in os.environ:
        assert paged_attn.cpu_isa() == ("avx512_amx_fp16" if available("avx512_amx_fp16") else "avx512_amx")


@pytest.fixture(scope="module")
def tiles_emulated():
    """The environment of a process whose processor is said to have tiles; there even a single row goes through them."""
    if platform.machine() != "x86_64" or not available("avx512_bf16"):
        pytest.skip("the emulation of AMX wants a processor with AVX-512 BF16")
    if not BUILD_TOOL.exists() or not shutil.which("g++"):
        pytest.skip("the emulation of AMX is built with tools/local_build.py and g++")
    cxx = f"g++ -include {TESTS / 'amx' / 'emulated_tiles.h'} -DPD_MIN_TILE_ROWS=1"
    command = [sys.executable, BUILD_TOOL, "--backend", "cpu", "--cxx", cxx, "--out", EMULATED]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    variant = built.stdout.strip().splitlines()[-1]
    environment = os.environ | {"LOCAL_KERNELS": f"org/paged-attn={variant}", "PYTHONPATH": str(TESTS)}
    for name in ("PAGED_ATTN_BUILD", "PAGED_ATTN_CPU_ISA"):
        environment.pop(name, None)
    return environment


def run(environment, *command):
    return subprocess.run([sys.executable, *command], env=environment, cwd=TESTS, capture_output=True, text=True)


@pytest.mark.runs_tests
@pytest.mark.parametrize("isa, fewest", [("avx512_amx", 400), ("avx512_amx_fp16", 150)])
def test_cases_in_emulated_tiles(tiles_emulated, isa, fewest):
    """The cases of every feature and the edges above; amx/tiles_only.py says which of them. All by hand:
    PAGED_ATTN_TILE_TESTS=all."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tiles_only", "--tb=short", "-m", "every_isa"]
    path = f"{TESTS}{os.pathsep}{TESTS / 'amx'}"
    unit = {"avx512_amx": "bf16", "avx512_amx_fp16": ""}[isa]
    asked = {"PAGED_ATTN_CPU_ISA": isa, "PAGED_ATTN_EMULATED_AMX": unit, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = run(tiles_emulated | asked, *command)
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert int(ran.stdout.split(" passed")[0].split()[-1]) > fewest, ran.stdout[-2000:]


@pytest.mark.runs_tests
@pytest.mark.parametrize("unit, isa", [("", "avx512_amx_fp16"), ("bf16", "avx512_amx")])
def test_emulated_path_is_the_default(tiles_emulated, unit, isa):
    asked = run(tiles_emulated | {"PAGED_ATTN_EMULATED_AMX": unit}, "-c", ASK)
    assert asked.stdout.strip() == isa, asked.stderr


@pytest.mark.runs_tests
def test_refused_permission(tiles_emulated):
    """Where Linux refuses tiles the next path is taken, and says why."""
    asked = run(tiles_emulated | {"PAGED_ATTN_EMULATED_AMX": "refused"}, "-c", ASK)
    path, _, reason = asked.stdout.strip().partition(" ")
    assert path == [isa for isa in CHOSEN if "amx" not in isa][-1], asked.stderr
    assert reason == "(no AMX: the operating system refused the permission to use tiles)"


# Of a call in each dtype: the ways in tiles that `why_not` has.
WHY = """
import conftest, kernels, torch
paged_attn = kernels.get_kernel(conftest.KERNEL, version=1, backend="cpu", trust_remote_code=True)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    x = torch.zeros(1, 1, 1, 64, dtype=dtype)
    print(*(way for way in paged_attn.explain(x, x, x).why_not if way.startswith("tiles")), sep=",")
"""


@pytest.mark.runs_tests
def test_refused_permission_is_a_reason_in_the_dtypes_of_tiles(tiles_emulated):
    asked = run(tiles_emulated | {"PAGED_ATTN_EMULATED_AMX": "refused"}, "-c", WHY)
    assert asked.stdout.splitlines() == ["tiles_bf16", "tiles_fp16", ""], asked.stderr


@pytest.mark.runs_tests
def test_forced_without_permission(tiles_emulated):
    """What was asked for by name and cannot be had is an error."""
    asked = run(tiles_emulated | {"PAGED_ATTN_EMULATED_AMX": "refused", "PAGED_ATTN_CPU_ISA": "avx512_amx"}, "-c", ASK)
    assert asked.returncode != 0 and "PAGED_ATTN_CPU_ISA: expected one of " in asked.stderr
