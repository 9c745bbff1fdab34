"""Types of parameters with their limits, and the few functions that several kinds of requests share.

Bodies are validated on the event loop. So lists are given up at their first bad item (`fail_fast`), and what has far too many
keys is not read: pydantic takes minutes to describe the millions of mistakes that one body has room for.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.messages import GrammarSpec

__all__ = [
    "INT32_MAX",
    "MAX_BATCH",
    "MAX_MESSAGES",
    "MAX_N",
    "MAX_STOPS",
    "MAX_TOP_LOGPROBS",
    "Batch",
    "Biases",
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
    "StrictBody",
    "Strings",
    "Temperature",
    "TokenId",
    "TokenIds",
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
MAX_MESSAGES = 1 << 16
MAX_KEYS = 1 << 10
MAX_BIASES = 1 << 16

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Batch = Annotated[list[TokenIds], Field(max_length=MAX_BATCH, fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=MAX_BATCH, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | StopString | None
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


def _few_biases(given: object) -> object:
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens")
    return given


Biases = Annotated[dict[TokenId, Bias], BeforeValidator(_few_biases)]


class StrictBody(BaseModel):
    """An object that refuses keys it doesn't know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > MAX_KEYS:
            raise ValueError(f"at most {MAX_KEYS} parameters")
        return given


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
