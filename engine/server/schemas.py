"""Requests as OpenAI's clients send them: chat and completions.

They refuse what they don't know, and what this server can't do, by name; a parameter that changes nothing here
(such as `user`) is taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.messages import GrammarSpec, SamplingParams
from engine.server.tool_schemas import MAX_TOOLS, MessageToolCall, NamedTool, Tool, ToolChoice, required_grammar
from engine.server.values import (
    INT32_MAX,
    MAX_BATCH,
    MAX_MESSAGES,
    MAX_N,
    MAX_TOP_LOGPROBS,
    Batch,
    Biases,
    Count,
    Count0,
    Key,
    Penalty,
    Priority,
    Repetition,
    Seed,
    Source,
    Stops,
    StrictBody,
    Strings,
    Temperature,
    TokenIds,
    TopK,
    TopP,
    Ttl,
    Unit,
    as_batch,
    json_grammar,
    one_grammar,
    top_k_of,
)

__all__ = ["ChatBody", "ChatMessage", "CompletionBody", "JsonSchemaFormat", "Messages", "OpenAIBody", "ResponseFormat"]


class StreamOptions(BaseModel):
    """What a stream tells besides tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class JsonSchemaFormat(BaseModel):
    """The schema of a `response_format`. It is always followed strictly."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """What an answer must look like: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar of the format, if it has one."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return json_grammar({"type": "object"})
            case "json_schema":
                assert self.json_schema is not None, "the validator lets no schema be missing"
                schema = self.json_schema.schema_
                return json_grammar({"type": "object"} if schema is None else schema)

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self


class OpenAIBody(StrictBody):
    """What chat and completions have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    max_tokens: Count | None = None
    stop: Stops = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    # taken and without effect here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # beyond OpenAI
    top_k: TopK = -1
    min_p: Unit = 0.0
    repetition_penalty: Repetition = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = Field(default_factory=list)
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    json_schema: Source | dict[str, Any] | None = None
    cache_salt: Key = ""
    extra_key: Key = ""
    priority: Priority = 0
    routing_key: Key = ""

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer is held to, if to anything."""
        wanted = None if self.response_format is None else self.response_format.grammar
        return one_grammar(self.json_schema, self.regex, self.ebnf, wanted)

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens of an answer, if the client said so."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How each sequence is sampled."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k_of(self.top_k),
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            min_new_tokens=self.min_tokens,
            grammar=self.grammar,
        )

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        _ = self.grammar
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self


class CacheControl(BaseModel):
    """Keep the prompt up to and with this message in the cache for `ttl_s` seconds."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["ephemeral"]
    ttl_s: Ttl = 300.0


class TextPart(BaseModel):
    """One part of a message; only text is served."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None

    @property
    def kept_for_s(self) -> float | None:
        """For how long the prompt up to here is to be kept, if at all."""
        parts = self.content if isinstance(self.content, list) else []
        controls = [self.cache_control, *(part.cache_control for part in parts)]
        return max((control.ttl_s for control in controls if control is not None), default=None)

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; keys of tools are there only where tools are."""
        role = "system" if self.role == "developer" else self.role  # templates know the older word
        out: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            out["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            out["name"] = self.name
        return out

    @property
    def text(self) -> str:
        """The message's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens of an answer, if the client said so."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities a token: None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def kept(self) -> tuple[int, float] | None:
        """How many messages are to be kept in the cache, and for how long; None if none are. The last one marked counts."""
        marked = [(i + 1, s) for i, message in enumerate(self.messages) if (s := message.kept_for_s) is not None]
        return marked[-1] if marked else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return bool(self.offered) and self.tool_choice not in (None, "auto")

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer is held to, if to anything."""
        given = super().grammar
        if not self.must_call:
            return given
        if given is not None:
            raise ValueError("an answer that must be a tool call can't have another grammar")
        named = isinstance(self.tool_choice, NamedTool)
        return required_grammar(self._choosable(), parallel=not named and self.parallel_tool_calls is not False)

    def _choosable(self) -> list[Tool]:
        """The tools that a forced call may name."""
        choice = self.tool_choice
        if not isinstance(choice, NamedTool):
            return self.offered
        return [tool for tool in self.offered if tool.function.name == choice.function.name]

    @model_validator(mode="after")
    def _tool_choice_fits_tools(self) -> Self:
        if self.tool_choice not in (None, "none", "auto") and not self._choosable():
            raise ValueError("tool_choice must name one of the tools, of which there must be some")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


Prompt = str | TokenIds | Strings | Batch


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompt, Field(union_mode="left_to_right")]
    max_tokens: Count0 | None = None  # 0: the prompt alone, for its log-probabilities or to warm the cache
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Annotated[str, Field(max_length=0, description="Infilling is not served.")] | None = None

    @property
    def score_from(self) -> int | None:
        """Where the log-probabilities of the prompt begin, if they are asked for."""
        return 0 if self.echo and self.logprobs is not None else None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, as text or token ids."""
        return as_batch(self.prompt)

    @model_validator(mode="after")
    def _only_what_is_served(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is only served when it equals n")
        if len(self.prompts) > MAX_BATCH:
            raise ValueError(f"at most {MAX_BATCH} prompts a request")
        return self
