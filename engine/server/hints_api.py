"""Hints for the cache: bring a prefix up, keep it for a while, let it go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from fastapi import APIRouter, Response
from pydantic import Field, model_validator

from engine.messages import CacheHint
from engine.server.chat_api import encode_chat
from engine.server.depends import ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.responses import json_response
from engine.server.schemas import ChatBody, Messages
from engine.server.tool_schemas import MAX_TOOLS, Tool
from engine.server.values import Key, StrictBody, TokenIds, Ttl

if TYPE_CHECKING:
    from engine.server.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/cache", tags=["cache"])


class PrefixBody(StrictBody):
    """A prefix, as text, as a chat (without what begins the answer) or as token ids."""

    text: Annotated[str, Field(min_length=1)] | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    input_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    cache_salt: Key = ""
    extra_key: Key = ""

    @model_validator(mode="after")
    def _one_prefix(self) -> Self:
        if sum(given is not None for given in (self.text, self.messages, self.input_ids)) != 1:
            raise ValueError("give one of text, messages and input_ids")
        return self


class PinBody(PrefixBody):
    """A prefix to keep, and for how many seconds."""

    ttl_s: Ttl


async def _ids(service: Service, body: PrefixBody) -> list[int]:
    """Token ids of a prefix. Raises ApiError."""
    if body.messages is not None:
        options = {"add_generation_prompt": False}
        return await encode_chat(service, ChatBody(messages=body.messages, tools=body.tools, chat_template_kwargs=options))
    prompt = body.text if body.text is not None else body.input_ids
    assert prompt is not None, "the validator lets no body without a prefix pass"
    return await service.encode(prompt, param="input_ids" if body.text is None else "text")


async def _follow(service: Service, body: PrefixBody, op: Literal["prefetch", "pin", "demote"], ttl_s: float = 0.0) -> Response:
    ids = await _ids(service, body)
    hint = CacheHint("", op, ids, body.cache_salt, body.extra_key, ttl_s)
    return json_response(await service.client.hint(hint))


@router.post("/prefetch")
async def prefetch(body: PrefixBody, service: ServiceDep) -> Response:
    """Begin to bring a prefix from disk to host memory; says how much of it is in memory already."""
    return await _follow(service, body, "prefetch")


@router.post("/pin")
async def pin(body: PinBody, service: ServiceDep) -> Response:
    """Keep what is in memory of a prefix where it is for a while; says how much that is."""
    return await _follow(service, body, "pin", body.ttl_s)


@router.post("/demote")
async def demote(body: PrefixBody, service: ServiceDep) -> Response:
    """Take a prefix, and what continues it, off the device where a lower tier has it; says how much went."""
    return await _follow(service, body, "demote")
