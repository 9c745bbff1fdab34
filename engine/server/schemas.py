"""Requests as clients send them: OpenAI's chat and completions, SGLang's /generate, and the small ones.

OpenAI's bodies refuse what they don't know, and what this server can't do, by name; a parameter that changes nothing here
(such as `user`) is taken and ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.messages import GrammarSpec, SamplingParams

__all__ = [
    "AbortBody",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "GenerateBody",
    "NativeSampling",
    "TokenizeBody",
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
T = TypeVar("T")


def _json_grammar(schema: str | dict[str, Any] | bool) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _grammar(
    json_schema: str | dict[str, Any] | None, regex: str | None, ebnf: str | None, other: GrammarSpec | None = None
) -> GrammarSpec | None:
    """The one grammar among these, if there is any."""
    found = [] if other is None else [other]
    if json_schema is not None:
        found.append(_json_grammar(json_schema))
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
                return _json_grammar({"type": "object"})
            case "json_schema":
                assert self.json_schema is not None, "the validator lets no schema be missing"
                schema = self.json_schema.schema_
                return _json_grammar({"type": "object"} if schema is None else schema)

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self


class OpenAIBody(BaseModel):
    """What chat and completions have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

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
    logit_bias: dict[TokenId, Bias] | None = None
    # taken and without effect here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # beyond OpenAI
    top_k: TopK = -1
    min_p: Unit = 0.0
    repetition_penalty: Repetition = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = []
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    json_schema: Source | dict[str, Any] | None = None
    cache_salt: Key = ""
    extra_key: Key = ""
    priority: Priority = 0

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer is held to, if to anything."""
        wanted = None if self.response_format is None else self.response_format.grammar
        return _grammar(self.json_schema, self.regex, self.ebnf, wanted)

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
            top_k=_top_k(self.top_k),
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


class TextPart(BaseModel):
    """One part of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The message's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Any], Field(max_length=0, description="Tool calls are not served.")] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens of an answer, if the client said so."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities a token: None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


Prompt = str | list[TokenId] | list[str] | list[list[TokenId]]


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
        return _batch(self.prompt)

    @model_validator(mode="after")
    def _only_what_is_served(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is only served when it equals n")
        if len(self.prompts) > MAX_BATCH:
            raise ValueError(f"at most {MAX_BATCH} prompts a request")
        return self


class NativeSampling(BaseModel):
    """`sampling_params` of POST /generate."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Count0 | None = 128
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: Unit = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: Stops = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Seed | None = None
    sampling_seed: Seed | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    json_schema: Source | dict[str, Any] | None = None

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How each sequence is sampled."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=_top_k(self.top_k),
            min_p=self.min_p,
            seed=self.seed if self.seed is not None else self.sampling_seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            min_new_tokens=self.min_new_tokens,
            grammar=_grammar(self.json_schema, self.regex, self.ebnf),
        )

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        _ = _grammar(self.json_schema, self.regex, self.ebnf)
        return self


class GenerateBody(BaseModel):
    """POST /generate, as in SGLang: `text` or `input_ids`, one or a batch."""

    model_config = ConfigDict(extra="ignore")

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_BATCH)] | None = None
    input_ids: Annotated[list[TokenId] | list[list[TokenId]], Field(min_length=1)] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(min_length=1)] | None = None
    rid: Key | list[Key] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    top_logprobs_num: TopLogprobs | list[TopLogprobs | None] | None = None
    logprob_start_len: LogprobStart | list[LogprobStart | None] | None = None
    return_text_in_logprobs: bool = False
    cache_salt: Key | None = None
    extra_key: Key | None = None
    priority: Priority | None = None
    return_cached_tokens_details: bool = False

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or (self.input_ids is not None and isinstance(self.input_ids[0], list))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        prompt = self.text if self.text is not None else self.input_ids
        assert prompt is not None, "the validator lets no body without a prompt pass"
        return _batch(prompt)

    @property
    def params(self) -> list[NativeSampling]:
        """Sampling parameters, one a prompt."""
        if isinstance(self.sampling_params, list):
            return self.sampling_params
        return [self.sampling_params or NativeSampling()] * len(self.prompts)

    def top(self, index: int) -> int | None:
        """How many log-probabilities a token of a prompt's answer: None for none at all."""
        return (_nth(self.top_logprobs_num, index) or 0) if _nth(self.return_logprob, index) else None

    def score_from(self, index: int) -> int | None:
        """Where the log-probabilities of a prompt begin; None for none at all."""
        start = _nth(self.logprob_start_len, index)
        return start if _nth(self.return_logprob, index) and start is not None and start >= 0 else None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        count = len(self.prompts)
        if count > MAX_BATCH:
            raise ValueError(f"at most {MAX_BATCH} prompts a request")
        if len(self.params) != count:
            raise ValueError("sampling_params must be one object, or one for each prompt")
        if isinstance(self.rid, list) and len(self.rid) != count:
            raise ValueError("rid must be one string, or one for each prompt")
        for name in ("return_logprob", "top_logprobs_num", "logprob_start_len"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != count:
                raise ValueError(f"{name} must be one value, or one for each prompt")
        return self


class TokenizeBody(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(extra="ignore")
    prompt: str | Annotated[list[str], Field(max_length=MAX_BATCH)]


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore")
    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_BATCH)]
    skip_special_tokens: bool = True


class AbortBody(BaseModel):
    """POST /abort_request: one request, those of a batch, or all."""

    model_config = ConfigDict(extra="ignore")
    rid: Key = ""
    abort_all: bool = False


def _nth(value: T | list[T], index: int) -> T:
    """A prompt's own value of a parameter that is one for all or a list."""
    return value[index] if isinstance(value, list) else value


def _top_k(top_k: int) -> int:
    """0 and -1 both turn it off."""
    return top_k if top_k > 0 else -1


def _batch(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[i for i in prompt if isinstance(i, int)]]
    return [item for item in prompt if not isinstance(item, int)]
