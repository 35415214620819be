"""Builds on Linux, with clang 19 and ninja, what the Metal tests need; all of it into build/.metal/.

    kernels(path)   a .metal file -> a shared library for emulator.Library
    device()        the fake Metal runtime and the mps device of torch, one shared library
    extension()     the package: torch-ext, paged_decode_metal/*.mm and the kernels -> a directory for `kernels`

Ninja compiles again only what changed; what several of them need has a ninja file of its own, so that processes may
build side by side. As a program (`metal_build.py --variant NAME`) it builds the extension and
prints its directory.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
import tomlkit
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build" / ".metal"
SHIM, HOST = HERE / "shim", HERE / "host"
sys.path[:0] = [str(ROOT / "tools"), str(HERE)]

import local_build  # noqa: E402
import msl  # noqa: E402

CXX = msl.CXX
PACKAGES = "clang-19 libclang-rt-19-dev llvm-19 libobjc-12-dev libblocksruntime-dev"

# How the kernels are compiled. `plain` contracts a * b + c within an expression, as Apple's compiler does. `fast` is
# the mode of fast math that our shader asks for, relaxed. `count` counts memory traffic and finds races between
# threadgroups.
# With them, clang can contract, and float16 is converted by one instruction.
FMA = "-mavx2 -mfma -mf16c" if {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()) else ""
VARIANTS = {
    "plain": f"-O2 -ffp-contract=on {FMA}",
    "fast": f"-O2 -ffast-math -fhonor-nans -fhonor-infinities {FMA}",
    # Fibers that each kept an own stack for returned variables would spend half of the time there.
    "asan": "-O1 -ffp-contract=on -fsanitize=address,undefined -fno-sanitize=function,vptr "
    "-fsanitize-address-use-after-return=never "
    "-fno-sanitize-recover=undefined",
    "tsan": "-O1 -ffp-contract=on -fsanitize=thread",
    "count": "-O2 -ffp-contract=on -fno-vectorize -fno-slp-vectorize "
    "-fsanitize-coverage=func,trace-pc-guard,trace-loads,trace-stores",
}
RUNTIME_VARIANTS = {
    "asan": "-fsanitize=address",
    "tsan": "-DMTL_THREAD_SANITIZER",
    "count": "-DMTL_COUNT",
}
LINK_VARIANTS = {"asan": "-fsanitize=address,undefined -shared-libasan", "tsan": "-fsanitize=thread -shared-libsan"}

KERNEL_FLAGS = (
    "-std=c++20 -g1 -fPIC -fvisibility=hidden -fno-math-errno -Xclang -ffloat16-excess-precision=none "
    "-Xclang -fbfloat16-excess-precision=none -Wno-reserved-user-defined-literal -Wno-unused -Wno-undefined-inline "
    "-Wno-unknown-pragmas -Wno-nan-infinity-disabled"
)
HOST_FLAGS = "-std=c++20 -g1 -O1 -fPIC -fblocks -Wall -Wno-unused-command-line-argument"
OBJC_FLAGS = "-x objective-c++ -fobjc-runtime=gcc -fconstant-string-class=NSConstantString -fobjc-exceptions"

RULES = """\
rule msl
  command = $python $msl $in -o $out --depfile $out.d $flags
  depfile = $out.d
  deps = gcc
  description = translate $in

rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule merge
  command = $cxx -r -nostdlib $in -o $out
  description = merge $out

rule link
  command = $cxx -shared $in $flags -o $out
  description = link $out

"""


class Missing(Exception):
    """What this machine lacks, and how to get it."""


def require_clang() -> None:
    if shutil.which(CXX) is None:
        raise Missing(f"{CXX} is not installed; on Debian and Ubuntu: apt install {PACKAGES}")


def gcc_folder() -> Path:
    """Where Debian puts the headers and the library of the Objective-C runtime."""
    folders = [p.parent.parent for p in Path("/usr/lib/gcc").glob("*/*/include/objc") if p.is_dir()]
    if not folders or not Path("/usr/include/Block.h").exists():
        raise Missing(f"the Objective-C and Blocks runtimes are not installed; apt install {PACKAGES}")
    return max(folders, key=lambda p: p.name.zfill(4))


def run_ninja(target: Path, lines: list[str]) -> Path:
    """Brings a target up to date with rules of its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_name(f"{target.name}.ninja")
    header = [f"builddir = {file}.state", f"cxx = {CXX}", f"python = {sys.executable}", f"msl = {HERE / 'msl.py'}"]
    command = [Path(ninja.BIN_DIR) / "ninja", "-f", file, "-C", OUT, "--quiet", target]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        local_build.write_if_changed(file, "\n".join([*header, RULES, *lines, ""]))
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stdout + run.stderr)
    return target


