"""Kernels whose thread blocks run on the host (tests/cuda/block/), and calls of them beside float64."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
HOST = REPOSITORY / "tests/cuda/block"
CALL = [
    *("q", "qv", "k", "v", "out", "lse", "cu_seqlens_q", "cache_seqlens", "block_table", "leftpad", "alibi", "sinks"),
    "v_descale",
    *("batch", "q_heads", "kv_heads", "head_dim", "head_dim_v", "total_q", "max_q_len", "q_dtype", "kv_dtype"),
    *("k_stride_page", "k_stride_slot", "k_stride_head", "v_stride_page", "v_stride_slot", "v_stride_head"),
    *("num_pages", "page_size", "max_pages"),
    *("window_left", "window_right", "chunk", "num_splits", "deterministic", "processors", "seed", "little_shared"),
    "blackwell",
    *("q_descale", "k_descale", "cache_batch_idx", "sinks_of_q", "fill"),
]


GUARD = 64  # tokens before and behind a result
Q_DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]
KV_DTYPES = [None, torch.float8_e4m3fn, torch.float8_e5m2]  # None: that of q


# Instructions within the kernels of decode and float32, and what they are here (tests/cuda/block/partials.cuh).
STORE = """asm volatile("{ .reg .b128 w; mov.b128 w, {%0, %1}; st.relaxed.gpu.global.b128 [%2], w; }" ::"l"(payload),
               "l"(number), "l"(word)
               : "memory");"""
LOAD = """asm volatile("{ .reg .b128 w; ld.relaxed.gpu.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
               : "=l"(payload), "=l"(number)
               : "l"(word)
               : "memory");"""
MMA = """asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));"""
PARTIALS = (
    ("exchange.cuh", STORE, "store_whole(word, payload, number);"),
    ("exchange.cuh", LOAD, "load_whole(word, payload, number);"),
    ("tf32.cuh", MMA, "multiply_tf32(d, a, b);"),
)


class Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in CALL] + [("scale", ctypes.c_double), ("softcap", ctypes.c_double)]


def numbers_of(names):
    fields = {"_fields_": [(name, ctypes.c_int64) for name in names]}
    return type("Numbers", (ctypes.Structure,), fields)()


def compile_kernels(root, sources, in_shared_memory, function="attend"):
    """A library of kernels with blocks on the host. in_shared_memory: (file, declaration, what it is here).
    `function`: of the library, which says what went wrong."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    cuda = root / "paged_decode_cuda"
    shutil.copytree(REPOSITORY / "paged_decode_cuda", cuda)
    own = ("hopper.cuh", "prefill/e4m3_products.cuh", "prefill/tensor_map.h", "matrices.cuh")
    for name in ("ptx.cuh", "runtime.h", *own):
        shutil.copy(HOST / Path(name).name, cuda / name)
    for path, declared, instead in in_shared_memory:
        source = (cuda / path).read_text()
        assert declared in source
        (cuda / path).write_text(source.replace(declared, instead))
    whole = root / "whole.cpp"  # one file: the fibers' state is one
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-x", "c++"]
    # Quoted names alone: one of the headers is called limits.h.
    include = [f"-iquote{folder}" for folder in (cuda, REPOSITORY / "torch-ext", HOST)]
    target = root / "kernels.so"
    subprocess.run([compiler, *flags, *include, whole, "-o", target], check=True)
    loaded = ctypes.CDLL(str(target))
    getattr(loaded, function).restype = ctypes.c_char_p
    return loaded


# Options of calls that any kernel of many rows takes.
MANY_ROWS = {
    "kv_heads": {"lens": [100, 30], "q_lens": 11, "q_heads": 6, "kv_heads": 2},
    "no_group": {"lens": [70], "q_lens": 40, "q_heads": 2, "kv_heads": 2},
    "window_right": {"lens": [150], "q_lens": 20, "window": (20, 7)},
    "chunk_leftpad": {"lens": [150, 90], "q_lens": 20, "chunk": 50, "leftpads": [37, 3]},
    "leftpad_all": {"lens": [60, 90], "q_lens": 20, "leftpads": [60, 90]},
    "longer_than_keys": {"lens": [10, 70], "q_lens": 24},
    "packed_many": {"lens": [60, 5, 30, 40], "q_lens": [17, 5, 12, 1], "q_heads": 6, "kv_heads": 2, "processors": 20},
    "spare_tokens": {"lens": [60, 40], "q_lens": [20, 17], "spare": 9},
}


