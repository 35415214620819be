"""Builds the kernel that build.toml describes into <out>/<variant>/, without Nix.

kernel-builder makes the Hub's builds from the same build.toml. This driver makes a directory of the same shape, which
`kernels.get_local_kernel` and LOCAL_KERNELS load, with a C++ compiler, torch, kernels and ninja alone (and nvcc for
CUDA, Xcode's metal for Metal):

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
import shlex
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

# C++20 as with kernel-builder, which torch's headers behind MPS want.
COMMON_FLAGS = "-std=c++20 -O3 -DNDEBUG -g1 -fPIC -Wall -Wextra -DPy_LIMITED_API=0x03090000"
# No -Werror for ptxas: the object keeps ptxas' options for the driver that compiles its PTX for a newer GPU, and that
# one would refuse the whole object where its registers do not suffice.
# Compressed, the extension has a fifth of its size.
CUDA_FLAGS = "-std=c++20 -O3 -DNDEBUG -lineinfo --compress-mode=size -Xcompiler=-fPIC,-Wall"
CUDA_FLAGS += " -Xptxas=--warn-on-spills,--warn-on-local-memory-usage"
# As kernel-builder compiles: with fast math, Metal's default.
METAL_FLAGS = "-std=metal4.0 -O2"
# The oldest `kernels` that the package was loaded with.
KERNELS_MINVER = "0.17.0"
SANITIZE_FLAGS = "-O1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
# AddressSanitizer puts the variables of a function into a frame of its own, to find their use after it returned. There
# g++ 12 does not align registers of 64 bytes, and the store of one is a segmentation fault. Such frames are the default
# from the runtime of g++ 13 on. So the files with such registers do without.
ASKEW_FRAMES, NO_FRAMES = "-mavx512f", "--param=asan-use-after-return=0"

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

# What kernel-builder's metallib_to_header.py makes; @DATA@ defines metallib_data and metallib_data_len.
METALLIB_H = """\
#pragma once

#include <Metal/Metal.h>

#include <cstddef>

namespace paged_attn_metal {

@DATA@
static inline id<MTLLibrary> createLibrary(id<MTLDevice> device, NSError** error = nullptr) {
  dispatch_data_t data = dispatch_data_create(metallib_data, metallib_data_len, dispatch_get_main_queue(), ^{
  });
  return [device newLibraryWithData:data error:error];
}

}  // namespace paged_attn_metal
"""

# The library itself, without a file of numbers in between.
METALLIB_DATA = """\
__asm__(
    ".section __TEXT,__const\\n"
    ".p2align 4\\n"
    "_paged_attn_metallib: .incbin \\"extension.metallib\\"\\n"
    "Lpaged_attn_metallib_end:\\n"
    ".p2align 3\\n"
    "_paged_attn_metallib_len: .quad Lpaged_attn_metallib_end - _paged_attn_metallib\\n"
    ".text\\n");
extern const unsigned char metallib_data[] __asm__("_paged_attn_metallib");
extern const size_t metallib_data_len __asm__("_paged_attn_metallib_len");
"""

NINJA_RULES = """\
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

# Fails where a kernel spills or has variables in local memory. Either is correct, and slow.
rule nvcc
  command = nvcc -MD -MF $out.d $flags -c $in -o $out >$out.log 2>&1; status=$$?; cat $out.log; $
      test $$status = 0 && ! grep -q "Registers are spilled\\|Local memory used" $out.log
  depfile = $out.d
  deps = gcc
  description = compile $in

rule metal
  command = xcrun -sdk macosx metal -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule metallib
  command = xcrun -sdk macosx metallib $in -o $out
  description = link $out

rule link
  command = $cxx $flags $in $libraries -o $out
  description = link $out
