"""POST /v1/responses in its basic form: text in, text out. What is asked for, and the objects and events of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.messages import GrammarSpec  # noqa: TC001 - pydantic reads the annotation
from engine.server.schemas import ChatBody, ChatMessage, JsonSchemaFormat, ResponseFormat
from engine.server.values import MAX_MESSAGES, Count, Key, Priority, StrictBody, Temperature, TopP

__all__ = [
    "CachedInput",
    "Event",
    "OutputMessage",
    "OutputText",
    "ResponseObject",
    "ResponseUsage",
    "ResponsesBody",
]


class InputText(BaseModel):
    """A part of a message; only text is served."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """One message of the input; output items of earlier answers may be sent back as they came."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(max_length=MAX_MESSAGES, fail_fast=True)]

    @property
    def as_chat(self) -> ChatMessage:
        """The same message of a chat."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role=self.role, content=text)


class TextFormat(BaseModel):
    """`text.format`: the schema stands beside the type, not below it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @property
    def as_chat(self) -> ResponseFormat:
        """The same format of a chat."""
        schema = JsonSchemaFormat(schema=self.schema_) if self.type == "json_schema" else None
        return ResponseFormat(type=self.type, json_schema=schema)


class TextSettings(BaseModel):
    """`text`."""

    model_config = ConfigDict(extra="ignore")
    format: TextFormat = TextFormat()


class ResponsesBody(StrictBody):
    """POST /v1/responses. Nothing is stored, so an earlier response can't be gone on from by its id."""

    model: str = ""
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool = False
    text: TextSettings = TextSettings()
    # taken and without effect here
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    tools: Annotated[list[Any], Field(max_length=0, description="Tools are served in chats.")] | None = None
    previous_response_id: None = None
    # beyond OpenAI
    cache_salt: Key = ""
    extra_key: Key = ""
    priority: Priority = 0
    routing_key: Key = ""

    @property
    def as_chat(self) -> ChatBody:
        """The same request as a chat."""
        asked = [ChatMessage(role="user", content=self.input)] if isinstance(self.input, str) else []
        given = [] if isinstance(self.input, str) else [item.as_chat for item in self.input]
        system = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        return ChatBody(
            messages=[*system, *given, *asked],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=self.text.format.as_chat,
            cache_salt=self.cache_salt,
            extra_key=self.extra_key,
            priority=self.priority,
            routing_key=self.routing_key,
        )

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer is held to, if to anything."""
        return self.text.format.as_chat.grammar

    @model_validator(mode="after")
    def _grammar_is_one(self) -> Self:
        _ = self.grammar
        return self


class OutputText(msgspec.Struct, frozen=True):
    """The text of an answer."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, frozen=True):
    """The one item of an answer."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CachedInput(msgspec.Struct, frozen=True):
    """How much of the input was reused."""

    cached_tokens: int


class ReasoningOutput(msgspec.Struct, frozen=True):
    """None is told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    total_tokens: int
    output_tokens_details: ReasoningOutput = ReasoningOutput()


class ResponseObject(msgspec.Struct, frozen=True):
    """A response, finished or as far as it has come."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage]
    instructions: str | None
    temperature: float
    top_p: float
    max_output_tokens: int | None
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    object: Literal["response"] = "response"
    error: None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"


class Event(msgspec.Struct, frozen=True):
    """An event of a streamed response; of the optional fields those that its type has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
