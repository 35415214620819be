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
    flags = (
        next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
        if cpuinfo.exists()
        else ""
    )
    return NEEDS[isa] <= set(flags.split())


BEST = [isa for isa in NEEDS if available(isa)][-1]


def python(isa, *arguments):
    environment = os.environ | {"PAGED_ATTN_CPU_ISA": isa, "PYTHONPATH": str(TESTS)}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=TESTS, capture_output=True, text=True)


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
    asked = python(isa, "-c", ASK)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == isa


@pytest.mark.parametrize("isa", [isa for isa in NEEDS if isa != BEST])
def test_cases(isa):
    """Every named case, feature, pair and random case on the paths that the other tests do not take."""
    if not available(isa):
        pytest.skip(f"this processor has no {isa}")
    chosen = "test_named or test_feature_alone or test_pair or test_random or test_rotary or test_fp8_rounds"
    run = python(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", chosen, ".")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr


def test_best_path_is_the_default():
    asked = python("", "-c", ASK)
    assert asked.stdout.strip() == BEST, asked.stderr


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", *(isa for isa in NEEDS if not available(isa))])
def test_unknown_or_missing_path(isa):
    """The error names what was asked and what there is."""
    asked = python(isa, "-c", ASK)
    assert asked.returncode != 0
    message = asked.stderr.strip().splitlines()[-1]
    assert "RuntimeError" in message and "PAGED_ATTN_CPU_ISA" in message and isa in message
    for name in NEEDS:
        assert name in message or not available(name)
