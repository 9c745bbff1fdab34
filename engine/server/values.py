"""Types of parameters with their limits, and the few functions that several kinds of requests share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from engine.messages import GrammarSpec

__all__ = [
    "INT32_MAX",
    "MAX_BATCH",
    "MAX_N",
    "MAX_STOPS",
    "MAX_TOP_LOGPROBS",
    "Bias",
    "Count",
    "Count0",
    "Key",
    "LogprobStart",
    "Penalty",
    "Priority",
    "Repetition",
    "Seed",
    "Source",
    "StopString",
    "Stops",
    "Temperature",
    "TokenId",
    "TopK",
    "TopLogprobs",
    "TopP",
    "Ttl",
    "Unit",
    "as_batch",
    "as_stops",
    "json_grammar",
    "one_grammar",
    "top_k_of",
]

INT32_MAX = 2**31 - 1
MAX_N = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_BATCH = 1024

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopString], Field(max_length=MAX_STOPS)] | StopString | None
Key = Annotated[str, Field(max_length=1024)]
Ttl = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Source = Annotated[str, Field(max_length=1 << 20)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Count0 = Annotated[int, Field(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Repetition = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
LogprobStart = Annotated[int, Field(ge=-1, le=INT32_MAX)]


def json_grammar(schema: str | dict[str, Any] | bool) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def one_grammar(
    json_schema: str | dict[str, Any] | None, regex: str | None, ebnf: str | None, other: GrammarSpec | None = None
) -> GrammarSpec | None:
    """The one grammar among these, if there is any."""
    found = [] if other is None else [other]
    if json_schema is not None:
        found.append(json_grammar(json_schema))
    if regex is not None:
        found.append(GrammarSpec("regex", regex))
    if ebnf is not None:
        found.append(GrammarSpec("ebnf", ebnf))
    if len(found) > 1:
        raise ValueError("give at most one of response_format, json_schema, regex and ebnf")
    return found[0] if found else None


def as_stops(stop: list[str] | str | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def top_k_of(top_k: int) -> int:
    """0 and -1 both turn it off."""
    return top_k if top_k > 0 else -1


def as_batch(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[i for i in prompt if isinstance(i, int)]]
    return [item for item in prompt if not isinstance(item, int)]
