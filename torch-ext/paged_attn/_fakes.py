"""What torch.compile needs to know of the operators: they return nothing, their results are arguments."""

import torch

from ._ops import add_op_namespace_prefix


def _returns_nothing(*arguments, **keywords):
    return None


for _name in ("flash_attn_with_kvcache", "flash_attn_with_kvcache_append", "kv_paged_write"):
    torch.library.register_fake(add_op_namespace_prefix(_name))(_returns_nothing)
