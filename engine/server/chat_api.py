"""OpenAI's endpoint /v1/chat/completions: chats through the model's template, with tools."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from engine.messages import PinHint
from engine.server.depends import RoutingKey, ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.errors import ApiError
from engine.server.logprobs import chat_logprobs
from engine.server.order import Order, counted
from engine.server.responses import (
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    Delta,
    Message,
    ToolCallItem,
    json_response,
    now_s,
)
from engine.server.schemas import ChatBody  # noqa: TC001 - FastAPI reads the annotation
from engine.server.service import Answer, collect, merge
from engine.server.streaming import EventStream, primed, unless_gone
from engine.tools import detect_format, make_parser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from engine.server.service import Piece, Service
    from engine.tools import Parsed, ToolCall, ToolParser

__all__ = ["encode_chat", "router"]

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: ServiceDep, routing_key: RoutingKey = "") -> Response:
    """Answer a chat, whole or as a stream."""
    ids = await encode_chat(service, body)
    budget = service.answer_budget(len(ids), body.asked_tokens, param="messages")
    pin = await _pin(service, body, ids)
    order = Order(service, "chatcmpl-" + uuid.uuid4().hex, body, [ids], budget, body.top, pin=pin, routing_key=routing_key)
    service.admit(order.jobs)
    if body.stream:
        return EventStream(await unless_gone(request, primed(_events(order, body))))
    answers = await unless_gone(request, collect(service, order.jobs))
    choices = [_choice(service, body, index, answer) for index, answer in enumerate(answers)]
    return json_response(ChatResponse(order.id, now_s(), service.config.name, choices, order.usage(answers)))


async def encode_chat(service: Service, body: ChatBody) -> list[int]:
    """Token ids of a chat, its tools included. Raises ApiError."""
    messages = [message.for_template for message in body.messages]
    options = dict(body.chat_template_kwargs)
    if body.offered:
        if "tools" not in service.tokenizer.chat_template:
            raise ApiError(400, "this model's chat template has no place for tools", param="tools")
        options["tools"] = [tool.for_template for tool in body.offered]

    def encode() -> list[int]:
        return service.tokenizer.encode_chat(messages, options=options, continue_final_message=body.continue_final_message)

    text = "".join(message["content"] for message in messages)
    return await service.tokenize(text, encode, param="messages", parts=len(messages) + len(body.offered))


async def _pin(service: Service, body: ChatBody, ids: list[int]) -> PinHint | None:
    """What `cache_control` asks to keep of a prompt: as far as the marked messages alone begin like it."""
    if (kept := body.kept) is None:
        return None
    count, ttl_s = kept
    options = {**body.chat_template_kwargs, "add_generation_prompt": False}
    change = {"messages": body.messages[:count], "chat_template_kwargs": options, "continue_final_message": False}
    prefix = await encode_chat(service, body.model_copy(update=change))
    same = next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))
    return PinHint(same, ttl_s) if same else None


def _parser(service: Service, body: ChatBody) -> ToolParser:
    """What finds the calls in one answer."""
    names = frozenset(tool.function.name for tool in body.offered)
    if body.must_call:
        return make_parser("required", names)
    given = service.config.tool_call_parser
    kind = detect_format(service.tokenizer.chat_template) if given == "auto" else given
    return make_parser(kind if names else "none", names)


def _choice(service: Service, body: ChatBody, index: int, answer: Answer) -> ChatChoice:
    """A whole answer."""
    parser = _parser(service, body)
    parts = (parser.feed(answer.text), parser.finish())
    text, calls = "".join(part.text for part in parts), [call for part in parts for call in part.calls]
    logprobs = chat_logprobs(service.tokenizer, answer.token_ids, answer.logprobs)
    if not calls:
        return ChatChoice(index, Message(text), answer.finish_reason, logprobs, answer.matched)
    items = [_item(call, UNSET) for call in calls]
    message = Message(text or None, tool_calls=items)
    return ChatChoice(index, message, _reason(answer.finish_reason, len(calls)), logprobs, answer.matched)


def _item(call: ToolCall, index: int | msgspec.UnsetType) -> ToolCallItem:
    return ToolCallItem("call_" + uuid.uuid4().hex[:24], CalledTool(call.name, call.arguments), index)


def _reason(reason: str | None, calls: int) -> str | None:
    """Why an answer ended, if it holds `calls` calls."""
    return "tool_calls" if calls and reason == "stop" else reason


class _Talk:
    """One answer of a stream: what of it has been sent."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._begun = False
        self.calls = 0

    def deltas(self, piece: Piece) -> Iterator[Delta]:
        """What a piece adds to the message; its role first. A piece with log-probabilities adds at least an empty text."""
        parsed = self._parser.feed(piece.text)
        if not self._begun:
            self._begun = True
            yield Delta("assistant", parsed.text)
        elif parsed.text or piece.logprobs is not None:
            yield Delta(content=parsed.text)
        yield from self._called(parsed)
        if piece.finish_reason is not None:
            rest = self._parser.finish()
            if rest.text:
                yield Delta(content=rest.text)
            yield from self._called(rest)

    def _called(self, parsed: Parsed) -> Iterator[Delta]:
        for call in parsed.calls:
            yield Delta(tool_calls=[_item(call, self.calls)])
            self.calls += 1


async def _events(order: Order, body: ChatBody) -> AsyncGenerator[bytes, None]:
    """Events of a chat: each answer's role with its first piece, pieces, finish; then the usage."""
    answers = [Answer.empty() for _ in order.jobs]
    talks = [_Talk(_parser(order.service, body)) for _ in answers]
    created, model, tokenizer = now_s(), order.service.config.name, order.service.tokenizer
    usage = None if body.wants_usage else UNSET

    def event(choices: Sequence[ChatChunkChoice]) -> bytes:
        return msgspec.json.encode(ChatChunk(order.id, created, model, list(choices), usage))

    async with aclosing(merge(order.service, order.jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(counted(piece))
            logprobs = chat_logprobs(tokenizer, piece.token_ids, piece.logprobs)
            for delta in talks[index].deltas(piece):
                yield event([ChatChunkChoice(index, delta, None, logprobs)])
                logprobs = None  # with the first
            if piece.finish_reason is not None:
                yield event([ChatChunkChoice(index, Delta(), _reason(piece.finish_reason, talks[index].calls))])
    if body.wants_usage:
        yield msgspec.json.encode(ChatChunk(order.id, created, model, [], order.usage(answers)))
