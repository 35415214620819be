"""Cases: what is asked (`Case`), the tensors that ask it (`build`), and the lists that the tests run.

Every input is poisoned: whatever the contract says nobody reads or writes holds NaN or nonsense, so a kernel that
strays gives NaN, an error, or a changed guard byte instead of a nearly right answer.
"""

import dataclasses
import itertools
import random
import zlib
from dataclasses import dataclass

import reference
import torch

WILD = (2147480000, -1, -2147483648, 1 << 20)  # page numbers that must never be followed
GUARD = 1  # pages before and after the cache inside its storage


@dataclass(frozen=True)
class Case:
    batch: int = 4
    q_len: int = 1
    varlen_q: bool = False  # cu_seqlens_q; q_len is the longest, one request has no query
    spare: int = 0  # tokens of q past the last request, with varlen_q
    kv_len: int = 37  # the longest, before the append; one request has none
    lens: tuple = ()  # instead of lengths drawn up to kv_len
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: as head_dim
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # "": as dtype
    page_size: int = 16  # 0: contiguous
    layout: str = "plain"  # of the caches in memory, see `carve`
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    scale: float | None = None
    alibi: str = ""  # "head" or "batch": the shape of the slopes
    leftpad: bool = False
    batch_idx: bool = False
    sink: str = ""  # dtype of the sinks
    qv: bool = False
    descale: str = ""  # of the caches: "full", or "shared": one value, stride 0
    q_descale: str = ""  # the same
    append: int = 0  # new tokens of each request
    append_nothing: bool = False  # k and v are given, without a token
    append_varlen: bool = False  # cu_seqlens_k_new; append is the largest count, one request has none
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    rotary_seqlens: bool = False
    num_splits: int = 0
    deterministic: bool = False
    give_out: bool = False
    int_seqlens: bool = False  # cache_seqlens as one int
    wide_q: bool = False  # q, k, v and qv are slices of a wider tensor
    seed: int = 0

    def __str__(self):
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{name}={getattr(self, name)}".replace(" ", "") for name in changed) or "defaults"


@dataclass
class Call:
    """The arguments of one call. The caches are views of `storage`, guard pages included."""

    case: Case
    kwargs: dict  # of flash_attn_with_kvcache, without the caches
    storage: tuple
    seqlens_new: list  # appended tokens of each request

    def caches(self, storage=None):
        return carve(self.case, storage or self.storage)

    def to(self, device):
        move = mover(device)
        kwargs = {name: move(x) if isinstance(x, torch.Tensor) else x for name, x in self.kwargs.items()}
        return Call(self.case, kwargs, tuple(move(s) for s in self.storage), self.seqlens_new)


def mover(device):
    """A function that copies tensors to a device. A slice stays a slice, for all of the memory behind it comes along,
    and tensors that share memory still do; `Tensor.to` makes slices contiguous.
    """
    moved = {}

    def move(x):
        memory = x.untyped_storage()
        if x.is_meta:
            return x
        if memory.data_ptr() == 0:  # no element: nothing can be behind it
            return x.to(device).as_strided(x.shape, x.stride())
        if memory.data_ptr() not in moved:
            whole = torch.empty(0, dtype=torch.uint8).set_(memory)
            moved[memory.data_ptr()] = whole.clone() if torch.device(device).type == "cpu" else whole.to(device)
        copy = moved[memory.data_ptr()].view(x.dtype)
        y = copy.as_strided(x.shape, x.stride(), x.storage_offset())
        return y.requires_grad_() if x.requires_grad else y

    return move


def carve(case, storage):
    """(k_cache, v_cache) as views of the storage."""
    head_dim_v = case.head_dim_v or case.head_dim
    inner = [s[GUARD:-GUARD] for s in storage]
    if case.layout == "plain":  # [page, slot, head, dim]
        k_cache, v_cache = inner
    elif case.layout == "heads_first":  # [page, head, slot, dim]
        k_cache, v_cache = (s.transpose(1, 2) for s in inner)
    elif case.layout == "interleaved":  # [page, K or V, slot, head, dim]
        k_cache, v_cache = inner[0].unbind(1)
    elif case.layout == "odd_strides":  # unused slots, heads and elements; rows start anywhere
        k_cache, v_cache = (s[:, :-1, :-1, 1:-2] for s in inner)
    else:  # "latent", MLA: V is the first part of K
        k_cache, v_cache = inner * 2
    return k_cache[..., : case.head_dim], v_cache[..., :head_dim_v]


