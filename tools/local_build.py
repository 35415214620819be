"""Builds the kernel that build.toml describes into <out>/<variant>/, without Nix.

kernel-builder makes the Hub's builds from the same build.toml. This driver makes a directory of the same shape, which
`kernels.get_local_kernel` and LOCAL_KERNELS load, with a C++ compiler, torch, kernels and ninja alone:

    <out>/<variant>/__init__.py, ...       the Python files of torch-ext/<module>
    <out>/<variant>/_ops.py                the operators under the namespace of this build
    <out>/<variant>/<namespace>.abi3.so    the extension
    <out>/<variant>/metadata.json          what `kernels` reads before it loads the rest

Ninja compiles again only what changed; its files are in <out>/.ninja/.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ninja
import tomlkit
import torch
from kernels._rust import Build

ROOT = Path(__file__).resolve().parent.parent
NINJA = Path(ninja.BIN_DIR) / "ninja"

COMMON_FLAGS = "-std=c++17 -O3 -DNDEBUG -g1 -fPIC -Wall -Wextra -DPy_LIMITED_API=0x03090000"
CUDA_FLAGS = (
    "-std=c++17 -O3 -DNDEBUG -lineinfo -Xcompiler=-fPIC,-fvisibility=hidden,-Wall -Xptxas=--warn-on-spills,-Werror"
)
SANITIZE_FLAGS = "-O1 -fno-omit-frame-pointer -fno-sanitize-recover=all"

# A section of build.toml cannot be tied to a processor, but its flags reach CMake, which expands this expression.
PROCESSOR_FLAGS = re.compile(r"\$<\$<STREQUAL:\$\{CMAKE_SYSTEM_PROCESSOR\},(\w+)>:(.+)>")

OPS_PY = """\
import torch

from . import {namespace}

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""

# The header and the macros that kernel-builder provides to the binding. What an empty module needs of Python's stable
# ABI is declared here, so that a build needs no Python headers, neither the target's nor the host's.
REGISTRATION_H = """\
#pragma once

#include <cstddef>

// torch's macros paste their first argument; one more level expands TORCH_EXTENSION_NAME first.
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

struct Abi3ModuleDef {
  std::ptrdiff_t refcount;
  void *type, *init;
  std::ptrdiff_t index;
  void* copy;
  const char *name, *doc;
  std::ptrdiff_t state_size;
  void *methods, *slots, *traverse, *clear, *free;
};
extern "C" void* PyModule_Create2(Abi3ModuleDef* def, int abi_version);

#define REGISTER_EXTENSION(NAME) REGISTER_EXTENSION_EXPANDED(NAME)
#define REGISTER_EXTENSION_EXPANDED(NAME)                                          \\
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {        \\
    static Abi3ModuleDef def{1, {}, {}, 0, {}, #NAME, {}, 0, {}, {}, {}, {}, {}};  \\
    return PyModule_Create2(&def, 3);                                              \\
  }
"""

NINJA_RULES = """\
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule nvcc
  command = nvcc -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule link
  command = $cxx -shared $flags $in $libraries -o $out
  description = link $out
"""


@dataclass(frozen=True)
class Section:
    """Sources that share their flags: [torch], or a [kernel.*] of the backend."""

    name: str
    sources: list[str]
    flags: list[str]
    cuda_flags: list[str]


def read_sections(config: dict, backend: str, arch: str) -> list[Section]:
    kernels = {name: table for name, table in config["kernel"].items() if table["backend"] == backend}
    sections = []
    for name, table in {"torch": config["torch"], **kernels}.items():
        includes = [f"-I{ROOT / path}" for path in table.get("include", [])]
        cuda_flags = [*map(gencode, table.get("cuda-capabilities", [])), *table.get("cuda-flags", []), *includes]
        sections.append(Section(name, table["src"], flags_for(table.get("cxx-flags", []), arch) + includes, cuda_flags))
    missing = [source for section in sections for source in section.sources if not (ROOT / source).exists()]
    if missing:
        sys.exit(f"build.toml names files that do not exist: {', '.join(missing)}")
    return sections


def gencode(capability: str) -> str:
    """nvcc's option for machine code of a capability like 9.0a; 8.0+PTX also serves newer devices."""
    number, plus, _ = capability.replace(".", "").partition("+")
    return f"-gencode=arch=compute_{number},code={f'[sm_{number},compute_{number}]' if plus else f'sm_{number}'}"


def cuda_version() -> str:
    """Version of nvcc, which names the variant: (13, 0) is cu130."""
    output = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    major, minor = re.search(r"release (\d+)\.(\d+)", output).groups()
    return f"{major}{minor}"


def cuda_libraries() -> str:
    """CUDA's runtime, inside the extension: the one thing of a toolkit that a user would have to have."""
    # nvcc may be a script that calls the real one: only its own words tell where the libraries are.
    plan = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    toolkit = Path(re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)[1].strip()).resolve()
    return f"-L{toolkit}/lib64 -L{toolkit}/lib -lcudart_static -ldl -lrt -lpthread"


def flags_for(flags: list[str], arch: str) -> list[str]:
    """The flags that apply to this processor."""
    result = []
    for flag in flags:
        conditional = PROCESSOR_FLAGS.fullmatch(flag)
        if conditional is None:
            result.append(flag)
        elif conditional[1] == arch:
            result += conditional[2].split(";")
    return result


def source_digest(sections: list[Section], flags: str) -> str:
    """Names a build. Other sources or flags give another namespace, so that both can be loaded into one process."""
    digest = hashlib.sha256(flags.encode())
    for source in ["build.toml", *(source for section in sections for source in section.sources)]:
        digest.update((ROOT / source).read_bytes())
    return digest.hexdigest()[:8]


