"""The emulator itself: what it computes, and that it refuses what a GPU would not forgive."""

import re
import subprocess
import sys
from ctypes import Structure, c_float, c_uint
from pathlib import Path

import emulator
import metal_build
import msl
import pytest
import torch

KERNELS = Path(__file__).resolve().parent / "kernels"
FAULTS = KERNELS / "faults.metal"


@pytest.fixture(scope="module", params=["plain", "fast"])
def functions(request):
    return emulator.Library(metal_build.kernels(KERNELS / "functions.metal", request.param))


@pytest.fixture(scope="module")
def faults():
    return emulator.Library(metal_build.kernels(FAULTS))


def test_simd_functions(functions):
    x, out = torch.randint(-50, 50, (32,)).float(), torch.zeros(8, 32)
    functions.run("simd_functions", (1, 1, 1), (32, 1, 1), {0: x, 1: out})
    lane = torch.arange(32)
    expected = [x.sum().expand(32), x.max().expand(32), x.flip(0), x[lane ^ 5], torch.cat([x[3:], x[29:]])]
    expected += [x[7].expand(32), x.cumsum(0) - x, torch.where(lane < 16, 0.0, x[16:].min())]
    assert torch.equal(out, torch.stack(expected))


class Shape(Structure):
    _fields_ = [("width", c_uint), ("scale", c_float)]


def test_function_constants(functions):
    out, bias, shape = torch.zeros(3, 40, dtype=torch.int32), torch.arange(120, dtype=torch.int32), Shape(40, 1.0)
    call = {"grid": (40, 3, 1), "threadgroup": (16, 2, 1), "threads": True}
    functions.run("function_constants", buffers={0: out, 1: bias, 2: shape}, constants={0: True, 1: 2}, **call)
    assert torch.equal(out.flatten(), 3 * bias)
    functions.run("function_constants", buffers={0: out, 2: shape}, constants={0: False, 1: 2}, **call)
    assert torch.equal(out.flatten(), 2 * bias + 1000)
    with pytest.raises(emulator.MetalError, match="function constant 1, factor, is read but was not set"):
        functions.run("function_constants", buffers={0: out, 2: shape}, constants={0: False}, **call)
    with pytest.raises(emulator.MetalError, match=r"buffer\(1\), bias: nothing is bound"):
        functions.run("function_constants", buffers={0: out, 2: shape}, constants={0: True, 1: 2}, **call)
    with pytest.raises(emulator.MetalError, match="setBytes of 12 bytes, its type has 8"):
        functions.run("function_constants", buffers={0: out, 2: bytes(12)}, constants={0: False, 1: 2}, **call)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 96), (torch.bfloat16, 64)])
def test_threadgroup_memory(functions, dtype, size, seed):
    x = torch.randn(3, size).to(dtype)
    out = torch.zeros_like(x)
    name = f"reversed_{'float' if dtype == torch.float32 else 'bfloat'}_{size}"
    memory = {0: size * x.element_size()}
    functions.run(name, (3, 1, 1), (size, 1, 1), {0: x, 1: out}, threadgroup_memory=memory, seed=seed)
    assert torch.equal(out, x.flip(1))
    with pytest.raises(emulator.MetalError, match="setThreadgroupMemoryLength was not called"):
        functions.run(name, (3, 1, 1), (size, 1, 1), {0: x, 1: out})


def test_vectors(functions):
    x, out = torch.randn(5, 4).half(), torch.zeros(5, 3, 4)
    functions.run("vectors", (5, 1, 1), (1, 1, 1), {0: x, 1: out})
    f = x.float()
    a, b, c, d = f.unbind(1)
    one = torch.ones(5)
    torch.testing.assert_close(out[:, 0], 2 * f.flip(1) + torch.stack([a, b, one, -one], 1))
    assert torch.equal(out[:, 1], f.clamp(min=0))
    torch.testing.assert_close(out[:, 2], torch.stack([a, (f * f).sum(1), b * c + d, torch.maximum(a, b)], 1))


def test_matrices(functions):
    a, b, out = torch.randn(16, 24).half(), torch.randn(16, 24).half(), torch.zeros(16, 16)
    functions.run("matrices", (1, 1, 1), (128, 1, 1), {0: a, 1: b, 2: out, 3: c_uint(24)})
    torch.testing.assert_close(out, a.float() @ b.float().T)


