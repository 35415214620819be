"""The main job: transformers generates text with this kernel, beside sdpa, and every result is checked.

    make run                            a small random Llama, on the GPU when there is one
    MODEL=<hub id> make run             a real model; those that do not run with sdpa too are refused
    python examples/generate.py --help  sizes, dtypes, device

Two ways of generating, each with sdpa and with this kernel:

    generate()         one batch of equal prompts (flash_attn_func), one padded batch (flash_attn_varlen_func)
    generate_batch()   continuous batching over requests of mixed lengths; the kernel runs it once through
                       flash_attn_varlen_func and once through block tables (flash_attn_with_kvcache), on a GPU
                       with and without CUDA graphs; a model with windows has no block tables in transformers

The exit status is 0 only if the kernel's functions were called, float32 tokens equal sdpa's, half-precision tokens
part only where two tokens tie within rounding, and attention is as close to float64 as PyTorch's own.
"""

import argparse
import functools
import inspect
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import kernels
import torch
import transformers
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "org/paged-attn"
# The same kernel. transformers asks for "flash" in a name, and block tables want a 2 or a 3 after it.
KERNEL_FLASH = f"{KERNEL}:flash_attn_2"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
PAGE_SIZE = 32
MAX_BATCH_TOKENS = 512
WARMUP_TOKENS = 3
# sdpa stays sdpa; batching is synchronous for all (docs/transformers.md says why). transformers 5.17 never switched,
# and has another name for the size of a page.
BATCHING = {"use_async_batching": False, "page_size": PAGE_SIZE, "auto_switch_to_flash": False}
if not hasattr(ContinuousBatchingConfig, "page_size"):
    BATCHING = {"use_async_batching": False, "block_size": PAGE_SIZE}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="hub id; default: a random Llama")
    parser.add_argument("--device", default=default_device(), help="cpu, cuda or mps (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16")
    parser.add_argument("--requests", type=int, default=12, help="requests of continuous batching")
    parser.add_argument("--max-prompt", type=int, default=768, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens generated for each prompt")
    # On a GPU the first run of a length also builds plans, for sdpa one per length.
    parser.add_argument("--repeats", type=int, help="timed runs, the fastest counts (default: 2 on a GPU, else 1)")
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.device.startswith("cuda") else 1)
    return args


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


# ---- Models and prompts ----


def load_model(name: str | None, device: torch.device) -> torch.nn.Module:
    """A bfloat16 model, so that the float32 run (a widened copy) and the bfloat16 run have the same weights."""
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            # Larger than the usual 0.02, with which random attention is little more than an average.
            initializer_range=0.04,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    # Every run generates the same number of tokens: no end token.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.to(device).eval()


def check_model(model, name: str) -> None:
    """Ends the script, in one sentence, where transformers cannot run the model with sdpa or with this kernel."""
    for attention in ("sdpa", KERNEL_FLASH):
        try:
            logits_after(model, attention, [1, 2], 1)
        except Exception as error:  # transformers has many ways to say no
            reason = f"{type(error).__name__} {str(error).partition('. ')[0]}".strip()
            sys.exit(f"{name}: transformers cannot run this model with {attention} in {model.dtype} ({reason})")


def has_windows(model) -> bool:
    """Whether a layer has a sliding window, as transformers' continuous batching decides it."""
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None) is None:
        return getattr(config, "sliding_window", None) is not None
    return "sliding_attention" in config.layer_types


def make_prompts(name: str | None, vocab_size: int, lengths: list[int]) -> list[list[int]]:
    """Random tokens for the random model, this repository's own text for a real one."""
    if name is None:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")))
    tokens = AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    if len(tokens) < 2 * max(lengths):
        sys.exit(f"--max-prompt: expected at most {len(tokens) // 2} (half of the text), got {max(lengths)}")
    starts = torch.linspace(0, len(tokens) - max(lengths) - 1, len(lengths)).int().tolist()
    return [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]


# ---- Watching the kernel ----