def emulated_gpu(variant: str) -> Path:
    """What all kernels of a variant are linked with."""
    folder = OUT / variant
    lines = [
        f"build {folder}/runtime.o: cxx {SHIM}/runtime.cpp",
        f"  flags = -std=c++20 -O2 -g1 -fPIC -fvisibility=hidden {RUNTIME_VARIANTS.get(variant, '')}",
        f"build {folder}/bfloat16.o: cxx {SHIM}/bfloat16.cpp",
        "  flags = -std=c++20 -O2 -fPIC -fvisibility=hidden",
        f"build {folder}/emulated_gpu.o: merge {folder}/runtime.o {folder}/bfloat16.o",
    ]
    return run_ninja(folder / "emulated_gpu.o", lines)


def kernels_path(source: Path, variant: str, includes: list[Path], defines: list[str]) -> Path:
    digest = hashlib.sha256(json.dumps([str(source), *map(str, includes), *defines]).encode()).hexdigest()[:8]
    return OUT / variant / f"{source.stem}-{digest}.so"


def kernels(source: Path, variant: str = "plain", includes: list[Path] = (), defines: list[str] = ()) -> Path:
    """A shared library of a .metal file."""
    require_clang()
    source = Path(source).resolve()
    library = kernels_path(source, variant, list(includes), list(defines))
    options = " ".join([*(f"-I {path}" for path in includes), *(f"-D {define}" for define in defines)])
    stem = library.with_suffix("")
    lines = [
        f"build {stem}.cpp: msl {source} | {HERE}/msl.py",
        f"  flags = {options}",
        f"build {stem}.o: cxx {stem}.cpp",
        f"  flags = {KERNEL_FLAGS} {VARIANTS[variant]} -I{SHIM}",
        f"build {library}: link {stem}.o {emulated_gpu(variant)}",
        f"  flags = {LINK_VARIANTS.get(variant, '')}",
    ]
    return run_ninja(library, lines)


SANITIZERS = {"asan": "libclang_rt.asan-x86_64.so", "tsan": "libclang_rt.tsan-x86_64.so"}


