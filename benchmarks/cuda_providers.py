"""Who takes part in compare_cuda.py: functions of the inputs that return one call per copy, or raise Missing."""

import math
import os
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
import triton
import triton.language as tl

KERNEL = "org/paged-attn"


class Missing(Exception):
    pass


class Replay:
    """A graph of calls, long enough that its launch does not count."""

    def __init__(self, calls):
        for call in calls:
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        repeats = max(1, min(64, math.ceil(3e-3 / (time.perf_counter() - start))))
        self.kept = calls  # and with them the tensors whose addresses the graph holds
        self.calls, self.graph = repeats * len(calls), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        self.graph.replay()

    def microseconds(self):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls

    def median(self, rounds):
        return statistics.median(self.microseconds() for _ in range(rounds))


def ours(x):
    kernel, case = load_ours(), x.case
    if case.kind == "write":
        slots = [torch.cat([x.slots(r, b)[-case.q_len :] for b in range(case.batch)]) for r in range(x.copies)]
        k, v = x.k_new.flatten(1, 2), x.v_new.flatten(1, 2)
        return [
            lambda r=r: kernel.kv_paged_write(k[r], v[r], x.k_cache, x.v_cache, slot_mapping=slots[r])
            for r in range(x.copies)
        ]
    return [
        lambda r=r: kernel.flash_attn_with_kvcache(
            x.q[r], x.k_cache, x.v_cache, cache_seqlens=x.kv_lens, block_table=x.tables[r], causal=True
        )
        for r in range(x.copies)
    ]


def load_ours():
    import kernels

    return kernels.get_kernel(KERNEL, version=1, backend="cuda", trust_remote_code=True)


