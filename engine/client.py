"""The server's side of the engine: starts its process, sends requests, hands each answer to whoever waits for it.

EngineError
├── EngineFailed     one request failed in the engine; has the HTTP status
├── EngineRefused    the engine refused the configuration or the model at start
└── EngineDead       the engine process is gone; nothing can be asked of it
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from engine.messages import (
    AbortRequest,
    CachedTokens,
    ControlReply,
    ControlRequest,
    EngineDown,
    EngineReady,
    RequestFailed,
    Shutdown,
    TokensOut,
    decode_to_server,
    encode,
)
from engine.pipes import LINGER_MS
from hicache.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from multiprocessing.context import SpawnProcess

    from engine.config import ServeConfig
    from engine.messages import CacheHint, GenerateRequest, ToEngine, ToServer

    Target = Callable[[ServeConfig, str, str], None]

__all__ = ["LOG_FORMAT", "EngineClient", "EngineDead", "EngineError", "EngineFailed", "EngineRefused"]

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FLUSH_GRACE_S = 30.0
"""How long a stopping engine may take to write its cache to disk, after the drain."""


class EngineError(HiCacheError):
    """The engine did not do what was asked."""


class EngineFailed(EngineError):
    """One request ended without an answer; `status` is an HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineRefused(EngineError):
    """The configuration or the model was refused at start; the message is for the user."""


class EngineDead(EngineError):
    """The engine process is gone."""


