"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.messages import TokenLogprobs
    from engine.tokenizer import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs", "native_input_logprobs", "native_logprobs", "native_top_logprobs"]

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
    """As in chats: one object a token."""
    if logprobs is None:
        return None
    content = []
    for token_id, entry in zip(ids, logprobs, strict=True):
        raw = tokenizer.token_bytes(token_id)
        top = [TopLogprob(_text(tokenizer, i), _finite(p), list(tokenizer.token_bytes(i))) for i, p in entry.top]
        content.append(ChatTokenLogprob(_text(tokenizer, token_id), _finite(entry.logprob), list(raw), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, *, offset: int
) -> CompletionLogprobs | None:
    """As in completions: columns. offset: characters of the answer before these tokens.

    ids: as many as logprobs, or one more before them, which has none: the first of a prompt.
    """
    if logprobs is None:
        return None
    tokens = [_text(tokenizer, token_id) for token_id in ids]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    first: list[None] = [None] * (len(ids) - len(logprobs))
    top = [{_text(tokenizer, i): _finite(p) for i, p in entry.top} for entry in logprobs]
    return CompletionLogprobs(tokens, [*first, *(_finite(entry.logprob) for entry in logprobs)], [*first, *top], offsets)


def native_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: Tokenizer | None
) -> list[tuple[float, int, str | None]]:
    """As in SGLang: (log-probability, id, text or None) a token."""
    return [(_finite(entry.logprob), i, _text_or_none(text, i)) for i, entry in zip(ids, logprobs, strict=True)]


def native_input_logprobs(
    ids: Sequence[int], start: int, logprobs: Sequence[TokenLogprobs], text: Tokenizer | None
) -> list[tuple[float | None, int, str | None]]:
    """As in SGLang, of a prompt's tokens after position `start`; the very first token of a prompt has none."""
    first: list[tuple[None, int, str | None]] = [(None, ids[0], _text_or_none(text, ids[0]))] if start == 0 else []
    return [*first, *native_logprobs(ids[start + 1 :], logprobs, text)]


def native_top_logprobs(logprobs: Sequence[TokenLogprobs], text: Tokenizer | None) -> list[list[tuple[Any, ...]]]:
    """As in SGLang: the likeliest tokens at each place, as (log-probability, id, text or None)."""
    return [[(_finite(p), i, _text_or_none(text, i)) for i, p in entry.top] for entry in logprobs]


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _text_or_none(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else _text(tokenizer, token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
