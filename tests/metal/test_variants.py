"""Every feature once more with the kernels compiled in other ways, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import metal_build
import pytest

TESTS = Path(__file__).resolve().parent.parent


PICKED = {
    "fast": "",  # fast math, Metal's default
    "asan": "",  # with UndefinedBehaviorSanitizer
    # An error also for memory that two threadgroups of a dispatch share: these wrong requests overlap, in rows of q.
    "count": "not (cu_seqlens_q and falls)",
    "tsan": "test_named or test_feature_alone",  # lanes are threads, only barriers order them; four times as slow
}


@pytest.mark.parametrize("variant", PICKED)
def test_every_feature(variant):
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
        PICKED[variant],
        TESTS,
    ]
    # Threads are the host's, which is compiled one way only.
    command += [f"--ignore={TESTS / name}" for name in ("metal", "test_threads.py")]
    run = subprocess.run(command, env=metal_build.environment(variant), capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 50, run.stdout
