"""Which calls take longer than their size says.

    python benchmarks/find_slow_calls.py [--device cuda] [--threads N] [--above 2.0] [--only REGEX]

Every dtype of q and cache with many sizes of heads, and every feature by itself; one token, four tokens and a prompt.
The time of a call counts for each number of a key and its value, and is given as a multiple of what 128 dimensions
take in the same dtypes; that of a feature as a multiple of the plain call. What is above the limit stands at the end,
with the route that it takes. No peer: a route that is slow for all of its calls is not found here.
"""

import argparse
import os
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
from tqdm import tqdm

Q_HEADS, KV_HEADS, PAGE, ROUNDS = 16, 4, 16, 5
BF16, FP16, FP32, E4M3, E5M2 = (
    getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
)
DTYPES = {  # of q, of the cache
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "fp32": (FP32, FP32),
    "bf16 on e4m3": (BF16, E4M3),
    "bf16 on e5m2": (BF16, E5M2),
    "fp32 on e4m3": (FP32, E4M3),
    "e4m3": (E4M3, E4M3),
}
HEADS = [(128, 128), *((d, d) for d in (40, 59, 64, 72, 80, 88, 96, 112, 192, 255, 256, 512)), (192, 128), (64, 128)]
SHAPES = {  # batch, keys, tokens: on a GPU so many that it is full
    "cpu": {"token": (8, 1024, 1), "drafts": (8, 1024, 4), "prompt": (1, 512, 512)},
    "cuda": {"token": (32, 4096, 1), "drafts": (32, 4096, 4), "prompt": (4, 2048, 2048)},
}
PAGES = (1, 3, 8, 128)


@dataclass
class Call:
    name: str
    kernel: object
    arguments: dict
    numbers: int  # of a key and its value
    seconds: float = 0.0
    route: str = ""
    plain: "Call | None" = field(default=None, repr=False)

    @property
    def ratio(self):
        return self.seconds / self.numbers / (self.plain.seconds / self.plain.numbers)

    def measure(self, device):
        self.route = self.kernel.explain(**self.arguments).route
        calls, samples = 1, []
        while len(samples) < ROUNDS:
            begin = time.perf_counter()
            for _ in range(calls):
                self.kernel.flash_attn_with_kvcache(**self.arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            if seconds < 5e-3 and calls < 64:  # the host's time of a call hides behind the calls before it
                calls *= 4
            else:
                samples.append(seconds / calls)
        self.seconds = statistics.median(samples)


def inputs(shape, dtypes, dims, device, page=PAGE):
    (batch, keys, tokens), (q_dtype, kv_dtype), (head_dim, head_dim_v) = shape, dtypes, dims
    generator = torch.Generator(device).manual_seed(1)
    random = lambda *sizes, dtype: torch.randn(*sizes, generator=generator, device=device).to(dtype)  # noqa: E731
    pages = -(-keys // page)
    table = torch.randperm(batch * pages, generator=generator, device=device).int().view(batch, pages)
    return {
        "q": random(batch, tokens, Q_HEADS, head_dim, dtype=q_dtype),
        "k_cache": random(batch * pages, page, KV_HEADS, head_dim, dtype=kv_dtype),
        "v_cache": random(batch * pages, page, KV_HEADS, head_dim_v, dtype=kv_dtype),
        "block_table": table,
        "cache_seqlens": torch.full((batch,), keys, dtype=torch.int32, device=device),
        "causal": True,
    }


def features(batch, device):
    return {
        "window": {"window_size": (200, 0)},
        "not causal": {"causal": False},
        "chunk": {"attention_chunk": 200},
        "softcap": {"softcap": 20.0},
        "alibi": {"alibi_slopes": torch.rand(Q_HEADS, device=device)},
        "leftpad": {"cache_leftpad": torch.full((batch,), 3, dtype=torch.int32, device=device)},
        "sinks": {"s_aux": torch.randn(Q_HEADS, device=device)},
        "lse": {"return_softmax_lse": True},
        "deterministic": {"deterministic": True},
        "num_splits": {"num_splits": 4},
    }


def all_calls(kernel, device):
    for which, shape in SHAPES[device].items():
        for dtype, dtypes in DTYPES.items():
            plain = None
            for dims in HEADS:
                name = f"{which}, {dtype}, {dims[0]}/{dims[1]}"
                call = Call(name, kernel, inputs(shape, dtypes, dims, device), sum(dims))
                plain = call.plain = plain or call
                yield call
        plain = None
        for name, options in {"": {}, **features(shape[0], device)}.items():
            given = inputs(shape, DTYPES["bf16"], (128, 128), device) | options
            call = Call(f"{which}, {name or 'plain'}", kernel, given, 256)
            plain = call.plain = plain or call
            yield call
        for page in PAGES:
            given = inputs(shape, DTYPES["bf16"], (128, 128), device, page)
            yield Call(f"{which}, pages of {page}", kernel, given, 256, plain=plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--above", type=float, default=2.0)
    parser.add_argument("--only", default="", help="names of calls; the plain ones are measured all the same")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend=options.device, trust_remote_code=True)
    slow = []
    for call in tqdm(all_calls(kernel, options.device), "calls"):
        if call.plain is not call and not re.search(options.only, call.name):
            continue
        call.measure(options.device)
        call.arguments = {}
        tqdm.write(f"{call.name:32s} {call.seconds * 1e6:10.1f} us {call.ratio:6.2f}  {call.route}")
        if call.ratio > options.above:
            slow.append(call)
    print(f"\n{len(slow)} above {options.above}:")
    for call in sorted(slow, key=lambda call: -call.ratio):
        print(f"{call.ratio:6.2f}  {call.name} ({call.route})")


if __name__ == "__main__":
    main()
