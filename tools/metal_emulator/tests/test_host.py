"""The fake Metal refuses what a real one would."""

import ctypes
from pathlib import Path

import fake_mps
import metal_build
import pytest

KERNELS = Path(__file__).resolve().parent / "kernels"


@pytest.fixture(scope="module")
def misuse():
    library = ctypes.CDLL(str(metal_build.host_library(KERNELS / "misuse.mm")))
    library.try_mistake.restype = ctypes.c_bool
    kernels = str(metal_build.kernels(KERNELS / "functions.metal")).encode()
    return lambda mistake: fake_mps.last_failure() if library.try_mistake(mistake.encode(), kernels) else ""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("off the queue", "MPSStream::commandEncoder outside of the stream's queue"),
        ("own encoder", "A command encoder is already encoding to this command buffer"),
        ("ended twice", "endEncoding twice"),
        ("after the end", "setBuffer:offset:atIndex: after endEncoding"),
        ("no function", "newComputePipelineStateWithFunction: nil"),
        ("buffer index", "buffer index 31, at most 30"),
        ("offset", "offset 257 in a buffer of 256 bytes"),
        ("long bytes", "setBytes of 5000 bytes, 1 to 4096 are allowed"),
        ("threadgroup memory", "setThreadgroupMemoryLength:24 atIndex:0"),
        ("threads", "a threadgroup of 96 threads, the pipeline's maxTotalThreadsPerThreadgroup is 64"),
        ("unset buffer", "buffer(0), out: nothing is bound"),
        ("blit", "copyFromBuffer: the regions overlap"),
        ("none", ""),
    ],
)
def test_mistake(misuse, mistake, message):
    found = misuse(mistake)
    assert (message in found) if message else (found == "")
    fake_mps.reset()
    assert misuse("none") == ""
