"""What torch.compile needs to know of the operators: they return nothing, their results are arguments."""

import torch

from ._ops import add_op_namespace_prefix


def _returns_nothing(*arguments, **keywords):
    # A real tensor without data (device "meta") sends a call here whatever the device of the others.
    tensors = [t for t in (*arguments, *keywords.values()) if isinstance(t, torch.Tensor)]
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"expected every tensor on the device of the first ({tensors[0].device}), got one of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )


for _name in (
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_append",
    "flash_attn_with_kvcache_plain",
    "kv_paged_write",
):
    torch.library.register_fake(add_op_namespace_prefix(_name))(_returns_nothing)
