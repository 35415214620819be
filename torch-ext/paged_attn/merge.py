"""Merging the results of attention to parts of the keys."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ._call import check_dense, form_of, refuse_grad

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the results of the same queries over two disjoint sets of keys.

    Args:
        out_a, out_b: (batch, seqlen_q, q_heads, head_dim_v) or (total_q, q_heads, head_dim_v), float32, float16 or
            bfloat16.
        lse_a, lse_b: float32 (batch, q_heads, seqlen_q) or (q_heads, total_q), as the attention functions return them.
            A sink belongs to one of the two only.
        out, lse: where to write the results; they may be the tensors of either part, but not share memory.

    Returns:
        (out, lse) of the union, in out_a's dtype and float32. With w = exp(lse): out = (w_a out_a + w_b out_b) /
        (w_a + w_b) and lse = log(w_a + w_b), computed relative to the larger lse.

    Raises:
        ValueError: an argument does not fit. Nothing has been written then.
    """
    check_all(("out_a", "lse_a", "out_b", "lse_b", "out", "lse"), (out_a, lse_a, out_b, lse_b), (out, lse))
    return merge_checked(out_a, lse_a, out_b, lse_b, out, lse)


def merge_checked(out_a, lse_a, out_b, lse_b, out, lse):
    """merge_attn_states, after check_all."""
    _check_shape("out_b", out_b, "out_a", out_a)
    _check_shape("lse_b", lse_b, "lse_a", lse_a)
    if out_a.dim() not in (3, 4):
        raise ValueError(f"out_a: expected a tensor of 3 or 4 dimensions, got shape {tuple(out_a.shape)}")
    if lse_a.shape != (*out_a.shape[:-3], out_a.shape[-2], out_a.shape[-3]):
        raise ValueError(
            f"lse_a: expected (batch, q_heads, seqlen_q) or (q_heads, total_q) for out_a {tuple(out_a.shape)}, "
            f"got {tuple(lse_a.shape)}"
        )
    _check_target("out", out, out_a.shape, out_a.dtype)
    _check_target("lse", lse, lse_a.shape, torch.float32)
    if out is not None and lse is not None and not is_compiling() and _share_memory(out, lse):
        raise ValueError("lse: expected memory of its own, got memory of out")
    larger = torch.maximum(lse_a, lse_b)
    # The comparison covers two empty parts, where the difference of two -inf would be NaN.
    weight_a = torch.where(lse_a == larger, 1.0, torch.exp(lse_a - larger))
    weight_b = torch.where(lse_b == larger, 1.0, torch.exp(lse_b - larger))
    total = weight_a + weight_b
    merged = (_scaled(out_a, lse_a, weight_a / total) + _scaled(out_b, lse_b, weight_b / total)).to(out_a.dtype)
    merged_lse = larger + torch.log(total)
    return _written(out, merged), _written(lse, merged_lse)


def _written(target, result):
    if target is None:
        return result
    if not is_compiling() and target.is_inference():
        with torch.inference_mode():  # torch writes such a tensor nowhere else
            return target.copy_(result)
    return target.copy_(result)


def _scaled(out, lse, share):
    """The values of a part times its share; 0 where it has none (a part without keys), whatever the values are."""
    share, empty = (x.transpose(-1, -2).unsqueeze(-1) for x in (share, (share == 0) | (lse == -torch.inf)))
    return (out.float() * share).masked_fill_(empty, 0.0)


def check_all(names, parts, targets):
    """Types, layouts and devices of both parts and of the union, dtypes of the parts, and no gradients."""
    for name, tensor, is_lse in zip(names, parts, (False, True, False, True)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {form_of(tensor)}")
        check_dense(name, tensor)
        if is_lse and tensor.dtype != torch.float32:
            raise ValueError(f"{name}: expected float32, got {form_of(tensor)}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name}: expected float32, float16 or bfloat16, got {form_of(tensor)}")
    for name, tensor in zip(names[4:], targets):
        if not (tensor is None or isinstance(tensor, torch.Tensor)):
            raise ValueError(f"{name}: expected a tensor or None, got {form_of(tensor)}")
        if tensor is not None:
            check_dense(name, tensor)
    given, device = (*parts, *targets), parts[0].device
    for name, tensor in zip(names, given):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name}: expected a tensor on the device of {names[0]} ({device}), got one on {tensor.device}"
            )
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        refuse_grad(names, given)


def _check_shape(name, tensor, other_name, other):
    if tensor.shape != other.shape:
        raise ValueError(f"{name}: expected shape {tuple(other.shape)} like {other_name}, got {tuple(tensor.shape)}")


def _check_target(name, target, shape, dtype):
    if target is None:
        return
    if target.shape != shape or target.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype} {tuple(shape)}, got {target.dtype} {tuple(target.shape)}")
    if _overlaps_itself(target):
        strides = tuple(target.stride())
        raise ValueError(f"{name}: expected memory for every element, got strides {strides} for {tuple(shape)}")


def _overlaps_itself(tensor):
    """Whether a stride, from the smallest to the largest, is less than the extent of the dimensions inside it."""
    if 0 in tensor.shape:
        return False
    inside = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < inside:
                return True
            inside += (size - 1) * stride
    return False


def _share_memory(a, b):
    """Whether any byte is one of both. Their elements may lie between each other's."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or 0 in (a.numel(), b.numel()):
        return False
    (a_begin, a_end), (b_begin, b_end) = _span(a), _span(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    first = min(a_begin, b_begin)
    marks = torch.zeros(max(a_end, b_end) - first, dtype=torch.bool, device="cpu")

    def marks_of(x):
        size = x.element_size()
        strides = (*(stride * size for stride in x.stride()), 1)
        return marks.as_strided((*x.shape, size), strides, x.storage_offset() * size - first)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())


def _span(tensor):
    """Where its first byte and the one after its last lie in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.storage_offset() * tensor.element_size(), (tensor.storage_offset() + last + 1) * tensor.element_size()
