"""What stands before every endpoint: keys, body size, a request id, counting. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from engine.server.errors import ApiError, error_response
from engine.server.streaming import ClientGone

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from engine.config import ServeConfig
    from engine.server.metrics import ServerMetrics

__all__ = ["ADMIN_PATHS", "Guard"]

log = logging.getLogger(__name__)

ADMIN_PATHS = frozenset({"/flush_cache", "/hicache/storage-backend", "/clear_hicache_storage_backend"})
CLOSED_PATHS = ADMIN_PATHS - {"/flush_cache"}
"""Open to nobody where no admin key is set."""
OPEN_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
MAX_BODY_BYTES = 16 << 20
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Guard:
    """Wraps the app. Health and metrics are open to all, as probes and Prometheus expect."""

    def __init__(self, app: ASGIApp, config: ServeConfig, metrics: ServerMetrics) -> None:
        self._app = app
        self._api_key = _bearer(config.api_key)
        self._admin_key = _bearer(config.admin_api_key)
        self._metrics = metrics
        self._body_timeout_s = config.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        call = _Call(receive, send, headers, self._body_timeout_s)
        with self._metrics.http_in_flight.track_inprogress():
            try:
                refused = self._refusal(scope["path"], headers)
                app = self._app if refused is None else error_response(refused)
                await app(scope, call.receive, call.send)
            except ClientGone:
                call.status = 499
                self._metrics.disconnects.inc()
            finally:
                level = logging.INFO if call.status >= 400 else logging.DEBUG
                log.log(level, "%s %s: %d, request id %s", scope["method"], _route(scope), call.status, call.id)
                self._metrics.http_requests.labels(scope["method"], _route(scope), str(call.status)).inc()

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
        if not self._allowed(path, headers.get(b"authorization", b"")):
            return ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return None

    def _allowed(self, path: str, given: bytes) -> bool:
        if path in OPEN_PATHS:
            return True
        if path in ADMIN_PATHS and self._admin_key is not None:
            return hmac.compare_digest(given, self._admin_key)
        if path in CLOSED_PATHS:
            return False
        if self._api_key is None:
            return True
        keys = [key for key in (self._api_key, self._admin_key) if key is not None]
        matches = [hmac.compare_digest(given, key) for key in keys]  # all are compared, so the time tells nothing
        return any(matches)


class _Call:
    """One request's channels, watched: a body is limited in bytes and in the time between its parts, the response gets its id
    and is remembered by status."""

    def __init__(self, receive: Receive, send: Send, headers: dict[bytes, bytes], body_timeout_s: float) -> None:
        self._receive = receive
        self._send = send
        self._left_bytes = MAX_BODY_BYTES
        self._body_timeout_s: float | None = body_timeout_s  # None once the body is there
        self.status = 500
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    async def receive(self) -> Message:
        """Receive, within the limits (ASGI)."""
        try:
            message = await asyncio.wait_for(self._receive(), self._body_timeout_s)
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        if not message.get("more_body", False):
            self._body_timeout_s = None
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
        return message

    async def send(self, message: Message) -> None:
        """Send, with the id (ASGI)."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        await self._send(message)


def _bearer(key: str | None) -> bytes | None:
    return None if key is None else f"Bearer {key}".encode()


def _route(scope: Scope) -> str:
    """The path's pattern; unknown paths are one label, or a scanner could fill the registry."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