def make_storage(case, pages, slots):
    """NaN everywhere, guard pages and neighbours included."""
    head_dim_v, heads, pages = case.head_dim_v or case.head_dim, case.kv_heads, pages + 2 * GUARD
    shapes = {
        "plain": [(pages, slots, heads, dim) for dim in (case.head_dim, head_dim_v)],
        "heads_first": [(pages, heads, slots, dim) for dim in (case.head_dim, head_dim_v)],
        "interleaved": [(pages, 2, slots, heads, max(case.head_dim, head_dim_v))],
        "odd_strides": [(pages, slots + 1, heads + 1, dim + 3) for dim in (case.head_dim, head_dim_v)],
        "latent": [(pages, slots, heads, case.head_dim)],
    }
    dtype = getattr(torch, case.kv_dtype or case.dtype)
    return tuple(torch.full(shape, torch.nan).to(dtype) for shape in shapes[case.layout])


def build(case):
    """The call of a case, on the CPU; the same case gives the same numbers."""
    rng = random.Random(zlib.crc32(str(case).encode()))
    torch.manual_seed(rng.getrandbits(32))
    dtype, head_dim_v = getattr(torch, case.dtype), case.head_dim_v or case.head_dim
    batch = case.batch

    def drawn(longest):
        """One request has the longest, one has 0, the others anything between."""
        return [longest, 0, *(rng.randint(min(1, longest), longest) for _ in range(batch - 2))][:batch]

    def random_rows(tokens, heads, dim, factor=1.0):
        """(batch, tokens, heads, dim), or (total, heads, dim) when tokens is a list."""
        shape = (sum(tokens),) if isinstance(tokens, list) else (batch, tokens)
        x = (torch.randn(*shape, heads, dim) * factor).to(dtype)
        if not case.wide_q:
            return x
        wide = torch.full((*shape, heads + 1, dim + 3), torch.nan).to(dtype)
        wide[..., :-1, 1:-2] = x
        return wide[..., :-1, 1:-2]

    old_lens = list(case.lens) or ([case.kv_len] * batch if case.int_seqlens else drawn(case.kv_len))
    q_lens = drawn(case.q_len)[::-1] if case.varlen_q else [case.q_len] * batch
    seqlens_new = drawn(case.append) if case.append_varlen else [case.append] * batch
    kv_lens = [old + new for old, new in zip(old_lens, seqlens_new)]
    leftpads = [rng.randint(0, old) if case.leftpad else 0 for old in old_lens]

    # Where everything lies: shuffled pages, a few of them unused; rows of the table that no request uses.
    rows = rng.sample(range(batch + 2), batch) if case.batch_idx else list(range(batch))
    num_rows, table = batch + 2 * case.batch_idx, None
    if case.page_size:
        pages = [-(-kv_len // case.page_size) for kv_len in kv_lens]
        num_pages, max_pages = sum(pages) + 3, max(pages, default=0) + 2
        free = rng.sample(range(num_pages), num_pages)
        # The table is the left part of a wider one, as in engines that keep one table for the longest context.
        table = torch.tensor([[rng.choice(WILD) for _ in range(max_pages + 3)] for _ in range(num_rows)])
        table = table.to(torch.int32).view(num_rows, max_pages + 3)[:, :max_pages]
        for row, count in zip(rows, pages):
            table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        storage = make_storage(case, num_pages, case.page_size)
    else:
        storage = make_storage(case, num_rows, max(kv_lens, default=0) + 3)

    # A number only where some row sees the key; NaN stays elsewhere, also where the append will write.
    window = (case.window[0], 0 if case.causal else case.window[1])
    caches = carve(case, storage)
    for b, row in enumerate(rows):
        seen = set()
        for q_pos in range(kv_lens[b] - q_lens[b], kv_lens[b]):
            seen.update(reference.visible_keys(q_pos, kv_lens[b], leftpads[b], *window, case.chunk))
        keys = sorted(j for j in seen if j < old_lens[b])
        for cache in caches[:1] if case.layout == "latent" else caches:
            values = torch.randn(len(keys), case.kv_heads, cache.shape[-1]).to(cache.dtype)
            bits = reference.BITS[cache.itemsize]
            cache.view(bits)[reference.place(cache, table, row, keys)] = values.view(bits)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32)

    def queries(dim):
        """Scores get a standard deviation of 3, so that softcap bites and sinks matter. Spare tokens are NaN."""
        x = random_rows([*q_lens, case.spare] if case.varlen_q else case.q_len, case.q_heads, dim, 3.0)
        if case.spare:
            x[-case.spare :] = torch.nan
        return x

    kwargs = {"q": queries(case.head_dim)}
    kwargs["cache_seqlens"] = case.kv_len if case.int_seqlens else int32(old_lens)
    kwargs["return_softmax_lse"] = True
    if table is not None:
        kwargs["block_table"] = table
    if case.varlen_q:
        kwargs["cu_seqlens_q"] = int32([0, *itertools.accumulate(q_lens)])
        kwargs["max_seqlen_q"] = max(q_lens, default=0)
    if case.append or case.append_nothing:
        tokens = seqlens_new if case.append_varlen else case.append
        kwargs["k"] = random_rows(tokens, case.kv_heads, case.head_dim)
        kwargs["v"] = random_rows(tokens, case.kv_heads, head_dim_v)
    if case.append_varlen:
        kwargs["cu_seqlens_k_new"] = int32([0, *itertools.accumulate(seqlens_new)])
    if case.rotary_dim:
        positions = [rng.randint(0, 40) for _ in range(batch)] if case.rotary_seqlens else old_lens
        length = max(positions, default=0) + max(case.append, case.q_len)  # no row to spare
        angle = torch.randn(length, case.rotary_dim // 2) * 3
        kwargs["rotary_cos"], kwargs["rotary_sin"] = angle.cos().to(dtype), angle.sin().to(dtype)
        kwargs["rotary_interleaved"] = case.rotary_interleaved
        if case.rotary_seqlens:
            kwargs["rotary_seqlens"] = int32(positions)
    if case.qv:
        kwargs["qv"] = queries(head_dim_v)
    for name, kind in (("k_descale", case.descale), ("v_descale", case.descale), ("q_descale", case.q_descale)):
        if kind:
            shape = (batch, case.kv_heads) if kind == "full" else (1, 1)
            kwargs[name] = (torch.rand(shape) + 0.5).expand(batch, case.kv_heads)
    if case.alibi:
        kwargs["alibi_slopes"] = torch.rand((batch, case.q_heads) if case.alibi == "batch" else (case.q_heads,)) * 0.3
    if case.sink:
        sinks = torch.rand(case.q_heads) * 20 - 10
        sinks[1:2] = -torch.inf
        kwargs["s_aux"] = sinks.to(getattr(torch, case.sink))
    if case.leftpad:
        kwargs["cache_leftpad"] = int32(leftpads)
    if case.batch_idx:
        kwargs["cache_batch_idx"] = int32(rows)
    if case.give_out:
        out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        kwargs["out"] = torch.full((*kwargs["q"].shape[:-1], head_dim_v), torch.nan, dtype=out_dtype)
    for name, value, neutral in (
        ("causal", case.causal, False),
        ("window_size", case.window, (-1, -1)),
        ("attention_chunk", case.chunk, 0),
        ("softcap", case.softcap, 0.0),
        ("softmax_scale", case.scale, None),
        ("num_splits", case.num_splits, 0),
        ("deterministic", case.deterministic, False),
    ):
        if value != neutral:
            kwargs[name] = value
    return Call(case, kwargs, storage, seqlens_new)


# Every feature by itself, in the fields that switch it on.
FEATURES = {
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e5m2": {"kv_dtype": "float8_e5m2"},
    "descale": {"kv_dtype": "float8_e4m3fn", "descale": "full"},
    "descale_shared": {"kv_dtype": "float8_e5m2", "descale": "shared"},
    "descale_of_16_bits": {"descale": "full", "q_descale": "full"},
    "q_e4m3": {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "q_descale": "full"},
    "q_e5m2": {"dtype": "float8_e5m2", "kv_dtype": "float8_e5m2", "q_descale": "shared"},
    "several_q": {"q_len": 5},
    "many_q": {"q_len": 17},
    "varlen_q": {"varlen_q": True, "q_len": 7},
    "spare_tokens": {"varlen_q": True, "q_len": 7, "spare": 3},
    "more_q_than_keys": {"q_len": 13, "kv_len": 5},
    "long": {"kv_len": 700},
    "mha": {"q_heads": 3, "kv_heads": 3},
    "mqa": {"q_heads": 8, "kv_heads": 1},
    "group_5": {"q_heads": 10, "kv_heads": 2},
    "group_16": {"q_heads": 32, "kv_heads": 2},
    "dim_1": {"head_dim": 1},
    "dim_59": {"head_dim": 59},
    "dim_80": {"head_dim": 80},
    "dim_128": {"head_dim": 128},
    "dim_256": {"head_dim": 256},
    "dim_512": {"head_dim": 512},
    "dim_192_128": {"head_dim": 192, "head_dim_v": 128},
    "qv": {"head_dim": 64, "head_dim_v": 512, "qv": True},
    "latent": {"head_dim": 576, "head_dim_v": 512, "layout": "latent", "kv_heads": 1},
    "contiguous": {"page_size": 0},
    "page_1": {"page_size": 1},
    "page_3": {"page_size": 3},
    "page_64": {"page_size": 64},
    "page_256": {"page_size": 256},
    "heads_first": {"layout": "heads_first"},
    "interleaved": {"layout": "interleaved"},
    "odd_strides": {"layout": "odd_strides"},
    "wide_q": {"wide_q": True},
    "causal": {"causal": True},
    "window": {"window": (9, 3), "q_len": 6},
    "window_left": {"window": (11, -1)},
    "window_right": {"window": (-1, 2), "q_len": 6},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 2.5},
    "scale": {"scale": 0.07},
    "alibi": {"alibi": "head"},
    "alibi_batch": {"alibi": "batch"},
    "leftpad": {"leftpad": True},
    "batch_idx": {"batch_idx": True},
    "sink": {"sink": "float32"},
    "sink_16bit": {"sink": "bfloat16", "dtype": "bfloat16"},
    "append": {"append": 3},
    "append_varlen": {"append": 6, "append_varlen": True},
    "append_nothing": {"append": 0, "append_nothing": True},
    "rotary_without_new_tokens": {"append": 0, "append_nothing": True, "rotary_dim": 32},
    "rotary_interleaved": {"append": 2, "rotary_dim": 32},
    "rotary_half": {"append": 2, "rotary_dim": 64, "rotary_interleaved": False},
    "rotary_seqlens": {"append": 2, "rotary_dim": 16, "rotary_seqlens": True},
    "splits": {"num_splits": 3},
    "deterministic": {"deterministic": True},
    "out": {"give_out": True},
    "int_seqlens": {"int_seqlens": True},
}


def conflict(*fields):
    """Why these fields cannot be one case, or ""."""
    seen = {}
    for name, value in itertools.chain.from_iterable(f.items() for f in fields):
        if seen.setdefault(name, value) != value:
            return f"two values of {name}"
    if seen.get("layout") == "latent" and seen.get("append"):
        return "K and V share memory: an append would write each slot twice"
    if seen.get("rotary_dim", 0) > seen.get("head_dim", 64):
        return "rotary_dim <= head_dim"
    if seen.get("rotary_dim") and seen.get("dtype", "").startswith("float8"):
        return "an 8-bit q is not rotated"
    return ""


def combine(*names):
    """The case with these features. What no feature fixes varies with the names: dtype, page size, causality."""
    fields = {}
    for name in names:
        fields |= FEATURES[name]
    rng = random.Random("+".join(names))
    fields.setdefault("dtype", rng.choice(("bfloat16", "float16", "float32")))
    fields.setdefault("page_size", rng.choice((16, 16, 8, 0)))
    return Case(**fields)


ALONE = {name: Case(**fields) for name, fields in FEATURES.items()}
COMPATIBLE = [(a, b) for a, b in itertools.combinations(FEATURES, 2) if not conflict(FEATURES[a], FEATURES[b])]
PAIRS = list(dict.fromkeys(combine(a, b) for a, b in COMPATIBLE))


def multiply_adds(case):
    """If every row saw every key."""
    dims = case.head_dim + (1 + case.qv) * (case.head_dim_v or case.head_dim)
    return case.batch * case.q_len * case.q_heads * (case.kv_len + case.append) * dims


def random_cases(count, seed=2):
    """Three to nine features at a time, with random sizes where no feature fixes them; large ones in fewer requests."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        names, wanted = [], rng.randint(3, 9)
        for name in rng.sample(list(FEATURES), len(FEATURES)):
            if len(names) < wanted and not conflict(*(FEATURES[n] for n in (*names, name))):
                names.append(name)
        case, free = combine(*names), {}
        fixed = set().union(*(FEATURES[n] for n in names))
        if not fixed & {"head_dim", "rotary_dim"}:
            free["head_dim"] = rng.choice((7, 32, 40, 64, 96, 112, 128, 160))
        if "kv_len" not in fixed:
            free["kv_len"] = rng.choice((1, 16, 33, 64, 100, 257))
        if "q_heads" not in fixed and "kv_heads" not in fixed:
            free["kv_heads"] = rng.choice((1, 2, 3, 4))
            free["q_heads"] = free["kv_heads"] * rng.choice((1, 2, 3, 4, 6, 8))
        case = dataclasses.replace(case, batch=rng.choice((1, 2, 3, 5, 8)), seed=len(found), **free)
        if multiply_adds(case) > 50e6:
            case = dataclasses.replace(case, batch=min(3, case.batch))  # of two, one has no key and one no query
        found.append(case)
    return found


# Cases that a reader would think of first; these alone make the short run (marker kernels_ci).
NAMED = {
    "decode_bf16": Case(batch=5, kv_len=300, q_heads=16, kv_heads=4, head_dim=128),
    "decode_fp16": Case(batch=5, kv_len=300, q_heads=16, kv_heads=4, head_dim=128, dtype="float16"),
    "decode_fp32": Case(batch=5, kv_len=300, q_heads=16, kv_heads=4, head_dim=128, dtype="float32"),
    "decode_e4m3": Case(kv_len=300, q_heads=16, kv_heads=4, head_dim=128, kv_dtype="float8_e4m3fn", descale="full"),
    "decode_e5m2": Case(kv_len=300, q_heads=16, kv_heads=4, head_dim=128, kv_dtype="float8_e5m2", descale="shared"),
    "fp32_over_fp8": Case(kv_len=100, dtype="float32", kv_dtype="float8_e4m3fn", descale="full"),
    "descale_without_fp8": Case(kv_len=100, descale="full"),
    "one_long_request": Case(batch=1, kv_len=5000, q_heads=8, kv_heads=2, head_dim=128, page_size=64),
    "one_long_request_mqa": Case(batch=1, kv_len=4097, q_heads=16, kv_heads=1, head_dim=64, page_size=16),
    "one_key": Case(lens=(1, 1, 1, 1)),
    "page_edges": Case(batch=6, lens=(15, 16, 17, 31, 32, 33), q_len=2, causal=True),
    "batch_0": Case(batch=0),
    "batch_0_varlen": Case(batch=0, varlen_q=True, q_len=0),
    "no_keys_at_all": Case(batch=3, lens=(0, 0, 0), q_len=2),
    "no_keys_with_sink": Case(batch=3, lens=(0, 0, 0), sink="float32"),
    "no_queries": Case(q_len=0),
    "gemma_4": Case(kv_len=200, q_heads=8, head_dim=512, softcap=2.5, scale=1.0, causal=True, q_len=3),
    "gemma_4_window": Case(kv_len=300, q_heads=8, head_dim=256, window=(63, 0), causal=True, scale=1.0),
    "gemma_4_prefill": Case(batch=2, lens=(0, 70), q_len=90, append=90, causal=True, q_heads=4, head_dim=512),
    "fp8_everywhere": Case(
        kv_len=300, q_heads=16, kv_heads=4, head_dim=128, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn",
        descale="full", q_descale="full",
    ),
    "fp8_prefill": Case(
        batch=2, lens=(50, 80), q_len=60, q_heads=8, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", causal=True,
        descale="shared", q_descale="full",
    ),
    "chunk_from_leftpad": Case(kv_len=200, q_len=9, chunk=16, causal=True, leftpad=True, dtype="float32"),
    "no_heads": Case(q_heads=0),
    "no_heads_append": Case(q_heads=0, append=3, rotary_dim=32),
    "no_heads_at_all": Case(q_heads=0, kv_heads=0),
    "append_to_empty": Case(batch=3, lens=(0, 0, 0), q_len=4, append=4, causal=True),
    "prefill": Case(batch=2, lens=(0, 0), q_len=230, append=230, causal=True, q_heads=8, head_dim=128),
    "chunked_prefill": Case(batch=3, kv_len=150, q_len=130, append=130, causal=True, head_dim=128, varlen_q=False),
    "prefill_varlen": Case(batch=4, kv_len=250, q_len=200, varlen_q=True, causal=True, head_dim=96, dtype="float16"),
    "prefill_fp32_window": Case(batch=2, lens=(210, 230), q_len=205, causal=True, window=(40, 0), dtype="float32"),
    "prefill_mixed_with_decode": Case(batch=6, kv_len=260, q_len=210, varlen_q=True, causal=True, q_heads=6),
    "gpt_oss": Case(kv_len=200, q_heads=16, kv_heads=2, window=(127, 0), causal=True, sink="bfloat16"),
    "gemma": Case(kv_len=200, q_heads=8, head_dim=256, softcap=2.5, window=(63, 63), causal=True, scale=0.07),
    "llama4_chunk": Case(kv_len=200, q_len=3, chunk=64, causal=True, head_dim=128),
    "deepseek_latent": Case(q_heads=16, kv_heads=1, head_dim=576, head_dim_v=512, layout="latent", kv_len=200),
    "deepseek_qv": Case(q_heads=16, kv_heads=1, head_dim=64, head_dim_v=512, qv=True, page_size=64, kv_len=200),
    # More dimensions of q . k than the rotary part of DeepSeek has: of every size beside qv.
    "qv_beside_512": Case(q_heads=8, kv_heads=1, head_dim=512, qv=True, kv_len=90, q_len=3, causal=True),
    "qv_beside_576": Case(q_heads=8, kv_heads=2, head_dim=576, head_dim_v=512, qv=True, kv_len=90),
    "deepseek_prefill": Case(q_len=9, causal=True, head_dim=192, head_dim_v=128, kv_heads=4, kv_len=90),
    "llama_step": Case(kv_len=120, append=1, rotary_dim=128, head_dim=128, rotary_interleaved=False, causal=True),
    "llama_step_fp8": Case(kv_len=120, append=1, rotary_dim=64, kv_dtype="float8_e4m3fn", descale="full", causal=True),
    "speculative": Case(kv_len=120, q_len=4, append=4, rotary_dim=64, rotary_interleaved=False, causal=True),
    "more_q_than_keys_causal": Case(q_len=17, kv_len=9, causal=True, sink="float32"),
    "leftpad_contiguous": Case(page_size=0, leftpad=True, batch_idx=True, kv_len=90, q_len=3, causal=True),
    "window_skips_pages": Case(kv_len=900, page_size=16, window=(50, 0), causal=True, q_heads=8, kv_heads=2),
    "everything": Case(
        kv_len=90, q_len=5, varlen_q=True, causal=True, window=(60, 5), softcap=2.5, alibi="batch", leftpad=True,
        batch_idx=True, sink="float32", kv_dtype="float8_e5m2", descale="full", append=5, append_varlen=True,
        rotary_dim=32, rotary_seqlens=True, num_splits=4, layout="odd_strides", wide_q=True, page_size=3, give_out=True,
    ),
}  # fmt: skip

# Sizes, one at a time, over every pair of query and cache dtype.
DTYPES = [
    (dtype, kv_dtype)
    for dtype in ("bfloat16", "float16", "float32")
    for kv_dtype in ("", "float8_e4m3fn", "float8_e5m2")
]  # fmt: skip
HEAD_DIMS = [(d, 0) for d in (1, 2, 8, 40, 59, 64, 72, 80, 96, 112, 128, 160, 192, 255, 256, 512)]
HEAD_DIMS += [(192, 128), (59, 33)]
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
PAGE_SIZES = (0, 1, 2, 3, 16, 17, 32, 64, 128, 256)
Q_LENS = (*range(1, 18), 31, 32, 33)


def tail_cases():
    """Every number of elements that a row leaves over in registers of 4, 8 or 16; few rows, and rows for a matrix."""
    dtypes = [(dtype, kv_dtype) for dtype, kv_dtype in DTYPES if kv_dtype != "float8_e5m2"]
    for head_dim, (dtype, kv_dtype), q_len in itertools.product(range(33, 49), dtypes, (2, 40)):
        yield Case(
            head_dim=head_dim, head_dim_v=81 - head_dim, dtype=dtype, kv_dtype=kv_dtype, q_len=q_len, kv_len=45,
            q_heads=2, kv_heads=1, batch=2,
        )  # fmt: skip


def size_cases():
    for (head_dim, head_dim_v), (dtype, kv_dtype) in itertools.product(HEAD_DIMS, DTYPES):
        yield Case(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype, q_len=2, kv_len=70)
    for group, (dtype, kv_dtype) in itertools.product(GROUPS, DTYPES):
        yield Case(q_heads=2 * group, kv_heads=2, dtype=dtype, kv_dtype=kv_dtype, kv_len=70)
    for page_size, (dtype, kv_dtype) in itertools.product(PAGE_SIZES, DTYPES):
        yield Case(page_size=page_size, dtype=dtype, kv_dtype=kv_dtype, kv_len=300)
    for q_len, (dtype, kv_dtype) in itertools.product(Q_LENS, DTYPES):
        yield Case(q_len=q_len, causal=True, dtype=dtype, kv_dtype=kv_dtype, kv_len=40)
