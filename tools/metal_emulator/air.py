"""Kernels that Apple's compiler made, on the emulator: a check of the emulator against something not written here.

A .metallib holds LLVM bitcode (AIR) for each kernel. It is disassembled, its intrinsics `air.*` are mapped onto the
shim, and the rest is compiled by clang as it is.
"""

import re
import struct
import subprocess
from pathlib import Path

import metal_build

BITCODE_MAGIC = b"\xde\xc0\x17\x0b"
CXX_TYPES = {"ptr": "void*", "<3 x i32>": "Uint3", "i32": "uint32_t", "i16": "uint16_t"}
CONSTANT_TYPES = {"b": "unsigned char", "j": "uint32_t", "i": "int32_t"}
INTRINSICS = {
    "air.simd_sum.f32": "float {}(float a) { return metal::simd_sum(a); }",
    "air.simd_max.f32": "float {}(float a) { return metal::simd_max(a); }",
    "air.simd_shuffle_xor.f32": "float {}(float a, uint16_t mask) { return metal::simd_shuffle_xor(a, mask); }",
    "air.fast_exp.f32": "float {}(float a) { return metal::exp(a); }",
    "air.fmax.f32": "float {}(float a, float b) { return metal::max(a, b); }",
    "air.wg.barrier": "void {}(int flags, int) { metal::threadgroup_barrier(metal::mem_flags(flags)); }",
    "air.convert.f.f16.f.f32": "half {}(float a) { return a; }",
    "air.convert.f.f32.f.f16": "float {}(half a) { return a; }",
    "air.normalize_function_constant_predicate.i8": "unsigned char {}(unsigned char a) { return a; }",
}


def disassemble(metallib: bytes, kernel: str, folder: Path) -> str:
    """The LLVM assembly of the module that defines this kernel."""
    at = metallib.find(BITCODE_MAGIC)
    while at >= 0:
        _, _, offset, size, _ = struct.unpack_from("<IIIII", metallib, at)
        module = metallib[at : at + offset + size]
        if kernel.encode() in module:
            file = folder / f"{kernel}.bc"
            file.write_bytes(module)
            run = subprocess.run(["llvm-dis-19", file, "-o", "-"], capture_output=True, text=True, check=True)
            if f"@{kernel}(" in run.stdout:
                return run.stdout
        at = metallib.find(BITCODE_MAGIC, at + 1)
    raise LookupError(f"no kernel {kernel}")


def for_this_machine(text: str) -> str:
    """The same module without address spaces, for x86-64; function constants become variables."""
    text = re.sub(r"(?<=[ (])addrspace\(\d\) ", "", text)
    text = re.sub(r" addrspace\(\d\)", "", text)
    text = re.sub(r"addrspacecast \(ptr (@\S+) to ptr\)", r"\1", text)
    text = re.sub(r"^@llvm\.((compiler\.)?used|global_ctors).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!llvm\.(module\.flags|ident|linker).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^target (datalayout|triple).*$", "", text, flags=re.MULTILINE)
    constant = r"@(\w+\.MTL_FC_INIT_\d+_\w+) = internal (?:unnamed_addr )?externally_initialized constant (\S+) undef.*"
    text = re.sub(constant, r'@"\1" = global \2 0', text)
    text = re.sub(r',? section "air[^"]*"', "", text)
    return re.sub(r"define internal void @(\"?_GLOBAL__sub_I_)", r"define void @\1", text)


def parameters(text: str, kernel: str) -> list[tuple[str, str, int | None]]:
    """Of each parameter its LLVM type, what AIR's metadata calls it, and a buffer's index."""
    declared = re.search(rf"define [\w ]*void @{kernel}\((.*?)\) local_unnamed_addr", text, re.DOTALL)[1]
    types = re.findall(r"(?:^|, )(ptr|i\d+|<3 x i32>)", re.sub(r"\([^()]*\)", "", declared))
    nodes = dict(re.findall(r"^!(\d+) = (.*)$", text, re.MULTILINE))
    (entry,) = (node for node in nodes.values() if f"@{kernel}," in node)
    arguments = nodes[re.findall(r"!(\d+)", entry)[1]]
    found = []
    for llvm_type, node in zip(types, re.findall(r"!(\d+)", arguments), strict=True):
        words = re.findall(r'!"(air\.[^"]+)"', nodes[node])
        index = re.search(r'"air.location_index", i32 (\d+)', nodes[node])
        found.append((llvm_type, "buffer" if "air.buffer" in words else words[0][4:], int(index[1]) if index else None))
    return found


