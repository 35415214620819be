"""From the arguments of a public function to the call of an operator.

A decode step of a short context feels every call, every argument and every keyword on the host, so a plain call takes
the shortest way: an operator of its own with nine arguments, all by position.
"""

from __future__ import annotations

import re
from operator import index

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ._ops import ops

_attend = ops.flash_attn_with_kvcache.default
_attend_plainly = ops.flash_attn_with_kvcache_plain.default
_append_and_attend = ops.flash_attn_with_kvcache_append.default

# Counts writes in the tensors, as torch's own operators do, so that a gradient which needs what they held before is
# refused: without grad mode too. Compiled graphs count by themselves, and tensors of inference mode have no count.
count_writes = torch.autograd.graph.increment_version

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTS = (int, torch.SymInt)  # torch.export has sizes of the second kind


# The features, none of which a plain call asks for: the last arguments of the operators, in the order and by the names
# of the schemas (torch-ext/arguments.h). Public functions pass their values as a tuple in this order, as a call by name
# would take 1 us longer; tests/test_keywords.py compares those tuples with it.
_arguments = _attend._schema.arguments
_first = [argument.name for argument in _arguments].index("cu_seqlens_q")
FEATURES = tuple(argument.name for argument in _arguments[_first:])
_NO_FEATURES = tuple(argument.default_value for argument in _arguments[_first:])
_CU_SEQLENS_Q = FEATURES.index("cu_seqlens_q")
_QV_AND_DESCALES = slice(FEATURES.index("qv"), FEATURES.index("v_descale") + 1)

# What could require grad, floating-point tensors and numbers that may be tensors of one element: those of every call,
# and those among the features (softcap, and all from alibi_slopes to rotary_sin but the int attention_chunk).
_NUMBERS = ("q", "k_cache", "v_cache", "k", "v", "out", "softmax_scale")
_SOFTCAP = slice(FEATURES.index("softcap"), FEATURES.index("softcap") + 1)
_SLOPES_AND_SINK = slice(FEATURES.index("alibi_slopes"), FEATURES.index("s_aux") + 1)
_QV_TO_ROTARY = slice(FEATURES.index("qv"), FEATURES.index("rotary_sin") + 1)
_NUMBERS_OF_FEATURES = FEATURES[_SOFTCAP] + FEATURES[_SLOPES_AND_SINK] + FEATURES[_QV_TO_ROTARY]

# What a wrong argument makes Python or torch raise, before this package has looked at it or after.
FAILURES = (AttributeError, IndexError, OverflowError, TypeError, ValueError, RuntimeError)


def types_of(operator):
    """Names and types of an operator's arguments, as pairs."""
    return tuple((argument.name, str(argument.type)) for argument in operator._schema.arguments)


_TYPES = types_of(_attend)


# Keywords of other kernels that callers pass as a matter of course. Hints never change a result, so any value is fine.
# The others are of features that this package does not have: they must be None, False, or the number given here.
_HINTS = frozenset(("fa_version", "ver", "pack_gqa", "sm_margin", "scheduler_metadata"))
_ABSENT = {
    "only_qv": None, "seqused_q": None, "score_mod": None, "mask_mod": None, "aux_tensors": None,
    "aux_tensor_leading_dims": None, "block_sparse_tensors": None, "leftpad_k": None, "dynamic_causal": None,
    "output_scale": None, "learnable_sink": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None,
    "sfq": None, "sfk": None, "sfv": None, "rel_bias": None, "rel_bias_k": None, "rel_bias_q": None,
    "rel_bias_prep_cache": None, "rel_extra_h": None, "softmax_offset": None,
    "gather_kv_indices": None, "gather_kv_valid_length": None, "min_seqlen_k": None, "aux_scalars": None,
    "seqlen_k_per_split": None, "disable_scheduler_metadata": None, "return_lse": None,
}  # fmt: skip