def test_atomics(functions):
    x, bins = torch.randint(0, 100, (640,), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    functions.run("histogram", (10, 1, 1), (64, 1, 1), {0: x, 1: bins}, seed=3)
    assert torch.equal(bins, torch.bincount(x % 4, minlength=4).int())


def test_limit_of_threads(functions):
    functions.run("small_threadgroups", (1, 1, 1), (64, 1, 1), {0: torch.zeros(64)})
    with pytest.raises(emulator.MetalError, match="a threadgroup of 65 threads, the kernel's limit is 64"):
        functions.run("small_threadgroups", (1, 1, 1), (65, 1, 1), {0: torch.zeros(65)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", r"divergent_barrier.*threadgroup_barrier at .*faults.metal:6"),
        ("barrier_after_return", r"faults.metal:11 is not reached by thread 5, which returned"),
        ("divergent_simd", r"lanes part: thread \d+ waits in simd_(sum|max) at .*faults.metal:1[6-9]"),
        ("too_much_memory", r"36000 bytes with memory, at most 32768 exist|36.*bytes with memory"),
    ],
)
def test_refused(faults, name, message):
    with pytest.raises(emulator.MetalError, match=message):
        faults.run(name, (1, 1, 1), (64, 1, 1), {0: torch.zeros(64)})


def test_uninitialised_memory_is_nan(faults):
    out = torch.zeros(64)
    faults.run("uninitialised_memory", (1, 1, 1), (64, 1, 1), {0: out})
    assert torch.equal(out.isnan(), torch.arange(64) >= 32)


def test_aliased_buffers(faults):
    memory = torch.arange(96.0)
    with pytest.raises(emulator.MetalError, match="are the same memory, and one is written"):
        faults.run("aliased", (1, 1, 1), (64, 1, 1), {0: memory, 1: memory}, exact=False)
    # What one pointer writes is not seen through the other, whatever the order of the threads.
    faults.run("aliased", (1, 1, 1), (64, 1, 1), {0: memory[32:], 1: memory}, exact=False)
    assert torch.equal(memory[32:], torch.arange(64.0))


def test_a_name_for_the_host_has_its_namespaces():
    """As in Metal, unless an attribute gives another one."""
    library = emulator.Library(metal_build.kernels(KERNELS / "functions.metal"))
    out = torch.zeros(32)
    library.run("outer::inner::in_a_namespace", (1, 1, 1), (32, 1, 1), {0: out})
    assert out.tolist() == [1.0] * 32
    library.run("named_for_the_host", (1, 1, 1), (32, 1, 1), {0: out})
    assert out.tolist() == [2.0] * 32
    with pytest.raises(emulator.MetalError, match="no kernel 'in_a_namespace'"):
        library.run("in_a_namespace", (1, 1, 1), (32, 1, 1), {0: out})


def test_counts():
    library = emulator.Library(metal_build.kernels(KERNELS / "functions.metal", "count"))
    x, out = torch.randn(3, 64).bfloat16(), torch.zeros(3, 64).bfloat16()
    library.reset_counts()
    library.run("reversed_bfloat_64", (3, 1, 1), (64, 1, 1), {0: x, 1: out}, threadgroup_memory={0: 128})
    counts = library.counts()
    assert (counts.dispatches, counts.threadgroups, counts.threads, counts.barriers) == (1, 3, 192, 6)
    assert (counts.loaded[0], counts.stored[0], counts.loaded[1], counts.stored[1]) == (384, 0, 0, 384)
    assert (counts.threadgroup_loaded, counts.threadgroup_stored, counts.threadgroup_bytes) == (768, 768, 256)
    library.run("simd_functions", (1, 1, 1), (32, 1, 1), {0: torch.zeros(32), 1: torch.zeros(256)})
    assert library.simd_counts()["simd_shuffle_xor"] == 1
    assert counts.simd_operations == 8


def test_race_between_threadgroups():
    library = emulator.Library(metal_build.kernels(FAULTS, "count"))
    with pytest.raises(
        emulator.MetalError, match=r"byte 0 of buffer\(0\), out: written by this threadgroup, written by"
    ):
        library.run("unordered_threadgroups", (2, 1, 1), (1, 1, 1), {0: torch.zeros(4)})


def test_check_finds_what_apple_rejects():
    source = KERNELS / "rejected.metal"
    expected = {i for i, line in enumerate(source.read_text().splitlines(), 1) if line.endswith("// fault")}
    complaints = msl.check(source)
    found = {int(re.search(r"rejected.metal:(\d+)", complaint)[1]) for complaint in complaints}
    assert found == expected, complaints
    assert msl.check(KERNELS / "functions.metal") == []


RUN = """
import sys
sys.path.insert(0, {folder!r})
import emulator, torch
emulator.Library({library!r}).run({name!r}, (1, 1, 1), (64, 1, 1), {{0: torch.zeros(64)}})
print("survived")
"""


@pytest.mark.parametrize(
    ("variant", "name", "report"),
    [
        ("asan", "past_the_buffer", "heap-buffer-overflow"),
        ("asan", "past_the_memory", "index 64 out of bounds"),
        ("asan", "shifted_too_far", "shift exponent 32 is too large"),
        ("tsan", "lockstep", "data race"),
    ],
)
def test_sanitizers_find(variant, name, report):
    """Each planted fault is reported, at its line of the .metal file; a sound kernel runs without a report."""
    library, environment = str(metal_build.kernels(FAULTS, variant)), metal_build.environment(variant)

    def run(kernel):
        code = RUN.format(folder=str(Path(emulator.__file__).parent), library=library, name=kernel)
        process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        return process.returncode, process.stdout + process.stderr

    lines = FAULTS.read_text().splitlines()
    expected = {i for i, line in enumerate(lines, 1) if line.endswith(f"// line of {name}")}
    code, output = run(name)
    assert code != 0
    assert report in output
    assert expected & {int(n) for n in re.findall(r"faults.metal:(\d+)", output)}, output
    assert run("uninitialised_memory") == (0, "survived\n")


def test_only_clang_is_missing(monkeypatch):
    monkeypatch.setattr(metal_build, "CXX", "clang++-no-such")
    with pytest.raises(metal_build.Missing, match="apt install clang-19"):
        metal_build.kernels(FAULTS)