def write_if_changed(path: Path, content: str) -> None:
    """Keeps the time stamp of an unchanged file, which is what ninja compares."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


def ninja_file(
    cxx: str, sections: list[Section], namespace: str, flags: str, cuda_flags: str, sanitize: str, libraries: str
) -> str:
    lines = [NINJA_RULES, f"cxx = {cxx}"]
    objects = []
    for section in sections:
        # Only the binding needs the namespace, so the kernels stay compiled when it changes.
        define = [f"-DTORCH_EXTENSION_NAME={namespace}"] if section.name == "torch" else []
        for source in section.sources:
            if source.endswith(".cpp"):
                objects.append(f"objects/{source}.o")
                lines.append(f"build {objects[-1]}: cxx {ROOT / source}")
                lines.append(f"  flags = {' '.join([flags, *section.flags, *define])}")
            elif source.endswith(".cu"):
                objects.append(f"objects/{source}.o")
                lines.append(f"build {objects[-1]}: nvcc {ROOT / source}")
                lines.append(f"  flags = {' '.join([cuda_flags, *section.cuda_flags])}")
    # Python imports the extension after torch, whose libraries are then found by their names. An empty library of that
    # name satisfies the linker, for every processor and every build of torch.
    lines += ["build libtorch.so: link", "  flags = -Wl,-soname,libtorch.so"]
    lines += [f"build extension.so: link {' '.join(objects)} | libtorch.so", f"  flags = {sanitize}"]
    lines += [f"  libraries = -L. -Wl,--no-as-needed -ltorch {libraries}", ""]
    return "\n".join(lines)


def check_headers_are_named(work: Path, sections: list[Section]) -> None:
    """kernel-builder sees only the files that build.toml names; a header that it leaves out is missing there."""
    output = subprocess.run([NINJA, "-C", work, "-t", "deps"], check=True, capture_output=True, text=True).stdout
    used = {Path(line.strip()) for line in output.splitlines() if line.startswith("    /")}
    named = {ROOT / source for section in sections for source in section.sources}
    folders = {path.parent for path in named}
    unnamed = sorted(str(path.relative_to(ROOT)) for path in used - named if path.parent in folders)
    if unnamed:
        sys.exit(f"build.toml does not name these included files: {', '.join(unnamed)}")


def install(variant_dir: Path, files: dict[str, bytes]) -> None:
    """Makes the directory hold exactly these files. A process that has an old one open keeps it."""
    for name, content in files.items():
        path = variant_dir / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.new")
            fresh.write_bytes(content)
            os.replace(fresh, path)
    for path in variant_dir.rglob("*"):
        if path.is_file() and str(path.relative_to(variant_dir)) not in files and path.suffix != ".pyc":
            path.unlink()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu", help="a backend of build.toml (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: build, or build-sanitize with --sanitize")
    parser.add_argument(
        "--cxx", default="g++", help="C++ compiler, possibly for another processor (default: %(default)s)"
    )
    parser.add_argument("--arch", default=platform.machine(), help="processor to build for (default: this one)")
    parser.add_argument("--sanitize", metavar="LIST", help="for example address,undefined")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command lines")
    args = parser.parse_args()
    args.out = (args.out or ROOT / ("build-sanitize" if args.sanitize else "build")).resolve()
    return args


def main() -> None:
    args = parse_arguments()
    if platform.system() != "Linux":
        sys.exit("The local build works on Linux; kernel-builder builds for other systems.")
    backends = [str(backend).lower() for backend in Build.open(ROOT).general.backends]
    if args.backend not in backends:
        sys.exit(f"build.toml has the backends {', '.join(backends)}, not {args.backend}")
    config = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()
    general = config["general"]
    module = general["name"].replace("-", "_")
    major, minor = (int(part) for part in config["torch"]["stable-abi"][args.backend].split("."))
    cuda = args.backend == "cuda"
    platform_name = f"cu{cuda_version()}" if cuda else args.backend
    variant = f"torch-stable-abi{major}{minor}-{platform_name}-{args.arch}-linux"
    work = args.out / ".ninja" / variant

    defines = f"-D{args.backend.upper()}_KERNEL -DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}"
    flags = f"{COMMON_FLAGS} {defines}"
    sanitize = f"-fsanitize={args.sanitize} {SANITIZE_FLAGS}" if args.sanitize else ""
    sections = read_sections(config, args.backend, args.arch)
    namespace = f"_{module}_{args.backend}_{source_digest(sections, ' '.join([args.cxx, flags, sanitize]))}"
    includes = f"-isystem {Path(torch.__file__).parent}/include -I{work}"
    paths = f"{includes} -ffile-prefix-map={ROOT}/="
    cuda_flags = f"{CUDA_FLAGS} {defines} {includes}"

    write_if_changed(work / "registration.h", REGISTRATION_H)
    libraries = cuda_libraries() if cuda else ""
    text = ninja_file(args.cxx, sections, namespace, f"{flags} {sanitize} {paths}", cuda_flags, sanitize, libraries)
    write_if_changed(work / "build.ninja", text)
    result = subprocess.run([NINJA, "-C", work, "extension.so", *(["--verbose"] if args.verbose else [])])
    if result.returncode:
        sys.exit(result.returncode)
    check_headers_are_named(work, sections)

    metadata = {
        "name": general["name"],
        "id": namespace,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": args.backend},
    }
    python = ROOT / "torch-ext" / module
    files = {str(path.relative_to(python)): path.read_bytes() for path in python.rglob("*.py")}
    files["_ops.py"] = OPS_PY.format(namespace=namespace).encode()
    files["metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    files[f"{namespace}.abi3.so"] = (work / "extension.so").read_bytes()
    install(args.out / variant, files)
    print(args.out / variant)


if __name__ == "__main__":
    main()
