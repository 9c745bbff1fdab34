"""OpenAI's endpoints /v1/completions and /v1/models."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from engine.server.depends import RoutingKey, ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.errors import ApiError
from engine.server.logprobs import completion_logprobs
from engine.server.order import Order, counted
from engine.server.responses import CompletionChoice, CompletionResponse, ModelCard, ModelList, json_response, now_s
from engine.server.schemas import CompletionBody  # noqa: TC001 - FastAPI reads the annotation
from engine.server.service import Answer, Piece, Service, collect, merge
from engine.server.streaming import EventStream, primed, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from engine.server.responses import CompletionLogprobs

__all__ = ["router"]

router = APIRouter(tags=["openai"])


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: ServiceDep, routing_key: RoutingKey = "") -> Response:
    """Complete prompts, whole or as a stream."""
    prompts = await service.encode_all(body.prompts, param="prompt")
    if not prompts:
        raise ApiError(400, "prompt is empty", param="prompt")
    asked_tokens = 16 if body.max_tokens is None else body.max_tokens
    for ids in prompts:
        service.answer_budget(len(ids), asked_tokens, param="prompt")
    order = Order(
        service,
        "cmpl-" + uuid.uuid4().hex,
        body,
        prompts,
        asked_tokens,
        body.logprobs,
        body.score_from,
        routing_key=routing_key,
    )
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


def _completion_logprobs(order: Order, index: int, part: Answer | Piece, *, offset: int) -> CompletionLogprobs | None:
    """Log-probabilities of an answer or a piece of it; those of the prompt go before them where it is echoed."""
    if order.top_logprobs is None:
        return None
    prompt = [] if part.prompt_logprobs is None else order.prompts[index // order.n]
    ids = [*prompt, *part.token_ids]
    logprobs = [*(part.prompt_logprobs or ()), *(part.logprobs or ())]
    return completion_logprobs(order.service.tokenizer, ids, logprobs, offset=offset)


def _echo(service: Service, body: CompletionBody, prompt: str | list[int], ids: list[int]) -> str:
    """The prompt's text, if it is to be repeated."""
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(ids)


async def _completion_events(order: Order, echoes: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """Events of completions: the echo with an answer's first piece, pieces, the finish with the last; then the usage."""
    answers = [Answer.empty() for _ in order.jobs]
    lengths = [0] * len(answers)
    begun = [False] * len(answers)
    created, model = now_s(), order.service.config.name
    usage = None if order.body.wants_usage else msgspec.UNSET
    async with aclosing(merge(order.service, order.jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(counted(piece))
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
