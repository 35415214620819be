"""Random calls for fuzz.py: `draw(seed)` makes one call of one public function, the same for the same seed.

A call is drawn from the contract, not from what a backend happens to support: every function, every argument in every
form it may have, sizes down to nothing, and NaN or nonsense wherever the contract says that nobody looks. Everything is
made on the CPU; `Call.on` brings the arguments to a device with their strides and shared memory as they are.
"""

import itertools
import random
from dataclasses import dataclass, field

import cases
import reference
import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BIT_QUERIES = 0.15  # how often, over 8-bit caches
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 64, 128, 96, 80, 256, 192, 112, 160, 32, 40, 16, 8, 1, 59)
PAGE_SIZES = (16, 16, 16, 64, 32, 1, 2, 3, 8, 17, 24, 48, 128, 256)
LAYOUTS = ("plain", "plain", "plain", "heads_first", "interleaved", "odd_strides")


# Values that ask for nothing, by function.
ANY = {
    "softmax_scale": (None,), "causal": (False,), "window_size": ((-1, -1), None), "softcap": (0.0,),
    "alibi_slopes": (None,), "attention_chunk": (0, None), "qv": (None,), "q_v": (None,), "q_descale": (None,),
    "k_descale": (None,), "v_descale": (None,), "s_aux": (None,), "sinks": (None,), "num_splits": (0,),
    "deterministic": (False,), "pack_gqa": (None,), "sm_margin": (0,), "return_softmax_lse": (False,), "out": (None,),
}  # fmt: skip
# Of other kernels, which callers pass all the same.
OTHERS = {
    "fa_version": (2, 3, None), "only_qv": (False, None), "seqused_q": (None,), "score_mod": (None,),
    "mask_mod": (None,), "aux_tensors": (None,), "dynamic_causal": (False,), "output_scale": (None,),
    "cp_rank": (None,),
}  # fmt: skip
ANY |= OTHERS
PLAIN = ANY | {"dropout_p": (0.0,), "return_attn_probs": (False,)}
NEUTRAL = {
    "flash_attn_with_kvcache": ANY | {
        "k": (None,), "v": (None,), "rotary_cos": (None,), "rotary_sin": (None,), "cache_batch_idx": (None,),
        "cache_leftpad": (None,), "block_table": (None,), "page_table": (None,), "rotary_interleaved": (True, False),
        "cu_seqlens_q": (None,), "cu_seqlens_k_new": (None,), "max_seqlen_q": (None,), "max_seqlen_k": (None,),
        "rotary_seqlens": (None,), "scheduler_metadata": (None,), "ver": (None,),
    },
    "flash_attn_func": PLAIN,
    "flash_attn_varlen_func": PLAIN | {
        "seqused_k": (None,), "block_table": (None,), "page_table": (None,), "scheduler_metadata": (None,),
    },
    "kv_paged_write": {
        "cu_seqlens_k_new": (None,), "slot_mapping": (None,), "k_descale": (None,), "v_descale": (None,),
    },
    "merge_attn_states": {"out": (None,), "lse": (None,)},
    "fa3.merge_state_v2": {"v_merged": (None,), "s_merged": (None,)},
}  # fmt: skip
# FlashAttention 3 has no slopes and no dropout.
for name in ("flash_attn_with_kvcache", "flash_attn_func", "flash_attn_varlen_func"):
    absent = ("alibi_slopes", "dropout_p")
    NEUTRAL[f"fa3.{name}"] = {n: values for n, values in NEUTRAL[name].items() if n not in absent}
FA3 = 0.2  # of the calls of functions that both modules have
LATENT_ALONE = 0.1  # of those whose score could be qv . v


class Dice(random.Random):
    def chance(self, p):
        return self.random() < p

    def upto(self, high):
        """0 to high, small numbers and the ends more often than others."""
        return min(high, self.choice((0, 1, high, self.randint(0, high), self.randint(0, high), self.randint(0, high))))


@dataclass
class Request:
    """One entry of the batch: what the lengths say, and where its keys lie."""

    q_begin: int
    q_len: int
    old_len: int
    new_begin: int
    new_len: int
    leftpad: int = 0
    row: int = 0  # of the block table, or of a contiguous cache
    first_slot: int = 0  # of packed keys
    rotary_base: int = 0

    @property
    def kv_len(self):
        return self.old_len + self.new_len


