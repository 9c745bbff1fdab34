"""Requests of SGLang's own endpoints: /generate and the small ones. What /generate does not know is ignored, as there."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.messages import SamplingParams
from engine.server.values import (
    INT32_MAX,
    MAX_BATCH,
    MAX_N,
    Batch,
    Biases,
    Count0,
    Key,
    LogprobStart,
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
    TopLogprobs,
    TopP,
    Unit,
    as_batch,
    one_grammar,
    top_k_of,
)

__all__ = ["AbortBody", "DetokenizeBody", "GenerateBody", "NativeSampling", "TokenizeBody"]

T = TypeVar("T")
Each = Annotated[list[T], Field(max_length=MAX_BATCH, fail_fast=True)]


class NativeSampling(StrictBody):
    """`sampling_params` of POST /generate."""

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
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: Biases | None = None
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
            top_k=top_k_of(self.top_k),
            min_p=self.min_p,
            seed=self.seed if self.seed is not None else self.sampling_seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            min_new_tokens=self.min_new_tokens,
            grammar=one_grammar(self.json_schema, self.regex, self.ebnf),
        )

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        _ = one_grammar(self.json_schema, self.regex, self.ebnf)
        return self


class GenerateBody(BaseModel):
    """POST /generate, as in SGLang: `text` or `input_ids`, one or a batch."""

    model_config = ConfigDict(extra="ignore")

    text: str | Annotated[Strings, Field(min_length=1)] | None = None
    input_ids: Annotated[TokenIds | Batch, Field(min_length=1)] | None = None
    sampling_params: NativeSampling | Annotated[Each[NativeSampling], Field(min_length=1)] | None = None
    rid: Key | Each[Key] | None = None
    stream: bool = False
    return_logprob: bool | Each[bool] = False
    top_logprobs_num: TopLogprobs | Each[TopLogprobs | None] | None = None
    logprob_start_len: LogprobStart | Each[LogprobStart | None] | None = None
    return_text_in_logprobs: bool = False
    cache_salt: Key | None = None
    extra_key: Key | None = None
    priority: Priority | None = None
    routing_key: Key | None = None
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
        return as_batch(prompt)

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
    prompt: str | Strings


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore")
    tokens: TokenIds | Batch
    skip_special_tokens: bool = True


class AbortBody(BaseModel):
    """POST /abort_request: one request, those of a batch, or all."""

    model_config = ConfigDict(extra="ignore")
    rid: Key = ""
    abort_all: bool = False


def _nth(value: T | list[T], index: int) -> T:
    """A prompt's own value of a parameter that is one for all or a list."""
    return value[index] if isinstance(value, list) else value
