"""Every instruction set that the processor runs, forced in a process of its own (the choice is made once)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# What the processor must have for each path, as the kernel of the operating system names it.
NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi"},
}

pytestmark = pytest.mark.skipif(
    os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu") != "cpu", reason="instruction sets are the CPU's"
)


def available(isa):
    if isa == "portable":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return NEEDS[isa] <= set(flags.split())


*OTHERS, BEST = (isa for isa in NEEDS if available(isa))
CASES = "test_named or test_feature_alone or test_pair or test_random or test_rotary or test_fp8_rounds"
FILES = ("test_decode.py", "test_features.py", "test_append.py")


def environment(isa):
    return os.environ | {"PAGED_ATTN_CPU_ISA": isa, "PYTHONPATH": str(TESTS)}


def python(isa, code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(isa), cwd=TESTS, capture_output=True, text=True)


ASK = """
import conftest, kernels
paged_attn = kernels.get_kernel(conftest.KERNEL, version=1, backend="cpu", trust_remote_code=True)
print(paged_attn.cpu_isa())
"""


@pytest.mark.parametrize("isa", NEEDS)
def test_forced_path(isa):
    """The path asked for is the path taken."""
    if not available(isa):
        pytest.skip(f"this processor has no {isa}")
    asked = python(isa, ASK)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == isa


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The tests of the other paths, started together: one worker thread each, since the threads are not the path's."""
    started = {}
    for isa in OTHERS:
        log = tmp_path_factory.mktemp(isa) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", CASES, *FILES]
        with log.open("w") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": TESTS}
            process = subprocess.Popen(command, env=environment(isa) | {"OMP_NUM_THREADS": "1"}, **options)
        started[isa] = process, log
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("isa", OTHERS)
def test_cases(isa, runs):
    """Every named case, feature, pair and random case on the paths that the other tests do not take."""
    process, log = runs[isa]
    process.wait()
    assert process.returncode == 0, log.read_text()[-6000:]


def test_best_path_is_the_default():
    asked = python("", ASK)
    assert asked.stdout.strip() == BEST, asked.stderr


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", *(isa for isa in NEEDS if not available(isa))])
def test_unknown_or_missing_path(isa):
    """The error names what was asked and what there is."""
    asked = python(isa, ASK)
    assert asked.returncode != 0
    message = asked.stderr.strip().splitlines()[-1]
    assert "RuntimeError" in message and "PAGED_ATTN_CPU_ISA" in message and isa in message
    for name in NEEDS:
        assert name in message or not available(name)