class Probe:
    """Counts the calls of the kernel's functions; while `comparing`, also checks each call against float64."""

    def __init__(self, kernel):
        self.calls = Counter()
        self.comparing = False
        self.errors = {}  # (function, dtype) -> [largest error of the kernel, of sdpa, largest output]
        for name in FUNCTIONS:
            setattr(kernel, name, self._watch(getattr(kernel, name)))

    def _watch(self, function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            self.calls[function.__name__] += 1
            if not self.comparing:
                return function(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            # The call appends to the cache, so what it will see is copied before.
            requests = list(split_requests(**arguments))
            out = function(*args, **kwargs)
            self._compare(function.__name__, arguments, requests, out)
            return out

        return watched

    def _compare(self, name, arguments, requests, out):
        scale, window = arguments["softmax_scale"], arguments.get("window_size", (-1, -1))
        worst = self.errors.setdefault((name, out.dtype), [0.0, 0.0, 0.0])
        start = 0
        for q, k, v in requests:
            mask = visible(len(q), len(k), window[0], q.device)
            exact = exact_attention(q, k, v, mask, scale)
            ours = out.flatten(0, -3)[start : start + len(q)]
            start += len(q)
            heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
            plain = scaled_dot_product_attention(*heads_first, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
            errors = [largest_error(ours, exact, if_nan=float("inf")), largest_error(plain, exact, if_nan=0.0)]
            worst[:] = map(max, worst, [*errors, exact.abs().max().item()])


def split_requests(
    q,
    k=None,
    v=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    k_cache=None,
    v_cache=None,
    block_table=None,
    cache_seqlens=None,
    **_,
):
    """The (q, k, v) of each request of a call, [tokens, heads, head_dim]."""
    if k_cache is not None:
        for i, length in enumerate(cache_seqlens.tolist()):
            pages = block_table[i, : -(-length // k_cache.shape[1])].long()
            cached = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            yield q[i], *(torch.cat([old, new[i]]) for old, new in zip(cached, (k, v), strict=True))
    elif cu_seqlens_q is not None:
        q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for i in range(len(q_ends) - 1):
            keys = slice(k_ends[i], k_ends[i + 1])
            yield q[q_ends[i] : q_ends[i + 1]], k[keys], v[keys]
    else:
        yield from zip(q, k, v, strict=True)


def visible(q_len: int, kv_len: int, window_left: int, device: torch.device) -> torch.Tensor:
    """Which keys each query token may see: causal, aligned at the end, at most `window_left` back (-1: all)."""
    q_pos = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    mask = key <= q_pos
    return mask if window_left < 0 else mask & (key >= q_pos - window_left)


def exact_attention(q, k, v, mask, scale) -> torch.Tensor:
    q, k, v, mask = (x.cpu() for x in (q, k, v, mask))
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def largest_error(out, exact, if_nan: float) -> float:
    return (out.cpu().double() - exact).abs().nan_to_num(nan=if_nan).max().item()


# ---- The runs ----


@dataclass
class Run:
    job: str
    dtype: torch.dtype
    attention: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    seconds: float
    calls: Counter

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def run_generate(job, model, probe, attention, prompts, args) -> Run:
    model.set_attn_implementation(attention, allow_all_kernels=True)
    # Left-padded to one length; a mask without padding lets transformers take the plain function.
    longest = max(map(len, prompts))
    ids = torch.stack([pad(torch.tensor(p), (longest - len(p), 0)) for p in prompts]).to(model.device)
    mask = torch.stack([pad(torch.ones(len(p)).int(), (longest - len(p), 0)) for p in prompts]).to(model.device)

    probe.comparing = True
    model.generate(ids, attention_mask=mask, max_new_tokens=WARMUP_TOKENS)
    probe.comparing = False

    seconds = []
    for _ in range(args.repeats):
        probe.calls.clear()
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=args.new_tokens)
        tokens = out[:, longest:].tolist()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return Run(job, model.dtype, attention, prompts, tokens, min(seconds), Counter(probe.calls))


def run_continuous(label, model, probe, attention, prompts, args, **options) -> Run:
    model.set_attn_implementation(attention, allow_all_kernels=True)
    pages = sum(-(-(len(p) + args.new_tokens) // PAGE_SIZE) for p in prompts)

    def batch(max_new_tokens, progress_bar, **options):
        config = ContinuousBatchingConfig(
            num_blocks=pages + 8,
            max_batch_tokens=MAX_BATCH_TOKENS,
            **BATCHING,
            **options,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max_new_tokens)
        results = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=config,
            record_timestamps=True,
            progress_bar=progress_bar,
        )
        failed = [r.error for r in results.values() if r.error]
        if failed or len(results) != len(prompts):
            sys.exit(f"continuous batching with {label} failed: {failed[:1] or 'results are missing'}")
        return list(results.values())

    # A graph is replayed without passing through Python, so the comparison runs without graphs.
    probe.comparing = True
    batch(WARMUP_TOKENS, False, **(options | {"use_cuda_graph": False}))
    probe.comparing = False

    seconds = []
    for _ in range(args.repeats):
        probe.calls.clear()
        results = batch(args.new_tokens, True, **options)
        # From the first request to the last token: without the set-up of the cache and the capture of graphs.
        seconds.append(max(r.timestamps[-1] for r in results) - min(r.created_time for r in results))
    tokens = [r.generated_tokens for r in results]
    return Run("continuous batching", model.dtype, label, prompts, tokens, min(seconds), Counter(probe.calls))


def run_all(model, probe, kernel, prompts, args) -> list[list[Run]]:
    """Groups of runs of one job; sdpa comes first in each."""
    equal = [p[: len(prompts[-1]) // 4] for p in prompts if len(p) >= len(prompts[-1]) // 4]
    groups = []
    for job, batch in (("generate", equal), ("generate, padded", prompts[::2])):
        groups.append([run_generate(job, model, probe, a, batch, args) for a in ("sdpa", KERNEL_FLASH)])

    def continuous(label, attention, **options):
        return run_continuous(label, model, probe, attention, prompts, args, **options)

    # The name alone opens block tables on CUDA; elsewhere the package's helper does.
    on_cuda = model.device.type == "cuda"
    block_tables = nullcontext if on_cuda else kernel.integrations.transformers_block_tables
    group = [continuous("sdpa", "sdpa")]
    for graphs in (False, True) if on_cuda else (False,):
        suffix = ", CUDA graphs" if graphs else ""
        options = {"use_cuda_graph": graphs}
        group.append(continuous(f"{KERNEL} varlen{suffix}", KERNEL_FLASH, max_blocks_per_request=0, **options))
        if has_windows(model):
            continue
        with block_tables():
            group.append(continuous(f"{KERNEL} block tables{suffix}", KERNEL_FLASH, **options))
    groups.append(group)
    return groups


# ---- Judging tokens ----


@torch.no_grad()
def logits_after(model, attention, tokens: list[int], count: int) -> torch.Tensor:
    """The logits of the last `count` positions, float32."""
    model.set_attn_implementation(attention, allow_all_kernels=True)
    ids = torch.tensor([tokens], device=model.device)
    return model(ids, use_cache=False, logits_to_keep=count).logits[0].float()


def parting(left: list[int], right: list[int]) -> int | None:
    """The first position at which two token lists differ."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


@dataclass
class LogitNoise:
    """Distance of half-precision logits from the float32 model's over the same texts, by attention."""

    largest: dict[str, float]
    rms: dict[str, float]


def measure_noise(model, exact_model, run: Run) -> LogitNoise:
    texts = [(p + t, len(t)) for p, t in zip(run.prompts, run.tokens, strict=True)]
    exact = torch.cat([logits_after(exact_model, "sdpa", *text) for text in texts])
    errors = {a: torch.cat([logits_after(model, a, *text) for text in texts]) - exact for a in ("sdpa", KERNEL_FLASH)}
    return LogitNoise(
        largest={a: e.abs().max().item() for a, e in errors.items()},
        rms={a: e.square().mean().sqrt().item() for a, e in errors.items()},
    )


def largest_gap(exact_model, run: Run, sdpa: Run) -> float:
    """Where the tokens of two runs part, how far apart the float32 model sees the two candidates (the worst case)."""
    gaps = [0.0]
    for prompt, ours, theirs in zip(run.prompts, run.tokens, sdpa.tokens, strict=True):
        at = parting(ours, theirs)
        if at is not None:
            logits = logits_after(exact_model, "sdpa", prompt + theirs[:at], 1)[0]
            gaps.append((logits[ours[at]] - logits[theirs[at]]).abs().item())
    return max(gaps)


# ---- Report ----


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def report_runs(groups: list[list[Run]], gaps: dict[int, float], noise: LogitNoise | None) -> list[str]:
    rows, failures = [], []
    for sdpa, *others in groups:
        rows.append([sdpa.job, str(sdpa.dtype)[6:], "sdpa", f"{sdpa.tokens_per_second:.1f}", "1.00", "", "", ""])
        for run in others:
            same = sum(a == b for a, b in zip(run.tokens, sdpa.tokens, strict=True))
            agree = f"{same} of {len(run.tokens)}"
            gap = gaps.get(id(run))
            name = f"{run.job}, {run.dtype}, {run.attention}"
            if noise is None and same < len(run.tokens):
                failures.append(f"{name}: float32 tokens differ from sdpa's ({agree} requests agree)")
            # Both attentions pick their largest logit, each logit is off by at most `largest`: a parting needs a tie
            # within twice that.
            if gap is not None and gap > 2 * max(noise.largest.values()):
                failures.append(f"{name}: tokens part at a gap of {gap:.3g}, more than rounding explains")
            if not run.calls:
                failures.append(f"{name}: no function of the kernel was called")
            if "block tables" in run.attention and not run.calls["flash_attn_with_kvcache"]:
                failures.append(f"{name}: flash_attn_with_kvcache was not called")
            rows.append(
                [
                    run.job,
                    str(run.dtype)[6:],
                    run.attention,
                    f"{run.tokens_per_second:.1f}",
                    f"{run.tokens_per_second / sdpa.tokens_per_second:.2f}",
                    agree,
                    "" if gap is None else f"{gap:.4f}",
                    ", ".join(f"{f.removeprefix('flash_attn_')} {n}" for f, n in sorted(run.calls.items())),
                ]
            )
    header = ["job", "dtype", "attention", "tokens/s", "x sdpa", "same tokens", "gap", "calls of flash_attn_*"]
    print_table("Generation (gap: float32 logits of the two tokens where requests part)", header, rows)
    return failures


def report_noise(dtype: torch.dtype, noise: LogitNoise) -> list[str]:
    rows = [[a, f"{noise.rms[a]:.5f}", f"{noise.largest[a]:.4f}"] for a in noise.rms]
    print_table(f"{str(dtype)[6:]} logits against the float32 model", ["attention", "rms", "largest"], rows)
    # The rest of the model rounds the same way, so attention may not move the whole by much.
    if noise.rms[KERNEL_FLASH] > 1.5 * noise.rms["sdpa"]:
        return [f"{dtype} logits: rms error {noise.rms[KERNEL_FLASH]:.3g}, sdpa's is {noise.rms['sdpa']:.3g}"]
    return []


def report_errors(probe: Probe, functions: tuple[str, ...]) -> list[str]:
    rows, failures = [], []
    for (name, dtype), (ours, sdpa, largest) in sorted(probe.errors.items(), key=str):
        # At most twice as wrong as PyTorch in this dtype, plus the rounding of the output.
        allowed = 2 * sdpa + torch.finfo(dtype).eps * largest
        if not ours <= allowed:
            failures.append(f"{name}, {dtype}: error {ours:.3g} against float64, allowed {allowed:.3g}")
        rows.append([name, str(dtype)[6:], f"{ours:.2e}", f"{sdpa:.2e}", f"{allowed:.2e}"])
    header = ["function", "dtype", "kernel", "sdpa", "allowed"]
    print_table("Largest attention error against float64, on the model's own q, k, v", header, rows)
    missing = set(functions) - {name for name, _ in probe.errors}
    return failures + [f"{name} was never compared with float64" for name in sorted(missing)]


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    # cuDNN's attention makes a plan for every new length: sdpa would be nine times slower in continuous batching.
    torch.backends.cuda.enable_cudnn_sdp(False)
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={ROOT}")
    device = torch.device(args.device)
    kernel = kernels.get_kernel(KERNEL, version=1, trust_remote_code=True)
    probe = Probe(kernel)

    half_model = load_model(args.model, device)
    config = half_model.config.get_text_config()
    exact_model = load_model(args.model, device).float()
    lengths = (
        torch.logspace(4, torch.tensor(args.max_prompt).log2().item(), args.requests, base=2).round().int().tolist()
    )
    prompts = make_prompts(args.model, config.vocab_size, lengths)
    model_name = args.model or "random Llama"
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    print(
        f"{model_name}: {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"heads {config.num_attention_heads}/{kv_heads}, on {device_name(kernel, device)}\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}, kernels {kernels.__version__}\n"
        f"{args.requests} requests, prompts of {lengths[0]} to {lengths[-1]} tokens, {args.new_tokens} new tokens each"
    )
    if has_windows(half_model):
        print("no block tables: transformers has none for a model with sliding windows")

    failures = []
    for dtype in [getattr(torch, name) for name in args.dtypes]:
        model = exact_model if dtype == torch.float32 else half_model.to(dtype)
        check_model(model, model_name)
        groups = run_all(model, probe, kernel, prompts, args)
        gaps, noise = {}, None
        if dtype != torch.float32:
            noise = measure_noise(model, exact_model, groups[-1][0])
            gaps = {id(run): largest_gap(exact_model, run, sdpa) for sdpa, *runs in groups for run in runs}
        failures += report_runs(groups, gaps, noise)
        if noise:
            failures += report_noise(dtype, noise)
        if args.model:
            print(f"\nContinuation: {AutoTokenizer.from_pretrained(args.model).decode(groups[-1][-1].tokens[0])!r}")
    failures += report_errors(probe, FUNCTIONS[:2] if has_windows(exact_model) else FUNCTIONS)

    print()
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        sys.exit(1)
    print("All checks passed.")


def device_name(kernel, device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({kernel.cpu_isa()}, {torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
