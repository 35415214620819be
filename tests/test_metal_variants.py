"""Every feature once more with the kernels compiled in other ways, each in its own process; what they count."""

import re
import subprocess
import sys
from pathlib import Path

import metal_build
import pytest

TESTS = Path(__file__).resolve().parent
COUNT = TESTS.parent / "benchmarks" / "count_metal.py"

# Which of the tests marked sanitize, and a number that is a little below theirs.
PICKED = {
    "fast": ("", 610),  # fast math
    "asan": ("", 610),  # with UndefinedBehaviorSanitizer
    # An error also for memory that two threadgroups of a dispatch share: these wrong requests overlap, in rows of q.
    "count": ("not (cu_seqlens_q and falls)", 610),
    # Lanes are threads, only barriers order them; four times as slow.
    "tsan": ("test_named or test_feature_alone or test_more_or_fewer_rows", 110),
}


@pytest.mark.runs_tests
@pytest.mark.parametrize("variant", PICKED)
def test_every_feature(variant):
    picked, least = PICKED[variant]
    metal_build.extension([variant])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--capture=sys",  # what a sanitizer writes must not be lost with the process
        "-m",
        "sanitize",
        "-k",
        picked,
        TESTS,
    ]
    # Threads are the host's, which is compiled one way only.
    command += [f"--ignore={TESTS / 'test_threads.py'}", f"--ignore={Path(__file__)}"]
    run = subprocess.run(command, env=metal_build.environment(variant), capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= least, run.stdout


# Of the names of cases: a short context, groups of 1, 2, 4 and 8, 16 rows, an 8-bit cache.
PARTS = ["B4", "B1 32/8 D128, 1024", "64/8", "4 tokens", "8192 keys, fp8"]


@pytest.mark.runs_tests
def test_keys_and_values_are_loaded_once():
    """No byte of K and V is loaded twice, and lanes exchange little."""
    command = [sys.executable, COUNT, "--ours", *PARTS]
    run = subprocess.run(command, env=metal_build.environment("count"), capture_output=True, text=True, check=True)
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines()[2:]]
    assert len(rows) >= len(PARTS)
    for name, _, loaded, _, _, exchanges, _, _, _, dispatches in rows:
        assert 0.99 < float(loaded) < 1.05, name
        assert float(exchanges) < (1.5 if "50 keys" in name else 0.8), name
        assert int(dispatches) <= 2, name
