"""OpenAI's endpoint /v1/responses, on top of chats."""

from __future__ import annotations

import itertools
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from engine.server.chat_api import encode_chat
from engine.server.depends import RoutingKey, ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.order import Order, counted
from engine.server.responses import json_response, now_s
from engine.server.responses_schemas import (
    CachedInput,
    Event,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
)
from engine.server.service import Answer, collect, merge
from engine.server.streaming import NamedEventStream, primed, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["router"]

router = APIRouter(tags=["openai"])


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request, service: ServiceDep, routing_key: RoutingKey = "") -> Response:
    """Answer a text or a conversation, whole or as a stream of events."""
    chat = body.as_chat
    ids = await encode_chat(service, chat)
    budget = service.answer_budget(len(ids), chat.asked_tokens, param="input")
    order = Order(service, "resp_" + uuid.uuid4().hex, chat, [ids], budget, None, routing_key=routing_key)
    service.admit(order.jobs)
    reply = _Reply(order, body, now_s(), "msg_" + uuid.uuid4().hex)
    if body.stream:
        return NamedEventStream(await unless_gone(request, primed(_events(reply))))
    answers = await unless_gone(request, collect(service, order.jobs))
    return json_response(reply.finished(answers[0]))


@dataclass(frozen=True)
class _Reply:
    """A response on its way."""

    order: Order
    body: ResponsesBody
    created_s: int
    item_id: str

    def item(self, text: str, status: Literal["completed", "incomplete"]) -> OutputMessage:
        """The message that a finished response consists of."""
        return OutputMessage(self.item_id, status, [OutputText(text)])

    def begun(self) -> ResponseObject:
        """The response before its first token."""
        return self._object("in_progress", [])

    def finished(self, answer: Answer) -> ResponseObject:
        """The response with its answer."""
        status = self.status(answer)
        used = self.order.usage([answer])
        usage = ResponseUsage(
            used.prompt_tokens,
            CachedInput(used.prompt_tokens_details.cached_tokens),
            used.completion_tokens,
            used.total_tokens,
        )
        reason = {"length": "max_output_tokens"}.get(answer.finish_reason or "", "aborted")
        details = None if status == "completed" else {"reason": reason}
        return self._object(status, [self.item(answer.text, status)], usage=usage, incomplete_details=details)

    def status(self, answer: Answer) -> Literal["completed", "incomplete"]:
        """Whether the answer came to its end."""
        return "completed" if answer.finish_reason == "stop" else "incomplete"

    def _object(self, status: Any, output: list[OutputMessage], **more: Any) -> ResponseObject:
        body = self.body
        return ResponseObject(
            id=self.order.id,
            created_at=self.created_s,
            model=self.order.service.config.name,
            status=status,
            output=output,
            instructions=body.instructions,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            **more,
        )


async def _events(reply: _Reply) -> AsyncGenerator[bytes, None]:
    """Events of a response: created, item and part begun, pieces of text, part and item done, completed."""
    numbers = itertools.count()
    answer = Answer.empty()
    text: list[str] = []

    def event(kind: str, **fields: Any) -> bytes:
        return msgspec.json.encode(Event(f"response.{kind}", next(numbers), **fields))

    place: dict[str, Any] = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
    async with aclosing(merge(reply.order.service, reply.order.jobs)) as pieces:
        async for _, piece in pieces:
            if not answer.prompt_tokens:
                yield event("created", response=reply.begun())
                yield event("in_progress", response=reply.begun())
                yield event("output_item.added", output_index=0, item=OutputMessage(reply.item_id, "in_progress", []))
                yield event("content_part.added", **place, part=OutputText(""))
            answer.add(counted(piece))
            if piece.text:
                text.append(piece.text)
                yield event("output_text.delta", **place, delta=piece.text, logprobs=[])
    answer.text = "".join(text)
    status = reply.status(answer)
    yield event("output_text.done", **place, text=answer.text, logprobs=[])
    yield event("content_part.done", **place, part=OutputText(answer.text))
    yield event("output_item.done", output_index=0, item=reply.item(answer.text, status))
    yield event(status, response=reply.finished(answer))
