"""Loads the built package the way a user does, through `kernels`.

PAGED_ATTN_BUILD       a build directory instead of the repository's own
PAGED_ATTN_TEST_DEVICE the device of the tensors; default: the first of cuda, mps and cpu that torch has and that a
                       variant was built for
PAGED_ATTN_TEST_LIMIT  seconds that a test may take before it counts as hung and ends the run with its name
"""

import faulthandler
import functools
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
KERNEL = "org/paged-attn"

# Also for the subprocesses of the tests. kernels reads it at every call.
if "PAGED_ATTN_BUILD" in os.environ:
    os.environ["LOCAL_KERNELS"] = f"{KERNEL}={os.environ['PAGED_ATTN_BUILD']}"
os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={REPOSITORY}")

BACKENDS = {"cuda": "cuda", "mps": "metal", "cpu": "cpu"}


def detect_device() -> str:
    """The first device that torch has and that LOCAL_KERNELS has a build for."""
    folder = Path(dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))[KERNEL])
    found = [path for pattern in ("", "*/", "build/*/") for path in folder.glob(f"{pattern}metadata.json")]
    built = {json.loads(path.read_text())["backend"]["type"] for path in found}
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    devices = [device for device in available if available[device] and BACKENDS[device] in built]
    if not devices:
        raise pytest.UsageError(f"{folder}: expected a build for this machine, found {sorted(built) or 'none'}")
    return devices[0]


if "PAGED_ATTN_TEST_DEVICE" not in os.environ:
    os.environ["PAGED_ATTN_TEST_DEVICE"] = detect_device()

# Without a Mac the mps device is the fake of tools/metal_emulator.
EMULATED = os.environ["PAGED_ATTN_TEST_DEVICE"] == "mps" and not torch.backends.mps.is_built()
if EMULATED:
    sys.path.insert(0, str(REPOSITORY / "tools" / "metal_emulator"))
    import fake_mps

    fake_mps.load()
else:
    collect_ignore_glob = ["test_metal*.py"]
# Each engine has an environment of its own (make test-engines).
collect_ignore = [] if "PAGED_ATTN_ENGINE" in os.environ else ["engines"]
if not (REPOSITORY / "docs").exists():  # where kernel-builder tests the package, the pages do not come along
    collect_ignore += ["test_documents.py", "test_pictures.py"]


# Kernels wait for each other, so a fault may be a test that never ends. Nothing can stop a hung kernel but the end of
# the process.
STDERR = pytest.StashKey[int]()
LIMIT = float(os.environ.get("PAGED_ATTN_TEST_LIMIT", 600))
LIMIT_WITH_PROCESSES = 6 * LIMIT  # of a test that waits for test runs in processes of its own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    limit = LIMIT_WITH_PROCESSES if item.get_closest_marker("runs_tests") else LIMIT
    stderr = item.config.stash[STDERR]

    def say_its_name():
        os.write(stderr, f"\n{item.nodeid}: no end after {limit:.0f} s, so the run ends here\n".encode())

    # The name comes from a thread of Python. What ends the process needs none, for the hung call may hold the lock.
    name = threading.Timer(limit, say_its_name)
    name.daemon = True
    name.start()
    faulthandler.dump_traceback_later(limit + 1, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        name.cancel()
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config):
    config.stash[STDERR] = os.dup(sys.stderr.fileno())  # the real one: pytest captures only while tests run
    config.addinivalue_line("markers", "every_isa: on every instruction set of the CPU, in test_isa.py")
    config.addinivalue_line("markers", "runs_tests: waits for test runs in processes of its own")
    config.addinivalue_line("markers", "kernels_ci: the short run, under a minute")
    config.addinivalue_line("markers", "sanitize: every feature once, for builds with sanitizers")


def pytest_collection_modifyitems(config, items):
    """What asks for no device gives the same on each: it ran on the CPU, and does not again on the emulated GPU."""
    if not EMULATED:
        return

    def stays(item):
        here = item.path.parent == REPOSITORY / "tests" and not item.path.name.startswith("test_metal")
        return not here or not {"device", "paged_attn"}.isdisjoint(item.fixturenames)

    config.hook.pytest_deselected(items=[item for item in items if not stays(item)])
    items[:] = [item for item in items if stays(item)]


@pytest.fixture(scope="session")
def device():
    return os.environ["PAGED_ATTN_TEST_DEVICE"]


@pytest.fixture
def emulated():
    """Whether the device is the fake one."""
    return EMULATED


@pytest.fixture
def make_model(device):
    """A small model of transformers, by its family."""
    import small_models
    import transformers

    return functools.partial(small_models.make, transformers, device)


@pytest.fixture(scope="session")
def native():
    """spec/ and planners for Python, compiled where something changed; see native/build.py."""
    sys.path.insert(0, str(REPOSITORY / "tests" / "native"))
    import build

    return build.load()


@pytest.fixture(scope="session")
def paged_attn(device):
    import kernels

    backend = BACKENDS[torch.device(device).type]
    return kernels.get_kernel(KERNEL, version=1, backend=backend, trust_remote_code=True)