def environment(variant: str) -> dict[str, str]:
    """Of a process whose kernels are compiled in this way."""
    # One thread: those of torch are not instrumented and would look like races.
    settings = {"METAL_VARIANT": variant, "OMP_NUM_THREADS": "1"}
    if variant in SANITIZERS:  # its runtime must be there before Python
        command = [CXX, f"-print-file-name={SANITIZERS[variant]}"]
        settings["LD_PRELOAD"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(settings["LD_PRELOAD"]).exists():
            raise Missing(f"{SANITIZERS[variant]} is not installed; apt install {PACKAGES}")
        settings["ASAN_OPTIONS"] = "detect_leaks=0"
        settings["UBSAN_OPTIONS"] = "print_stacktrace=1"
        settings["TSAN_OPTIONS"] = "halt_on_error=1 exitcode=66"
    return os.environ | settings


def host_flags() -> str:
    """How a file that uses Metal and torch's MPS is compiled."""
    torch_include = Path(torch.__file__).parent / "include"
    includes = f"-I{HOST}/include -I{SHIM} -I{gcc_folder()}/include -isystem {torch_include}"
    return f"{HOST_FLAGS} {OBJC_FLAGS} {includes} -isystem {torch_include}/torch/csrc/api/include"


def link_flags() -> str:
    return f"-L{Path(torch.__file__).parent}/lib -ltorch -ltorch_cpu -lc10 -L{gcc_folder()} -lobjc -lBlocksRuntime -ldl"


def device() -> Path:
    require_clang()
    folder, sources = OUT / "host", ("fake_metal.mm", "fake_torch.mm")
    lines = []
    for source in sources:
        lines += [f"build {folder}/{source}.o: cxx {HOST}/{source}", f"  flags = {host_flags()}"]
    library = folder / "libfake_mps.so"
    lines.append(f"build {library}: link {' '.join(f'{folder}/{source}.o' for source in sources)}")
    return run_ninja(library, [*lines, f"  flags = {link_flags()}"])


def host_library(source: Path) -> Path:
    """An Objective-C++ file that uses Metal and torch's MPS, as a shared library."""
    fake, stem = device(), OUT / "host" / source.stem
    lines = [f"build {stem}.o: cxx {source}", f"  flags = {host_flags()}"]
    lines += [f"build {stem}.so: link {stem}.o {fake}", f"  flags = -Wl,-rpath,{fake.parent} {link_flags()}"]
    return run_ninja(Path(f"{stem}.so"), lines)


# Instead of Apple's machine code the data names the shared libraries of the kernels; {variant} is filled in by the fake
# device.
METALLIB_DATA = """\
static const unsigned char metallib_data[] = "EMULATED:@LIBRARIES@";
static const size_t metallib_data_len = sizeof metallib_data - 1;
"""


def metal_sections() -> list[local_build.Section]:
    config = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()
    return local_build.read_sections(config, "metal", "aarch64")


def metal_sources() -> list[tuple[Path, list[Path]]]:
    """The .metal files of build.toml, each with its include folders."""
    found = []
    for section in metal_sections():
        includes = [Path(flag[2:]) for flag in section.flags if flag.startswith("-I")]
        found += [(ROOT / source, includes) for source in section.sources if source.endswith(".metal")]
    return found


def extension(variants: list[str] = ("plain",)) -> Path:
    """The directory of the built package. Environment METAL_VARIANT picks one of the variants of its kernels."""
    require_clang()
    sections = metal_sections()
    namespace = f"_paged_attn_metal_{local_build.source_digest(sections, HOST_FLAGS)}"
    for variant in variants:
        for source, includes in metal_sources():
            kernels(source, variant, includes)
    work, fake = OUT / "extension", device()
    # The name of a library in the folder of its variant, which is the same for all.
    paths = [kernels_path(source, "{variant}", includes, []) for source, includes in metal_sources()]
    local_build.write_if_changed(work / "registration.h", local_build.REGISTRATION_H)
    data = METALLIB_DATA.replace("@LIBRARIES@", ";".join(map(str, paths)))
    local_build.write_if_changed(work / "metallib.h", local_build.METALLIB_H.replace("@DATA@", data))

    lines, objects = [], []
    for section in sections:
        for source in section.sources:
            if not source.endswith((".cpp", ".mm")):
                continue
            define = " ".join(local_build.binding_flags(source, namespace))
            # Also the C++ files see Metal's headers.
            own = section.includes if source.endswith(".mm") else ["-x c++", *section.flags]
            objects.append(work / f"{source}.o")
            lines.append(f"build {objects[-1]}: cxx {ROOT / source}")
            lines.append(
                f"  flags = {host_flags()} -I{work} {' '.join(own)} -DMETAL_KERNEL {define} "
                f"-DEMBEDDED_METALLIB_HEADER='\"metallib.h\"' -DEMBEDDED_METALLIB_NAMESPACE=paged_attn_metal "
                f"-DPy_LIMITED_API=0x03090000"
            )
    built = work / "extension.so"
    lines.append(f"build {built}: link {' '.join(map(str, objects))} {fake}")
    lines.append(f"  flags = -Wl,-rpath,{fake.parent} {link_flags()}")
    run_ninja(built, lines)

    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    folder = OUT / f"torch{version[1]}{version[2]}-metal-aarch64-darwin"
    config = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()
    local_build.install(folder, local_build.package_files(config, "metal", namespace, built))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="of the kernels; default: plain")
    args = parser.parse_args()
    try:
        print(extension(args.variant or ["plain"]))
    except Missing as missing:
        sys.exit(str(missing))


if __name__ == "__main__":
    main()
