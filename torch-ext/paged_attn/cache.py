"""Memory for a paged cache."""

from __future__ import annotations

import math
import mmap

import torch

_HUGE_PAGE = 2 << 20


def empty_paged_cache(
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates k_cache (num_pages, page_size, kv_heads, head_dim) and v_cache (..., head_dim_v), contents undefined.

    On the CPU under Linux the memory is asked for in huge pages (madvise): attention reads pages in random order, and
    with 4 KiB pages of memory the address translation alone can cost a third of the bandwidth.
    """
    shape_k = (num_pages, page_size, kv_heads, head_dim)
    shape_v = (num_pages, page_size, kv_heads, head_dim if head_dim_v is None else head_dim_v)
    return _empty(shape_k, dtype, device), _empty(shape_v, dtype, device)


def _empty(shape, dtype, device):
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + size].view(dtype).view(shape)
