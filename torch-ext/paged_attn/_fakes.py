"""Fakes of the operators, which torch.compile calls in their place. Operators return nothing: results are arguments."""

import functools

import torch

from ._call import form_of, types_of
from ._ops import add_op_namespace_prefix, ops

# The last two dimensions of each tensor. The first tensor with a size fixes it.
_HEADS = {
    "q": ("q_heads", "head_dim"), "k": ("kv_heads", "head_dim"), "v": ("kv_heads", "head_dim_v"),
    "k_cache": ("kv_heads", "head_dim"), "v_cache": ("kv_heads", "head_dim_v"), "out": ("q_heads", "head_dim_v"),
}  # fmt: skip


def _check_heads(tensors):
    """Symbolic sizes are refused only where they surely differ: a comparison would add a guard to the graph."""
    # The import takes half a second or more, so it waits until something is traced.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    sizes = {}
    for name, dims in _HEADS.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        fits = tensor.dim() in (3, 4)
        for dim, size in zip(dims, tensor.shape[-2:] if fits else ()):
            fits = fits and not statically_known_true(sizes.setdefault(dim, (name, size))[1] != size)
        if not fits:
            ends = ", ".join(f"{dim} = {sizes[dim][1]} (from {sizes[dim][0]})" if dim in sizes else dim for dim in dims)
            raise ValueError(f"{name}: expected 3 or 4 dimensions that end with [{ends}], got {form_of(tensor)}")


@functools.cache
def _lower_offsets():
    """Teaches Inductor where a view begins in its memory. It has no lowering for that (torch 2.11 to 2.15, pytorch
    issue 198068): in a graph of changing sizes it puts every view that an operator writes at the start of its memory,
    without an error."""
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    offset_of = torch.ops.aten.sym_storage_offset.default
    if offset_of in lowerings:
        return

    @register_lowering(offset_of, type_promotion_kind=None)
    def lower(_):
        offset = V.graph.current_node.meta["val"]
        return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)


def _returns_nothing(types):
    def fake(*arguments, **keywords):
        # A real tensor without data (device "meta") sends a call here whatever the device of the others.
        given = {**dict(zip((name for name, _ in types), arguments)), **keywords}
        for name, kind in types:
            if kind == "Tensor" and given[name] is None:
                raise ValueError(f"{name}: expected a tensor, got None")
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        first = next(iter(tensors))
        for name, tensor in tensors.items():
            if tensor.device != tensors[first].device:
                raise ValueError(
                    f"{name}: expected a tensor on the device of {first} ({tensors[first].device}), got one on "
                    f"{tensor.device}"
                )
        _check_heads(tensors)
        if any(isinstance(tensor.storage_offset(), torch.SymInt) for tensor in tensors.values()):
            _lower_offsets()

    return fake


for _name in (
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_append",
    "flash_attn_with_kvcache_plain",
    "kv_paged_write",
    "merge_parts",
    "merge_with_peers",
):
    if not hasattr(ops, _name):
        continue  # of CUDA alone
    torch.library.register_fake(add_op_namespace_prefix(_name))(_returns_nothing(types_of(getattr(ops, _name).default)))
