"""Opt-in help for the libraries that call this kernel. Importing this module changes nothing.

transformers' continuous batching can decode straight out of the paged cache, through
`flash_attn_with_kvcache` and a block table, but one function of transformers opens that path on CUDA
and XPU only. On CPU and MPS every decode step gathers the whole cache and calls
`flash_attn_varlen_func` instead. These helpers open the block-table path wherever this kernel runs:

    kernel = kernels.get_kernel("org/paged-attn", version=1, trust_remote_code=True)
    with kernel.integrations.transformers_block_tables():
        model.generate_batch(...)
"""

import inspect
import threading
from contextlib import contextmanager

# The newest release of each of these lines was run with the path open; of 5.23 the gate was read, and is that of 5.22.
# Another one may have moved or changed the gate, and a gate replaced in the wrong place would silently do nothing.
KNOWN_TRANSFORMERS = ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")

_GATE = "ensure_decode_fast_path_is_available"
_GATE_ARGUMENTS = ["config", "cb_config", "user_requested"]

# transformers' own gate while ours is in place.
_closed_gate = None

# The `with` blocks that have begun, of all threads, and whether the path was open before the first of them.
_blocks, _was_enabled = 0, False
_lock = threading.Lock()


def enable_transformers_block_tables() -> None:
    """Let transformers' continuous batching decode with block tables on any device, for this kernel.

    Other attention implementations keep transformers' own rule. It must be in place when a manager is
    created (`generate_batch`, `init_continuous_batching`). Calling it twice changes nothing.

    Raises RuntimeError when the installed transformers is not one of `KNOWN_TRANSFORMERS`.
    """
    global _closed_gate
    if _closed_gate is None:
        module = _gate_module()
        _closed_gate = getattr(module, _GATE)
        setattr(module, _GATE, _open_gate)


def disable_transformers_block_tables() -> None:
    """Put transformers' own rule back. Does nothing when the path was not opened from here."""
    global _closed_gate
    if _closed_gate is None:
        return
    module = _gate_module()
    if getattr(module, _GATE) is not _open_gate:
        raise RuntimeError(
            f"cannot restore {module.__name__}.{_GATE}: it was replaced again after "
            "enable_transformers_block_tables; undo the later replacement first"
        )
    setattr(module, _GATE, _closed_gate)
    _closed_gate = None


@contextmanager
def transformers_block_tables():
    """`enable_transformers_block_tables` for the length of a `with` block. Where blocks of several threads overlap, the
    last one to end closes the path."""
    global _blocks, _was_enabled
    with _lock:
        if _blocks == 0:
            _was_enabled = _closed_gate is not None
        enable_transformers_block_tables()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and not _was_enabled:
                disable_transformers_block_tables()


def _gate_module():
    """The module of transformers that holds the gate, or an error that says what was found instead."""
    try:
        import transformers
    except ImportError as error:
        raise RuntimeError("transformers_block_tables needs transformers, which is not installed") from error

    known = ", ".join(f"{line}.x" for line in KNOWN_TRANSFORMERS)
    found = f"transformers_block_tables knows transformers {known}; got {transformers.__version__}"
    if ".".join(transformers.__version__.split(".")[:2]) not in KNOWN_TRANSFORMERS:
        raise RuntimeError(found)

    from transformers.generation.continuous_batching import initialization

    gate = getattr(initialization, _GATE, None)
    if gate is not _open_gate and (gate is None or list(inspect.signature(gate).parameters) != _GATE_ARGUMENTS):
        raise RuntimeError(f"{found}, whose {_GATE}({', '.join(_GATE_ARGUMENTS)}) is missing or was changed")
    return initialization


def _open_gate(config, cb_config, user_requested):
    """Stands in for transformers' gate: leaves `max_blocks_per_request` alone when this kernel decodes."""
    if not _decodes_here(config):
        _closed_gate(config, cb_config, user_requested)


def _decodes_here(config) -> bool:
    """True when `config` names this kernel and every layer of the model can be read through a block table."""
    from transformers.generation.continuous_batching import cache
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
    from transformers.utils.generic import is_flash_attention_requested

    from ..attention import flash_attn_with_kvcache

    if not is_flash_attention_requested(config):
        return False
    groups = cache.group_layers_by_attn_type(config)
    if isinstance(groups, tuple):  # 5.17: (layers of each group, type of each group)
        readable = set(groups[1]) == {"full_attention"}
    else:
        readable = all(cache.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in groups)
    if not readable:
        return False
    # transformers wraps what it loads (torch.compiler.disable), and a caller may wrap it too, so compare the cores.
    loaded = lazy_import_flash_attention(config._attn_implementation)[0][2]
    return loaded is not None and inspect.unwrap(loaded) is inspect.unwrap(flash_attn_with_kvcache)
