"""The engine process: messages in, steps, messages out. It never waits for the HTTP server."""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING

from prometheus_client import generate_latest

from engine.core import EngineCore
from engine.messages import (
    AbortRequest,
    CacheHint,
    ControlReply,
    ControlRequest,
    EngineDown,
    EngineReady,
    GenerateRequest,
    RequestFailed,
    Shutdown,
)
from engine.pipes import EnginePipes
from hicache.errors import ConfigError, ModelRefused
from storage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from engine.config import ServeConfig
    from engine.messages import ToEngine

__all__ = ["EngineLoop", "run_engine"]

logger = logging.getLogger(__name__)

PERSIST_S = 10.0
"""How long a shutdown may take to write down what the store lacks."""
COPY_POLL_S, IDLE_POLL_S = 0.002, 1.0


def run_engine(config: ServeConfig, to_engine: str, to_server: str) -> None:
    """Serve the pipes at these addresses until told to stop (the target of the engine process).

    Signals are the server's business: it sends a Shutdown when it wants the engine to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with EnginePipes(to_engine, to_server) as pipes:
        try:
            core = EngineCore(config)
        except (ConfigError, ModelRefused, StoreError) as error:
            pipes.send(EngineDown(error=str(error), refused=True))
            return
        except Exception as error:
            logger.exception("the engine could not start")
            pipes.send(EngineDown(error=f"{type(error).__name__}: {error}"))
            return
        pipes.send(EngineReady(core.info()))
        EngineLoop(core, pipes).run()


class EngineLoop:
    """Alternates between messages and steps until a Shutdown has been carried out."""

    def __init__(self, core: EngineCore, pipes: EnginePipes) -> None:
        self._core = core
        self._pipes = pipes
        self._ends_at: float | None = None  # monotonic; set by a Shutdown

    def run(self) -> None:
        """Run until shut down; answers with EngineDown."""
        while not self._over():
            for message in self._pipes.receive():
                self._take(message)
            for answer in self._core.store_admin.poll():
                self._pipes.send(answer)
            out = self._core.step()
            if out is None:
                self._rest()
                continue
            for reply in out:
                self._pipes.send(reply)
        for reply in self._core.fail_all("the server is shutting down", 503):
            self._pipes.send(reply)
        self._core.close(PERSIST_S)
        self._pipes.send(EngineDown())

    def _over(self) -> bool:
        return self._ends_at is not None and (self._core.idle or time.monotonic() >= self._ends_at)

    def _rest(self) -> None:
        """Nothing to compute: wait for an operation to end, if a request may wait for that, or for a message."""
        if self._core.cache.in_flight and not self._core.idle:
            self._core.cache.wait(COPY_POLL_S)
        elif self._core.cache.in_flight or self._core.store_admin.busy or not self._core.idle:
            self._pipes.wait(COPY_POLL_S)
        else:
            self._pipes.wait(IDLE_POLL_S if self._ends_at is None else 0.0)

    def _take(self, message: ToEngine) -> None:
        match message:
            case GenerateRequest():
                if self._ends_at is not None:
                    self._pipes.send(RequestFailed(message.rid, "the server is shutting down", 503))
                elif (refusal := self._core.add(message)) is not None:
                    self._pipes.send(refusal)
            case AbortRequest(rid=rid):
                self._core.abort(rid)
            case ControlRequest(op=op) if op.startswith("storage_"):
                self._core.store_admin.begin(message)
            case ControlRequest():
                self._pipes.send(self._control(message.id, lambda: self._answer(message.op)))
            case CacheHint():
                self._pipes.send(self._control(message.id, lambda: self._core.hint(message)))
            case Shutdown(drain_s=drain_s):
                self._ends_at = time.monotonic() + drain_s

    def _control(self, id_: str, answer: Callable[[], Any]) -> ControlReply:
        """Answer a request about the cache; one that fails is answered too, and the loop goes on."""
        try:
            return ControlReply(id_, value=answer())
        except Exception as error:
            logger.exception("control request %s failed", id_)
            return ControlReply(id_, error=f"{type(error).__name__}: {error}")

    def _answer(self, op: str) -> Any:
        cache = self._core.cache
        match op:
            case "metrics":
                return generate_latest(cache.metrics.registry).decode()
            case "stats":
                return cache.stats()
            case "flush":
                return {"flushed_pages": cache.flush()}
            case "info":
                return self._core.info()
        raise ValueError(f"unknown control request {op}")
