"""The attention function "paged_attn" of transformers, which PagedCache sets. It serves every other cache too.

What comes in, and how it is computed:

    keys in the pages of a PagedCache    in place; padding on the left only
    no mask                              the tensors as they are
    a mask with padding on the left      the tensors as they are, from the first key that exists
    a mask with other padding, or holes  packed: the tokens that exist, one row after the other
    a window in the mask                 the mask brings it along (`paged_window`); it counts, not `sliding_window`
    several sequences in one row         packed already, by `cu_seq_lens_q` and `cu_seq_lens_k` or by `position_ids`

Other padding and several sequences mean what they mean in transformers' own flash attention.
"""

from __future__ import annotations

import threading
import weakref

import torch

from .._call import refuse
from ..attention import flash_attn_varlen_func, flash_attn_with_kvcache

# The name of the attention function among those of transformers.
ATTENTION = "paged_attn"
# Keywords of some models that would change the result: scores are added or keys are chosen, or a cache is handed over
# that only transformers' continuous batching fills.
_NOT_SUPPORTED = frozenset(
    ("position_bias", "attention_bias", "head_mask", "indices", "block_indices", "cache", "block_table", "k_cache",
     "v_cache")
)  # fmt: skip
# Modules that attend to their own keys and to an encoder's at once, with both masks side by side: what each of them
# says beyond padding is lost.
_JOINS_MASKS = frozenset(("T5Gemma2MergedAttention",))


class _Thread(threading.local):
    """A reference to the PagedCache that last stored keys in this thread."""

    cache = None


_thread = _Thread()


def announce(cache) -> None:
    """`cache` has stored keys in this thread. attend() then refuses other tensors, which would leave these keys out."""
    _thread.cache = weakref.ref(cache)


def register_attention() -> None:
    """Makes `attn_implementation="paged_attn"` known to transformers, for from_pretrained() and other caches.

    PagedCache calls it. Needs transformers.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, make_mask)


def make_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, *, attention_mask=None, config=None,
    local_size=None, allow_is_causal_skip=True, use_vmap=False, device="cpu", **others,
):  # fmt: skip
    """transformers' interface of masks: which keys exist, (batch, keys), or None, all of them.

    Without a mask all keys are meant that were stored. A static cache has empty slots behind them. generate() drops a
    mask without padding, and gives the decoder beside an encoder none.

    What a mask says beyond padding reaches `attend` as a window, or as the word that it is causal. What is neither is
    refused here. Functions that a model or a caller adds to its masks come with `use_vmap`.
    """
    from transformers.masking_utils import flash_attention_mask

    _refuse_chunks(config, local_size, kv_length + kv_offset)
    window, is_causal = None, False
    # Only masks of encoders and of cross-attention have this keyword. No cache stores their keys.
    if "allow_is_bidirectional_skip" in others:
        if use_vmap:
            window = _window_of(mask_function, batch_size, q_offset, q_length, kv_offset, kv_length, device)
        elif local_size is not None:
            # transformers' own function, of positions alone: nothing waits for the device.
            window = _window_of(mask_function, 1, q_offset, q_length, kv_offset, kv_length, "cpu", local_size)
    else:
        is_causal = q_length > 1
        may_see_later = not allow_is_causal_skip and q_length > 1
        has_window = use_vmap or (may_see_later and _sees_next(mask_function, batch_size, q_length, q_offset, device))
        if has_window or attention_mask is None:
            stored = int(q_offset + q_length - kv_offset)  # a static cache counts in a tensor: the host waits for it
        if has_window:
            window = _window_of(mask_function, batch_size, q_offset, q_length, kv_offset, stored, device)
        elif local_size is not None and kv_length > local_size:
            # Some models say it by the mask alone (Phimoe, Qwen2Moe).
            window = local_size - 1, 0
        if attention_mask is None:
            if stored < kv_length:
                attention_mask = torch.ones(batch_size, stored, dtype=torch.bool, device=device)
        elif attention_mask.shape[1] > q_length:
            attention_mask = _columns_so_far(attention_mask, q_offset + q_length)
    if attention_mask is not None:
        attention_mask = attention_mask[:, : kv_offset + kv_length]
    mask = flash_attention_mask(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask)
    has_padding, says_more = mask is not None, window is not None or is_causal
    if mask is None and says_more:  # None could not bring it along
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if mask is not None and getattr(config, "num_kv_shared_layers", None) and not torch.compiler.is_compiling():
        mask = mask.as_subclass(_OfAllQueries)
    if says_more:
        mask.paged_window, mask.paged_causal, mask.paged_has_padding = window, is_causal, has_padding
    return mask


class _OfAllQueries(torch.Tensor):
    """A mask (batch, keys) of a model whose last layers share keys. From 5.23 on transformers gives these layers only
    the last queries of a prompt, and takes their rows of a mask (batch, heads, queries, keys). Ours has no rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed of it is a plain tensor

    def __getitem__(self, index):
        return self if isinstance(index, tuple) and len(index) == 4 else super().__getitem__(index)


