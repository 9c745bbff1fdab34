"""Server-sent events, and noticing that a client has gone while it is being served."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.responses import Response

from engine.server.errors import api_error_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine
    from typing import Any

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

__all__ = ["ClientGone", "EventStream", "NamedEventStream", "primed", "unless_gone"]


class ClientGone(BaseException):
    """The client closed its connection before the answer. No Exception, so that nothing on the way out tries to answer it."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, or cancel it and raise ClientGone when the client closes the connection. The body must have been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def primed(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Wait for the first event, so that an error before it can still be an HTTP status; return all events."""
    first = await anext(events)
    return _chain(first, events)


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


class EventStream(Response):
    """Sends `events`, each the JSON of one event, and then [DONE]; closes them when the client goes away.

    A failure in the middle becomes an event with the error, since the status has been sent.
    """

    media_type = "text/event-stream"
    last: bytes | None = b"data: [DONE]\n\n"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream (ASGI)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                raise ClientGone
            pump.result()
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            try:
                async for event in events:
                    await self._send_event(send, event)
            except OSError:
                raise ClientGone from None
            except Exception as error:
                await self._send_event(send, api_error_of(error).body())
        await send({"type": "http.response.body", "body": self.last or b"", "more_body": False})

    async def _send_event(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": self.frame(event), "more_body": True})

    def frame(self, event: bytes) -> bytes:
        """An event as it is sent."""
        return b"data: " + event + b"\n\n"


class _Typed(msgspec.Struct, frozen=True):
    type: str = "error"


class NamedEventStream(EventStream):
    """Events that are named by their `type`, as those of /v1/responses are; the last one ends the stream."""

    last = None

    def frame(self, event: bytes) -> bytes:
        """An event with its name; an error has no type of its own."""
        name = msgspec.json.decode(event, type=_Typed).type
        return b"event: " + name.encode() + b"\ndata: " + event + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
