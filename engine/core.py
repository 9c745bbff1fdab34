"""The engine without its process: model, cache and scheduler put together, and one step of the loop."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from engine.attention.choose import make_backend
from engine.config import load_config
from engine.grammar import Grammars
from engine.graphs import CudaCapture, graph_sizes
from engine.kv_events import EventsConfig, KvEventPublisher
from engine.messages import CachedTokens, RequestFailed, TokensOut
from engine.metrics import EngineMetrics
from engine.model import load_model
from engine.request import Request
from engine.runner import ModelRunner
from engine.sampler import Sampler, SamplingState
from engine.schedule_policy import make_policy
from engine.scheduler import Limits, Scheduler
from engine.scoring import score_prompts
from engine.sizing import pool_sizes
from engine.store_admin import StoreAdmin
from hicache.cache import HiCache
from hicache.config import CacheConfig
from hicache.errors import ConfigError, RequestRefused
from hicache.events import PageEvents
from hicache.keys import Namespace
from hicache.pools import DevicePool, HostPool
from hicache.transfer.choose import copier_maker
from storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor

    from engine.config import ServeConfig
    from engine.grammar import GrammarState
    from engine.messages import CacheHint, FinishReason, GenerateRequest, PinHint, TokenLogprobs, ToServer
    from engine.model import LoadedModel
    from engine.scheduler import Step
    from hicache.geometry import PageGeometry
    from hicache.lease import Lease
    from storage.base import PageStore

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)

ATTACHABLE = frozenset(f"hicache_storage_{name}" for name in ("backend", "backend_extra_config", "dir", "size", "sync"))
"""Flags that may differ when a store is attached to a running server."""


class EngineCore:
    """Everything between a request message and its token messages. One thread; closes what it opened."""

    def __init__(self, config: ServeConfig, model: LoadedModel | None = None) -> None:
        """Load the model if none is given, make the pools, open the store. Raises ConfigError, ModelRefused or StoreError."""
        self._config = config
        if model is None:
            model = load_model(config.model_path, config.dtype, config.device, config.context_length)
        self._model = model
        self._geometry = model.geometry(config.page_size, config.kv_cache_dtype)
        sizes = pool_sizes(config, model, self._geometry)
        self._fingerprint = model.fingerprint(self._geometry)
        uses_graphs = model.device.type == "cuda" and not config.disable_cuda_graph
        device = DevicePool(sizes.device_pages + uses_graphs, self._geometry.page_bytes, model.device)
        host = HostPool(sizes.host_pages, self._geometry.page_bytes, model.device) if sizes.host_pages else None
        self._attention = make_backend(config.attention_backend, device.data, self._geometry, model.layers, model.dtype)
        self._runner = ModelRunner(model, self._attention)
        if uses_graphs:  # the pool's last page is beyond what the cache hands out
            largest = config.cuda_graph_max_bs or config.max_running_requests
            max_pages = self._geometry.pages(model.context_length)
            self._runner.capture_decodes(graph_sizes(largest), sizes.device_pages, max_pages, CudaCapture())
        self._sampler = Sampler()
        self._grammars = Grammars(model.tokenizer, model.eos_token_ids)
        published = EventsConfig.parse(config.kv_events_config)
        self._publisher = None if published is None else KvEventPublisher(published, self._geometry.page_size)
        self._events = None if published is None else PageEvents()
        store = _open_store(config)
        self.cache = HiCache(
            _cache_config(config, sizes.device_pages, sizes.host_pages),
            self._geometry,
            make_copier=None if host is None else copier_maker(device, host, self._geometry.bounds, config.hicache_io_backend),
            host=host,
            store=store,
            secret=os.urandom(32),
            labels={"model": config.name, "fingerprint": self._fingerprint},
            events=self._events,
        )
        self.store_admin = StoreAdmin(self.cache, store, self._reopen_store)
        limits = Limits(config.max_running_requests, config.chunked_prefill_size)
        self._scheduler = Scheduler(
            self.cache, make_policy(config.schedule_policy, self.cache, config.schedule_max_wait), limits
        )
        self._metrics = EngineMetrics(self.cache.metrics.registry, self._scheduler)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0

    # ---- requests

    def add(self, message: GenerateRequest) -> RequestFailed | None:
        """Queue a request; a message back if it can't be served at all. One with a grammar waits for that first."""
        try:
            self._check(message)
            if message.sampling.grammar is not None:
                self._grammars.submit(message)
            else:
                self._queue(message, None)
        except RequestRefused as error:
            return RequestFailed(message.rid, str(error), 400)
        return None

    def _queue(self, message: GenerateRequest, grammar: GrammarState | None) -> None:
        """Give a request to the scheduler. Raises RequestRefused."""
        state = self._sampling_state(message, grammar)
        prompt = len(message.input_ids)
        pool_tokens = self.cache.config.device_pages * self._geometry.page_size
        self._arrivals += 1
        request = Request(
            message=message,
            lease=self._open_lease(message),
            limit=min(prompt + message.sampling.max_new_tokens, self._model.context_length, pool_tokens),
            serial=self._arrivals,
            sampling_state=state,
            prompt_logprobs=None if message.score_from is None else [],
        )
        self._requests[message.rid] = request
        self._scheduler.add(request)
        self._metrics.prompt_tokens.inc(prompt)

    def _queue_compiled(self) -> list[ToServer]:
        """Queue the requests whose grammars are compiled by now; returns the refusals of those that have a bad one."""
        refused: list[ToServer] = []
        for message, grammar, error in self._grammars.take_ready():
            if error is not None:
                refused.append(RequestFailed(message.rid, error, 400))
                continue
            try:
                self._queue(message, grammar)
            except RequestRefused as reason:
                refused.append(RequestFailed(message.rid, str(reason), 400))
        return refused

    def _open_lease(self, message: GenerateRequest) -> Lease:
        limit = sys.maxsize if message.score_from is None else message.score_from
        return self.cache.open(message.input_ids, self._namespace(message), message.priority, limit)

    def _namespace(self, message: GenerateRequest) -> Namespace:
        return Namespace(self._fingerprint, message.lora, message.cache_salt, message.extra_key)

    def abort(self, rid: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._grammars.discard(rid)
        if request := self._requests.pop(rid, None):
            self._scheduler.remove(request)

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return self._scheduler.idle and not self._grammars

    def fail_all(self, reason: str, status: int) -> list[ToServer]:
        """End every request with an error."""
        waiting: list[ToServer] = [RequestFailed(rid, reason, status) for rid in self._grammars.discard_all()]
        return waiting + [self._fail(request, reason, status) for request in list(self._requests.values())]

    # ---- a step

    def step(self) -> list[ToServer] | None:
        """Compute one batch and return what it brought; None if there was nothing to compute."""
        refused = self._queue_compiled() if self._grammars else []
        out = self._compute()
        if self._publisher is not None and self._events is not None:
            self._publisher.publish(self._events.take())
        return (refused or None) if out is None else refused + out

    def _compute(self) -> list[ToServer] | None:
        """Compute one batch; None if there was nothing to compute.

        An exception fails the requests of this step, no others; one before a step was chosen fails all that run.
        """
        failing = self._scheduler.running
        try:
            self.cache.poll()
            step = self._scheduler.schedule()
            if step is None:
                return None
            failing = step.requests
            return self._run(step)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(failing))
            reason = f"internal error in the engine: {type(error).__name__}"
            return [self._fail(request, reason, 500) for request in list(failing) if request.rid in self._requests]

    def _run(self, step: Step) -> list[ToServer]:
        logits = score_prompts(step, self._forward(step))
        rows = self._scheduler.computed(step)
        out: list[ToServer] = []
        for row in [row for row in rows if step.requests[row].message.sampling.max_new_tokens == 0]:
            rows.remove(row)
            out.append(self._out(step.requests[row], [], None, "length"))
        if not rows:
            return out
        requests = [step.requests[row] for row in rows]
        chosen = logits if len(rows) == len(step.requests) else logits[rows]
        sampled = self._sampler.sample(chosen, [request.sampling_state for request in requests])
        for request, token, logprobs in zip(requests, sampled.token_ids, sampled.logprobs, strict=True):
            out.append(self._advance(request, token, logprobs))
        return out

    def _forward(self, step: Step) -> Tensor:
        begun_s = time.perf_counter()
        logits = self._runner.forward(step.batch)
        self._runner.wait()  # else a GPU's step would cost what its launch does
        if not step.batch.gates:  # else it was not computing alone that took so long
            chunks = [(chunk.start, len(chunk.tokens)) for chunk in step.batch.chunks]
            self.cache.observe_compute(chunks, time.perf_counter() - begun_s)
        return logits

    def _advance(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> ToServer:
        """Append a sampled token, and end the request if it was its last, or if its grammar gave up."""
        grammar = request.sampling_state.grammar
        if grammar is not None and (error := grammar.error) is not None:
            return self._fail(request, f"the answer can't follow its grammar any further: {error}", 400)
        request.lease.append(token)
        request.generated += 1
        self._metrics.generated_tokens.inc()
        return self._out(request, [token], logprobs, self._finish_reason(request, token))

    def _out(
        self, request: Request, token_ids: list[int], logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> TokensOut:
        """Make a request's message, the prompt's log-probabilities with its first; forget a request that has ended."""
        if request.generated <= 1 and request.message.pin is not None:
            self._pin(request.message, request.message.pin)
        if reason is not None:
            self._scheduler.remove(request)
            del self._requests[request.rid]
        return TokensOut(
            rid=request.rid,
            token_ids=token_ids,
            prompt_tokens=request.lease.prompt_tokens,
            cached=CachedTokens(*request.lease.hits),
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=reason,
            prompt_logprobs=request.prompt_logprobs if request.generated <= 1 else None,
        )

    def _pin(self, message: GenerateRequest, pin: PinHint) -> None:
        """Keep the beginning of a prompt that has been computed."""
        self.cache.hints.pin(message.input_ids[: pin.tokens], self._namespace(message), pin.ttl_s)

    def hint(self, hint: CacheHint) -> dict[str, int]:
        """Follow a hint about a prefix; returns its tokens, and how many of them are cached, pinned or were demoted."""
        tokens, hints = hint.input_ids, self.cache.hints
        namespace = Namespace(self._fingerprint, "", hint.cache_salt, hint.extra_key)
        match hint.op:
            case "prefetch":
                done = {"cached_tokens": hints.prefetch(tokens, namespace)}
            case "pin":
                done = {"pinned_tokens": hints.pin(tokens, namespace, hint.ttl_s)}
            case "demote":
                done = {"demoted_tokens": hints.demote(tokens, namespace)}
        return {"tokens": len(tokens), **done}

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling, grammar = request.message.sampling, request.sampling_state.grammar
        if grammar is not None and grammar.finished:
            return "stop"
        if token in sampling.stop_token_ids or (token in self._model.eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if request.num_tokens >= request.limit else None

    def _check(self, message: GenerateRequest) -> None:
        """Raise RequestRefused for what can't be served at all."""
        prompt, model = len(message.input_ids), self._model
        pool_tokens = self.cache.config.device_pages * self._geometry.page_size
        if message.rid in self._requests or message.rid in self._grammars:
            raise RequestRefused(f"the request id {message.rid} is in use")
        if prompt < 1:
            raise RequestRefused("the prompt is empty")
        if message.sampling.max_new_tokens < 0:
            raise RequestRefused("no fewer than 0 tokens can be asked for")
        if message.score_from is not None and not 0 <= message.score_from < prompt:
            raise RequestRefused(f"log-probabilities can't begin at {message.score_from} in a prompt of {prompt} tokens")
        if prompt >= model.context_length:
            raise RequestRefused(
                f"the prompt has {prompt} tokens; with the answer, {model.context_length} fit into the context"
            )
        if prompt >= pool_tokens:
            raise RequestRefused(f"the prompt has {prompt} tokens; with the answer, {pool_tokens} fit into the device pool")
        if not all(0 <= token < model.vocab_size for token in message.input_ids):
            raise RequestRefused(f"token ids must be in [0, {model.vocab_size})")
        if message.lora:
            raise RequestRefused("this server has no LoRA adapters")

    def _sampling_state(self, message: GenerateRequest, grammar: GrammarState | None) -> SamplingState:
        model = self._model
        return SamplingState(
            message.sampling, message.input_ids, model.eos_token_ids, model.vocab_size, message.top_logprobs, grammar
        )

    def _fail(self, request: Request, reason: str, status: int) -> RequestFailed:
        self._scheduler.remove(request)
        self._requests.pop(request.rid, None)
        return RequestFailed(request.rid, reason, status)

    # ---- looking and closing

    def info(self) -> dict[str, Any]:
        """What runs, for the start-up message and `/get_server_info`."""
        geometry, config = self._geometry, self.cache.config
        tiers: dict[str, dict[str, Any]] = {"device": _size(config.device_pages, geometry)}
        if config.host_pages:
            tiers["host"] = _size(config.host_pages, geometry)
        if self.store_admin.store is not None:
            tiers["disk"] = {"bytes": self._config.hicache_storage_size_bytes, **_place(self._config)}
        return {
            "model": self._config.name,
            "architecture": type(self._model.hf).__name__,
            "device": str(self._model.device),
            "attention_backend": self._attention.name,
            "cuda_graphs": self._runner.has_graphs,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "kv_dtype": geometry.dtype,
            "context_length": self._model.context_length,
            "page_size": geometry.page_size,
            "tiers": tiers,
            "write_policy": config.write_policy,
            "prefetch_policy": config.prefetch.policy,
            "eviction_policy": config.eviction,
            "schedule_policy": self._config.schedule_policy,
            "vocab_size": self._model.vocab_size,
            "eos_token_ids": sorted(self._model.eos_token_ids),
            "fingerprint": self._fingerprint,
        }

    def close(self, persist_s: float) -> None:
        """Write down to the store what it lacks, for at most `persist_s` seconds, and release everything."""
        self._grammars.close()
        self.cache.persist(persist_s)
        self.cache.close()
        self.store_admin.close()
        if self._publisher is not None:
            self._publisher.close()

    def _reopen_store(self, flags: Mapping[str, Any]) -> PageStore | None:
        """Open the store that the server's flags, with some of them replaced, describe. Any thread."""
        if unknown := set(flags) - ATTACHABLE:
            raise ConfigError(f"not to be set when a storage backend is attached: {', '.join(sorted(unknown))}")
        replaced = load_config({**msgspec.structs.asdict(self._config), **flags})
        if replaced.hicache_storage_backend == "none":
            raise ConfigError("hicache_storage_backend must name a backend")
        store = _open_store(replaced)
        self._config = replaced
        return store


def _cache_config(config: ServeConfig, device_pages: int, host_pages: int) -> CacheConfig:
    return CacheConfig(
        device_pages=device_pages,
        host_pages=host_pages,
        reuse=not config.disable_radix_cache,
        write_policy=config.hicache_write_policy,
        eviction=config.radix_eviction_policy,
        storage_admission=config.hicache_storage_admission,
        prefetch=config.prefetch,
        hash_algo=config.hicache_hash_algo,
    )


def _open_store(config: ServeConfig) -> PageStore | None:
    if config.hicache_storage_backend == "none":
        return None
    try:
        return open_store(
            config.hicache_storage_backend,
            config.storage_dir,
            config.hicache_storage_size_bytes,
            config.hicache_storage_sync,
            config.store_extra,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _size(pages: int, geometry: PageGeometry) -> dict[str, int]:
    return {"tokens": pages * geometry.page_size, "bytes": pages * geometry.page_bytes}


def _place(config: ServeConfig) -> dict[str, str]:
    return {"path": str(config.storage_dir)} if config.hicache_storage_backend == "lmdb" else {}