class _Waiter:
    """One request's answer on its way. `last` is what was heard of it last, for an answer that is cut off here."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[TokensOut | EngineError] = asyncio.Queue()
        self.last: TokensOut | None = None


class EngineClient:
    """Talks to one engine process from one event loop. Make it, `start` it, `shutdown` it; all calls from that loop's thread.

    target: what runs in the engine process, importable there; called with the configuration and the two pipe addresses.
    """

    def __init__(self, config: ServeConfig, target: Target) -> None:
        self._config = config
        self._target = target
        self._process: SpawnProcess | None = None
        self._waiters: dict[str, _Waiter] = {}
        self._controls: dict[str, asyncio.Future[Any]] = {}
        self._control_ids = itertools.count()
        self._death: EngineError | None = None
        self._info: dict[str, Any] = {}

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready."""
        return self._info

    @property
    def healthy(self) -> bool:
        """Whether requests can be sent."""
        return self._process is not None and self._death is None

    @property
    def in_flight(self) -> int:
        """Sequences that wait for tokens."""
        return len(self._waiters)

    def knows(self, rid: str) -> bool:
        """Whether a request with this id is in flight."""
        return rid in self._waiters

    async def start(self) -> dict[str, Any]:
        """Start the process and wait until it takes requests; returns its info. Raises EngineRefused or EngineDead."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._down: asyncio.Future[None] = loop.create_future()
        self._folder = tempfile.mkdtemp(prefix="hicache-")
        to_engine, to_server = (f"ipc://{self._folder}/{name}" for name in ("to-engine", "to-server"))
        self._context = zmq.Context(io_threads=1)
        self._out = self._bind(zmq.PUSH, to_engine)
        self._in = zmq.asyncio.Socket.from_socket(self._bind(zmq.PULL, to_server))
        spawn = multiprocessing.get_context("spawn")
        args = (self._target, self._config, to_engine, to_server)
        self._process = spawn.Process(target=_engine_main, args=args, name="hicache-engine", daemon=True)
        self._process.start()
        self._reader = loop.create_task(self._read(), name="engine-reader")
        loop.add_reader(self._process.sentinel, self._on_exit)
        try:
            self._info = await self._ready
            await self._connected()
        except BaseException:
            await self.shutdown(0.0)
            raise
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokensOut, None]:
        """Send a request and yield its tokens until the finish. A consumer that leaves before (cancel, aclose) aborts it.

        Raises EngineFailed for this request's failure, EngineDead if the engine is gone.
        """
        assert request.rid not in self._waiters, f"request id {request.rid} is in flight already"
        waiter = self._waiters[request.rid] = _Waiter()
        finished = False
        try:
            self._send(request)
            while not finished:
                item = await waiter.queue.get()
                finished = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            self._forget(request.rid, waiter, finished=finished)

    def abort(self, rid: str) -> bool:
        """End a request with reason "abort"; its consumer gets a last message. False if there is no such request."""
        waiter = self._waiters.get(rid)
        if waiter is None:
            return False
        with contextlib.suppress(EngineDead):
            self._send(AbortRequest(rid))
        last = waiter.last or TokensOut(rid, [], prompt_tokens=0, cached=CachedTokens())
        cut_off = TokensOut(rid, [], last.prompt_tokens, last.cached, finish_reason="abort")
        waiter.queue.put_nowait(cut_off)
        del self._waiters[rid]
        return True

    def abort_family(self, rid: str) -> int:
        """Abort a request, and those named after it (`rid-0`, `rid-1`, …); returns how many."""
        return sum(self.abort(name) for name in list(self._waiters) if name == rid or name.startswith(f"{rid}-"))

    def abort_all(self) -> int:
        """Abort every request; returns how many."""
        return sum(self.abort(rid) for rid in list(self._waiters))

    async def control(self, op: str, args: dict[str, Any] | None = None) -> Any:
        """Ask the loop for something between two steps. Raises EngineFailed or EngineDead."""
        return await self._ask(lambda id_: ControlRequest(id_, op, args or {}))

    async def hint(self, hint: CacheHint) -> Any:
        """Give the cache a hint, whose id is set here. Raises EngineFailed or EngineDead."""
        return await self._ask(lambda id_: msgspec.structs.replace(hint, id=id_))

    async def _ask(self, message: Callable[[str], ToEngine]) -> Any:
        id_ = f"c{next(self._control_ids)}"
        future = self._controls[id_] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(id_))
            return await future
        finally:
            self._controls.pop(id_, None)

    async def shutdown(self, drain_s: float) -> None:
        """Let the engine finish for `drain_s`, write its cache down and exit; kill it if it takes too long. Idempotent."""
        process = self._process
        if process is None:
            return
        if self._death is None:
            with contextlib.suppress(EngineDead):
                self._send(Shutdown(drain_s))
        asked_while_starting = not self._ready.done()
        grace_s = 2.0 if asked_while_starting else drain_s + FLUSH_GRACE_S
        done, _ = await asyncio.wait({self._down}, timeout=grace_s)
        if not done:
            log.warning("the engine did not stop within %.0f s and is killed", grace_s)
            process.kill()
            await self._down
        self._close()

    async def _connected(self) -> None:
        """Wait for the pipe to the engine. The two pipes connect on their own, so "ready" may come by the other one first."""
        while not self._out.poll(0, zmq.POLLOUT):
            if self._death is not None:
                raise EngineDead(str(self._death))
            await asyncio.sleep(0.001)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.bind(address)
        return socket

    def _send(self, message: ToEngine) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))
        try:
            self._out.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nobody at the other end: it is not up yet, or just gone
            raise EngineDead("the engine is not connected") from None

    def _forget(self, rid: str, waiter: _Waiter, *, finished: bool) -> None:
        if self._waiters.get(rid) is not waiter:
            return
        del self._waiters[rid]
        if not finished:
            with contextlib.suppress(EngineDead):
                self._send(AbortRequest(rid))

    async def _read(self) -> None:
        while True:
            for part in await self._in.recv_multipart():
                self._dispatch(decode_to_server(part))

    def _dispatch(self, message: ToServer) -> None:
        match message:
            case TokensOut(rid=rid):
                if waiter := self._waiters.get(rid):
                    waiter.last = message
                    waiter.queue.put_nowait(message)
            case RequestFailed(rid=rid):
                if waiter := self._waiters.get(rid):
                    waiter.queue.put_nowait(EngineFailed(message.message, message.status))
            case ControlReply(id=id_):
                future = self._controls.get(id_)
                if future is not None and not future.done():
                    if message.error is None:
                        future.set_result(message.value)
                    else:
                        future.set_exception(EngineFailed(message.error, message.status))
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message.info)
            case EngineDown():
                self._on_down(message)

    def _on_down(self, message: EngineDown) -> None:
        reason = message.error or "the engine has stopped"
        self._die(EngineRefused(reason) if message.refused else EngineDead(reason))

    def _on_exit(self) -> None:
        """The process has ended: hear its last words, then let everybody know."""
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._ending = asyncio.get_running_loop().create_task(self._after_exit(), name="engine-exit")

    async def _after_exit(self) -> None:
        assert self._process is not None
        with contextlib.suppress(asyncio.TimeoutError):  # what was sent before the end may still be on its way here
            await asyncio.wait_for(asyncio.shield(self._reader), timeout=0.1)
        self._process.join()
        self._die(EngineDead(f"the engine process ended with code {self._process.exitcode}"))
        if not self._down.done():
            self._down.set_result(None)

    def _die(self, death: EngineError) -> None:
        if self._death is not None:
            return
        self._death = death
        if not self._ready.done():
            self._ready.set_exception(death)
        for waiter in self._waiters.values():
            waiter.queue.put_nowait(EngineDead(str(death)))
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineDead(str(death)))

    def _close(self) -> None:
        self._reader.cancel()
        self._in.close()
        self._out.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process = None


def _engine_main(target: Target, config: ServeConfig, to_engine: str, to_server: str) -> None:
    """Run the engine in its process. Only a Shutdown stops it; signals are the server's to handle, and it sends one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
    target(config, to_engine, to_server)