def floor(x):
    """The fastest shape of a kernel that reads the pages of K and V through the table and keeps nothing. For a write:
    torch's copy of the new tokens, from one contiguous tensor into another."""
    if x.case.kind == "write":
        new = torch.stack((x.k_new, x.v_new), 1)
        target = torch.empty_like(new, dtype=x.k_cache.dtype)
        return [lambda r=r: target[r].copy_(new[r]) for r in range(x.copies)]
    words = [cache.view(torch.int32).flatten(1) for cache in (x.k_cache, x.v_cache)]
    pages = [
        torch.cat([table[b, : -(-n // x.case.page_size)] for b, n in enumerate(x.case.kv_lens)]) for table in x.tables
    ]
    return read_pages(*words, pages)


@triton.jit
def read_kernel(k, v, pages, result, count, row, ROWS: tl.constexpr, WORDS: tl.constexpr):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    page = tl.load(pages + index, mask=index < count, other=0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    place = page[:, None] * row + word[None, :]
    total = tl.sum(tl.sum(tl.load(k + place) ^ tl.load(v + place), 1), 0)
    tl.store(result, total, mask=total == 0x5A17C0DE)  # never, but the compiler cannot know


def read_pages(k, v, pages):
    """Calls that read these pages, rows of k and v; of several launch shapes the fastest."""
    result, row = torch.zeros(1, dtype=torch.int32, device="cuda"), k.shape[1]
    shapes = []
    for tile, warps in [(2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8)]:
        words = min(row, tile)
        rows = tile // words
        calls = [
            lambda p=p, rows=rows, words=words, warps=warps: read_kernel[(-(-len(p) // rows), row // words)](
                k, v, p, result, len(p), row, rows, words, num_warps=warps
            )
            for p in pages
        ]
        shapes.append(calls)
    return min(shapes, key=lambda calls: Replay(calls).median(3))


def fa3_library():
    """FlashAttention 3's operators, and None for every argument of `fwd` that may be absent."""
    path = Path(os.environ.get("PEERS_DIR", ".")) / "fa3.so"
    if not path.exists():
        raise Missing(f"{path} does not exist")
    torch.ops.load_library(str(path))
    library = torch.ops._vllm_fa3_C
    arguments = library.fwd.default._schema.arguments
    return library, {a.name: None for a in arguments if isinstance(a.type, torch.OptionalType)}


def fa3_plan(library, x, q_dtype, **options):
    """FlashAttention 3's plan for a cache in pages. An engine makes one per step, so it is no part of a call.
    `options`: what differs between benchmarks."""
    case = x.case
    return library.get_scheduler_metadata(
        batch_size=len(x.kv_lens), max_seqlen_k=x.tables[0].shape[1] * case.page_size, num_heads=case.q_heads,
        num_heads_k=case.kv_heads, headdim=case.head_dim, headdim_v=case.head_dim, qkv_dtype=q_dtype,
        seqused_k=x.kv_lens, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None,
        page_size=case.page_size, max_seqlen_k_new=0, pack_gqa=None, **options,
    )  # fmt: skip


def fa3(x, planned=False):
    case = x.case
    if case.kind == "write":
        raise Missing("attention only")
    library, off = fa3_library()
    q, scales = x.q, {}
    if case.cache_dtype:
        q = q.to(torch.float8_e4m3fn)
        ones = torch.ones(case.batch, case.kv_heads, device="cuda")
        scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    common = {"is_causal": case.q_len > 1, "num_splits": 0, "sm_margin": 0}
    common |= {"window_size_left": -1, "window_size_right": -1}
    options = off | common | scales | {
        "seqused_k": x.kv_lens, "softmax_scale": case.scale, "softcap": 0.0, "is_rotary_interleaved": True,
        "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    if planned:
        options["scheduler_metadata"] = fa3_plan(
            library, x, q.dtype, max_seqlen_q=case.q_len, cu_seqlens_q=None, has_softcap=False, **common
        )
    options |= {"k": x.k_cache, "v": x.v_cache}
    return [lambda r=r: library.fwd(**options | {"q": q[r], "page_table": x.tables[r]})[0] for r in range(x.copies)]


def cudnn(x):
    case = x.case
    if case.kind == "write" or case.cache_dtype:
        raise Missing("attention over 16-bit caches only")
    try:
        import cudnn as frontend
    except ImportError as error:
        raise Missing(str(error)) from None
    handle = frontend.create_handle()
    float32, bf16, int32 = (getattr(frontend.data_type, name) for name in ("FLOAT", "BFLOAT16", "INT32"))
    graph = frontend.pygraph(
        io_data_type=bf16, intermediate_data_type=float32, compute_data_type=float32, handle=handle
    )

    def declare(name, tensor, dtype=bf16):
        return graph.tensor(name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=dtype)

    heads_first = [q.transpose(1, 2) for q in x.q]
    k, v = (cache.transpose(1, 2) for cache in (x.k_cache, x.v_cache))  # [page, head, slot, dim]
    tables = [table[:, None, :, None] for table in x.tables]
    q_lens, kv_lens = (t.view(-1, 1, 1, 1) for t in (torch.full_like(x.kv_lens, case.q_len), x.kv_lens))
    names = {"q": heads_first[0], "k": k, "v": v}
    names |= {"k_table": tables[0], "v_table": tables[0], "q_lens": q_lens, "kv_lens": kv_lens}
    node = {name: declare(name, t, int32 if t.dtype == torch.int32 else bf16) for name, t in names.items()}
    out, _ = graph.sdpa(
        name="sdpa", q=node["q"], k=node["k"], v=node["v"], generate_stats=False, attn_scale=case.scale,
        use_padding_mask=True, seq_len_q=node["q_lens"], seq_len_kv=node["kv_lens"],
        use_causal_mask_bottom_right=case.q_len > 1, paged_attention_k_table=node["k_table"],
        paged_attention_v_table=node["v_table"],
        paged_attention_max_seq_len_kv=x.tables[0].shape[1] * case.page_size,
    )  # fmt: skip
    results = [torch.empty_like(q).transpose(1, 2) for q in x.q]
    out.set_output(True).set_dim(list(results[0].shape)).set_stride(list(results[0].stride()))
    graph.build([frontend.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def call(r):
        frontend.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        tensors = names | {"q": heads_first[r], "k_table": tables[r], "v_table": tables[r]}
        graph.execute({node[name]: t for name, t in tensors.items()} | {out: results[r]}, workspace, handle=handle)
        return results[r].transpose(1, 2)

    return [lambda r=r: call(r) for r in range(x.copies)]


PROVIDERS = {"floor": floor, "ours": ours, "FA3": fa3, "FA3 planned": lambda x: fa3(x, planned=True), "cuDNN": cudnn}
PEERS = [name for name in PROVIDERS if name not in ("floor", "ours")]


def sample(x, providers, rounds, failed, look, own=("ours",)):
    """By provider the microseconds of its calls of the inputs x in every round, in which all take turns. Their order is
    another in each round: what runs right before leaves the GPU warm or cool.

    `look` is given the name and the first result of each. `failed` is given the reason of those that are left out:
    what is missing, or what a library raised that is not our own.
    """
    graphs = {}
    for name, provider in providers.items():
        try:
            calls = provider(x)
            look(name, calls[0]())
            graphs[name] = Replay(calls)
        except Missing as why:
            failed[name] = str(why)
        except Exception as error:
            if name in own:
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    samples = {name: [] for name in graphs}
    shuffle = random.Random(1).sample
    for _ in range(rounds):
        for name in shuffle(list(graphs), len(graphs)):
            samples[name].append(graphs[name].microseconds())
    return samples


def measure(x, providers, rounds):
    """Replays of the calls that each provider makes of the inputs x, in turn: medians, and differences from ours."""
    row, results = {"case": asdict(x.case), "us": {}, "difference": {}, "failed": {}}, {}
    look = lambda name, out: results.update({name: out.float()})  # noqa: E731
    samples = sample(x, providers, rounds, row["failed"], look)
    own = results["ours"]
    for name, times in samples.items():
        row["us"][name] = statistics.median(times)
        row["difference"][name] = ((results[name].view_as(own) - own).norm() / own.norm()).item()
    return row
