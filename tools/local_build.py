"""Builds the kernel that build.toml describes into <out>/<variant>/, without Nix.

kernel-builder turns the same build.toml into the Hub's builds. This driver makes a directory of the same shape, which
`kernels.get_local_kernel` and LOCAL_KERNELS load, with nothing but a C++ compiler, torch, kernels and ninja:

    <out>/<variant>/__init__.py, ...       the Python files of torch-ext/<module>
    <out>/<variant>/_ops.py                the operators under this build's own namespace
    <out>/<variant>/<namespace>.abi3.so    the extension
    <out>/<variant>/metadata.json          what `kernels` checks before it loads the rest

Ninja recompiles what changed; its files live in <out>/.ninja/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ninja
import tomlkit
import torch
from kernels._rust import Build

ROOT = Path(__file__).resolve().parent.parent

COMPILED = {".cpp"}
COMMON_FLAGS = (
    "-std=c++17 -O3 -DNDEBUG -g1 -fPIC -fvisibility=hidden -fno-gnu-unique -Wall -Wextra -DPy_LIMITED_API=0x03090000"
)
SANITIZE_FLAGS = "-fno-omit-frame-pointer -fno-sanitize-recover=all"

# build.toml knows no processor, but kernel-builder hands flags to CMake, which expands this expression.
PROCESSOR_FLAGS = re.compile(r"\$<\$<STREQUAL:\$\{CMAKE_SYSTEM_PROCESSOR\},(\w+)>:(.+)>")

OPS_PY = """\
import torch

from . import {namespace}  # noqa: F401  (importing it registers the operators)

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""

# kernel-builder generates a header of this name with the same four macros. This one declares the three things of
# Python's stable ABI that an empty module needs, so that a build needs no Python headers, the target's or the host's.
REGISTRATION_H = """\
#pragma once

#include <cstddef>

// The macros of torch paste their first argument; going through one more macro expands TORCH_EXTENSION_NAME before.
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

struct Abi3ModuleDef {
  std::ptrdiff_t refcount;
  void* type;
  void* init;
  std::ptrdiff_t index;
  void* copy;
  const char* name;
  const char* doc;
  std::ptrdiff_t state_size;
  void *methods, *slots, *traverse, *clear, *free;
};
extern "C" void* PyModule_Create2(Abi3ModuleDef* def, int abi_version);

#define PAGED_ATTN_CONCAT(A, B) A##B
#define PAGED_ATTN_STRING(A) #A
#define REGISTER_EXTENSION(NAME) REGISTER_EXTENSION_EXPANDED(NAME)
#define REGISTER_EXTENSION_EXPANDED(NAME)                                         \\
  extern "C" __attribute__((visibility("default"))) void* PAGED_ATTN_CONCAT(PyInit_, NAME)() { \\
    static Abi3ModuleDef def = {};                                                \\
    def.refcount = 1;                                                             \\
    def.name = PAGED_ATTN_STRING(NAME);                                           \\
    return PyModule_Create2(&def, 3);                                             \\
  }
"""

RULES = """\
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule link
  command = $cxx -shared $link_flags $in $libraries -o $out
  description = link $out
"""


@dataclass(frozen=True)
class Section:
    """One group of sources with its own flags: [torch] or a [kernel.*] of the backend."""

    name: str
    sources: list[str]
    include: list[str]
    flags: list[str]


def read_sections(config: dict, backend: str, arch: str) -> list[Section]:
    kernels = {name: kernel for name, kernel in config["kernel"].items() if kernel["backend"] == backend}
    return [
        Section(name, list(table["src"]), list(table.get("include", [])), flags_for(table.get("cxx-flags", []), arch))
        for name, table in {"torch": config["torch"], **kernels}.items()
    ]


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


def stable_abi(config: dict, backend: str) -> tuple[int, int]:
    """The torch version whose stable ABI this backend is built on."""
    version = config["torch"]["stable-abi"][backend]
    major, minor = str(version).split(".")
    return int(major), int(minor)


