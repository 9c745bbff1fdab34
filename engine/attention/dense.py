"""Attention with soft-capped logits or sinks, which torch's fused kernels don't know."""

from __future__ import annotations

import torch

__all__ = ["dense_attention"]

QUERY_BLOCK = 128
"""Queries whose scores exist at once; bounds the memory to heads x block x keys."""


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one sequence with materialised scores, a block of queries at a time.

    q (kv_heads, group, T, k_dim), k (kv_heads, L, k_dim), v (kv_heads, L, v_dim). mask: added to the scores, broadcast to
    (T, L). is_causal: query i sees keys up to i. sinks (kv_heads, group): a logit of each query head, which takes part in the
    softmax and gives nothing. Returns (kv_heads, group, T, v_dim).
    """
    heads, group, queries, _ = q.shape
    out = q.new_empty(heads, group, queries, v.shape[-1])
    for begin in range(0, queries, QUERY_BLOCK):
        block = q[:, :, begin : begin + QUERY_BLOCK]
        size = block.shape[2]
        scores = torch.bmm(block.reshape(heads, group * size, -1), k.transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(heads, group, size, -1)
        if mask is not None:
            scores += mask[begin : begin + size]
        if is_causal:
            scores += torch.full_like(scores[0, 0], -torch.inf).triu_(begin + 1)
        weights = _softmax(scores, sinks).to(v.dtype).view(heads, group * size, -1)
        out[:, :, begin : begin + size] = torch.bmm(weights, v).view(heads, group, size, -1)
    return out


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over keys, with a sink logit in the denominator."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