class Case:
    """A call and its result. A key is a row of `dims` values, some of which meet q (KEYS) and some are its value; the
    others are NaN. `spare`: tokens behind those of the packed requests."""

    DIMS, KEYS, VALUES = 576, slice(0, 576), slice(0, 512)
    NUMBERS = ("clusters", "cluster", "cut", "partial_count", "box_rows", "balanced", "splits", "items", "rows")

    def __init__(
        self, lens, q_lens=1, q_heads=16, kv_heads=1, page_size=64, apart=False, dtype=torch.bfloat16, seed=1, **options
    ):
        generator = torch.Generator().manual_seed(seed)
        self.lens, self.page_size, self.apart, self.options = lens, page_size, apart, options
        self.batch, self.q_heads, self.kv_heads, self.dtype, self.seed = len(lens), q_heads, kv_heads, dtype, seed
        self.packed = isinstance(q_lens, (list, tuple))
        self.q_lens = list(q_lens) if self.packed else [q_lens] * self.batch
        random = lambda *shape, times=1.0: (torch.randn(*shape, generator=generator) * times).to(dtype)  # noqa: E731
        self.total_q = sum(self.q_lens) + options.get("spare", 0)
        self.q = random(self.total_q, q_heads, self.KEYS.stop - self.KEYS.start, times=options.get("q_times", 1.0))
        self.max_pages = max(1, -(-max(lens) // page_size))
        self.num_pages = self.batch * self.max_pages + 2
        self.kv_dtype = options.get("kv_dtype", dtype)
        self.cache = random(self.num_pages, page_size, kv_heads, self.DIMS).to(self.kv_dtype)
        self.table = torch.randperm(self.num_pages, generator=generator)[: self.batch * self.max_pages].int()
        self.table = self.table.view(self.batch, self.max_pages).contiguous()
        self.leftpads = options.get("leftpads")
        seen = torch.zeros(self.num_pages, page_size, dtype=torch.bool)
        for b, n in enumerate(lens):
            for key in range(self.leftpads[b] if self.leftpads else 0, n):
                seen[self.table[b, key // page_size], key % page_size] = True
        unseen = torch.full((), torch.nan).to(self.kv_dtype)  # nobody may see them
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.kv_dtype.itemsize]
        self.cache.view(bits)[~seen] = unseen.view(bits)
        between = torch.ones(self.DIMS, dtype=torch.bool)
        between[self.KEYS] = between[self.VALUES] = False
        self.cache.view(bits)[..., between] = unseen.view(bits)
        self.slopes = torch.rand(q_heads, generator=generator) * 0.05 if options.get("alibi") else None
        self.sinks = torch.randn(q_heads, generator=generator) if options.get("sinks") else None
        self.v_descales = torch.tensor(options["v_descales"]) if "v_descales" in options else None  # of each request
        self.factors = {n: torch.tensor(options[f"{n}s"]) for n in ("q_descale", "k_descale") if f"{n}s" in options}
        self.scale = options.get("scale", 192**-0.5)
        self.window = options.get("window", (-1, 0))

    def run(self, library):
        call, o = Call(), self.options
        rope = self.cache[..., 512:]
        q = self.q[..., 512:].contiguous() if self.apart else self.q
        qv = self.q[..., :512].contiguous() if self.apart else None
        k, v = rope if self.apart else self.cache[..., self.KEYS], self.cache[..., self.VALUES]
        if o.get("values_apart"):  # in a tensor of their own, with other strides
            v = v.contiguous()
        dims, dims_v = k.shape[-1], v.shape[-1]
        out_dtype = torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype
        # Between guards, where nobody writes.
        out = torch.full((self.total_q + 2 * GUARD, self.q_heads, dims_v), torch.nan, dtype=out_dtype)
        self.out = out[GUARD:-GUARD]
        longest = max(self.q_lens)
        shape = (self.q_heads, self.total_q) if self.packed else (self.batch, self.q_heads, longest)
        lse = torch.full((self.q_heads * self.out.shape[0] + 2 * GUARD,), torch.nan)
        self.lse = lse[GUARD:-GUARD].view(shape)
        seqlens = torch.tensor(self.lens, dtype=torch.int32)
        cu = torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0)], dtype=torch.int32)
        leftpads = torch.tensor(self.leftpads, dtype=torch.int32) if self.leftpads else None
        tensors = {
            "q": q, "qv": qv, "k": k, "v": v, "out": self.out, "lse": self.lse, "cache_seqlens": seqlens,
            "cu_seqlens_q": cu if self.packed else None, "block_table": self.table, "leftpad": leftpads,
            "alibi": self.slopes, "sinks": self.sinks, "v_descale": self.v_descales, **self.factors,
        }  # fmt: skip
        if o.get("contiguous"):  # a page for each request, in another order
            tensors |= {"block_table": None, "cache_batch_idx": self.table[:, 0].contiguous()}
        if o.get("sinks_of_q"):
            tensors["sinks"] = self.sinks.to(self.dtype)
            self.sinks = tensors["sinks"].float()
        for name, tensor in tensors.items():
            setattr(call, name, 0 if tensor is None else tensor.data_ptr())
        for name, tensor in (("k", k), ("v", v)):
            for place, which in enumerate(("page", "slot", "head")):
                setattr(call, f"{name}_stride_{which}", tensor.stride(place))
        for name, value in {
            "batch": self.batch, "q_heads": self.q_heads, "kv_heads": self.kv_heads,
            "head_dim": dims, "head_dim_v": dims_v,
            "total_q": self.total_q, "max_q_len": o.get("max_q_len", longest), "q_dtype": Q_DTYPES.index(self.dtype),
            "kv_dtype": KV_DTYPES.index(self.kv_dtype) if self.kv_dtype != self.dtype else 0,
            "num_pages": self.num_pages, "page_size": self.page_size, "max_pages": self.max_pages,
            "window_left": self.window[0], "window_right": self.window[1], "chunk": o.get("chunk", 0),
            "num_splits": o.get("num_splits", 0), "deterministic": o.get("deterministic", 0),
            "processors": o.get("processors", 4), "seed": self.seed, "little_shared": o.get("little_shared", 0),
            "blackwell": o.get("blackwell", 0),
            "scale": self.scale,
            "softcap": o.get("softcap", 0.0), "sinks_of_q": o.get("sinks_of_q", 0),
            "fill": o.get("fill", 0xFF),
        }.items():  # fmt: skip
            setattr(call, name, value)
        self.numbers = numbers_of(self.NUMBERS)
        reason = library.attend(ctypes.byref(call), ctypes.byref(self.numbers)).decode()
        assert reason == "", reason
        assert all(x[:GUARD].isnan().all() and x[-GUARD:].isnan().all() for x in (out, lse))
        return self.numbers

    def judge_scores_far_out(self, library, score):
        """One key scores about `score` with every query and takes all. The others score 0, or, where `score` is below
        0, twice as much. float32 does not hold that product in log2 units."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        values, top = self.VALUES.start, self.KEYS.stop - 1  # a number of the key that is no value

        def put(x, place, number):
            x.view(bits[x.itemsize])[place] = torch.tensor(number).to(x.dtype).view(bits[x.itemsize])

        self.scale = abs(score) * 1.003
        weights = torch.finfo(self.kv_dtype if self.dtype.itemsize == 1 else self.dtype).eps
        for key in (3, self.lens[0] - 10):  # in the first tile of keys, and in the last
            self.q.view(bits[self.dtype.itemsize]).zero_()
            self.cache.view(bits[self.kv_dtype.itemsize]).zero_()
            put(self.q, (..., top - self.KEYS.start), 1.0 if score > 0 else -1.0)
            if score < 0:
                put(self.cache, (..., top), 2.5)
            for table in self.table:
                put(self.cache, (int(table[key // self.page_size]), key % self.page_size, slice(None), top), 1.25)
                put(self.cache, (int(table[key // self.page_size]), key % self.page_size, slice(None), values), 3.0)
            self.run(library)
            expected = torch.full(self.out.shape[:2], 3.0)
            torch.testing.assert_close(self.out[..., 0].float(), expected, rtol=weights, atol=0)
            torch.testing.assert_close(self.lse, torch.full_like(self.lse, 1.25 * score * 1.003), rtol=1e-6, atol=0)

    def judge_infinite_values(self, library, sees):
        """Those of key 90 in two columns: rows that see it get them, and the other columns do not notice."""
        values = torch.arange(self.DIMS)[self.VALUES]
        page, slot = self.table[0, 90 // self.page_size], 90 % self.page_size
        columns, bad = torch.tensor([5, len(values) - 1]), torch.tensor([torch.inf, -torch.inf])
        self.cache[page, slot, :, values[columns]] = bad.to(self.dtype)
        self.run(library)
        assert (self.out[sees][..., columns].float() == bad).all()
        out = self.out.clone()
        self.cache[page, slot, :, values[columns]] = 1.0
        self.run(library)
        out[..., columns] = self.out[..., columns]
        self.out = out
        self.judge()

    def judge_second(self):
        """The second of two requests of as many tokens each."""
        tokens = self.q_lens[0]
        self.lens, self.q_lens, self.batch = self.lens[1:], self.q_lens[1:], 1
        self.q, self.table, self.out, self.lse = self.q[tokens:], self.table[1:], self.out[tokens:], self.lse[1:]
        self.judge()

    @classmethod
    def of_head_dim(cls, head_dim, head_dim_v):
        """The class of such heads, with something else behind keys and values."""
        begin = head_dim + 16
        end = begin + head_dim_v
        return type(cls.__name__, (cls,), {"DIMS": end + 16, "KEYS": slice(0, head_dim), "VALUES": slice(begin, end)})

    def judge(self):
        """The worst relative error of a row of the output."""
        group, begin, chunk = self.q_heads // self.kv_heads, 0, self.options.get("chunk", 0)
        worst = 0.0
        for b, n in enumerate(self.lens):
            keys = torch.arange(n)
            rows = self.cache.float()[self.table[b, keys // self.page_size].long(), keys % self.page_size].double()
            pad = self.leftpads[b] if self.leftpads else 0
            rows = torch.where(rows.isnan(), 0.0, rows).repeat_interleave(group, 1)  # (keys, q_heads, DIMS)
            for token in range(self.q_lens[b]):
                q, at = self.q[begin + token].double(), n - self.q_lens[b] + token
                score = torch.einsum("hd,khd->hk", q, rows[..., self.KEYS]) * self.scale
                for factor in self.factors.values():
                    score *= factor[b]
                if self.options.get("softcap"):
                    score = self.options["softcap"] * torch.tanh(score / self.options["softcap"])
                if self.slopes is not None:
                    score = score - self.slopes.double()[:, None] * (at - keys).abs()
                seen = keys >= pad
                if self.window[0] >= 0:
                    seen &= keys >= at - self.window[0]
                if self.window[1] >= 0:
                    seen &= keys <= at + self.window[1]
                if chunk:
                    chunks = torch.div(torch.tensor(at - pad), chunk, rounding_mode="floor")
                    seen &= torch.div(keys - pad, chunk, rounding_mode="floor") == chunks
                score = score.masked_fill(~seen, -torch.inf)
                if self.sinks is not None:
                    score = torch.cat([score, self.sinks.double()[:, None]], 1)
                lse = torch.logsumexp(score, 1) if score.shape[1] else torch.full((self.q_heads,), -torch.inf)
                weights = (score - torch.where(lse.isinf(), 0.0, lse)[:, None]).exp()[:, :n]
                out = torch.einsum("hk,khd->hd", weights, rows[..., self.VALUES])
                if self.v_descales is not None and n > 0:
                    out *= self.v_descales[b]
                own_lse = self.lse[:, begin + token] if self.packed else self.lse[b, :, token]
                assert torch.equal(own_lse.isneginf(), lse.isneginf())
                real = lse.isfinite()
                assert (own_lse.double() - lse)[real].abs().max() < 2e-3 if real.any() else True
                error = (self.out[begin + token].double() - out).norm(dim=1) / out.norm(dim=1).clamp(min=1e-3)
                assert not error.isnan().any()
                worst = max(worst, error.max().item())
            begin += self.q_lens[b]
        if self.packed:
            assert (self.out[begin:] == 0).all() and (self.lse[:, begin:] == -torch.inf).all()
        # 8-bit weights have 4 bits: half of the last one is 1/16 at most.
        bounds = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 1e-2}
        bounds |= {torch.float8_e4m3fn: 6e-2, torch.float8_e5m2: 6e-2}
        assert worst < bounds[self.dtype]
        return worst
