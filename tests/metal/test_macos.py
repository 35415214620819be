"""The host code compiled for the real target, arm64 macOS, against the headers of torch's macOS wheels, and all symbols
that it needs of torch looked up in the wheels' libraries. The wheels come from PyPI into build/.metal/macos/."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import metal_build
import pytest

FOLDER = metal_build.OUT / "macos"
VERSIONS = ["2.12.0", "2.13.0"]
PYTHON_OF_WHEELS = "3.11"  # any for which torch has them: nothing of Python's is used
# What the system offers and no wheel holds: frameworks, the Objective-C, Blocks and C++ runtimes.
SYSTEM = re.compile(
    r"_objc_\w+|_OBJC_(CLASS|METACLASS|EHTYPE)_\$_(NS|MTL|MPS)\w+|__objc_empty_\w+|__NSConcrete\w+|_NS\w+|_MTL\w+"
    r"|___CFConstantStringClassReference|__Block_\w+|_dispatch_\w+|__dispatch_\w+|__Z(N|NK|T[ISTV]N?|St|NSt|NKSt)*St3__1.*"
    r"|__ZN?K?St\w+|__ZT[ISTV]\w*St\w+|__Z(dl|da|nw|na)\w+|__ZTVN10__cxxabiv1\w+|___cxa_\w+|___gxx_personality_v0"
    r"|__Unwind_Resume|___dso_handle|_PyModule_Create2"
)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--timeout", "20", "--retries", "1"]
    run = subprocess.run([*command, *arguments, "--quiet", "--no-deps"], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"PyPI did not give {arguments[1]}: {run.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def zig():
    """A C++ compiler that brings headers and libraries of macOS along."""
    folder = FOLDER / "zig"
    if not folder.exists():
        pip("install", "ziglang", "--target", str(folder))
    return folder / "ziglang" / "zig"


@pytest.fixture(scope="module", params=VERSIONS)
def wheel(request):
    """Headers of torch for macOS, and the names that its libraries define."""
    folder = FOLDER / f"torch-{request.param}"
    symbols = folder / "symbols.txt"
    if not symbols.exists():
        target = ["--platform", "macosx_14_0_arm64", "--only-binary=:all:", "--python-version", PYTHON_OF_WHEELS]
        pip("download", f"torch=={request.param}", *target, "--dest", str(folder))
        (file,) = folder.glob("torch-*.whl")
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            archive.extractall(folder, [name for name in names if name.startswith("torch/include/")])
            libraries = [name for name in names if name.startswith("torch/lib/") and name.endswith(".dylib")]
            archive.extractall(folder, libraries)
        defined = [name for library in libraries for name in nm(folder / library, "--defined-only", "--extern-only")]
        for library in libraries:
            (folder / library).unlink()
        file.unlink()
        symbols.write_text("\n".join(sorted(set(defined))))
    return folder / "torch" / "include", set(symbols.read_text().splitlines())


def nm(file, *options):
    run = subprocess.run(["llvm-nm-19", "--format=just-symbols", *options, file], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_compiles_and_links(zig, wheel, tmp_path):
    include, in_torch = wheel
    flags = metal_build.macos_flags(include, tmp_path)
    in_system = set(re.findall(r"_[\w$.]+", (zig.parent / "lib/libc/darwin/libSystem.tbd").read_text()))
    sections = metal_build.metal_sections()
    sources = [source for section in sections for source in section.sources if source.endswith((".cpp", ".mm"))]
    assert any(source.endswith(".mm") for source in sources)
    needed, own = set(), set()
    for source in sources:
        language = "-xobjective-c++" if source.endswith(".mm") else "-xc++"
        output = tmp_path / f"{Path(source).name}.o"
        command = [zig, "c++", "-target", "aarch64-macos.14.0", language, *flags, "-c", metal_build.ROOT / source]
        environment = {"ZIG_GLOBAL_CACHE_DIR": str(FOLDER / "cache"), "PATH": "/usr/bin:/bin"}
        run = subprocess.run([*command, "-o", output], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        needed |= set(nm(output, "--undefined-only"))
        own |= set(nm(output, "--defined-only"))
    missing = [name for name in needed - own - in_torch - in_system if not SYSTEM.fullmatch(name)]
    assert missing == []
    assert any("MPSStream" in name for name in needed & in_torch), "the check looks up nothing"
