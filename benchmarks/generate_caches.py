"""generate() with PagedCache beside transformers' DynamicCache and StaticCache: speed and memory on this machine.

    make build && .venv/bin/python benchmarks/generate_caches.py --lengths 1024 8192
    python benchmarks/generate_caches.py --device cuda --lengths 1024 8192 32768

A random Llama decodes after a prompt of the given length. The caches take turns in one process, so that whatever else
runs on the machine slows all of them; the median step counts. Their keys and values are random: what they hold does not
matter for the speed of a step, and no prompt has to be computed. Memory is the largest resident size of a process of
its own, on a GPU the most that torch has allocated, above what the model alone takes, with the prompt computed. With
--samples the prompt is one and the samples are many: a PagedCache keeps it once. On a GPU the layers have the shape of
those of Llama 3.1 8B, on a CPU they are smaller.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

# Attention and what stands around it, as they are in the caches of the families that use them.
CACHES = {"DynamicCache": "sdpa", "StaticCache": "sdpa", "PagedCache": "paged_attn"}


SHAPES = {
    "cpu": {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "cuda": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def make_model(args):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1024, max_position_embeddings=1 << 20, **SHAPES[args.device])
    with torch.device(args.device):
        return LlamaForCausalLM(config).to(args.dtype).eval()


def make_cache(name, model, paged_cache, length):
    if name == "PagedCache":
        return paged_cache(model, page_size=16)
    model.set_attn_implementation(CACHES[name])
    return DynamicCache(config=model.config) if name == "DynamicCache" else StaticCache(model.config, length)


@torch.no_grad()
def prefill(name, model, paged_cache, prompt, samples, new_tokens):
    """The cache after the prompt, once for every sample."""
    cache = make_cache(name, model, paged_cache, prompt.shape[1] + new_tokens)
    if name == "PagedCache":
        model(prompt, past_key_values=cache)
        cache.batch_repeat_interleave(samples)
    else:
        model(prompt.repeat(samples, 1), past_key_values=cache)
    return cache


@torch.no_grad()
def fill(name, model, paged_cache, length, samples, new_tokens):
    """The cache with random keys and values in place of a prompt's."""
    cache, config = make_cache(name, model, paged_cache, length + new_tokens), model.config
    rows = 1 if name == "PagedCache" else samples
    shape = (rows, config.num_key_value_heads, length, config.head_dim)
    keys = torch.randn(shape, dtype=model.dtype, device=model.device)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)
        if name == "PagedCache":
            cache.layers[layer].attended()
    if name == "PagedCache":
        cache.batch_repeat_interleave(samples)
    return cache


@torch.no_grad()
def step(model, cache, token):
    start = time.perf_counter()
    model(token, past_key_values=cache)
    if token.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speed(args, length, paged_cache):
    model = make_model(args)
    token = torch.randint(1024, (args.samples, 1), device=args.device)
    caches = {name: fill(name, model, paged_cache, length, args.samples, args.new_tokens) for name in CACHES}
    seconds = {name: [] for name in CACHES}
    for _ in range(args.new_tokens):
        for name, cache in caches.items():
            model.config._attn_implementation = CACHES[name]
            seconds[name].append(step(model, cache, token))
    return {name: args.samples / statistics.median(times) for name, times in seconds.items()}


def memory(args, name, length, paged_cache):
    """MiB above the model, of this process."""
    model = make_model(args)
    prompt = torch.randint(1024, (1, length), device=args.device)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far: making the model
        before = resident("VmRSS")
    cache = prefill(name, model, paged_cache, prompt, args.samples, args.new_tokens)
    for _ in range(args.new_tokens):
        step(model, cache, torch.randint(1024, (args.samples, 1), device=args.device))
    if args.device == "cuda":
        return (torch.cuda.max_memory_allocated() - before) / (1 << 20)
    return (resident("VmHWM") - before) / 1024


def resident(field):
    """KiB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--only", choices=("speed", "memory"), help="default: both")
    parser.add_argument("--memory-of", choices=CACHES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend=args.device, trust_remote_code=True)
    paged_cache = kernel.integrations.PagedCache
    if args.memory_of:
        print(memory(args, args.memory_of, args.lengths[0], paged_cache))
        return
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{args.samples} samples, {args.dtype}, {where}\n")
    print("| prompt | cache | tokens/s | peak MiB |\n| --- | --- | --- | --- |")
    for length in args.lengths:
        rates = speed(args, length, paged_cache) if args.only != "memory" else dict.fromkeys(CACHES, float("nan"))
        for name, rate in rates.items():
            if args.only == "speed":
                print(f"| {length} | {name} | {rate:.1f} | |", flush=True)
                continue
            if args.device == "cuda":
                print(f"| {length} | {name} | {rate:.1f} | {memory(args, name, length, paged_cache):.0f} |", flush=True)
                torch.cuda.empty_cache()
                continue
            own = [sys.executable, __file__, "--memory-of", name, "--lengths", str(length)]
            own += ["--samples", str(args.samples), "--new-tokens", str(args.new_tokens)]
            own += ["--dtype", str(args.dtype).removeprefix("torch.")]
            peak = float(subprocess.run(own, check=True, capture_output=True, text=True).stdout)
            print(f"| {length} | {name} | {rate:.1f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
