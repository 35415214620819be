"""A cache for transformers' generate() that keeps keys and values in pages.

    cache = kernel.integrations.PagedCache(model)
    model.generate(**inputs, past_key_values=cache)

Pages are allocated as the text grows. Rows that share a beginning (beams, samples of one prompt) share its pages; a
page is copied when one of its owners writes into it. The model attends to the pages in place.
"""

from __future__ import annotations

import functools

import torch

from ..attention import flash_attn_with_kvcache
from ..cache import empty_paged_cache
from ..write import kv_paged_write

# The name of the attention function among those of transformers.
ATTENTION = "paged_attn"
LAYER_TYPES = ("full_attention", "sliding_attention")


class OutOfPages(RuntimeError):
    pass


class Pages:
    """Which pages each row has. A page may have several rows as owners; without a limit the pool grows."""

    def __init__(self, page_size: int, num_pages: int | None):
        self.page_size, self.limit = page_size, num_pages
        self.owners = [0] * (num_pages or 0)
        self.free = list(range(num_pages or 0))[::-1]
        self.rows: list[list[int]] = []
        self.length = 0

    @property
    def used(self) -> int:
        return len(self.owners) - len(self.free)

    def extend(self, batch: int, tokens: int) -> list[tuple[int, int]]:
        """Room for new tokens in every row: pairs (from, to) of pages to copy before anything is written."""
        if not self.rows:
            self.rows = [[] for _ in range(batch)]
        if len(self.rows) != batch:
            raise ValueError(f"batch: expected {len(self.rows)}, as in the cache, got {batch}")
        needed = -(-(self.length + tokens) // self.page_size)
        first = self.length // self.page_size
        self._reserve(first, needed)
        copies = []
        for row in self.rows:
            for index in range(first, len(row)):
                old = row[index]
                if self.owners[old] > 1:
                    row[index] = self._take()
                    self.owners[old] -= 1
                    copies.append((old, row[index]))
            row.extend(self._take() for _ in range(needed - len(row)))
        self.length += tokens
        return copies

    def _reserve(self, first: int, needed: int) -> None:
        """Pages for `extend`, or an error before anything has changed."""
        missing = sum(needed - len(row) for row in self.rows)
        # All owners of a page but the last to write take a copy.
        shared = [page for row in self.rows for page in row[first:]]
        missing += len(shared) - len(set(shared)) - len(self.free)
        if missing <= 0:
            return
        if self.limit is not None:
            rows = f"{len(self.rows)} rows of {needed * self.page_size} tokens"
            raise OutOfPages(f"num_pages: expected at least {self.limit + missing} for {rows}, got {self.limit}")
        grown = max(missing, len(self.owners) // 4)
        self.free[:0] = range(len(self.owners) + grown - 1, len(self.owners) - 1, -1)
        self.owners += [0] * grown

    def _take(self) -> int:
        page = self.free.pop()
        self.owners[page] = 1
        return page

    def _release(self, pages) -> None:
        for page in pages:
            self.owners[page] -= 1
            if self.owners[page] == 0:
                self.free.append(page)

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was. Nothing is copied."""
        before = self.rows
        self.rows = [list(before[row]) for row in rows]
        for page in (page for row in self.rows for page in row):
            self.owners[page] += 1
        for row in before:
            self._release(row)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens of every row."""
        self.length -= tokens
        keep = -(-self.length // self.page_size)
        for row in self.rows:
            self._release(row[keep:])
            del row[keep:]

    def clear(self) -> None:
        for row in self.rows:
            self._release(row)
        self.rows, self.length = [], 0


class LayerOfPages:
    """PagedLayer without its base. Keys and values of one layer: (num_pages, page_size, kv_heads, head_dim) each."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: CacheOfPages):
        super().__init__()
        self.cache = cache
        self.length = 0

    def lazy_initialization(self, key_states, value_states) -> None:
        self._grow(key_states, value_states)

    def _grow(self, key_states, value_states):
        keys, values = empty_paged_cache(
            len(self.cache.pages.owners),
            self.cache.pages.page_size,
            key_states.shape[1],
            key_states.shape[3],
            value_states.shape[3],
            dtype=self.cache.dtype or key_states.dtype,
            device=key_states.device,
        )
        if self.keys is not None:
            keys[: len(self.keys)] = self.keys
            values[: len(self.values)] = self.values
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes (batch, kv_heads, tokens, head_dim) into the pages. The attention function finds them by `paged_layer`
        at the returned keys."""
        cache = self.cache
        cache.check_attention()
        batch, _, tokens, _ = key_states.shape
        # The first layer of a pass makes room for all.
        if self.length == cache.pages.length:
            cache.extend(batch, tokens, key_states.device)
        if self.keys is None or len(self.keys) < len(cache.pages.owners):
            self._grow(key_states, value_states)
        if cache.copies is not None:
            old, new = cache.copies
            self.keys[new] = self.keys[old]
            self.values[new] = self.values[old]
        kv_paged_write(
            key_states.transpose(1, 2), value_states.transpose(1, 2), self.keys, self.values, cache.table, cache.before
        )
        self.length += tokens
        key_states.paged_layer = self
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.cache.max_length is None else self.cache.max_length


class CacheOfPages:
    """PagedCache without its base."""

    def __init__(self, model, *, page_size=16, num_pages=None, max_length=None, dtype=None):
        register_attention()
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        self.config = model.config
        text = model.config.get_text_config(decoder=True)
        unknown = set(getattr(text, "layer_types", None) or ()) - set(LAYER_TYPES)
        if unknown:
            raise ValueError(f"model: expected layers of {' and '.join(LAYER_TYPES)}, got {', '.join(sorted(unknown))}")
        self.pages = Pages(page_size, num_pages)
        self.max_length, self.dtype = max_length, dtype
        self.start = 0  # the length before the tokens of this pass
        self.table = self.before = self.after = self.copies = None
        self._listed = self._mask = self._leftpad = None
        super().__init__(layers=[self.layer_class(self) for _ in range(text.num_hidden_layers)])

    def check_attention(self):
        if self.config._attn_implementation != ATTENTION:
            raise ValueError(
                f"attn_implementation: expected {ATTENTION!r} (PagedCache sets it), got "
                f"{self.config._attn_implementation!r}"
            )

    def extend(self, batch, tokens, device):
        """Pages, table and lengths for the next tokens of every row."""
        self.start = length = self.pages.length
        if self.max_length is not None and length + tokens > self.max_length:
            raise ValueError(f"max_length: expected at least {length + tokens}, got {self.max_length}")
        copies = self.pages.extend(batch, tokens)
        self.copies = torch.tensor(copies, device=device).T.unbind() if copies else None
        self._list_pages(device)
        if self.before is None or len(self.before) != batch:
            self.before, self.after = torch.empty(2, batch, dtype=torch.int32, device=device).unbind()
        self.before.fill_(length)
        self.after.fill_(length + tokens)

    def _list_pages(self, device):
        """The block table; written anew only when a row got another page."""
        rows = self.pages.rows
        if rows == self._listed:
            return
        self._listed = [list(row) for row in rows]
        table = torch.tensor(rows, dtype=torch.int32)
        if self.max_length is None:
            self.table = table.to(device)
            return
        if self.table is None or len(self.table) != len(rows):
            width = -(-self.max_length // self.pages.page_size)
            self.table = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        self.table[:, : table.shape[1]] = table.to(device)

    def leftpad(self, mask):
        """How many keys before the first one of each row are padding; None: none are."""
        if mask is None:
            return None
        if mask is not self._mask:
            present = mask.to(torch.int32)
            leftpad = present.argmax(-1).int()
            # Once a text: the padding stands at its beginning.
            if self.start == 0:
                check_left_padding(present, leftpad)
            self._mask, self._leftpad = mask, leftpad
        return self._leftpad

    @property
    def batch_size(self) -> int:
        return len(self.pages.rows) or -1

    def reorder_cache(self, beam_idx) -> None:
        self.pages.select(beam_idx.tolist())

    def batch_select_indices(self, indices) -> None:
        self.pages.select(torch.arange(len(self.pages.rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.pages.select([row for row in range(len(self.pages.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every row, as transformers counts."""
        tokens_to_remove = int(tokens_to_remove)  # some of its versions pass a tensor, and lengths are changed in place
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}")
        self.pages.crop(-tokens_to_remove)
        for layer in self.layers:
            layer.length = min(layer.length, self.pages.length)

    def reset(self) -> None:
        """Frees every page; the pool stays."""
        self.pages.clear()
        self.copies = self._listed = self._mask = self._leftpad = None
        for layer in self.layers:
            layer.length = 0


def check_left_padding(present, leftpad):
    for row, (keys, start) in enumerate(zip(present.sum(-1).tolist(), leftpad.tolist(), strict=True)):
        if keys and keys != present.shape[1] - start:
            raise ValueError(f"attention_mask: expected padding on the left only, got other in row {row}")


@functools.cache
def paged_cache_class():
    """PagedCache. Its bases are transformers', which the kernel itself does not need."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PagedLayer(LayerOfPages, CacheLayerMixin):
        pass

    class PagedCache(CacheOfPages, Cache):
        """A `Cache` of pages for the models of transformers whose layers attend to all keys or to a window.

        Args:
            model: gets the attention function of this kernel (`model.set_attn_implementation("paged_attn")`), which
                serves other caches too.
            page_size: slots of a page.
            num_pages: pages of the pool; None lets the pool grow, by a quarter at least.
            max_length: tokens of a row at most. With it and `num_pages` every tensor keeps its place and shape.
            dtype: of the cache; None: the model's.
        """

        layer_class = PagedLayer

    return PagedCache


def register_attention() -> None:
    """Makes `attn_implementation="paged_attn"` known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, flash_attention_mask)


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
    **kwargs,
):
    """transformers' attention interface: (batch, heads, tokens, head_dim) in, (batch, tokens, heads, head_dim) out."""
    if dropout:
        raise ValueError(f"dropout: expected 0.0 (forward only, for inference), got {dropout}")
    causal = module.is_causal if is_causal is None else is_causal
    window = -1 if sliding_window is None else sliding_window - 1
    layer = getattr(key, "paged_layer", None)
    if layer is not None:
        cache = layer.cache
        keys, values, lengths, table = layer.keys, layer.values, cache.after, cache.table
        leftpad = cache.leftpad(attention_mask)
    else:
        # Another cache, or none: all keys are here. A static cache is longer than its mask.
        keys, values, lengths, table, leftpad = key.transpose(1, 2), value.transpose(1, 2), None, None, None
        if attention_mask is not None:
            leftpad = attention_mask.to(torch.int32).argmax(-1).int()
            lengths = torch.full_like(leftpad, attention_mask.shape[1])
    out = flash_attn_with_kvcache(
        query.transpose(1, 2),
        keys,
        values,
        cache_seqlens=lengths,
        block_table=table,
        cache_leftpad=leftpad,
        softmax_scale=scaling,
        causal=causal,
        window_size=(window, 0 if causal else window),
        softcap=softcap or 0.0,
        s_aux=s_aux,
    )
    return out, None
