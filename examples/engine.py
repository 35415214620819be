"""An LLM engine in one file: what a server does around `flash_attn_with_kvcache`.

    make build && .venv/bin/python examples/engine.py        a small random Llama, every token checked
    MODEL=<hub id> .venv/bin/python examples/engine.py       a real Llama
    .venv/bin/python examples/engine.py --help               sizes, device, a trace of the steps

Requests wait in a queue. Each step takes one batch: one token of every request that generates, and pieces of the
prompts of the others (chunked prefill), up to a number of tokens. One attention call per layer serves the whole batch:
it rotates q and k, appends k and v to the pages, and attends. Prompts that begin alike share pages. On a GPU, steps
without prompts are replayed from CUDA graphs.

    queue -> schedule() -> forward(): per layer [norm, qkv, attention over pages, norm, mlp] -> sample() -> tokens out
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import kernels
import torch
from torch.nn.functional import rms_norm, silu
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PAGE_SIZE = 16
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # requests of a captured step


@dataclass(eq=False)
class Request:
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0  # 0: the most probable token
    tokens: list[int] = field(default_factory=list)  # the prompt, then what was generated
    cached: int = 0  # how many of them have their keys and values in the cache
    pages: list[int] = field(default_factory=list)
    number: int = -1  # in the order of arrival

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most_pages(self) -> int:
        return -(-(len(self.prompt) + self.max_new_tokens) // PAGE_SIZE)

    @property
    def done(self) -> bool:
        return len(self.generated) == self.max_new_tokens


class PagePool:
    """Which pages are free, who shares the others, and which text a full page holds.

    A page's text is named by a number: one for each different (name of the page before it, tokens of the page). A free
    page keeps its text until it is needed for another, so that a later prompt may find it.
    """

    def __init__(self, num_pages: int):
        self.free = dict.fromkeys(range(num_pages))  # an ordered set; the page freed first is taken first
        self.owners = [0] * num_pages
        self.page_of_text: dict[tuple, tuple[int, int]] = {}  # (name before, tokens) -> (page, name)
        self.text_of_page: dict[int, tuple] = {}
        self.names = 0

    def take(self) -> int:
        page = next(iter(self.free))
        del self.free[page]
        self.page_of_text.pop(self.text_of_page.pop(page, None), None)
        self.owners[page] = 1
        return page

    def release(self, page: int) -> None:
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.free[page] = None

    def find(self, tokens: list[int]) -> list[int]:
        """The pages that hold the beginning of a prompt, without its last token: its logits must be computed."""
        pages, name = [], 0
        for begin in range(0, len(tokens) - PAGE_SIZE, PAGE_SIZE):
            page, name = self.page_of_text.get((name, tuple(tokens[begin : begin + PAGE_SIZE])), (None, 0))
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self.free.pop(page, None)
            self.owners[page] += 1

    def remember(self, tokens: list[int], pages: list[int]) -> None:
        """Names the full pages of a prompt, now that their keys are written."""
        name = 0
        for index, page in enumerate(pages[: len(tokens) // PAGE_SIZE]):
            text = (name, tuple(tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]))
            if text not in self.page_of_text:
                self.names += 1
                self.page_of_text[text] = (page, self.names)
                self.text_of_page[page] = text
            name = self.page_of_text[text][1]


class Weights:
    """The tensors of a transformers Llama, with those of q, k and v joined."""

    def __init__(self, model: LlamaForCausalLM, max_length: int):
        config = model.config
        # Another model, or a Llama with biases, has weights that forward() does not read: its tokens would be wrong.
        is_llama = type(model) is LlamaForCausalLM
        if not (is_llama and config.hidden_act == "silu" and not config.attention_bias and not config.mlp_bias):
            kind = type(model).__name__ + (" with another MLP or biases" if is_llama else "")
            raise ValueError(f"model: expected a LlamaForCausalLM with silu and without biases, got {kind}")
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.embedding, self.norm, self.head = model.model.embed_tokens, model.model.norm.weight, model.lm_head.weight
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
            mlps = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
            self.layers.append((*norms, qkv, attention.o_proj.weight, *mlps))
            # The joined copy replaces the originals.
            attention.q_proj = attention.k_proj = attention.v_proj = None
        positions = torch.arange(max_length, device=qkv.device)[None]
        cos, sin = model.model.rotary_emb(qkv, positions)
        self.cos, self.sin = (x[0, :, : self.head_dim // 2].contiguous() for x in (cos, sin))


@dataclass
class Batch:
    """What a step works on, as tensors. Without cu_seqlens every request has one token."""

    tokens: torch.Tensor  # (total,)
    cache_seqlens: torch.Tensor  # (requests,) keys before this step
    block_table: torch.Tensor
    temperature: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int = 1


class Engine:
    def __init__(self, kernel, model: LlamaForCausalLM, num_pages: int, max_length: int, step_tokens: int = 2048):
        self.kernel, self.max_length, self.step_tokens = kernel, max_length, step_tokens
        self.device, self.dtype = model.device, model.dtype
        self.weights = Weights(model, max_length)
        w = self.weights
        self.caches = [
            kernel.empty_paged_cache(num_pages, PAGE_SIZE, w.kv_heads, w.head_dim, dtype=self.dtype, device=self.device)
            for _ in w.layers
        ]
        self.pool = PagePool(num_pages)
        self.max_pages = -(-max_length // PAGE_SIZE)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.graphs: dict[int, tuple] = {}
        self.arrived = 0
        self.trace: list[dict] = []

    def run(self, requests: list[Request]) -> Iterator[tuple[Request, int]]:
        """Serves the requests and yields each token as it comes."""
        for number, request in enumerate(requests, self.arrived):
            length = len(request.prompt) + request.max_new_tokens
            size = f"request {number} of {len(request.prompt)} + {request.max_new_tokens} tokens"
            if length > self.max_length:
                raise ValueError(f"max_length: expected at least {length} for {size}, got {self.max_length}")
            if request.most_pages > len(self.pool.owners):
                raise ValueError(
                    f"num_pages: expected at least {request.most_pages} for {size}, got {len(self.pool.owners)}"
                )
        for request in requests:
            request.number = self.arrived
            self.arrived += 1
            self.waiting.append(request)
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[tuple[Request, int]]:
        start = time.perf_counter()
        counts = self.schedule()
        sampled = self.compute(counts)
        used_pages = len(self.pool.owners) - len(self.pool.free)
        news = []
        for (request, count), token in zip(counts.items(), sampled, strict=True):
            request.cached += count
            if request.cached < len(request.tokens):
                continue  # more of the prompt is to come
            if not request.generated:
                self.pool.remember(request.prompt, request.pages)
            request.tokens.append(token)
            news.append((request, token))
            if request.done:
                self.running.remove(request)
                for page in request.pages:
                    self.pool.release(page)
        seconds = time.perf_counter() - start
        tokens = {request.number: count for request, count in counts.items()}
        self.trace.append({"seconds": seconds, "tokens": tokens, "pages": used_pages, "waiting": len(self.waiting)})
        return news

    def schedule(self) -> dict[Request, int]:
        """How many tokens of each request this step computes. Requests that generate come first."""
        self.running.sort(key=lambda request: len(request.tokens) - request.cached > 1)
        counts, left = {}, self.step_tokens
        while True:
            for request in self.running[len(counts) :]:
                count = min(len(request.tokens) - request.cached, left)
                if count == 0:
                    return counts
                counts[request] = count
                left -= count
            if not self.waiting or left == 0 or not self.admit(self.waiting[0]):
                return counts
            self.running.append(self.waiting.popleft())

    def admit(self, request: Request) -> bool:
        """Takes all pages a request will ever need, so that a running one never has to stop."""
        shared = self.pool.find(request.prompt)
        needed = request.most_pages - len(shared)
        if needed > len(self.pool.free) - sum(self.pool.owners[page] == 0 for page in shared):
            return False
        self.pool.share(shared)
        request.tokens = list(request.prompt)
        request.cached = len(shared) * PAGE_SIZE
        request.pages = shared + [self.pool.take() for _ in range(needed)]
        return True

    def compute(self, counts: dict[Request, int]) -> list[int]:
        """The next token of every request (of no use where its prompt goes on)."""
        requests = list(counts)
        if self.device.type == "cuda" and max(counts.values()) == 1 and len(requests) <= GRAPH_SIZES[-1]:
            return self.replay(requests)
        starts = [0, *torch.tensor(list(counts.values())).cumsum(0).tolist()]
        batch = Batch(
            self.tensor([t for r in requests for t in r.tokens[r.cached : r.cached + counts[r]]], torch.int64),
            self.tensor([r.cached for r in requests]),
            self.tensor([self.table_row(r) for r in requests]),
            self.tensor([r.temperature for r in requests], torch.float32),
            cu_seqlens=self.tensor(starts),
            max_seqlen=max(counts.values()),
        )
        return self.forward(batch).tolist()

    def forward(self, batch: Batch) -> torch.Tensor:
        w = self.weights
        x = w.embedding(batch.tokens)
        for caches, (norm, mlp_norm, qkv, out, gate, up, down) in zip(self.caches, w.layers, strict=True):
            y = rms_norm(x, norm.shape, norm, w.eps)
            heads = (y @ qkv.T).unflatten(-1, (-1, w.head_dim))
            y = self.attend(batch, caches, *heads.split([w.q_heads, w.kv_heads, w.kv_heads], dim=-2))
            x = torch.addmm(x, y, out.T)  # x + y @ out.T in one kernel
            y = rms_norm(x, mlp_norm.shape, mlp_norm, w.eps)
            x = torch.addmm(x, silu(y @ gate.T) * (y @ up.T), down.T)
        if batch.cu_seqlens is not None:
            x = x[batch.cu_seqlens[1:].long() - 1]
        return sample(rms_norm(x, w.norm.shape, w.norm, w.eps) @ w.head.T, batch.temperature)

    def attend(self, batch: Batch, caches, q, k, v) -> torch.Tensor:
        """Rotates q and k, appends k and v to the pages, attends: one call for prompts and single tokens together."""
        if batch.cu_seqlens is None:
            q, k, v = q[:, None], k[:, None], v[:, None]
        out = self.kernel.flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=self.weights.cos, rotary_sin=self.weights.sin, rotary_interleaved=False,
            cache_seqlens=batch.cache_seqlens, block_table=batch.block_table, causal=True,
            cu_seqlens_q=batch.cu_seqlens, cu_seqlens_k_new=batch.cu_seqlens, max_seqlen_q=batch.max_seqlen,
        )  # fmt: skip
        return out.flatten(-2) if batch.cu_seqlens is not None else out[:, 0].flatten(-2)

    def replay(self, requests: list[Request]) -> list[int]:
        """One token each, from the graph of the next larger batch."""
        size = next(size for size in GRAPH_SIZES if size >= len(requests))
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        graph, batch, sampled, page_lists = self.graphs[size]
        batch.tokens[: len(requests)].copy_(self.tensor([r.tokens[-1] for r in requests], torch.int64))
        # An idle row: no keys after this token's append.
        seqlens = [r.cached for r in requests] + [-1] * (size - len(requests))
        batch.cache_seqlens.copy_(self.tensor(seqlens))
        batch.temperature[: len(requests)].copy_(self.tensor([r.temperature for r in requests], torch.float32))
        pages = [r.pages for r in requests]
        if page_lists[:] != pages:
            page_lists[:] = pages
            batch.block_table[: len(requests)].copy_(self.tensor([self.table_row(r) for r in requests]))
        graph.replay()
        return sampled[: len(requests)].tolist()

    def capture(self, size: int) -> tuple:
        batch = Batch(
            torch.zeros(size, dtype=torch.int64, device=self.device),
            self.tensor([-1] * size),
            torch.zeros(size, self.max_pages, dtype=torch.int32, device=self.device),
            torch.zeros(size, device=self.device),
        )
        self.forward(batch)  # what is set up once must not be in the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampled = self.forward(batch)
        return graph, batch, sampled, []

    def table_row(self, request: Request) -> list[int]:
        # The kernel never reads an entry past a request's pages; -1 would show it if it did.
        return request.pages + [-1] * (self.max_pages - len(request.pages))

    def tensor(self, values, dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def sample(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Tokens with probability softmax(logits / temperature): the largest logit after adding Gumbel noise."""
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    return (logits.float() + temperature[:, None] * noise).argmax(-1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="hub id, or 8b: its shape, random weights")
    parser.add_argument("--layers", type=int, default=32, help="of the shape 8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, nargs=2, default=(1, 200), help="shortest and longest prompt")
    parser.add_argument("--shared", type=int, default=40, help="tokens that all prompts begin with")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--step-tokens", type=int, default=256, help="most tokens of a step")
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--no-check", action="store_true", help="do not compare with transformers' own generate()")
    parser.add_argument("--trace", type=Path, help="write the steps to this file as JSON")
    return parser.parse_args()


def load_model(args: argparse.Namespace) -> LlamaForCausalLM:
    dtype = getattr(torch, args.dtype)
    if args.model and args.model != "8b":
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
                 "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
    if args.model == "8b":
        shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": args.layers,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    # A larger spread than usual, so that tokens depend on what attention returns.
    config = LlamaConfig(**shape, max_position_embeddings=1 << 17, rope_theta=5e5, initializer_range=0.06)
    torch.manual_seed(0)
    with torch.device(args.device):
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def expected_tokens(model: LlamaForCausalLM, request: Request) -> list[int]:
    """What transformers generates for this prompt alone."""
    prompt = torch.tensor([request.prompt], device=model.device)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False,
        min_new_tokens=request.max_new_tokens, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(request.prompt) :].tolist()


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")
    kernel = kernels.get_kernel("org/paged-attn", version=1, backend=args.device, trust_remote_code=True)
    model = load_model(args).eval()

    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    shared = torch.randint(vocabulary, (args.shared,), generator=generator).tolist()
    lengths = torch.randint(args.prompt[0], args.prompt[1] + 1, (args.requests,), generator=generator).tolist()
    requests = [
        Request(shared + torch.randint(vocabulary, (n,), generator=generator).tolist(), args.new_tokens,
                args.temperature) for n in lengths
    ]  # fmt: skip
    check = not args.no_check and args.temperature == 0 and args.dtype == "float32"
    expected = [expected_tokens(model, request) for request in tqdm(requests, "transformers")] if check else None

    longest = args.shared + args.prompt[1] + args.new_tokens
    engine = Engine(kernel, model, args.pages, longest, args.step_tokens)
    if args.device == "cuda":  # what is built once: graphs, the libraries' own choices
        warm = [Request(r.prompt, 2) for r in requests]
        for _ in engine.run(warm):
            pass
        engine.pool = PagePool(args.pages)
        engine.trace.clear()
        engine.arrived = 0
    start, first_tokens = time.perf_counter(), {}
    total = sum(r.max_new_tokens for r in requests)
    for request, _ in tqdm(engine.run(requests), "engine", total):
        first_tokens.setdefault(request, time.perf_counter() - start)
    seconds = time.perf_counter() - start

    steps = engine.trace
    decode = sorted(s["seconds"] for s in steps if max(s["tokens"].values()) == 1)
    computed = sum(sum(s["tokens"].values()) for s in steps)
    print(
        f"{len(requests)} requests, prompts of {args.shared + min(lengths)} to {args.shared + max(lengths)} tokens, "
        f"{args.new_tokens} new tokens each, {args.pages} pages of {PAGE_SIZE}\n"
        f"{total / seconds:.0f} new tokens/s, {len(steps)} steps, {computed} tokens computed; first token after "
        f"{sorted(first_tokens.values())[len(requests) // 2] * 1e3:.0f} ms (median); a step without prompts takes "
        f"{decode[len(decode) // 2] * 1e3 if decode else 0:.2f} ms (median)"
    )
    if args.trace:
        args.trace.write_text(json.dumps(steps))
    if expected is not None:
        wrong = [i for i, r in enumerate(requests) if r.generated != expected[i]]
        if wrong or len(engine.pool.free) != args.pages:
            sys.exit(f"FAILED: tokens of requests {wrong} differ, {len(engine.pool.free)} of {args.pages} pages free")
        print("Every token equals transformers' own, every page is free again.")


if __name__ == "__main__":
    main()
