"""SGLang's own endpoints: /generate, /tokenize, /detokenize, health, model and server info, /abort_request."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from engine.messages import GenerateRequest, SamplingParams
from engine.server.depends import RoutingKey, ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.errors import ApiError
from engine.server.logprobs import native_input_logprobs, native_logprobs, native_top_logprobs
from engine.server.native_schemas import (  # noqa: TC001 - FastAPI reads the annotations
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    NativeSampling,
    TokenizeBody,
)
from engine.server.responses import json_response
from engine.server.service import Answer, Job, Service, collect, merge
from engine.server.streaming import EventStream, primed, unless_gone
from engine.server.values import as_stops

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.messages import CachedTokens, TokenLogprobs
    from engine.tokenizer import Tokenizer

__all__ = ["router"]

HEALTH_TIMEOUT_S = 20.0

router = APIRouter(tags=["native"])


class FinishInfo(msgspec.Struct, frozen=True):
    """Why a sequence ended: type is stop, length or abort."""

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET


class CachedSplit(msgspec.Struct, frozen=True):
    """Reused prompt tokens by tier, in SGLang's words."""

    device: int
    host: int
    storage: int


class MetaInfo(msgspec.Struct, frozen=True):
    """What there is to know of an answer besides the answer."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishInfo | None
    e2e_latency: float | UnsetType = UNSET  # seconds, once finished
    cached_tokens_details: CachedSplit | UnsetType = UNSET
    input_token_logprobs: list[tuple[float | None, int, str | None]] | UnsetType = UNSET
    input_top_logprobs: list[list[tuple[Any, ...]] | None] | UnsetType = UNSET
    normalized_prompt_logprob: float | UnsetType = UNSET  # mean over the prompt tokens that have one
    output_token_logprobs: list[tuple[float, int, str | None]] | UnsetType = UNSET
    output_top_logprobs: list[list[tuple[Any, ...]]] | UnsetType = UNSET


class NativeAnswer(msgspec.Struct, frozen=True):
    """One answer of /generate; `index` counts the sequences of a stream that has several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class _Order:
    """The sequences of one /generate request, those of a prompt next to each other."""

    def __init__(self, service: Service, body: GenerateBody, prompts: list[list[int]], routing_key: str) -> None:
        self.service = service
        self.body = body
        self.routing_key = body.routing_key or routing_key
        self.start_s = time.perf_counter()
        self.jobs = self._jobs(prompts)
        self.single = not body.is_batch and len(self.jobs) == 1

    def _jobs(self, prompts: list[list[int]]) -> list[Job]:
        """One job a sequence. Raises ApiError for more than can be queued, before any is made."""
        jobs = []
        self.service.check_room(sum(params.n for params in self.body.params))
        for index, (ids, params) in enumerate(zip(prompts, self.body.params, strict=True)):
            sampling = params.sampling(self.service.answer_budget(len(ids), params.max_new_tokens, param="input"))
            rid = self._rid(index, len(prompts))
            for sibling in range(params.n):
                name = rid if params.n == 1 else f"{rid}-{sibling}"
                jobs.append(self._job(name, ids, params, sampling, sibling, index))
        return jobs

    def _rid(self, index: int, count: int) -> str:
        given = self.body.rid
        if isinstance(given, list):
            return given[index] or uuid.uuid4().hex
        rid = given or uuid.uuid4().hex
        return rid if count == 1 else f"{rid}-{index}"

    def _job(self, rid: str, ids: list[int], params: NativeSampling, sampling: SamplingParams, sibling: int, index: int) -> Job:
        if sampling.seed is not None and sibling:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + sibling) & (2**63 - 1))
        body = self.body
        request = GenerateRequest(
            rid=rid,
            input_ids=ids,
            sampling=sampling,
            cache_salt=body.cache_salt or "",
            extra_key=body.extra_key or "",
            priority=body.priority or 0,
            routing_key=self.routing_key,
            top_logprobs=body.top(index),
            score_from=body.score_from(index),
        )
        return Job(request, as_stops(params.stop), params.skip_special_tokens, not params.no_stop_trim)

    def answer(self, index: int, answer: Answer) -> NativeAnswer:
        """Put one sequence into SGLang's shape, as far as it has come."""
        return NativeAnswer(
            answer.text, answer.token_ids, self._meta(self.jobs[index], answer), UNSET if self.single else index
        )

    def _meta(self, job: Job, answer: Answer) -> MetaInfo:
        by_tier = self.body.return_cached_tokens_details or self.service.config.enable_cache_report
        text = self.service.tokenizer if self.body.return_text_in_logprobs else None
        logprobs = answer.logprobs or []
        top = job.request.top_logprobs
        wanted = top is not None
        inputs = _input_logprobs(job.request, answer.prompt_logprobs or [], text)
        return MetaInfo(
            id=job.request.rid,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=len(answer.token_ids),
            cached_tokens=answer.cached.total,
            finish_reason=_finish_info(answer),
            e2e_latency=UNSET if answer.finish_reason is None else time.perf_counter() - self.start_s,
            cached_tokens_details=_split(answer.cached) if by_tier else UNSET,
            input_token_logprobs=inputs.tokens,
            input_top_logprobs=inputs.top,
            normalized_prompt_logprob=inputs.mean,
            output_token_logprobs=native_logprobs(answer.token_ids, logprobs, text) if wanted else UNSET,
            output_top_logprobs=native_top_logprobs(logprobs, text) if top else UNSET,
        )


