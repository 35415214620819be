"""Gives this process an `mps` device on Linux: tensors in the fake Metal's buffers, kernels in the emulator.

fake_mps.load()
torch.randn(3).to("mps")
"""

import ctypes
import os
import platform

import emulator
import metal_build
import torch

library = None


def load():
    """Registers the device with torch; once per process."""
    global library
    if library is not None:
        return
    if platform.system() == "Darwin" or torch.backends.mps.is_built():
        raise RuntimeError("this torch has a real mps device")
    library = ctypes.CDLL(str(metal_build.device()))
    library.fake_dispatched.restype = library.fake_last_failure.restype = ctypes.c_char_p
    torch.backends.mps.is_available = lambda: True  # asked by kernels and by transformers


def set_seed(seed):
    """The order in which threadgroups and simdgroups run; 0 is the plain one."""
    library.fake_set_seed(seed)


def limit_threads(part_of_name, threads):
    """maxTotalThreadsPerThreadgroup of the kernels whose name contains this; 0 takes it back."""
    library.fake_limit_threads(part_of_name.encode(), threads)


def open_encoder():
    """Leaves torch's command encoder open, as any operator does on a Mac."""
    library.fake_open_encoder()


def dispatched():
    """The dispatches since the last call, as lines `kernel threadgroups x y z threads x y z`."""
    torch.mps.synchronize()
    lines = library.fake_dispatched().decode().splitlines()
    library.fake_reset_dispatched()
    return lines


def kernel_libraries():
    """The emulators of the package's kernels, as compiled for METAL_VARIANT: counts of what has run so far."""
    variant = os.environ.get("METAL_VARIANT", "plain")
    sources = metal_build.metal_sources()
    return [emulator.Library(metal_build.kernels_path(source, variant, includes, [])) for source, includes in sources]


def created():
    """How many libraries and pipelines were made, and command buffers committed."""
    return {name: getattr(library, f"fake_num_{name}")() for name in ("libraries", "pipelines", "commits")}


def reset():
    """Drops what is encoded and not yet run, after a mistake."""
    library.fake_reset_stream()


def last_failure():
    """What the fake refused last."""
    return library.fake_last_failure().decode()
