"""What OpenAI's endpoints answer, as structs that msgspec writes. Fields that are UNSET are left out of the JSON."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from engine.messages import CachedTokens  # noqa: TC001 - msgspec reads the annotation

__all__ = [
    "CalledTool",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatLogprobs",
    "ChatResponse",
    "ChatTokenLogprob",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "Delta",
    "Message",
    "ModelCard",
    "ModelList",
    "PromptDetails",
    "ToolCallItem",
    "TopLogprob",
    "Usage",
    "json_response",
    "now_s",
    "usage_of",
]


def json_response(value: object) -> Response:
    """A response of a struct, or of plain data."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def now_s() -> int:
    """Unix time, as in `created`."""
    return int(time.time())


class PromptDetails(msgspec.Struct, frozen=True):
    """How much of the prompt was reused; by tier with --enable-cache-report."""

    cached_tokens: int
    cached_tokens_details: CachedTokens | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; of its prompts once, however many answers each has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(prompt_tokens: int, completion_tokens: int, cached: CachedTokens, *, by_tier: bool) -> Usage:
    """Make the usage of a request."""
    details = PromptDetails(cached.total, cached if by_tier else UNSET)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that was likely at its place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledTool(msgspec.Struct, frozen=True):
    """The function of a call; arguments are JSON text."""

    name: str
    arguments: str


class ToolCallItem(msgspec.Struct, frozen=True):
    """A call in an answer. `index` counts an answer's calls in a stream."""

    id: str
    function: CalledTool
    index: int | UnsetType = UNSET
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """The assistant's message; without content if it is nothing but calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallItem] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: Message
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    matched_stop: str | int | None = None


class ChatResponse(msgspec.Struct, frozen=True):
    """POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallItem] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of a completion, or its part of a chunk."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    matched_stop: str | int | None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    """POST /v1/completions, whole or as an event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "hicache"
    permission: list[Any] = []


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
