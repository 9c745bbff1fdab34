"""The one thing to say about a body that doesn't fit its schema, in the words of who wrote it.

Where a field may be of several types, pydantic reports what each of them had against the value, under names of its own
(`stop.list[constrained-str]`). Said is what the type objects to that the value comes closest to.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.exceptions import RequestValidationError

from engine.server.errors import ApiError, error_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["add_validation_handler"]

MOST_READ = 1000
"""Problems that are looked at: a long list may have one an item."""
_SHOULD_BE = "Input should be "


class _Problem(NamedTuple):
    where: tuple[str, ...]
    kind: str
    message: str

    @property
    def is_other_type(self) -> bool:
        """Whether the value is of another type altogether."""
        return self.kind.endswith("_type")


def add_validation_handler(app: FastAPI) -> None:
    """Make what does not fit its schema status 400."""

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors(), error.body))

    app.add_exception_handler(RequestValidationError, validation)


def _validation_error(problems: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    read = [_Problem(tuple(_written(problem, body)), problem["type"], str(problem["msg"])) for problem in problems[:MOST_READ]]
    _, of_first_field = next(groupby(read, key=lambda problem: problem.where[:1]))
    return _said(list(of_first_field))


def _said(problems: Sequence[_Problem]) -> ApiError:
    """The error for the mistake in a value of the right type, else for what goes deepest; there, all types that would do."""
    closest = max(problems, key=lambda problem: (not problem.is_other_type, len(problem.where)))
    param = ".".join(closest.where).encode(errors="replace").decode() or None
    if closest.kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param)
    message = closest.message.removeprefix("Value error, ")
    if closest.is_other_type:
        message = _any_of(problem.message for problem in problems if problem.where == closest.where)
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _any_of(messages: Iterable[str]) -> str:
    """One sentence for what each type of a union wants."""
    first, *others = dict.fromkeys(messages)
    return " or ".join([first, *(other.removeprefix(_SHOULD_BE) for other in others)])


def _written(problem: Mapping[str, Any], body: object) -> Iterable[str]:
    """Where a problem is, without pydantic's names of types: only what is in the body, or is missing there."""
    place, *parts = problem["loc"]
    if place != "body":
        yield from map(str, problem["loc"])
        return
    value: Any = body
    for part in parts:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if problem["type"] == "missing" and part is parts[-1]:
                yield str(part)
        else:
            yield str(part)
