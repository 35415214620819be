"""Which kernel a call takes, and why not a faster one."""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention, fa3
from ._ops import ops
from .attention import flash_attn_with_kvcache

_OPERATORS = (
    ops.flash_attn_with_kvcache.default,
    ops.flash_attn_with_kvcache_append.default,
    ops.flash_attn_with_kvcache_plain.default,
)
_FUNCTIONS = tuple(
    getattr(module, name)
    for module in (attention, fa3)
    for name in ("flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func")
)


class Explanation(NamedTuple):
    """How a call would run."""

    route: str
    """The kernel that the call takes."""
    why_not: dict[str, str]
    """For every route that the device tries before that one, why it does not fit."""
    plan: dict[str, int]
    """The numbers of the plan, under the names of the backend: splits, blocks, threads, ..."""


def explain(*arguments, function=flash_attn_with_kvcache, **keywords) -> Explanation:
    """How `flash_attn_with_kvcache`, or another attention function of this package, would run with these arguments.

    `function` may be `flash_attn_func` or `flash_attn_varlen_func` too, and the three of `paged_attn.fa3`. Nothing runs
    and nothing is written. The arguments are checked as the call would check them, and refused with the same errors.

    Raises:
        ValueError, RuntimeError: another function, or as the function.
    """
    if function not in _FUNCTIONS:  # it would really run
        given = getattr(function, "__name__", repr(function))
        raise ValueError(f"function: expected an attention function of paged_attn or paged_attn.fa3, got {given}")
    try:
        with _Explain():
            function(*arguments, **keywords)
    except _Explained as explained:
        return Explanation(**json.loads(explained.text))


class _Explained(Exception):
    """Ends the call where the operator would begin."""

    def __init__(self, text):
        self.text = text


class _Explain(TorchDispatchMode):
    """Calls the operator that explains in the place of the one that attends, with the same arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in _OPERATORS:
            return func(*args, **(kwargs or {}))
        for argument, value in zip(func._schema.arguments, args):
            if isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
                name = argument.name
                raise ValueError(f"{name}: expected a tensor with data (the plan depends on lengths), got one without")
        raise _Explained(ops.explain_flash_attn_with_kvcache.default(*args, **(kwargs or {})))