"""

RULES = {".cpp": "cxx", ".mm": "cxx", ".cu": "nvcc", ".metal": "metal"}

# Where a backend can be built.
SYSTEMS = {"Linux": ("cpu", "cuda"), "Darwin": ("cpu", "metal")}


@dataclass(frozen=True)
class Section:
    """Sources that share their flags: [torch], or a [kernel.*] of the backend."""

    name: str
    sources: list[str]
    includes: list[str]
    flags: list[str]
    cuda_flags: list[str]


def read_sections(config: dict, backend: str, arch: str, backend_source: Path | None = None) -> list[Section]:
    kernels = {name: table for name, table in config["kernel"].items() if table["backend"] == backend}
    if backend_source:
        kernels = {"test": {"src": [str(backend_source.relative_to(ROOT))], "include": ["torch-ext"]}}
    sections = []
    for name, table in {"torch": config["torch"], **kernels}.items():
        includes = [f"-I{ROOT / path}" for path in table.get("include", [])]
        cuda_flags = [*map(gencode, table.get("cuda-capabilities", [])), *table.get("cuda-flags", []), *includes]
        flags = [*flags_for(table.get("cxx-flags", []), arch), *includes]
        sections.append(Section(name, table["src"], includes, flags, cuda_flags))
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


def without_unique_symbols(cxx: str) -> str:
    """GCC's flag against symbols that are shared in the whole process, so by two builds of one kernel; "" for clang."""
    flag = "-fno-gnu-unique"
    command = [*shlex.split(cxx), flag, "-E", "-x", "c++", os.devnull]
    return "" if subprocess.run(command, capture_output=True).returncode else flag


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
    """Names a build. Other sources or flags give another namespace, so that both can be loaded into one process. Python
    counts too: `kernels` keeps modules under this name, and the second build of one name would run the first one's."""
    digest = hashlib.sha256(flags.encode())
    python = sorted(path.relative_to(ROOT) for path in (ROOT / "torch-ext").rglob("*.py"))
    for source in ["build.toml", *(source for section in sections for source in section.sources), *python]:
        digest.update((ROOT / source).read_bytes())
    return digest.hexdigest()[:8]


