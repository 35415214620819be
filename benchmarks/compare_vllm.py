"""vLLM on a CPU with its own attention and with ours, in turns.

    <the environment of make test-vllm>/bin/python benchmarks/compare_vllm.py decode --context 4096 --requests 8
    ... compare_vllm.py decode --context 16384 --requests 2
    ... compare_vllm.py prefill --context 4096 --requests 4
    ... compare_vllm.py serve --requests 12 --new-tokens 64

LOCAL_KERNELS must name the build, as for the tests. `decode` and `prefill` hold two engines in one process and time
them in turns; `serve` starts two servers and loads each in turn with vLLM's own serving benchmark. On two cores the
servers take half a minute to start, and a load a second for every 1500 tokens of prompts.
The model has Llama's form with 16 query heads, 4 key heads of 128, two layers and little else, in bfloat16, so that
attention is most of the time; its weights are of no interest and left as vLLM's loader makes them up.
"""

import argparse
import asyncio
import contextlib
import io
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
VOCABULARY = 1000
KINDS = ("vllm", "paged_attn")
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1 << 17,
}


def make_model(folder: str, layers: int) -> str:
    """A configuration and a tokenizer of one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(**CONFIG, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


def make_engines(args, model: str) -> dict:
    import paged_attn_vllm
    from vllm import LLM
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register = paged_attn_vllm.register
    engines = {}
    for kind in KINDS:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()
        paged_attn_vllm.register = register if kind == "paged_attn" else lambda: None
        paged_attn_vllm.register()
        engines[kind] = LLM(
            model, load_format="dummy", dtype="bfloat16", enforce_eager=True, max_model_len=args.context + 256,
            max_num_batched_tokens=2048, disable_log_stats=True, seed=0, enable_prefix_caching=True,
        )  # fmt: skip
    return engines


def prompts(args, seed: int) -> list:
    import torch

    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(3, VOCABULARY, (args.requests, args.context), generator=generator)
    return [{"prompt_token_ids": row} for row in draw.tolist()]


def seconds(engine, requests, new_tokens: int) -> float:
    from vllm import SamplingParams

    start = time.perf_counter()
    engine.generate(
        requests, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True), use_tqdm=False
    )  # fmt: skip
    return time.perf_counter() - start


def time_decode(args, engines) -> dict:
    """New tokens/s of all requests together, their prompts in the cache."""
    requests = prompts(args, 0)
    for engine in engines.values():
        seconds(engine, requests, 2)
    rates = {kind: [] for kind in engines}
    for _ in range(args.rounds):
        for kind, engine in engines.items():
            first = seconds(engine, requests, 1)
            whole = seconds(engine, requests, 1 + args.new_tokens)
            rates[kind].append(args.requests * args.new_tokens / (whole - first))
    return rates


def time_prefill(args, engines) -> dict:
    """Prompt tokens/s, of prompts that no cache knows."""
    rates = {kind: [] for kind in engines}
    for round_ in range(args.rounds + 1):
        for kind, engine in engines.items():
            rates[kind].append(args.requests * args.context / seconds(engine, prompts(args, 1 + round_), 1))
    return {kind: values[1:] for kind, values in rates.items()}


class Server:
    """vLLM's OpenAI-compatible server; VLLM_PLUGINS decides whose attention it has."""

    def __init__(self, kind: str, model: str, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        settings = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (
            {"VLLM_PLUGINS": ""} if kind == "vllm" else {}
        )
        options = f"--host 127.0.0.1 --port {self.port} --load-format dummy --dtype bfloat16 --enforce-eager"
        options += " --max-model-len 4096 --no-enable-prefix-caching"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options.split()]
        self.model, self.log = model, log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(self.log.read_text()[-4000:])
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                time.sleep(1)
        sys.exit(f"no answer in ten minutes: {self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)


def load(args, server: Server, requests: int, seed: int) -> dict:
    """One run of vLLM's serving benchmark. In this process: what it imports takes longer than a small load."""
    from vllm.benchmarks import serve as benchmark

    parser = argparse.ArgumentParser()
    benchmark.add_cli_args(parser)
    options = f"--model {server.model} --host 127.0.0.1 --port {server.port} --dataset-name random --ignore-eos"
    options += f" --random-input-len {args.context} --random-output-len {args.new_tokens} --seed {seed} --disable-tqdm"
    options += f" --num-prompts {requests} --max-concurrency {args.concurrency}"
    with contextlib.redirect_stdout(io.StringIO()):
        run = benchmark.main_async(parser.parse_args(options.split()))
        result = asyncio.run(asyncio.wait_for(run, args.limit))
    if result["completed"] != requests:
        sys.exit(f"{result['completed']} of {requests} requests: {server.log.read_text()[-4000:]}")
    return result


def serve(args, folder: str) -> dict:
    """New tokens/s of a server under load. Both run all the time; the one that is not asked waits without work."""
    model = make_model(folder, args.layers)
    servers = {kind: Server(kind, model, Path(folder) / f"{kind}.log") for kind in KINDS}
    shown = {
        "output_throughput": "tokens/s",
        "median_ttft_ms": "ms to the first token",
        "median_tpot_ms": "ms to the next",
    }
    values = {name: {kind: [] for kind in KINDS} for name in shown}
    try:
        for server in servers.values():
            server.wait()
            load(args, server, 2, 0)
        for round_ in range(args.rounds):
            for kind, server in servers.items():
                result = load(args, server, args.requests, 1 + round_)
                for name in shown:
                    values[name][kind].append(result[name])
            print(f"round {round_}:", {kind: round(rates[-1]) for kind, rates in values["output_throughput"].items()})
    finally:
        for server in servers.values():
            server.stop()
    for name, text in shown.items():
        print(f"{text}:", {kind: round(statistics.median(seen), 1) for kind, seen in values[name].items()})
    return values["output_throughput"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "prefill", "serve"))
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8, help="serve: requests at a time")
    parser.add_argument("--limit", type=float, default=120, help="serve: seconds that one load may take")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "serve":
            rates = serve(args, folder)
        else:
            engines = make_engines(args, make_model(folder, args.layers))
            rates = (time_decode if args.what == "decode" else time_prefill)(args, engines)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    shown = ", ".join(f"{kind} {medians[kind]:.0f} ({', '.join(f'{x:.0f}' for x in rates[kind])})" for kind in KINDS)
    ratio = medians["paged_attn"] / medians["vllm"]
    print(f"{args.what}, {args.requests} x {args.context}: tokens/s {shown}; {ratio:.2f} x")


if __name__ == "__main__":
    main()
