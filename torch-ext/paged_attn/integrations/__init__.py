"""Opt-in help for the libraries that call this kernel. Importing this module changes nothing.

transformers_block_tables   block tables in transformers' continuous batching, on any device
PagedCache                  pages for transformers' generate(); needs transformers
OutOfPages                  what it raises when its pool has no page left
register_attention          the attention function "paged_attn" for transformers' own caches
context_parallel            one cache on several ranks of torch.distributed
"""

from . import context_parallel, paged_cache
from .block_tables import (
    KNOWN_TRANSFORMERS,
    disable_transformers_block_tables,
    enable_transformers_block_tables,
    transformers_block_tables,
)
from .paged_cache import OutOfPages
from .transformers_attention import register_attention

__all__ = [
    "KNOWN_TRANSFORMERS",
    "OutOfPages",
    "PagedCache",
    "context_parallel",
    "disable_transformers_block_tables",
    "enable_transformers_block_tables",
    "register_attention",
    "transformers_block_tables",
]


def __getattr__(name):
    # The kernel itself does not need transformers.
    if name == "PagedCache":
        return paged_cache.paged_cache_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
