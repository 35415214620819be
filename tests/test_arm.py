"""Arm's instruction sets, on an emulated processor: the CPU backend is cross-compiled into a program without torch
(arm/guest.cpp), which qemu runs, and the tests marked every_isa run with a build of the package that hands every call
to it (arm/host.cpp). On an Arm processor test_isa.py runs them without all this.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_isa import BEST, ask
from test_isa import pytest_of as pytest_here

TESTS = Path(__file__).resolve().parent
sys.path.append(str(TESTS / "arm"))

import arm_build  # noqa: E402

# The best path of some processors: all that qemu knows, Graviton 2 and Ampere Altra, the Raspberry Pi 4.
PROCESSORS = {"max": "neon_bf16", "neoverse-n1": "neon", "cortex-a72": "neon"}
PATHS = ("neon_bf16", "neon_fp16", "neon", "portable")
MISSING = ("cortex-a72", "neon_bf16")  # a processor and a path that it has not
REQUIRED = os.environ.get("PAGED_ATTN_TEST_EMULATORS") == "required"

pytestmark = [
    pytest.mark.skipif(os.environ["PAGED_ATTN_TEST_DEVICE"] != "cpu", reason="instruction sets are the CPU's"),
    pytest.mark.skipif(bool(arm_build.missing()) and not REQUIRED, reason=arm_build.missing()),
]


@pytest.fixture(scope="module", autouse=True)
def built():
    assert not arm_build.missing()
    arm_build.guest()
    arm_build.variant()


@pytest.fixture(scope="module")
def answers():
    """By the processor and the path that is asked for; "": none."""
    asked = [*((processor, "") for processor in PROCESSORS), *(("max", isa) for isa in PATHS), MISSING]
    return dict(zip(asked, ask([arm_build.environment(processor, isa) for processor, isa in asked])))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_best_path_is_the_default(processor, answers):
    assert answers[processor, ""] == PROCESSORS[processor]


@pytest.mark.parametrize("isa", PATHS)
def test_forced_path(isa, answers):
    assert answers["max", isa] == isa


def test_missing_path(answers):
    """What was asked for by name and the processor does not have is an error, which names what there is."""
    assert answers[MISSING].splitlines()[-1] == (
        "RuntimeError: PAGED_ATTN_CPU_ISA: expected one of neon, portable (what this processor runs), got neon_bf16"
    )


# The files whose tests marked every_isa run on a path; none: all files. neon_fp16 differs from neon for float16
# queries alone, which neon_bf16 has too. neon differs from neon_bf16 in how 16-bit numbers are multiplied: features in
# pairs, two thirds of the tests, take long here and run on one of them.
SELECTED = {
    "neon_bf16": (),
    "neon": ("test_amx.py", "test_append.py", "test_decode.py", "test_edges.py"),
    "neon_fp16": ("test_decode.py", "test_append.py"),
}


def pytest_of(isa, log):
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-m", "every_isa"]
    command = [sys.executable, "-m", "pytest", *options, *SELECTED[isa]]
    environment = arm_build.environment("max", isa) | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, cwd=TESTS, stdout=output, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs on all paths, started together, and the files of the marked tests, one for each."""
    started = {}
    for isa in SELECTED:
        log = tmp_path_factory.mktemp(isa) / "log"
        started[isa] = pytest_of(isa, log), log
    listing = tmp_path_factory.mktemp("list") / "log"
    assert pytest_here(BEST, listing, "--collect-only").wait() == 0, listing.read_text()[-3000:]
    yield started, [Path(line.split("::")[0]).name for line in listing.read_text().splitlines() if "::" in line]
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.runs_tests
@pytest.mark.parametrize("isa", SELECTED)
def test_cases(runs, isa):
    """Each of the marked tests of these files ran, and passed."""
    started, marked = runs
    process, log = started[isa]
    assert process.wait() == 0, log.read_text()[-6000:]
    expected = sum(file in SELECTED[isa] or not SELECTED[isa] for file in marked)
    last = log.read_text().strip().splitlines()[-1]
    assert expected > 300 and last.startswith(f"{expected} passed") and "skipped" not in last, last