def wrapper(text: str, kernel: str) -> str:
    """What runs the kernel on the emulator, and the intrinsics that it uses."""
    arguments, types = [], []
    for llvm_type, kind, index in parameters(text, kernel):
        types.append(CXX_TYPES[llvm_type])
        if kind == "buffer":
            arguments.append(f"bound({index})")
        elif llvm_type == "<3 x i32>":
            arguments.append(f"uint3_of(mtl::ids().{kind})")
        else:
            arguments.append(f"mtl::ids().{kind}")
    constants = sorted(set(re.findall(r"@\"?(\w+\.MTL_FC_INIT_(\d+)_(\w))", text)))
    start = re.search(r"define void @\"?(_GLOBAL__sub_I_[^\"(]*)", text)
    lines = [
        '#include "metal.h"',
        "typedef uint32_t Uint3 __attribute__((ext_vector_type(3)));",
        "static Uint3 uint3_of(mtl::Dim3 d) { return Uint3{d.x, d.y, d.z}; }",
        "static void* bound(int i) { return mtl::slot(i); }",
        f'extern "C" void {kernel}({", ".join(types)});',
        *(f'extern {CONSTANT_TYPES[t]} constant{i} asm("{symbol}");' for symbol, i, t in constants),
        f'extern "C" void start() asm("{start[1]}");' if start else "static void start() {}",
    ]
    copies = "".join(
        f"if (mtl::function_constants[{i}].set)"
        f" memcpy(&constant{i}, mtl::function_constants[{i}].value, sizeof constant{i});"
        for _, i, _ in constants
    )
    lines.append(f"static void run() {{ {copies} start(); {kernel}({', '.join(arguments)}); }}")
    lines.append(f'static mtl::Kernel registered{{"{kernel}", run, nullptr, 0, 1024, nullptr}};')
    lines.append("static const bool done = mtl::register_kernel(&registered);")
    used = set(re.findall(r"declare .*?@(air\.[\w.]+)\(", text))
    if unknown := used - INTRINSICS.keys():
        raise LookupError(f"{kernel} uses {', '.join(sorted(unknown))}")
    for n, name in enumerate(sorted(used)):
        definition = INTRINSICS[name].replace("{}", f"air{n}", 1)
        lines.append(f'extern "C" {definition.partition("{")[0].strip()} asm("{name}");')
        lines.append(f'extern "C" {definition}')
    return "\n".join([*lines, ""])


def library(metallib: Path, kernel: str) -> Path:
    """A shared library for emulator.Library with this one kernel."""
    folder = metal_build.OUT / "air"
    folder.mkdir(parents=True, exist_ok=True)
    text = for_this_machine(disassemble(metallib.read_bytes(), kernel, folder))
    assembly, source, target = (folder / f"{kernel}.{suffix}" for suffix in ("ll", "cpp", "so"))
    assembly.write_text(text)
    source.write_text(wrapper(text, kernel))
    command = [
        metal_build.CXX,
        "-std=c++20",
        "-O1",
        "-g1",
        "-fPIC",
        "-shared",
        "-march=x86-64-v3",
        "-Wno-override-module",
    ]
    command += [
        f"-I{metal_build.SHIM}",
        "-Wno-reserved-user-defined-literal",
        "-x",
        "ir",
        assembly,
        "-x",
        "c++",
        source,
    ]
    command += [metal_build.SHIM / "runtime.cpp", metal_build.SHIM / "bfloat16.cpp", "-o", target]
    subprocess.run(command, check=True)
    return target