@dataclass
class Call:
    seed: int
    function: str
    arguments: dict  # by name, caches included
    requests: list
    storage: tuple = ()  # of the caches, guards included
    case: cases.Case = None  # how the caches lie in the storage
    features: set = field(default_factory=set)
    fault: str = ""  # the name that the error must hold; "" for a good call
    by_value: bool = False  # only the values of a tensor on the device are wrong
    harmless: bool = False  # bad only where values are checked: elsewhere the results are right
    neutral: dict = field(default_factory=dict)  # arguments that ask for nothing, given all the same
    latent_alone: str = ""  # of fa3: the score is qv . v; how that is said, while `arguments` has the values as keys
    results = ("out",)  # the arguments that are written

    @property
    def base(self):
        """The function without the name of its module."""
        return self.function.removeprefix("fa3.")

    def on(self, device):
        """The same call on a device: (arguments, storage), nothing shared with this one."""
        move = cases.mover(device)
        arguments = {n: move(x) if isinstance(x, torch.Tensor) else x for n, x in self.arguments.items()}
        return self.neutral | arguments, tuple(move(s) for s in self.storage)

    def given(self, arguments):
        """The arguments as the function takes them."""
        if self.function == "fa3.flash_attn_varlen_func":  # which has no defaults for these two
            arguments = {"cu_seqlens_q": None, "cu_seqlens_k": None} | arguments
        if not self.latent_alone:
            return arguments
        keys = "k_cache" if "k_cache" in arguments else "k"
        given = arguments | {"qv": arguments["q"], "q": arguments["q"][..., :0], keys: arguments[keys][..., :0]}
        if self.latent_alone == "only_qv":
            given |= {"only_qv": True, keys: None}
        return given

    def code(self):
        """The call in Python; big tensors by their place in this call."""
        lines = [f"call = fuzz.draw({self.seed})", f"paged_attn.{self.function}("]
        for name, x in (self.neutral | self.arguments).items():
            if isinstance(x, torch.Tensor):
                what = f"{str(x.dtype)[6:]} {tuple(x.shape)}, strides {x.stride()}"
                small = not x.is_floating_point() and not x.is_meta and x.numel() <= 64
                text = f"torch.tensor({x.tolist()}, dtype={x.dtype})" if small else f'call.arguments["{name}"]'
                lines.append(f"    {name}={text},  # {what}")
            else:
                lines.append(f"    {name}={x!r},")
        return "\n".join([*lines, ")"])


@dataclass
class MergeCall(Call):
    """merge_attn_states, or merge_state_v2 of fa3: two parts, and where the union goes if that is given."""

    names: tuple = ()  # out and lse of the first part, of the second, of the union
    heads_last: bool = False  # lse as (tokens, heads)

    @property
    def results(self):
        return self.names[4:]


def chunk_of(positions, leftpad, size):
    return torch.div(positions - leftpad, size, rounding_mode="floor")


def visible(request, window_left, window_right, chunk):
    """bool (q_len, kv_len): which keys the tokens see; the rule of reference.visible_keys for a whole request."""
    q_pos = torch.arange(request.kv_len - request.q_len, request.kv_len)[:, None]
    key = torch.arange(request.kv_len)[None]
    seen = (key >= request.leftpad).expand(request.q_len, -1)
    if window_left >= 0:
        seen = seen & (key >= q_pos - window_left)
    if window_right >= 0:
        seen = seen & (key <= q_pos + window_right)
    if chunk > 0:
        seen = seen & (chunk_of(key, request.leftpad, chunk) == chunk_of(q_pos, request.leftpad, chunk))
    return seen


def locality(arguments):
    """(window_left, window_right, chunk) of a call, neutral values resolved."""
    left, right = arguments.get("window_size") or (-1, -1)
    chunk = arguments.get("attention_chunk") or 0
    return left, 0 if arguments.get("causal") else right, chunk


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def numbers(shape, dtype, factor=1.0):
    return (torch.randn(shape) * factor).to(dtype)


def laid_out(dice, x, features):
    """x [..., tokens, heads, dim] as it is, as a slice of wider memory, or with heads before tokens."""
    how = dice.choice(("plain", "plain", "plain", "wide", "heads_first", "wide_aligned"))
    if x.dim() < 3 or how == "plain":
        return x
    features.add(f"input {how}")
    if how == "heads_first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    before, after = (1, 2) if how == "wide" else (0, 16 // x.element_size())
    wide = torch.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + before + after), torch.nan).to(x.dtype)
    wide[..., :-1, before : wide.shape[-1] - after] = x
    return wide[..., :-1, before : wide.shape[-1] - after]


def wide_table(dice, rows, columns, fill):
    """The left part of a wider table, as in engines that keep one for the longest context."""
    spare = dice.choice((0, 0, 3))
    values = [fill() for _ in range(rows * (columns + spare))]
    return int32(values).view(rows, columns + spare)[:, :columns]


def draw_sizes(dice):
    """(batch, longest q, longest kv, most heads): mostly little, sometimes much of one thing."""
    kind = dice.choices(("small", "batch", "long", "prefill"), (82, 6, 5, 7))[0]
    if kind == "small":
        batch = dice.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 8)) if dice.chance(0.97) else 0
        return kind, batch, dice.choice((1, 1, 1, 2, 4, 9, 17)), dice.choice((1, 20, 40, 70, 130)), 48
    if kind == "batch":
        return kind, dice.randint(20, 150), dice.choice((1, 1, 2)), dice.choice((1, 30, 60)), 16
    if kind == "long":
        return kind, dice.randint(1, 3), dice.choice((1, 1, 3)), dice.randint(400, 4000), 8
    return kind, dice.randint(1, 4), dice.randint(20, 600), dice.randint(1, 700), 4


