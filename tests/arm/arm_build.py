"""Builds on Linux what the tests of Arm's instruction sets need, into build/.arm/:

guest()     the CPU backend for aarch64, a program without torch (guest.cpp), cross-compiled
variant()   the package for this machine, whose backend asks such a program (host.cpp)
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ARM = Path(__file__).resolve().parent
ROOT = ARM.parent.parent
OUT = ROOT / "build" / ".arm"
TOOL = ROOT / "tools" / "local_build.py"
sys.path.append(str(ROOT / "tools"))

PACKAGES = "qemu-user g++-aarch64-linux-gnu"
CXX = "aarch64-linux-gnu-g++"
QEMU = "qemu-aarch64"
OF_THE_HOST = "paged_decode_cpu/merge.cpp"  # plain C++ with torch's types; host.cpp has it
EXTRA_SOURCES = ("torch-ext/spec/check_tables.cpp", "tests/arm/guest.cpp")


def missing():
    """What this machine lacks; "" if nothing."""
    if not TOOL.exists():
        return "a package without tools/local_build.py"
    lacking = [name for name in (CXX, QEMU, "g++") if not shutil.which(name)]
    return f"no {' and no '.join(lacking)}: apt-get install {PACKAGES}" if lacking else ""


def checked(command):
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@functools.cache  # once in a process
def guest(name="guest", cxx=CXX, flags=""):
    """The program, compiled where something changed."""
    import local_build
    import ninja
    import tomlkit

    folder = OUT / name
    sections = local_build.read_sections(tomlkit.parse((ROOT / "build.toml").read_text()).unwrap(), "cpu", "aarch64")
    kernels = {source: section.flags for section in sections[1:] for source in section.sources}
    kernels |= {source: [f"-I{ROOT / 'torch-ext'}"] for source in EXTRA_SOURCES}
    ccache = "ccache " if shutil.which("ccache") else ""
    lines = [
        f"cxx = {ccache}{cxx}",
        "rule cxx\n  command = $cxx -MMD -MF $out.d $flags -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {cxx} -static $in -o $out",
    ]
    objects = []
    for source, own in kernels.items():
        if source.endswith(".cpp") and source != OF_THE_HOST:
            objects.append(f"{source}.o")
            lines.append(f"build {objects[-1]}: cxx {ROOT / source}")
            lines.append(f"  flags = {local_build.COMMON_FLAGS} -Werror {flags} -I{ARM} {' '.join(own)}")
    lines.append(f"build {name}: link {' '.join(objects)}")
    local_build.write_if_changed(folder / "build.ninja", "\n".join(lines) + "\n")
    checked([Path(ninja.BIN_DIR) / "ninja", "-C", folder])
    return folder / name


@functools.cache
def variant():
    """The directory for LOCAL_KERNELS."""
    command = [sys.executable, TOOL, "--backend", "cpu", "--backend-source", ARM / "host.cpp", "--out", OUT / "host"]
    return Path(checked(command).strip().splitlines()[-1])


def environment(processor, isa="", options=""):
    """For a process whose calls an emulated processor of this name runs."""
    command = f"{QEMU} -cpu {processor} {options} {guest()}"
    keep = {name: value for name, value in os.environ.items() if name not in ("PAGED_ATTN_BUILD", "PAGED_ATTN_CPU_ISA")}
    forced = {"PAGED_ATTN_CPU_ISA": isa} if isa else {}
    return keep | forced | {"LOCAL_KERNELS": f"org/paged-attn={variant()}", "PAGED_ATTN_ARM": command}
