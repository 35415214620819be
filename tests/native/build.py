"""Compiles the test-only module: spec/, the planners of the CPU and of Metal, and the sizes of the CPU's scratch
memory, for Python. (CUDA's are compiled by test_cuda_plans.py.)

Metal's code is compiled for the host from the files themselves, copied behind a stand-in for what they take from Metal
(metal_host.h).
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

NATIVE = Path(__file__).resolve().parent
ROOT = NATIVE.parent.parent
SOURCES = ("spec.cpp", "cpu.cpp", "scratch.cpp", "metal.cpp")
COMPILED_TOO = ("torch-ext/spec/check_tables.cpp", "paged_decode_cpu/kv_write.cpp")
END_OF_DEALING = "// ---- What goes into scores"  # in item.h: what follows needs the shader's language


class NotBuilt(RuntimeError):
    pass


def compiler():
    return os.environ.get("CXX", "g++")


def ninja():
    """That of the environment that runs the tests, or the system's; None where there is neither."""
    own = Path(sys.executable).with_name("ninja")
    return str(own) if own.exists() else shutil.which("ninja")


def missing():
    """What the module cannot be compiled without, in words."""
    found = []
    if importlib.util.find_spec("pybind11") is None:
        found.append(f"pybind11 in the environment of {sys.executable}")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        found.append(f"the headers of Python {sysconfig.get_python_version()} (expected {header})")
    if shutil.which(compiler().split()[0]) is None:
        found.append(f"the C++ compiler {compiler()} (CXX names another)")
    if ninja() is None:
        found.append("ninja")
    return found


def text_of(path, end=None):
    """A file without its includes, up to a line."""
    text = (ROOT / path).read_text()
    if end is not None:
        assert end in text, f"{path}: expected the line {end!r}"
        text = text[: text.index(end)] + "}  // namespace paged_attn\n"
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#include", "#import", "#pragma once")))


def generated():
    """What lies beside the stand-ins, by name."""
    head = '#pragma once\n#include "metal_host.h"\n'
    metal = "paged_decode_metal/"
    return {
        "routes_host.h": head + text_of(metal + "routes.h") + "\n" + text_of(metal + "routes.mm"),
        "item_host.h": head + text_of(metal + "tables.h") + "\n" + text_of(metal + "item.h", END_OF_DEALING),
    }


def write_if_changed(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def ninja_file(folder):
    import pybind11

    torch_folder = Path(torch.__file__).parent
    includes = [folder / "device", NATIVE, ROOT / "torch-ext", ROOT]
    system = [pybind11.get_include(), sysconfig.get_path("include"), torch_folder / "include"]
    # -iquote: a header of ours may be called like one of the system.
    flags = "-std=c++20 -O1 -g -fPIC -fvisibility=hidden -DCPU_KERNEL -DTORCH_TARGET_VERSION=0x020b000000000000"
    flags += "".join(f" -iquote {path}" for path in includes) + "".join(f" -isystem {path}" for path in system)
    lines = [
        f"cxx = {compiler()}",
        "rule compile\n  command = $cxx -MD -MF $out.d $flags -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = $cxx -shared $in -o $out -L{torch_folder}/lib -ltorch -ltorch_cpu",
        f"flags = {flags}",
    ]
    sources = [NATIVE / name for name in SOURCES] + [ROOT / path for path in COMPILED_TOO]
    objects = []
    for source in sources:
        objects.append(f"{source.name}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
    lines.append(f"build paged_attn_native.so: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def load():
    """The module, compiled where something changed."""
    if wanted := missing():
        raise NotBuilt(f"tests/native: not compiled for want of {'; '.join(wanted)}. requirements.txt has the packages")
    folder = ROOT / "build" / ".native" / hashlib.sha256(sys.executable.encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # test processes side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, text in generated().items():
            write_if_changed(folder / "device" / name, text)
        write_if_changed(folder / "build.ninja", ninja_file(folder))
        run = subprocess.run([ninja(), "-C", folder], capture_output=True, text=True)
    if run.returncode:
        said = run.stdout + run.stderr
        errors = [line for line in said.splitlines() if "error" in line][:10]
        raise NotBuilt("\n".join([f"tests/native: {compiler()} does not compile it", *errors, said[-6000:]]))
    spec = importlib.util.spec_from_file_location("paged_attn_native", folder / "paged_attn_native.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
