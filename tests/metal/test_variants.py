"""Every feature once more with the kernels compiled in other ways, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import metal_build
import pytest

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("variant", "picked"),
    [
        ("fast", ""),  # fast math, Metal's default
        ("asan", ""),  # with UndefinedBehaviorSanitizer
        ("count", ""),  # an error also for memory that two threadgroups of a dispatch share
        ("tsan", "test_named or test_feature_alone"),  # lanes are threads, only barriers order them; four times as slow
    ],
)
def test_every_feature(variant, picked):
    metal_build.extension([variant])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        "sanitize",
        "-k",
        picked,
        TESTS,
    ]
    environment = metal_build.environment(variant)
    run = subprocess.run([*command, f"--ignore={TESTS / 'metal'}"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 50, run.stdout