def run(
    names, q, k_cache, v_cache, out, return_lse, cache_seqlens, block_table, softmax_scale, causal, window_size,
    features=None, k=None, v=None, max_seqlen_q=None, max_seqlen_k=None, is_cache=True,
):  # fmt: skip
    """Fills in defaults, allocates the results and calls the operator, which checks the tensors. `features`: the values
    of FEATURES; None for a plain call. `names`: under which names errors give the arguments of flash_attn_with_kvcache.
    `is_cache`: only a cache may have more rows than there are requests."""
    try:
        qv = None
        if features is not None:
            qv, q_descale, k_descale, v_descale = features[_QV_AND_DESCALES]
            if not (q_descale is k_descale is v_descale is None):
                scales = (scale_of(q_descale, q), scale_of(k_descale, k_cache), scale_of(v_descale, v_cache))
                features = (*features[: _QV_AND_DESCALES.start], qv, *scales, *features[_QV_AND_DESCALES.stop :])
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_grad(_NUMBERS, (q, k_cache, v_cache, k, v, out, softmax_scale))
            if features is not None:
                given = features[_SOFTCAP] + features[_SLOPES_AND_SINK] + features[_QV_TO_ROTARY]
                refuse_grad(_NUMBERS_OF_FEATURES, given)
        q_shape, v_shape = q.shape, v_cache.shape
        if len(q_shape) < 3 or len(v_shape) < 3:
            name, shape = ("q", q_shape) if len(q_shape) < 3 else ("v_cache", v_shape)
            raise ValueError(f"{name}: expected a tensor of 3 or 4 dimensions, got shape {tuple(shape)}")
        if not is_cache and len(q_shape) == len(v_shape) == 4 and v_shape[0] > q_shape[0]:
            raise ValueError(f"k_cache: expected batch = {q_shape[0]} (from q), got {form_of(k_cache)}")
        head_dim, head_dim_v = q_shape[-1], v_shape[-1]
        if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor) and is_int(cache_seqlens):
            cu_seqlens_q = None if features is None else features[_CU_SEQLENS_Q]
            batch = q_shape[0] if cu_seqlens_q is None else batch_of("cu_seqlens_q", cu_seqlens_q)
            cache_seqlens = lengths_of(cache_seqlens, batch, q.device)
        if softmax_scale is None:
            # A head_dim of 0 has no scale. The operator refuses it by name.
            softmax_scale = ((head_dim if qv is None else head_dim + head_dim_v) or 1) ** -0.5
        window_left, window_right = (-1, -1) if window_size is None else window_size
        if window_left is None:
            window_left = -1
        if causal:
            window_right = 0
        elif window_right is None:
            window_right = -1
        is_new = out is None
        if is_new:
            if head_dim == head_dim_v and q.dtype not in FP8 and q.is_contiguous():
                out = torch.empty_like(q)
            else:
                out = torch.empty((*q_shape[:-1], head_dim_v), dtype=result_dtype(q.dtype), device=q.device)
        lse = None
        if return_lse:
            # (batch, seqlen_q, q_heads) -> (batch, q_heads, seqlen_q), or (total_q, q_heads) -> (q_heads, total_q)
            lse = torch.empty((*q_shape[:-3], q_shape[-2], q_shape[-3]), dtype=torch.float32, device=q.device)
        append = k is not None or v is not None
        writes = (append or not is_new) and not is_compiling()  # into tensors of the caller
        if writes:
            written = {"k_cache": k_cache, "v_cache": v_cache, "out": out} if append else {"out": out}
            refuse_negations(written)
        # A tensor is no hint: to read it would wait for the device. A compiled graph serves any length, and a number in
        # it would make a new one.
        if max_seqlen_k is not None and (isinstance(max_seqlen_k, torch.Tensor) or is_compiling()):
            max_seqlen_k = None
        if features is None and window_left == -1 and max_seqlen_k is None:
            if append:
                _append_and_attend(
                    q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v
                )
            else:
                _attend_plainly(q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right)
        else:
            operator = _append_and_attend if append else _attend
            # Only a bound. A tensor is replaced by a bound that the host knows: to read it would wait for the device.
            if max_seqlen_q is None or isinstance(max_seqlen_q, torch.Tensor):
                max_seqlen_q = q_shape[0]
            if max_seqlen_k is None:
                max_seqlen_k = -1
            operator(
                q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, window_right, k, v,
                window_left, max_seqlen_q, max_seqlen_k, *(_NO_FEATURES if features is None else features),
            )  # fmt: skip
        if writes:
            count_writes(tuple(written.values()))
        return (out, lse) if return_lse else out
    except FAILURES as error:
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
        given |= {"block_table": block_table, "k": k, "v": v, "window_size": window_size, "causal": causal}
        given["return_softmax_lse"] = return_lse
        filled = {"out": out, "softmax_scale": softmax_scale}
        bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        filled |= {name: x for name, x in bounds.items() if not isinstance(x, torch.Tensor)}
        given |= {name: x for name, x in filled.items() if x is not None}
        given |= {} if features is None else dict(zip(FEATURES, features))
        raise reworded(clearer(error, _TYPES, given), names) from None


