"""What torch.compile needs to know of the operators: they return nothing, their results are arguments."""

import torch

from ._call import types_of
from ._ops import add_op_namespace_prefix, ops


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
