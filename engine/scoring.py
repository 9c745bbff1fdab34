"""Log-probabilities of prompt tokens, from the logits of the steps that compute the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.messages import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Chunk
    from engine.request import Request
    from engine.scheduler import Step

__all__ = ["score_prompts", "token_logprobs"]


def score_prompts(step: Step, logits: torch.Tensor) -> torch.Tensor:
    """Note the log-probabilities of prompt tokens for the requests that ask; return the last row of each chunk.

    logits: (rows, vocab), each chunk's `logits` rows. Called before the scheduler notes the step as computed.
    """
    chunks = step.batch.chunks
    if logits.shape[0] == len(chunks):
        lasts = logits
    else:
        ends = torch.tensor([chunk.logits for chunk in chunks], device=logits.device).cumsum(0)
        lasts = logits[ends - 1]
    at = 0
    for request, chunk in zip(step.requests, chunks, strict=True):
        if request.prompt_logprobs is not None and request.unscored_from < chunk.end:
            _score(request, request.prompt_logprobs, chunk, logits[at : at + chunk.logits])
        at += chunk.logits
    return lasts


def _score(request: Request, done: list[TokenLogprobs], chunk: Chunk, logits: torch.Tensor) -> None:
    """Score the prompt tokens that follow the positions [unscored_from, chunk.end)."""
    first = request.unscored_from
    assert first == chunk.end - logits.shape[0], "logits begin where scoring left off"
    end = min(chunk.end + 1, request.lease.prompt_tokens)
    targets = request.tokens(first + 1, end).tolist()
    done += token_logprobs(logits[: len(targets)], targets, request.message.top_logprobs or 0)
    request.lease.max_cached_tokens = request.unscored_from


def token_logprobs(logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probability of a target a row of logits (rows, vocab), with the `top` likeliest tokens of each row."""
    if not targets:
        return []
    rows = logits.log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(targets, device=rows.device)[:, None])[:, 0].tolist()
    values, tokens = rows.topk(min(top, rows.shape[1]))
    tops = [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(p, best) for p, best in zip(chosen, tops, strict=True)]