def is_int(value):
    """An int, of torch.export or of NumPy too. A bool or a tensor is none."""
    if isinstance(value, (bool, torch.Tensor)):
        return False
    return isinstance(value, INTS) or fits(value, 64)


def all_off(softcap, num_splits, attention_chunk, deterministic):
    """Whether none of them asks for anything. All four are looked at, for what is neither on nor off, as a tensor of
    several elements, is refused by name."""
    try:
        return (not softcap) & (not num_splits) & (not attention_chunk) & (not deterministic)
    except FAILURES as error:
        given = {"softcap": softcap, "num_splits": num_splits}
        given |= {"attention_chunk": attention_chunk, "deterministic": deterministic}
        raise clearer(error, _TYPES, given) from None


def scale_of(descale, tensor):
    """The descale, or None where the tensor is not of 8 bits: the operator would ignore it, but autograd and a compiled
    graph would not."""
    return None if isinstance(descale, torch.Tensor) and tensor.dtype not in FP8 else descale


def lengths_of(length, batch, device):
    """The same length for every request."""
    length = length if isinstance(length, INTS) else index(length)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def result_dtype(q_dtype):
    """The dtype of the result of attention with such queries."""
    return torch.bfloat16 if q_dtype in FP8 else q_dtype


def check_cu_seqlens_k(cu_seqlens_k, q, cu_seqlens_q):
    """With a table the operator gets lengths and no cu_seqlens_k. Its form is checked all the same."""
    if not isinstance(q, torch.Tensor) or q.dim() == 0 or q.is_nested:
        return  # run() refuses that q
    batch, origin = q.shape[0], "q"
    if cu_seqlens_q is not None:
        batch, origin = batch_of("cu_seqlens_q", cu_seqlens_q), "cu_seqlens_q"
    check_int32("cu_seqlens_k", cu_seqlens_k, f"batch + 1 = {batch + 1} (from {origin})", (batch + 1,), "q", q)


def check_int32(name, tensor, sizes, shape, origin, like):
    """A tensor that the operator does not get, in the words of the operator. `sizes` says the shape; None is any."""
    fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32 and tensor.dim() == len(shape)
    if not fits or any(size is not None and size != tensor.shape[i] for i, size in enumerate(shape)):
        raise ValueError(f"{name}: expected int32 [{sizes}], got {form_of(tensor)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on the device of {origin}, got one on another device")


def batch_of(name, cu_seqlens):
    """How many requests there are between the entries of a cu_seqlens."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: expected int32 [batch + 1], got {form_of(cu_seqlens)}")
    return cu_seqlens.shape[0] - 1


def one_of(name, value, other_name, other):
    """The value of an argument that has two names."""
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are two names of one argument: expected one of them, got both")
    return other if value is None else value


def with_q_v(names):
    """How errors name arguments where qv was given under its second name."""
    return {name: "q_v" if said == "qv" else said for name, said in names.items()} | {"qv": "q_v"}


def refuse_others(function, others):
    """Keywords that a function does not have: fine if they ask for nothing, else refused by name."""
    for name, value in others.items():
        if name in _HINTS:
            continue
        if name not in _ABSENT:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
        if not (type(value) is int and value == _ABSENT[name]):
            refuse(name, value)


def refuse(name, value):
    """A keyword of something that this package does not do: only None and False ask for nothing."""
    if value is not None and value is not False:
        raise ValueError(f"{name}: expected None or False (not supported by paged_attn), got {shown(value)}")


def shown(value):
    """A value that an error names. Tensors are not read."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def refuse_dropout(dropout_p):
    if not _says_yes_or_no(dropout_p) or dropout_p:
        raise ValueError(f"dropout_p: expected 0.0 (forward only, for inference), got {form_of(dropout_p)}")


def either(return_attn_probs, return_softmax_lse):
    """Whether one of the two asks for the lse."""
    try:
        return return_attn_probs or return_softmax_lse
    except FAILURES as error:
        raise clearer(error, (), {"return_attn_probs": return_attn_probs}) from None


