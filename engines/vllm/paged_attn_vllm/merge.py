"""Merging partial results, as vLLM calls it."""

import torch

from .backend import kernel


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """In place of `vllm.v1.attention.ops.merge_attn_states`: writes into `output` (tokens, heads, head_size) and
    `output_lse` (heads, tokens). Tokens past `prefill_tokens_with_context` have no prefix. An lse of inf says, as -inf,
    that a part is empty."""
    if output_scale is not None:
        raise ValueError("output_scale: expected None (the kernel does not quantize its output), got a tensor")
    merged = output.shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    kernel().merge_attn_states(
        prefix_output[:merged],
        _empty_is_minus_inf(prefix_lse[:, :merged]),
        suffix_output[:merged],
        _empty_is_minus_inf(suffix_lse[:, :merged]),
        out=output[:merged],
        lse=None if output_lse is None else output_lse[:, :merged],
    )
    # Only now: a refused call has written nothing.
    output[merged:] = suffix_output[merged:]
    if output_lse is not None:
        output_lse[:, merged:] = suffix_lse[:, merged:]


def _empty_is_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == torch.inf, -torch.inf, lse)
