"""Continuous batching of transformers with the shape of Llama 3.1 8B: block tables, varlen and sdpa on a GPU.

    python benchmarks/compare_transformers.py --layers 8 --contexts 4096 8192 16384 --out FILE

A random model with fewer layers. Requests with prompts of the given length generate; the rate counts the tokens from
the moment on at which every request has its first one, so it is that of decode steps with all requests in them. With
CUDA graphs and without, each in an order that puts the most important first. Times are transformers' own timestamps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")

import kernels  # noqa: F401  (a missing one shows here)
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

FLASH = "org/paged-attn:flash_attn_2"
# name -> (attention, options of the batch)
WAYS = {
    "block tables": (FLASH, {}),
    "varlen": (FLASH, {"max_blocks_per_request": 0}),
    "sdpa": ("sdpa", {}),
}
PAGE_SIZE = 256
SIZE = {"page_size": PAGE_SIZE, "auto_switch_to_flash": False}
if not hasattr(ContinuousBatchingConfig, "page_size"):  # transformers 5.17
    SIZE = {"block_size": PAGE_SIZE}


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


def run(model, way, graphs, prompts, new_tokens):
    """(new tokens per second with all requests decoding, milliseconds of a step, the tokens)"""
    attention, options = WAYS[way]
    model.set_attn_implementation(attention, allow_all_kernels=True)
    pages = sum(-(-(len(prompt) + new_tokens) // PAGE_SIZE) for prompt in prompts)
    settings = ContinuousBatchingConfig(
        num_blocks=pages + 8, max_batch_tokens=4096, use_async_batching=False, use_cuda_graph=graphs, **SIZE, **options
    )
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=new_tokens),
        continuous_batching_config=settings,
        record_timestamps=True,
        progress_bar=False,
    )
    failed = [result.error for result in results.values() if result.error]
    if failed or len(results) != len(prompts):
        sys.exit(f"{way}: {failed[:1] or 'results are missing'}")
    times = [result.timestamps for result in results.values()]
    begin = max(own[0] for own in times)
    # The first steps after the prompts capture graphs.
    begin += 0.25 * (max(own[-1] for own in times) - begin)
    later = sorted(at for own in times for at in own if at > begin)
    rate = (len(later) - len(prompts)) / (later[-1] - later[len(prompts) - 1])
    return rate, 1e3 * len(prompts) / rate, [result.generated_tokens for result in results.values()]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--sdpa", type=int, default=4096, help="longest context for sdpa, which computes all pairs")
    parser.add_argument("--out", type=Path, help="write what was measured to this file as JSON")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new length (docs/transformers.md)
    model, rows = make_model(args.layers), []
    result = {
        "machine": f"One {torch.cuda.get_device_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/compare_transformers.py {' '.join(sys.argv[1:])}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "layers": args.layers,
        "requests": args.requests,
        "rows": rows,
    }
    jobs = [(context, way, True) for context in args.contexts for way in ("block tables", "varlen")]
    jobs += [(args.contexts[0], "sdpa", True)]
    jobs += [(context, way, False) for context in args.contexts for way in ("block tables", "varlen")]
    jobs += [(args.contexts[0], "sdpa", False)]
    tokens = {}
    for context, way, graphs in jobs:
        if way == "sdpa" and context > args.sdpa:
            continue
        generator = torch.Generator().manual_seed(1)
        draw = lambda: torch.randint(1, 128256, (context,), generator=generator).tolist()  # noqa: B023, E731
        rate, step, tokens[way] = run(model, way, graphs, [draw() for _ in range(args.requests)], args.new_tokens)
        rows.append({"context": context, "way": way, "graphs": graphs, "tokens_per_s": round(rate, 1), "step_ms": step})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
