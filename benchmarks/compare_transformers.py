"""Continuous batching of transformers with the shape of Llama 3.1 8B: block tables, varlen and sdpa on a GPU.

    python benchmarks/compare_transformers.py
    python benchmarks/compare_transformers.py --contexts 4096 --samples 10 100 500 --out FILE

A random model. Requests with prompts just below the given length generate up to it; with --samples one such prompt is
sampled many times instead. Only steps count in which every request has one token: without the first quarter of them, in
which graphs are captured, and the last few, which are profiled. transformers does a step in three parts, one after the
other: the host prepares it (lists, tables, copies), the GPU computes, the host updates its requests. `kernels_ms` is
the time in which the GPU works: where it is far below `step_ms`, the host decides.

sdpa computes all pairs of a batch, also those of different requests. For long prompts that takes minutes and is not
what is measured: with --no-prompt-attention its steps with prompts get zeros instead.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels  # noqa: F401  (a missing one shows here)
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

FLASH = "org/paged-attn:flash_attn_2"
# name -> (attention, options of the batch, whether steps with prompts are graphs where those without are). Prompts come
# in large pieces, so that all requests decode together for long; sdpa has a mask of that size.
WAYS = {
    "block tables": (FLASH, {"max_batch_tokens": 1 << 15}, False),
    "varlen": (FLASH, {"max_batch_tokens": 1 << 15, "max_blocks_per_request": 0}, True),
    "sdpa": ("sdpa", {"max_batch_tokens": 1 << 13}, True),
}
MOST_DECODING = 1024  # tokens of a step without prompts
PAGE_SIZE = 256
SIZE = {"page_size": PAGE_SIZE, "auto_switch_to_flash": False}
if not hasattr(ContinuousBatchingConfig, "page_size"):  # transformers 5.17
    SIZE = {"block_size": PAGE_SIZE}
PROFILED = 6  # steps


def make_model(layers):
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=1 << 17, rope_theta=5e5,
        initializer_range=0.06,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.eval()


class Watch:
    """While it is open: when each part of each step of transformers' loop ended, and the kernels of some steps."""

    def __init__(self, last: int):
        self.last = last  # so many plain steps, in which every request has one token, before those that are profiled
        self.steps = []  # plain ones: (tokens, begin, prepared, computed, end)
        self.kernels_ms = None
        self.profile = None
        self.own = {name: getattr(ContinuousBatchProcessor, name) for name in ("prepare_next_batch", "update_batch")}

    def __enter__(self):
        ContinuousBatchProcessor.prepare_next_batch = lambda processor: self.prepare(processor)
        ContinuousBatchProcessor.update_batch = lambda processor: self.update(processor)
        return self

    def __exit__(self, *_):
        for name, method in self.own.items():
            setattr(ContinuousBatchProcessor, name, method)

    def prepare(self, processor):
        if self.kernels_ms is None and len(self.steps) == self.last:
            torch.cuda.synchronize()
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()
        self.begin = time.perf_counter()
        some = self.own["prepare_next_batch"](processor)
        self.prepared = time.perf_counter()
        return some

    def update(self, processor):
        computed = time.perf_counter()
        requests = processor.inputs_and_outputs.requests_in_batch
        lengths = [request.query_length for request in requests]
        self.own["update_batch"](processor)
        if max(lengths) > 1:
            self.steps.clear()  # a prompt: all plain steps come after it
            return
        self.steps.append((len(lengths), self.begin, self.prepared, computed, time.perf_counter()))
        if self.profile and len(self.steps) == self.last + PROFILED:
            torch.cuda.synchronize()
            self.profile.stop()
            on_gpu = [e for e in self.profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            self.kernels_ms = sum(e.device_time_total for e in on_gpu) / 1e3 / PROFILED
            self.profile = None

    def result(self):
        if self.kernels_ms is None:
            sys.exit(f"{len(self.steps)} steps of one token each: expected more than {self.last + PROFILED}")
        steps = self.steps[self.last // 4 : self.last]
        seconds = [end - begin for _, begin, _, _, end in steps]
        parts = {
            "step_ms": seconds,
            "prepare_ms": [s[2] - s[1] for s in steps],
            "update_ms": [s[4] - s[3] for s in steps],
        }
        medians = {name: round(1e3 * statistics.median(values), 2) for name, values in parts.items()}
        tokens_per_s = sum(step[0] for step in steps) / (steps[-1][4] - steps[0][1])
        tokens = round(statistics.mean(step[0] for step in steps), 1)
        return {
            "tokens_per_s": round(tokens_per_s, 1),
            "tokens_of_a_step": tokens,
            **medians,
            "kernels_ms": round(self.kernels_ms, 2),
        }


@contextlib.contextmanager
def no_attention_of_prompts():
    """While it is open, sdpa of many queries returns zeros."""
    own = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *others, **keywords):
        return torch.zeros_like(query) if query.shape[2] > MOST_DECODING else own(query, *others, **keywords)

    torch.nn.functional.scaled_dot_product_attention = attend
    yield
    torch.nn.functional.scaled_dot_product_attention = own


def run(model, way, graphs, prompts, samples, new_tokens, cache_bytes):
    """What the steps of one token for each request took."""
    attention, options, graphs_of_prompts = WAYS[way]
    model.set_attn_implementation(attention, allow_all_kernels=True)
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    # As many pages as all requests have together, shared or not, since without block tables a step gathers all of them.
    # Into the last fifth of the pages transformers lets no prompt while other requests decode.
    pages = len(prompts) * samples * -(-longest // PAGE_SIZE) * 4 // 3
    page_bytes = 4 * PAGE_SIZE * model.config.num_hidden_layers * model.config.num_key_value_heads * 128
    settings = ContinuousBatchingConfig(
        num_blocks=min(pages, cache_bytes // page_bytes), use_async_batching=False,
        use_cuda_graph=(graphs and graphs_of_prompts, graphs), **SIZE, **options,
    )  # fmt: skip
    generation = GenerationConfig(
        do_sample=samples > 1, num_return_sequences=samples, eos_token_id=-1, max_new_tokens=new_tokens
    )
    # The first requests begin, and end, so many steps before the last ones.
    apart = -(-sum(map(len, prompts)) // options["max_batch_tokens"])
    with Watch(new_tokens - PROFILED - 2 - apart) as watch:
        results = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=settings, progress_bar=False, warmup=False
        )
    failed = [result.error for result in results.values() if result.error]
    if failed or len(results) < len(prompts):
        sys.exit(f"{way}: {failed[:1] or 'results are missing'}")
    return watch.result()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--samples", type=int, nargs="+", default=[1], help="of one prompt, if more than 1")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--graphs", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    parser.add_argument("--sdpa", type=int, default=4096, help="longest context for sdpa, which computes all pairs")
    parser.add_argument("--cache-gb", type=int, default=64, help="the largest cache")
    parser.add_argument("--no-prompt-attention", action="store_true", help="sdpa of prompts gives zeros")
    parser.add_argument("--out", type=Path, help="write what was measured to this file as JSON")
    return parser.parse_args()


@torch.no_grad()
def main():
    args = parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new length (docs/transformers.md)
    if args.no_prompt_attention:
        WAYS["sdpa"][1]["max_batch_tokens"] = 1 << 15
    model, rows = make_model(args.layers), []
    result = {
        "machine": f"One {torch.cuda.get_device_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/compare_transformers.py {' '.join(sys.argv[1:])}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "layers": args.layers,
        "rows": rows,
    }
    jobs = [
        (context, samples, way, graphs == "yes")
        for graphs in args.graphs for context in args.contexts for samples in args.samples for way in args.ways
    ]  # fmt: skip
    for context, samples, way, graphs in jobs:
        if way == "sdpa" and context > args.sdpa:
            continue
        requests = args.requests if samples == 1 else 1
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, 128256, (requests, context - args.new_tokens), generator=generator).tolist()
        start = time.perf_counter()
        row = {"context": context, "requests": requests, "samples": samples, "way": way, "graphs": graphs}
        with no_attention_of_prompts() if args.no_prompt_attention else contextlib.nullcontext():
            row |= run(model, way, graphs, prompts, samples, args.new_tokens, args.cache_gb << 30)
        rows.append(row | {"seconds": round(time.perf_counter() - start, 1)})
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
