"""Memory for a paged cache."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
from operator import index

import torch
from torch._guards import active_fake_mode
from torch.compiler import is_compiling

from ._call import fits, form_of

_HUGE_PAGE = 2 << 20

# Linux's memory policies. The C library has no functions for them, so the calls go by number: mbind, get_mempolicy.
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_INTERLEAVE = 3  # MPOL_INTERLEAVE
_ALLOWED = 4  # MPOL_F_MEMS_ALLOWED
_MOST_NODES = 1024


def empty_paged_cache(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    interleave: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates k_cache (num_pages, page_size, kv_heads, head_dim) and v_cache (..., head_dim_v), contents undefined.
    `device` is torch's default device where it is not given.

    On the CPU under Linux the memory is asked for in huge pages (madvise): attention reads pages in random order, and
    with 4 KiB pages of memory the address translation alone can cost a third of the bandwidth. A graph of torch.compile
    asks for none.

    Args:
        interleave: Deal the memory out to all NUMA nodes that this process may use, a page of memory to each in turn,
            whoever writes to it first. For one process on all nodes of a machine.

    Raises:
        ValueError: a size that is no int of at least 0, a dtype that is none of torch's; interleave for another device
            or another system than Linux, or Linux refuses it.
        MemoryError: Linux has no memory for it. Elsewhere torch raises its own error.
    """
    sizes = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes["head_dim_v"] = head_dim if head_dim_v is None else head_dim_v
    for name, size in sizes.items():
        if not fits(size, 64) or index(size) < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {form_of(size)}")
        sizes[name] = index(size)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected one of torch, such as torch.bfloat16, got {form_of(dtype)}")
    device = torch.empty(0).device if device is None else torch.device(device)
    if interleave and (device.type != "cpu" or sys.platform != "linux" or platform.machine() not in _CALLS):
        given = f"{device.type} on {sys.platform} {platform.machine()}"
        raise ValueError(f"interleave: expected a cache on the CPU under Linux (x86_64, aarch64), got {given}")
    *shape, head_dim_v = sizes.values()
    return _empty(shape, dtype, device, interleave), _empty((*shape[:3], head_dim_v), dtype, device, interleave)


def _empty(shape, dtype, device, interleave):
    size = math.prod(shape) * dtype.itemsize
    huge = not is_compiling() and size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    if device.type != "cpu" or not (huge or interleave) or size == 0 or active_fake_mode() is not None:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"num_pages: expected a cache that memory holds, got one of {size} bytes ({error})") from None
    if huge:
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    if interleave:
        _interleave(data.data_ptr(), len(memory))
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + size].view(dtype).view(shape)


def _interleave(address, size):
    """Has each page of this memory come from the next NUMA node, in turns. No page may have been touched yet."""
    mbind, get_mempolicy = _CALLS[platform.machine()]
    nodes = (ctypes.c_ulong * (_MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number, *arguments):
        if libc.syscall(ctypes.c_long(number), *arguments):
            raise ValueError(f"interleave: expected Linux to allow it, got {os.strerror(ctypes.get_errno())}")

    word = ctypes.c_ulong
    call(get_mempolicy, None, nodes, word(_MOST_NODES), None, word(_ALLOWED))
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    call(mbind, word(address), word(whole), word(_INTERLEAVE), nodes, word(_MOST_NODES), word(0))
