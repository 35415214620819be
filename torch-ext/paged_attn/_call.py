"""From the arguments of a public function to the call of an operator.

A decode step of a short context feels every call, every argument and every keyword on the host, so a plain call takes
the shortest way: an operator of its own with nine arguments, all by position.
"""

from __future__ import annotations

import re

import torch

from ._ops import ops

_attend = ops.flash_attn_with_kvcache.default
_attend_plainly = ops.flash_attn_with_kvcache_plain.default
_append_and_attend = ops.flash_attn_with_kvcache_append.default

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# What a plain call does not ask for: the operators' last arguments, by the names of the schemas (torch-ext/arguments.h
# fixes the order). Functions write their values as a tuple in this order, for a call by name would take 1 us longer;
# tests/test_keywords.py reads those tuples and compares them with it.
_arguments = _attend._schema.arguments
_first = [argument.name for argument in _arguments].index("cu_seqlens_q")
FEATURES = tuple(argument.name for argument in _arguments[_first:])
_NO_FEATURES = tuple(argument.default_value for argument in _arguments[_first:])
_CU_SEQLENS_Q, _S_AUX, _QV = (FEATURES.index(name) for name in ("cu_seqlens_q", "s_aux", "qv"))

# Keywords of other kernels that callers pass as a matter of course. Hints never change a result, so any value is fine.
# Of the rest we have nothing, so they may only say that nothing is asked for: None, False, or the number given here.
_HINTS = frozenset(("fa_version", "ver", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_k"))
_ABSENT = {
    "only_qv": None, "seqused_q": None, "score_mod": None, "mask_mod": None, "aux_tensors": None,
    "aux_tensor_leading_dims": None, "block_sparse_tensors": None, "leftpad_k": None, "dynamic_causal": None,
    "output_scale": None, "learnable_sink": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None,
    "sfq": None, "sfk": None, "sfv": None, "rel_bias": None, "rel_bias_k": None, "rel_bias_q": None,
    "rel_bias_prep_cache": None, "rel_extra_h": None, "q_v": None, "softmax_offset": None,
}  # fmt: skip


def run(
    names, q, k_cache, v_cache, out, return_lse, cache_seqlens, block_table, softmax_scale, causal, window_size,
    features=None, k=None, v=None, max_seqlen_q=None,
):  # fmt: skip
    """Fills defaults, allocates the results and calls the operator; every check of a tensor is there. `features`:
    None where none is asked for. `names`: how the caller calls the arguments of flash_attn_with_kvcache, in errors."""
    try:
        qv = None if features is None else features[_QV]
        if torch.is_grad_enabled():
            s_aux = None if features is None else features[_S_AUX]
            refuse_grad("q k_cache v_cache k v qv s_aux", q, k_cache, v_cache, k, v, qv, s_aux)
        q_shape, v_shape = q.shape, v_cache.shape
        if len(q_shape) < 3 or len(v_shape) < 3:
            name, shape = ("q", q_shape) if len(q_shape) < 3 else ("v_cache", v_shape)
            raise ValueError(f"{name}: expected a tensor of 3 or 4 dimensions, got shape {tuple(shape)}")
        head_dim, head_dim_v = q_shape[-1], v_shape[-1]
        if isinstance(cache_seqlens, int):
            cu_seqlens_q = None if features is None else features[_CU_SEQLENS_Q]
            batch = q_shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
            cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
        if softmax_scale is None:
            softmax_scale = (head_dim if qv is None else head_dim + head_dim_v) ** -0.5
        window_left, window_right = (-1, -1) if window_size is None else window_size
        if causal:
            window_right = 0
        if out is None:
            if head_dim == head_dim_v and q.dtype not in _FP8 and q.is_contiguous():
                out = torch.empty_like(q)
            else:
                dtype = torch.bfloat16 if q.dtype in _FP8 else q.dtype
                out = torch.empty((*q_shape[:-1], head_dim_v), dtype=dtype, device=q.device)
        lse = None
        if return_lse:
            # (batch, seqlen_q, q_heads) -> (batch, q_heads, seqlen_q), or (total_q, q_heads) -> (q_heads, total_q)
            lse = torch.empty((*q_shape[:-3], q_shape[-2], q_shape[-3]), dtype=torch.float32, device=q.device)
        append = k is not None or v is not None
        if features is None and window_left == -1:
            if append:
                _append_and_attend(
                    q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v
                )
            else:
                _attend_plainly(q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right)
        else:
            operator = _append_and_attend if append else _attend
            # Only a bound: a tensor is not read, for that would wait for the device.
            max_seqlen_q = max_seqlen_q if isinstance(max_seqlen_q, int) else q_shape[0]
            operator(
                q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v,
                window_left, max_seqlen_q, *(_NO_FEATURES if features is None else features),
            )  # fmt: skip
        return (out, lse) if return_lse else out
    except (ValueError, RuntimeError) as error:
        raise reworded(error, names) from None


def check_cu_seqlens_k(cu_seqlens_k, q, cu_seqlens_q):
    """With a table the operator gets lengths and no cu_seqlens_k. Its form is checked all the same."""
    batch, origin = (q.shape[0], "q") if cu_seqlens_q is None else (cu_seqlens_q.shape[0] - 1, "cu_seqlens_q")
    if cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.shape != (batch + 1,):
        raise ValueError(
            f"cu_seqlens_k: expected int32 [batch + 1 = {batch + 1} (from {origin})], got "
            f"{str(cu_seqlens_k.dtype).removeprefix('torch.')} {list(cu_seqlens_k.shape)}"
        )
    if cu_seqlens_k.device != q.device:
        raise ValueError("cu_seqlens_k: expected a tensor on the device of q, got one on another device")


def one_of(name, value, other_name, other):
    """The value of an argument that has two names."""
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are two names of one argument: expected one of them, got both")
    return other if value is None else value


def refuse_others(function, others):
    """Keywords that a function does not have: fine if they ask for nothing, else refused by name."""
    for name, value in others.items():
        if name in _HINTS:
            continue
        if name not in _ABSENT:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
        if value is None or value is False or (type(value) is int and value == _ABSENT[name]):
            continue
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}: expected None or False (not supported by paged_attn), got {what}")


def refuse_dropout(dropout_p):
    if dropout_p:
        raise ValueError(f"dropout_p: expected 0.0 (forward only, for inference), got {dropout_p}")


def refuse_grad(names, *tensors):
    for i, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{names.split()[i]}: expected a tensor that asks for no gradient (forward only, for inference), "
                "got requires_grad=True; use torch.no_grad() or detach()"
            )


def reworded(error, names):
    """The error with arguments under the names that the caller used; `names` maps those of flash_attn_with_kvcache."""
    if type(error) not in (ValueError, RuntimeError):
        return error
    words = re.compile(r"\b(?:" + "|".join(names) + r")\b")
    return type(error)(words.sub(lambda word: names[word[0]], str(error)))
