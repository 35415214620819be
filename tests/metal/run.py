"""`make test-metal`: the tests of the package on an mps device.

On a Mac the device is real and LOCAL_KERNELS names the build to test. Elsewhere the device is the fake one, the package
is built for it first, and the tests of the emulator come along. Arguments go to pytest.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# The emulated GPU is one thread. These two halves take about as long as each other.
HALVES = [
    ["metal", "test_decode.py", "test_integrations.py", "test_compile.py", "test_threads.py"],
    ["test_append.py", "test_errors.py", "test_features.py", "test_package.py", "test_splits.py", "test_varlen.py"],
]


def build() -> str:
    sys.path.insert(0, str(TESTS / "metal"))
    import metal_build

    try:
        return f"org/paged-attn={metal_build.extension()}"
    except metal_build.Missing as missing:
        print(f"SKIPPED: the Metal backend was not tested: {missing}")
        sys.exit(0)


def main() -> None:
    environment = os.environ | {"PAGED_ATTN_TEST_DEVICE": "mps"}
    pytest = [sys.executable, "-m", "pytest"]
    if platform.system() == "Darwin":
        sys.exit(subprocess.run([*pytest, TESTS, *sys.argv[1:]], env=environment).returncode)
    environment |= {"LOCAL_KERNELS": build(), "OMP_NUM_THREADS": "1"}
    environment.pop("PAGED_ATTN_BUILD", None)
    commands = [
        [*pytest, "-q", "-p", "no:cacheprovider", *(TESTS / file for file in files), *sys.argv[1:]] for files in HALVES
    ]
    with tempfile.TemporaryFile("w+") as output:  # of the half that does not write to the terminal
        second = subprocess.Popen(commands[1], env=environment, stdout=output, stderr=subprocess.STDOUT)
        first = subprocess.run(commands[0], env=environment)
        codes = [first.returncode, second.wait()]
        output.seek(0)
        print(output.read())
    # 5: none of this half's tests was picked by the arguments
    sys.exit(next((code for code in codes if code not in (0, 5)), 0 if 0 in codes else 5))


if __name__ == "__main__":
    main()
