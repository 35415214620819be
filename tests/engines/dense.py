"""Dense attention in float64, what the engines' tests compare with."""

import torch


def dense(q, k, v, seen, scale, softcap=0.0, sinks=None, bias=None):
    """(out, lse) of q (tokens, q_heads, dim) to k, v (keys, kv_heads, dim); seen (tokens, keys), bias (tokens, q_heads,
    keys)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,khd->thk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1) if sinks is None else torch.logaddexp(scores.logsumexp(-1), sinks.double())
    return torch.einsum("thk,khd->thd", torch.exp(scores - lse[..., None]), v), lse


def causal(length, new, window=-1, chunk=None):
    """Which of length + new keys the new tokens see."""
    position = torch.arange(length, length + new)[:, None]
    key = torch.arange(length + new)
    seen = key <= position
    if window >= 0:
        seen &= key >= position - window
    if chunk is not None:
        seen &= key // chunk == position // chunk
    return seen