def write_if_changed(path: Path, content: str) -> None:
    """Keeps the time stamp of an unchanged file, which is what ninja compares."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


def binding_flags(source: str, namespace: str) -> list[str]:
    """Only the binding needs the namespace, so the rest stays compiled when it changes."""
    return [f"-DTORCH_EXTENSION_NAME={namespace}"] if Path(source).name == "torch_binding.cpp" else []


def ninja_file(cxx: str, sections: list[Section], namespace: str, flags: dict[str, str], link: str) -> str:
    """`flags` by the suffix of the source, `link` for the extension."""
    lines = [NINJA_RULES, f"cxx = {cxx}"]
    objects, shaders = [], []
    for section in sections:
        # As with kernel-builder, cxx-flags are for C++ alone.
        own = {".cpp": section.flags, ".mm": section.includes}
        own |= {".cu": section.cuda_flags, ".metal": section.includes}
        for source in section.sources:
            suffix = Path(source).suffix
            if suffix not in RULES:
                continue
            output = f"objects/{source}.o"
            (shaders if suffix == ".metal" else objects).append(output)
            embedded = " | extension.metallib" if suffix == ".mm" else ""
            lines.append(f"build {output}: {RULES[suffix]} {ROOT / source}{embedded}")
            lines.append(f"  flags = {' '.join([flags[suffix], *own[suffix], *binding_flags(source, namespace)])}")
    if shaders:
        lines.append(f"build extension.metallib: metallib {' '.join(shaders)}")
    # An empty library of this name satisfies the linker, for every processor and every build of torch.
    lines += ["build libtorch.so: link", "  flags = -shared -Wl,-soname,libtorch.so"]
    stub = " | libtorch.so" if "-ltorch" in link else ""
    lines += [f"build extension.so: link {' '.join(objects)}{stub}", f"  libraries = {link}", ""]
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


def package_files(config: dict, backend: str, namespace: str, extension: Path) -> dict[str, bytes]:
    """Everything of a variant, by its name in the directory."""
    general = config["general"]
    optional = {name: general[name] for name in ("upstream", "source") if name in general}
    kernels = [table for table in config["kernel"].values() if table["backend"] == backend]
    archs = sorted({arch for table in kernels for arch in table.get("cuda-capabilities", [])})
    metadata = {
        "name": general["name"],
        "id": namespace,
        "version": general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": general["license"],
        **optional,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
    }
    python = ROOT / "torch-ext" / general["name"].replace("-", "_")
    files = {str(path.relative_to(python)): path.read_bytes() for path in python.rglob("*.py")}
    files["_ops.py"] = OPS_PY.format(namespace=namespace).encode()
    files["metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    files[f"{namespace}.abi3.so"] = extension.read_bytes()
    return files


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
    machine = platform.machine().replace("arm64", "aarch64")
    parser.add_argument("--arch", default=machine, help="processor to build for (default: this one)")
    parser.add_argument("--system", default=platform.system(), help="Linux or Darwin (default: this one)")
    parser.add_argument("--sanitize", metavar="LIST", help="for example address,undefined")
    parser.add_argument(
        "--backend-source", type=Path, metavar="FILE", help="takes the place of the backend's sources, for tests"
    )
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command lines")
    args = parser.parse_args()
    args.out = (args.out or ROOT / ("build-sanitize" if args.sanitize else "build")).resolve()
    return args


def main() -> None:
    args = parse_arguments()
    backends = [str(backend).lower() for backend in Build.open(ROOT).general.backends]
    possible = [backend for backend in SYSTEMS.get(args.system, ()) if backend in backends]
    if args.backend not in possible:
        sys.exit(
            f"--backend: expected {' or '.join(possible) or 'Linux or macOS'} on {args.system}, got {args.backend}"
        )
    config = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()
    module = config["general"]["name"].replace("-", "_")
    cuda, metal = args.backend == "cuda", args.backend == "metal"
    variant = f"{args.arch}-{args.system.lower()}"
    defines = f"-D{args.backend.upper()}_KERNEL"
    if metal:
        variant = f"torch{''.join(torch.__version__.split('.')[:2])}-metal-{variant}"
        defines += " -DEMBEDDED_METALLIB_HEADER='\"metallib.h\"' -DEMBEDDED_METALLIB_NAMESPACE=paged_attn_metal"
    else:
        major, minor = (int(part) for part in config["torch"]["stable-abi"][args.backend].split("."))
        platform_name = f"cu{cuda_version()}" if cuda else args.backend
        variant = f"torch-stable-abi{major}{minor}-{platform_name}-{variant}"
        defines += f" -DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}"
    work = args.out / ".ninja" / variant

    flags = f"{COMMON_FLAGS} {without_unique_symbols(args.cxx)} {defines}"
    sanitize = f"-fsanitize={args.sanitize} {SANITIZE_FLAGS}" if args.sanitize else ""
    sections = read_sections(config, args.backend, args.arch, args.backend_source)
    if args.sanitize:
        for section in sections:
            section.flags.extend([NO_FRAMES] * (ASKEW_FRAMES in section.flags))
    namespace = f"_{module}_{args.backend}_{source_digest(sections, ' '.join([args.cxx, flags, sanitize]))}"
    headers = Path(torch.__file__).parent / "include"
    includes = f"-isystem {headers} -isystem {headers}/torch/csrc/api/include -I{work}"
    host = f"{flags} {sanitize} {includes} -ffile-prefix-map={ROOT}/="
    by_suffix = {
        ".cpp": host,
        ".mm": f"{host} -x objective-c++",
        ".cu": f"{CUDA_FLAGS} {defines} {includes}",
        ".metal": METAL_FLAGS,
    }
    # Python imports the extension after torch, whose libraries are then found by their names (Linux) or their symbols
    # (macOS, where torch has loaded the frameworks too).
    link = "-undefined dynamic_lookup" if args.system == "Darwin" else "-L. -Wl,--no-as-needed -ltorch"
    link = f"-shared {sanitize} {link} {cuda_libraries() if cuda else ''}"

    write_if_changed(work / "registration.h", REGISTRATION_H)
    if metal:
        write_if_changed(work / "metallib.h", METALLIB_H.replace("@DATA@", METALLIB_DATA))
    write_if_changed(work / "build.ninja", ninja_file(args.cxx, sections, namespace, by_suffix, link))
    result = subprocess.run([NINJA, "-C", work, "extension.so", *(["--verbose"] if args.verbose else [])])
    if result.returncode:
        sys.exit(result.returncode)
    if not args.backend_source:
        check_headers_are_named(work, sections)

    install(args.out / variant, package_files(config, args.backend, namespace, work / "extension.so"))
    print(args.out / variant)


if __name__ == "__main__":
    main()
