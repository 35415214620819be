"""`make test-metal`: the tests of the package on an mps device.

On a Mac the device is real and LOCAL_KERNELS names the build to test. Elsewhere the device is the fake one, the package
is built for it first, and the tests of the emulator come along. Arguments go to pytest.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

EMULATOR = Path(__file__).resolve().parent
TESTS = EMULATOR.parent.parent / "tests"
# The emulated GPU is one thread, so this many processes run side by side; the long ones first. The empty job takes what
# no other names.
JOBS = [
    [],
    *([f"test_metal_variants.py::test_every_feature[{variant}]"] for variant in ("count", "asan")),
    [str(EMULATOR / "tests"), "test_metal_macos.py", "test_metal_variants.py::test_keys_and_values_are_loaded_once"],
    *([f"test_metal_variants.py::test_every_feature[{variant}]"] for variant in ("tsan", "fast")),
    ["test_decode.py", "test_varlen.py", "test_splits.py"],
    ["test_features.py"],
]
NAMED = {word.partition("::")[0] for job in JOBS for word in job}


def run(job: list[str], environment: dict[str, str]) -> int:
    files = [TESTS / word for word in job] or [TESTS, *(f"--ignore={TESTS / file}" for file in NAMED)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *files, *sys.argv[1:]]
    start = time.monotonic()
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"\n==== {' '.join(job) or 'all others'} ({time.monotonic() - start:.0f} s)\n{process.stdout}", flush=True)
    return process.returncode


def main() -> None:
    environment = os.environ | {"PAGED_ATTN_TEST_DEVICE": "mps"}
    if torch.backends.mps.is_built():
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", TESTS, *sys.argv[1:]], env=environment).returncode)
    import metal_build

    try:
        environment |= {"LOCAL_KERNELS": f"org/paged-attn={metal_build.extension()}", "OMP_NUM_THREADS": "1"}
    except metal_build.Missing as missing:
        if os.environ.get("PAGED_ATTN_TEST_EMULATORS") == "required":
            sys.exit(f"the Metal backend cannot be tested: {missing}")
        print(f"SKIPPED: the Metal backend was not tested: {missing}")
        return
    environment.pop("PAGED_ATTN_BUILD", None)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = set(tqdm(pool.map(lambda job: run(job, environment), JOBS), total=len(JOBS), unit="job", disable=None))
    failed = codes - {0, 5}  # 5: the arguments picked none of a job's tests
    sys.exit(failed.pop() if failed else min(codes))


if __name__ == "__main__":
    main()