def refuse_grad(names, values):
    """Refuses gradients and forward-mode tangents: operators have neither, and results would silently be constants.
    Values that are no tensors have none."""
    forward = forward_ad._current_level >= 0
    for tensor in values:
        if tensor is None or not isinstance(tensor, torch.Tensor) or not (forward or tensor.requires_grad):
            continue
        name = names[[other is tensor for other in values].index(True)]
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that asks for no gradient (forward only, for inference), "
                "got requires_grad=True; use torch.no_grad() or detach()"
            )
        if forward and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"{name}: expected a tensor without a tangent (for inference, no derivatives), got one of forward-mode "
                "differentiation; use detach()"
            )


def refuse_negations(written):
    """Refuses views with torch's negative bit: torch copies them before an operator sees them, and crashes where the
    operator writes (torch 2.11)."""
    for name, tensor in written.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_neg():
            raise ValueError(
                f"{name}: expected a tensor to write into, got a view that negates its memory; use resolve_neg()"
            )


def clearer(error, types, given):
    """What a call that failed raises: an error that names the argument of a wrong type, else `error` itself.

    Types are checked only here, so that a good call does not pay for it. torch's own message has five lines, and an
    operator takes None, where it wants a tensor, as one without elements and without a dtype."""
    try:
        _refuse_types(types, given)
    except ValueError as refusal:
        return refusal
    return error


def _refuse_types(types, given):
    """`given`: arguments of the operator by name, and those that it has in another form, or not at all."""
    for name, kind in types:
        if name not in given:
            continue
        value = given[name]
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            check_dense(name, value)
        if name == "cache_seqlens":
            is_length = is_int(value) and fits(value, 32)
            if not (value is None or is_tensor or is_length):
                raise ValueError(f"{name}: expected a tensor, an int of 32 bits or None, got {form_of(value)}")
        elif kind == "Tensor" and not is_tensor:
            raise ValueError(f"{name}: expected a tensor, got {form_of(value)}")
        elif kind == "Optional[Tensor]" and not (value is None or is_tensor):
            raise ValueError(f"{name}: expected a tensor or None, got {form_of(value)}")
        elif kind == "int" and not fits(value, 64):
            raise ValueError(f"{name}: expected an int of 64 bits, got {form_of(value)}")
        elif kind == "float" and not _is_number(value):
            raise ValueError(f"{name}: expected a number, got {form_of(value)}")
        elif kind == "bool" and not (hasattr(value, "__bool__") and _says_yes_or_no(value)):
            raise ValueError(f"{name}: expected True or False, got {form_of(value)}")
    for name in ("causal", "return_softmax_lse", "return_attn_probs"):
        if not _says_yes_or_no(given.get(name)):
            raise ValueError(f"{name}: expected True or False, got {form_of(given[name])}")
    window_size = given.get("window_size")
    if window_size is not None and not _is_window(window_size):
        raise ValueError(
            f"window_size: expected (left, right), each an int of 64 bits or None, got {form_of(window_size)}"
        )


def fits(value, bits):
    """Whether it is an int of so many bits."""
    try:
        return -(2 ** (bits - 1)) <= index(value) < 2 ** (bits - 1)
    except TypeError:
        return False


def _is_number(value):
    """Whether a float can hold it. A tensor of one element counts as a number, and is not read."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta)
    try:
        float(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return not isinstance(value, str) and getattr(value, "ndim", 0) == 0


def _says_yes_or_no(value):
    """Whether it has a truth value. A tensor of several elements, or one without data, has none."""
    try:
        bool(value)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def check_dense(name, tensor):
    """Refuses nested, quantized and sparse tensors: torch has no sizes of some, and its errors name the operator."""
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else layout
        raise ValueError(f"{name}: expected a dense tensor, got a {kind} one")


def _is_window(window_size):
    try:
        left, right = window_size
    except (TypeError, ValueError):
        return False
    return all(size is None or fits(size, 64) for size in (left, right))


def form_of(value):
    """What an error says of an argument that does not fit."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)) and len(value) < 5:
        inside = ", ".join(map(form_of, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    known = value is None or isinstance(value, (int, float, str))
    return repr(value) if known else f"a value of type {type(value).__name__}"


def reworded(error, names):
    """The error with arguments under the names that the caller used; `names` maps those of flash_attn_with_kvcache."""
    if type(error) not in (ValueError, RuntimeError):
        return error
    words = re.compile(r"\b(?:" + "|".join(names) + r")\b")
    return type(error)(words.sub(lambda word: names[word[0]], str(error)))
