"""Tending the store of a running engine: look, clear, detach, attach. What blocks runs on a thread of its own."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.messages import ControlReply
from hicache.errors import ConfigError, HiCacheError
from storage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.messages import ControlRequest
    from hicache.cache import HiCache
    from storage.base import PageStore, StoreStats

__all__ = ["StoreAdmin"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, frozen=True, slots=True)
class _Job:
    """A request under way: what runs on the thread, and what is done with its outcome here."""

    id: str
    op: str  # "" if it was refused
    future: Future[Any]
    finish: Callable[[Any], Any]


class StoreAdmin:
    """Owns the engine's store and carries out one request about it after the other. Owner thread, but for what blocks."""

    def __init__(
        self, cache: HiCache, store: PageStore | None, open_store: Callable[[Mapping[str, Any]], PageStore | None]
    ) -> None:
        """`store`: attached to the cache already, or None. `open_store`: opens one from a request's flags; may block."""
        self._cache = cache
        self.store = store
        self._open_store = open_store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hicache-store-admin")
        self._jobs: list[_Job] = []

    def begin(self, message: ControlRequest) -> None:
        """Start on a request; `poll` brings the answer."""
        try:
            work, finish = self._plan(message.op, message.args)
        except (HiCacheError, StoreError) as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._jobs.append(_Job(message.id, "", failed, finish=lambda value: value))
            return
        self._jobs.append(_Job(message.id, message.op, self._thread.submit(work), finish))

    def poll(self) -> list[ControlReply]:
        """Answers to requests that are done by now."""
        done = [job for job in self._jobs if job.future.done()]
        for job in done:  # each is asked once: one that ends meanwhile stays for the next call
            self._jobs.remove(job)
        return [self._answer(job) for job in done]

    @property
    def busy(self) -> bool:
        """Whether a request is being carried out."""
        return bool(self._jobs)

    @property
    def _changing(self) -> bool:
        """Whether a store is just being attached or detached."""
        return any(job.op in ("storage_attach", "storage_detach") for job in self._jobs)

    def close(self) -> None:
        """Close the store, once the cache is closed."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.store is not None:
            _close(self.store)

    def _answer(self, job: _Job) -> ControlReply:
        try:
            return ControlReply(job.id, value=job.finish(job.future.result()))
        except (HiCacheError, StoreError, ValueError) as error:
            return ControlReply(job.id, error=str(error), status=400)
        except Exception as error:
            logger.exception("a request about the store failed")
            return ControlReply(job.id, error=f"{type(error).__name__}: {error}")

    def _plan(self, op: str, args: Mapping[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """What to do on the thread, and what with its outcome here."""
        if op == "storage_attach":
            return self._plan_attach(args)
        store = self.store
        if store is None:
            raise ConfigError("no storage backend is attached")
        match op:
            case "storage_info":
                return store.stats, lambda stats: _shown(stats, store)
            case "storage_clear":
                return store.clear, self._cleared
            case "storage_detach":
                return self._plan_detach(store)
        raise ConfigError(f"unknown request {op}")

    def _plan_attach(self, args: Mapping[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        if self.store is not None or self._changing:
            raise ConfigError("a storage backend is attached already; detach it first")
        self._cache.check_attachable()

        def attach(store: PageStore | None) -> dict[str, Any]:
            assert store is not None
            self._cache.attach(store)
            self.store = store
            return {"attached": True}

        return lambda: self._open_store(args), attach

    def _plan_detach(self, store: PageStore) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        worker = self._cache.detach()
        self.store = None

        def close() -> bool:
            ended = worker.close()
            return _close(store) and ended

        return close, lambda ended: {"detached": True, "clean": ended}

    def _cleared(self, records: int) -> dict[str, Any]:
        self._cache.forget_stored()
        return {"cleared_pages": records}


def _close(store: PageStore) -> bool:
    """Close a store; whether it ended clean."""
    try:
        store.close()
    except StoreError as error:
        logger.warning("the store was not closed clean: %s", error)
        return False
    return True


def _shown(stats: StoreStats, store: PageStore) -> dict[str, Any]:
    """A store's totals as JSON."""
    out: dict[str, Any] = {
        "pages": stats.pages,
        "bytes": stats.bytes,
        "capacity_bytes": stats.capacity_bytes,
        "evicted_pages": stats.evicted_pages,
        "errors": dict(stats.errors),
        "namespaces": [
            {**each.info.labels, "tenant": each.info.tenant, "pages": each.pages, "tokens": each.tokens, "bytes": each.bytes}
            for each in stats.namespaces
        ],
    }
    injected = getattr(store, "injected", None)
    if injected is not None:
        out["injected_faults"] = dict(injected)
    return out