def draw_heads(dice, most):
    kv_heads = dice.choice((1, 1, 2, 2, 3, 4, 8))
    group = dice.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32))
    kv_heads = min(kv_heads, most)
    group = max(1, min(group, most // kv_heads))
    return kv_heads, group


def draw_dims(dice, kind):
    """(head_dim, head_dim_v, qv, latent)"""
    special = dice.random()
    if special < 0.03:
        return 576, 512, False, True
    if special < 0.06:
        return 64, 512, True, False
    if special < 0.08:
        return 192, 128, False, False
    if special < 0.10:
        return 512, 512, False, False
    head_dim = dice.choice(HEAD_DIMS) if dice.chance(0.6) else dice.randint(1, 256)
    if kind != "small":
        head_dim = min(head_dim, 128) if dice.chance(0.8) else head_dim
    head_dim_v = head_dim
    if dice.chance(0.15):
        head_dim_v = dice.choice(HEAD_DIMS) if dice.chance(0.5) else dice.randint(1, 256)
    return head_dim, head_dim_v, dice.chance(0.04), False


def draw_length(dice, longest, page_size):
    kind = dice.random()
    if kind < 0.12:
        return 0
    if kind < 0.35:
        return longest
    if kind < 0.6 and page_size:
        return min(longest, max(0, page_size * dice.randint(0, longest // page_size + 1) + dice.randint(-1, 1)))
    return dice.randint(0, longest)


def per_token(dice, lens, packed, heads, dim, dtype, factor, spare):
    """(batch, tokens, heads, dim), or packed with `spare` tokens of NaN that belong to no request."""
    if not packed:
        return numbers((len(lens), lens[0] if lens else spare, heads, dim), dtype, factor)
    x = numbers((sum(lens) + spare, heads, dim), dtype, factor)
    x.view(reference.BITS[x.itemsize])[sum(lens) :] = (
        torch.full((1,), torch.nan).to(dtype).view(reference.BITS[x.itemsize])
    )
    return x


def is_ignored(arguments, name):
    """A descale of a tensor that is not of 8 bits."""
    scaled = arguments["q"] if name == "q_descale" else arguments.get("v_cache", arguments.get("v"))
    return scaled.dtype not in FP8


def descale(dice, batch, kv_heads, low=0.5):
    shape = dice.choice(((batch, kv_heads), (1, 1), (1, kv_heads), (batch, 1)))
    x = torch.rand(shape) + low
    how = dice.choice(("plain", "expanded", "transposed"))
    if how == "expanded":
        return x.expand(batch, kv_heads) if batch else x
    return x.T.contiguous().T if how == "transposed" else x


class Drawing:
    """The call under construction."""

    def __init__(self, seed):
        self.dice = Dice(seed)
        torch.default_generator.manual_seed(seed)  # all devices' would take longer than the call
        self.features = set()
        self.arguments = {}
        self.fa3 = False
        self.latent_alone = ""
        self.kind, self.batch, self.longest_q, self.longest_kv, most_heads = draw_sizes(self.dice)
        self.kv_heads, self.group = draw_heads(self.dice, most_heads)
        self.q_heads = self.kv_heads * self.group
        self.head_dim, self.head_dim_v, self.qv, self.latent = draw_dims(self.dice, self.kind)
        if self.kind == "prefill":  # the reference holds a score for every row and key
            room = 6_000_000 // (self.batch * self.q_heads * max(self.head_dim, self.head_dim_v) // 64 + 1)
            self.longest_q = max(1, min(self.longest_q, room // max(self.longest_kv, 1)))
        self.dtype = self.dice.choice(Q_DTYPES)
        self.q_dtype = self.dtype
        self.cache_dtype = self.dice.choice(FP8) if self.dice.chance(0.3) else self.dtype
        if self.cache_dtype in FP8 and self.dice.chance(EIGHT_BIT_QUERIES):
            self.q_dtype = self.dice.choice(FP8)
        self.note(self.kind, f"q {str(self.q_dtype)[6:]}", f"cache {str(self.cache_dtype)[6:]}")
        self.note(*(["qv"] if self.qv else []), *(["latent"] if self.latent else []))
        self.note(*([f"batch {self.batch}"] if self.batch == 0 else []))

    def of_fa3(self, may_be_latent):
        """The function of that name in paged_attn.fa3; where it may be, one whose score is qv . v alone."""
        self.fa3 = True
        self.note("fa3")
        if may_be_latent and self.dice.chance(LATENT_ALONE):
            self.latent_alone = self.dice.choice(("only_qv", "head_dim 0"))
            self.latent, self.qv, self.head_dim = True, False, self.head_dim_v
            self.features -= {"qv", "latent"}
            self.note(f"latent alone, {self.latent_alone}")

    def note(self, *features):
        self.features.update(features)

    def give(self, **arguments):
        self.arguments.update(arguments)
        self.note(*arguments)

    # What every attention function takes

    def draw_queries(self, packed):
        """q, qv and cu_seqlens_q; the q_len of every request."""
        dice = self.dice
        if packed:
            lens = [dice.upto(self.longest_q) for _ in range(self.batch)]
            if lens and dice.chance(0.5):
                lens[dice.randrange(len(lens))] = self.longest_q
            if dice.chance(0.03):
                lens = [0] * self.batch
            spare = dice.choice((0, 0, 0, 0, 1, 5))
            self.give(cu_seqlens_q=int32([0, *itertools.accumulate(lens)]))
            self.note(*(["tokens of no request"] if spare else []))
        else:
            length = dice.upto(self.longest_q) if dice.chance(0.3) else self.longest_q
            lens, spare = [length] * self.batch, length
        factor = dice.choice((3.0, 3.0, 3.0, 1.0, 0.0, 40.0)) if dice.chance(0.3) else 3.0
        arguments = {"q": per_token(dice, lens, packed, self.q_heads, self.head_dim, self.q_dtype, factor, spare)}
        if self.qv:
            arguments["qv"] = per_token(dice, lens, packed, self.q_heads, self.head_dim_v, self.q_dtype, 3.0, spare)
        self.give(**{name: laid_out(dice, x, self.features) for name, x in arguments.items()})
        return lens

    def draw_scores(self):
        """Scale, causality, windows, chunks, softcap, slopes, sinks, descales."""
        dice = self.dice
        if dice.chance(0.2):
            self.give(softmax_scale=dice.choice((0.07, 0.3, 1.0, 0.0, -0.2)))
        if dice.chance(0.5):
            self.give(causal=dice.chance(0.85))
        longest = max(self.longest_kv, 1)
        if dice.chance(0.3):
            left, right = (dice.choice((-1, 0, dice.upto(longest), dice.upto(longest + 20), 2**31)) for _ in range(2))
            self.give(window_size=dice.choice(((left, right), (left, -1), (-1, right), [left, right], None)))
        if dice.chance(0.12):
            self.give(attention_chunk=dice.choice((1, 2, 8, 64, dice.randint(1, longest), 2**31 - 1, 0, None)))
        if dice.chance(0.15):
            self.give(softcap=dice.choice((2.5, 0.5, 20.0, 50.0, 1000.0, 1e6, 0.0)))
        if not self.fa3 and dice.chance(0.12):
            shape = dice.choice(((self.q_heads,), (self.batch, self.q_heads)))
            slopes = torch.rand(shape) * dice.choice((0.3, 0.3, 0.01, -0.1, 0.0))
            if len(shape) == 2 and dice.chance(0.3):
                slopes = slopes[:1].expand(shape) if self.batch else slopes
            self.give(alibi_slopes=slopes)
        if dice.chance(0.15):
            sinks = torch.rand(self.q_heads) * 20 - 10
            sinks[dice.randrange(self.q_heads) :: 3] = -torch.inf
            if dice.chance(0.1):
                sinks[0] = torch.inf
            self.give(**{dice.choice(("s_aux", "sinks")): sinks.to(dice.choice(Q_DTYPES))})
        eight_bit = self.cache_dtype in FP8
        for name in ("k_descale", "v_descale"):
            if dice.chance(0.7 if eight_bit else 0.05):
                self.give(**{name: descale(dice, self.batch, self.kv_heads)})
        if self.latent_alone:  # the keys are the values, scale and all
            self.arguments.pop("k_descale", None)
            if "v_descale" in self.arguments:
                self.give(k_descale=self.arguments["v_descale"])
        if dice.chance(0.8 if self.q_dtype in FP8 else 0.05):
            self.give(q_descale=descale(dice, self.batch, self.kv_heads))

    def draw_execution(self, name_of_lse="return_softmax_lse"):
        dice = self.dice
        if dice.chance(0.15):
            self.give(num_splits=dice.choice((0, 1, 2, 3, 5, 16, 1000)))
        if dice.chance(0.12):
            self.give(deterministic=dice.chance(0.8))
        if dice.chance(0.8):
            self.give(**{name_of_lse: True})
        if dice.chance(0.1):
            self.give(pack_gqa=dice.choice((None, True, False)))
        if dice.chance(0.05):
            self.give(sm_margin=dice.choice((0, 8)))
        if dice.chance(0.25):
            shape = (*self.arguments["q"].shape[:-1], self.head_dim_v)
            dtype = torch.bfloat16 if self.q_dtype in FP8 else self.q_dtype
            wide = torch.full((*shape[:-2], shape[-2] + 2, shape[-1] + 6), torch.nan).to(dtype)
            exact = torch.full(shape, torch.nan).to(dtype)
            self.give(out=dice.choice((exact, wide[..., 1:-1, 2:-4])))

    def draw_max_seqlen_q(self, lens):
        """A hint: exact, absent, too large, far too large; 0 where no token belongs to a request."""
        longest = max(lens, default=0)
        self.give(max_seqlen_q=self.dice.choice((longest, longest, None, longest + 1, 4000, 2**31 - 1)))

    def draw_max_seqlen_k(self, room):
        """A hint of any value, true or not."""
        longest = max(room, default=0)
        self.give(max_seqlen_k=self.dice.choice((longest, longest, None, longest + 7, 0, 1, 4000, 2**31 - 1)))

    # Where keys lie

    def make_storage(self, pages, slots, layout):
        self.case = cases.Case(
            q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            dtype=str(self.dtype)[6:], kv_dtype=str(self.cache_dtype)[6:], layout=layout,
        )  # fmt: skip
        self.storage = cases.make_storage(self.case, pages, slots)
        self.note(f"layout {layout}")
        return cases.carve(self.case, self.storage)

    def fill_seen(self, caches, table, requests):
        """Numbers where some row of some request sees a key; NaN stays elsewhere, also where the append writes."""
        local = locality(self.arguments)
        for request in requests:
            seen = visible(request, *local).any(0)[: request.old_len].nonzero()[:, 0]
            where = place(caches[0], table, request, seen)
            for cache in caches[:1] if self.latent else caches:
                bits = reference.BITS[cache.itemsize]
                values = torch.randn(len(seen), self.kv_heads, cache.shape[-1]).to(cache.dtype)
                cache.view(bits)[where] = values.view(bits)

    def draw_pages(self, requests, page_size, layout, share=True):
        """Paged caches and their table: shuffled pages, wild numbers where nobody looks."""
        dice, arguments = self.dice, self.arguments
        counts = [-(-r.kv_len // page_size) for r in requests]
        spare = dice.choice((0, 1, 3))
        num_pages, max_pages = sum(counts) + spare, max(counts, default=0) + dice.choice((0, 0, 1, 2))
        rows = self.batch
        if "cache_batch_idx" in arguments:
            rows = max([r.row + 1 for r in requests] + [self.batch]) + dice.choice((0, 2))
        table = wide_table(dice, rows, max_pages, lambda: dice.choice(cases.WILD))
        free = dice.sample(range(num_pages), num_pages)
        local = locality(arguments)
        hide = dice.chance(0.4)
        for r, count in zip(requests, counts):
            pages = int32([free.pop() for _ in range(count)])
            if hide and count:  # numbers of pages that nobody reads or writes may be anything
                used = visible(r, *local).any(0)
                used[r.old_len :] = True
                used = torch.nn.functional.pad(used, (0, count * page_size - r.kv_len)).view(count, page_size).any(1)
                pages = torch.where(used, pages, int32([dice.choice(cases.WILD) for _ in range(count)]))
            table[r.row, :count] = pages
        readers = [r for r in requests if r.new_len == 0]
        if share and len(readers) == len(requests) > 1 and not hide and dice.chance(0.2):
            a, b = dice.sample(readers, 2)
            count = min(counts[requests.index(a)], counts[requests.index(b)])
            table[b.row, :count] = table[a.row, :count]
            self.note("shared pages")
        k_cache, v_cache = self.make_storage(num_pages, page_size, layout)
        self.note("no pages" if num_pages == 0 else "paged", f"page {page_size}" if page_size in (1, 16) else "page")
        return k_cache, v_cache, table

    def done(self, function, requests):
        function = f"fa3.{function}" if self.fa3 else function
        self.note(function)
        for r in requests:
            self.note(*(["q_len 0"] if r.q_len == 0 else []), *(["kv_len 0"] if r.kv_len == 0 else []))
            self.note(*(["more q than keys"] if r.q_len > r.kv_len > 0 else []))
        call = Call(0, function, self.arguments, requests, getattr(self, "storage", ()), getattr(self, "case", None))
        call.features = self.features
        call.neutral = self.draw_neutral(function)
        call.latent_alone = self.latent_alone
        return call

    def draw_neutral(self, function):
        """None, or another value that asks for nothing, for arguments that the call does not need."""
        wanted = 3 if self.dice.chance(0.3) else 0
        candidates = [n for n in NEUTRAL[function] if n not in self.arguments]
        if "rotary_cos" in self.arguments:
            candidates = [n for n in candidates if n != "rotary_interleaved"]
        names = self.dice.sample(candidates, min(wanted, len(candidates)))
        self.note(*(f"{name} asks for nothing" for name in names))
        return {name: self.dice.choice(NEUTRAL[function][name]) for name in names}


def place(cache, table, request, positions):
    """(page, slot) of key positions. cache: [pages, slots, heads, dim]; packed keys are one page."""
    if table is None:
        return torch.full_like(positions, request.row), positions + request.first_slot
    page_size = max(cache.shape[1], 1)
    return table[request.row].long()[positions // page_size], positions % page_size


def draw_kvcache(d):
    dice, batch = d.dice, d.batch
    appends = not d.latent and dice.chance(0.45)
    if appends and d.q_dtype in FP8:  # new keys have the dtype of q and are stored as they are
        d.q_dtype = d.cache_dtype
        d.note("8-bit append", f"q {str(d.q_dtype)[6:]}")
    page_size = 0 if dice.chance(0.25) else dice.choice(PAGE_SIZES) if dice.chance(0.8) else dice.randint(1, 300)
    d.draw_scores()
    d.note("append" if appends else "read only")

    # Lengths
    same = dice.chance(0.12)
    old_lens = [draw_length(dice, d.longest_kv, page_size) for _ in range(batch)]
    if same or (not appends and not page_size and dice.chance(0.1)):
        old_lens = old_lens[:1] * batch
    packed_new = appends and dice.chance(0.4)
    most_new = dice.choice((0, 1, 1, 2, 4, 9, d.longest_q))
    new_lens = [0] * batch
    if packed_new:
        new_lens = [dice.upto(most_new) for _ in range(batch)]
    elif appends:
        new_lens = [most_new] * batch
    padded = set()
    if dice.chance(0.05) and not same:  # padded entries of a captured batch
        padded = {b for b in range(batch) if dice.chance(0.5)}
    q_lens = d.draw_queries(dice.chance(0.4))
    if "cu_seqlens_q" in d.arguments and dice.chance(0.8):
        d.draw_max_seqlen_q(q_lens)
    if dice.chance(0.2):
        d.draw_max_seqlen_k(n + new for n, new in zip(old_lens, new_lens))
    requests, q_begin, new_begin = [], 0, 0
    for b in range(batch):
        r = Request(q_begin, q_lens[b], old_lens[b], new_begin, new_lens[b], row=b)
        if b in padded:
            r.old_len = r.new_len = 0
            d.note("padded entry")
        requests.append(r)
        q_begin, new_begin = q_begin + q_lens[b], new_begin + new_lens[b]
    given_lens = [-new_lens[b] if b in padded else old_lens[b] for b in range(batch)]

    if dice.chance(0.15):
        spare = dice.choice((0, 2))
        rows = dice.sample(range(batch + spare), batch)
        d.give(cache_batch_idx=int32(rows))
        for r, row in zip(requests, rows):
            r.row = row
    if dice.chance(0.15):
        for r in requests:
            r.leftpad = dice.upto(r.kv_len + 2) if dice.chance(0.1) else dice.upto(r.kv_len)
        d.give(cache_leftpad=int32([r.leftpad for r in requests]))

    # New tokens and rotary
    if appends:
        spare = dice.choice((0, 0, 0, 2)) if packed_new else most_new
        dtype = d.q_dtype if d.q_dtype in FP8 else d.dtype
        new = {
            name: per_token(dice, new_lens, packed_new, d.kv_heads, dim, dtype, 1.0, spare)
            for name, dim in (("k", d.head_dim), ("v", d.head_dim_v))
        }
        d.give(**{name: laid_out(dice, x, d.features) for name, x in new.items()})
        d.note(*(["no new token"] if sum(new_lens) == 0 else []))
        if packed_new:
            d.give(cu_seqlens_k_new=int32([0, *itertools.accumulate(new_lens)]))
        if d.head_dim > 1 and d.q_dtype not in FP8 and dice.chance(0.45):
            draw_rotary(d, requests)
    elif dice.chance(0.05):
        d.give(cu_seqlens_k_new=int32([0] * (batch + 1)))  # neutral without k and v
        if dice.chance(0.5):
            d.give(rotary_seqlens=int32([0] * batch))

    # The caches
    d.draw_execution()
    layout = "latent" if d.latent else dice.choice(LAYOUTS)
    if page_size:
        k_cache, v_cache, table = d.draw_pages(requests, page_size, layout)
        d.give(**{dice.choice(("block_table", "block_table", "page_table")): table})
    else:
        rows = max([r.row + 1 for r in requests], default=0) + dice.choice((0, 0, 2))
        slots = max([r.kv_len for r in requests], default=0) + dice.choice((0, 0, 1, 5))
        k_cache, v_cache = d.make_storage(rows, slots, layout)
        table = None
        d.note("contiguous")
    d.arguments = {"q": d.arguments.pop("q"), "k_cache": k_cache, "v_cache": v_cache, **d.arguments}
    d.fill_seen((k_cache, v_cache), table, requests)

    whole = not page_size and not appends and all(r.kv_len == k_cache.shape[1] for r in requests) and not padded
    if whole and dice.chance(0.7):
        d.note("lengths absent")
    elif len(set(given_lens)) == 1 and min(given_lens) >= 0 and dice.chance(0.5):
        d.give(cache_seqlens=given_lens[0])
        d.note("lengths as an int")
    else:
        d.give(cache_seqlens=int32(given_lens))
    if dice.chance(0.05):
        d.give(scheduler_metadata=dice.choice((None, torch.empty(0, dtype=torch.int32))))
    if dice.chance(0.05):
        d.give(ver=dice.choice((None, 3)))
    return d.done("flash_attn_with_kvcache", requests)


def draw_rotary(d, requests):
    dice, batch = d.dice, len(requests)
    half = dice.choice((d.head_dim // 2, d.head_dim // 4, dice.randint(0, d.head_dim // 2)))
    for r in requests:
        r.rotary_base = r.old_len
    if dice.chance(0.3):
        positions = [dice.upto(40) for _ in range(batch)]
        d.give(rotary_seqlens=int32(positions))
        for r, position in zip(requests, positions):
            r.rotary_base = position
    left, right, chunk = locality(d.arguments)
    moving = left >= 0 or right >= 0 or chunk > 0
    length = max([r.rotary_base + max(r.new_len, r.q_len if moving else min(r.q_len, 1)) for r in requests], default=0)
    angle = torch.randn(length + dice.choice((0, 0, 3)), half) * 3
    tables = {"rotary_cos": angle.cos().to(d.q_dtype), "rotary_sin": angle.sin().to(d.q_dtype)}
    if dice.chance(0.3):  # one table of both
        both = torch.cat(list(tables.values()), -1)
        tables = {"rotary_cos": both[:, :half], "rotary_sin": both[:, half:]}
    d.give(**tables)
    if dice.chance(0.6):
        d.give(rotary_interleaved=dice.chance(0.5))
    d.note("rotary", *(["rotary, no new token"] if all(r.new_len == 0 for r in requests) else []))


def draw_func(d):
    dice = d.dice
    d.draw_scores()
    d.latent = False
    (q_len, *_) = (*d.draw_queries(False), 0)
    k_len = draw_length(dice, d.longest_kv, 0)
    lens = [k_len] * d.batch
    as_varlen = d.fa3 and dice.chance(0.3)  # which FlashAttention 3 also takes without cu_seqlens
    if as_varlen and dice.chance(0.5):
        lens = [dice.upto(k_len) for _ in lens]
        d.give(seqused_k=int32(lens))
    requests = [Request(0, q_len, lens[b], 0, 0, row=b) for b in range(d.batch)]
    caches = d.make_storage(d.batch, k_len, dice.choice(LAYOUTS))
    d.arguments = {"q": d.arguments.pop("q"), "k": caches[0], "v": caches[1], **d.arguments}
    d.fill_seen(caches, None, requests)
    d.draw_execution(dice.choice(("return_softmax_lse", "return_attn_probs")))
    if not d.fa3 and dice.chance(0.2):
        d.give(dropout_p=0.0)
    return d.done("flash_attn_varlen_func" if as_varlen else "flash_attn_func", requests)


def draw_varlen(d):
    dice, batch = d.dice, d.batch
    d.draw_scores()
    paged = dice.chance(0.5)
    page_size = dice.choice(PAGE_SIZES) if paged else 0
    q_lens = d.draw_queries(True)
    room = [draw_length(dice, d.longest_kv, page_size) for _ in range(batch)]
    used, requests, q_begin, k_begin = room, [], 0, 0
    if dice.chance(0.4):
        used = [dice.upto(n) for n in room]
        d.give(seqused_k=int32(used))
    for b in range(batch):
        requests.append(Request(q_begin, q_lens[b], used[b], 0, 0, row=b))
        q_begin += q_lens[b]
    if paged:
        k, v, table = d.draw_pages(requests, page_size, "latent" if d.latent else dice.choice(LAYOUTS))
        d.give(**{dice.choice(("block_table", "block_table", "page_table")): table})
    else:
        table = None
        spare = dice.choice((0, 0, 3))
        k, v = d.make_storage(1, sum(room) + spare, "latent" if d.latent else dice.choice(LAYOUTS))
        for r, n in zip(requests, room):
            r.row, r.first_slot = 0, k_begin
            k_begin += n
    d.fill_seen((k, v), table, requests)
    if not paged or "seqused_k" not in d.arguments or dice.chance(0.5):
        d.give(cu_seqlens_k=int32([0, *itertools.accumulate(room)]))
    d.draw_max_seqlen_q(q_lens)
    d.draw_max_seqlen_k(room)
    if dice.chance(0.1):
        d.give(scheduler_metadata=None)
    d.draw_execution(dice.choice(("return_softmax_lse", "return_attn_probs")))
    if not d.fa3 and dice.chance(0.2):
        d.give(dropout_p=0.0)
    front = {"q": d.arguments.pop("q"), "k": k if paged else k[0], "v": v if paged else v[0]}
    d.arguments = front | d.arguments
    return d.done("flash_attn_varlen_func", requests)


def draw_write(d):
    dice, batch = d.dice, d.batch
    d.latent, d.arguments, d.q_dtype = False, {}, d.dtype
    d.features = {f for f in d.features if not f.startswith("q ") and f not in ("qv", "latent")}
    packed, by_slots = dice.chance(0.5), dice.chance(0.4)
    page_size = dice.choice(PAGE_SIZES) if dice.chance(0.8) else dice.randint(1, 300)
    most = dice.choice((0, 1, 1, 3, 9, d.longest_q))
    lens = [dice.upto(most) if packed else most for _ in range(batch)]
    old_lens = [draw_length(dice, d.longest_kv, page_size) for _ in range(batch)]
    if dice.chance(0.1):
        old_lens = old_lens[:1] * batch
    starts = [0, *itertools.accumulate(lens)]
    requests = [Request(0, 0, old, start, n, row=b) for b, (old, start, n) in enumerate(zip(old_lens, starts, lens))]
    k_cache, v_cache, table = d.draw_pages(requests, page_size, dice.choice(LAYOUTS), share=False)
    spare = dice.choice((0, 0, 2)) if packed else most
    for name, dim in (("k", d.head_dim), ("v", d.head_dim_v)):
        x = per_token(dice, lens, packed, d.kv_heads, dim, d.dtype, 1.0, spare)
        d.give(**{name: laid_out(dice, x, d.features)})
    d.give(k_cache=k_cache, v_cache=v_cache)
    flat = by_slots and packed and dice.chance(0.5)  # nothing tells the requests apart
    if packed and not flat:
        d.give(cu_seqlens_k_new=int32(starts))
    if by_slots:
        slots = []
        for r in requests:
            where = place(k_cache, table, r, torch.arange(r.old_len, r.kv_len))
            slots += (where[0] * page_size + where[1]).tolist()
        total = d.arguments["k"].shape[0] if packed else batch * most
        slots += [-1 if flat else dice.choice((0, -1))] * (total - len(slots))  # tokens of no request
        slots = [dice.choice((-1, -(2**31))) if dice.chance(0.2) else slot for slot in slots]
        if flat and dice.chance(0.3):  # tokens past its end are not written
            slots = slots[: len(slots) - spare]
            d.note("slot_mapping shorter than k")
        d.give(slot_mapping=torch.tensor(slots, dtype=dice.choice((torch.int64, torch.int64, torch.int32))))
    if not by_slots or dice.chance(0.3):
        lengths_int = len(set(old_lens)) == 1 and dice.chance(0.5)
        d.give(block_table=table, cache_seqlens=old_lens[0] if lengths_int else int32(old_lens))
    for name in ("k_descale", "v_descale"):
        # One request for the whole of a flat batch: its scales are those of all tokens.
        if dice.chance(0.6 if d.cache_dtype in FP8 else 0.05):
            d.give(**{name: descale(dice, 1 if flat else batch, d.kv_heads)})
    if flat:
        d.arguments.pop("block_table", None), d.arguments.pop("cache_seqlens", None)
    return d.done("kv_paged_write", requests)


def draw_merge(d):
    """Two parts of the same queries: parts without keys, equal sums, and sums that are worlds apart."""
    dice = d.dice
    heads_last = d.fa3
    names = ("v_a", "s_a", "v_b", "s_b", "v_merged", "s_merged") if heads_last else (
        "out_a", "lse_a", "out_b", "lse_b", "out", "lse"
    )  # fmt: skip
    tokens = dice.upto(d.longest_q)
    shape = (tokens, d.q_heads) if heads_last or dice.chance(0.5) else (d.batch, tokens, d.q_heads)
    d.arguments, d.features = {}, {f"merge {str(d.dtype)[6:]}", *(["fa3"] if d.fa3 else [])}

    def sums():
        lse = torch.randn(shape) * dice.choice((1.0, 1.0, 8.0, 300.0))
        lse[torch.rand(shape) < dice.choice((0.0, 0.2, 1.0))] = -torch.inf
        if dice.chance(0.1):
            lse[torch.rand(shape) < 0.3] = torch.inf  # a sink of inf
        return lse

    lse = [sums(), sums()]
    same = torch.rand(shape) < dice.choice((0.0, 0.3))
    lse[1] = torch.where(same, lse[0], lse[1])
    for i, x in enumerate(lse):
        values = numbers((*shape, d.head_dim_v), d.dtype)
        values[x.isinf()] = 0.0
        lse_given = x if heads_last else x.mT
        d.give(**{names[2 * i]: laid_out(dice, values, d.features)})
        d.give(**{names[2 * i + 1]: lse_given if dice.chance(0.5) else lse_given.contiguous()})
    for i, name in enumerate(names[4:]):
        target = dice.choice(("absent", "absent", "fresh", "first", "second"))
        if target == "fresh":
            d.give(**{name: torch.full_like(d.arguments[names[i]], torch.nan)})
        elif target != "absent":
            d.give(**{name: d.arguments[names[i + 2 * (target == "second")]]})
    function = "fa3.merge_state_v2" if d.fa3 else "merge_attn_states"
    d.note(function)
    call = MergeCall(0, function, d.arguments, [], features=d.features, names=names, heads_last=heads_last)
    call.neutral = d.draw_neutral(function)
    return call


FUNCTIONS = {draw_kvcache: 64, draw_varlen: 16, draw_func: 8, draw_write: 12, draw_merge: 3}


def draw(seed):
    """A good call, and the dice for whoever wants to spoil it."""
    d = Drawing(seed)
    function = d.dice.choices(list(FUNCTIONS), list(FUNCTIONS.values()))[0]
    if function is not draw_write and d.dice.chance(FA3):
        d.of_fa3(may_be_latent=function in (draw_kvcache, draw_varlen))
    call = function(d)
    call.seed = seed
    return call, d.dice