class _InputLogprobs(NamedTuple):
    """What a meta_info says of a prompt's log-probabilities."""

    tokens: list[tuple[float | None, int, str | None]] | UnsetType = UNSET
    top: list[list[tuple[Any, ...]] | None] | UnsetType = UNSET
    mean: float | UnsetType = UNSET


def _input_logprobs(request: GenerateRequest, logprobs: list[TokenLogprobs], text: Tokenizer | None) -> _InputLogprobs:
    """Shape a prompt's log-probabilities; an empty list where only the answer's were asked for."""
    if request.top_logprobs is None:
        return _InputLogprobs()
    start = request.score_from
    if start is None:
        return _InputLogprobs([])
    tokens = native_input_logprobs(request.input_ids, start, logprobs, text)
    first: list[None] = [None] if start == 0 else []
    top = [*first, *native_top_logprobs(logprobs, text)] if request.top_logprobs else UNSET
    mean = sum(entry.logprob for entry in logprobs) / len(logprobs) if logprobs else 0.0
    return _InputLogprobs(tokens, top, mean)


def _finish_info(answer: Answer) -> FinishInfo | None:
    match answer.finish_reason:
        case None:
            return None
        case "length":
            return FinishInfo("length", length=len(answer.token_ids))
        case "stop":
            return FinishInfo("stop", matched=UNSET if answer.matched is None else answer.matched)
        case other:
            return FinishInfo(other)


def _split(cached: CachedTokens) -> CachedSplit:
    return CachedSplit(cached.device, cached.host, cached.disk)


@router.post("/generate")
async def generate(body: GenerateBody, request: Request, service: ServiceDep, routing_key: RoutingKey = "") -> Response:
    """Generate from text or token ids, one prompt or a batch, whole or as a stream of growing texts."""
    prompts = await service.encode_all(body.prompts, param="input")
    order = _Order(service, body, prompts, routing_key)
    service.admit(order.jobs)
    if body.stream:
        return EventStream(await unless_gone(request, primed(_events(order))))
    answers = await unless_gone(request, collect(service, order.jobs))
    shaped = [order.answer(index, answer) for index, answer in enumerate(answers)]
    if order.single:
        return json_response(shaped[0])
    return json_response(shaped)


async def _events(order: _Order) -> AsyncGenerator[bytes, None]:
    """Events of a stream: each carries the whole text so far, as SGLang's do."""
    answers = [Answer.empty() for _ in order.jobs]
    async with aclosing(merge(order.service, order.jobs)) as pieces:
        async for index, piece in pieces:
            answers[index].add(piece)
            yield msgspec.json.encode(order.answer(index, answers[index]))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: ServiceDep) -> Response:
    """Turn text into token ids."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    ids = await service.encode_all(texts, param="prompt")
    counts = [len(one) for one in ids]
    single = isinstance(body.prompt, str)
    return json_response(
        {
            "tokens": ids[0] if single else ids,
            "count": counts[0] if single else counts,
            "max_model_len": service.context_length,
        }
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: ServiceDep) -> Response:
    """Turn token ids into text."""
    batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists = (
        [item for item in body.tokens if isinstance(item, list)] if batch else [[i for i in body.tokens if isinstance(i, int)]]
    )
    texts = [await service.decode(ids, skip_special_tokens=body.skip_special_tokens, param="tokens") for ids in lists]
    return json_response({"text": texts if batch else texts[0]})


@router.get("/health")
async def health(service: ServiceDep) -> Response:
    """200 while the engine process is alive, else 503."""
    if not service.client.healthy:
        raise ApiError(503, "the engine is not running", code="engine_dead")
    return json_response({"status": "ok"})


@router.get("/health_generate")
async def health_generate(request: Request, service: ServiceDep) -> Response:
    """200 if the engine can generate a token now, else 503."""
    ids = [0]
    job = Job(GenerateRequest(f"health-{uuid.uuid4().hex}", ids, SamplingParams(max_new_tokens=1, temperature=0.0)))
    service.admit([job])
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await unless_gone(request, collect(service, [job]))
    except TimeoutError:
        raise ApiError(503, f"no token within {HEALTH_TIMEOUT_S:.0f} s") from None
    return json_response({"status": "ok"})


@router.get("/get_model_info")
async def get_model_info(service: ServiceDep) -> Response:
    """What model is served."""
    config = service.config
    return json_response(
        {
            "model_path": config.model_path,
            "tokenizer_path": config.model_path,
            "served_model_name": config.name,
            "is_generation": True,
            "context_length": service.context_length,
            "vocab_size": service.tokenizer.vocab_size,
            "has_chat_template": service.tokenizer.has_chat_template,
        }
    )


@router.get("/get_server_info")
async def get_server_info(service: ServiceDep) -> Response:
    """The effective configuration, and what the engine says of itself."""
    return json_response({**service.config.describe(), "engine": service.client.info, "in_flight": service.client.in_flight})


@router.post("/abort_request")
async def abort_request(body: AbortBody, service: ServiceDep) -> Response:
    """End a request by its id (with the sequences it has, if several), or all."""
    if body.abort_all:
        return json_response({"aborted": service.client.abort_all()})
    if not body.rid:
        raise ApiError(400, "give a rid, or abort_all", param="rid")
    return json_response({"aborted": service.client.abort_family(body.rid)})
