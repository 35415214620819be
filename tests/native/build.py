"""Compiles the test-only module: spec/, and the planners of the CPU and of Metal, for Python. (CUDA's are compiled by
test_cuda_plans.py.)

Metal's code is compiled for the host from the files themselves, copied behind a stand-in for what they take from Metal
(metal_host.h).
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch

NATIVE = Path(__file__).resolve().parent
ROOT = NATIVE.parent.parent
SOURCES = ("spec.cpp", "cpu.cpp", "metal.cpp")
COMPILED_TOO = ("torch-ext/spec/check_tables.cpp", "paged_decode_cpu/kv_write.cpp")
END_OF_DEALING = "// ---- What goes into scores"  # in item.h: what follows needs the shader's language


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
    torch_folder = Path(torch.__file__).parent
    includes = [folder / "device", NATIVE, ROOT / "torch-ext", ROOT]
    system = [pybind11.get_include(), sysconfig.get_path("include"), torch_folder / "include"]
    # -iquote: a header of ours may be called like one of the system.
    flags = "-std=c++20 -O1 -g -fPIC -fvisibility=hidden -DCPU_KERNEL -DTORCH_TARGET_VERSION=0x020b000000000000"
    flags += "".join(f" -iquote {path}" for path in includes) + "".join(f" -isystem {path}" for path in system)
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
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
    folder = ROOT / "build" / ".native" / hashlib.sha256(sys.executable.encode()).hexdigest()[:8]
    for name, text in generated().items():
        write_if_changed(folder / "device" / name, text)
    write_if_changed(folder / "build.ninja", ninja_file(folder))
    ninja = Path(sys.executable).with_name("ninja")
    run = subprocess.run([ninja if ninja.exists() else "ninja", "-C", folder], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:]
    spec = importlib.util.spec_from_file_location("paged_attn_native", folder / "paged_attn_native.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
