"""Errors as OpenAI shapes them: `{"error": {"message", "type", "param", "code"}}`, and nothing else, for any path."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.client import EngineDead, EngineError, EngineFailed
from hicache.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request

__all__ = ["ApiError", "add_error_handlers", "api_error_of", "error_response", "overloaded", "too_long"]

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error for a client. `type` follows from the status unless given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """The JSON that a client gets; characters that can't be encoded are replaced."""
        message = self.message.encode(errors="replace").decode()
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def overloaded() -> ApiError:
    """The error for a request too many."""
    return ApiError(429, "too many requests are waiting; try again later", headers={"Retry-After": "1"})


def too_long(prompt_tokens: int, answer_tokens: int, limit_tokens: int, *, param: str) -> ApiError:
    """The error for a prompt, or a prompt with the answer asked for, that exceeds the context."""
    asked = f"your {param} resulted in {prompt_tokens} tokens"
    if answer_tokens:
        total = prompt_tokens + answer_tokens
        asked = f"you requested {total} tokens ({prompt_tokens} in the {param}, {answer_tokens} in the completion)"
    message = f"This model's maximum context length is {limit_tokens} tokens. However, {asked}. Please reduce the length."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def api_error_of(error: Exception) -> ApiError:
    """The ApiError that stands for an exception; 500 without details for one that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return ApiError(400, str(error))
        case EngineFailed(status=status):
            headers = {"Retry-After": "1"} if status in (429, 503) else {}
            return ApiError(status, str(error), headers=headers)
        case EngineDead() | EngineError():
            return ApiError(503, "the engine is not running", code="engine_dead")
        case _:
            log.error("request failed", exc_info=error)
            return ApiError(500, "internal error")


def error_response(error: ApiError) -> Response:
    """The HTTP response of an error."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of the app, its own and the framework's, come out in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        return error_response(api_error_of(error))

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: f"unknown path {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
        message = known.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    for kind in (ApiError, RequestRefused, EngineError):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(Exception, ours)
    app.add_exception_handler(HTTPException, framework)