class _Seen:
    """What `mask_function` lets the queries of a pass see of its keys, all counted from the first key."""

    def __init__(self, mask_function, batch_size, queries: range, keys: range, device):
        self.mask_function, self.queries, self.keys = mask_function, queries, keys
        self.rows = torch.arange(batch_size, device=device)[:, None]
        self.device = device

    def __call__(self, query, key):
        """Of pairs of positions: (batch, pairs)."""
        seen = self.mask_function(self.rows, torch.zeros_like(self.rows), query, key)
        return seen.expand(len(self.rows), len(query))

    def window(self):
        """(left, right) as `window_size`, by the last query and the first one; -1 where it sees all there."""
        first, last = self.queries[0], self.queries[-1]
        return self._limit(last, range(self.keys[0], last)), self._limit(first, range(first + 1, self.keys[-1] + 1))

    def _limit(self, query, side):
        keys = torch.arange(side.start, side.stop, device=self.device)
        seen = self(torch.full_like(keys, query), keys)[0]
        return -1 if seen.all() else int(seen.sum())

    def is_window(self, left, right):
        """Whether all queries see this window, as a tensor. Checks three whole rows, which show gaps, and diagonals
        at the limits, which show rows with other limits."""
        queries, keys = (torch.arange(x.start, x.stop, device=self.device) for x in (self.queries, self.keys))
        pairs = [(torch.full_like(keys, self.queries[i]), keys) for i in (0, len(queries) // 2, -1)]
        pairs += [(queries, queries + distance) for distance in {0, -1, 1, -left, -left - 1, right, right + 1}]
        query, key = (torch.cat(side) for side in zip(*pairs, strict=True))
        key = key.clamp(self.keys[0], self.keys[-1])
        distance = key - query
        expected = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
        return (self(query, key) == expected).all()


def _window_of(mask_function, batch_size, q_offset, q_length, kv_offset, kv_length, device, of_compiled=None):
    """What _Seen finds. Where it is no window, or the kernel would count it from elsewhere, it is refused. A compiled
    model cannot look: there both sides are `of_compiled`."""
    queries, keys = range(int(q_offset), int(q_offset) + q_length), range(kv_offset, kv_offset + kv_length)
    seen = _Seen(mask_function, batch_size, queries, keys, device)
    if of_compiled is not None and torch.compiler.is_compiling():
        words = "mask_function: expected windows of sliding_window keys on either side in a compiled model, got others"
        torch._assert_async(seen.is_window(of_compiled, of_compiled), words)
        return of_compiled, of_compiled
    left, right = window = seen.window()
    is_counted_from_the_end = window == (-1, -1) or seen.queries[-1] == seen.keys[-1]
    if not (is_counted_from_the_end and seen.is_window(left, right)):
        raise ValueError(
            "mask_function: expected tokens that see all keys or a window of them, the same for every token, got "
            "others (of an image, a chunk, a chain)"
        )
    return window


def _columns_so_far(mask, tokens):
    """The columns of the mask for the first `tokens` positions. It may have some for later tokens too."""
    if not isinstance(tokens, torch.Tensor):
        return mask[:, :tokens]
    if not torch.compiler.is_compiling():
        return mask[:, : int(tokens)]  # of a static cache: the host waits
    words = "attention_mask: expected no column for later tokens in a compiled model with a static cache, got some"
    torch._assert_async((tokens >= mask.shape[1]).all(), words)
    return mask


def _refuse_chunks(config, local_size, keys):
    """As transformers does for its flash attention: a chunk that holds all keys is no limit."""
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if has_chunks and local_size == config.attention_chunk_size and keys > local_size:
        raise ValueError(f"attention_chunk_size: expected at least {keys}, a chunk for all keys, got {local_size}")


def _sees_next(mask_function, batch_size, q_length, q_offset, device):
    """Whether a token sees the one after it, as those of an image in Gemma 3 do."""
    row = torch.arange(batch_size, device=device)[:, None]
    position = torch.arange(q_length - 1, device=device) + q_offset
    return mask_function(row, torch.zeros_like(row), position, position + 1).any()


def attend(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    *,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    position_ids=None,
    **others,
):
    """transformers' attention interface: (batch, heads, tokens, head_dim) in, (batch, tokens, heads, head_dim) out."""
    layer = _layer_of(module, key, value)
    try:
        if dropout:
            raise ValueError(f"dropout: expected 0.0 (forward only, for inference), got {dropout}")
        for name in _NOT_SUPPORTED.intersection(others):
            refuse(name, others[name])
        if others.get("output_attentions"):
            _warn_of_attentions()
        kind = type(module).__name__
        if kind in _JOINS_MASKS:
            raise ValueError(f"module: expected attention to the keys of one source, got {kind}, which joins two masks")
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        window = getattr(attention_mask, "paged_window", None)
        if window is None:
            if getattr(attention_mask, "paged_causal", False):
                causal = True
            window = _window_of_layer(sliding_window, causal, query, key)
        else:
            causal = window[1] == 0
        attention_mask = attention_mask if getattr(attention_mask, "paged_has_padding", True) else None
        if attention_mask is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            _check_lengths(query, attention_mask, cu_seq_lens_q, cu_seq_lens_k)
        if causal is None:
            raise ValueError(f"is_causal: expected True or False, as an attribute of {kind} or a keyword, got neither")
        query = query.transpose(1, 2)
        options = {
            "softmax_scale": scaling,
            "causal": causal,
            "window_size": window,
            "softcap": softcap or 0.0,
            "s_aux": s_aux,
        }
        if layer is not None:
            cache = layer.cache
            if not causal or cu_seq_lens_q is not None or query.shape[1] > 1:
                _refuse_for_pages(module, query, key, attention_mask, causal, cu_seq_lens_q, position_ids)
            out = flash_attn_with_kvcache(
                query,
                layer.keys,
                layer.values,
                cache_seqlens=cache.after,
                block_table=cache.table,
                cache_leftpad=cache.leftpad(attention_mask),
                **options,
            )
            layer.attended()
        else:
            # Under torch.autocast rotated keys are float32 and values are not.
            keys, values = key.transpose(1, 2), value.to(key.dtype).transpose(1, 2)
            if attention_mask is None:
                if cu_seq_lens_q is None:
                    cu_seq_lens_q = cu_seq_lens_k = _packing_of(module, query, position_ids)
                    if cu_seq_lens_q is not None and keys.shape[1] != query.shape[1]:
                        _refuse_packing()
                out = _attend_without_mask(query, keys, values, cu_seq_lens_q, cu_seq_lens_k, max_length_q, options)
            else:
                out = _attend_with_mask(query, keys, values, attention_mask, options)
    except BaseException:
        if layer is not None:
            layer.cache.undo()
        raise
    return out, None


def _warn_of_attentions():
    """In the words of transformers' other attention functions, which have none to give either."""
    from transformers.utils import logging

    logging.get_logger(f"transformers.integrations.{ATTENTION}").warning_once(
        f"`{ATTENTION}` attention does not support `output_attentions=True`. Please set your attention to `eager` if "
        "you want any of these features."
    )


def _window_of_layer(sliding_window, causal, query, key):
    """window_size of a layer. Where tokens see to both sides, models mean different numbers of keys by
    `sliding_window`: there only the mask tells."""
    if sliding_window is None:
        return -1, 0 if causal else -1
    if not causal and query.shape[2] > 1 and key.shape[2] > sliding_window:
        raise ValueError(
            "sliding_window: expected a mask that says how far tokens see to both sides (transformers makes it), got "
            f"only sliding_window={sliding_window}"
        )
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _layer_of(module, key, value):
    """The layer of a PagedCache that stored `key` and `value` in this pass; None: they belong to no PagedCache.

    Pages hold what was stored. A model that makes other keys or values of it, as DeepSeek V3 does from its latents,
    would attend to its new tokens alone.
    """
    of_key, of_value = getattr(key, "paged_keys", None), getattr(value, "paged_values", None)
    if of_key is not None and of_key is of_value:
        return of_key
    layer = of_key or of_value
    cache = _cache_that_waits() if layer is None else layer.cache
    if cache is None:
        return None
    cache.undo()
    raise ValueError(
        "key and value: expected the tensors that PagedCache.update returned, got others (made by "
        f"{type(module).__name__}), or a pass with a PagedCache ended before its attention"
    )


def _cache_that_waits():
    """The PagedCache of this thread that has stored keys to which nothing attended yet."""
    if torch.compiler.is_compiling():
        return None  # a PagedCache is not compiled
    cache = None if _thread.cache is None else _thread.cache()
    return None if cache is None or cache.pending is None else cache


def _check_lengths(query, attention_mask, cu_seq_lens_q, cu_seq_lens_k):
    """A mask, or lengths of packed sequences."""
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k: expected both or neither, got only one of them")
    if attention_mask is not None:
        if attention_mask.dim() != 2 or len(attention_mask) != len(query):
            shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask: expected None or ({len(query)}, keys), got shape {shape}")
        if cu_seq_lens_q is not None:
            raise ValueError("cu_seq_lens_q: expected None beside an attention_mask with padding, got a tensor")


def _refuse_for_pages(module, query, key, attention_mask, causal, cu_seq_lens_q, position_ids):
    """What pages cannot do: they hold one sequence a row."""
    if not causal and key.shape[2] != query.shape[1]:
        raise ValueError(
            "past_key_values: expected EncoderDecoderCache(PagedCache(model), DynamicCache()) for a model with "
            "cross-attention, got a PagedCache alone"
        )
    if not causal and query.shape[1] > 1:
        raise ValueError(
            f"is_causal: expected True with a PagedCache, got False from {type(module).__name__} (cross-attention "
            "needs EncoderDecoderCache(PagedCache(model), DynamicCache()))"
        )
    if cu_seq_lens_q is not None:
        raise ValueError("cu_seq_lens_q: expected None with a PagedCache (one sequence a row), got a tensor")
    if attention_mask is None and _packing_of(module, query, position_ids) is not None:
        _refuse_packing()


def _refuse_packing():
    raise ValueError("position_ids: expected one sequence a row with a PagedCache or with earlier keys, got several")


def _attend_without_mask(query, keys, values, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, options):
    if cu_seqlens_q is None:
        return flash_attn_with_kvcache(query, keys, values, **options)
    packed = (x.flatten(0, 1) for x in (query, keys, values))
    out = flash_attn_varlen_func(*packed, cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, **options)
    return out.unflatten(0, query.shape[:2])


def _attend_with_mask(query, keys, values, mask, options):
    """A static cache is longer than its mask: the keys after it do not exist."""
    padding = padding_of(mask)
    if padding.is_left:
        lengths = torch.full_like(padding.leftpad, mask.shape[1])
        return flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=lengths, cache_leftpad=padding.leftpad, **options
        )
    batch, tokens = query.shape[:2]
    # Where positions matter, the queries are the last of the keys, padding among them. Else all of them count: in
    # cross-attention the mask says nothing about them.
    positions_matter = options["causal"] or options["window_size"] != (-1, -1)

    def query_places(mask):
        return _places(mask[:, mask.shape[1] - tokens :] if positions_matter else mask.new_ones(batch, tokens))

    of_keys, cu_seqlens_k = _once(mask, "paged_keys", _places)
    # An encoder's mask serves passes with other numbers of tokens.
    of_queries, cu_seqlens_q = _once(mask, f"paged_queries_{tokens}_{positions_matter}", query_places)
    packed = flash_attn_varlen_func(
        query[of_queries], keys[of_keys], values[of_keys], cu_seqlens_q, cu_seqlens_k, tokens, **options
    )
    out = packed.new_zeros(batch, tokens, *packed.shape[1:])
    out[of_queries] = packed
    return out


def _places(mask):
    """Rows and columns of the tokens that exist, and cu_seqlens of the rows."""
    cu_seqlens = torch.nn.functional.pad(mask.bool().sum(-1).cumsum(0), (1, 0)).int()
    return mask.nonzero(as_tuple=True), cu_seqlens


class Padding:
    """Whether the rows of a mask (batch, keys) are padded on the left only, and by how much."""

    def __init__(self, mask):
        present = mask.bool()
        self.leftpad = (~present).sum(-1, dtype=torch.int32)
        is_left = (present[:, 1:] >= present[:, :-1]).all()
        if torch.compiler.is_compiling():
            # A branch would break the graph in every layer.
            words = "attention_mask: expected padding on the left only in a compiled model, got other"
            torch._assert_async(is_left, words)
            self.is_left = True
        else:
            self.is_left = bool(is_left)


def padding_of(mask) -> Padding:
    return _once(mask, "paged_padding", Padding)


def _packing_of(module, query, position_ids):
    """cu_seqlens of sequences that stand in one row one after the other: as transformers' flash attention finds them in
    a single row, each begins at the lowest position of its row. None: every row is one sequence."""
    batch, tokens = query.shape[:2]
    if position_ids is None or tokens == 1 or position_ids.shape not in ((1, tokens), (batch, tokens)):
        return None
    layer = getattr(module, "layer_idx", 0)
    return _once(position_ids, f"paged_packing_{batch}", lambda positions: _starts(positions, batch), layer=layer)


def _starts(position_ids, batch):
    begins = position_ids == position_ids.amin(-1, keepdim=True)
    if torch.compiler.is_compiling():
        words = "position_ids: expected one sequence a row in a compiled model, got several"
        torch._assert_async(~begins[:, 1:].any(), words)
        return None
    if not begins[:, 1:].any():
        return None
    begins[:, 0] = True
    starts = begins.expand(batch, -1).flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=batch * begins.shape[1]).int()


def _once(tensor, name, make, layer=None):
    """make(tensor), kept at the tensor: the layers of a pass get the same one, and `make` waits for the device.

    A tensor may be changed in place between two passes. One of inference mode does not tell. So the layer that made it
    makes it again: a pass goes through the layers in their order. (A mask needs no layer: transformers makes one for
    every pass.)"""
    if torch.compiler.is_compiling():
        return make(tensor)
    version = None if tensor.is_inference() else tensor._version
    kept = getattr(tensor, name, None)
    begins = kept is not None and version is None and layer is not None and layer <= kept[2]
    if kept is None or kept[0] != version or begins:
        kept = version, make(tensor), layer
        setattr(tensor, name, kept)
    return kept[1]
