"""Tools as clients describe them, calls in the messages they send back, and the grammar of answers that must be calls."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.messages import GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_TOOLS", "MessageToolCall", "NamedTool", "Tool", "ToolChoice", "required_grammar"]

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class ToolFunction(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One tool; only functions are served."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    function: ToolFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(BaseModel):
    """A function by its name."""

    name: ToolName


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(BaseModel):
    """A call in an assistant's message of the conversation so far."""

    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: arguments as an object."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: the template gets what the client sent
                arguments = json.loads(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def required_grammar(tools: Sequence[Tool], *, parallel: bool) -> GrammarSpec:
    """What an answer that must be calls is held to: an array of `{"name", "parameters"}`. Raises ValueError."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False})
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"two tools define {name} differently in their $defs")
        properties = {"name": {"const": tool.function.name}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return GrammarSpec("json_schema", json.dumps(schema if parallel else {**schema, "maxItems": 1}))
