"""The build of a Mac (tools/local_build.py --backend metal) for the real target, arm64 macOS, against the headers of
torch's macOS wheels; all symbols that it needs of torch are looked up in the wheels' libraries. A stand-in takes the
place of Apple's shader compiler. The wheels come from PyPI into build/.metal/macos/."""

import re
import subprocess
import sys
import zipfile

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


# Copies, as the real one compiles: the extension must hold what it was given.
XCRUN = """\
#!/bin/sh -e
test "$1 $2" = "-sdk macosx"
case $3 in
  metal) while [ $# -gt 0 ]; do case $1 in -c) source=$2;; -o) out=$2;; -MF) deps=$2;; esac; shift; done
    echo "$out: $source" > "$deps"; cp "$source" "$out";;
  metallib) test "$5" = -o; cp "$4" "$6";;
esac
"""


def test_compiles_and_links(zig, wheel, tmp_path):
    include, in_torch = wheel
    xcrun = tmp_path / "bin" / "xcrun"
    xcrun.parent.mkdir()
    xcrun.write_text(XCRUN)
    xcrun.chmod(0o755)
    checks = "-Wno-everything -Werror=objc-method-access -Werror=incompatible-pointer-types -fno-sanitize=all"
    folders = [metal_build.HOST / "include", include, include / "torch" / "csrc" / "api" / "include"]
    includes = " ".join(f"-I{folder}" for folder in folders)
    command = [sys.executable, metal_build.ROOT / "tools" / "local_build.py", "--backend=metal", "--system=Darwin"]
    command += ["--arch=aarch64", f"--out={tmp_path}", "--verbose"]
    command += [f"--cxx={zig} c++ -target aarch64-macos.14.0 {includes} {checks}"]
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(FOLDER / "cache"), "PATH": f"{xcrun.parent}:/usr/bin:/bin"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

    (shader,) = (metal_build.ROOT / "paged_decode_metal").glob("*.metal")
    (extension,) = tmp_path.glob("torch*-metal-aarch64-darwin/*.abi3.so")
    assert shader.read_bytes() in extension.read_bytes()
    objects = [path for path in tmp_path.glob(".ninja/*/objects/**/*.o") if not path.name.endswith(".metal.o")]
    assert any(path.name.endswith(".mm.o") for path in objects)
    needed = {name for path in objects for name in nm(path, "--undefined-only")}
    own = {name for path in objects for name in nm(path, "--defined-only")}
    in_system = set(re.findall(r"_[\w$.]+", (zig.parent / "lib/libc/darwin/libSystem.tbd").read_text()))
    missing = [name for name in needed - own - in_torch - in_system if not SYSTEM.fullmatch(name)]
    assert missing == []
    assert any("MPSStream" in name for name in needed & in_torch), "the check looks up nothing"
