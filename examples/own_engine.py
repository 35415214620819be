"""An engine of one's own in one page: a paged cache, continuous batching, and the kernel called directly.

    make build && .venv/bin/python examples/own_engine.py

A tiny decoder with random weights serves requests of mixed lengths from fewer pages than all of them need together.
Two of the kernel's calls do the work:

    a new prompt   kv_paged_write puts its keys and values into its pages, flash_attn_varlen_func attends within it
    a new token    flash_attn_with_kvcache rotates q and k, appends k and v to the pages and attends, in one call

At the end every token is checked against a dense computation without cache, pages or kernel.
"""

import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import kernels
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 256, 8, 2, 32, 1000
PAGE_SIZE, NUM_PAGES, MAX_LENGTH = 16, 40, 256
NEW_TOKENS = 24


@dataclass
class Request:
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the generated ones

    @property
    def cached(self) -> int:
        """Tokens whose keys are in the cache: all but the newest, which the next step feeds in."""
        return len(self.prompt) + len(self.tokens) - 1


class Decoder:
    """Llama's shape with random weights. How a layer attends is a parameter of `forward`."""

    def __init__(self, device: torch.device):
        generator = torch.Generator().manual_seed(0)

        def matrix(rows, columns):
            return (torch.randn(rows, columns, generator=generator) * rows**-0.5).to(device)

        self.embedding, self.head = matrix(HIDDEN, VOCAB).T, matrix(HIDDEN, VOCAB)
        self.layers = [
            {
                "qkv": matrix(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM),
                "out": matrix(Q_HEADS * HEAD_DIM, HIDDEN),
                "up": matrix(HIDDEN, 4 * HIDDEN),
                "gate": matrix(HIDDEN, 4 * HIDDEN),
                "down": matrix(4 * HIDDEN, HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        angles = torch.outer(torch.arange(MAX_LENGTH), 10000.0 ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def forward(self, tokens, attend):
        """Logits of every token. `attend(layer, q, k, v)` gets and gives [tokens, heads, head_dim]."""
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            qkv = (rms_norm(x, (HIDDEN,)) @ layer["qkv"]).unflatten(-1, (-1, HEAD_DIM))
            q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=-2)
            x = x + attend(index, q, k, v).flatten(-2) @ layer["out"]
            y = rms_norm(x, (HIDDEN,))
            x = x + (silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        return rms_norm(x, (HIDDEN,)) @ self.head

    def rotate(self, x, positions):
        """Rotary embedding, half-split style, of [tokens, heads, head_dim]."""
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Engine:
    def __init__(self, kernel, decoder: Decoder, device: torch.device):
        self.kernel, self.decoder, self.device = kernel, decoder, device
        self.caches = [
            kernel.empty_paged_cache(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.float32, device=device)
            for _ in range(LAYERS)
        ]
        self.free_pages = list(range(NUM_PAGES))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def step(self) -> None:
        """Admit the requests that fit and give each its first token, or one token to every running request."""
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
            self.running += admitted
        else:
            self._decode(self.running)
        for request in [r for r in self.running if len(r.tokens) == NEW_TOKENS]:
            self.running.remove(request)
            self.free_pages += request.pages

    def _admit(self) -> list[Request]:
        admitted = []
        while self.waiting:
            # All pages a request will ever need, so that a running one never has to stop.
            needed = -(-(len(self.waiting[0].prompt) + NEW_TOKENS) // PAGE_SIZE)
            if needed > len(self.free_pages):
                break
            request = self.waiting.popleft()
            request.pages = [self.free_pages.pop() for _ in range(needed)]
            admitted.append(request)
        return admitted

    def _prefill(self, requests: list[Request]) -> None:
        lengths = [len(r.prompt) for r in requests]
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        cu_seqlens = self._int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
        nothing_cached = self._int32([0] * len(requests))
        block_table = self._block_table(requests)

        def attend(layer, q, k, v):
            q, k = self.decoder.rotate(q, positions), self.decoder.rotate(k, positions)
            self.kernel.kv_paged_write(
                k, v, *self.caches[layer], block_table, nothing_cached, cu_seqlens_k_new=cu_seqlens
            )
            return self.kernel.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True
            )

        logits = self.decoder.forward(self._int64([t for r in requests for t in r.prompt]), attend)
        self._append(requests, logits[cu_seqlens[1:].long() - 1])

    def _decode(self, requests: list[Request]) -> None:
        cache_seqlens = self._int32([r.cached for r in requests])
        block_table = self._block_table(requests)

        def attend(layer, q, k, v):
            out = self.kernel.flash_attn_with_kvcache(
                q[:, None],
                *self.caches[layer],
                k[:, None],
                v[:, None],
                rotary_cos=self.decoder.cos,
                rotary_sin=self.decoder.sin,
                rotary_interleaved=False,
                cache_seqlens=cache_seqlens,
                block_table=block_table,
                causal=True,
            )
            return out[:, 0]

        self._append(requests, self.decoder.forward(self._int64([r.tokens[-1] for r in requests]), attend))

    def _append(self, requests: list[Request], logits) -> None:
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.tokens.append(token)

    def _block_table(self, requests: list[Request]):
        widest = max(len(r.pages) for r in requests)
        # The kernel never reads an entry past a request's pages; -1 would show it if it did.
        return self._int32([r.pages + [-1] * (widest - len(r.pages)) for r in requests])

    def _int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _int64(self, values):
        return torch.tensor(values, device=self.device)


def dense_tokens(decoder: Decoder, request: Request, device: torch.device) -> list[int]:
    """The tokens that plain PyTorch picks after each prefix of the request's text."""
    text = torch.tensor(request.prompt + request.tokens[:-1], device=device)
    positions = torch.arange(len(text), device=device)

    def attend(_, q, k, v):
        heads_first = (x.transpose(0, 1)[None] for x in (decoder.rotate(q, positions), decoder.rotate(k, positions), v))
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return decoder.forward(text, attend)[len(request.prompt) - 1 :].argmax(-1).tolist()


@torch.no_grad()
def main() -> None:
    os.environ.setdefault("LOCAL_KERNELS", f"org/paged-attn={Path(__file__).resolve().parent.parent}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = kernels.get_kernel("org/paged-attn", version=1, trust_remote_code=True)
    decoder = Decoder(device)
    engine = Engine(kernel, decoder, device)

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, MAX_LENGTH - NEW_TOKENS, (16,), generator=generator).tolist()
    requests = [Request(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    engine.waiting.extend(requests)

    start, steps, most_running = time.perf_counter(), 0, 0
    while engine.waiting or engine.running:
        engine.step()
        steps += 1
        most_running = max(most_running, len(engine.running))
    seconds = time.perf_counter() - start

    wrong = [i for i, r in enumerate(requests) if r.tokens != dense_tokens(decoder, r, device)]
    speed = sum(len(r.tokens) for r in requests) / seconds
    print(
        f"{len(requests)} requests, prompts of {min(lengths)} to {max(lengths)} tokens, {NEW_TOKENS} new tokens each\n"
        f"{NUM_PAGES} pages of {PAGE_SIZE}: up to {most_running} requests at once, {steps} steps, {speed:.0f} tokens/s"
    )
    if wrong or len(engine.free_pages) != NUM_PAGES:
        sys.exit(f"FAILED: tokens of requests {wrong} differ, {len(engine.free_pages)} of {NUM_PAGES} pages are free")
    print("Every token equals the dense computation's, every page is free again.")


if __name__ == "__main__":
    main()
