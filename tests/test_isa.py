"""Every instruction set that the processor runs, forced in a process of its own (the choice is made once).

The tests marked every_isa run there again, and none of them may be missing.
"""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import cases
import kernels
import pytest

TESTS = Path(__file__).resolve().parent
# What the processor must have for each path, as the kernel of the operating system names it.
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512vbmi"}
NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": AVX512,
    "avx512_intel": AVX512_BF16,
    "avx512_bf16": AVX512_BF16,
    "avx512_zen5": AVX512_BF16,
    "avx512_amx": AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512_amx_fp16": AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_fp16"},
    "neon": {"asimd"},
    "neon_fp16": {"asimd", "asimdfhm"},
    "neon_bf16": {"asimd", "asimdfhm", "bf16"},
}

pytestmark = pytest.mark.skipif(
    os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu") != "cpu", reason="instruction sets are the CPU's"
)


def apple_flags():
    """The same of a Mac, by Linux' names."""
    names = {"AdvSIMD": "asimd", "FEAT_FHM": "asimdfhm", "FEAT_BF16": "bf16"}
    listed = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True).stdout.splitlines()
    present = {line.split(":")[0].split(".")[-1] for line in listed if line.endswith(": 1")}
    return {flag for name, flag in names.items() if name in present}


def cpu_flags():
    """The flags and the maker of the processor."""
    if sys.platform == "darwin":
        return apple_flags()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {word for line in lines if line.startswith(("flags", "vendor_id", "Features")) for word in line.split()}


def available(isa):
    return NEEDS[isa] <= cpu_flags()


# Others run avx512_zen5 too, but by name only. Intel's processors are faster without vdpbf16ps.
ZEN5, INTEL = {"AuthenticAMD", "avx_vnni"} <= cpu_flags(), "GenuineIntel" in cpu_flags()
SLOWER = ([] if ZEN5 else ["avx512_zen5"]) + (["avx512_bf16"] if INTEL else [])
CHOSEN = [isa for isa in NEEDS if available(isa) and isa not in SLOWER]
BEST = CHOSEN[-1]
OTHERS = [isa for isa in NEEDS if available(isa) and isa != BEST]
UNKNOWN = ("avx1024", "AVX2")


def environment(isa):
    return os.environ | {"PAGED_ATTN_CPU_ISA": isa, "PYTHONPATH": str(TESTS)}


def answer():
    """What cpu_isa() says; in a process that has not chosen yet."""
    import conftest

    return kernels.get_kernel(conftest.KERNEL, version=1, backend="cpu", trust_remote_code=True).cpu_isa()


ASK = "import test_isa; print(test_isa.answer())"


def answer_each():
    """The same, or its error, for each environment of a list on stdin: a line of JSON, from a fork of this process, for
    to import torch takes seconds."""
    for environment in json.load(sys.stdin):
        if os.fork() == 0:
            os.environ.update(environment)
            try:
                said = answer()
            except RuntimeError as error:
                said = f"RuntimeError: {error}"
            print(json.dumps(said), flush=True)
            os._exit(0)
        _, status = os.wait()
        if status != 0:
            print(json.dumps(f"ended with {status}"), flush=True)


def ask(environments):
    """What answer() says in each of them, or its error."""
    command = [sys.executable, "-c", "import test_isa; test_isa.answer_each()"]
    keywords = {"env": environment(""), "cwd": TESTS, "capture_output": True, "text": True}
    asked = subprocess.run(command, input=json.dumps(environments), **keywords)
    answers = [json.loads(line) for line in asked.stdout.splitlines()]
    assert asked.returncode == 0 and len(answers) == len(environments), asked.stdout + asked.stderr
    return answers


@pytest.fixture(scope="module")
def answers():
    """By the path that is asked for; "": none."""
    asked = ["", *UNKNOWN, *NEEDS]
    return dict(zip(asked, ask([{"PAGED_ATTN_CPU_ISA": isa} for isa in asked])))


@pytest.mark.parametrize("isa", NEEDS)
def test_forced_path(isa, answers):
    """The path asked for is the path taken."""
    if not available(isa):
        pytest.skip(f"this processor has no {isa}")
    assert answers[isa] == isa


def pytest_of(isa, log, *options):
    """A run of the marked tests on one path: one worker thread, since the threads are not the path's."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        "every_isa",
        *options,
    ]
    with log.open("w") as output:
        keywords = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": TESTS}
        return subprocess.Popen(command, env=environment(isa) | {"OMP_NUM_THREADS": "1"}, **keywords)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs on the other paths, started together, and the list of what they should run."""
    started = {}
    for isa in OTHERS:
        folder = tmp_path_factory.mktemp(isa)
        started[isa] = pytest_of(isa, folder / "log", f"--junitxml={folder / 'report.xml'}"), folder
    listing = tmp_path_factory.mktemp("list") / "log"
    assert pytest_of(BEST, listing, "--collect-only").wait() == 0, listing.read_text()[-3000:]
    marked = [line for line in listing.read_text().splitlines() if "::" in line]
    yield started, marked
    for process, _ in started.values():
        process.kill()
        process.wait()


def test_marked_tests_cover_the_arithmetic(runs):
    """Every case of a feature, a pair or a tail of a register, the bytes of a write, and the random combinations."""
    _, marked = runs
    functions = collections.Counter(line.split("::")[1].split("[")[0] for line in marked)
    cases_of = {
        "test_named": cases.NAMED, "test_feature_alone": cases.ALONE, "test_pair": cases.PAIRS,
        "test_tail": list(cases.tail_cases()), "test_random": range(300),
    }  # fmt: skip
    assert {name: functions[name] for name in cases_of} == {name: len(of) for name, of in cases_of.items()}
    assert functions["test_rotary"] >= 80 and functions["test_fp8_rounds_and_saturates"] >= 12


@pytest.mark.runs_tests
@pytest.mark.parametrize("isa", OTHERS)
def test_cases(isa, runs):
    """Each of the marked tests ran on this path, and passed."""
    started, marked = runs
    process, folder = started[isa]
    assert process.wait() == 0, (folder / "log").read_text()[-6000:]
    suite = ElementTree.parse(folder / "report.xml").getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "errors", "failures", "skipped")}
    assert counts == {"tests": len(marked), "errors": 0, "failures": 0, "skipped": 0}


@pytest.mark.skipif("asan" not in os.environ.get("LD_PRELOAD", ""), reason="test_cases runs them, and more")
@pytest.mark.sanitize
@pytest.mark.runs_tests
@pytest.mark.parametrize("isa", OTHERS)
def test_features_are_clean(isa, tmp_path):
    """Every feature once on this path, in a build with sanitizers, which test_cases is too long for."""
    log = tmp_path / "log"
    assert pytest_of(isa, log, "-m", "every_isa and sanitize").wait() == 0, log.read_text()[-6000:]


def test_best_path_is_the_default(answers):
    assert answers[""] == BEST


@pytest.mark.parametrize("isa", [*UNKNOWN, *(isa for isa in NEEDS if not available(isa))])
def test_unknown_or_missing_path(isa, answers):
    """The error names what was asked and what there is."""
    message = answers[isa].splitlines()[-1]
    assert "RuntimeError" in message and "PAGED_ATTN_CPU_ISA" in message and isa in message
    for name in NEEDS:
        assert name in message or not available(name)
