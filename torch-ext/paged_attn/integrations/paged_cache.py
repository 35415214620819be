"""A cache for transformers' generate() that keeps keys and values in pages.

    cache = kernel.integrations.PagedCache(model)
    model.generate(**inputs, past_key_values=cache)

Pages are allocated as the text grows. Rows that share a beginning (beams, samples of one prompt) share its pages; a
page is copied when one of its owners writes into it. The model attends to the pages in place.

A pass of the model through its layers, with `tokens` new tokens in every row:

    layer 0   update   extend   the pass gets its pages, copies of shared ones, the block table and the lengths
                       write    the new keys and values go into the pages of this layer
              attend            finds these pages by the tensors that update returned, and reads them in place
    layer 1   update   write    the pages, the table and the lengths are there already
              attend   ...

An error in update or attend takes the whole pass back (`undo`), so that it can be tried again.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from copy import deepcopy

import torch

from .._call import FP8
from ..cache import empty_paged_cache
from ..write import kv_paged_write
from .transformers_attention import ATTENTION, announce, padding_of, register_attention

LAYER_TYPES = ("full_attention", "sliding_attention")


# A tensor made under torch.inference_mode() can be written only there, and a cache outlives it.
_usable_everywhere = torch.inference_mode(False)


class OutOfPages(RuntimeError):
    """A PagedCache with `num_pages` has no free page left. The pass that needed one is taken back."""


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

    def extend(self, batch: int, tokens: int, copies: list[tuple[int, int]]) -> None:
        """Room for new tokens in every row. Adds to `copies`: pairs (from, to) of pages to copy before anything is
        written."""
        if not self.rows and self.length == 0:
            self.rows = [[] for _ in range(batch)]
        if len(self.rows) != batch:
            raise ValueError(f"batch: expected {len(self.rows)}, as in the cache, got {batch}")
        needed = -(-(self.length + tokens) // self.page_size)
        first = self.length // self.page_size
        self._reserve(first, needed)
        for row in self.rows:
            for index in range(first, len(row)):
                old = row[index]
                if self.owners[old] > 1:
                    copies.append((old, self._take()))  # before it is in the row, so that `undo` knows it there
                    row[index] = copies[-1][1]
                    self.owners[old] -= 1
            row.extend(self._take() for _ in range(needed - len(row)))
        self.length += tokens

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

    def _count_owners(self) -> None:
        """Makes `owners` and `free` say what `rows` do."""
        self.owners = [0] * len(self.owners)
        for page in (page for row in self.rows for page in row):
            self.owners[page] += 1
        self.free = [page for page in reversed(range(len(self.owners))) if self.owners[page] == 0]

    @contextlib.contextmanager
    def _changing_rows(self):
        """An interrupt (Ctrl-C) may come between any two lines. So rows and length change at once, and owners are
        counted anew where their changes did not come to an end."""
        try:
            yield
        except BaseException:
            self._count_owners()
            raise

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was. Nothing is copied."""
        before = self.rows
        with self._changing_rows():
            self.rows = [list(before[row]) for row in rows]
            for page in (page for row in self.rows for page in row):
                self.owners[page] += 1
            for row in before:
                self._release(row)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens of every row."""
        before, length = self.rows, self.length - tokens
        keep = -(-length // self.page_size)
        with self._changing_rows():
            self.rows, self.length = [row[:keep] for row in before], length
            for row in before:
                self._release(row[keep:])

    def undo(self, length: int, copies: list[tuple[int, int]]) -> None:
        """What was there before the last `extend`, which was given `copies` and may have ended anywhere."""
        self.length = length
        keep = -(-length // self.page_size)
        old_of_new = {new: old for old, new in copies}
        for row in self.rows:
            del row[keep:]
            # Only the last page of a row was written on, so only it can have become a copy.
            if row and row[-1] in old_of_new:
                row[-1] = old_of_new[row[-1]]
        if length == 0:
            self.rows = []
        self._count_owners()

    def clear(self) -> None:
        before = self.rows
        with self._changing_rows():
            self.rows, self.length = [], 0
            for row in before:
                self._release(row)


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

    @_usable_everywhere
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
        """Writes (batch, kv_heads, tokens, head_dim) into the pages. What it returns leads the attention function to
        them, so it must reach that function as it is."""
        cache = self.cache
        cache.check_update(self, key_states)
        try:
            # The first layer of a pass makes room for all.
            if self.length == cache.pages.length:
                cache.extend(key_states.shape[0], key_states.shape[2], key_states.device)
            if self.keys is None or len(self.keys) < len(cache.pages.owners):
                self._grow(key_states, value_states)
            if cache.copies is not None:
                old, new = cache.copies
                self.keys[new] = self.keys[old]
                self.values[new] = self.values[old]
            # Under torch.autocast the rotated keys are float32 and the values are not.
            new_keys, new_values = key_states.transpose(1, 2), value_states.to(key_states.dtype).transpose(1, 2)
            kv_paged_write(new_keys, new_values, self.keys, self.values, cache.table, cache.before)
            self.length = cache.pages.length
            cache.pending = self
            announce(cache)
            key_states.paged_keys = value_states.paged_values = self
        except BaseException:
            cache.undo()
            raise
        return key_states, value_states

    def attended(self) -> None:
        """The layer is done with this pass; layers that share its keys and values attend too, after it. Who fills a
        cache by hand calls it after each update, as nothing attends then."""
        if self.cache.pending is self:
            self.cache.pending = None

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.cache.max_length is None else self.cache.max_length


class CacheOfPages:
    """PagedCache without its base."""

    def __init__(self, model, *, page_size=16, num_pages=None, max_length=None, dtype=None):
        for name, value in (("page_size", page_size), ("num_pages", num_pages), ("max_length", max_length)):
            is_unlimited = value is None and name != "page_size"
            if not is_unlimited and (not isinstance(value, numbers.Integral) or value < 1):
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        text = model.config.get_text_config(decoder=True)
        unknown = set(getattr(text, "layer_types", None) or ()) - set(LAYER_TYPES)
        if unknown:
            raise ValueError(f"model: expected layers of {' and '.join(LAYER_TYPES)}, got {', '.join(sorted(unknown))}")
        register_attention()
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            kind = type(model).__name__
            raise ValueError(f"model: expected attention that can be replaced (AttentionInterface), got {kind}")
        self.config = model.config
        self.pages = Pages(page_size, num_pages)
        self.max_length, self.dtype = max_length, dtype
        # Of this pass: the length before it, the pages copied, the layer that stored its keys but has not attended.
        self.start, self.copied, self.pending = 0, [], None
        self.table = self.before = self.after = self.copies = None
        self._listed = None
        super().__init__(layers=[self.layer_class(self) for _ in range(text.num_hidden_layers)])

    def __deepcopy__(self, memo):
        """For the same model, so with its config itself: a copy would not tell when the model's attention changes."""
        memo[id(self)] = copied = object.__new__(type(self))
        attributes = {name: value for name, value in vars(self).items() if name != "config"}
        vars(copied).update(deepcopy(attributes, memo), config=self.config)
        return copied

    def __getstate__(self):
        raise TypeError(
            "PagedCache: expected copy.deepcopy (its pages are of this process and model), got pickle or copy"
        )

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= len(self.layers):
            self.undo()
            raise ValueError(
                f"past_key_values: expected a PagedCache of this model, got one of {len(self.layers)} layers for layer "
                f"{layer_idx}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def check_update(self, layer, key_states):
        """Before anything changes: whether this layer may store keys now. The first layer of a pass ends the last pass:
        `undo`, from here on, leaves that one as it is."""
        is_first = layer.length == self.pages.length
        # Once a pass, as reading an attribute of a config takes longer than all else here.
        if is_first and self.config._attn_implementation != ATTENTION:
            raise ValueError(
                f"attn_implementation: expected {ATTENTION!r} (PagedCache sets it), got "
                f"{self.config._attn_implementation!r}"
            )
        if is_first and self.dtype is not None and self.dtype not in (key_states.dtype, *FP8):
            raise ValueError(f"dtype: expected None, {key_states.dtype} or an 8-bit float, got {self.dtype}")
        if self._ended_early(is_first) or not (is_first or layer.length == self.start):
            self._refuse_half_a_pass(layer)
        # The table and the lengths of a pass are where its first layer is.
        if not is_first and key_states.device != self.table.device:
            self.undo()
            raise ValueError(
                f"model: expected all layers on one device, got keys on {self.table.device} and {key_states.device}"
            )
        if is_first:
            self._finish_pass()

    def _ended_early(self, between_passes=True):
        """Whether a pass stopped before its last layer: by an error outside of attention, or because the model has
        attention of its own. Layers without keys do not count: some models have such layers."""
        lagging = between_passes and any(0 < layer.length < self.pages.length for layer in self.layers)
        return lagging or self.pending is not None

    def _refuse_half_a_pass(self, layer=None):
        self.undo()
        if layer is not None and layer.length < self.pages.length:
            self.reset()  # the very first pass ended early
        raise ValueError(
            "past_key_values: expected every layer to attend once in each pass, got a pass that ended early; the cache "
            f"holds {self.pages.length} tokens again"
        )

    def undo(self):
        """Takes back what the layers have done of this pass."""
        self.pages.undo(self.start, self.copied)
        for layer in self.layers:
            layer.length = min(layer.length, self.start)
        self._finish_pass()
        self.pending = None

    @_usable_everywhere
    def extend(self, batch, tokens, device):
        """A pass: pages, table and lengths for the next tokens of every row."""
        length = self.start
        if self.max_length is not None and length + tokens > self.max_length:
            raise ValueError(f"max_length: expected at least {length + tokens}, got {self.max_length}")
        self.pages.extend(batch, tokens, self.copied)
        self.copies = torch.tensor(self.copied, device=device).T.unbind() if self.copied else None
        self._list_pages(device)
        if self.before is None or len(self.before) != batch:
            self.before, self.after = torch.empty(2, batch, dtype=torch.int32, device=device).unbind()
        self.before.fill_(length)
        self.after.fill_(length + tokens)

    def _finish_pass(self) -> None:
        """The last pass can no longer be undone."""
        self.start, self.copied, self.copies = self.pages.length, [], None

    def _list_pages(self, device):
        """Makes the block table; anew only when a row got another page."""
        rows = self.pages.rows
        if rows == self._listed:
            return
        table = torch.tensor(rows, dtype=torch.int32).to(device)
        if self.max_length is None:
            self.table = table
        else:
            if self.table is None or len(self.table) != len(rows):
                width = -(-self.max_length // self.pages.page_size)
                self.table = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
            self.table[:, : table.shape[1]] = table
        self._listed = [list(row) for row in rows]

    def leftpad(self, mask):
        """How many keys before the first one of each row are padding; None: none are."""
        if mask is None:
            return None
        if mask.shape[1] != self.pages.length:
            raise ValueError(f"attention_mask: expected {self.pages.length} keys a row, got {mask.shape[1]}")
        padding = padding_of(mask)
        if not padding.is_left:
            row = (mask[:, 1:].int() < mask[:, :-1].int()).any(-1).nonzero()[0].item()
            raise ValueError(f"attention_mask: expected padding on the left only, got other in row {row}")
        return padding.leftpad

    @property
    def batch_size(self) -> int:
        return len(self.pages.rows) or -1

    def _settle(self) -> None:
        """Before rows change: the last pass is whole, and nothing of it is taken back any more."""
        if self._ended_early():
            self._refuse_half_a_pass()
        self._finish_pass()

    def reorder_cache(self, beam_idx) -> None:
        self._choose("beam_idx", beam_idx)

    def batch_select_indices(self, indices) -> None:
        self._choose("indices", indices)

    def _choose(self, name, rows):
        self._settle()
        count = len(self.pages.rows)
        if count == self.pages.length == 0:
            return  # as in transformers' own caches
        try:
            chosen = torch.arange(count)[rows.cpu()].tolist()
        except IndexError:
            raise ValueError(f"{name}: expected numbers or a mask of {count} rows, got {rows.tolist()}") from None
        self.pages.select(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._settle()
        self.pages.select([row for row in range(len(self.pages.rows)) for _ in range(repeats)])

    @property
    def is_croppable(self) -> bool:
        """Not beside a cache of cross-attention: transformers has DynamicCaches alone forget there. Where this is True,
        generate() on a Mac computes one token more than it needs, and takes it back."""
        return not self.config.is_encoder_decoder

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every row, as transformers counts."""
        tokens_to_remove = int(tokens_to_remove)  # some of its versions pass a tensor, and lengths are changed in place
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}")
        self._settle()
        tokens = min(-tokens_to_remove, self.pages.length)
        # First the layers: a layer without tokens that the pages hold is refused, should an interrupt come in between.
        for layer in self.layers:
            layer.length = min(layer.length, self.pages.length - tokens)
        self.pages.crop(tokens)
        self._finish_pass()

    def reset(self) -> None:
        """Frees every page; the pool stays."""
        for layer in self.layers:
            layer.length = 0
        self.pages.clear()
        self._finish_pass()
        self.pending = self._listed = None


@functools.cache
def paged_cache_class():
    """PagedCache. Its bases are transformers', which the kernel itself does not need."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    # Not above: disable() imports the compiler, which takes a second or more.
    reason = "PagedCache chooses pages in Python: compile without fullgraph=True"

    class PagedLayer(LayerOfPages, CacheLayerMixin):
        update = torch.compiler.disable(LayerOfPages.update, reason=reason)

    class PagedCache(CacheOfPages, Cache):
        """A `Cache` of pages for the models of transformers whose layers attend to all keys or to a window.

        Args:
            model: gets the attention function of this kernel (`model.set_attn_implementation("paged_attn")`), which
                serves other caches too.
            page_size: slots of a page.
            num_pages: pages of the pool; None lets the pool grow, by a quarter at least.
            max_length: tokens of a row at most. With it and `num_pages` every tensor keeps its place and shape.
            dtype: of the cache; None: the model's.

        Raises:
            ValueError: a size is no integer of at least 1, or the model has layers of another kind, or attention that
                cannot be replaced. In a pass of the model: what pages cannot hold (docs/transformers.md), or a text
                longer than `max_length`.
            OutOfPages: in a pass: `num_pages` are too few. It can be imported from `integrations`.

        An error in a pass takes the whole pass back: the cache holds what it held before.
        """

        layer_class = PagedLayer

    return PagedCache