def source_digest(sections: list[Section], flags: str) -> str:
    """Names this build: other sources or flags give another namespace, so both can be loaded into one process."""
    digest = hashlib.sha256(flags.encode())
    digest.update((ROOT / "build.toml").read_bytes())
    for section in sections:
        for source in section.sources:
            digest.update((ROOT / source).read_bytes())
    return digest.hexdigest()[:8]


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time stamp of an unchanged file, which is what ninja compares."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def ninja_text(args: argparse.Namespace, sections: list[Section], namespace: str, flags: str, library: Path) -> str:
    lines = [RULES, f"cxx = {args.cxx}"]
    objects = []
    for section in sections:
        includes = [f"-I{ROOT / path}" for path in section.include]
        # Only the binding needs the namespace; the kernels stay compiled when it changes.
        define = [f"-DTORCH_EXTENSION_NAME={namespace}"] if section.name == "torch" else []
        for source in section.sources:
            if Path(source).suffix in COMPILED:
                target = f"objects/{source}.o"
                lines += [
                    f"build {target}: cxx {ROOT / source}",
                    f"  flags = {' '.join([flags, *section.flags, *includes, *define])}",
                ]
                objects.append(target)
    # The operators' libraries are already loaded when Python imports the extension and are found by their names. An
    # empty library of that name satisfies the linker for every processor and every build of torch.
    lines += ["build libtorch.so: link", "  link_flags = -Wl,-soname,libtorch.so"]
    lines += [
        f"build {library}: link {' '.join(objects)} | libtorch.so",
        f"  link_flags = {f'-fsanitize={args.sanitize}' if args.sanitize else ''}",
        "  libraries = -L. -Wl,--no-as-needed -ltorch",
        "",
    ]
    return "\n".join(lines)


def check_listed(work: Path, sections: list[Section]) -> None:
    """kernel-builder sees only the files that build.toml names, so a header that it does not name fails there."""
    listed = {str(ROOT / source) for section in sections for source in section.sources}
    deps = subprocess.run(
        [Path(ninja.BIN_DIR) / "ninja", "-C", work, "-t", "deps"], check=True, capture_output=True, text=True
    )
    used = {os.path.normpath(work / line.strip()) for line in deps.stdout.splitlines() if line.startswith("    ")}
    missing = sorted(
        path for path in used if path.startswith((f"{ROOT}/torch-ext/", f"{ROOT}/paged_decode")) and path not in listed
    )
    if missing:
        sys.exit("build.toml does not name these files that the sources include:\n  " + "\n  ".join(missing))


def install(variant_dir: Path, files: dict[str, bytes]) -> None:
    """Makes the directory hold exactly these files. Running processes keep the files that they have open."""
    for name, content in files.items():
        path = variant_dir / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(path.name + ".new")
            fresh.write_bytes(content)
            os.replace(fresh, path)
    for path in variant_dir.rglob("*"):
        if path.is_file() and str(path.relative_to(variant_dir)) not in files and "__pycache__" not in path.parts:
            path.unlink()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu", help="a backend of build.toml (default: cpu)")
    parser.add_argument("--out", type=Path, help="default: build, with --sanitize build-sanitize")
    parser.add_argument(
        "--cxx", default=os.environ.get("CXX", "c++"), help="C++ compiler, also a cross compiler (default: $CXX or c++)"
    )
    parser.add_argument("--arch", default=platform.machine(), help="processor to build for (default: this one)")
    parser.add_argument("--sanitize", default="", metavar="LIST", help="for example address,undefined")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command lines")
    args = parser.parse_args()
    args.out = (args.out or ROOT / ("build-sanitize" if args.sanitize else "build")).resolve()
    return args


def main() -> None:
    args = parse_arguments()
    backends = [str(backend).lower() for backend in Build.open(ROOT).general.backends]
    if args.backend not in backends:
        sys.exit(f"build.toml has the backends {', '.join(backends)}, not {args.backend}")
    config = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()
    general = config["general"]
    module = general["name"].replace("-", "_")
    major, minor = stable_abi(config, args.backend)
    variant = f"torch-stable-abi{major}{minor}-{args.backend}-{args.arch}-{platform.system().lower()}"
    work = args.out / ".ninja" / variant

    torch_include = Path(torch.__file__).parent / "include"
    flags = f"{COMMON_FLAGS} -D{args.backend.upper()}_KERNEL -DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}"
    flags += f" -isystem {torch_include} -I{work} -ffile-prefix-map={ROOT}/="
    if args.sanitize:
        flags += f" -fsanitize={args.sanitize} {SANITIZE_FLAGS}"
    sections = read_sections(config, args.backend, args.arch)
    namespace = f"_{module}_{args.backend}_{source_digest(sections, args.cxx + flags)}"
    library = work / f"{namespace}.abi3.so"

    write_if_changed(work / "registration.h", REGISTRATION_H)
    write_if_changed(work / "build.ninja", ninja_text(args, sections, namespace, flags, library.name))
    command = [Path(ninja.BIN_DIR) / "ninja", "-C", work, "--quiet", *(["-v"] if args.verbose else []), library.name]
    if code := subprocess.run(command).returncode:
        sys.exit(code)
    check_listed(work, sections)

    python = ROOT / "torch-ext" / module
    files = {str(path.relative_to(python)): path.read_bytes() for path in sorted(python.rglob("*.py"))}
    files["_ops.py"] = OPS_PY.format(namespace=namespace).encode()
    files[library.name] = library.read_bytes()
    metadata = {
        "name": general["name"],
        "id": namespace,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": args.backend},
    }
    files["metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    install(args.out / variant, files)
    print(args.out / variant)


if __name__ == "__main__":
    main()
