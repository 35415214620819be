"""MLX's attention kernels, from the mlx-metal wheel of PyPI; fetched when they are needed, into build/.metal/mlx/."""

import subprocess
import sys
import zipfile
from ctypes import c_float, c_int, c_uint64

import air
import emulator
import metal_build
import torch

WHEEL = "mlx-metal==0.32.4"
FOLDER = metal_build.OUT / "mlx"
METALLIB = FOLDER / "mlx" / "lib" / "mlx.metallib"
# What of MLX's utils.h the kernels use.
SOURCE = """\
#include <metal_stdlib>
using namespace metal;
template <typename U>
struct Limits {
  static constexpr constant U finite_min = metal::numeric_limits<U>::lowest();
};
#include "mlx/backend/metal/kernels/sdpa_vector.h"
"""
INSTANCE = """\
template [[host_name("sdpa_vector_{name}_{dim}_{dim}")]] [[kernel]]
decltype(sdpa_vector<{type}, {dim}, {dim}>) sdpa_vector<{type}, {dim}, {dim}>;
"""
TYPES = {"float": torch.float32, "float16_t": torch.float16}
HEAD_DIMS = (64, 128, 256)


def fetch():
    """Downloads the wheel if it is not there."""
    if METALLIB.exists():
        return
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--quiet", "--timeout", "20"]
    command += ["--retries", "1", "--platform", "macosx_14_0_arm64", "--only-binary=:all:", "--dest", str(FOLDER)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise metal_build.Missing(f"PyPI did not give {WHEEL}: {run.stderr.strip().splitlines()[-1]}")
    (file,) = FOLDER.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        wanted = ("mlx/include/mlx/backend/metal/kernels/", "mlx/lib/mlx.metallib")
        archive.extractall(FOLDER, [name for name in archive.namelist() if name.startswith(wanted)])
    file.unlink()


def from_source(variant="plain"):
    source = FOLDER / "sdpa.metal"
    names = {"float": "float", "float16_t": "half"}
    instances = (INSTANCE.format(name=n, type=t, dim=dim) for n, t in names.items() for dim in HEAD_DIMS)
    metal_build.local_build.write_if_changed(source, SOURCE + "".join(instances))
    return emulator.Library(metal_build.kernels(source, variant, [FOLDER / "mlx" / "include"]))


def from_apple(name, dim):
    return emulator.Library(air.library(METALLIB, f"sdpa_vector_{name}_{dim}_{dim}"))


def sdpa_vector(library, q, k, v, causal=False, sink=None):
    """q: [batch, q_heads, q_len, head_dim]; k, v: [batch, kv_heads, kv_len, head_dim]."""
    batch, q_heads, q_len, dim = q.shape
    name = {dtype: name for name, dtype in TYPES.items()}[q.dtype]
    out = torch.zeros_like(q)
    sizes = [k.stride(1), k.stride(2), v.stride(1), v.stride(2)]
    buffers = {0: q, 1: k, 2: v, 3: out, 4: c_int(q_heads // k.shape[1]), 5: c_int(k.shape[2])}
    buffers |= {6 + i: c_uint64(size) for i, size in enumerate(sizes)} | {10: c_float(dim**-0.5)}
    if sink is not None:
        buffers |= {16: sink, 17: c_int(q_heads)}
    constants = dict.fromkeys((20, 21, 23, 24), False) | {22: causal, 25: sink is not None}
    library.run(f"sdpa_vector_{name}_{dim}_{dim}", (batch * q_heads, q_len, 1), (1024, 1, 1), buffers, constants)
    return out
