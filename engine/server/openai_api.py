"""OpenAI's endpoints: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from engine.messages import CachedTokens, GenerateRequest
from engine.server.errors import ApiError
from engine.server.logprobs import chat_logprobs, completion_logprobs
from engine.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    Delta,
    Message,
    ModelCard,
    ModelList,
    Usage,
    json_response,
    now_s,
    usage_of,
)
from engine.server.schemas import ChatBody, CompletionBody, as_stops
from engine.server.service import Answer, Job, Piece, Service, collect, merge
from engine.server.streaming import EventStream, primed, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from engine.server.responses import CompletionLogprobs
    from engine.server.schemas import OpenAIBody

__all__ = ["ServiceDep", "get_service", "router"]

router = APIRouter(tags=["openai"])


def get_service(request: Request) -> Service:
    """The service of the app that the request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: ServiceDep) -> Response:
    """Answer a chat, whole or as a stream."""
    messages = [{"role": message.role, "content": message.text} for message in body.messages]

    def encode() -> list[int]:
        return service.tokenizer.encode_chat(
            messages, options=body.chat_template_kwargs, continue_final_message=body.continue_final_message
        )

    text = "".join(message["content"] for message in messages)
    ids = await service.tokenize(text, encode, param="messages")
    budget = service.answer_budget(len(ids), body.asked_tokens, param="messages")
    order = _Order(service, "chatcmpl-" + uuid.uuid4().hex, body, [ids], body.sampling(budget).max_new_tokens, body.top)
    service.admit(order.jobs)
    if body.stream:
        return EventStream(await unless_gone(request, primed(_chat_events(order))))
    answers = await unless_gone(request, collect(service, order.jobs))
    choices = [
        ChatChoice(
            index,
            Message(answer.text),
            answer.finish_reason,
            chat_logprobs(service.tokenizer, answer.token_ids, answer.logprobs),
            answer.matched,
        )
        for index, answer in enumerate(answers)
    ]
    return json_response(ChatResponse(order.id, now_s(), service.config.name, choices, order.usage(answers)))


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: ServiceDep) -> Response:
    """Complete prompts, whole or as a stream."""
    prompts = [await service.encode(prompt, param="prompt") for prompt in body.prompts]
    if not prompts:
        raise ApiError(400, "prompt is empty", param="prompt")
    asked_tokens = 16 if body.max_tokens is None else body.max_tokens
    for ids in prompts:
        service.answer_budget(len(ids), asked_tokens, param="prompt")
    order = _Order(service, "cmpl-" + uuid.uuid4().hex, body, prompts, asked_tokens, body.logprobs, body.score_from)
    service.admit(order.jobs)
    echoes = [_echo(service, body, prompt, ids) for prompt, ids in zip(body.prompts, prompts, strict=True)]
    if body.stream:
        return EventStream(await unless_gone(request, primed(_completion_events(order, echoes))))
    answers = await unless_gone(request, collect(service, order.jobs))
    choices = [
        CompletionChoice(
            index,
            echoes[index // order.n] + answer.text,
            answer.finish_reason,
            _completion_logprobs(order, index, answer, offset=0),
            answer.matched,
        )
        for index, answer in enumerate(answers)
    ]
    return json_response(CompletionResponse(order.id, now_s(), service.config.name, choices, order.usage(answers)))


@router.get("/v1/models")
async def models(service: ServiceDep) -> Response:
    """List the model that is served."""
    return json_response(ModelList([_model_card(service)]))


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> Response:
    """Describe the model that is served."""
    if name != service.config.name:
        raise ApiError(404, f"The model {name} does not exist", param="model", code="model_not_found")
    return json_response(_model_card(service))


def _model_card(service: Service) -> ModelCard:
    return ModelCard(service.config.name, service.started_s, service.context_length, service.config.model_path)


@dataclass(frozen=True)
class _Order:
    """The sequences of one OpenAI request: `n` for each prompt, those of a prompt next to each other."""

    service: Service
    id: str
    body: OpenAIBody
    prompts: Sequence[list[int]]
    max_new_tokens: int
    top_logprobs: int | None
    score_from: int | None = None

    @property
    def n(self) -> int:
        """Answers a prompt."""
        return self.body.n or 1

    @property
    def jobs(self) -> list[Job]:
        """One job a sequence."""
        return [self._job(ids, p * self.n + i, i) for p, ids in enumerate(self.prompts) for i in range(self.n)]

    def usage(self, answers: Sequence[Answer]) -> Usage:
        """Tokens of all sequences; a prompt and what was reused of it count once."""
        firsts = answers[:: self.n]
        cached = CachedTokens(
            sum(answer.cached.device for answer in firsts),
            sum(answer.cached.host for answer in firsts),
            sum(answer.cached.disk for answer in firsts),
        )
        prompt_tokens = sum(len(ids) for ids in self.prompts)
        completion_tokens = sum(len(answer.token_ids) for answer in answers)
        return usage_of(prompt_tokens, completion_tokens, cached, by_tier=self.service.config.enable_cache_report)

    def _job(self, ids: list[int], index: int, sibling: int) -> Job:
        body = self.body
        sampling = body.sampling(self.max_new_tokens)
        if sampling.seed is not None and sibling:  # the same seed would give the same answer n times
            sampling = msgspec.structs.replace(sampling, seed=_next_seed(sampling.seed, sibling))
        request = GenerateRequest(
            rid=f"{self.id}-{index}",
            input_ids=ids,
            sampling=sampling,
            cache_salt=body.cache_salt,
            extra_key=body.extra_key,
            priority=body.priority,
            top_logprobs=self.top_logprobs,
            score_from=self.score_from,
        )
        return Job(request, as_stops(body.stop), body.skip_special_tokens)


def _completion_logprobs(order: _Order, index: int, part: Answer | Piece, *, offset: int) -> CompletionLogprobs | None:
    """Log-probabilities of an answer or a piece of it; those of the prompt go before them where it is echoed."""
    if order.top_logprobs is None:
        return None
    prompt = [] if part.prompt_logprobs is None else order.prompts[index // order.n]
    ids = [*prompt, *part.token_ids]
    logprobs = [*(part.prompt_logprobs or ()), *(part.logprobs or ())]
    return completion_logprobs(order.service.tokenizer, ids, logprobs, offset=offset)


def _next_seed(seed: int, sibling: int) -> int:
    """A seed for a sibling, within 63 bits."""
    return (seed + sibling) & (2**63 - 1)


def _echo(service: Service, body: CompletionBody, prompt: str | list[int], ids: list[int]) -> str:
    """The prompt's text, if it is to be repeated."""
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(ids)


async def _chat_events(order: _Order) -> AsyncGenerator[bytes, None]:
    """Events of a chat: each answer's role with its first piece, pieces, finish; then the usage."""
    answers = [Answer.empty() for _ in order.jobs]
    begun = [False] * len(answers)
    created, model, tokenizer = now_s(), order.service.config.name, order.service.tokenizer
    usage = None if order.body.wants_usage else msgspec.UNSET
    async with aclosing(merge(order.service, order.jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(_counted(piece))
            if piece.text or piece.logprobs is not None or not begun[index]:
                delta = Delta(content=piece.text) if begun[index] else Delta("assistant", piece.text)
                begun[index] = True
                logprobs = chat_logprobs(tokenizer, piece.token_ids, piece.logprobs)
                choice = ChatChunkChoice(index, delta, None, logprobs)
                yield msgspec.json.encode(ChatChunk(order.id, created, model, [choice], usage))
            if piece.finish_reason is not None:
                choice = ChatChunkChoice(index, Delta(), piece.finish_reason)
                yield msgspec.json.encode(ChatChunk(order.id, created, model, [choice], usage))
    if order.body.wants_usage:
        yield msgspec.json.encode(ChatChunk(order.id, created, model, [], order.usage(answers)))


async def _completion_events(order: _Order, echoes: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """Events of completions: the echo with an answer's first piece, pieces, the finish with the last; then the usage."""
    answers = [Answer.empty() for _ in order.jobs]
    lengths = [0] * len(answers)
    begun = [False] * len(answers)
    created, model = now_s(), order.service.config.name
    usage = None if order.body.wants_usage else msgspec.UNSET
    async with aclosing(merge(order.service, order.jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(_counted(piece))
            if begun[index] and not piece.text and piece.logprobs is None and piece.finish_reason is None:
                continue  # half a character, or what may become a stop string
            text = piece.text if begun[index] else echoes[index // order.n] + piece.text
            begun[index] = True
            logprobs = _completion_logprobs(order, index, piece, offset=lengths[index])
            lengths[index] += len(text)
            choice = CompletionChoice(index, text, piece.finish_reason, logprobs, piece.matched)
            yield msgspec.json.encode(CompletionResponse(order.id, created, model, [choice], usage))
    if order.body.wants_usage:
        yield msgspec.json.encode(CompletionResponse(order.id, created, model, [], order.usage(answers)))


def _counted(piece: Piece) -> Piece:
    """A piece without what only a whole answer needs."""
    return piece._replace(text="", logprobs=None, prompt_logprobs=None)
